"""Seeing every outcome of a method while an engine runs it: draft, scores and verdict."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from outpace.drafters.base import ExpandingDrafter
from outpace.engine.method import Method
from outpace.tree.growth import Branch
from outpace.types import Outcome

SeenOutcome = Callable[[Outcome], None]
"""Called at every commit before the drafter is told; the scores are valid during the call."""
SeenLevel = Callable[[Branch[Any], Tensor, "Tensor | None"], None]
"""Called for every branch that a drafter expands, with its logits [F, D] and their ids."""


@contextlib.contextmanager
def watched(method: Method, outcome: SeenOutcome, level: SeenLevel | None = None) -> Iterator[None]:
    """Be told what a method's drafter is told and, of one that expands, what it answers.

    The method does what it did: its drafter is asked the same questions, and is as before when
    the context ends. Steps, and what listeners receive, have no part in this.

    Args:
        outcome: told of every sequence's outcome, prompts included.
        level: told of the distributions behind drafts; a drafter that cannot expand calls it never.
    """
    drafter = method.preferred.drafter
    observe = drafter.observe

    def observing(states: Sequence[Any], outcomes: Sequence[Outcome]) -> None:
        for one in outcomes:
            outcome(one)
        observe(states, outcomes)

    hooks: dict[str, Any] = {"observe": observing}
    if level is not None and isinstance(drafter, ExpandingDrafter):
        expand, tell = drafter.expand, level

        def expanding(branches: Sequence[Branch[Any]]) -> tuple[Tensor, Tensor | None]:
            logits_FD, id_D = expand(branches)
            start = 0
            for branch in branches:
                tell(branch, logits_FD[start : start + len(branch.nodes)], id_D)
                start += len(branch.nodes)
            return logits_FD, id_D

        hooks |= {"expand": expanding, "descend": lambda *given: (), "spread": lambda *given: None}
    vars(drafter).update(hooks)
    try:
        yield
    finally:
        for name in hooks:
            del vars(drafter)[name]
