"""A draft as text, in the tokens of the target.

    drafted       | on| the m|at|            by the draft model, after "the cat sat"
    as text        on the mat
    drafted       | on| the| mat|            what the target is asked about

Every path of the draft is read as bytes and split by the target's tokenizer. The end of the
committed text stands before it, since a tokenizer looks at that too. Where it would put a token
across the end of the committed text, which is fixed, the new text is split alone. All groups are
CHOSEN: whatever made the text read none of the target's coins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from outpace.methods.cross_vocabulary.spelling import Piece, Shared, Spelling
from outpace.types import ROOT, Budget, Draft

CONTEXT = 8
"""Tokens of the committed text that are split along with a draft."""
LONGEST = 8.0
"""Most draft tokens that a draft reckons with per token of the target, and most the other way."""


def stretched(budget: Budget, ratio: float) -> Budget:
    """A budget in draft tokens, of which there are ``ratio`` per token of the target.

    A template stays as it is, since it has as many levels as it has.
    """
    ratio = min(max(ratio, 1 / LONGEST), LONGEST)
    depth = math.ceil(budget.max_depth * ratio)
    if budget.shape.parent_N is not None:
        return replace(budget, max_depth=max(depth, budget.max_depth))
    return replace(budget, max_depth=depth, max_nodes=math.ceil(budget.max_nodes * ratio))


def retokenized(
    draft: Draft,
    tokens: Sequence[int],
    held: int,
    budget: Budget,
    *,
    source: Spelling,
    target: Spelling,
    common: Shared,
) -> Draft:
    """Write a draft in the target's tokens.

    Args:
        draft: over draft ids, chain or tree.
        held: bytes at their end that the draft model did not see; a draft repeats them or is left
            out.
        budget: in tokens of the target; what is beyond it is cut off.
        common: for tokens that end a text or part it.

    Returns:
        A forest of chosen groups; paths share what they begin with alike.

    Cost: two calls of the tokenizer per leaf.
    """
    context = ending(tokens, target)
    out: list[int] = []
    parents: list[int] = []
    at: dict[tuple[int, int], int] = {}
    for path in leaves(draft):
        node = ROOT
        words = _words([draft.token_N[n] for n in path], context, held, source, target, common)
        for depth, token in enumerate(words):
            if (node, token) not in at:
                if len(out) == budget.max_nodes or depth == budget.max_depth:
                    break
                at[node, token] = len(out)
                out.append(token)
                parents.append(node)
            node = at[node, token]
    return Draft.chosen(out, parents)


def ending(tokens: Sequence[int], target: Spelling) -> bytes:
    """The bytes of the last tokens, back to a special one."""
    parts: list[bytes] = []
    for token in reversed(tokens[-CONTEXT:]):
        if token in target.special:
            break
        parts.append(target.spell(token))
    return b"".join(reversed(parts))


def leaves(draft: Draft) -> Iterator[tuple[int, ...]]:
    """Paths from the root to every leaf, those of first siblings first."""
    children: dict[int, list[int]] = {}
    for group in draft.groups:
        siblings = children.setdefault(group.parent, [])
        siblings += [node for node in dict.fromkeys(group.nodes) if node not in siblings]
    open_: list[tuple[int, ...]] = [(node,) for node in reversed(children.get(ROOT, []))]
    while open_:
        path = open_.pop()
        below = children.get(path[-1], [])
        if not below:
            yield path
        open_ += [(*path, node) for node in reversed(below)]


def _words(
    path: Sequence[int], context: bytes, held: int, source: Spelling, target: Spelling, common: Shared
) -> list[int]:
    """One path in the target's tokens, as far as it has some for it."""
    begun = context[len(context) - held :]
    out: list[int] = []
    text = b""
    for token in path:
        spelled = source.spell(token)
        if token not in source.special and spelled:
            text += spelled
            continue
        words, whole = _split(text, begun, context, target)
        other = common.target_of[token]
        out += words
        if not whole or other < 0:
            return out
        out.append(other)
        text = begun = context = b""
    return out + _split(text, begun, context, target)[0]


def _split(text: bytes, begun: bytes, context: bytes, target: Spelling) -> tuple[list[int], bool]:
    """Tokens of a text, and whether they are all of it.

    Args:
        text: what is new, with the bytes that stand in the context already.
    """
    if not text.startswith(begun):
        return [], False
    text = text[len(begun) :]
    if not text:
        return [], True
    pieces = _behind(target.encode(context + text), len(context))
    if pieces is None:
        pieces = target.encode(text)
    out: list[int] = []
    place = 0
    for piece in pieces:
        if target.spell(piece.id) != text[place : place + piece.size]:
            return out, False
        place += piece.size
        if piece.size:
            out.append(piece.id)
    return out, place == len(text)


def _behind(pieces: Sequence[Piece], border: int) -> Sequence[Piece] | None:
    """The pieces from a place of the text on; None if one lies across it."""
    place = 0
    for index, piece in enumerate(pieces):
        if place == border:
            return pieces[index:]
        place += piece.size
    return [] if place == border else None
