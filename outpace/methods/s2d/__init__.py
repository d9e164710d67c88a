"""The method s2d."""
