"""Sorted exits of the target as drafters, and a classifier that stops or goes deeper."""
