"""Trained drafters on disk: where they are found, what their folder says, what they borrow.

A drafter folder holds ``config.json``, ``model.safetensors`` (bfloat16) and ``provenance.json``.
Its config.json always has these keys, and more that the method reads itself:

    {"method": "eagle3", "target": "smollm2-135m", "target_digest": "0123456789abcdef",
     "hidden_size": 576, "vocab_size": 49152, "draft_vocab_size": 8192, "taps": ["hidden.2"],
     "decoder": {...}}

``vocab_size`` is the target's; ``decoder`` is the `DecoderConfig` of the drafter's own layers.

Shape letters: V vocabulary, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outpace.config import data_folder
from outpace.errors import ModelError, shorten, shown
from outpace.files import expanded, parse_json
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig, Rope
from outpace.models.fields import MOST, Fields, brief, read_json
from outpace.models.likeness import Likeness
from outpace.models.products import works
from outpace.models.quantize import check_kind
from outpace.types import KnownDrafter

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "provenance.json"
"""Files of a drafter folder."""
MOST_LEVELS = 64


class NotTrainedError(ModelError):
    """Nobody trained this method for this target, or its weights are not here."""


def find(method: str, target: Target, path: str | None = None) -> Path:
    """Give the folder of a drafter trained for this target.

    Args:
        method: for example ``eagle3``.
        path: a folder that the user named; nothing else is then looked at.

    Raises:
        NotTrainedError: there is none; the message has the command that makes one, and where it writes.
        ModelError: the folder that was named holds none.
    """
    if path is not None:
        folder = expanded(path)
        if (folder / CONFIG).is_file():
            return folder
        raise ModelError(f"{method}: {folder} holds no {CONFIG}, so it is no drafter folder")
    for folder in candidates(method, target):
        return folder
    minutes = round(sum(_training_seconds(method, target)) / 60)
    took = f", once {minutes} minutes of training" if minutes else ""
    raise NotTrainedError(
        f"no trained {method} for {target.name}; make one with: outpace train {method} --model {target.name}"
        f"{took}; it goes into {home(method, target)}"
    )


def _training_seconds(method: str, target: Target) -> Iterator[float]:
    """What trainings took, one after the other, whose provenance the package has without the weights."""
    for file in sorted(shipped_folder().glob(f"*/{method}/{PROVENANCE}")):
        said = _read_provenance(file.parent)
        if (said.get("target") or {}).get("digest") != target.digest:
            continue
        while said:
            yield float((said.get("held_out") or {}).get("seconds", 0.0))
            said = (said.get("start") or {}).get("provenance") or {}


def candidates(method: str, target: Target) -> list[Path]:
    """Folders that hold this method for this target, best first: the user's, then shipped ones.

    A folder is known by what its config.json records of its target, not by its name. First come
    those of the same weights, then those of the same model rounded otherwise, and last, if the
    target takes them, any that fit.
    """
    own = home(method, target)
    ranked: list[list[Path]] = [[own] if (own / CONFIG).is_file() else [], [], []]
    for place in (_drafters(), shipped_folder()):
        for config in sorted(place.glob(f"*/{method}/{CONFIG}")):
            rank = None if config.parent == own else _rank(config, target)
            if rank is not None:
                ranked[rank].append(config.parent)
    return [folder for group in ranked for folder in group]


def _rank(config: Path, target: Target) -> int | None:
    """How well a drafter fits; None: not, or it cannot be told."""
    try:
        said = read_json(config)
        if said.get("target_digest") == target.digest:
            return 0
        fits = all(said.get(key) == getattr(target, key) for key in ("hidden_size", "vocab_size"))
        if fits and unlike(said, target, str(config)) is None:
            return 1
    except ModelError:
        return None
    return 2 if fits and target.drafter_anyway else None


def about(target: Target) -> dict[str, Any]:
    """What a drafter's config.json records of the target that it was trained for."""
    mine = target.likeness
    return {
        "target": target.name,
        "target_digest": target.digest,
        "target_likeness": None if mine is None else mine.to_json(),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
    }


def trained_exits(target: Target) -> tuple[int, ...]:
    """Layers after which the target was trained to be left, as its config.json says; ascending."""
    exits = target.checkpoint.exits if isinstance(target, Decoder) else ()
    return tuple(one for one in exits if one < target.num_layers)


def unlike(said: Mapping[str, Any], target: Target, source: str) -> str | None:
    """Say why the target that a config.json records is another model, whatever its digest; None: it is not.

    Raises:
        ModelError: the record cannot be read.
    """
    recorded = said.get("target_likeness")
    mine = None if recorded is None else target.likeness
    if mine is None:
        return "its weights have another digest"
    return Likeness.from_json(recorded, source).difference(mine)


