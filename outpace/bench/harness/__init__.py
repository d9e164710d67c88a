"""lm-evaluation-harness on our engine: the model that it asks, tasks from files, scores side by side."""
