"""One tree of a lookup and a trained head."""
