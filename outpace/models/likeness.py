"""Whether two models are the same up to rounding: one from a folder, the other from a GGUF file.

Digests of rounded weights differ. What decides whether a drafter fits a model is its shape, and
about what its weights are; a small sample of them tells. Rows of the embedding are compared by
token, so that another vocabulary is another model.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outpace.errors import ModelError, shown

if TYPE_CHECKING:
    from outpace.models.weights import Checkpoint

_SHAPE = ("vocab_size", "hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
_FARTHEST = {"embedding": 0.2, "norms": 0.02, "projections": 0.2}
"""Part of the sample -> relative distance that rounding explains. Rounding to 4 bits is off by
0.05 to 0.1 and to 3 bits by 0.2; norms are never rounded to less than bfloat16."""
_TOKENS, _COLUMNS, _VALUES = 48, 8, 64


@dataclass(frozen=True, slots=True)
class Likeness:
    """Shape and a sample of the weights."""

    shape: tuple[int, ...]
    sample_N: Tensor
    """float16, on the CPU: some of the embedding, of each layer's norm, and of value projections."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Likeness:
        """Take the sample. Cost: reads every first norm of a layer, and three value projections."""
        config = checkpoint.config
        # The last tokens may be padding, whose vectors are anything.
        ids = [token * config.vocab_size * 9 // (10 * _TOKENS) for token in range(_TOKENS)]
        rows = checkpoint.rows("model.embed_tokens.weight", torch.float32)(ids)
        layers = range(config.num_layers)
        first = "input_layernorm" if config.pre_norms else "post_attention_layernorm"
        norms = [checkpoint.tensor(f"model.layers.{i}.{first}.weight") for i in layers]
        chosen = sorted({0, config.num_layers // 2, config.num_layers - 1})
        values = [checkpoint.tensor(f"model.layers.{i}.self_attn.v_proj.weight") for i in chosen]
        parts = [
            *(_some(row, _COLUMNS) for row in rows),
            *(_some(norm, _COLUMNS) + config.norm_offset for norm in norms),
            *(_some(value, _VALUES) for value in values),
        ]
        shape = tuple(int(getattr(config, name)) for name in _SHAPE)
        return cls(shape, torch.cat(parts).half())

    def difference(self, other: Likeness) -> str | None:
        """Say what of the other model is not the same up to rounding; None: nothing."""
        for name, mine, theirs in zip(_SHAPE, self.shape, other.shape, strict=True):
            if mine != theirs:
                return f"{name} is {theirs}, not {mine}"
        ends = (_TOKENS * _COLUMNS, (_TOKENS + self.shape[_SHAPE.index("num_layers")]) * _COLUMNS)
        parts = zip(
            _FARTHEST.items(),
            self.sample_N.float().tensor_split(ends),
            other.sample_N.float().tensor_split(ends),
            strict=True,
        )
        for (name, most), mine_N, theirs_N in parts:
            off = float((mine_N - theirs_N).norm() / mine_N.norm().clamp_min(1e-6))
            if not off <= most:
                return f"the {name} differ by {off:.0%}, more than rounding explains"
        return None

    def to_json(self) -> dict[str, Any]:
        data = base64.b64encode(self.sample_N.numpy().tobytes()).decode()
        return {"shape": list(self.shape), "sample": data}

    @classmethod
    def from_json(cls, said: Any, source: str) -> Likeness:
        """Read what ``to_json`` gave.

        Raises:
            ModelError: something else.
        """
        try:
            shape = tuple(said["shape"])
            data = bytearray(base64.b64decode(said["sample"], validate=True))
        except (KeyError, TypeError, ValueError, binascii.Error):
            shape, data = (), bytearray()
        counts = all(type(one) is int and one > 0 for one in shape) and len(shape) == len(_SHAPE)
        if counts:
            named: Mapping[str, int] = dict(zip(_SHAPE, shape, strict=True))
            layers, rows = named["num_layers"], named["num_kv_heads"] * named["head_dim"]
            values = len({0, layers // 2, layers - 1}) * min(_VALUES, rows * named["hidden_size"])
            columns = min(_COLUMNS, named["hidden_size"])
            counts = len(data) == 2 * ((_TOKENS + layers) * columns + values)
        if not counts:
            raise ModelError(f"{source}: target_likeness {shown(said)} cannot be read")
        return cls(shape, torch.frombuffer(data, dtype=torch.float16))


def _some(tensor: Tensor, count: int) -> Tensor:
    """Evenly spread values of a tensor, float32 on the CPU."""
    flat = tensor.detach().reshape(-1)
    index = torch.arange(min(count, len(flat))) * len(flat) // min(count, len(flat))
    return flat[index.to(flat.device)].float().cpu()
