"""Any causal language model of transformers as a target: the general path, and our oracle.

Where every layer keeps plain keys and values, rows branch: we hold the keys, and hand the
model positions and an additive 4-D mask (one per layer type). Where a layer keeps something
else (a recurrent state, a compressed cache), rows form chains and the model keeps its own
cache. Architectures differ in what they honour, and one that ignored a mask would give wrong
text without a word; so each model is tried once, on a few tokens, against its plain forward,
and gets the best way that reproduces it.

Shape letters: B feeds of a pass, J rows of the longest feed, T rows of all feeds, V
vocabulary, H hidden size.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outpace.cache.base import KVCache
from outpace.errors import ModelError
from outpace.models.base import TAPS, TREE, Target
from outpace.models.families import GenerationDefaults
from outpace.models.hf_cache import CHUNKED, FULL, WINDOWED, GatherCache, ReplayCache, Track
from outpace.models.text import Tokenizer
from outpace.types import Draft, Feed, Scored

WAYS = ("gather", "resume", "single", "whole")
"""How a model can be run, best first: trees over our own storage; chains that continue its own
cache; the same, one token at a time; no cache at all."""

_SLOW = {
    "single": "this model one token at a time",
    "whole": "the whole text again in every pass over this model",
}
_NO_LIMIT = 1 << 20
"""Context of a model that states none, such as a recurrent one."""
_REPLAY = 16
"""Accepted tokens that a pass reads again beside its new rows, before a pass of their own."""
_ROUNDING = {8: 1e-9, 4: 3e-5, 2: 0.1}
"""Bytes of the dtype -> mean error that rounding may cause, in standard deviations of a logit.

