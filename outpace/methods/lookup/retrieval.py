"""Retrieval (REST): what followed these words in a corpus may follow them here.

    corpus    ... thank you very much for ...  ... thank you very kindly. ...  ... you very much.
    text      I thank you very                 longest suffix in the corpus: "thank you very"
    draft     much -> for     kindly -> .      a trie of what followed, the commonest first

Pays where text like the corpus is written: code of one house, letters after a pattern, answers
that were given before. On other text it drafts nearly as often, and is nearly always wrong: ask
for longer suffixes then (``min_ngram``). Needs no weights; the corpus is built once, with
``outpace build datastore``.

Cost: a bisection (tens of microseconds), then some numpy calls per node that has children and
more than one occurrence left. Memory: mapped from the file.
Paper: He et al. 2023 (REST), arXiv:2311.08252. Its trie is cut to the most frequent nodes; here
a dynamic tree is, and a template takes the most frequent child at every place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outpace.drafters.base import Request, Traits
from outpace.drafters.rowwise import RowwiseDrafter
from outpace.files import expanded
from outpace.methods.lookup.datastore import DEPTH, Datastore
from outpace.methods.lookup.pool_trees import fill
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import Draft, Outcome

Places: TypeAlias = "NDArray[Any]"
"""Places in the corpus of the tokens that come next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalConfig:
    REMEDY: ClassVar[str] = ", a file; make one with `outpace build datastore FILES --out FILE`"
    store: str
    """The file that ``outpace build datastore`` wrote, for the same vocabulary."""
    max_ngram: int = 16
    """Longest suffix to search for, in tokens. The longest that is found is used."""
    min_ngram: int = 2
    """Shortest suffix worth a draft."""
    matches: int = 256
    """Most occurrences of the suffix that are looked at, evenly spread over all."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram <= DEPTH:
            raise ValueError(
                f"need 1 <= min_ngram <= max_ngram <= {DEPTH}, got {self.min_ngram} and {self.max_ngram}"
            )
        if self.matches < 1:
            raise ValueError(f"matches must be at least 1, got {self.matches}")


class Retrieval(RowwiseDrafter[None]):
    """Continues the longest suffix of the text that a corpus holds.

    Args:
        store: the corpus; shared by all sequences, never changed.
    """

    Config = RetrievalConfig
    traits = Traits(default_nodes=6)

    def __init__(self, config: RetrievalConfig, store: Datastore) -> None:
        self.config = config
        self.store = store

    @classmethod
    def load(cls, config: RetrievalConfig, target: Target) -> Retrieval:
        store = Datastore.open(expanded(config.store))
        store.check_fits(target)
        return cls(config, store)

    def begin(self, request: Request) -> None:
        """Nothing to keep: the text itself says what to look up."""

    def propose_one(self, row: DraftRow[None]) -> Draft:
        """The commonest continuations, CHOSEN; empty where no suffix is found."""
        config = self.config
        found = self.store.find(row.tokens[-config.max_ngram :], config.max_ngram, config.min_ngram)
        if found is None:
            return Draft()
        length, span = found
        if len(span) > config.matches:
            order = np.arange(config.matches) * len(span) // config.matches + span.start
        else:
            order = np.arange(span.start, span.stop)
        next_ = self.store.suffix_M[order].astype(np.int64) + length
        return fill(row.budget, next_, self._ranked)

    def _ranked(self, places: Places) -> Iterator[tuple[int, float, Places]]:
        """The tokens at these places, commonest first, each with the places after it."""
        end = self.store.vocab_size
        if len(places) == 1:
            token = int(self.store.token_M[places[0]])
            if token != end:
                yield token, 1.0, places + 1
            return
        tokens = self.store.token_M[places].astype(np.int64)
        order = tokens.argsort(kind="stable")
        tokens = tokens[order]
        edges = [0, *(np.flatnonzero(tokens[1:] != tokens[:-1]) + 1).tolist(), len(tokens)]
        runs = sorted(pairwise(edges), key=lambda run: run[0] - run[1])
        for start, stop in runs:
            token = int(tokens[start])
            if token != end:
                yield token, (stop - start) / len(places), places[order[start:stop]] + 1

    def observe(self, states: Sequence[None], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""
