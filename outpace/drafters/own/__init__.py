"""Drafters made of the target's own layers."""
