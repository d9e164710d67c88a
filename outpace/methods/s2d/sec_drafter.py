"""Stop and exit: a classifier reads an early state and says: guess here, go deeper, or guess nothing.

    STOP       no exit from here on says what the whole model will: the draft ends, verification begins
    EXIT       this exit says it: its norm, its matrix and the target's head make the guess
    CONTINUE   a deeper exit says it: all rows of the draft run through the layers up to the next one

Exits are those of `s2d`, which asks the head at every exit how sure it is. The classifier costs three
products of vectors, so the head is paid once per guess, and not at all where the draft ends.

Which exit speaks, and where a draft ends, follows from states of tokens that stay in it. So the
distribution recorded is the one drawn from. States of shallow rows are kept up to their layer alone:
verification computes the rest.

With ``stop`` the classifier behind all layers may also end the text. It does so before a token that is
probably not the one that a person would have written. It reads the state that the token comes from, and
how unsure the target is of its likeliest token. That keeps a prefix of the text and changes its length,
so it has to be allowed. Where a text ends does not depend on drafts or batches.

Paper: SEC, Sun et al. 2024, arXiv:2401.09964. There an exit gives the token, keys of skipped layers come
from its state, and labels say EXIT wherever an earlier layer was right. Here labels say it where that
exit itself agrees with the whole model.

Shape letters: F nodes of a frontier, S places of the classifier, H hidden size, I = H + 2, E emitted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outpace.drafters.base import Request
from outpace.methods.s2d.drafter import S2d, S2dConfig, SortedState
from outpace.methods.s2d.files import SEC, Exits, read_exits
from outpace.models.base import Target
from outpace.tree.growth import Branch, DraftRow
from outpace.types import Draft, Scored, Signals, StopRule

STOP, EXIT, CONTINUE = range(3)
_LAST = "hidden.-1"
_EDGE = 1e-5
"""Probabilities are taken to be this far from 0 and 1, whose log odds have no end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SecConfig(S2dConfig):
    """Settings of the drafter."""

    exit: float | None = None
    """An exit makes the guess if it is right with this probability; 1: only the deepest one does. Without
    it, the guess goes deeper where that is worth the layers between."""
    stop: float | None = None
    """End the text before a token that is wrong with more than this probability; 1 never does. Changes
    the length of the output."""

    def __post_init__(self) -> None:
        super(SecConfig, self).__post_init__()
        for name in ("exit", "stop"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")


@dataclass(slots=True, eq=False)
class SecState(SortedState):
    chance_F: Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the nodes expanded last: that a guess below is kept."""


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Stop rule: no guess where its chance to be reached and kept is below a threshold."""

    threshold: float
    other: StopRule | None = None

    def more(self, signals: Signals) -> Tensor:
        """Bool [F]. It is asked before anything is drawn."""
        assert signals.reach_F is not None
        go_F = signals.reach_F >= self.threshold
        return go_F if self.other is None else go_F & self.other.more(signals)


class Sec(S2d):
    """Drafts with the exit that a classifier picks.

    Args:
        exits: with the classifier.
        threshold: a draft ends where the next guess is kept with less probability; None: its price.
        exit: as in the config.
        stop: likewise.
    """

    Config = SecConfig
    method = SEC
    traits = replace(S2d.traits, foresees=True)

    def __init__(
        self,
        exits: Exits,
        target: Target,
        threshold: float | None = None,
        quantize: str | None = None,
        exit: float | None = None,
        stop: float | None = None,
    ) -> None:
        super().__init__(exits, target, threshold, quantize)
        assert exits.class_S3I is not None
        self._class_S3I = exits.class_S3I.to(self.target.device)
        self._exit, self._stop = exit, stop
        if stop is not None:
            self.traits = replace(self.traits, lossless=False, doubts=self._doubts, taps=frozenset({_LAST}))

    @classmethod
    def load(cls, config: S2dConfig, target: Target) -> Sec:
        """Read exits and classifier.

        Raises:
            ModelError: there are none, or they are corrupt, or were made for another target.
        """
        assert isinstance(config, SecConfig)
        exits = read_exits(config.model, target, SEC)
        return cls(exits, target, config.threshold, config.quantize, config.exit, config.stop)

    def begin(self, request: Request) -> SecState:
        return SecState()

    def classes(self, place: int, n_FH: Tensor, unsure_F: Tensor | None = None) -> Tensor:
        """Probabilities of STOP, EXIT and CONTINUE, float32 [F, 3].

        Args:
            place: number of an exit, or -1 behind all layers, where STOP says that the token is wrong.
            n_FH: what the head would read, before the matrix of an exit.
            unsure_F: what ``unsure`` says, behind all layers.
        """
        return scores(self._class_S3I[place], n_FH.float(), unsure_F).softmax(-1)

    def propose(self, rows: Sequence[DraftRow[SortedState]]) -> list[Draft]:
        """Grow drafts in the lent slots; a row without a lease gets an empty one."""
        return super().propose([replace(row, budget=replace(row.budget, estimate=True)) for row in rows])

    def doubt(self, other: StopRule | None) -> StopRule:
        return Hopeless(self.threshold, other)

    def speak(
        self, level: int, states: Sequence[SortedState], hidden: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Logits of the nodes of each sequence; of no meaning where no guess will be drawn."""
        sizes, deepest = [len(one) for one in hidden], level + 1 == len(self.exits.layers)
        hidden_FH = torch.cat(list(hidden))
        with torch.no_grad():
            classes_F3 = self.classes(level, self._norms[level](hidden_FH))
        columns = len(self.exits.vocab.to_target_D) if self.exits.vocab else self.target.vocab_size
        logits_FD, here = hidden_FH.new_zeros(len(hidden_FH), columns, dtype=torch.float32), []
        deeper, start = [], 0
        for state, one_F3 in zip(states, torch.split(classes_F3, sizes), strict=True):
            assert isinstance(state, SecState)
            some_F = 1 - one_F3[:, STOP]
            hopeful_F = some_F >= self.threshold
            goes = not deepest and self._continues(level, one_F3[hopeful_F])
            deeper.append(goes)
            state.chance_F = torch.where(hopeful_F, one_F3[:, EXIT], some_F).cpu()
            if not goes:
                here += [start + i for i, hope in enumerate(hopeful_F.tolist()) if hope]
            start += len(one_F3)
        if here:
            logits_FD[here] = self._logits(level, hidden_FH[here]).float()
        parts = torch.split(logits_FD, sizes)
        return [None if goes else part for goes, part in zip(deeper, parts, strict=True)]

    def _continues(self, level: int, classes_F3: Tensor) -> bool:
        """Whether the nodes of a sequence go on to the next exit together."""
        if not len(classes_F3):
            return False
        _, here, deeper = classes_F3.mean(0).tolist()
        if self._exit is not None:
            return bool(here < self._exit)
        return bool(deeper * self._value > self.prices[level + 1] - self.prices[level])

    def foresee(self, branches: Sequence[Branch[SortedState]]) -> Tensor:
        """How likely a guess below each node is kept: what the classifier says of the exit that spoke."""
        parts = []
        for branch in branches:
            assert isinstance(branch.state, SecState)
            parts.append(branch.state.chance_F)
        return torch.cat(parts)

    def _doubts(self, scored: Scored, kept: Sequence[int]) -> int:
        """How many tokens of a pass come before the first that is probably wrong."""
        assert self._stop is not None
        rows = [0, *(node + 1 for node in kept)]
        unsure_E = unsure(scored.logits_TV[rows])
        wrong_E = self.classes(-1, scored.taps[_LAST][rows], unsure_E)[:, STOP] > self._stop
        return [*wrong_E.tolist(), True].index(True)


def scores(class_3I: Tensor, n_FH: Tensor, unsure_F: Tensor | None) -> Tensor:
    """Of STOP, EXIT and CONTINUE, before the softmax, [F, 3]."""
    out_F3 = torch.addmm(class_3I[:, -1], n_FH, class_3I[:, :-2].T)
    return out_F3 if unsure_F is None else out_F3 + unsure_F[:, None] * class_3I[:, -2]


def unsure(logits_FV: Tensor) -> Tensor:
    """Log odds that the target's likeliest token is not the one, as it sees it, float32 [F]."""
    return -logits_FV.float().softmax(-1).amax(-1).clamp(_EDGE, 1 - _EDGE).logit()
