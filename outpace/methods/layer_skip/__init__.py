"""The method layer_skip."""
