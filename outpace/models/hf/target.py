"""Any causal language model of transformers as a target: the general path, and our oracle.

Where every layer keeps plain keys and values, rows branch. The keys are held here, and the
model is handed positions and an additive 4-D mask (one per layer type). Where a layer keeps
something else (a recurrent state, a compressed cache), rows form chains and the model keeps its own
cache. Architectures differ in what they honour, and one that ignored a mask would give wrong
text without a word. So each model is tried once, on a few tokens, against its plain forward. It
gets the best way that reproduces this.

Shape letters: B feeds of a pass, J rows of the longest feed, T rows of all feeds, V
vocabulary, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outpace.cache.base import KVCache
from outpace.errors import ModelError
from outpace.files import expanded
from outpace.models.base import HEAD, TAPS, TREE, Target
from outpace.models.blocks import capped
from outpace.models.families import DecoderConfig
from outpace.models.fields import brief
from outpace.models.hf.compare import ROUNDING, evaluating, off
from outpace.models.hf.config import (
    context_length,
    digest,
    generation_defaults,
    layer_kinds,
    said_name,
    text_config,
    wrap_tokenizer,
)
from outpace.models.hf.gather import GatherCache
from outpace.models.hf.replay import ReplayCache, Track
from outpace.models.layout import from_transformers
from outpace.models.likeness import Likeness
from outpace.models.memory import MemoryCheckpoint
from outpace.types import Draft, Feed, Scored, VocabMap

WAYS = ("gather", "resume", "single", "whole")
"""How a model can be run, best first: trees over our own storage, chains or single tokens over its own
cache, no cache."""

_SLOW = {
    "single": "this model one token at a time",
    "whole": "the whole text again in every pass over this model",
}
_REPLAY = 16
"""Accepted tokens that a pass reads again beside its new rows, before a pass of their own."""
_MASKLESS = ("flash", "flex", "paged")
"""Parts of the names of attention kernels that take no 4-D mask; sdpa stands in for them."""
_PADDING = 16
"""Rows of padding that cost less than a forward of its own (measured: 16 to 24)."""


class HFTarget(Target):
    """A model of transformers, used as it is: weights, configuration and modes stay the user's."""

    def __init__(
        self, model: Any, tokenizer: Any = None, *, name: str | None = None, note: str | None = None
    ) -> None:
        """Wrap a model that is in memory.

        Args:
            model: an ``AutoModelForCausalLM``, of any dtype, on any device.
            tokenizer: a fast tokenizer of transformers, one of ours, or None for token ids only.
            name: what reports call it; by default where it was loaded from.
            note: one line to show the user.

        Raises:
            ModelError: it is no causal language model, or its tokenizer is not supported.

        Cost: about seven passes over a few tokens, to find out how the model can be run.
        """
        text = text_config(model)
        self.model = model
        self.name = name or said_name(model)
        self.note = note
        self.device, self.dtype = model.device, model.dtype
        self.hidden_size, self.num_layers = text.hidden_size, text.num_hidden_layers
        self.max_positions, self.why_shorter = context_length(text)
        self.digest = digest(model)
        self.defaults = generation_defaults(model)
        self.tokenizer = wrap_tokenizer(tokenizer, self.defaults)
        self._kinds = layer_kinds(text)
        self._softcap = getattr(text, "final_logit_softcapping", None)
        self._reduced: list[tuple[VocabMap, Tensor, Tensor | None]] = []
        parameters = inspect.signature(model.forward).parameters
        self._takes = frozenset(parameters)
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            self._takes |= {"output_hidden_states"}
        self._state_name = next(
            (n for n in ("past_key_values", "cache_params", "state") if n in self._takes), None
        )
        self.way, self.vocab_size = self._explore()
        taps = {TAPS} if "output_hidden_states" in self._takes else set()
        if self.note is None and self.way in _SLOW:
            self.note = f"transformers reads {_SLOW[self.way]}; drafts save little"
        if taps and self._unembeds():
            taps.add(HEAD)
        self.can = frozenset(taps | {TREE} if self.way == "gather" else taps)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read by a pass over one row."""
        total: int = sum(p.nbytes for p in self.model.parameters())
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if embedding is None or head is None or embedding.weight is head.weight:
            return total
        return total - int(embedding.weight.nbytes)

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

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Vectors of tokens, by the model's own module; see the contract."""
        with torch.no_grad():
            id_T = torch.tensor(ids, dtype=torch.int64, device=self.device)
            vector_TH: Tensor = self.model.get_input_embeddings()(id_T)
            return vector_TH.float()

    def head(self, hidden_TH: Tensor, vocab: VocabMap | None = None) -> Tensor:
        """Logits of hidden states, by the model's own module; see the contract.

        The rows of a draft vocabulary are copied at its first use and kept.
        """
        module, x_TH = self.model.get_output_embeddings(), hidden_TH.to(self.dtype)
        plain = isinstance(module, torch.nn.Linear) and module.weight.dtype is self.dtype
        with torch.no_grad():
            if vocab is None:
                logits = module(x_TH)
            elif plain:
                logits = torch.nn.functional.linear(x_TH, *self._rows_of_head(module, vocab))
            else:
                logits = module(x_TH)[:, vocab.to_target_D.to(self.device)]
            return capped(logits.float(), self._softcap)

    def _rows_of_head(self, module: torch.nn.Linear, vocab: VocabMap) -> tuple[Tensor, Tensor | None]:
        for known, weight_DH, bias_D in self._reduced:
            if known is vocab:
                return weight_DH, bias_D
        index_D = vocab.to_target_D.to(self.device)
        bias_D = None if module.bias is None else module.bias.detach()[index_D]
        self._reduced.append((vocab, module.weight.detach()[index_D], bias_D))
        return self._reduced[-1][1:]

    def _unembeds(self) -> bool:
        """Whether the modules for embedding and head give what a pass takes in and gives out."""
        ids = [3, 1, 2]
        try:
            with self._borrowed():
                result = self._forward(torch.tensor([ids]), output_hidden_states=True)
                first_TH, last_TH = (result.hidden_states[depth][0] for depth in (0, -1))
                wrong = off(self.head(last_TH), result.logits[0].float())
                same = torch.allclose(self.embed(ids), first_TH.float(), rtol=1e-3, atol=1e-5)
        except Exception:  # every architecture has its own kinds
            return False
        return same and wrong <= ROUNDING[self.dtype.itemsize]

    @cached_property
    def likeness(self) -> Likeness | None:
        """As of the own decoder's checkpoint; None where the family has no own decoder."""
        try:
            config = DecoderConfig.from_hf(self.model.config.to_dict())
            tensors = from_transformers(config, self.model.state_dict())
            return MemoryCheckpoint(config, tensors, name=self.name).likeness
        except ModelError:
            return None

    def _gather(
        self, feeds: Sequence[Feed], cache: GatherCache, depths: Mapping[str, int]
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """One forward over all feeds, padded on the right."""
        rows = [cache.append(feed.slot, feed.token_J, feed.parent_J) for feed in feeds]
        counts = [len(feed.token_J) for feed in feeds]
        spot = cache.spot([feed.slot for feed in feeds], rows)
        position_BJ, masks = cache.mask(spot, counts, self._kinds or {}, self.dtype)
        id_BJ = torch.tensor(
            [(*feed.token_J, *[0] * (max(counts) - n)) for feed, n in zip(feeds, counts, strict=True)]
        )
        wanted = [range(n) if feed.want is None else feed.want for feed, n in zip(feeds, counts, strict=True)]
        heads = sorted({row for want in wanted for row in want}) or [0]
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
        tail, fresh = len(cache.slot(feed.slot).tail_ids), len(feed.token_J)
        if feed.parent_J != tuple(range(tail - 1, tail - 1 + fresh)):
            raise ModelError(f"{self.name} cannot check a tree; use chains or the own decoder")
        cache.append(feed.slot, feed.token_J, feed.parent_J)
        wanted = range(fresh) if feed.want is None else feed.want
        first = min(wanted, default=fresh - 1)
        track = cache.resume(feed.slot, fresh)
        unread = cache.unread(feed.slot, track)
        if len(unread) - fresh > _REPLAY and self.way != "whole":
            self._read(track, unread[:-fresh], {}, 1)
            unread = unread[-fresh:]
        if fresh > 1:
            cache.save(feed.slot, track)
        logits_KV, features = self._read(track, unread, depths, fresh - first)
        cache.advance(feed.slot, track)
        picked = logits_KV[[row - first for row in wanted]].float()
        return picked, {tap: rows[-fresh:] for tap, rows in features.items()}

    def _read(
        self, track: Track, tokens: Sequence[int], depths: Mapping[str, int], last: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Advance a track; logits of the last rows, and features of ``tokens`` or more rows."""
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
                logits_to_keep=min(last, len(portion)),
                **given,
            )
            logits.append(result.logits[0])
            features.append({tap: result.hidden_states[d][0] for tap, d in depths.items()})
            if self.way != "whole":
                track.state = result[self._state_name]
        track.ids = (*track.ids, *tokens)
        return torch.cat(logits)[-last:], {tap: torch.cat([part[tap] for part in features]) for tap in depths}

    def _forward(self, id_BJ: Tensor, **given: Any) -> Any:
        """Call the model with those of the arguments that it takes."""
        known = {key: value for key, value in given.items() if key in self._takes}
        with self.clock, torch.no_grad():
            return self.model(input_ids=id_BJ.to(self.device), return_dict=True, **known)

    @contextmanager
    def _borrowed(self) -> Iterator[None]:
        """Put the model into the state that scoring needs, and back as it was."""
        attention = getattr(self.model.config, "_attn_implementation", None) or ""
        switch = self.way == "gather" and any(word in attention for word in _MASKLESS)
        if switch:
            self.model.set_attn_implementation("sdpa")
        try:
            with evaluating(self.model):
                yield
        finally:
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

    def _explore(self) -> tuple[str, int]:
        """Find the best way to run the model, and how wide its logits are."""
        self.way = "whole"
        try:
            with self._borrowed():
                width = self._forward(torch.zeros(1, 1, dtype=torch.int64)).logits.shape[-1]
                ids = [(7 * i + 3) % width for i in range(7)]
                other = (ids[5] + 1) % width
                paths = ([*ids[:5], other], ids[:6], ids)
                plain_V = [self._forward(torch.tensor([path])).logits[0, -1] for path in paths]
        except Exception as error:  # every architecture has its own kinds
            raise ModelError(f"{self.name} fails on its first tokens: {brief(error)}") from error
        wanted_V = torch.stack(plain_V).float()
        branching = {"past_key_values", "position_ids", "attention_mask"} <= self._takes
        stateful = getattr(self.model, "_is_stateful", False) or not self._kinds
        for way in WAYS[0 if branching and not stateful else 1 if self._state_name else 3 :]:
            self.way = way
            try:
                tried_V = self._try(ids, other)
            except Exception:  # whatever an architecture cannot do, another way can
                continue
            if off(tried_V, wanted_V) <= ROUNDING[self.dtype.itemsize]:
                return way, int(width)
        raise ModelError(f"{self.name} cannot be a target: its logits of a token depend on later tokens")

    def _try(self, ids: Sequence[int], other: int) -> Tensor:
        """Score ``other`` after five ids, six ids, and all, in passes that hold other rows too."""
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
            return torch.cat([wrong_JV[1:], right_JV])
        draft = Draft.chosen([other, ids[5], ids[6]], [-1, -1, 1])
        chain = Feed.chain(second, [*ids[2:5], other])
        logits_TV = self.score([chain, Feed.tree(slot, ids[4], draft)], cache).logits_TV
        return logits_TV[[3, 6, 7]]


def load_hf(name: str, dtype: torch.dtype, device: torch.device, reason: str | None = None) -> HFTarget:
    """Load a folder or a hub id with transformers, and its tokenizer where it has a usable one.

    ``reason`` says why it is not the own decoder; the target's note repeats it.

    Raises:
        ModelError: transformers cannot load it, or it cannot be a target.

    Effects: a hub id that is not in the local cache of the hub is downloaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = expanded(name)
    source = str(path) if path.exists() else name
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device)
    except Exception as error:  # every architecture has its own kinds
        why = f"{reason}; " if reason else ""
        raise ModelError(f"cannot load {name}: {why}transformers says: {brief(error)}") from error
    note = f"served by transformers, not the own decoder: {reason}" if reason else None
    target = HFTarget(model, note=note)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        target.tokenizer = wrap_tokenizer(tokenizer, target.defaults)
    except Exception as error:
        lack = f"no tokenizer ({brief(error)}), so prompts must be token ids"
        target.note = f"{target.note}; {lack}" if target.note else lack
    return target


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
