"""Blocks of guesses in one pass: DFlash, DSpark and JetSpec."""
