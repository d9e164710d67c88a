"""The method select."""
