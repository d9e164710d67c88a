"""Sorted exits on disk: `s2d` and `sec` read them, ``outpace train`` of these names writes them.

    y = n + n W,  n = norm(h)        h: the state after an exit's layers;  logits: head(y)

Tensors are ``norms`` [X, H] and ``linears`` [X, H, H]; config.json names the ``exits`` and ``right``. The
latter says how often guesses of some confidence were right, by exit and confidence. It also says how often
those of the next exit were at the same places.

Those of `sec` have ``classes`` [X + 1, 3, H + 2] besides: by exit, and last behind all layers, what scores
the things to do (`outpace.methods.s2d.sec_drafter`). The last column is the bias, the one before it the
weight of how unsure the target is, which is known behind all layers alone.

Shape letters: X exits, S = X + 1 places of a classifier, H hidden size, I = H + 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outpace.drafters.trained import CONFIG, find, read_config, read_tensors, vocab_map
from outpace.drafters.trained_file import fit_tensors
from outpace.errors import ModelError, shown
from outpace.law import VocabMap
from outpace.models.base import Target

METHOD, SEC = "s2d", "sec"
BINS = 16
"""Ranges of confidence that are told apart."""
Table = tuple[tuple[tuple[float, float], ...], ...]
"""Exit -> range of confidence -> share of its guesses that are right, and of the next exit's there."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exits:
    layers: tuple[int, ...]
    """Layers that run before each exit, ascending."""
    norm_XH: Tensor
    linear_XHH: Tensor
    right: Table
    vocab: VocabMap | None = None
    class_S3I: Tensor | None = None
    """Of `sec` alone."""


def trusting(exits: int) -> Table:
    """What is believed of exits that nobody measured: a guess is as sure as it says, a deeper one surer."""
    row = tuple(((i + 0.5) / BINS, (i + 0.5 + (BINS - i) / 4) / BINS) for i in range(BINS))
    return (row,) * exits


def read_exits(path: str | None, target: Target, method: str = METHOD) -> Exits:
    """Read a drafter folder.

    Args:
        path: the folder; None: the one trained for the target.

    Raises:
        ModelError: no folder, or files that are corrupt or of another target or method.
    """
    folder = find(method, target, path)
    said, tensors = read_config(folder, target, method), read_tensors(folder)
    layers = said.get("exits")
    if not isinstance(layers, list) or not layers or not all(isinstance(one, int) for one in layers):
        raise ModelError(f"{folder / CONFIG}: exits must be numbers of layers, got {shown(layers)}")
    if layers != sorted(set(layers)) or not 0 < layers[0] <= layers[-1] < target.num_layers:
        raise ModelError(
            f"{folder / CONFIG}: exits {shown(layers)} are not layers 1 to {target.num_layers - 1}"
        )
    count, hidden = len(layers), target.hidden_size
    wanted: dict[str, tuple[int, ...]] = {"norms": (count, hidden), "linears": (count, hidden, hidden)}
    if method == SEC:
        wanted["classes"] = (count + 1, 3, hidden + 2)
    fit_tensors(tensors, wanted, folder)
    try:
        right: Table = tuple(tuple((float(a), float(b)) for a, b in row) for row in said.get("right") or ())
    except (TypeError, ValueError):
        raise ModelError(f"{folder / CONFIG}: right must be pairs of shares by exit") from None
    if right and (len(right) != count or any(len(row) != BINS for row in right)):
        raise ModelError(f"{folder / CONFIG}: right must have {count} rows of {BINS}")
    return Exits(
        layers=tuple(layers),
        norm_XH=tensors["norms"].float(),
        linear_XHH=tensors["linears"],
        right=right or trusting(count),
        vocab=vocab_map(tensors, target.vocab_size),
        class_S3I=tensors["classes"].float() if method == SEC else None,
    )
