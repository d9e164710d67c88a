"""The method ouroboros."""
