"""The method cross_vocabulary."""