Measured on a model of 30 layers: 4e-6 in float32, 0.005 in float16, 0.03 in bfloat16; and 0.6
when the mask is ignored."""
_PADDING = 16
"""Rows of padding that cost less than a forward of its own (measured: 16 to 24)."""
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")


class HFTarget(Target):
    """A model of transformers, used as it is: weights, configuration and modes stay the user's."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        note: str | None = None,
    ) -> None:
        """Wrap a model that is in memory.

        Args:
            model: an ``AutoModelForCausalLM``, of any dtype, on any device.
            tokenizer: a fast tokenizer of transformers, one of ours, or None for token ids only.
            name: what reports call it; by default where it was loaded from.
            note: one line to show the user.

        Raises:
            ModelError: it is no causal language model, or its tokenizer is not supported.

        Cost: about five passes over a few tokens, to find out how the model can be run.
        """
        config = getattr(model, "config", None)
        if config is None or not callable(getattr(model, "get_output_embeddings", None)):
            raise ModelError(
                f"{type(model).__name__} is no language model of transformers; "
                "give an AutoModelForCausalLM"
            )
        text = config.get_text_config(decoder=True)
        self.model = model
        self.name = name or config._name_or_path or type(model).__name__
        self.note = note
        self.device, self.dtype = model.device, model.dtype
        self.hidden_size, self.num_layers = text.hidden_size, text.num_hidden_layers
        self.max_positions = _context(text)
        self.digest = _digest(model)
        self.defaults = _defaults(model)
        self.tokenizer = _wrapped(tokenizer, self.defaults)
        self._kinds = _layer_kinds(text)
        parameters = inspect.signature(model.forward).parameters
        self._takes = frozenset(parameters)
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            self._takes |= {"output_hidden_states"}
        self._state_name = next(
            (n for n in ("past_key_values", "cache_params", "state") if n in self._takes), None
        )
        self.way = "whole"
        self.vocab_size = int(self._forward(torch.zeros(1, 1, dtype=torch.int64)).logits.shape[-1])
        self.way = next(way for way in self._possible() if self._reproduces(way))
        taps = {TAPS} if "output_hidden_states" in self._takes else set()
        if self.note is None and self.way in _SLOW:
            self.note = f"transformers reads {_SLOW[self.way]}; drafts save little"
        self.can = frozenset(taps | {TREE} if self.way == "gather" else taps)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read by a pass over one row."""
        total = sum(p.nbytes for p in self.model.parameters())
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if embedding is None or head is None or embedding.weight is head.weight:
            return total
        return int(total - embedding.weight.nbytes)

    def new_cache(self, capacity: int = 0) -> KVCache:
        """An empty cache: of our own storage if rows may branch, else of the model's states."""
        if self.way == "gather":
            return GatherCache(self.num_layers, self.device, capacity)
        return ReplayCache()

    def score(
        self,
        feeds: Sequence[Feed],
        cache: KVCache,
        *,
        taps: frozenset[str] = frozenset(),
        layers: int | None = None,
    ) -> Scored:
        """Run one pass; see the contract. Taps: ``hidden.0`` to ``hidden.-1``, nothing else.

        Feeds of similar length share a forward, others get their own; a model that keeps its
        own cache runs them one by one.
        """
        if layers is not None:
            raise ModelError(f"{self.name} cannot stop after {layers} layers; use the own decoder")
        for feed in feeds:
            if feed.riders is not None or feed.resume is not None:
                raise ModelError(f"{self.name} takes no riders and no resume; use the own decoder")
        depths = {tap: self._depth_of(tap) for tap in sorted(taps)}
        out: list[tuple[Tensor, dict[str, Tensor]]] = [(torch.empty(0), {})] * len(feeds)
        with self._borrowed():
            if isinstance(cache, GatherCache):
                for group in _similar(feeds):
                    parts = self._gather([feeds[i] for i in group], cache, depths)
                    for i, part in zip(group, parts, strict=True):
                        out[i] = part
            elif isinstance(cache, ReplayCache):
                out = [self._replay(feed, cache, depths) for feed in feeds]
            else:
                raise ModelError(f"{type(cache).__name__} is not a cache of {self.name}")
        rows = [len(feed.token_J) for feed in feeds]
        return Scored(
            torch.cat([logits for logits, _ in out]),
            _starts([feed.wanted for feed in feeds]),
            {tap: torch.cat([features[tap] for _, features in out]) for tap in depths},
            _starts(rows) if depths else (0,),
        )

    def _gather(
        self, feeds: Sequence[Feed], cache: GatherCache, depths: Mapping[str, int]
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """One forward over all feeds, padded on the right."""
        rows = [cache.append(feed.slot, feed.token_J, feed.parent_J) for feed in feeds]
        counts = [len(feed.token_J) for feed in feeds]
        spot = cache.spot([feed.slot for feed in feeds], rows)
        position_BJ, masks = cache.mask(spot, counts, self._kinds, self.dtype)
        id_BJ = torch.tensor(
            [(*feed.token_J, *[0] * (max(counts) - n)) for feed, n in zip(feeds, counts, strict=True)]
        )
        wanted = [range(n) if feed.want is None else feed.want for feed, n in zip(feeds, counts)]
        heads = sorted({row for want in wanted for row in want})
        whole = len(heads) == max(counts) or "logits_to_keep" not in self._takes
        extra = {} if whole else {"logits_to_keep": torch.tensor(heads, device=self.device)}
        result = self._forward(
            id_BJ,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=position_BJ,
            past_key_values=cache.adapter(spot),
            use_cache=True,
            output_hidden_states=bool(depths),
            **extra,
        )
        column = {row: row if whole else i for i, row in enumerate(heads)}
        parts = []
        for b, (want, n) in enumerate(zip(wanted, counts, strict=True)):
            logits = result.logits[b, [column[row] for row in want]].float()
            parts.append((logits, {t: result.hidden_states[d][b, :n] for t, d in depths.items()}))
        return parts

    def _replay(
        self, feed: Feed, cache: ReplayCache, depths: Mapping[str, int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Continue the model's own cache with a chain, reading accepted tokens again if needed."""
        tail = len(cache.slot(feed.slot).tail_ids)
        if feed.parent_J != tuple(range(tail - 1, tail - 1 + len(feed.token_J))):
            raise ModelError(f"{self.name} cannot check a tree; use chains or the own decoder")
        cache.append(feed.slot, feed.token_J, feed.parent_J)
        fresh = len(feed.token_J)
        track = cache.resume(feed.slot, fresh)
        unread = cache.unread(feed.slot, track)
        if len(unread) - fresh > _REPLAY:
            self._read(track, unread[:-fresh], {})
            unread = unread[-fresh:]
        if fresh > 1:
            cache.save(feed.slot, track)
        logits_JV, features = self._read(track, unread, depths)
        cache.advance(feed.slot, track)
        logits_JV = logits_JV[-fresh:]
        picked = logits_JV if feed.want is None else logits_JV[list(feed.want)]
        return picked.float(), {tap: rows[-fresh:] for tap, rows in features.items()}

    def _read(
        self, track: Track, tokens: Sequence[int], depths: Mapping[str, int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Advance a track; logits [rows, V] and features [rows, H], at least of ``tokens``."""
        if self.way == "whole":
            portions = [(*track.ids, *tokens)]
        elif self.way == "single" and track.ids:
            portions = [(token,) for token in tokens]
        else:
            portions = [tuple(tokens)]
        logits, features = [], []
        for portion in portions:
            given = {} if track.state is None else {str(self._state_name): track.state}
            result = self._forward(
                torch.tensor([portion]),
                use_cache=self.way != "whole",
                output_hidden_states=bool(depths),
                **given,
            )
            logits.append(result.logits[0])
            features.append({tap: result.hidden_states[d][0] for tap, d in depths.items()})
            if self.way != "whole":
                track.state = result[self._state_name]
        track.ids = (*track.ids, *tokens)
        return torch.cat(logits), {t: torch.cat([one[t] for one in features]) for t in depths}

    def _forward(self, id_BJ: Tensor, **given: Any) -> Any:
        """Call the model with those of the arguments that it takes."""
        known = {key: value for key, value in given.items() if key in self._takes}
        with torch.no_grad():
            return self.model(input_ids=id_BJ.to(self.device), return_dict=True, **known)

    @contextmanager
    def _borrowed(self) -> Iterator[None]:
        """Put the model into the state that scoring needs, and back as it was."""
        training = [module for module in self.model.modules() if module.training]
        attention = getattr(self.model.config, "_attn_implementation", None)
        for module in training:
            module.training = False
        switch = self.way == "gather" and attention not in ("sdpa", "eager", None)
        if switch:
            self.model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            for module in training:
                module.training = True
            if switch:
                self.model.set_attn_implementation(attention)

    def _depth_of(self, tap: str) -> int:
        """Turn the name of a tap into an index of ``hidden_states``."""
        kind, _, layer = tap.partition(".")
        try:
            depth = int(layer) if kind == "hidden" else self.num_layers
        except ValueError:
            depth = self.num_layers
        if not -1 <= depth < self.num_layers:
            raise ModelError(
                f"{self.name} has no tap {tap!r}; it has hidden.0 to "
                f"hidden.{self.num_layers - 1}, and hidden.-1 after the final norm"
            )
        return depth

    def _possible(self) -> Sequence[str]:
        """Ways that the model's configuration does not rule out."""
        branching = {"past_key_values", "position_ids", "attention_mask"} <= self._takes
        if not branching or self._kinds is None or getattr(self.model, "_is_stateful", False):
            return WAYS[1:] if self._state_name else WAYS[3:]
        return WAYS

    def _reproduces(self, way: str) -> bool:
        """Whether one way gives the logits of the plain forward, a rejected guess included."""
        if way == "whole":
            return True
        self.way = way
        ids = [(7 * i + 3) % self.vocab_size for i in range(7)]
        other = (ids[5] + 1) % self.vocab_size
        with self._borrowed():
            wanted_V = torch.stack(
                [
                    self._forward(torch.tensor([path])).logits[0, -1].float()
                    for path in ([*ids[:5], other], ids)
                ]
            )
        try:
            tried_V = self._try(ids, other)
        except Exception:  # whatever an architecture cannot do, another way can
            return False
        error = float((tried_V - wanted_V).abs().mean() / wanted_V.std())
        return error <= _ROUNDING[self.dtype.itemsize]

    def _try(self, ids: Sequence[int], other: int) -> Tensor:
        """Score ``other`` after five ids, and all ids, in passes that also hold other rows."""
        cache = self.new_cache()
        slot, second = cache.open(), cache.open()
        # Two slots of different length, so that padding is tried as well.
        self.score([Feed.chain(second, ids[:2]), Feed.chain(slot, ids[:4])], cache)
        cache.keep(slot, range(4))
        cache.keep(second, range(2))
        if self.way != "gather":
            wrong_JV = self.score([Feed.chain(slot, [ids[4], other])], cache).logits_TV
            cache.keep(slot, [0])
            right_JV = self.score([Feed.chain(slot, ids[5:])], cache).logits_TV
            return torch.stack([wrong_JV[1], right_JV[1]])
        draft = Draft.chosen([other, ids[5], ids[6]], [-1, -1, 1])
        chain = Feed.chain(second, [*ids[2:5], other])
        logits_TV = self.score([chain, Feed.tree(slot, ids[4], draft)], cache).logits_TV
        return logits_TV[[3, 7]]


def _digest(model: Any) -> str:
    """Hash the configuration, and the shape and a few values of every weight."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _VOLATILE}
    lines = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        some = [] if flat.is_meta else flat[:: max(1, len(flat) // 4)].float().tolist()
        lines.update(f"{name} {tuple(weight.shape)} {some}\n".encode())
    return lines.hexdigest()[:16]


def _defaults(model: Any) -> GenerationDefaults:
    """Read what the model says about sampling; only settings that somebody chose count."""
    said = model.generation_config
    config = model.config
    return GenerationDefaults.from_hf(
        said.to_diff_dict() if said is not None else {},
        config.to_dict(),
        config.get_text_config(decoder=True).to_dict(),
    )


def _wrapped(tokenizer: Any, defaults: GenerationDefaults) -> Tokenizer | None:
    """Make a tokenizer ours; every id that ends a text of the model ends one of the tokenizer."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    ours = Tokenizer.from_transformers(tokenizer)
    ours.eos_ids |= frozenset(defaults.eos_ids)
    return ours


def _context(config: Any) -> int:
    """Tokens that the model can hold with one set of rotary frequencies.

    Under ``longrope`` the frequencies jump when a text passes its original length, for keys
    that are already stored as well; what follows would depend on how a text was cut into
    passes, so the context ends there.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or _NO_LIMIT)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) == "longrope":
        return int(
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or longest
        )
    return longest


def _layer_kinds(config: Any) -> dict[str, int | None] | None:
    """Layer types with their reach in tokens; None if some layer keeps no plain keys."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [WINDOWED if window else CHUNKED if chunk else FULL]
    reach = {FULL: None, WINDOWED: window, CHUNKED: chunk}
    return {kind: reach[kind] for kind in types} if set(types) <= set(reach) else None


def _similar(feeds: Sequence[Feed]) -> list[list[int]]:
    """Group feeds that share a forward: padding costs few rows, or less than the rows do."""
    groups: list[list[int]] = []
    for i in sorted(range(len(feeds)), key=lambda i: -len(feeds[i].token_J)):
        rows = len(feeds[i].token_J)
        longest = len(feeds[groups[-1][0]].token_J) if groups else 0
        if groups and longest <= max(2 * rows, rows + _PADDING):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _starts(counts: Sequence[int]) -> tuple[int, ...]:
    """First row of each part, then the total."""
    return tuple(sum(counts[:i]) for i in range(len(counts) + 1))
