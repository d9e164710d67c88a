"""Which topic a prompt is of: a cheap router for drafters that learn a topic each.

    prompt -> counts of its tokens in 1024 buckets, rare tokens weighing more -> nearest centroid

Everything is topic 0 until texts come that are unlike it. A text counts as foreign if its likeness
to its nearest topic is low for that topic. It also does if it is more like the foreign texts so far.
Those gather around a centroid, which becomes a topic when it has ``ENOUGH`` of them. So a stream that
changes its subject opens a topic, and a single odd prompt does not.

The paper routes by language or by a classifier of subjects: Liu et al. 2023, arXiv:2310.07177,
section 4. Counts of tokens tell both, need no model and cost microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outpace.errors import ModelError
from outpace.files import parse_json, write_whole
from outpace.models.fields import brief

Vector = npt.NDArray[np.float32]
TOPICS = "topics.json"
"""What tells topics apart, in the folder of what is learned."""

BUCKETS = 1024
READ = 512
"""Tokens of a prompt that are looked at, the last ones."""
ENOUGH = 8
"""Foreign texts that make a topic; also the texts that a topic must have before any is foreign."""
FAR = 2.0
"""Standard deviations below a topic's mean likeness at which a text is foreign."""
_SPREAD = 2654435761


@dataclass(slots=True, eq=False)
class _Topic:
    """A centroid, and how like it its texts were."""

    sum_N: Vector = field(default_factory=lambda: np.zeros(BUCKETS, np.float32))
    texts: float = 0.0
    mean: float = 0.0
    square: float = 0.0
    """Mean of squares."""

    def add(self, count_N: Vector, likeness: float) -> None:
        # Old texts fade, so that a topic may drift.
        rate = max(1 / (self.texts + 1), 1 / 256)
        if self.texts:  # the first text is like itself, which says nothing
            rate_of = max(1 / self.texts, 1 / 256)
            self.mean += rate_of * (likeness - self.mean)
            self.square += rate_of * (likeness * likeness - self.square)
        self.sum_N += rate * (count_N / max(float(np.linalg.norm(count_N)), 1e-9) - self.sum_N)
        self.texts += 1

    @property
    def least(self) -> float:
        """Likeness below which a text is foreign."""
        deviation = max(self.square - self.mean * self.mean, 0.0) ** 0.5
        return float(self.mean - FAR * max(deviation, 0.05))


class Router:
    """Topics of one key's prompts.

    Args:
        most: topics at most; 1 puts everything into topic 0 and remembers nothing.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._topics: list[_Topic] = [_Topic()]
        self._foreign = _Topic()
        self._seen_N = np.zeros(BUCKETS, np.float32)
        self._texts = 0

    def route(self, prompt: Sequence[int]) -> int:
        """The topic of a prompt, which the router learns from. Cost: microseconds per topic."""
        if self.most == 1 or not prompt:
            return 0
        ids = np.array(prompt[-READ:], np.uint64)
        bucket = (ids * np.uint64(_SPREAD) >> np.uint64(16)) % np.uint64(BUCKETS)
        count_N = np.log1p(np.bincount(bucket.astype(np.int64), minlength=BUCKETS))
        count_N = count_N.astype(np.float32)
        self._seen_N += count_N > 0
        self._texts += 1
        weight_N = np.log1p(self._texts / (1 + self._seen_N))
        like = [_likeness(count_N, topic.sum_N, weight_N) for topic in self._topics]
        best = int(np.argmax(like))
        full = len(self._topics) >= self.most
        strange = _likeness(count_N, self._foreign.sum_N, weight_N) if self._foreign.texts else 0.0
        near = self._topics[best]
        if not full and near.texts >= ENOUGH and (like[best] < near.least or strange > like[best]):
            self._foreign.add(count_N, strange)
            if self._foreign.texts < ENOUGH:
                return best
            self._topics.append(self._foreign)
            self._foreign = _Topic()
            return len(self._topics) - 1
        near.add(count_N, like[best])
        return best

    def to_json(self) -> dict[str, Any]:
        """Plain data from which ``from_json`` makes the same router."""
        return {
            "topics": [_plain(topic) for topic in self._topics],
            "foreign": _plain(self._foreign),
            "seen": self._seen_N.tolist(),
            "texts": self._texts,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], most: int) -> Router:
        """Read what ``to_json`` gave; topics beyond ``most`` are left out."""
        router = cls(most)
        router._topics = [_topic(one) for one in data["topics"][:most]] or [_Topic()]
        router._foreign = _topic(data["foreign"])
        router._seen_N = _buckets(data["seen"])
        router._texts = int(_count(data["texts"]))
        return router


def write_topics(path: Path, routers: Mapping[str, Router], most: int) -> None:
    """Write the routers of all keys in one step; nothing is written where there are no topics."""
    if most > 1:
        said = {name: router.to_json() for name, router in routers.items()}
        write_whole(path, json.dumps(said) + "\n")


def read_topics(path: Path, most: int) -> dict[str, Router]:
    """Read what ``write_topics`` wrote; nothing if it is not there.

    Raises:
        ModelError: a file that cannot be used; says what to delete.
    """
    if most == 1 or not path.is_file():
        return {}
    try:
        said = parse_json(path.read_bytes())
        return {name: Router.from_json(one, most) for name, one in said.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} cannot be used: {brief(error)}; delete {path.parent} to learn anew"
        ) from error


def _likeness(count_N: Vector, sum_N: Vector, weight_N: Vector) -> float:
    """Cosine of the angle between two weighted vectors; 0 if one is empty."""
    a_N, b_N = count_N * weight_N, sum_N * weight_N
    length = float(np.linalg.norm(a_N) * np.linalg.norm(b_N))
    return float(a_N @ b_N) / length if length > 0 else 0.0


def _plain(topic: _Topic) -> dict[str, Any]:
    return {
        "sum": [round(float(x), 6) for x in topic.sum_N],
        "texts": topic.texts,
        "mean": topic.mean,
        "square": topic.square,
    }


def _topic(data: Mapping[str, Any]) -> _Topic:
    return _Topic(_buckets(data["sum"]), *(_count(data[name]) for name in ("texts", "mean", "square")))


def _buckets(data: Any) -> Vector:
    found_N = np.array(data, np.float32)
    # Rounding may leave less than nothing, but no number near -1, which counts are divided by.
    if found_N.shape != (BUCKETS,) or not (found_N > -0.5).all() or not np.isfinite(found_N).all():
        raise ValueError(f"a topic needs {BUCKETS} numbers from 0 on")
    return found_N


def _count(data: Any) -> float:
    if not -0.5 < float(data) < 1e15:
        raise ValueError(f"a topic cannot have {float(data):g} texts, or such a likeness")
    return float(data)
