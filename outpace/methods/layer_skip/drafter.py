"""The target with some attentions and MLPs left out guesses; nothing is trained.

It drafts in the target's own slot, as SWIFT and Draft & Verify do: see `parts`. Below the first layer that
misses something nothing is computed twice.

Which sub-layers can go is found on the first text that is long enough (`search`), and remembered for
the model and the kind of text. Until then every few a layer is left out. From then on the set
stays, so that the same seed gives the same text. ``policy=confidence`` ends drafts, chains and trees,
where the last token is doubted, as in SWIFT.

Pays for large models, which have layers to spare: published speed-ups are 1.3 to 1.6 from 13
billion weights on. Whether it pays is a matter of two numbers: the share of a pass that a guess costs,
and how often it is accepted.

Papers: SWIFT, arXiv:2410.06916; Draft on the Fly, arXiv:2410.01028; Draft & Verify,
arXiv:2309.08168.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outpace.config import data_folder
from outpace.drafters.base import Request, Traits
from outpace.drafters.shallow import SlotState
from outpace.drafters.trained import trained_exits
from outpace.errors import ModelError
from outpace.methods.layer_skip.parts import PartDrafter
from outpace.methods.layer_skip.search import Search
from outpace.methods.layer_skip.skip_sets import SkipSet, Trial, behind, even, recall, remember
from outpace.models.base import LAYERS, TAPS, Target
from outpace.tree.growth import DraftRow
from outpace.types import Draft

_JUDGED, _MOST = 48, 192
"""Tokens of an answer on which a set is found, and tokens of text before and with them, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSkipConfig:
    skip: str | None = None
    """Left out, counted from 0: ``4+a7+m9`` is layer 4, the attention of 7 and the MLP of 9. Without
    it all behind the last exit that the target was trained with; else a set is found."""
    find: str = "search"
    """How: ``search`` tries sets on a text, ``cosine`` compares hidden states."""
    share: float = 0.4
    """Share of the weights of the layers to leave out."""
    trials: int = 40
    """Most sets tried by a search, each at the price of a pass over 48 rows, once."""
    kind: str = "text"
    """Name of the kind of text; a set is remembered per model and kind."""

    def __post_init__(self) -> None:
        if self.find not in ("search", "cosine"):
            raise ValueError(f"find must be search or cosine, got {self.find!r}")
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"share must be between 0 and 1, got {self.share}")
        if self.trials < 1:
            raise ValueError(f"trials must be at least 1, got {self.trials}")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.kind):
            raise ValueError(f"kind must be letters, digits, - and _, got {self.kind!r}")
        if self.skip is not None and SkipSet.read(self.skip) is None:
            raise ValueError(f"skip must be layers and sub-layers, as in 4+a7+m9, got {self.skip!r}")


@dataclass(slots=True, eq=False)
class SkipState(SlotState):
    """With where its answer begins."""

    answer: int = 0


class LayerSkip(PartDrafter[SkipState]):
    """Drafts with a part of the target.

    Args:
        skip: the set; None: still to be found.
    """

    Config = LayerSkipConfig
    traits = Traits(default_nodes=4, needs=frozenset({LAYERS, TAPS}), samples=True, uses_target_cache=True)

    def __init__(self, config: LayerSkipConfig, target: Target, skip: SkipSet | None) -> None:
        self._config, self.target = config, target
        self.found = skip is not None
        """Whether the set stays from now on."""
        self._take(skip or even(target.num_layers, max(1, round(config.share * target.num_layers))))
        if not self.found:  # the set that is found follows the texts met first
            self.traits = replace(self.traits, deterministic=False)

    def _take(self, skip: SkipSet) -> None:
        self.skip = skip
        """What is left out now."""
        self.model = skip.part(self.target)
        share = self.target.share(self.model)
        self.traits = replace(self.traits, level_D=(share,))

    @classmethod
    def load(cls, config: LayerSkipConfig, target: Target) -> LayerSkip:
        """Take the set that was given, or remembered.

        Raises:
            ModelError: layers that the target does not have, or all of them.
        """
        if config.skip is None:
            skip = recall(cls.file(config, target), target.num_layers)
            return cls(config, target, skip or behind(trained_exits(target), target.num_layers))
        skip = SkipSet.read(config.skip)
        if skip is None or not skip.fits(target.num_layers):
            raise ModelError(
                f"layer_skip: cannot leave out layers {config.skip} of {target.name}, which has "
                f"layers 0 to {target.num_layers - 1}, and keep one"
            )
        return cls(config, target, skip)

    @staticmethod
    def file(config: LayerSkipConfig, target: Target) -> Path:
        """Where the set for this model and kind of text is remembered."""
        name = f"{config.kind}-{config.find}-{config.share:g}.json"
        return data_folder() / "skip_sets" / target.digest / name

    @property
    def language_model(self) -> Target | None:
        """The part of the target, once its set is found: whoever runs it in the drafter's place
        neither finds the set nor follows it.
        """
        return self.model if self.found else None

    def begin(self, request: Request) -> SkipState:
        return SkipState(answer=len(request.prompt))

    def propose(self, rows: Sequence[DraftRow[SkipState]]) -> list[Draft]:
        """Find a set if there is none and a text is long enough; then grow drafts in the lent slots."""
        for row in rows:
            if not self.found and len(row.tokens) >= row.state.answer + _JUDGED:
                self._find(row.tokens)
        return super().propose(rows)

    def part(self, state: SkipState) -> tuple[SkipSet, Target]:
        return self.skip, self.model

    def _find(self, tokens: Sequence[int]) -> None:
        """Find a set on the end of a text, and draft with it from now on. Cost: some passes, once."""
        text = list(tokens[-_MOST:])
        with torch.no_grad():
            trial = Trial(self.target, text, len(text) - _JUDGED)
            search = Search(trial, self._config.share)
            found = search.cosine() if self._config.find == "cosine" else search.bayes(self._config.trials)
        self._take(found.skip)
        self.found, self.traits = True, replace(self.traits, deterministic=True)
        remember(self.file(self._config, self.target), found, self.target)
