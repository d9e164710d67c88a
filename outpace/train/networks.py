"""Layers of the Llama family that can be trained, and drafters' own attention over depths.

Arithmetic and parameter names are those of `outpace.models.decoder` and of transformers, so that
what is trained is what drafts. The residual stream is float32; under autocast products are not.

Queries may be fewer than keys: rows from which nothing is learned give keys and values only.

Shape letters: B sequences, T rows with keys, A rows with queries, I input width, H hidden size,
K key heads, G query heads per key head, D width of a head, E = D / 2, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.trained import read_embedding
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.models.mixtures import Mixture
from outpace.models.mlp import chosen, dense_weight
from outpace.models.rope import Rope, Rotation
from outpace.models.rowwise import ACTIVATION

Turn = tuple[Tensor, Tensor]
"""cos and sin of some rows, [B, A, 1, E]."""
KeyValue = tuple[Tensor, Tensor]
"""Keys, turned, and values of some rows, [B, K, T, D]."""


class Turns:
    """A rotary table as cos and sin, as long as needed so far."""

    def __init__(self, rope: Rope, device: torch.device) -> None:
        self._rotation = Rotation(rope, device)
        self._cos_PE = self._sin_PE = torch.empty(0, rope.dim // 2, device=device)

    def at(self, position_BA: Tensor, longest: int) -> Turn:
        """Factors of rows at positions below ``longest``."""
        if longest > len(self._cos_PE):
            table_PE = self._rotation.at(range(max(longest, 512))).squeeze(1)
            self._cos_PE, self._sin_PE = table_PE.real.contiguous(), table_PE.imag.contiguous()
        return self._cos_PE[position_BA][:, :, None], self._sin_PE[position_BA][:, :, None]


class Embed:
    """The target's embedding, whose scale is rounded to its dtype as in `Target.embed`."""

    def __init__(self, target: Decoder) -> None:
        self._rows_VH = read_embedding(target)
        self._scale = float(torch.tensor(target.config.embed_scale, dtype=self._rows_VH.dtype))

    def __call__(self, token: Tensor) -> Tensor:
        """Vectors of tokens of any shape, float32."""
        return F.embedding(token, self._rows_VH).float() * self._scale


def turned(x_BAXD: Tensor, turn: Turn) -> Tensor:
    """Rotate dimension i with dimension i + D / 2."""
    low, high = x_BAXD.chunk(2, -1)
    cos, sin = (one.to(x_BAXD.dtype) for one in turn)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Norm(nn.Module):
    """RMS norm with the weights as files store them."""

    def __init__(self, size: int, config: DecoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - config.norm_offset))
        self._size, self._eps, self._offset = (size,), config.norm_eps, config.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self._size, self.weight + self._offset, self._eps)


class Attention(nn.Module):
    """Attention whose rows see all earlier keys of a text, and keys of their own depths.

    Args:
        inputs: width of what queries, keys and values read; the hidden size by default.
    """

    def __init__(self, config: DecoderConfig, window: int | None, inputs: int | None = None):
        super().__init__()
        self._config, self._window = config, window
        width, keys = config.head_dim, config.num_kv_heads
        inputs, bias = inputs or config.hidden_size, config.qkv_bias
        self.q_proj = nn.Linear(inputs, config.num_heads * width, bias)
        self.k_proj = nn.Linear(inputs, keys * width, bias)
        self.v_proj = nn.Linear(inputs, keys * width, bias)
        self.o_proj = nn.Linear(config.num_heads * width, config.hidden_size, config.out_bias)
        self.q_norm = Norm(width, config) if config.qk_norm else None
        self.k_norm = Norm(width, config) if config.qk_norm else None

    def queries(self, u_BAI: Tensor, turn: Turn) -> Tensor:
        """Turned queries [B, K, G, A, D], scaled, which is cheaper than scaling scores."""
        config = self._config
        size = u_BAI.shape[:2]
        q_BAXD = self.q_proj(u_BAI).view(*size, config.num_heads, config.head_dim)
        if self.q_norm is not None:
            q_BAXD = self.q_norm(q_BAXD).to(q_BAXD.dtype)
        q_BAXD = turned(q_BAXD, turn) * config.attention_scale
        groups = config.num_heads // config.num_kv_heads
        q_BAKGD = q_BAXD.view(*size, config.num_kv_heads, groups, config.head_dim)
        return q_BAKGD.permute(0, 2, 3, 1, 4)

    def keys(self, u_BTI: Tensor, turn: Turn) -> KeyValue:
        config = self._config
        shape = (*u_BTI.shape[:2], config.num_kv_heads, config.head_dim)
        k_BTKD = self.k_proj(u_BTI).view(shape)
        if self.k_norm is not None:
            k_BTKD = self.k_norm(k_BTKD).to(k_BTKD.dtype)
        v_BTKD = self.v_proj(u_BTI).view(shape)
        return turned(k_BTKD, turn).transpose(1, 2), v_BTKD.transpose(1, 2)

    def forward(self, q_BKGAD: Tensor, text: KeyValue, own: Sequence[KeyValue], place_BA: Tensor) -> Tensor:
        """Mix values, [B, A, H].

        Args:
            text: keys and values of all rows of the text.
            own: of the depths before and the present one, [B, K, A, D]: each row sees its own.
            place_BA: last row of the text that a row sees.
        """
        size, count = q_BKGAD.shape, text[0].shape[2]
        score = q_BKGAD.flatten(2, 3) @ text[0].transpose(2, 3)
        score = score.view(*size[:4], count).float()
        key_T = torch.arange(count, device=place_BA.device)
        unseen_BAT = key_T > place_BA[..., None]
        if self._window is not None:
            unseen_BAT = unseen_BAT | (key_T <= place_BA[..., None] - self._window)
        cap = self._config.attention_softcap
        score = score if cap is None else torch.tanh(score / cap) * cap
        scores = [score.masked_fill_(unseen_BAT[:, None, None], -torch.inf)]
        for k_BKAD, _ in own:
            score = (q_BKGAD.float() * k_BKAD[:, :, None].float()).sum(-1, keepdim=True)
            scores.append(score if cap is None else torch.tanh(score / cap) * cap)
        share = (scores[0] if not own else torch.cat(scores, -1)).softmax(-1)
        out = share[..., :count].to(q_BKGAD.dtype).flatten(2, 3) @ text[1]
        out = out.view(size)
        for i, (_, v_BKAD) in enumerate(own):
            out = out + share[..., count + i, None] * v_BKAD[:, :, None]
        mixed: Tensor = self.o_proj(out.permute(0, 3, 1, 2, 4).flatten(2))
        return mixed


