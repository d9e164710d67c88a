"""What online learning remembers: pieces of text with the target's distributions at judged tokens.

    text     prompt ...... | t u v w x y z         a request, token by token
    judged                   ^   ^     ^           where a guess was refused: p there is known
    piece    [context ....... u v w x y z]         what a training step reads

The distribution at a judged token is kept as its likeliest tokens with their probabilities; what is missing
to 1 is the tail. It lives on the host and is bounded by the number of judged tokens.

Shape letters: R judged tokens, K entries of a distribution, V vocabulary, D draft vocabulary, B pieces,
T tokens, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.methods.draft_model.drafter import DraftModel
from outpace.rows import top
from outpace.train.batches import Batch
from outpace.train.losses import TINY
from outpace.train.versions import Versions

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineConfig:
    topics: int = 1
    """Most topics of one key; each has a drafter of its own."""
    branches: int = 8
    """Most drafters in memory, over all keys and topics; the one least lately used gives way."""
    rows: int = 8192
    """Judged tokens that are remembered to learn from, per drafter."""
    held_rows: int = 1024
    """Judged tokens of held-out requests that are remembered, per drafter."""
    held_out: float = 0.125
    """Share of requests that are held out."""
    top: int = 64
    """Entries of a distribution that are kept."""
    context: int = 32
    """Tokens before the first judged one of a piece."""
    piece: int = 64
    """Tokens of a piece from there on."""
    anchor: float = 0.25
    """Share of accepted tokens that are learned from besides the refused ones."""
    replay: float = 0.25
    """How often an old piece is taken though there are new ones."""
    repeats: float = 3.0
    """Times that a judged token is learned from, in the mean."""
    unit_tokens: int = 384
    """Tokens of a unit of work, the least that ``step`` does at a time. Weights that are read and
    gradients that are written take half of its time."""
    update_units: int = 1
    """Units whose gradients make one update."""
    round_rows: int = 1024
    """Judged tokens that are learned from between two judgements."""
    least_held: int = 256
    """Held-out judged tokens without which nothing is judged."""
    patience: int = 4
    """Judgements without progress after which learning starts from the current version again."""
    kept: int = 3
    """Versions that stay on the disk besides those that may draft."""
    lr: float = 2e-4
    """Learning rate of AdamW, constant."""
    clip: float = 1.0
    """Longest gradient."""
    seed: int = 0
    """Of which requests are held out, and what is replayed."""

    def __post_init__(self) -> None:
        for name in (
            "topics",
            "branches",
            "rows",
            "held_rows",
            "top",
            "piece",
            "unit_tokens",
            "update_units",
            "round_rows",
            "least_held",
            "patience",
            "kept",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not (0 < self.held_out < 1 and 0 <= self.anchor <= 1 and 0 <= self.replay < 1):
            raise ValueError(
                "held_out must be in (0, 1), anchor in [0, 1], replay in [0, 1), got "
                f"{self.held_out}, {self.anchor}, {self.replay}"
            )


@dataclass(slots=True, eq=False)
class Piece:
    """Some tokens of one text, and the target's distributions of those of them that were judged."""

    ids: Ints
    """[T]; the first tokens may be context alone."""
    place_R: Ints
    """Indices into ``ids`` of the judged tokens, ascending, from 1."""
    id_RK: Ints
    """Target ids, likeliest first."""
    p_RK: Floats
    """Their probabilities in the model's own distribution, before any sampling setting."""
    greedy: bool
    """Whether its guesses were chosen, not sampled: acceptance is then agreement."""
    used: int = 0
    """Times that it was learned from."""

    @property
    def rows(self) -> int:
        return len(self.place_R)


