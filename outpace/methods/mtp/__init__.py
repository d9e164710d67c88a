"""Multi-token prediction: whole layers on one trunk, side by side or one behind the other."""
