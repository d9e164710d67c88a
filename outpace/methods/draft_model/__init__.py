"""A smaller language model with the tokenizer of the target, and heads that foresee acceptance."""
