"""Guesses from text."""
