"""The method grammar."""
