"""The target with some of its layers left out guesses; nothing is trained.

Which layers can go is found on the first prompt that is long enough, by trying sets or by how
little a layer turns the hidden states (`skip_sets`), and remembered for the model and the kind of
text. Until then every few a layer is left out. From then on the set stays, so that the same seed
gives the same text.

Pays for large models, which have layers to spare: published speed-ups are 1.3 to 1.6 from 13
billion weights on. A model of a hundred million loses. Whether it pays is a matter of two
numbers: the share of a pass that a guess costs, about one less the share of the layers left out,
and how often it is accepted. ``policy=confidence`` ends drafts early, as in SWIFT.

Papers: SWIFT, arXiv:2410.06916; Draft on the Fly, arXiv:2410.01028; Draft & Verify,
arXiv:2309.08168.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outpace.config import data_folder
from outpace.drafters.base import Request, Traits
from outpace.drafters.model_rows import ModelDrafter, ModelState
from outpace.errors import ModelError
from outpace.methods.layer_skip.skip_sets import Found, by_cosine, even, part, recall, remember, search
from outpace.models.base import LAYERS, TAPS, Target
from outpace.types import Outcome

_LEAST, _MOST = 16, 96
"""Tokens of a prompt on which a set is found: at least, and at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSkipConfig:
    skip: str | None = None
    """Layers left out, counted from 0, such as ``4+7+9``; without it they are found."""
    find: str = "search"
    """How: ``search`` tries sets on a prompt, ``cosine`` compares hidden states."""
    share: float = 0.4
    """Share of the layers to leave out."""
    trials: int = 24
    """Most sets tried by a search, each at the price of about a pass, once."""
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
        if self.skip is not None and not re.fullmatch(r"\d+(\+\d+)*", self.skip):
            raise ValueError(f"skip must be numbers of layers, as in 4+7+9, got {self.skip!r}")


class LayerSkip(ModelDrafter):
    """Drafts with a part of the target.

    Args:
        skip: the set; None: still to be found.
    """

    Config = LayerSkipConfig
    traits = Traits(default_nodes=4, needs=frozenset({LAYERS, TAPS}), samples=True)

    def __init__(self, config: LayerSkipConfig, target: Target, skip: tuple[int, ...] | None) -> None:
        self._config, self._target, self._living = config, target, list[ModelState]()
        self._count = max(1, round(config.share * target.num_layers))
        self.skip = even(target.num_layers, self._count) if skip is None else skip
        """The layers that are left out now."""
        super().__init__(part(target, self.skip), target.vocab_size)
        if skip is None:  # the set that is found follows the texts met first
            streams = [f"hidden.{i}" for i in range(target.num_layers + 1)]
            taps = frozenset(["hidden.-1"] if config.find == "search" else streams)
            self.traits = replace(self.traits, taps=taps, deterministic=False)

    @classmethod
    def load(cls, config: LayerSkipConfig, target: Target) -> LayerSkip:
        """Take the set that was given, or remembered.

        Raises:
            ModelError: layers that the target does not have, or all of them.
        """
        if config.skip is None:
            return cls(config, target, recall(cls.file(config, target), target.num_layers))
        skip = tuple(sorted({int(number) for number in config.skip.split("+")}))
        if skip[-1] >= target.num_layers or len(skip) == target.num_layers:
            raise ModelError(
                f"layer_skip: cannot leave out layers {config.skip} of {target.name}, which has "
                f"layers 0 to {target.num_layers - 1}, and keep one"
            )
        return cls(config, target, skip)

    @staticmethod
    def file(config: LayerSkipConfig, target: Target) -> Path:
        """Where the set for this model and kind of text is remembered."""
        name = f"{config.kind}-{config.find}-{config.share:g}.json"
        return data_folder() / "layer_skip" / target.digest / name

    @property
    def language_model(self) -> Target | None:  # type: ignore[override]
        """The part of the target, once its set is found: whoever runs it in the drafter's place
        neither finds the set nor follows it.
        """
        return None if self.traits.taps else super().language_model

    def begin(self, request: Request) -> ModelState:
        """Take a slot of the part's cache."""
        state = super().begin(request)
        self._living.append(state)
        return state

    def observe(self, states: Sequence[ModelState], outcomes: Sequence[Outcome]) -> None:
        """Find the set if it is still to be found, then as any model."""
        if self.traits.taps:
            texts = [
                outcome
                for outcome in outcomes
                if outcome.forced
                and outcome.start == 0
                and len(outcome.fed) >= _LEAST
                and outcome.scored.taps.keys() >= self.traits.taps
            ]
            if texts:
                self._adopt(self._found(max(texts, key=lambda outcome: len(outcome.fed))))
        super().observe(states, outcomes)

    def _found(self, text: Outcome) -> Found:
        taps, most = text.scored.taps, slice(0, _MOST)
        if self._config.find == "cosine":
            streams = [taps[f"hidden.{i}"][most] for i in range(self._target.num_layers + 1)]
            return by_cosine(streams, self._count)
        guess_T = self._target.head(taps["hidden.-1"][most]).argmax(1)
        return search(
            self._target,
            text.fed[most],
            guess_T,
            count=self._count,
            trials=self._config.trials,
            clock=self.clock,
        )

    def _adopt(self, found: Found) -> None:
        """Draft with this set from now on, and remember it."""
        clock = self.clock
        self.skip = found.skip
        self.traits = replace(self.traits, taps=frozenset())
        self.model = part(self._target, found.skip)
        self.model.clock = clock
        self.cache = self.model.new_cache()
        for state in self._living:  # their texts are read anew at their next drafts
            state.slot, state.draft, state.lead, state.row = self.cache.open(), None, 0, {}
        if found.skip:
            remember(self.file(self._config, self._target), found, self._target)

    def end(self, state: ModelState) -> None:
        self._living.remove(state)
        super().end(state)
