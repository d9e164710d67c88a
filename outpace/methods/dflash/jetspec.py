"""Jetspec: a block whose rows see those before them alone, and a tree of its likeliest paths.

The tree takes the nodes whose paths have the largest sums of log-probabilities. All nodes of a
depth have the same children, since no row reads a guess. A causal block knows how far away it guesses,
and nothing of a branch. At T > 0 every parent draws children of its own from its row's law, which is
recorded. A token is never taken for its score and judged as a draw.

Paper: JetSpec, arXiv:2606.18394; the best-first order: DDTree, as its repository has it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from outpace.methods.dflash.drafter import Dflash


class Jetspec(Dflash):
    """Drafts with a block whose rows see the rows before them alone."""

    method: ClassVar[str] = "jetspec"
    traits = replace(Dflash.traits, default_nodes=8, default_tree="dynamic")
