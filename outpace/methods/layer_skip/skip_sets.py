"""Which attentions and MLPs a model can do without: written down, measured on a text, remembered.

    4+7      layers 4 and 7, whole
    a4+m9    the attention of layer 4, the MLP of layer 9

A set is judged as it will be used. The target reads a text once. Then one pass of what the set leaves
guesses after every token at once. Guesses are riders, which do not see each other. Each sees the
target's own keys and values of all before it. So a set costs a pass.

Shape letters: T tokens judged, L layers, H hidden size.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.errors import ModelError, shown
from outpace.files import write_whole
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.models.fields import read_json
from outpace.types import Feed, Riders

LOG = logging.getLogger("outpace.layer_skip")

_PART = re.compile(r"([am]?)(\d+)")


@dataclass(frozen=True, slots=True)
class SkipSet:
    """Sub-layers to leave out."""

    attentions: frozenset[int] = frozenset()
    mlps: frozenset[int] = frozenset()

    @classmethod
    def read(cls, text: str) -> SkipSet | None:
        """The set that a text such as ``4+a7+m9`` names; None if it names none."""
        found = [_PART.fullmatch(part) for part in text.split("+")]
        named = [(one[1], int(one[2])) for one in found if one is not None]
        if len(named) < len(found):
            return None
        return cls(
            frozenset(layer for kind, layer in named if kind != "m"),
            frozenset(layer for kind, layer in named if kind != "a"),
        )

    def __str__(self) -> str:
        whole, named = self.attentions & self.mlps, []
        for layer in sorted(self.attentions | self.mlps):
            kind = "" if layer in whole else "a" if layer in self.attentions else "m"
            named.append(f"{kind}{layer}")
        return "+".join(named)

    def __len__(self) -> int:
        return len(self.attentions) + len(self.mlps)

    @property
    def first(self) -> int:
        """The first layer that misses something; below it all is as in the target."""
        return min(self.attentions | self.mlps, default=0)

    def fits(self, layers: int) -> bool:
        """Whether a model has all of this, and more."""
        named = self.attentions | self.mlps
        return 0 < len(self) < 2 * layers and all(0 <= layer < layers for layer in named)

    def part(self, target: Target) -> Target:
        """The target without this; it shares the weights, and caches fit."""
        return target.without(attentions=self.attentions, mlps=self.mlps)


@dataclass(frozen=True, slots=True)
class Found:
    """A set, and what is known of it."""

    skip: SkipSet
    agreement: float
    """Share of the target's likeliest tokens that it guessed."""
    cost: float
    """Of a guess, in whole passes, by weights read."""
    tried: int
    """Sets tried."""


def even(layers: int, count: int) -> SkipSet:
    """``count`` whole layers, or as many as may go, evenly spread; the first and the last stay."""
    middle = range(1, layers - 1)
    count = min(count, len(middle))
    chosen = frozenset(middle[(2 * i + 1) * len(middle) // (2 * count)] for i in range(count))
    return SkipSet(chosen, chosen)


def behind(exits: Sequence[int], layers: int) -> SkipSet | None:
    """All layers behind the last exit; None: there is none."""
    rest = frozenset(range(max(exits, default=layers), layers))
    return SkipSet(rest, rest) if rest else None


def choices(layers: int) -> list[SkipSet]:
    """Sub-layers that may be left out, one by one: attentions, then MLPs."""
    middle = range(1, layers - 1)
    return [
        *(SkipSet(attentions=frozenset({layer})) for layer in middle),
        *(SkipSet(mlps=frozenset({layer})) for layer in middle),
    ]


def union(parts: Iterable[SkipSet]) -> SkipSet:
    """All of these together."""
    listed = list(parts)
    return SkipSet(
        frozenset().union(*(one.attentions for one in listed)),
        frozenset().union(*(one.mlps for one in listed)),
    )


class Trial:
    """A text that sets are judged on.

    Args:
        tokens: the text; it is read once by the whole target.
        first: guesses are judged from this place on, at least 1.
    """

    def __init__(self, target: Target, tokens: Sequence[int], first: int) -> None:
        self.target = target
        self._judged = tuple(tokens[first:])
        self._nodes = tuple(range(first - 2, len(tokens) - 2))
        self._cache = target.new_cache(len(tokens))
        self._slot = self._cache.open()
        inside = [f"{kind}.{i}" for i in range(target.num_layers) for kind in ("hidden", "attn_out")]
        taps = frozenset([*inside, f"hidden.{target.num_layers}"])
        scored = target.score([Feed.chain(self._slot, tokens)], self._cache, taps=taps)
        self._guess_T = scored.logits_TV[first:].argmax(1)
        self._kept = [self._cosines(scored.taps, i, first) for i in range(target.num_layers)]

    def _cosines(self, taps: Mapping[str, Tensor], layer: int, first: int) -> tuple[float, float]:
        """How little the attention and the MLP of a layer turn the residual stream."""
        x_TH, y_TH = taps[f"hidden.{layer}"][first:], taps[f"hidden.{layer + 1}"][first:]
        scale = self.target.config.residual_scale if isinstance(self.target, Decoder) else 1.0
        between_TH = x_TH + scale * taps[f"attn_out.{layer}"][first:]
        first_T = F.cosine_similarity(x_TH, between_TH, dim=-1)
        second_T = F.cosine_similarity(between_TH, y_TH, dim=-1)
        return float(first_T.mean()), float(second_T.mean())

    def likeness(self, part: SkipSet) -> float:
        """Mean cosine between the residual stream before and after what is left out."""
        some = [self._kept[i][0] for i in part.attentions] + [self._kept[i][1] for i in part.mlps]
        return sum(some) / max(1, len(some))

    def agreement(self, skip: SkipSet) -> float:
        """Share of the target's likeliest tokens that the rest guesses. Cost: one pass of the rest."""
        riders = Riders(self._nodes, (-1,) * len(self._nodes), self._judged)
        with torch.no_grad():
            scored = skip.part(self.target).score([Feed(self._slot, (), (), riders=riders)], self._cache)
        assert scored.rider_logits_RV is not None
        return float((scored.rider_logits_RV.argmax(1) == self._guess_T).float().mean())

    def cost(self, skip: SkipSet) -> float:
        """Of a guess, in whole passes, by weights read."""
        return self.target.share(skip.part(self.target))


def recall(file: Path, layers: int) -> SkipSet | None:
    """Read a set; None if there is none, or if the file is damaged, which the log says."""
    try:
        data = read_json(file)
    except ModelError as error:
        LOG.warning("%s; another set will be found", error)
        return None
    if not data:
        return None
    said = data.get("skip")
    skip = SkipSet.read(said) if isinstance(said, str) else None
    if skip is None or not skip.fits(layers):
        wrong = f"{shown(said)} is no part of layers 0 to {layers - 1}"
        LOG.warning("%s is ignored, since %s; another set will be found", file, wrong)
        return None
    return skip


def remember(file: Path, found: Found, target: Target) -> None:
    """Write a set; the file is whole or not there."""
    data = {
        "target": target.name,
        "skip": str(found.skip),
        "agreement": found.agreement,
        "cost": found.cost,
        "tried": found.tried,
    }
    write_whole(file, json.dumps(data))
