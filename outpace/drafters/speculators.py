"""Folders of the speculators library and of methods' authors: what trained drafters of all kinds share.

A config.json of speculators names its kind, and the model that it drafts for (the verifier). It gives the
shape of its layers as a config of transformers. Numbers of layers whose features are read count streams
there and here: L is the stream behind L layers. Authors as a rule count the layer whose output it is,
which is one less.

Shape letters: V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.trained import CONFIG, about, check_target, read_embedding
from outpace.errors import ModelError, shorten, shown
from outpace.models.base import Target
from outpace.models.families import DecoderConfig
from outpace.models.fields import Fields

KIND = "speculators_model_type"
EMBED = "embed_tokens.weight"
_DIGEST = "verifier_digest"
"""Key under which exports record the target's digest."""


def check_verifier(said: Mapping[str, Any], method: str, folder: Path, target: Target) -> str:
    """Refuse a folder of another kind, or for another target; give the name of the model it is for.

    Raises:
        ModelError: as far as the folder says so.
    """
    read = Fields(str(folder / CONFIG), {}, said)
    kind = read.text(KIND)
    if kind != method:
        raise ModelError(f"{folder} holds a speculator of type {shown(kind)}, not {method!r}")
    verifier = Fields(read.source, {}, read.mapping("speculators_config")).mapping("verifier")
    name = shorten(str(verifier.get("name_or_path", "another model")), 80)
    digest = said.get(_DIGEST)
    if digest is not None:
        check_target(said, str(digest), str(name), folder, target)
    return str(name)


def read_layers(said: Mapping[str, Any], folder: Path, family: str, most: int = 1) -> DecoderConfig:
    """Read the layers of a config in the layout of transformers.

    Raises:
        ModelError: what cannot be read, or more layers than ``most``.
    """
    plain: dict[str, Any] = {"model_type": family, **said, "tie_word_embeddings": False}
    plain.pop("architectures", None)
    try:
        config = DecoderConfig.from_hf(plain)
    except ModelError as error:
        raise ModelError(f"{folder / CONFIG}: {error}") from error
    if config.mixture is not None:
        raise ModelError(f"{folder} has mixtures of experts; drafters with dense layers can be read")
    if config.num_layers > most:
        few = "heads of one" if most == 1 else f"drafters of {most}"
        raise ModelError(f"{folder} has {config.num_layers} layers; {few} can be read")
    return config


def read_taps(layers: Any, one_less: int, folder: Path, target: Target) -> tuple[str, ...]:
    """Read which features are wanted.

    Args:
        one_less: 1 where numbers count layers, not streams.

    Raises:
        ModelError: layers that the target does not have.
    """
    listed = layers if isinstance(layers, list) else [None]
    behind = [layer + one_less if type(layer) is int else -1 for layer in listed]
    if not all(0 <= layer <= target.num_layers for layer in behind):
        raise ModelError(
            f"{folder} reads features of layers {shown(layers)}, but {target.name} has "
            f"{target.num_layers} layers"
        )
    return tuple(f"hidden.{layer}" for layer in behind)


def default_layers(target: Target) -> tuple[int, int, int]:
    """Layers whose features EAGLE-3 fuses unless told otherwise; in shallow targets one may serve twice."""
    last = target.num_layers
    return min(2, last), last // 2, max(last - 3, 1)


def check_fit(width: int, decoder: DecoderConfig, folder: Path, target: Target, name: str) -> None:
    """Refuse a drafter whose sizes are not the target's."""
    for what, wanted, got in (
        ("hidden size", target.hidden_size, width),
        ("hidden size", target.hidden_size, decoder.hidden_size),
        ("vocabulary size", target.vocab_size, decoder.vocab_size),
    ):
        if wanted != got:
            raise ModelError(
                f"{folder} was made for {name} with {what} {got}, but {target.name} has {wanted}"
            )


def check_tensors(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse tensors that are missing, or of another shape than the config says."""
    for name, wanted in shapes.items():
        if name not in tensors:
            raise ModelError(f"{folder} has no tensor {name!r}, which its config needs")
        if tuple(tensors[name].shape) != wanted:
            raise ModelError(
                f"{folder}: {name!r} has shape {list(tensors[name].shape)}, its config needs {list(wanted)}"
            )


def own_embedding(tensors: Mapping[str, Tensor], target: Target, folder: Path) -> Tensor | None:
    """The embedding [V, H] that came with a drafter, unless it is the target's."""
    if EMBED not in tensors:
        return None
    mine_VH = tensors[EMBED].to(target.dtype)
    theirs_VH = read_embedding(target).cpu()
    if mine_VH.shape != theirs_VH.shape:
        raise ModelError(
            f"{folder}: {EMBED!r} has shape {list(mine_VH.shape)}, that of {target.name} has "
            f"{list(theirs_VH.shape)}"
        )
    return None if torch.equal(mine_VH, theirs_VH) else mine_VH


# Writing ---------------------------------------------------------------------------------------


def written(
    kind: str, name: str, depth: int, verifier: Mapping[str, Any], target: Target, **more: Any
) -> dict[str, Any]:
    """A config.json of speculators.

    Args:
        kind: as speculators calls the method.
        name: of its class there.
        depth: tokens to be drafted at a time.
        verifier: name and architectures of the target.
        more: the keys of the kind.
    """
    return {
        "architectures": [name],
        KIND: kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": depth,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": dict(verifier),
        },
        **more,
        _DIGEST: target.digest,
        "target_likeness": about(target)["target_likeness"],
    }


def verifier_name(target: Target, given: str | None, form: str) -> str:
    """How the other program calls the target.

    Raises:
        ModelError: no hub id, where one is needed.
    """
    name = target.name if given is None else given
    if given is None and "/" not in name:
        raise ModelError(
            f"{form} names the model by a hub id, and {name} is none; add --verifier, as in "
            f"--verifier owner/{name}"
        )
    return name


def maps(id_D: Tensor | None, target: Target) -> dict[str, Tensor]:
    """The draft vocabulary as tensors; none where it is whole."""
    if id_D is None:
        return {}
    known_V = torch.zeros(target.vocab_size, dtype=torch.bool)
    known_V[id_D] = True
    return {"d2t": id_D - torch.arange(len(id_D)), "t2d": known_V}


def layer_numbers(taps: Sequence[str]) -> list[int]:
    """Numbers of features for a file; the target's last stream has none, since there it is normed.

    Raises:
        ModelError: that one is among them.
    """
    numbers = [tap.removeprefix("hidden.") for tap in taps]
    if not all(number.isdecimal() for number in numbers):
        raise ModelError(f"no format can say the features {', '.join(taps)}")
    return [int(number) for number in numbers]
