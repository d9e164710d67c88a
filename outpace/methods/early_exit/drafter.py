"""The target's first layers guess, through its own norm and head; verification goes on from there.

    draft     x0 -> layers 0 to e-1 -> head -> x1 -> layers 0 to e-1 -> head -> x2
    verify    x0, x1 enter at layer e, x2 at layer 0; all leave at the top

Drafting writes to the target's own cache, and verification resumes at layer e with the hidden
states of the draft. Below e every row is computed once, whether it is accepted or not.

Pays for targets that were trained to leave early (LayerSkip), or with a trained exit. That is a
layer between e and the head, which ``outpace train early_exit`` makes (`exit_head`; EESD). Others
lose. In a plain model the first third of the layers seldom guesses what the whole says. A small
model spends a large part of each guess on its head.

Several exits (``exits``) compete in each sequence, see `exits`. A draft ends behind a token that the exit
doubts; from which confidence on, every sequence learns (`thresholds`, FREE). What is learned is also
an estimate of acceptance that policies read, such as ``policy=specdecpp``.

Papers: LayerSkip, arXiv:2404.16710; EESD, arXiv:2406.03853; FREE, arXiv:2310.05424.

Shape letters: F nodes of a frontier, D columns of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outpace.clock import PassClock
from outpace.drafters.base import ExpandingDrafter, Request, Traits
from outpace.drafters.shallow import Doubt, ShallowRows, shares
from outpace.drafters.trained import candidates, find, trained_exits
from outpace.errors import ModelError
from outpace.methods.early_exit.exit_head import ExitHead, ExitState
from outpace.methods.early_exit.exits import Belief, pick
from outpace.methods.early_exit.thresholds import BetaMixture, given, said_of
from outpace.models.base import LAYERS, TAPS, Target
from outpace.tree.growth import Branch, DraftRow, grow
from outpace.types import NOTHING, ROOT, Draft, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyExitConfig:
    layer: int | None = None
    """Layers that draft. Without it: those of a trained exit, the exits that the target was trained with, or
    the first third."""
    exits: str | None = None
    """Several numbers of layers, such as ``6+10+14``: each sequence learns which one pays."""
    model: str | None = None
    """Folder of a trained exit. Without it, and without ``layer`` and ``exits``, the one trained
    for the target if there is one; else the target's own norm and head."""
    threshold: float | None = None
    """A branch ends after a token less likely than this; 0 never ends one. Without it, learned."""
    quantize: str | None = "int8"
    """Round weights of a trained exit to int8 or int4, where compiled code multiplies them; none keeps
    them."""

    def __post_init__(self) -> None:
        if (self.layer, self.exits, self.model).count(None) < 2:
            raise ValueError("layer, exits and model exclude each other; give one of them")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")
        if self.layer is not None and self.layer < 1:
            raise ValueError(f"layer must be at least 1, got {self.layer}")
        if self.exits is not None and len(self.layers) < 2:
            raise ValueError(f"exits must be two numbers or more, as in 6+10, got {self.exits!r}")

    @property
    def layers(self) -> tuple[int, ...]:
        """What ``exits`` lists; empty if that is no list of distinct numbers from 1 on."""
        parts = [] if self.exits is None else self.exits.split("+")
        numbers = {int(part) for part in parts if part.isdecimal()} - {0}
        return tuple(sorted(numbers)) if len(numbers) == len(parts) else ()