class Marks:
    """The judged tokens of a text that grows, until they make a piece."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids = list(prompt)
        self.greedy = True
        self._rows: list[tuple[int, Ints, Floats]] = []

    def add(self, place: int, id_K: Ints, p_K: Floats) -> None:
        """Note the distribution of the token at ``place``, which is behind all noted before."""
        self._rows.append((place, id_K, p_K))

    def piece(self, size: int, context: int, end: bool = False) -> Piece | None:
        """Take what was noted once it spans ``size`` tokens, or if the text ends.

        Args:
            size: tokens from the first judged one on.
        """
        if not self._rows or not (end or len(self.ids) - self._rows[0][0] >= size):
            return None
        rows, self._rows = self._rows, []
        start = max(0, rows[0][0] - max(1, context))
        return Piece(
            ids=np.array(self.ids[start : rows[-1][0] + 1], np.int32),
            place_R=np.array([place - start for place, _, _ in rows], np.int32),
            id_RK=np.stack([ids for _, ids, _ in rows]),
            p_RK=np.stack([p for _, _, p in rows]),
            greedy=self.greedy,
        )


class Buffer:
    """Pieces in order of arrival, bounded: the oldest go first.

    Args:
        most: judged tokens kept at most; the newest piece always stays.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.pieces: list[Piece] = []
        self.rows = 0
        """Judged tokens held."""
        self.added = 0
        """Judged tokens that ever came."""
        self._fresh = 0

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.rows += piece.rows
        self.added += piece.rows
        self._fresh += 1
        while self.rows > self.most and len(self.pieces) > 1:
            self.rows -= self.pieces.pop(0).rows
            self._fresh = min(self._fresh, len(self.pieces))

    def pick(self, tokens: int, coins: np.random.Generator, replay: float) -> list[Piece]:
        """Choose pieces to learn from together: new ones in order, now and then an old one.

        Args:
            tokens: most tokens, padding included; one piece may have more.
            replay: how often an old one is taken though there are new ones.
        """
        taken: list[Piece] = []
        longest = 0
        for _ in range(len(self.pieces)):
            old = len(self.pieces) - self._fresh
            again = old > 0 and (self._fresh == 0 or coins.random() < replay)
            place = int(coins.integers(old)) if again else old
            piece = self.pieces[place]
            longest = max(longest, len(piece.ids))
            if taken and (len(taken) + 1) * longest > tokens:
                break
            if any(piece is one for one in taken):
                break
            taken.append(piece)
            self._fresh -= not again
        for piece in taken:
            piece.used += 1
        return taken

    def since(self, added: int) -> list[Piece]:
        """The pieces that came after ``added`` judged tokens had come."""
        found: list[Piece] = []
        behind = self.added
        for piece in reversed(self.pieces):
            behind -= piece.rows
            if behind < added:
                break
            found.append(piece)
        return found[::-1]


@dataclass(slots=True, eq=False)
class Branch:
    """One drafter that learns, and what it has seen."""

    name: str
    versions: Versions
    train: Buffer
    held: Buffer
    drafter: DraftModel | None = None
    """The version that drafts; None: the drafter that learning started from."""
    training: dict[str, Tensor] | None = None
    """Weights and moments on their way; None: those of the current version."""
    credit: float = 0.0
    """Judged tokens that may be learned from."""
    failures: int = 0
    seen_at: int = 0
    """Held-out judged tokens that had come at the last change or review."""
    closed: bool = False
    """Out of memory; what its texts still say is not heard."""


