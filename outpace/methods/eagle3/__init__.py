"""EAGLE heads: one decoder layer over features of the target; checkpoints of EAGLE-1 to EAGLE-3."""
