"""What a model says of its mixtures of experts, and the names of their tensors.

A sparse MLP is a router and many small MLPs, its experts. The router scores all of them for every row,
and the row goes through the few with the highest scores. Sparsely gated mixtures: Shazeer et al. 2017,
arXiv:1701.06538; of this kind in Mixtral (arXiv:2401.04088) and Qwen3 (arXiv:2505.09388).

On disk each expert has matrices of its own, or those of all experts lie one after the other in one
tensor. Here every matrix has its own name: ``model.layers.L.mlp.experts.N.gate_proj.weight``.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outpace.errors import ModelError, shown
from outpace.models.fields import MOST, MOST_LAYERS, Fields
from outpace.models.places import Place

ROUTER = "mlp.gate.weight"
MOST_EXPERTS = 1 << 18
"""Most experts of all layers together."""
_OLD = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_STACK = re.compile(r"(.+\.mlp\.experts)\.(gate|up|down|gate_up)_proj(?:\.weight)?")
_UNSAID = {
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0, 1),
}
"""Keys of GGUF files -> values that change nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    experts: int
    """Experts of a sparse MLP."""
    chosen: int
    """Experts that a row goes through."""
    width: int
    """Width between the projections of an expert."""
    normed: bool
    """Whether the weights of the chosen experts are divided by their sum."""
    sparse: tuple[bool, ...]
    """Per layer: whether its MLP is sparse."""

    def __post_init__(self) -> None:
        """Refuse values of another type, and more experts chosen than there are."""
        for name, most in (("experts", MOST_LAYERS), ("chosen", self.experts), ("width", MOST)):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= most:
                raise ModelError(f"{name} of a mixture must be from 1 to {shown(most)}, got {shown(value)}")
        if (count := self.experts * len(self.sparse)) > MOST_EXPERTS:
            raise ModelError(f"{count} experts in all layers are more than the {MOST_EXPERTS} of any model")

    def of_layers(self, layers: Sequence[int]) -> "Mixture":
        """That of some layers."""
        return replace(self, sparse=tuple(self.sparse[i] for i in layers))

    def touched(self, rows: int) -> float:
        """Experts of a layer that so many rows go through, if each row chooses evenly and by itself."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** rows)

    def linears(self, hidden: int) -> Iterator[tuple[str, int, int, bool]]:
        """Of all matrices of a sparse MLP: name in a layer, outputs, inputs, and whether it has a bias."""
        yield ROUTER.removesuffix(".weight"), self.experts, hidden, False
        for number in range(self.experts):
            at = f"mlp.experts.{number}."
            yield f"{at}gate_proj", self.width, hidden, False
            yield f"{at}up_proj", self.width, hidden, False
            yield f"{at}down_proj", hidden, self.width, False


def from_hf(family: str, read: Fields, layers: int) -> Mixture | None:
    """Read a config.json; None for families without experts."""
    if family == "mixtral":
        return Mixture(
            experts=read.count("num_local_experts", most=MOST_LAYERS),
            chosen=read.count("num_experts_per_tok"),
            width=read.count("intermediate_size"),
            normed=True,
            sparse=(True,) * layers,
        )
    if family != "qwen3_moe":
        return None
    dense, step = read.get("mlp_only_layers") or [], read.count("decoder_sparse_step")
    if not isinstance(dense, list) or not all(type(one) is int for one in dense):
        raise ModelError(f"{read.source}: 'mlp_only_layers' must be a list of layers, got {shown(dense)}")
    return Mixture(
        experts=read.count("num_local_experts", read.get("num_experts"), most=MOST_LAYERS),
        chosen=read.count("num_experts_per_tok"),
        width=read.count("moe_intermediate_size"),
        normed=bool(read.get("norm_topk_prob")),
        sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def from_gguf(family: str, read: Fields, layers: int, names: Collection[str]) -> Mixture | None:
    """Read the metadata of a GGUF file; None where it has no experts.

    Args:
        names: of its tensors: layers without a router are dense.
    """
    experts = read.whole("expert_count", most=MOST_LAYERS)
    if experts is None:
        return None
    if family not in ("mixtral", "qwen3_moe"):
        raise ModelError(f"mixtures of experts of architecture {shown(family)} are not supported")
    for key, fine in _UNSAID.items():
        if (value := read.get(key, 0)) not in fine:
            raise ModelError(f"mixtures of experts with {key} {shown(value)} are not supported")
    return Mixture(
        experts=experts,
        chosen=read.count("expert_used_count"),
        width=read.count("expert_feed_forward_length", read.get("feed_forward_length")),
        normed=bool(read.get("expert_weights_norm", True)),
        sparse=tuple(f"model.layers.{i}.{ROUTER}" in names for i in range(layers)),
    )


def usual_name(name: str) -> str:
    """The name of a tensor of Mixtral's files as other files have it."""
    start, found, rest = name.partition(".block_sparse_moe.")
    if not found:
        return name
    parts = rest.split(".")
    return ".".join([start, "mlp", *(_OLD.get(part, part) for part in parts)])


def mixtral_name(name: str) -> str:
    """What Mixtral's files call a tensor."""
    start, found, rest = name.partition(".mlp.")
    if not found:
        return name
    new = {ours: theirs for theirs, ours in _OLD.items()}
    return ".".join([start, "block_sparse_moe", *(new.get(part, part) for part in rest.split("."))])


def places_apart(places: Mapping[str, Place]) -> dict[str, Place]:
    """Places in which every matrix of an expert has its own."""
    found: dict[str, Place] = {}
    for name, place in places.items():
        parts = _parts(name, place.shape)
        if not parts:
            found[name] = place
            continue
        experts, rows, columns = place.shape
        size, shape = place.size // len(parts), (experts * rows // len(parts), columns)
        for i, part in enumerate(parts):
            found[part] = replace(place, start=place.start + i * size, size=size, shape=shape)
    return found


def tensors_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same of tensors in memory, under usual names; views."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = _parts(name, tensor.shape)
        each = tensor.reshape(len(parts), -1, tensor.shape[2]).unbind(0) if parts else (tensor,)
        found |= zip(parts or [usual_name(name)], each, strict=True)
    return found


def _parts(name: str, shape: Sequence[int]) -> list[str]:
    """Names of the equal parts of a tensor that holds matrices of all experts; empty for another tensor."""
    found = _STACK.fullmatch(name)
    if not found or len(shape) != 3 or 0 in shape or shape[0] > MOST_LAYERS:
        return []
    both = ("gate", "up") if found[2] == "gate_up" else (found[2],)
    if shape[1] % len(both):
        return []
    return [f"{found[1]}.{number}.{one}_proj.weight" for number in range(shape[0]) for one in both]