def check_target(said: Mapping[str, Any], digest: str, name: str, folder: Path, target: Target) -> None:
    """Refuse a drafter of another model, or note what is skipped if the target takes it anyway.

    Args:
        digest: of the model that it was trained for.
        target: the model that it shall draft for.

    Raises:
        ModelError: both models are named, and how they differ.
    """
    why = None if digest == target.digest else unlike(said, target, str(folder / CONFIG))
    if why is None:
        return
    trained = f"{folder} was trained for {shorten(name, 80)} ({shorten(digest, 80)})"
    if target.drafter_anyway:
        skipped = (
            f"{trained}, which was not checked against {target.name}: {why}; fewer drafts may be accepted"
        )
        if skipped not in (target.note or ""):
            target.note = f"{target.note}; {skipped}" if target.note else skipped
        return
    method = f": outpace train {said['method']} --model {target.name}" if "method" in said else ""
    raise ModelError(
        f"{trained}, not for {target.name} ({target.digest}): {why}; take it all the same with "
        f"--drafter-anyway, or make another one{method}"
    )


def home(method: str, target: Target) -> Path:
    """Where ``outpace train`` writes this method for this target unless told otherwise."""
    return _drafters() / target.digest / method


def _drafters() -> Path:
    return data_folder() / "drafters"


def shipped_folder() -> Path:
    """The drafters that come with the package: ``TARGET/METHOD`` below it."""
    return Path(__file__).parents[1] / "weights"


def is_drafter(path: str | Path) -> bool:
    """Whether a path is a drafter folder, and not a model."""
    config = expanded(path) / CONFIG
    return config.is_file() and "target_digest" in read_json(config)


def method_of(folder: Path) -> str | None:
    """The method whose drafter a folder holds; None if it does not say, as other programs' files."""
    return read_json(folder / CONFIG).get("method")


def read_measured(folder: Path) -> Mapping[str, Any] | None:
    """What was measured of a drafter when it was made, from its provenance; None if nothing was."""
    measured = _read_provenance(folder).get("measured")
    return measured if isinstance(measured, dict) else None


def read_acceptance(folder: Path) -> tuple[float, ...]:
    """Share of guesses about held-out text that were right at depth 1, 2, ... below right ones; empty if
    nobody measured it.
    """
    held_out = _read_provenance(folder).get("held_out")
    found = held_out.get("acceptance") if isinstance(held_out, dict) else None
    each = found if isinstance(found, list) else []
    return tuple(each) if all(isinstance(x, int | float) and 0.0 <= x <= 1.0 for x in each) else ()


def taught(method: str, target: Target, count: float) -> dict[str, KnownDrafter]:
    """What the training of a drafter found of its guesses, as if there had been so many of each depth."""
    for folder in candidates(method, target):
        found = read_acceptance(folder)
        kept_D, tried_D = tuple(count * x for x in found), (count,) * len(found)
        return {method: KnownDrafter(call=0.0, level=0.0, kept_D=kept_D, tried_D=tried_D)} if found else {}
    return {}


