"""Mask tokens and what stands between the last norm and the head, on disk: `s3d` reads them.

    y_k = n_k + n_k W_k      n_k: the normed last state of slot k;  logits: head(y_k)

Tensors are ``masks`` [K, H] and ``linears`` [K + 1, H, H]. In config.json are ``skip``, the first layer that
is left out and the first behind that is not, and perhaps ``acceptance`` by slot and rank.

Shape letters: K masks, H hidden size, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outpace.drafters.static_tree import LARGEST, likeliest
from outpace.drafters.trained import CONFIG, find, read_config, read_tensors, vocab_map
from outpace.drafters.trained_file import fit_tensors, read_rates
from outpace.errors import ModelError, shown
from outpace.law import VocabMap
from outpace.models.base import Target

METHOD = "s3d"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Masks:
    first: int
    """Layers below the gap."""
    stop: int
    """The first layer behind it."""
    mask_KH: Tensor
    """What enters the first layer for the tokens that are not there yet."""
    linear_SHH: Tensor
    tree: tuple[int, ...] | None
    """Parents of the tree that held-out rows ask for; None: nothing was measured."""
    vocab: VocabMap | None = None


def read_masks(path: str | None, target: Target) -> Masks:
    """Read a drafter folder.

    Args:
        path: the folder; None: the one trained for the target.

    Raises:
        ModelError: no folder, or files that are corrupt or of another target or method.
    """
    folder = find(METHOD, target, path)
    said, tensors = read_config(folder, target, METHOD), read_tensors(folder)
    skip, hidden = said.get("skip"), target.hidden_size
    if not isinstance(skip, list) or [type(one) for one in skip] != [int, int]:
        raise ModelError(f"{folder / CONFIG}: skip must be two layers, got {shown(skip)}")
    if not 0 < skip[0] < skip[1] <= target.num_layers:
        raise ModelError(f"{folder / CONFIG}: {shown(skip)} is no gap in {target.num_layers} layers")
    found = tensors.get("masks")
    masks = 0 if found is None else len(found)
    fit_tensors(tensors, {"masks": (masks, hidden), "linears": (masks + 1, hidden, hidden)}, folder)
    return Masks(
        first=skip[0],
        stop=skip[1],
        mask_KH=tensors["masks"].float(),
        linear_SHH=tensors["linears"],
        tree=likeliest(read_rates(said, folder), LARGEST) or None,
        vocab=vocab_map(tensors, target.vocab_size),
    )
