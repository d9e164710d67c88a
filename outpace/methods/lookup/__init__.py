"""The method lookup."""
