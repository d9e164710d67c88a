"""Prompt tokens that ride in the target's pass, and guess (parallel prompt decoding)."""
