"""Draft models with a tokenizer of their own."""
