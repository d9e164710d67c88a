"""Several drafters at once, and of their guesses the likeliest in one tree."""
