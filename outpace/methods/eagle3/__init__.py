"""The method eagle3."""
