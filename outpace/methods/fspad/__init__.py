"""FSPAD: feature sampling and partial alignment on the EAGLE network; reconstructed."""
