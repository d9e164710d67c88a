"""Everything that may guess the next tokens."""
