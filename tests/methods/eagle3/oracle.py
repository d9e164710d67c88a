"""EAGLE heads in plain torch, one row at a time, for what the drafter computes in passes."""

from dataclasses import replace

import torch
from torch.nn import functional as F

from outpace.methods.eagle3.net import EagleShape
from outpace.train.networks import turned


def shape_for(target, *, taps=("hidden.2", "hidden.1", "hidden.0"), draft_vocab=200, **flags):
    """A head for the tiny model."""
    decoder = replace(target.config, num_layers=1, windows=(None,), rope_of_layer=(0,), tied_head=False)
    return EagleShape(decoder=decoder, taps=taps, draft_vocab=draft_vocab, **flags)


def random_tensors(shape, seed=0):
    """Weights on which every part of the head matters."""
    coins = torch.Generator().manual_seed(seed)
    out = {}
    for name, size in shape.tensor_shapes().items():
        spread = size[-1] ** -0.5 if len(size) == 2 else 0.3
        out[name] = spread * torch.randn(size, generator=coins) + (len(size) == 1)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            out[name] *= 2
    return out


class Oracle:
    """Keys and values of a sequence in lists; ``row`` adds one and gives (next feature, logits)."""

    def __init__(self, shape, tensors, target):
        self.shape, self.config, self.target = shape, shape.decoder, target
        self.tensors = {name: one.to(target.dtype).float() for name, one in tensors.items()}
        self.angles = target._turns[0]
        self.keys, self.values = [], []

    def norm(self, x, name):
        return F.rms_norm(x, x.shape, self.tensors[f"{name}.weight"], self.config.norm_eps)

    def linear(self, x, name):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def fuse(self, features):
        """Features of one row, in the order of the taps."""
        shape = self.shape
        if not shape.fused:
            return features[0]
        if shape.each_norm:
            features = [self.norm(f, f"fc_norm.{i}") for i, f in enumerate(features)]
        joined = torch.cat(features)
        return self.linear(self.norm(joined, "input_norm") if shape.joint_norm else joined, "fc")

    def row(self, token, stream, position, sees=None):
        """One row at a position; ``sees`` lists earlier rows that it sees, all by default."""
        config, shape, at = self.config, self.shape, "layers.0."
        embed = self.target.embed([token])[0]
        if shape.fused:
            hidden = self.norm(stream, at + "hidden_norm")
            u = torch.cat([self.norm(embed, at + "input_layernorm"), hidden])
            stream = hidden if shape.residual_normed else stream
        else:
            u = stream = self.linear(torch.cat([embed, stream]), "fc")
        factor = self.angles.at([position])[0]
        q, k, v = (self.linear(u, f"{at}self_attn.{one}_proj").view(-1, config.head_dim) for one in "qkv")
        q, k = (
            turned(x[None, None], (factor.real[None, None], factor.imag[None, None]))[0, 0] for x in (q, k)
        )
        self.keys.append(k)
        self.values.append(v)
        last = len(self.keys) - 1
        rows = [*(range(last) if sees is None else sees), last]
        mixed = []
        for head in range(config.num_heads):
            kv = head // (config.num_heads // config.num_kv_heads)
            score = torch.stack([self.keys[r][kv] @ q[head] for r in rows]) * config.head_dim**-0.5
            mixed.append(score.softmax(0) @ torch.stack([self.values[r][kv] for r in rows]))
        a = stream + self.linear(torch.cat(mixed), at + "self_attn.o_proj")
        x = self.norm(a, at + "post_attention_layernorm")
        gate, up = (self.linear(x, f"{at}mlp.{one}_proj") for one in ("gate", "up"))
        a = a + self.linear(F.silu(gate) * up, at + "mlp.down_proj")
        if not shape.fused:
            return a, self.target.head(a[None])[0]
        out = self.norm(a, "norm")
        return (out if shape.output_normed else a), self.linear(out, "lm_head")
