"""Suffix drafting: after the longest phrase that occurred before, what followed it most often.

    ... in the old town ... in the new town ... in the old [in the]
    draft   old --- town          as a tree (tree=2x1):   old --- town
                                                          new --- town

A suffix automaton over prompt and output knows the longest suffix of the text that was there
before. It knows what followed it, and how often. The draft goes down that way as long as it pays:
a few tokens after a short match, dozens after a long one (`outpace.drafters.worth`).

``shared=true`` also remembers what the drafter's earlier requests answered, in a bounded store,
and takes whichever of the two promises more. It pays where requests resemble each other: agents
that call the same tools, the same questions again, structured output. What somebody was answered
can be guessed from how fast an answer comes, so requests of different keys have stores apart.
``store=FILE`` keeps the store of requests without a key between runs. It is written once a minute
at most while answers come, beside them, and when the process ends. If it cannot be written, the
log says so, and nothing else changes.

The text at temperature 0, or with ``reproducible``, does not depend on any of this. Otherwise a
request that shares a store gets coins of its own, and a seed promises no text. A draft that was
read off an earlier answer must not meet the coins that made that answer.

Cost: amortised O(1) per token and per drafted token, some 600 bytes per token of a running
sequence. The store takes 36 bytes per token of room, which doubles up to ``capacity``. A draft
takes one look-up in it, of some 10 microseconds.
Paper: Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975; the automaton, SAM-Decoding,
arXiv:2411.10666.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

from outpace.drafters.base import Request, Traits
from outpace.drafters.per_key import PerKey
from outpace.drafters.worth import Chances, grow
from outpace.files import expanded
from outpace.methods.lookup.automaton import SuffixAutomaton
from outpace.methods.lookup.files import vocabulary_digest
from outpace.methods.lookup.follows import AutomatonState, FollowsText
from outpace.methods.lookup.history import LONGEST, History, Keeper
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import Budget, Draft

_KEYS = 16
"""Stores of keys that are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig:
    min_match: int = 1
    """Shortest suffix worth a draft, tokens. 2 drafts less, and is more often right."""
    factor: float | None = None
    """Draft at most so many tokens per token of the match; none: as many as pay."""
    shared: bool = False
    """Look into the answers of past requests as well."""
    capacity: int = 1 << 20
    """Tokens that the shared store holds; beyond it the oldest answers go."""
    store: str | None = None
    """File that the shared store is read from, and written to now and then; implies ``shared``. Of
    several processes that write it the last one wins."""

    def __post_init__(self) -> None:
        if self.min_match < 1:
            raise ValueError(f"min_match must be at least 1, got {self.min_match}")
        if self.factor is not None and not self.factor > 0:
            raise ValueError(f"factor must be above 0, got {self.factor}")
        if not 4096 <= self.capacity <= 1 << 30:
            raise ValueError(f"capacity must be between 4096 and {1 << 30}, got {self.capacity}")


@dataclass(slots=True, eq=False, kw_only=True)
class _State(AutomatonState):
    prompt: int
    """Tokens of its prompt."""
    history: History | None = None
    """Answers of past requests of its key."""


