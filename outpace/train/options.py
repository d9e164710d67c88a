"""Settings of ``outpace train``: of the method, of its data, of the loop, as one list of pairs.

layers=2          an option of the method
data.greedy=0.3   see GenerateConfig
loop.lr=0.001     see LoopConfig
pipeline.vocab=4096    see PipelineConfig
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outpace import registry
from outpace.config import build
from outpace.errors import SpecError, UnknownNameError, shown
from outpace.models.base import Target
from outpace.train.generate import MOST, GenerateConfig
from outpace.train.loop import LoopConfig
from outpace.train.objective import Objective
from outpace.train.vocab import always_kept, reduced_vocab


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    vocab: int | None = 8192
    """Size of the draft vocabulary; none: the target's whole."""
    coverage: float = 0.0
    """Share of the held-out answers' tokens that it must hold: a smaller vocabulary grows until it does."""
    tokens_per_batch: int = 2048
    """Most tokens of a training batch, padding included."""
    max_length: int = 1024
    """Longer sequences lose their ends."""
    feature_gb: float = 20.0
    """Disk for the target's features, GB; those that find no room are computed again when needed."""
    epochs: float = 4.0
    """Times that training sees all data, where neither loop.steps nor loop.minutes is given."""

    def __post_init__(self) -> None:
        for name in ("tokens_per_batch", "max_length"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ValueError(f"{name} must be in [1, {MOST}], got {shown(getattr(self, name))}")
        for name in ("feature_gb", "epochs"):
            if getattr(self, name) > MOST:
                raise ValueError(f"{name} must be at most {MOST}, got {shown(getattr(self, name))}")
        if self.feature_gb < 0:
            raise ValueError(f"feature_gb must be at least 0, got {self.feature_gb}")
        if not 0 <= self.coverage <= 1:
            raise ValueError(f"coverage must be in [0, 1], got {self.coverage}")
        if self.epochs <= 0:
            raise ValueError(f"epochs must be above 0, got {self.epochs}")
        if self.vocab is not None and not 1 <= self.vocab <= MOST:
            raise ValueError(f"vocab must be in [1, {MOST}], or none for all, got {shown(self.vocab)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    method: str
    objective: type[Objective]
    own: Any
    """The method's own config."""
    data: GenerateConfig
    pipeline: PipelineConfig
    loop: tuple[tuple[str, str], ...]
    """As given: how long training is may depend on the data."""

    def loop_config(self, batches: int) -> LoopConfig:
        """How to train on so many batches per epoch.

        Raises:
            SpecError: a setting that cannot be.
        """
        given = dict(self.loop)
        if not {"steps", "minutes"} & set(given):
            given["steps"] = str(max(1, round(self.pipeline.epochs * batches)))
        return build(LoopConfig, given, "the training loop")

    def trial(self, target: Target) -> Objective:
        """The objective as training will build it, over a draft vocabulary that no answer has decided yet.

        Raises:
            ModelError: the target cannot serve it, or a setting does not fit the target.
            RequestError: a draft vocabulary without room for the tokens that it must have.
        """
        size, vocab = self.pipeline.vocab, None
        if size is not None and size < target.vocab_size:
            vocab = reduced_vocab(np.zeros(target.vocab_size, np.int64), size, always_kept(target))
        return self.objective.build(self.own, target, vocab)

    def to_json(self) -> dict[str, Any]:
        """What decides about the weights; the amount of data is told by the data themselves."""
        return {
            "method": self.method,
            "options": dataclasses.asdict(self.own),
            "pipeline": dataclasses.asdict(self.pipeline),
            "loop": dict(self.loop),
        }


def objective(method: str) -> type[Objective]:
    """The objective of a method.

    Raises:
        UnknownNameError: none is called that.
    """
    found: type[Objective] = registry.load("objective", method)
    return found


def read_pairs(who: str, pairs: Sequence[str], groups: Mapping[str, type]) -> dict[str, dict[str, str]]:
    """Sort ``key=value`` and ``group.key=value`` pairs by group; later ones win.

    Args:
        groups: name, empty for that without one -> dataclass whose fields are its keys.

    Raises:
        UnknownNameError: no such setting.
        SpecError: not a pair.
    """
    given: dict[str, dict[str, str]] = {group: {} for group in groups}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or not value:
            raise SpecError(f"--set {pair!r} is not key=value")
        group, dot, name = key.rpartition(".")
        fields = [field.name for field in dataclasses.fields(groups.get(group, groups[""]))]
        if group not in groups or name not in fields or (dot and not group):
            known = [
                f"{prefix}.{field.name}" if prefix else field.name
                for prefix, config in groups.items()
                for field in dataclasses.fields(config)
            ]
            raise UnknownNameError(f"setting of {who}", key, known)
        given[group][name] = value
    return given


def read_options(method: str, pairs: Sequence[str], tokens: int | None = None) -> Options:
    """Read ``key=value`` pairs; later ones win.

    Args:
        tokens: answer tokens wanted, in place of ``data.tokens``.

    Raises:
        UnknownNameError: no such method or setting.
        SpecError: not a pair, or a value that cannot be.
    """
    kind = objective(method)
    groups = {"": kind.Config, "data": GenerateConfig, "loop": LoopConfig, "pipeline": PipelineConfig}
    given = read_pairs(method, pairs, groups)
    if tokens is not None:
        given["data"]["tokens"] = str(tokens)
    options = Options(
        method=method,
        objective=kind,
        own=build(kind.Config, given[""], f"method {method!r}"),
        data=build(GenerateConfig, given["data"], "the data"),
        pipeline=build(PipelineConfig, given["pipeline"], "the pipeline"),
        loop=tuple(sorted(given["loop"].items())),
    )
    options.loop_config(1)  # refuses what cannot be, before hours of other work
    return options
