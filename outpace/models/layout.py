"""How files of some families lay out what the decoder reads in one form.

- fused: q, k and v in one matrix, gate and up in another. Their rows stand one above the other.
- in part: only the first r of the D dimensions of a head rotate, i with i + r / 2. Here i rotates with
  i + D / 2 in every family, and dimensions that stand still fill up the halves.
- divided: logits are divided by a number. The weights of the last norm are, once, so that nobody who reads
  the head needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.models.families import DecoderConfig
from outpace.models.places import Place

T = TypeVar("T", Place, Tensor)

_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_LAST_NORM = "model.norm.weight"


def unfused(tensors: Mapping[str, T], config: DecoderConfig, cut: Callable[[T, int, int], T]) -> dict[str, T]:
    """Tensors by Hugging Face name, fused ones in their parts.

    Args:
        cut: gives some rows of a tensor, from the first one on, so many.

    Raises:
        ModelError: a fused tensor of another height than its parts have together.
    """
    shapes, out = config.tensor_shapes(), dict[str, T]()
    for name, one in tensors.items():
        stem, _, kind = name.rpartition(".")
        fused = next((fused for fused in _FUSED if stem.endswith("." + fused)), None)
        names = [f"{stem.removesuffix(fused)}{part}.{kind}" for part in _FUSED[fused]] if fused else []
        if not fused or not all(part in shapes for part in names):
            out[name] = one
            continue
        heights, first = [shapes[part][0] for part in names], 0
        if sum(heights) != one.shape[0]:
            raise ModelError(f"{name!r} has {one.shape[0]} rows, its config needs {sum(heights)}")
        for part, height in zip(names, heights, strict=True):
            out[part] = cut(one, first, height)
            first += height
    return out


def cut_place(place: Place, first: int, rows: int) -> Place:
    """Where some rows of a matrix lie."""
    each = place.size // place.shape[0]
    return replace(place, start=place.start + first * each, size=rows * each, shape=(rows, *place.shape[1:]))


def row_order(config: DecoderConfig, name: str) -> Tensor | None:
    """Which stored row each row of q or k is, where heads rotate in part; None: rows are in order."""
    width, still = config.head_dim, max((one.still for one in config.ropes if one.still < one.dim), default=0)
    if not still or not (".q_proj." in name or ".k_proj." in name):
        return None
    order = torch.arange(width)
    turned, stays = order[: width - still], order[width - still :]
    halves = [torch.cat(pair) for pair in zip(turned.chunk(2), stays.chunk(2), strict=True)]
    heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
    return (torch.arange(heads)[:, None] * width + torch.cat(halves)).flatten()


def settled(config: DecoderConfig, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor as the decoder reads it, from what is stored.

    What is divided is float32 where no dtype is asked for.
    """
    if name == _LAST_NORM and config.logit_scale != 1.0:
        return (tensor.float() * config.logit_scale).to(dtype or torch.float32)
    order = row_order(config, name)
    return tensor if order is None else tensor[order]


def to_transformers(config: DecoderConfig, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """What the model class of transformers has, from tensors as the decoder reads them.

    Args:
        read: gives a tensor by name.
    """
    out = {}
    for name in config.tensor_shapes():
        order, tensor = row_order(config, name), read(name)
        if name == _LAST_NORM and config.logit_scale != 1.0:
            tensor = (tensor.float() / config.logit_scale).to(tensor.dtype)
        out[name] = tensor if order is None else tensor[order.argsort()]
    for fused, parts in _FUSED.items() if config.family == "phi3" else ():
        for layer in range(config.num_layers):
            at = f"model.layers.{layer}."
            out[f"{at}{fused}.weight"] = torch.cat([out.pop(f"{at}{part}.weight") for part in parts])
    return out


def from_transformers(config: DecoderConfig, state: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors of a model of transformers as the decoder reads them; views where they can be."""
    tensors = {name: one for name, one in state.items() if isinstance(one, Tensor)}
    parts = unfused(tensors, config, lambda tensor, first, rows: tensor[first : first + rows])
    return {name: settled(config, name, one) for name, one in parts.items()}
