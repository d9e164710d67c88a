"""Guesses from text that is there already: the prompt, the answer, a store, a table."""
