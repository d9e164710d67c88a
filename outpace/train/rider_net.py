"""The target's layers for rows that ride on texts: frozen, but gradients pass through.

    text      the target's own pass; its keys and values are constants
    riders    rows behind one row of the text each, in chains; a rider sees the text up to there and
              the riders of its chain up to itself, as `Riders` do in a pass that drafts

So the cost of learning is that of the riders alone, forward and twice as much back: no gradient of
any weight is ever made.

Shape letters: B sequences, T tokens, G groups (places of the text), E chains of a group, K riders
of a chain, R = G * E * K, H hidden size, N key heads, Q query heads per key head, D width of a
head, X = T + R, Y = Q * R.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from outpace.models.decoder import Decoder
from outpace.train.batches import Batch
from outpace.train.networks import KeyValue, Layer, Norm, Turns
from outpace.train.objective import LAST
from outpace.types import Feed


class RiderNet:
    """The layers of a target.

    Args:
        target: lends its weights, which are copied once in its dtype. Products are of that dtype.
        layers: those that riders run, ascending.
    """

    def __init__(self, target: Decoder, layers: Sequence[int]) -> None:
        self.target, self.config = target, target.config
        config, device = target.config, target.device
        self.layers = {i: Layer(config, i) for i in layers}
        self.norm = Norm(config.hidden_size, config)
        for i, layer in self.layers.items():
            _take(layer, target, f"model.layers.{i}.")
            layer.to(device)
        _take(self.norm, target, "model.norm.")
        self.norm.to(device)
        self._turns = [Turns(rope, device) for rope in config.ropes]
        half = torch.arange(config.head_dim, device=device).view(-1, 2)
        self._order_D = half.T.flatten()
        """Where the cache, whose coordinates turn in neighbouring pairs, has each coordinate."""

    def texts(self, batch: Batch) -> tuple[Mapping[int, KeyValue], Tensor]:
        """Keys and values as ``read`` gives them, and the feature ``hidden.-1``."""
        held, found = self.read(batch, (LAST,))
        return held, found[LAST]

    @torch.no_grad()
    def read(self, batch: Batch, taps: Sequence[str]) -> tuple[Mapping[int, KeyValue], Mapping[str, Tensor]]:
        """Read a batch with the target itself, or take what the batch has of it.

        Returns:
            By layer that riders run the keys and values of all tokens, [B, N, T, D], in the target's dtype,
            and features [B, T, H]. Rows behind the end of a text hold anything finite.

        Cost: one pass over the batch, unless the batch has the ``wanted`` features. Memory: its keys and
        values, twice.
        """
        target, (size, longest) = self.target, batch.token_BT.shape
        if set(self.wanted(self.layers, taps)) <= set(batch.feature):
            return {i: self._unpacked(batch.feature[f"kv.{i}"]) for i in self.layers}, batch.feature
        cache = target.new_cache(longest)
        feeds = [
            Feed.chain(cache.open(), tokens[:length], want=())
            for tokens, length in zip(batch.token_BT.tolist(), batch.length_B.tolist(), strict=True)
        ]
        scored = target.score(feeds, cache, taps=frozenset(taps))
        found = {}
        for name in taps:
            dtype = target.dtype if name == LAST else torch.float32
            x_BTH = torch.zeros(size, longest, target.hidden_size, dtype=dtype, device=target.device)
            for i in range(size):
                own_TH = scored.of(i).taps[name]
                x_BTH[i, : len(own_TH)] = own_TH
            found[name] = x_BTH
        held: dict[int, KeyValue] = {}
        for layer in self.layers:
            k_BNDT = cache.first_keys(layer, slice(size), longest)
            v_BNTD = cache.value_store[layer, :size, :, :longest]
            k_BNTD = k_BNDT.index_select(2, self._order_D).transpose(2, 3)
            held[layer] = k_BNTD.to(target.dtype), v_BNTD.to(target.dtype, copy=True)
        return held, found

    @staticmethod
    def wanted(layers: Iterable[int], taps: Sequence[str]) -> tuple[str, ...]:
        """Features of batches of which ``read`` needs no pass."""
        return tuple(dict.fromkeys([*taps, *(f"kv.{i}" for i in layers)]))

    def _unpacked(self, kv_BTY: Tensor) -> KeyValue:
        """Keys and values of a feature ``kv.L``."""
        size = (*kv_BTY.shape[:2], 2, self.config.num_kv_heads, self.config.head_dim)
        k_BTND, v_BTND = kv_BTY.to(self.target.dtype).view(size).unbind(2)
        return k_BTND.index_select(3, self._order_D).transpose(1, 2), v_BTND.transpose(1, 2)

    def __call__(
        self, embed_EKH: Tensor, place_BG: Tensor, text: Mapping[int, KeyValue], alone: bool = False
    ) -> Tensor:
        """Normed last states of riders, float32 [B, G, E, K, H].

        Args:
            embed_EKH: what enters the first layer, the same for every group, or [B, G, E, K, H];
                gradients flow to it.
            place_BG: the last row of the text that each group sees.
            alone: riders of a chain do not see each other.
        """
        (size, groups), (chains, riders, _) = place_BG.shape, embed_EKH.shape[-3:]
        kind, dtype = place_BG.device.type, self.target.dtype
        ahead_K = torch.arange(1, riders + 1, device=place_BG.device)
        shape = (size, groups, chains, riders)
        place_BR = place_BG[..., None, None].expand(shape).flatten(1)
        position_BR = (place_BG[..., None, None] + ahead_K).expand(shape).flatten(1)
        stream_BRH = embed_EKH.expand(*shape[:2], -1, -1, -1).flatten(1, 3).float()
        longest = next(iter(text.values()))[0].shape[2]
        group = self.config.num_heads // self.config.num_kv_heads
        masks = {}
        for window in set(self.config.windows):
            sees_BRX = sight(place_BR, position_BR, longest, 1 if alone else riders, window)
            mask_BRX = torch.zeros(sees_BRX.shape, dtype=dtype, device=sees_BRX.device)
            mask_BRX.masked_fill_(~sees_BRX, -torch.inf)
            masks[window] = mask_BRX.repeat(1, group, 1)
        with torch.autocast(kind, dtype, enabled=dtype is torch.bfloat16):
            for i, layer in self.layers.items():
                turn = self._turns[self.config.rope_of_layer[i]].at(position_BR, longest + riders)
                mask_BYX = masks[self.config.windows[i]]
                stream_BRH = self._layer(layer, stream_BRH, turn, text[i], mask_BYX)
        return cast(Tensor, self.norm(stream_BRH)).view(*shape, -1)

    def _layer(
        self, layer: Layer, x_BRH: Tensor, turn: tuple[Tensor, Tensor], text: KeyValue, mask_BYX: Tensor
    ) -> Tensor:
        u_BRH = layer.input_layernorm(x_BRH)
        q_BNQRD = layer.self_attn.queries(u_BRH, turn)
        own = layer.self_attn.keys(u_BRH, turn)
        k_BNXD, v_BNXD = (torch.cat([a, b.to(a.dtype)], 2) for a, b in zip(text, own, strict=True))
        cap = self.config.attention_softcap
        mixed = attend(q_BNQRD.to(k_BNXD.dtype), k_BNXD, v_BNXD, mask_BYX, cap)
        mixed_BRH = layer.self_attn.o_proj(mixed.permute(0, 3, 1, 2, 4).flatten(2))
        return layer.after(x_BRH, mixed_BRH.float())


def sight(place_BR: Tensor, position_BR: Tensor, longest: int, riders: int, window: int | None) -> Tensor:
    """What riders see: texts up to their place, and their own chain up to themselves.

    Args:
        place_BR: the last row of the text that each sees.
        riders: K; every K riders in order are a chain.
        window: a sliding window, as in ``DecoderConfig.windows``.

    Returns:
        bool [B, R, X].
    """
    size, count = place_BR.shape
    key_T = torch.arange(longest, device=place_BR.device)
    text_BRT = key_T <= place_BR[..., None]
    number_R = torch.arange(count, device=place_BR.device)
    chain_R, step_R = number_R // riders, number_R % riders
    own_RR = (chain_R[:, None] == chain_R) & (step_R[:, None] >= step_R)
    if window is not None:
        text_BRT = text_BRT & (key_T > position_BR[..., None] - window)
        own_RR = own_RR & (step_R[:, None] - step_R < window)
    return torch.cat([text_BRT, own_RR.expand(size, -1, -1)], 2)


def attend(
    q_BNQRD: Tensor, k_BNXD: Tensor, v_BNXD: Tensor, mask_BYX: Tensor, softcap: float | None
) -> Tensor:
    """Mix values, [B, N, Q, R, D]. Queries are scaled already.

    Plain products: with such masks the fused kernels of a CPU take twice the time.
    """
    size, queries = q_BNQRD.shape, q_BNQRD.flatten(2, 3)
    score = queries @ k_BNXD.transpose(2, 3)
    score = score if softcap is None else torch.tanh(score / softcap) * softcap
    return ((score + mask_BYX[:, None]).softmax(-1) @ v_BNXD).view(size)


@torch.no_grad()
def _take(module: nn.Module, target: Decoder, prefix: str) -> None:
    """Give a module the target's weights: matrices in its dtype, norms in float32."""
    for name, parameter in module.named_parameters():
        dtype = torch.float32 if "norm" in name or "norm" in prefix else target.dtype
        parameter.requires_grad_(False)
        parameter.data = target.checkpoint.tensor(prefix + name, dtype).clone()
