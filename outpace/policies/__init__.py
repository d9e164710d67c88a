"""Who drafts, and how much."""
