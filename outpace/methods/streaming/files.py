"""Streams on disk: `streaming` and `coral` read them, ``outpace train`` writes them.

    x_k = h + h E + P_k      h: the state of a row before ``layer``; enters there, k positions further on
    weights of the layers from there on, for streams alone:  W + B A

    early exit, for pruning:  y = n + n X, n = norm(state after ``exit`` layers);  logits: head(y)

Tensors are ``streams`` [K, H] (P), ``enter`` [H, H] (E), ``exit.norm`` [H] and ``exit.linear`` [H, H] (X).
Every projection of the upper layers, named as in the target, has ``.a`` [R, I] and ``.b`` [O, R].

Shape letters: K streams, H hidden size, R rank, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from outpace.drafters.static_tree import LARGEST, likeliest
from outpace.drafters.trained import CONFIG, find, lender, read_config, read_tensors, vocab_map
from outpace.drafters.trained_file import read_rates
from outpace.errors import ModelError, shown
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.models.memory import Replaced


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Streams:
    layer: int
    """Layers of the target below the streams."""
    stream_KH: Tensor
    enter_HH: Tensor
    low_rank: Mapping[str, Tensor]
    """Name in the target, then ``.a`` or ``.b``."""
    exit: int
    """Layers below the early exit that prunes trees."""
    exit_norm_H: Tensor
    exit_HH: Tensor
    rates: tuple[tuple[float, ...], ...]
    """Held-out acceptance by stream and rank; empty: nothing was measured."""
    vocab: VocabMap | None = None

    @property
    def tree(self) -> tuple[int, ...] | None:
        """Parents of the tree that the rates ask for."""
        return likeliest(self.rates, LARGEST) or None

    def through(self, target: Decoder) -> Decoder:
        """The target with the streams' weights in the upper layers."""
        merged = {}
        for name in {one[:-2] for one in self.low_rank}:
            weight = f"{name}.weight"
            more_OI = self.low_rank[f"{name}.b"].float() @ self.low_rank[f"{name}.a"].float()
            merged[weight] = target.checkpoint.tensor(weight).float() + more_OI
        return target.with_layers(Replaced(target.checkpoint, merged), range(self.layer, target.num_layers))


def projections(config: DecoderConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the projections of a layer, by their names in the target; no experts."""
    hidden, ffn, width = config.hidden_size, config.ffn_size, config.head_dim
    queries, keys = config.num_heads * width, config.num_kv_heads * width
    sizes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    at = f"model.layers.{layer}."
    named = {f"{at}self_attn.{name}_proj": size for name, size in sizes.items()}
    if config.sparse(layer) is None:
        for name, size in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
            named[f"{at}mlp.{name}_proj"] = size
    return named


def read_streams(method: str, path: str | None, target: Target) -> Streams:
    """Read a drafter folder.

    Args:
        path: the folder; None: the one trained for the target.

    Raises:
        ModelError: no folder, or files that are corrupt or of another target or method.
    """
    folder, lent = find(method, target, path), lender(target, method)
    said, tensors = read_config(folder, target, method), read_tensors(folder)
    layer, rank, hidden = said.get("layer"), said.get("rank"), target.hidden_size
    if type(layer) is not int or not 0 < layer < target.num_layers or type(rank) is not int or rank < 1:
        raise ModelError(f"{folder / CONFIG}: layer and rank are {shown(layer)} and {shown(rank)}")
    exit_ = said.get("exit")
    if type(exit_) is not int or not 0 < exit_ <= layer:
        raise ModelError(f"{folder / CONFIG}: exit must be a layer up to {layer}, got {shown(exit_)}")
    square = (hidden, hidden)
    wanted: dict[str, tuple[int, ...]] = {"enter": square, "exit.norm": (hidden,), "exit.linear": square}
    for i in range(layer, target.num_layers):
        for name, (outputs, inputs) in projections(lent.config, i).items():
            wanted |= {f"{name}.a": (rank, inputs), f"{name}.b": (outputs, rank)}
    found = {name: tuple(one.shape) for name, one in tensors.items() if name not in ("d2t", "t2d")}
    streams = found.pop("streams", ())
    if found != wanted or len(streams) != 2 or streams[1] != hidden or not streams[0]:
        wrong = sorted(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
        raise ModelError(
            f"{folder} holds no streams of this target; look at {', '.join(wrong[:4]) or 'streams'}"
        )
    return Streams(
        layer=layer,
        stream_KH=tensors["streams"].float(),
        enter_HH=tensors["enter"].float(),
        low_rank={name: tensors[name] for name in wanted if name.startswith("model.")},
        exit=exit_,
        exit_norm_H=tensors["exit.norm"].float(),
        exit_HH=tensors["exit.linear"],
        rates=read_rates(said, folder),
        vocab=vocab_map(tensors, target.vocab_size),
    )
