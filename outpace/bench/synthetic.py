"""A drafter of a given quality, to see what it would be worth here. Not a method: it cheats.

It looks the answer up from a plain run of the same prompt. Its guess at depth i is right with
rate a_i, given that the guesses before it were. Otherwise it is a token that differs from the
answer's. Guessing costs nothing, so what it shows is a bound: a real drafter of this quality
gains less, by the price of its own passes. Rows of it are marked ``synthetic``.

The rates hold where the text is that of the plain run: greedy, or reproducible.
"""

from __future__ import annotations

import zlib
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.bench.ours import Ours
from outpace.bench.records import Case, Settings
from outpace.config import MethodSpec
from outpace.drafters.base import Drafter, Request
from outpace.engine.engine import Engine
from outpace.engine.method import SingleMethod
from outpace.errors import RequestError, SpecError
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import Budget, Draft, Outcome

Texts = MutableMapping[tuple[str, int, bool], tuple[int, ...]]
"""(id of a case, its seed, whether reproducible) -> what plain decoding answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticConfig:
    acceptance: tuple[float, ...]
    """Rate at depth 1, 2, ..., given that the guesses before were right; as many as are drafted."""

    def __post_init__(self) -> None:
        if not self.acceptance or not all(0 <= rate <= 1 for rate in self.acceptance):
            raise ValueError(f"acceptance must be rates in [0, 1], got {self.acceptance}")


@dataclass(frozen=True, slots=True)
class _State:
    start: int
    """Tokens of the prompt."""
    answer: tuple[int, ...]
    salt: int
    """Keeps prompts of one length from making the same mistakes: their coins are the same."""


class SyntheticDrafter(Drafter[_State]):
    """Guesses the request's reference, which has to be the answer, with mistakes on purpose."""

    Config = SyntheticConfig

    def __init__(self, config: SyntheticConfig, vocab_size: int) -> None:
        self.config = config
        self._vocab_size = vocab_size

    @classmethod
    def load(cls, config: SyntheticConfig, target: Target) -> SyntheticDrafter:
        return cls(config, target.vocab_size)

    def begin(self, request: Request) -> _State:
        salt = zlib.crc32(repr(request.prompt).encode())
        return _State(len(request.prompt), request.reference or (), salt)

    def propose(self, rows: Sequence[DraftRow[_State]]) -> list[Draft]:
        """A chain each, CHOSEN, as long as there are rates and the answer goes on."""
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow[_State]) -> Draft:
        at = len(row.tokens) - row.state.start
        length = min(row.budget.max_depth, row.budget.max_nodes, len(self.config.acceptance))
        guesses = list(row.state.answer[at : at + length])
        for depth, rate in enumerate(self.config.acceptance[: len(guesses)]):
            if not row.coins.flip(rate, depth, row.state.salt):
                guesses[depth] = (guesses[depth] + 1) % self._vocab_size
                break  # what follows a mistake is refused with it, but has its price in rows
        return Draft.chosen(guesses)

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Learn nothing: it knows all."""


class Synthetic(Ours):
    """The drafter as a contender.

    Args:
        texts: plain answers; whoever runs the benchmark fills them in before this contender's
            turn.

    Raises:
        SpecError: rates outside [0, 1], or none.
    """

    def __init__(self, engine: Engine, acceptance: Sequence[float], texts: Texts) -> None:
        try:
            config = SyntheticConfig(acceptance=tuple(acceptance))
        except ValueError as error:
            raise SpecError(f"synthetic drafter: {error}") from None
        method = SingleMethod(MethodSpec("none"), engine.target)
        method.drafter = SyntheticDrafter.load(config, engine.target)
        method.budget = Budget(max_nodes=len(acceptance), max_depth=len(acceptance))
        method.spec = f"synthetic[acceptance={','.join(f'{rate:g}' for rate in acceptance)}]"
        super().__init__(engine, method)
        about: dict[str, Any] = {"synthetic": True, "drafting": "looked up, costs nothing"}
        self.about = {**self.about, **about}
        self._texts = texts

    def reference(self, case: Case, settings: Settings) -> tuple[int, ...]:
        """The answer itself.

        Raises:
            RequestError: the answer is not known, or depends on the guesses.
        """
        if settings.temperature > 0 and not settings.reproducible:
            raise RequestError(
                f"{self.name} cannot know the answer at temperature {settings.temperature:g} "
                "unless the text is reproducible"
            )
        known = self._texts.get((case.id, case.seed, settings.reproducible))
        if known is None:
            raise RequestError(f"{self.name} has no plain answer to prompt {case.id}")
        return known


def read_rates(text: str) -> tuple[float, ...]:
    """Read ``0.9,0.8``.

    Raises:
        SpecError: a word that is no number.
    """
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise SpecError(
            f"--synthetic-acceptance {text!r} is not a list of rates; write 0.9,0.8,0.7"
        ) from None
