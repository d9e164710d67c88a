"""Guesses where the form of an answer leaves no choice."""
