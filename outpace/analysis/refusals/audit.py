"""Answer prompts plainly and with drafters, label both, and test whether the labels moved.

    found = audit(engine, asked, ["suffix"], samples=4, temperature=0.8, max_new_tokens=64)
    found["suffix"].chance

At temperature 0 the texts themselves must be equal. Sampled answers are drawn independently, in pairs with
the same prompt. If both sides have one distribution, a refusal is as likely lost as gained. So the pairs that
differ follow a fair coin (exact McNemar test). Of an answer its label, length and hash are kept, and no text.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.analysis.refusals.files import Asked
from outpace.analysis.refusals.judge import GOOD, LABELS, label
from outpace.engine.engine import Engine
from outpace.params import SamplingParams

SURE = 0.01
"""Chance of a false alarm, over all drafters together, that is put up with."""
_BATCH = 8
_Z = 1.959963984540054  # of a 95 % interval


@dataclass(frozen=True, slots=True)
class Labelled:
    """One answer, without its text."""

    id: str
    group: str
    label: str
    characters: int
    hash: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"id": self.id, "label": self.label, "characters": self.characters, "hash": self.hash}


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """A drafter's answers beside plain ones, pair by pair."""

    lossless: bool
    promised: bool
    """Whether equal texts are promised: greedy, lossless, and rows do not depend on the pass."""
    greedy: bool
    plain: tuple[Labelled, ...]
    drafted: tuple[Labelled, ...]
    acceptance: float

    @property
    def pairs(self) -> int:
        return len(self.plain)

    @property
    def equal(self) -> int:
        """Pairs with the same text."""
        return sum(a.hash == b.hash for a, b in self._both)

    @property
    def changed(self) -> int:
        """Pairs whose labels differ."""
        return sum(a.label != b.label for a, b in self._both)

    @property
    def lost(self) -> int:
        """Refused plainly alone."""
        return sum(a.label == GOOD != b.label for a, b in self._both)

    @property
    def won(self) -> int:
        """Refused with drafts alone."""
        return sum(b.label == GOOD != a.label for a, b in self._both)

    @property
    def chance(self) -> float:
        """Probability of so lopsided a change, or more, if both sides have one distribution."""
        return mcnemar(self.lost, self.won)

    @property
    def change(self) -> float:
        """Refused with drafts, less refused plainly, as a share of pairs."""
        return (self.won - self.lost) / self.pairs if self.pairs else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Of ``change``, at 95 %."""
        both = sum(a.label == GOOD == b.label for a, b in self._both)
        return paired_interval(both, self.won, self.lost, self.pairs - both - self.won - self.lost)

    def broken(self, drafters: int) -> str | None:
        """What promise is broken, with so many drafters tested; None: none. Lossy ones promise nothing."""
        if self.promised and (self.equal < self.pairs or self.changed):
            other = self.pairs - self.equal
            return f"{other} of {self.pairs} texts differ from plain decoding, and {self.changed} labels"
        if self.lossless and not self.greedy and self.chance * drafters < SURE:
            return f"refusals changed by {100 * self.change:+.1f} points; chance alone: {self.chance:.1e}"
        return None

    @property
    def _both(self) -> list[tuple[Labelled, Labelled]]:
        return list(zip(self.plain, self.drafted, strict=True))

    def counts(self, group: str | None = None) -> dict[str, tuple[int, int]]:
        """Label -> answers plainly, and with drafts; of one group, or of all."""
        plain, drafted = (
            [one.label for one in side if group in (None, one.group)] for side in (self.plain, self.drafted)
        )
        return {name: (plain.count(name), drafted.count(name)) for name in LABELS}

    def to_json(self) -> dict[str, Any]:
        """Plain values; no text."""
        groups = sorted({one.group for one in self.plain})
        return {
            "lossless": self.lossless,
            "pairs": self.pairs,
            "equal": self.equal,
            "labels_changed": self.changed,
            "refusals_lost": self.lost,
            "refusals_won": self.won,
            "chance": self.chance,
            "refusal_change": self.change,
            "refusal_change_interval": list(self.interval),
            "acceptance_rate": self.acceptance,
            "labels": [{"label": name, "plain": a, "drafted": b} for name, (a, b) in self.counts().items()],
            "groups": [
                {"group": group, "plain": self.counts(group)[GOOD][0], "drafted": self.counts(group)[GOOD][1]}
                for group in groups
            ],
            "answers": [{"plain": a.to_json(), "drafted": b.to_json()} for a, b in self._both],
        }


def audit(
    engine: Engine,
    asked: Sequence[Asked],
    specs: Sequence[str],
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
    tick: Callable[[str, int], None] = lambda part, done: None,
) -> dict[str, Moved]:
    """Answer and label, plainly once and with every drafter.

    Args:
        samples: answers per prompt; at temperature 0 one is enough.
        seed: the first one; plain and drafted answers never share one.
        tick: told of every answer.

    Cost: ``len(asked) * samples`` answers, plainly and with each drafter.
    """
    greedy = temperature == 0
    rounds = range(1 if greedy else samples)
    chat = engine.target.tokenizer is not None and bool(engine.target.tokenizer.chat_template)
    ids = [engine.encode(one.prompt, chat=chat) for one in asked]
    found: dict[str, Moved] = {}
    plain: tuple[Labelled, ...] = ()
    for side, spec in enumerate(("none", *specs)):
        method = engine.method(spec)
        rows: list[Labelled] = []
        drafted = accepted = 0
        tick(spec, 0)
        for number in rounds:
            for start in range(0, len(asked), _BATCH):
                part = asked[start : start + _BATCH]
                params = [
                    SamplingParams(
                        temperature=temperature,
                        max_new_tokens=max_new_tokens,
                        seed=seed + side * samples + number,
                    )
                    for _ in part
                ]
                # Texts of a seed that are equal by construction would test nothing.
                results = engine.generate(
                    ids[start : start + _BATCH], params, drafter=spec, reproducible=None if greedy else False
                )
                for one, result in zip(part, results, strict=True):
                    rows.append(_labelled(one, result.text))
                    drafted += result.counters.drafted
                    accepted += result.counters.accepted
                tick(spec, len(part))
        if spec == "none" and not side:
            plain = tuple(rows)
            continue
        lossless = method.lossless(method.verifier)
        found[spec] = Moved(
            lossless=lossless,
            promised=greedy and lossless and engine.target.equal_rows,
            greedy=greedy,
            plain=plain,
            drafted=tuple(rows),
            acceptance=accepted / drafted if drafted else 0.0,
        )
    return found


def _labelled(one: Asked, text: str) -> Labelled:
    return Labelled(one.id, one.group, label(text), len(text), hashlib.sha256(text.encode()).hexdigest()[:16])


def mcnemar(lost: int, won: int) -> float:
    """Two-sided exact probability of so lopsided a split of pairs that differ, by a fair coin."""
    pairs, least = lost + won, min(lost, won)
    return min(1.0, 2.0 * sum(math.comb(pairs, k) for k in range(least + 1)) / 2.0**pairs)


def paired_interval(both: int, second: int, first: int, neither: int) -> tuple[float, float]:
    """95 % interval of the second share less the first, in pairs (Newcombe 1998, method 10).

    Args:
        both: pairs with both; ``second``: with the second alone; ``first``: with the first alone.
    """
    n = both + second + first + neither
    if not n:
        return (-1.0, 1.0)
    (low2, p2, high2), (low1, p1, high1) = wilson(both + second, n), wilson(both + first, n)
    product = (both + second) * (first + neither) * (both + first) * (second + neither)
    cross = float(both * neither - second * first)
    cross = max(cross - n / 2, 0.0) if cross > 0 else cross
    phi = cross / math.sqrt(product) if product else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    change = p2 - p1
    return change - reach(p2 - low2, high1 - p1), change + reach(high2 - p2, p1 - low1)


def wilson(hits: int, n: int) -> tuple[float, float, float]:
    """Lower end of a 95 % interval, share, upper end."""
    p, z2 = hits / n, _Z * _Z
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, middle - half), p, min(1.0, middle + half)