class Mlp(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, ffn, bias = config.hidden_size, config.ffn_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, ffn, bias)
        self.up_proj = nn.Linear(hidden, ffn, bias)
        self.down_proj = nn.Linear(ffn, hidden, bias)
        self._activation = ACTIVATION[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class SparseMlp(nn.Module):
    """A mixture of experts; see ``outpace.models.mlp``. Which experts a row goes through learns nothing."""

    def __init__(self, config: DecoderConfig, mixture: Mixture) -> None:
        super().__init__()
        one = replace(config, mixture=None, ffn_size=mixture.width, mlp_bias=False)
        self.gate = nn.Linear(config.hidden_size, mixture.experts, bias=False)
        self.experts = nn.ModuleList([Mlp(one) for _ in range(mixture.experts)])
        self._mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        x_TH = x.flatten(0, -2)
        with torch.autocast(x.device.type, enabled=False):
            id_TK, share_TK = chosen(x_TH.float() @ self.gate.weight.float().T, self._mixture)
        out_TH = torch.zeros_like(x_TH, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            row_N, nth_N = (id_TK == number).nonzero(as_tuple=True)
            if len(row_N):
                y_NH = expert(x_TH[row_N]).float() * share_TK[row_N, nth_N, None]
                out_TH = out_TH.index_add(0, row_N, y_NH)
        return out_TH.view(x.shape)


class Layer(nn.Module):
    """One block: attention and MLP around a residual stream."""

    def __init__(self, config: DecoderConfig, index: int = 0, inputs: int | None = None) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.self_attn = Attention(config, config.windows[index], inputs)
        sparse = config.sparse(index)
        self.mlp = Mlp(config) if sparse is None else SparseMlp(config, sparse)
        self.input_layernorm = Norm(hidden, config)
        self.post_attention_layernorm = Norm(hidden, config)
        self.sandwich = config.sandwich_norms
        if self.sandwich:
            self.pre_feedforward_layernorm = Norm(hidden, config)
            self.post_feedforward_layernorm = Norm(hidden, config)

    def after(self, x_BAH: Tensor, mixed_BAH: Tensor) -> Tensor:
        """The residual stream behind the block, given what attention mixed."""
        if self.sandwich:
            x_BAH = x_BAH + self.post_attention_layernorm(mixed_BAH)
            y_BAH = self.mlp(self.pre_feedforward_layernorm(x_BAH))
            y_BAH = self.post_feedforward_layernorm(y_BAH)
        else:
            x_BAH = x_BAH + mixed_BAH
            y_BAH = self.mlp(self.post_attention_layernorm(x_BAH))
        out: Tensor = x_BAH + y_BAH
        return out


def plain_shape(theirs: DecoderConfig, layers: int, like: int) -> DecoderConfig:
    """Layers as wide as a decoder's, turned as its layer ``like``, without what only some families have."""
    return replace(
        theirs,
        num_layers=layers,
        windows=(None,) * layers,
        ropes=(theirs.ropes[theirs.rope_of_layer[like]],),
        rope_of_layer=(0,) * layers,
        mixture=None,
        tied_head=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        norm_offset=0.0,
        sandwich_norms=False,
        attention_softcap=None,
        logit_softcap=None,
        embed_scale=1.0,
        attention_scale=theirs.head_dim**-0.5,
    )


@torch.no_grad()
def take_layer(layer: Layer, target: Decoder, number: int, writes: float = 1.0) -> None:
    """Copy a layer of a target, as far as a plain layer has its parts.

    Args:
        layer: overwritten.
        number: which layer of the target.
        writes: scale of what it adds to the stream.
    """
    at, offset = f"model.layers.{number}.", target.config.norm_offset

    def read(name: str) -> Tensor:
        return dense_weight(target.checkpoint, f"{at}{name}.weight").to(target.device)

    for name in ("q", "k", "v", "o"):
        scale = writes if name == "o" else 1.0
        layer.get_parameter(f"self_attn.{name}_proj.weight").copy_(scale * read(f"self_attn.{name}_proj"))
    for name in ("gate", "up", "down"):
        scale = writes if name == "down" else 1.0
        layer.get_parameter(f"mlp.{name}_proj.weight").copy_(scale * read(f"mlp.{name}_proj"))
    before_mlp = "pre_feedforward" if target.config.sandwich_norms else "post_attention"
    for norm, theirs in ((layer.input_layernorm, "input"), (layer.post_attention_layernorm, before_mlp)):
        if isinstance(norm, Norm):  # some drafters leave one out
            norm.weight.copy_(read(f"{theirs}_layernorm") + offset)
