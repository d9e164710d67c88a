"""Keys and values of committed text, and of guesses."""
