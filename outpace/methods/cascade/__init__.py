"""A draft model that is itself drafted for, and cheaper drafters behind it."""
