"""What happened in one pass of an answer, for those who want to see it: guesses, fates, distributions.

Copied while the pass is still there. It costs a softmax over the rows of the draft and a wait for
the device, so requests ask for it.

Shape letters: K rows that something followed, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outpace.types import ROOT, Draft, Outcome

MOST = 64
"""Guesses of a pass that are told; of a larger draft the accepted ones, and the first of the
others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass. Guesses are numbered from 0, parents first."""

    by: str
    """Method spec of the drafter that was asked."""
    forced: bool
    """A prompt's pass: nothing was guessed, and the target added the first token."""
    pending: int
    """The token that the guesses hang from."""
    drafted: int
    """Guesses, those that are not told among them."""
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """An earlier guess, or -1 for the pending token."""
    kept: tuple[int, ...]
    """Accepted guesses, a path from the pending token down."""
    q: tuple[float | None, ...]
    """Of each guess in the distribution that it was drawn from; None: it was chosen by a rule."""
    p: tuple[float, ...]
    """Of each guess in the target's own distribution after its parent, before any setting."""
    added: int | None
    """The token of the target's own; None where a stop cut it off."""
    added_p: float | None
    """Its probability, as ``p``."""


def described(outcome: Outcome) -> Pass:
    """Copy what a pass did. Its logits must still be there. One host sync, one more per q."""
    draft, verdict = outcome.draft, outcome.verdict
    nodes = sorted({*verdict.kept, *_first(len(draft), MOST - len(verdict.kept), verdict.kept)})
    place = {node: number for number, node in enumerate(nodes)}
    place[ROOT] = ROOT
    parents = [draft.parent_N[node] for node in nodes]
    tokens = [draft.token_N[node] for node in nodes]
    own = verdict.emitted[-1] if len(verdict.emitted) > len(verdict.kept) else None
    after = [*parents, *(() if own is None else (verdict.kept[-1] if verdict.kept else ROOT,))]
    p = _probabilities(outcome, after, [*tokens, *(() if own is None else (own,))])
    return Pass(
        by=outcome.drafter,
        forced=outcome.forced,
        pending=outcome.fed[-1] if outcome.forced else outcome.fed[0],
        drafted=len(draft),
        tokens=tuple(tokens),
        parents=tuple(place[parent] for parent in parents),
        kept=tuple(place[node] for node in verdict.kept),
        q=tuple(_drawn(draft, node) for node in nodes),
        p=tuple(p[: len(nodes)]),
        added=own,
        added_p=None if own is None else p[-1],
    )


def _first(count: int, most: int, kept: tuple[int, ...]) -> list[int]:
    """The first nodes that are not kept. Parents come first, so none is without its parent."""
    others = [node for node in range(count) if node not in kept]
    return others[: max(0, most)]


def _probabilities(outcome: Outcome, after: list[int], tokens: list[int]) -> list[float]:
    """Of each token after a node, in the target's distribution."""
    if not after:
        return []
    rows = sorted(set(after))  # row 0 is the pending token's, or the last one of a prompt
    logits_KV = outcome.scored.logits_TV[[row + 1 for row in rows]].float()
    at = torch.tensor([rows.index(row) for row in after], device=logits_KV.device)
    token = torch.tensor(tokens, device=logits_KV.device)
    log_p = logits_KV[at, token] - logits_KV.logsumexp(-1)[at]
    return [float(value) for value in log_p.exp().tolist()]


def _drawn(draft: Draft, node: int) -> float | None:
    """The drafter's probability of a node, if it was drawn from a distribution."""
    for group in draft.groups_of[draft.parent_N[node]]:
        if group.law is not None and node in group.nodes:
            return draft.laws[group.law].prob(draft.token_N[node])
    return None
