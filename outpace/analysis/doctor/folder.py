"""What the folder of a trained drafter says about itself, held against the target.

Shape letters: D draft vocabulary, H hidden size, K rows compared.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace import registry
from outpace.analysis.doctor.findings import Diagnosis
from outpace.analysis.doctor.probe import Answer
from outpace.config import MethodSpec
from outpace.drafters.trained import CONFIG, PROVENANCE, find, head_rows, read_tensors, unlike, vocab_map
from outpace.errors import ModelError
from outpace.files import parse_json
from outpace.models.base import Target
from outpace.models.decoder import Decoder

_ROWS = 256
"""Rows of two heads that are compared."""


def folder_of(spec: MethodSpec, target: Target) -> Path | None:
    """Where the weights of a drafter lie; None if it has none of its own."""
    if not registry.entry("drafter", spec.name).trained:
        return None
    try:
        return find(spec.name, target, dict(spec.options).get("model"))
    except ModelError:
        return None


def read_json(folder: Path, name: str) -> Mapping[str, Any]:
    """A file of the folder; empty if it is not there, or is damaged."""
    try:
        found = parse_json((folder / name).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def reached(folder: Path) -> tuple[float, ...]:
    """Held-out acceptance by depth when training ended; empty if nobody noted it."""
    held_out = read_json(folder, PROVENANCE).get("held_out")
    found = held_out.get("acceptance") if isinstance(held_out, dict) else None
    return tuple(map(float, found)) if isinstance(found, list) else ()


def trained_length(folder: Path) -> int | None:
    """Longest text in training, in tokens; None if nobody noted it."""
    settings = read_json(folder, PROVENANCE).get("settings")
    parts = [settings.get(key) for key in ("pipeline", "kit")] if isinstance(settings, dict) else []
    said = [part["max_length"] for part in parts if isinstance(part, dict) and "max_length" in part]
    return int(said[0]) if said else None


def check(folder: Path, target: Target, texts: Sequence[Answer], to: Diagnosis) -> None:
    """Look for another target, a vocabulary that is mapped wrongly, and damaged weights."""
    said = read_json(folder, CONFIG)
    digest = said.get("target_digest")
    if digest is not None and digest != target.digest:
        why = unlike(said, target, str(folder / CONFIG))
        if why is not None:
            to.find(
                "other_target",
                "the drafter was trained for another model",
                f"trained for {said.get('target', 'a model')} ({digest}), not {target.name} "
                f"({target.digest}): {why}",
                f"train one for it: outpace train {said.get('method', 'METHOD')} --model {target.name}",
            )
        else:
            to.notes.append("trained on the same model, rounded otherwise")
    try:
        tensors = read_tensors(folder)
    except ModelError as error:
        to.notes.append(f"weights not looked at: {error}")
        return
    _check_numbers(tensors, to)
    _check_vocabulary(tensors, target, texts, folder, to)


def _check_numbers(tensors: Mapping[str, Tensor], to: Diagnosis) -> None:
    """Weights that are no numbers, or so large that products of them overflow."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        largest = float(tensor.float().abs().max())
        if not largest < HUGE:
            to.find(
                "overflow",
                "weights of the drafter are too large for its arithmetic",
                f"{name} holds {largest:.1e}; products of such numbers overflow",
                "train again with a lower learning rate, or take an earlier checkpoint",
            )
            return


_CHANCE = 0.3
"""Cosine that unrelated rows do not reach: shipped heads have 0.50 to 0.59, random ones 0.16."""
HUGE = 1e4
"""Weights of a sound drafter are below 100. Two numbers of this size in one product, over thousands of
inputs, leave the range of float16. A few layers of them leave that of bfloat16."""


def _check_vocabulary(
    tensors: Mapping[str, Tensor], target: Target, texts: Sequence[Answer], folder: Path, to: Diagnosis
) -> None:
    cure = "write the drafter's d2t anew from the vocabulary it was trained with, or export it again"
    try:
        vocab = vocab_map(tensors, target.vocab_size)
    except ModelError as error:
        to.find("vocabulary_map", "the drafter's vocabulary does not fit the target's", str(error), cure)
        return
    if vocab is None:
        return
    inside_V = vocab.feed_V >= 0
    said = torch.tensor([token for text in texts for token in text.ids[text.start :]])
    to.coverage = float(inside_V[said].float().mean())
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), inside_V):
        off = int((tensors["t2d"].bool() != inside_V).sum())
        to.find(
            "vocabulary_map",
            "the two maps of the drafter's vocabulary contradict each other",
            f"d2t and t2d differ at {off} of {target.vocab_size} tokens",
            cure,
        )
        return
    known = read_json(folder, PROVENANCE).get("vocab")
    held_out = known.get("held_out_coverage") if isinstance(known, dict) else None
    if held_out is not None and to.coverage < 0.7 * float(held_out):
        to.find(
            "vocabulary_map",
            "the drafter's vocabulary misses what the target says",
            f"it has {to.coverage:.0%} of the target's tokens here, {float(held_out):.0%} in training",
            f"{cure}; if these texts are of another kind than those, train with them",
        )
        return
    if (share := rows_alike(tensors, target)) is not None and share < 0.5:
        to.find(
            "vocabulary_map",
            "the drafter's vocabulary is mapped to the wrong tokens",
            f"only {share:.0%} of the rows of its head resemble the target's rows of the same tokens most",
            cure,
        )


def rows_alike(tensors: Mapping[str, Tensor], target: Target) -> float | None:
    """Share of the drafter's head rows whose nearest row of the target's head is that of their token.

    None where there is nothing to compare: it has no head of the target's width, or one that resembles
    no rows of the target's.
    """
    vocab = vocab_map(tensors, target.vocab_size)
    head_DH = tensors.get("lm_head.weight")
    if vocab is None or head_DH is None or not isinstance(target, Decoder):
        return None
    if tuple(head_DH.shape) != (len(vocab.to_target_D), target.hidden_size):
        return None
    place_K = torch.arange(0, len(head_DH), max(1, len(head_DH) // _ROWS))
    mine_KH, theirs_DH = _directions(head_DH.float())[place_K], _directions(head_rows(target, vocab))
    near_KD = mine_KH @ theirs_DH.T
    best_K, found_K = near_KD.max(-1)
    if float(best_K.median()) < _CHANCE:
        return None
    return float((found_K == place_K).float().mean())


def _directions(rows_DH: Tensor) -> Tensor:
    """Rows of length 1, without what all have in common: long training adds much of that."""
    return torch.nn.functional.normalize(rows_DH - rows_DH.mean(0), dim=-1)


def changed(folder: Path, into: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a drafter folder with another config.json.

    Args:
        into: an empty folder.
        change: changes what the config says.
    """
    shutil.copytree(folder, into, dirs_exist_ok=True)
    config = json.loads((folder / CONFIG).read_text())
    change(config)
    (into / CONFIG).write_text(json.dumps(config))
    return into
