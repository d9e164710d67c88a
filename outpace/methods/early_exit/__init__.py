"""The method early_exit."""
