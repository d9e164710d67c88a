"""Sequences, batches, and the engine that users hold."""
