"""The target's outer layers and trained masks: several guesses in one short pass."""
