"""What happened in every pass of one answer: the tree, who was kept, and how likely each was.

    trace = film(engine, spec, ids, params, passes=4)
    trace.passes[0].guesses     token, q, p and fate of every guess

At temperature 0 both distributions are one-hot, which tells nothing; q and p are then shown as they are at
temperature 1, before truncation.

Shape letters: F nodes expanded together, D draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.analysis.watch import watched
from outpace.engine.engine import Engine
from outpace.errors import RequestError
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import Branch
from outpace.types import ROOT, Draft, Outcome


class Fate(enum.Enum):
    ACCEPTED = "accepted"
    REFUSED = "refused"
    """Its parent was kept and it was not: another sibling, or the target's own token, came."""
    NOT_REACHED = "not reached"
    """Its parent was refused, or a stop came first, so that nobody asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    token: int
    text: str
    parent: int
    """An earlier guess, or ROOT for the pending token."""
    q: float | None
    """Probability in the distribution that its siblings were drawn from; None: there is none."""
    p: float
    """Probability that the target gives it after its parent."""
    fate: Fate


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """The token that the target added itself."""

    token: int
    text: str
    p: float
    """Its probability in the target's distribution; where guesses were refused, it was drawn from what
    the verifier left of that distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    before: str
    """The answer up to the pending token, which is not in it."""
    pending: str
    guesses: tuple[Guess, ...]
    kept: tuple[int, ...]
    """Accepted guesses, root first."""
    added: Added | None
    """None where a stop cut the pass short."""

    @property
    def emitted(self) -> tuple[str, ...]:
        """Texts of the tokens that this pass added to the answer."""
        own = () if self.added is None else (self.added.text,)
        return (*(self.guesses[node].text for node in self.kept), *own)

    def to_json(self) -> dict[str, Any]:
        """Plain values; a guess is known by its place in the list, the pending token as -1."""
        found = dataclasses.asdict(self)
        for guess in found["guesses"]:
            guess["fate"] = guess["fate"].value
        return {**found, "emitted": list(self.emitted)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The passes of one answer, in order."""

    model: str
    drafter: str
    """Normalised method spec."""
    temperature: float
    prompt: str
    """As the model reads it."""
    first: str
    """What the prompt's own pass yields: the pending token of the first pass."""
    passes: tuple[Picture, ...]

    @property
    def mean_emitted(self) -> float:
        """Tokens per pass, over the passes that are here."""
        emitted = sum(len(picture.emitted) for picture in self.passes)
        return emitted / len(self.passes) if self.passes else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain values, keys as in the glossary where it has them."""
        return {
            "model": self.model,
            "drafter": self.drafter,
            "temperature": self.temperature,
            "prompt": self.prompt,
            "first": self.first,
            "drafted": sum(len(picture.guesses) for picture in self.passes),
            "accepted": sum(len(picture.kept) for picture in self.passes),
            "mean_emitted": self.mean_emitted,
            "passes": [picture.to_json() for picture in self.passes],
        }


def film(
    engine: Engine, spec: str, ids: Sequence[int], params: SamplingParams, *, passes: int | None = None
) -> Trace:
    """Answer a prompt and keep a picture of every pass.

    Args:
        params: sampling settings of one answer; the text is the one that ``generate`` gives with
            ``reproducible=False``.
        passes: end the answer after so many; None: when it ends by itself.

    Raises:
        RequestError: settings out of range, or fewer than one pass asked for.

    Cost: the answer's own, and the distributions of all nodes of every tree.
    """
    if passes is not None and passes < 1:
        raise RequestError(f"need at least one pass to show, got {passes}")
    method = engine.method(spec)
    camera = _Camera(engine, ids, params.resolved(engine.target.defaults))
    with watched(method, camera.outcome, camera.level):
        chunks = engine.stream(list(ids), params, drafter=spec, reproducible=False)
        for _ in chunks:
            if passes is not None and len(camera.pictures) >= passes:
                break
        chunks.close()  # type: ignore[attr-defined]
    return Trace(
        model=engine.target.name,
        drafter=method.spec,
        temperature=camera.temperature,
        prompt=camera.text(*ids),
        first=camera.text(*camera.first),
        passes=tuple(camera.pictures[:passes]),
    )


class _Camera:
    def __init__(self, engine: Engine, ids: Sequence[int], params: SamplingParams) -> None:
        self.pictures: list[Picture] = []
        self.first: tuple[int, ...] = ()
        self._tokenizer = engine.target.tokenizer
        self._answer: list[int] = []
        self.temperature = params.temperature or 0.0
        warp = Warp(params, ids, engine.eos_ids, engine.target.vocab_size)
        if warp.greedy:
            params = dataclasses.replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
            warp = Warp(params, ids, engine.eos_ids, engine.target.vocab_size)
        self._warp = warp
        self._rows: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        """Path of tokens -> the drafter's logits after it, of the draft under way."""

    def text(self, *tokens: int) -> str:
        """Tokens as they stand in a text; ``#id`` where one has no bytes of its own."""
        spelled = [
            (b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)) or b"#%d" % token
            for token in tokens
        ]
        return b"".join(spelled).decode("utf-8", "backslashreplace")

    def level(self, branch: Branch[Any], logits_FD: Tensor, id_D: Tensor | None) -> None:
        """Keep what the drafter said of the nodes that it expands."""
        if branch.nodes == (ROOT,):
            self._rows.clear()
        for row_D, node in zip(logits_FD, branch.nodes, strict=True):
            path: list[int] = []
            while node != ROOT:
                path.insert(0, branch.token_N[node])
                node = branch.parent_N[node]
            self._rows[tuple(path)] = (row_D.clone(), id_D)

    def outcome(self, outcome: Outcome) -> None:
        """Take a picture before anybody goes on."""
        emitted = outcome.verdict.emitted
        if outcome.forced:
            self.first = emitted
        else:
            self.pictures.append(self._picture(outcome))
        self._answer += emitted
        self._warp.advance(emitted)
        self._rows.clear()

    def _picture(self, outcome: Outcome) -> Picture:
        draft, verdict = outcome.draft, outcome.verdict
        kept = verdict.kept
        end = ROOT if not kept else kept[-1]
        asked = {ROOT, *kept} - ({end} if verdict.censored else set())
        p_of = {
            parent: self._warp.guess(outcome.scored.logits_TV[parent + 1], draft.path_tokens(parent))
            for parent in sorted({end, *draft.parent_N})
        }
        guesses = []
        for node, (token, parent) in enumerate(zip(draft.token_N, draft.parent_N, strict=True)):
            fate = Fate.REFUSED if parent in asked else Fate.NOT_REACHED
            guesses.append(
                Guess(
                    token=token,
                    text=self.text(token),
                    parent=parent,
                    q=self._q(draft, node),
                    p=p_of[parent].prob(token),
                    fate=Fate.ACCEPTED if node in kept else fate,
                )
            )
        added = None
        if len(verdict.emitted) > len(kept):
            own = verdict.emitted[-1]
            added = Added(token=own, text=self.text(own), p=p_of[end].prob(own))
        return Picture(
            before=self.text(*self._answer[:-1]),
            pending=self.text(self._answer[-1]),
            guesses=tuple(guesses),
            kept=kept,
            added=added,
        )

    def _q(self, draft: Draft, node: int) -> float | None:
        """The drafter's probability of a node, by the distribution it was drawn from, if it has one."""
        token, parent = draft.token_N[node], draft.parent_N[node]
        for group in draft.groups_of[parent]:
            if group.law is not None and node in group.nodes:
                return draft.laws[group.law].prob(token)
        path = draft.path_tokens(parent)
        if path not in self._rows:
            return None
        row_D, id_D = self._rows[path]
        return self._warp.guess(row_D, path, id_D).prob(token)
