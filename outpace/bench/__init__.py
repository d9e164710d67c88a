"""Paired measurements."""