class EarlyExit(ExpandingDrafter[ExitState]):
    """Drafts with the first layers of the target.

    Args:
        target: it; every sequence drafts in the slot that it is lent.
        layers: the exits, ascending; one or more.
        head: of the only exit; None: the target's own norm and head.
        threshold: as in the config.
    """

    Config = EarlyExitConfig
    traits = Traits(
        default_nodes=8, needs=frozenset({LAYERS, TAPS}), samples=True, uses_target_cache=True, estimates=True
    )

    def __init__(
        self,
        target: Target,
        layers: Sequence[int],
        head: ExitHead | None = None,
        threshold: float | None = None,
    ) -> None:
        self.target, self.layers, self.head, self.threshold = target, tuple(layers), head, threshold
        self.rows = None if head is None else head.rows
        if self.rows is not None:
            self.traits = replace(self.traits, taps=frozenset({self.rows.tap}))
        self._shares = shares(target, layers, None if head is None else head.vocab)
        self.traits = replace(self.traits, level_D=self._shares[:1])

    @property
    def clock(self) -> PassClock:
        """The target's: whether a pass drafts, the verb tells."""
        return self.target.clock

    @classmethod
    def load(cls, config: EarlyExitConfig, target: Target) -> EarlyExit:
        """Find the exit.

        Raises:
            ModelError: layers that the target does not have, or a trained exit that does not fit.
        """
        head = None
        if config.model is not None:
            head = ExitHead(find("early_exit", target, config.model), target, config.quantize)
        elif config.layer is None and config.exits is None:
            found = candidates("early_exit", target)
            head = ExitHead(found[0], target, config.quantize) if found else None
        if head is not None:
            return cls(target, [head.layer], head, config.threshold)
        layers = config.layers or ((config.layer,) if config.layer else trained_exits(target))
        layers = layers or (max(1, target.num_layers // 3),)
        if layers[-1] >= target.num_layers:
            raise ModelError(
                f"early_exit: {layers[-1]} layers of {target.num_layers} are not the first few; "
                f"leave {target.name} after layer {target.num_layers - 1} at the latest"
            )
        return cls(target, layers, threshold=config.threshold)

    def begin(self, request: Request) -> ExitState:
        """Nothing is known yet of what its exits are worth. A trained layer gets a slot; a prefix
        that no pass will show is left out of it: rows start behind it.
        """
        slot = -1 if self.rows is None else self.rows.cache.open()
        beliefs, mixtures = [Belief() for _ in self.layers], [BetaMixture() for _ in self.layers]
        return ExitState(slot, beliefs=beliefs, mixtures=mixtures)

    def propose(self, rows: Sequence[DraftRow[ExitState]]) -> list[Draft]:
        """Grow drafts in the lent slots; a row without a lease gets an empty one."""
        ready = []
        for row in rows:
            state = row.state
            state.draft = state.rows = None
            state.said, state.judged = {}, []
            if self.rows is not None:
                self.rows.ready(state, len(row.tokens) - 1)
            if row.lease is None or (self.rows is not None and not row.lease.resumes):
                ready.append(replace(row, budget=NOTHING))
                continue
            state.exit = pick(state.beliefs, self._shares, row.budget.max_depth, row.coins)
            state.rows = ShallowRows(row.lease, self.layers[state.exit])
            least = state.mixtures[state.exit].least if self.threshold is None else self.threshold
            doubt = replace(row.budget, stop=Doubt(least, row.budget.stop))
            ready.append(replace(row, budget=doubt))
        drafts = []
        grown = grow(ready, self.expand, self.traits, self.estimate)
        for row, (draft, numbers) in zip(ready, grown, strict=True):
            state, names = row.state, list(range(len(draft)) if numbers is None else numbers)
            if state.rows is not None and self.rows is not None:
                draft = self.rows.finish(state, draft, numbers)
            elif state.rows is not None:
                state.draft = draft = state.rows.finish(draft, numbers)
            if draft.resume is not None:  # nodes that were fed stand first now, as they were fed
                fed = {name: row for row, name in enumerate(state.said)}
                names.sort(key=lambda name: fed.get(name, len(fed)))
            state.judged = [
                (i, state.said[name]) for i, name in enumerate((ROOT, *names)) if name in state.said
            ]
            state.rows = None  # a lease ends here
            drafts.append(draft)
        return drafts

    def expand(self, branches: Sequence[Branch[ExitState]]) -> tuple[Tensor, Tensor | None]:
        """One pass per exit in use over the new nodes, through the layers below it."""
        at: dict[int, list[int]] = {}
        for i, branch in enumerate(branches):
            at.setdefault(branch.state.exit, []).append(i)
        parts: dict[int, Tensor] = {}
        for exit_, members in at.items():
            asked = [branches[i] for i in members]
            rows = [self._rows(branch) for branch in asked]
            feeds = [one.feed(branch) for one, branch in zip(rows, asked, strict=True)]
            if self.head is not None:
                feeds = [replace(feed, want=()) for feed in feeds]
            layer = self.layers[exit_]
            name = f"hidden.{layer}"
            scored = self.target.score(feeds, rows[0].lease.cache, taps=frozenset({name}), layers=layer)
            logits_FD = scored.logits_TV.clone() if len(at) > 1 else scored.logits_TV
            if self.head is not None:
                logits_FD = self.head.logits(asked, feeds, scored.taps[name])
            for j, (one, i) in enumerate(zip(rows, members, strict=True)):
                lo, hi = scored.tap_start_B[j], scored.tap_start_B[j + 1]
                one.hidden.append(scored.taps[name][lo:hi].clone())
                parts[i] = logits_FD[lo:hi]
        logits = [parts[i] for i in range(len(branches))]
        out_FD = logits[0] if len(logits) == 1 else torch.cat(logits)
        id_D = None if self.head is None else self.head.id_D
        known = iter(said_of(out_FD, id_D))
        for branch in branches:
            branch.state.said |= {node: next(known) for node in branch.nodes}
        return out_FD, id_D

    def estimate(self, branches: Sequence[Branch[ExitState]]) -> Tensor:
        """How likely the nodes just fed are right, by what the exit said of them before."""
        return torch.cat([self._chances(branch) for branch in branches]).float()

    @staticmethod
    def _chances(branch: Branch[ExitState]) -> Tensor:
        state, parents = branch.state, [branch.parent_N[node] for node in branch.nodes if node != ROOT]
        said = [state.said[parent] for parent in parents]
        own = [given(one, branch.token_N[node]) for one, node in zip(said, branch.nodes, strict=False)]
        return state.mixtures[state.exit].chance(torch.tensor(own)) if own else torch.ones(1)

    @staticmethod
    def _rows(branch: Branch[ExitState]) -> ShallowRows:
        assert branch.state.rows is not None
        return branch.state.rows

    def observe(self, states: Sequence[ExitState], outcomes: Sequence[Outcome]) -> None:
        """Learn what the exit's guesses were worth, and keep a trained layer's keys in step; those
        of the layers below are the target's to keep.
        """
        for state, outcome in zip(states, outcomes, strict=True):
            if state.draft is not None and state.draft is outcome.draft:
                depth = outcome.draft.levels
                state.beliefs[state.exit].learn(len(outcome.verdict.kept), depth, outcome.verdict.censored)
                truth = outcome.scored.logits_TV.argmax(1).tolist() if state.judged else []
                guesses = [(probs[0], ids[0] == truth[row]) for row, (ids, probs) in state.judged]
                state.mixtures[state.exit].learn(guesses)
            if self.rows is None:
                state.draft = None
        if self.rows is not None:
            self.rows.observe(states, outcomes)

    def num_uncached(self, state: ExitState, tokens: Sequence[int]) -> int:
        return len(state.ids)

    def mark(self, state: ExitState) -> Any:
        """What is known of the exits, and how much of the text a trained layer has read."""
        known = [replace(belief) for belief in state.beliefs], [one.copy() for one in state.mixtures]
        return known, None if self.rows is None else self.rows.mark(state)

    def rewind(self, state: ExitState, mark: Any) -> ExitState:
        (state.beliefs, state.mixtures), read = mark
        state.draft = state.rows = None
        state.judged = []
        if self.rows is not None:
            self.rows.rewind(state, read)
        return state

    def end(self, state: ExitState) -> None:
        if self.rows is not None:
            self.rows.cache.close(state.slot)
