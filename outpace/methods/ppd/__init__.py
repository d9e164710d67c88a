"""The method ppd."""
