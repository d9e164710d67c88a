"""Trained prompt tokens on disk, a few KB: `ppd` reads them, ``outpace train ppd`` writes them.

Shape letters: K prompt tokens, E vectors of each, H hidden size, B ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from outpace.drafters.trained import CONFIG, find, read_config, read_tensors
from outpace.drafters.trained_file import read_rates, read_vocab
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.ppd.trees import Rates
from outpace.models.base import Target

METHOD = "ppd"
PROMPTS = "prompts"
"""Name of the one tensor besides the vocabulary, [K, E, H]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompts:
    embed_KEH: Tensor
    """What enters the target's first layer."""
    vocab: VocabMap | None = None
    """The draft vocabulary; None is the target's whole."""
    rate_KB: Rates = ()
    """Measured acceptance by prompt token and rank; empty: nothing was measured."""


def read_prompts(path: str | None, target: Target) -> Prompts:
    """Read a drafter folder.

    Args:
        path: the folder; None: the one trained for the target.

    Raises:
        ModelError: no folder, or files that are corrupt or of another target or method.
    """
    folder = find(METHOD, target, path)
    said, tensors = read_config(folder, target, METHOD), read_tensors(folder)
    wanted = [said.get("riders"), said.get("ensemble"), target.hidden_size]
    got = list(tensors[PROMPTS].shape) if PROMPTS in tensors else None
    if got != wanted or not all(isinstance(one, int) and one > 0 for one in wanted):
        raise ModelError(f"{folder}: {PROMPTS!r} has shape {got}, its config needs {wanted}")
    vocab = read_vocab(tensors, said, target.vocab_size, folder)
    falling = tuple(tuple(accumulate(row, min)) for row in read_rates(said, folder))
    if falling and len(falling) != wanted[0]:
        raise ModelError(f"{folder / CONFIG}: acceptance of {len(falling)} of {wanted[0]} riders")
    return Prompts(embed_KEH=tensors[PROMPTS].float(), vocab=vocab, rate_KB=falling)
