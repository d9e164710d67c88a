"""Recurrent drafters: one hidden state of the target, one state per node of the tree."""
