"""The target's first layers as a drafter, through its own head or with Kangaroo's adapter."""
