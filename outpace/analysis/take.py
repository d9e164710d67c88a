"""One answer as it was written: every token with its moment and its author, to be played again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outpace.engine.engine import Engine
from outpace.errors import RequestError
from outpace.params import SamplingParams
from outpace.types import StepRecord

TARGET = "target"


@dataclass(frozen=True, slots=True)
class Piece:
    seconds: float
    """Since the answer was asked for."""
    text: str
    by: str
    """The drafter that guessed it, or ``target``."""


@dataclass(frozen=True, slots=True)
class Take:
    drafter: str
    pieces: tuple[Piece, ...]

    @property
    def seconds(self) -> float:
        return self.pieces[-1].seconds

    @property
    def rate(self) -> float:
        """Tokens per second after the first token."""
        took = self.seconds - self.pieces[0].seconds
        return (len(self.pieces) - 1) / took if took > 0 else 0.0

    @property
    def authors(self) -> tuple[str, ...]:
        """The drafters that wrote something, the busiest first."""
        names = [piece.by for piece in self.pieces if piece.by != TARGET]
        return tuple(sorted(dict.fromkeys(names), key=lambda name: (-names.count(name), name)))

    def at(self, seconds: float) -> list[tuple[str, str]]:
        """(text, author) of every stretch by one author that is there at this moment."""
        out: list[tuple[str, str]] = []
        for piece in self.pieces:
            if piece.seconds > seconds:
                break
            if out and out[-1][1] == piece.by:
                out[-1] = out[-1][0] + piece.text, piece.by
            else:
                out.append((piece.text, piece.by))
        return out


def take(engine: Engine, drafter: str, ids: Sequence[int], params: SamplingParams) -> Take:
    """Answer a prompt, and note who wrote what when.

    Raises:
        RequestError: the model has no tokenizer, so there is no text to show.
    """
    if engine.target.tokenizer is None:
        raise RequestError(f"{engine.target.name} has no tokenizer, so there is no text to show")
    stream = engine.target.tokenizer.text_stream(continues=True)
    pieces: list[Piece] = []
    began = time.perf_counter()

    def listen(record: StepRecord) -> None:
        now = time.perf_counter() - began
        (row,) = record.rows
        for place, token in enumerate(row.emitted):
            by = row.drafter if place < row.accepted else TARGET
            pieces.append(Piece(now, stream.push((token,)), by))

    with engine.listening(listen):
        engine.generate(list(ids), params, drafter=drafter)
    pieces[-1] = replace(pieces[-1], text=pieces[-1].text + stream.flush())
    return Take(drafter, tuple(pieces))
