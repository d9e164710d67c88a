"""What the distributions, the costs and the text say: for reports, not for the hot path."""