@dataclass(slots=True, eq=False)
class Text:
    source: Branch
    held: bool
    marks: Marks

    @property
    def branch(self) -> str:
        """Who learns from it and drafts for it."""
        return self.source.name

    @property
    def drafter(self) -> DraftModel | None:
        """The branch's present drafter; None: the one that learning started from."""
        return self.source.drafter


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Version:
    branch: str
    number: int
    """0: what learning started from."""
    drafter: DraftModel | None
    acceptance: float
    """On held-out requests."""
    before: float
    """The other's, on the same."""
    back: bool = False
    """Whether it drafted before, and its successor was worse."""


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """Pieces as a batch, with their distributions in the order of its learning rows."""

    batch: Batch
    id_RK: Tensor
    p_RK: Tensor
    greedy_R: Tensor
    piece_R: Tensor
    """int64: the piece that each row belongs to."""

    @classmethod
    def of(cls, pieces: Sequence[Piece], device: torch.device) -> Lesson:
        """Lay pieces out, padded to the longest."""
        longest = max(len(piece.ids) for piece in pieces)
        token_BT = torch.zeros(len(pieces), longest, dtype=torch.int64)
        answer_BT = torch.zeros(len(pieces), longest, dtype=torch.bool)
        for b, piece in enumerate(pieces):
            token_BT[b, : len(piece.ids)] = torch.from_numpy(piece.ids.astype(np.int64))
            answer_BT[b, torch.from_numpy(piece.place_R.astype(np.int64))] = True
        lengths = torch.tensor([len(piece.ids) for piece in pieces])
        count_B = torch.tensor([piece.rows for piece in pieces])
        greedy_B = torch.tensor([piece.greedy for piece in pieces])
        ids = np.concatenate([piece.id_RK for piece in pieces]).astype(np.int64)
        return cls(
            Batch(token_BT=token_BT.to(device), length_B=lengths.to(device), answer_BT=answer_BT.to(device)),
            torch.from_numpy(ids).to(device),
            torch.from_numpy(np.concatenate([piece.p_RK for piece in pieces])).to(device),
            greedy_B.repeat_interleave(count_B).to(device),
            torch.arange(len(pieces)).repeat_interleave(count_B).to(device),
        )


@torch.no_grad()
def top_laws(logits_RV: Tensor, most: int) -> tuple[Ints, Floats]:
    """The likeliest tokens of every row, best first, with their probabilities; on the host.

    Cost: a sweep over the rows, and one host sync.
    """
    x_RV = logits_RV.float()
    at_RK = top(x_RV, min(most, x_RV.shape[1]))
    p_RK = (x_RV.gather(1, at_RK) - x_RV.logsumexp(-1, keepdim=True)).exp()
    return at_RK.cpu().numpy().astype(np.int32), p_RK.cpu().numpy().copy()


def top_kl(z_RD: Tensor, id_RK: Tensor, p_RK: Tensor) -> Tensor:
    """KL(p | q) with all tokens that have no entry taken as one, per row [R].

    It bounds the divergence from below and is 0 at q = p. A token that the draft vocabulary lacks
    is left out of p: no q could give it.

    Args:
        id_RK: draft ids of the entries of p, distinct; -1 where the vocabulary has none.
        p_RK: their probabilities; what is missing to 1 is the tail.
    """
    has_RK = id_RK >= 0
    tail_R = (1 - p_RK.sum(-1)).clamp_min(0)
    p_RK = p_RK.where(has_RK, 0.0)
    mass_R = (p_RK.sum(-1) + tail_R).clamp_min(TINY)
    p_RK, tail_R = p_RK / mass_R[:, None], tail_R / mass_R
    logq_RK = z_RD.log_softmax(-1).gather(-1, id_RK.clamp_min(0))
    rest_R = (1 - logq_RK.exp().where(has_RK, 0.0).sum(-1)).clamp_min(TINY)
    named_R = (p_RK * (p_RK.clamp_min(TINY).log() - logq_RK)).sum(-1)
    return named_R + tail_R * (tail_R.clamp_min(TINY).log() - rest_R.log())


@torch.no_grad()
def accepted(z_RD: Tensor, id_RK: Tensor, p_RK: Tensor, greedy_R: Tensor) -> Tensor:
    """The chance that a guess is accepted, per row [R]; arguments as for ``top_kl``.

    Where guesses are chosen: whether the likeliest tokens agree. Where they are sampled: sum
    min(p, q) over the entries of p, so the tail counts as refused.
    """
    q_RK = z_RD.softmax(-1).gather(-1, id_RK.clamp_min(0))
    alpha_R = torch.minimum(q_RK, p_RK).where(id_RK >= 0, 0.0).sum(-1)
    agree_R = (z_RD.argmax(-1) == id_RK[:, 0]).to(alpha_R.dtype)
    return torch.where(greedy_R, agree_R, alpha_R)
