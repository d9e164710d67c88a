"""A draft model that learns from what a server refuses."""
