"""Finds out which state of the target a module was trained on, by trying both.

In files of other programs nothing says whether modules read the state before the target's last norm
(raw) or behind it (normed). A module norms what it reads, so a wrong choice still drafts fluent
text; only fewer guesses are the target's. So the target writes a few tokens, and the first module
guesses along them from either state.

Shape letters: T tokens of a text, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from outpace.methods.mtp.net import NORMED, RAW, Module
from outpace.models.passes import PassRows
from outpace.types import Feed

if TYPE_CHECKING:
    from outpace.methods.mtp.net import MtpShape
    from outpace.models.base import Target

TEXTS, LENGTH = 4, 24
"""Texts that the target writes, and tokens of each: some 90 guesses tell 80 % from 70 %."""


def choose_base(shape: MtpShape, tensors: Mapping[str, Tensor], target: Target, said: str | None) -> str:
    """The feature that the first module shall read.

    Args:
        said: ``normed`` or ``raw``, as the user wants it, or None.

    Effects: a note on the target says what was found, and whether the user's choice is the worse one.

    Cost: some 25 passes of the target over 4 rows.
    """
    base = {NORMED: "hidden.-1", RAW: f"hidden.{target.num_layers}"}
    agrees = _agreement(shape, tensors, target, base)
    best = max(agrees, key=lambda name: agrees[name])
    counted = ", ".join(f"{name} {share:.0%}" for name, share in agrees.items())
    chosen = said or best
    note = f"mtp: modules read the {chosen} state; guesses of the first that are the target's: {counted}"
    if agrees[chosen] < agrees[best]:
        note += f"; base={best} is better"
    target.note = note if target.note is None else f"{target.note}; {note}"
    return base[chosen]


def _agreement(
    shape: MtpShape, tensors: Mapping[str, Tensor], target: Target, base: Mapping[str, str]
) -> dict[str, float]:
    """Share of the first module's guesses that are the target's, from every state."""
    net = Module(shape, 0, tensors, target)
    cache, own, right = target.new_cache(), net.new_cache(), dict.fromkeys(base, 0)
    # Any token begins a text; those of the middle of the vocabulary are words, not controls.
    texts = [[target.vocab_size * (i + 1) // (TEXTS + 1)] for i in range(TEXTS)]
    slots = [cache.open() for _ in texts]
    state: dict[str, list[Tensor]] = {name: [] for name in base}
    for _ in range(LENGTH):
        feeds = [Feed.chain(slot, text[-1:]) for slot, text in zip(slots, texts, strict=True)]
        scored = target.score(feeds, cache, taps=frozenset(base.values()))
        for name, tap in base.items():
            state[name].append(scored.taps[tap].float().clone())
        for slot, text, token in zip(slots, texts, scored.logits_TV.argmax(-1).tolist(), strict=True):
            cache.keep(slot, [0])
            text.append(token)
    for name, parts in state.items():
        for number, text in enumerate(texts):
            slot = own.open()
            rows = PassRows([Feed.chain(slot, text[1:])], own, 1)
            given_TH = parts[0].new_empty(len(parts), shape.decoder.hidden_size)
            for at, part in enumerate(parts):
                given_TH[at] = part[number]
            _, normed_TH = net.run(rows, own, [1], given_TH)
            guesses = target.head(normed_TH).argmax(-1).tolist()
            right[name] += sum(a == b for a, b in zip(guesses, text[2:], strict=False))
            own.close(slot)
    return {name: count / (TEXTS * (LENGTH - 1)) for name, count in right.items()}
