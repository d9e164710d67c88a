"""Models of transformers as targets."""
