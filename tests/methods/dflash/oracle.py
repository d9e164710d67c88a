"""Block drafters in plain torch: the oracle of what drafts, and of what is trained."""

from dataclasses import replace

import torch
from torch.nn import functional as F

from outpace.law import VocabMap
from outpace.methods.dflash.files import BlockFile
from outpace.methods.dflash.net import BlockShape

TAPS = ("hidden.2", "hidden.1", "hidden.-1")
SLOTS = 4


def half(target):
    """A draft vocabulary of the even tokens."""
    ids = torch.arange(0, target.vocab_size, 2)
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[ids] = torch.arange(len(ids))
    return VocabMap(ids, feed_V)


def random_file(target, layers=2, tree=None, **kind):
    """A network on which every part matters; ``kind`` is that of a `BlockShape`."""
    coins = torch.Generator().manual_seed(3)
    decoder = replace(
        target.config,
        num_layers=layers,
        windows=(None,) * layers,
        rope_of_layer=(0,) * layers,
        tied_head=False,
        qk_norm="mask" in kind,
    )
    columns = len(half(target).to_target_D)
    shape = BlockShape(decoder=decoder, taps=TAPS, slots=SLOTS, known=columns, draft_vocab=columns, **kind)
    tensors = {}
    for name, size in shape.tensor_shapes().items():
        spread = size[-1] ** -0.5 if len(size) == 2 else 0.3
        tensors[name] = spread * torch.randn(size, generator=coins) + (len(size) == 1)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name] *= 2
    if "mask" not in kind:
        tensors["slots.weight"] *= 8
    return BlockFile(shape=shape, tensors=tensors, vocab=half(target), tree=tree)


def rotated(x, position, config):
    """One head, dimension i with dimension i + D / 2."""
    low, high = x.chunk(2)
    theta = config.ropes[0].frequencies()[0]
    cos, sin = (position * theta).cos(), (position * theta).sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin])


def block(shape, tensors, target, taps, pending, *, late=0, causal=None):
    """What the unembedding reads at the guessing rows of one block, [A, H], by hand.

    ``late`` and ``causal`` are planted: positions of the block that are off, and rows that do not
    see the later rows of their block, or do.
    """
    config, masks = shape.decoder, shape.mask is not None
    causal = shape.causal if causal is None else causal
    w = {name: one.to(target.dtype).float() for name, one in tensors.items()}

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], w[name], config.norm_eps)

    def unit(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    features = [taps[name].float() for name in shape.taps]
    context = torch.cat(features if masks else [unit(one) for one in features], -1) @ w["fc.weight"].T
    if masks:
        context = norm(context, "hidden_norm.weight")
        rows = list(target.embed([pending, *[shape.mask] * (shape.slots - 1)]))
    else:
        seed = context[-1] + w["token.weight"] @ unit(target.embed([pending])[0])
        rows = [seed + slot for slot in w["slots.weight"]]
    n = len(context)
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        given = [norm(x, f"{at}input_layernorm.weight") for x in ([] if masks else context)]
        seen = [*(given or context), *(norm(x, f"{at}input_layernorm.weight") for x in rows)]
        places = [*range(n), *(n + late + i for i in range(len(rows)))]
        query, key, value = (
            [(w[f"{at}self_attn.{one}_proj.weight"] @ x).view(-1, config.head_dim) for x in seen]
            for one in "qkv"
        )
        if masks:
            query, key = (
                [norm(x, f"{at}self_attn.{name}_norm.weight") for x in some]
                for name, some in (("q", query), ("k", key))
            )
        out = []
        for i, x in enumerate(rows):
            upto = n + i + 1 if causal else len(seen)
            mixed = []
            for head in range(config.num_heads):
                kv = head // (config.num_heads // config.num_kv_heads)
                q = rotated(query[n + i][head], places[n + i], config)
                keys = torch.stack([rotated(key[t][kv], places[t], config) for t in range(upto)])
                share = (keys @ q * config.head_dim**-0.5).softmax(0)
                mixed.append(share @ torch.stack([value[t][kv] for t in range(upto)]))
            x = x + w[f"{at}self_attn.o_proj.weight"] @ torch.cat(mixed)
            y = norm(x, f"{at}post_attention_layernorm.weight")
            gate, up = (w[f"{at}mlp.{one}_proj.weight"] @ y for one in ("gate", "up"))
            out.append(x + w[f"{at}mlp.down_proj.weight"] @ (F.silu(gate) * up))
        rows = out
    return torch.stack([norm(x, "norm.weight") for x in rows[shape.slots - shape.guesses :]])
