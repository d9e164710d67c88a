"""Guesses from another language model."""
