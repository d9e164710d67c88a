"""Which guesses are kept, and what the target adds."""
