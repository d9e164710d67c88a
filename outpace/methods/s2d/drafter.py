"""Sorted exits of the target draft: a guess goes deeper where it is unsure and depth pays.

    sure      x0 -> layers below e1 -> exit 1 -> x1
    unsure    x1 -> layers below e1 -> exit 1;  x0, x1 -> layers e1 to e2 -> exit 2 -> x2 -> ...
    verify    x0, x1, x2 enter at layer e2 (the deepest used), the last guess at layer 0

Every exit has a norm and a square matrix of its own before the target's head; all are trained together, on
one objective. Each guess starts at the exit that the draft has come to. Its confidence says how often
such guesses are right there and one exit deeper, as measured in training. It goes deeper if what that
brings is worth what the layers between cost. All rows of the draft then follow in one pass, so every row
has the same keys and values. Nothing is computed twice, neither between exits nor in verification.

Which exit speaks depends on its own distribution and never on the token drawn, so the law recorded is the
one drawn from. A draft ends behind a token that is less likely than the price of the next guess.

Paper: S2D, Kavehzadeh et al. 2024, arXiv:2407.01955 (there the draft model is a second one; thresholds
are given there, and follow from price and confidence here).

Shape letters: X exits, F nodes of a frontier, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.cache.base import Lease
from outpace.drafters.base import Request, Traits
from outpace.drafters.features import TrainedConfig
from outpace.drafters.shallow import Doubt, ShallowRows, SlotDrafter, SlotState, rows_of, shares
from outpace.drafters.trained import lender, rounding
from outpace.methods.s2d.files import BINS, METHOD, Exits, read_exits
from outpace.models.base import HEAD, LAYERS, TAPS, Target
from outpace.models.blocks import Form
from outpace.models.decoder import Decoder
from outpace.models.rowwise import Norm
from outpace.tree.growth import Branch, DraftRow
from outpace.types import Feed, Resume, StopRule


@dataclass(frozen=True, kw_only=True, slots=True)
class S2dConfig(TrainedConfig):
    threshold: float | None = None
    """A branch ends after a token less likely than this; 0 never ends one. Without it, the price of a
    guess at the first exit, in passes."""

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")


@dataclass(slots=True, eq=False)
class SortedState(SlotState):
    """One sequence, while a draft grows."""

    level: int = 0
    """The exit that its rows have come to."""


class S2d(SlotDrafter[SortedState]):
    """Drafts with the target's layers up to one of several exits.

    Args:
        target: it; every sequence drafts in the slot that it is lent.
        threshold: as in the config.
    """

    Config = S2dConfig
    target: Decoder
    method = METHOD
    traits = Traits(
        default_nodes=6, needs=frozenset({LAYERS, TAPS, HEAD}), samples=True, uses_target_cache=True
    )

    def __init__(
        self, exits: Exits, target: Target, threshold: float | None = None, quantize: str | None = None
    ) -> None:
        lent = lender(target, self.method)
        self.exits, self.target = exits, lent
        form = Form(lent.dtype, lent.device, quantize=rounding(quantize, lent))
        self._norms = [Norm(one.to(lent.device), lent.config) for one in exits.norm_XH]
        self._linears = [form.linear(one) for one in exits.linear_XHH]
        self.id_D = None if exits.vocab is None else exits.vocab.to_target_D.to(lent.device)
        self.prices = shares(lent, exits.layers, exits.vocab)
        """Of a guess at each exit, in whole passes, by weights read."""
        self.traits = replace(self.traits, level_D=self.prices[:1])
        self.threshold = self.prices[0] if threshold is None else threshold
        deepest = exits.right[-1]
        rate = sum(own for own, _ in deepest[BINS // 2 :]) / (BINS - BINS // 2)
        self._value = 1 / (1 - min(rate, 0.9))
        """Tokens that hang on a guess: itself and what follows it, where guesses are sure."""

    @classmethod
    def load(cls, config: S2dConfig, target: Target) -> S2d:
        return cls(read_exits(config.model, target), target, config.threshold, config.quantize)

    def begin(self, request: Request) -> SortedState:
        return SortedState()

    def leased(self, row: DraftRow[SortedState], lease: Lease) -> DraftRow[SortedState]:
        row.state.level, row.state.rows = 0, ShallowRows(lease, self.exits.layers[0])
        return replace(row, budget=replace(row.budget, stop=self.doubt(row.budget.stop)))

    def doubt(self, other: StopRule | None) -> StopRule:
        """Where branches end, if the budget's rule does not end them."""
        return Doubt(self.threshold, other)

    def expand(self, branches: Sequence[Branch[SortedState]]) -> tuple[Tensor, Tensor | None]:
        """One pass per exit in use; sequences that are unsure go on to the next exit together."""
        count = [len(branch.nodes) for branch in branches]
        feeds = [rows_of(branch).feed(branch) for branch in branches]
        parts: dict[int, Tensor] = {}
        for level in range(len(self.exits.layers)):
            here = [i for i in range(len(branches)) if i not in parts and branches[i].state.level == level]
            if not here:
                continue
            states = [branches[i].state for i in here]
            self._run(states, [feeds[i] for i in here])
            hidden = [_last(state, count[i]) for state, i in zip(states, here, strict=True)]
            for i, part in zip(here, self.speak(level, states, hidden), strict=True):
                if part is not None:
                    parts[i] = part
                    continue
                state = branches[i].state
                feeds[i] = _again(state)
                state.level += 1
                rows_of(branches[i]).layer = self.exits.layers[state.level]
        return torch.cat([parts[i] for i in range(len(branches))]), self.id_D

    def speak(
        self, level: int, states: Sequence[SortedState], hidden: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Logits [F, D] of the nodes of each sequence; None where the next exit is to say them.

        Args:
            hidden: states of the nodes after the layers of this exit, [F, H] each.
        """
        logits_FD = self._logits(level, torch.cat(list(hidden)))
        parts = torch.split(logits_FD, [len(one) for one in hidden])
        return [None if self._goes_deeper(level, part) else part for part in parts]

    def _run(self, states: Sequence[SortedState], feeds: Sequence[Feed]) -> None:
        """Feed rows up to the exit that their sequences have come to."""
        layer = self.exits.layers[states[0].level]
        tap, kept = f"hidden.{layer}", [state.rows for state in states]
        assert kept[0] is not None
        scored = self.target.score(
            [replace(feed, want=()) for feed in feeds],
            kept[0].lease.cache,
            taps=frozenset({tap}),
            layers=layer,
        )
        for i, (feed, rows) in enumerate(zip(feeds, kept, strict=True)):
            assert rows is not None
            own_TH = scored.taps[tap][scored.tap_start_B[i] : scored.tap_start_B[i + 1]].clone()
            rows.hidden = [own_TH] if feed.resume is not None else [*rows.hidden, own_TH]

    def _logits(self, level: int, hidden_FH: Tensor) -> Tensor:
        clock = self.clock
        with clock, torch.no_grad():
            n_FH = self._norms[level](hidden_FH)
            y_FH = n_FH + self._linears[level](n_FH.to(self.target.dtype)).float()
            logits_FD = self.target.head(y_FH, self.exits.vocab)
        clock.count -= 1  # the layers below and this are one pass of the drafter
        return logits_FD

    def _goes_deeper(self, level: int, logits_FD: Tensor) -> bool:
        """Whether the next exit is worth its layers, for the nodes of one sequence."""
        if level + 1 == len(self.exits.layers):
            return False
        sure_F = logits_FD.softmax(-1).amax(-1)
        table = self.exits.right[level]
        pairs = [table[min(int(one * BINS), BINS - 1)] for one in sure_F.tolist()]
        gained = sum(deeper - own for own, deeper in pairs) / len(pairs)
        return gained * self._value > self.prices[level + 1] - self.prices[level]


def _last(state: SortedState, count: int) -> Tensor:
    """States of the newest rows, [count, H]."""
    assert state.rows is not None
    return torch.cat(state.rows.hidden)[-count:]


def _again(state: SortedState) -> Feed:
    """All rows of a draft once more, from the layers that they have been through."""
    rows = state.rows
    assert rows is not None
    held, hidden_KH = rows.lease.cache.slot(rows.lease.slot), torch.cat(rows.hidden)
    resume = Resume(rows.layer, tuple(range(len(hidden_KH))), hidden_KH)
    return Feed(rows.lease.slot, tuple(held.tail_ids), tuple(held.tail_parents), (), resume=resume)
