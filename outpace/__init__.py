"""outpace: the same text from your language model, sooner."""
