"""Targets: models that score many rows in one pass."""
