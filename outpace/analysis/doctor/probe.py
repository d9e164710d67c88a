"""Ask a drafter at fixed positions of known texts, with what it reads changed or not.

The target answers prompts once. At every position asked, the drafter begins anew, is shown the whole
text so far with the target's features, and drafts a chain. So two drafters, or one with and without a
change of its features, are compared at the same positions.

Shape letters: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.cache.base import Lease
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Drafter, Request
from outpace.engine.engine import Engine
from outpace.errors import LogitsError
from outpace.models.base import TAPS, Target
from outpace.params import NEUTRAL, SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.types import Budget, Draft, Drawn, Feed, Outcome, Scored, Verdict

_CHUNK = 256
"""Rows of a pass while a text is read."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A text of the target, with what its passes gave."""

    ids: tuple[int, ...]
    start: int
    """First position of the answer."""
    taps: Mapping[str, Tensor]
    """Name -> [T - 1, H]; of every token but the last."""
    logits_TV: Tensor
    """Of the answer's tokens but the last one, and of the token before them."""

    def places(self, every: int) -> range:
        """Numbers of committed tokens at which the drafter is asked."""
        return range(self.start + 1, len(self.ids), every)


@dataclass(frozen=True, slots=True)
class Lens:
    """A change of the features that a drafter reads."""

    taps: Mapping[str, str] = field(default_factory=dict)
    """Feature of the drafter -> the one that it gets."""
    shift: int = 0
    """Row t gets the feature of row t + shift; the last row that of the last one."""
    change: Callable[[Tensor], Tensor] | None = None

    def of(self, answer: Answer, names: frozenset[str], count: int) -> dict[str, Tensor]:
        """The features of the first ``count`` rows."""
        row_T = (torch.arange(count) + self.shift).clamp_(0, count - 1)
        found = {}
        for name in names:
            taken = answer.taps[self.taps.get(name, name)][:count]
            taken = taken if self.shift == 0 else taken[row_T.to(taken.device)]
            found[name] = taken if self.change is None else self.change(taken)
        return found


AS_IS = Lens()


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of one position."""

    levels: int
    accepted: int
    guess: int | None
    """The first one."""
    before: int
    """The pending token."""
    after: tuple[int, ...]
    """What follows it."""
    context: int
    broken: bool = False
    """Whether the drafter's numbers were not finite."""

    @property
    def right(self) -> bool:
        return self.accepted > 0


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, taps: frozenset[str]
) -> list[Answer]:
    """Answer prompts plainly and greedily, and keep what the passes over the answers give.

    Memory: these features of all tokens, and logits for those of the answers.
    """
    params = SamplingParams(**NEUTRAL, max_new_tokens=max_new_tokens, ignore_eos=True)
    results = engine.generate([list(ids) for ids in prompts], params, drafter="none")
    return [
        read(engine.target, (*ids, *result.tokens), len(ids), taps)
        for ids, result in zip(prompts, results, strict=True)
    ]


def layer_taps(target: Target) -> list[str]:
    """Features behind every layer, the last one before and behind the final norm."""
    if TAPS not in target.can:
        return []
    return [*(f"hidden.{layer}" for layer in range(target.num_layers + 1)), "hidden.-1"]


def read(target: Target, ids: tuple[int, ...], start: int, names: frozenset[str]) -> Answer:
    """Pass over a text, for the features named."""
    cache = target.new_cache(len(ids))
    slot = cache.open()
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    logits: list[Tensor] = []
    with torch.inference_mode():
        for begin in range(0, len(ids) - 1, _CHUNK):
            chunk = ids[begin : min(begin + _CHUNK, len(ids) - 1)]
            want = tuple(range(max(0, start - 1 - begin), len(chunk)))
            scored = target.score([Feed.chain(slot, chunk, want=want)], cache, taps=names)
            for name in names:
                parts[name].append(scored.taps[name].clone())
            if want:
                logits.append(scored.logits_TV.clone())
            cache.keep(slot, range(len(chunk)))
    taps = {name: torch.cat(each) for name, each in parts.items()}
    return Answer(ids, start, taps, torch.cat(logits))


class Probe:
    """Texts and positions to ask at.

    Args:
        target: which made the texts.
        texts: from ``answers``.
        every: ask at every so many-th token.
    """

    def __init__(self, target: Target, texts: Sequence[Answer], every: int = 2) -> None:
        self.target, self.texts, self.every = target, texts, every
        self._cache = target.new_cache()

    def ask(self, drafter: Drafter[Any], lens: Lens = AS_IS, depth: int = 1) -> list[Asked]:
        """Ask at every position, text by text."""
        return [one for text in self.texts for one in self._of(drafter, text, lens, depth)]

    def _of(self, drafter: Drafter[Any], text: Answer, lens: Lens, depth: int) -> Iterator[Asked]:
        """Ask along one text; a slot of the target's cache goes with it for those that draft there."""
        slot = self._cache.open() if drafter.traits.uses_target_cache else None
        warp = Warp(
            SamplingParams(temperature=0.0), text.ids[: text.start], frozenset(), self.target.vocab_size
        )
        done = 0
        try:
            for place in text.places(self.every):
                if slot is not None:
                    with torch.inference_mode():
                        fed = text.ids[done : place - 1]
                        self.target.score([Feed.chain(slot, fed, want=())], self._cache)
                        self._cache.keep(slot, range(len(fed)))
                    done = place - 1
                yield self._at(drafter, text, place, lens, depth, slot, warp)
        finally:
            if slot is not None:
                self._cache.close(slot)

    def _at(
        self,
        drafter: Drafter[Any],
        text: Answer,
        place: int,
        lens: Lens,
        depth: int,
        slot: int | None,
        warp: Warp,
    ) -> Asked:
        tokens, after = text.ids[:place], text.ids[place:]
        state = drafter.begin(Request(prompt=text.ids[: text.start]))
        broken, draft = False, Draft()
        try:
            with torch.inference_mode():
                drafter.observe([state], [self._shown(text, place - 1, lens, drafter.traits.taps)])
                row: DraftRow[Any] = DraftRow(
                    state,
                    list(tokens),
                    Budget(depth, depth),
                    KeyedCoins(0, place, Stream.DRAFT),
                    warp,
                    Drawn.CHOSEN,
                    None if slot is None else Lease(self._cache, slot),
                    chain=True,
                )
                (draft,) = drafter.propose([row])
        except LogitsError:
            broken = True
        finally:
            if slot is not None:
                self._cache.drop(slot)
            drafter.end(state)
        return Asked(
            levels=draft.levels,
            accepted=len(draft.path_of(after)),
            guess=draft.token_N[0] if len(draft) else None,
            before=tokens[-1],
            after=after,
            context=place,
            broken=broken,
        )

    def _shown(self, text: Answer, count: int, lens: Lens, names: frozenset[str]) -> Outcome:
        """The first ``count`` tokens as a prompt that was read in one pass."""
        taps = lens.of(text, names, count) if count else {}
        rows_RV = text.logits_TV[: max(0, count - text.start + 1)]
        scored = Scored(rows_RV[-1:], (0, len(rows_RV[-1:])), taps, (0, count))
        fed = text.ids[:count]
        emitted = text.ids[count : count + 1]
        return Outcome(Draft(), scored, Verdict((), emitted), fed, tuple(range(count)), 0, forced=True)
