"""Drafters that read the target's own features."""
