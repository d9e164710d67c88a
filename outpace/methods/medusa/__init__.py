"""Heads on the last hidden state: Medusa, and Hydra, whose heads read the guesses before them."""