def _read_provenance(folder: Path) -> Mapping[str, Any]:
    """How a drafter was made; empty if that is not known or cannot be read."""
    try:
        content = parse_json((folder / PROVENANCE).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_config(path: Path, target: Target, method: str | None = None) -> dict[str, Any]:
    """Read a drafter folder's config.json.

    Raises:
        ModelError: another method's, or trained for another target; both are named.
    """
    config = read_json(path / CONFIG)
    missing = [
        key
        for key in ("method", "target", "target_digest", "hidden_size", "vocab_size")
        if config.get(key) is None
    ]
    if missing:
        raise ModelError(f"{path / CONFIG} lacks {', '.join(map(repr, missing))}")
    _check_types(Fields(str(path / CONFIG), {}, config))
    if method is not None and config["method"] != method:
        raise ModelError(f"{path} holds a drafter of method {shown(config['method'])}, not {method!r}")
    check_target(config, config["target_digest"], config["target"], path, target)
    for key in ("hidden_size", "vocab_size"):
        if config[key] != getattr(target, key):
            raise ModelError(f"{path} has {key} {config[key]}, but {target.name} has {getattr(target, key)}")
    return config


_TEXTS = ("method", "target", "target_digest", "draft", "draft_digest")
_SIZES = ("hidden_size", "vocab_size", "draft_vocab_size", "slots", "layer")
_PARTS, _MOST_PARTS = ("heads", "layers", "blocks", "riders", "ensemble"), 256


def _check_types(read: Fields) -> None:
    """Refuse a value of another type than any method gives the key of that name."""
    for key in _TEXTS:
        if read.get(key) is not None:
            read.text(key)
    for key in (*_SIZES, *_PARTS):
        if isinstance(read.get(key), list):
            raise ModelError(f"{read.source}: {key!r} must be a whole number, got {shown(read.get(key))}")
        read.whole(key, most=_MOST_PARTS if key in _PARTS else MOST)
    read.texts("taps")
    read.mapping("decoder")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a drafter folder's weights.

    Raises:
        ModelError: the file is missing, truncated or corrupt.
    """
    file = path / WEIGHTS
    try:
        tensors: dict[str, Tensor] = load_file(file)
        return tensors
    except FileNotFoundError as error:
        raise ModelError(f"{path} holds no {WEIGHTS}") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{file} is truncated or corrupt: {brief(error)}") from error


def read_temper(said: Mapping[str, Any], source: Path) -> tuple[float, ...]:
    """By level, what to divide a drafter's logits by; see ``Traits.temper_D``.

    Raises:
        ModelError: no list of numbers above 0.
    """
    found = said.get("temper") or []
    right = isinstance(found, list) and len(found) <= MOST_LEVELS
    if not right or not all(type(one) in (int, float) and 0.01 <= one <= 100 for one in found):
        raise ModelError(f"{source}: 'temper' must be numbers above 0, one per level, got {shown(found)}")
    return tuple(float(one) for one in found)


def vocab_map(tensors: Mapping[str, Tensor], vocab_size: int) -> VocabMap | None:
    """Read ``d2t``, the offsets from draft ids to target ids; None if the vocabulary is whole.

    Raises:
        ModelError: ids outside the target's vocabulary, or the same one twice.
    """
    if "d2t" not in tensors:
        return None
    to_target_D = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    inside = bool(((to_target_D >= 0) & (to_target_D < vocab_size)).all())
    if not inside or len(set(to_target_D.tolist())) != len(to_target_D):
        raise ModelError(f"d2t does not map {len(to_target_D)} draft ids into {vocab_size} tokens")
    feed_V = torch.full((vocab_size,), -1)
    feed_V[to_target_D] = torch.arange(len(to_target_D))
    return VocabMap(to_target_D, feed_V)


def rounding(quantize: str | None, target: Target) -> str | None:
    """How the weights of a drafter are rounded: as was asked where compiled code multiplies them,
    so that there is less to read. Not at all elsewhere.

    Raises:
        UnknownNameError: no such kind.
    """
    if quantize is None:
        return None
    check_kind(quantize, torch.device("cpu"))
    return quantize if works(target.device.type) else None


def decoder_to_json(config: DecoderConfig) -> dict[str, Any]:
    """All that it says of a drafter's layers, which are dense."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name != "mixture"}


def decoder_from_json(data: Mapping[str, Any], source: Path) -> DecoderConfig:
    """Read what ``decoder_to_json`` gave.

    Raises:
        ModelError: fields that are missing, unknown or impossible.
    """
    try:
        ropes = tuple(Rope(**{**rope, "divisors": tuple(rope["divisors"])}) for rope in data["ropes"])
        tuples = {key: tuple(data[key]) for key in ("windows", "rope_of_layer")}
        return DecoderConfig(**{**data, **tuples, "ropes": ropes})
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{source}: the decoder's fields are not right: {brief(error)}") from error
    except ModelError as error:
        raise ModelError(f"{source}: the decoder's fields are not right: {error}") from error


def lender(target: Target, who: str, *needs: str) -> Decoder:
    """The target, as a decoder whose weights can be read and borrowed.

    Args:
        needs: abilities that it must have.

    Raises:
        ModelError: it lacks one, or is not of the own decoder, which alone lends weights.
    """
    target.require(frozenset(needs), who)
    if not isinstance(target, Decoder):
        raise ModelError(
            f"{who} borrows weights of the target, and {target.name} is a "
            f"{type(target).__name__}; load it with backend='own'"
        )
    return target


def read_embedding(target: Target) -> Tensor:
    """The target's embedding [V, H], in its dtype; not scaled, as far as it can be told. Read only."""
    if not isinstance(target, Decoder):
        return target.embed(range(target.vocab_size)).to(target.dtype)
    name = "model.embed_tokens.weight"
    return target.checkpoint.tensor(name, target.dtype).to(target.device)


def head_name(target: Decoder) -> str:
    """Name of the tensor that holds the rows of the target's head."""
    return "model.embed_tokens.weight" if target.config.tied_head else "lm_head.weight"


def head_rows(target: Decoder, vocab: VocabMap | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rows [D, H] of the target's head for a draft vocabulary, on its device."""
    head_VH = target.checkpoint.tensor(head_name(target))
    return (head_VH if vocab is None else head_VH[vocab.to_target_D]).to(target.device, dtype)
