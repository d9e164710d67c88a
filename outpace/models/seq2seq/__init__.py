"""Encoder-decoder models as targets: T5, BART and Marian."""