class Suffix(FollowsText[_State]):
    """Follows what came most often after the longest suffix that came before.

    Args:
        history: answers of past requests; None keeps none.
    """

    Config = SuffixConfig
    traits = Traits(default_nodes=20, previews=True)

    def __init__(
        self, config: SuffixConfig, history: History | None = None, keeper: Keeper | None = None
    ) -> None:
        self.config = config
        self.history = history
        self.traits = replace(self.traits, deterministic=history is None)
        self._keeper = keeper
        self._of_key = PerKey(lambda: History(config.capacity), _KEYS)

    @classmethod
    def load(cls, config: SuffixConfig, target: Target) -> Suffix:
        """Read the store, if one is named and exists already.

        Raises:
            ModelError: the store is damaged, or made for another vocabulary.
        """
        if config.store is None:
            return cls(config, History(config.capacity) if config.shared else None)
        digest, path = vocabulary_digest(target.tokenizer, target.vocab_size), expanded(config.store)
        known = path.exists()
        history = History.load(path, digest, config.capacity) if known else History(config.capacity)
        keeper = Keeper(history, path, digest)
        drafter = cls(config, history, keeper)
        weakref.finalize(drafter, keeper.close)  # also when the process ends
        return drafter

    def begin(self, request: Request) -> _State:
        """The text that is held already; the rest of the prompt arrives through ``observe``."""
        return _State(
            known=SuffixAutomaton(request.prompt[: request.num_cached]),
            prompt=len(request.prompt),
            history=self._history(request.key),
        )

    def _history(self, key: str) -> History | None:
        """The store of a key; what is named by ``store`` is that of the empty one."""
        if self.history is None or not key:
            return self.history
        return self._of_key.of(key)

    def end(self, state: _State) -> None:
        """Remember the answer, with as much of the prompt's end as a match may need."""
        tokens = state.automaton.tokens
        if state.history is None or len(tokens) <= state.prompt:
            return
        state.history.add(tokens[max(0, state.prompt - LONGEST) :])
        if self._keeper is not None and state.history is self.history:
            self._keeper.grown()

    def propose_one(self, row: DraftRow[_State]) -> Draft:
        """A chain, or a part of the template; CHOSEN, and empty where nothing matches."""
        own = self._from_text(row)
        if row.state.history is None:
            return own
        past = self._from_history(row, row.state.history)
        return past if _worth(past) > _worth(own) else own

    def _from_text(self, row: DraftRow[_State]) -> Draft:
        text, trust = row.state.automaton, row.state.trust
        state, match = next(text.suffixes(), (0, 0))
        if match < self.config.min_match:
            return Draft()

        def first(node: tuple[int, int]) -> list[tuple[int, float, tuple[int, int]]]:
            found = text.likeliest(node[0])
            if found is None:
                return []
            token, count, total, then = found
            return [(token, trust.chance(node[1], count, total), (then, node[1] + 1))]

        def after(node: tuple[int, int]) -> Iterator[tuple[int, float, tuple[int, int]]]:
            found = text.after(node[0])
            total = sum([count for _, count, _ in found])
            for token, count, then in found:
                yield token, trust.chance(node[1], count, total), (then, node[1] + 1)

        budget = self._within(row.budget, match)
        chain = budget.shape.parent_N is None and not budget.shape.beam
        return grow(first if chain else after, (state, match), budget, trust.own)

    def _from_history(self, row: DraftRow[_State], history: History) -> Draft:
        found = history.find(row.state.automaton.tokens[-LONGEST:])
        if not found:
            return Draft()
        longest = max(match for _, match in found)
        if longest < self.config.min_match:
            return Draft()
        # Places that agree half as far still say what is usual; shorter ones are about other
        # things.
        alike = [(place, match) for place, match in found if 2 * match >= longest]
        tokens, trust = history.tokens, row.state.trust
        Places = tuple[tuple[int, ...], int]

        def after(node: Places) -> list[tuple[int, float, Places]]:
            places: dict[int, list[int]] = {}
            for place in node[0]:
                if tokens[place + 1] >= 0:
                    places.setdefault(tokens[place + 1], []).append(place + 1)
            total = len(node[0])
            out = [
                (token, trust.chance(node[1], len(at), total), (tuple(at), node[1] + 1))
                for token, at in places.items()
            ]
            return sorted(out, key=lambda item: -item[1])  # newest first where equal

        start = tuple(place for place, _ in alike), min(match for _, match in alike)
        return grow(after, start, self._within(row.budget, longest), trust.own)

    def _within(self, budget: Budget, match: int) -> Budget:
        if self.config.factor is None:
            return budget
        most = max(1, int(self.config.factor * match))
        return replace(budget, max_depth=min(budget.max_depth, most))


def _worth(draft: Draft) -> float:
    return draft.memo.worth if isinstance(draft.memo, Chances) else 0.0
