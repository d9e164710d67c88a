"""GGUF files: metadata, tokenizers, and weights as stored."""
