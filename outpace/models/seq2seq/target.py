"""An encoder-decoder as a target: the encoder reads the prompt, trees grow in the decoder.

A sequence is one text to everybody else: the source, its end, the token that begins answers, the
answer. So a prompt is read, drafted from and cached as anywhere. What is special stays here:

    tokens   He go to school </s> | <start> He goes to school ...
    storage  keys and values that    keys and values of the
             the answer looks up     answer's own tokens

The encoder sees a source whole, so it runs once, in the pass that reads the first end of a text. Keys
and values of cross-attention then lie in the source's own storage rows: they are copied, restored and
dropped like any others. Rows of a source have no logits; zeros stand for them.

Shape letters: T rows of a pass behind their sources, S source tokens, B feeds with such rows, J rows of
the longest. C keys, K heads, D width of a head, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.cache.base import KVCache
from outpace.cache.dense import DenseCache
from outpace.errors import ModelError, PromptTooLong, RequestError
from outpace.models.base import TREE, Target
from outpace.models.blocks import Form
from outpace.models.defaults import GenerationDefaults
from outpace.models.seq2seq.config import Seq2SeqConfig
from outpace.models.seq2seq.network import Attention, Read, Stack, encode, mix
from outpace.models.text import Tokenizer
from outpace.tree.mask import ancestors
from outpace.types import Feed, Scored


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The rows of one feed that lie behind a source."""

    slot: int
    source: int
    """S."""
    row_J: range
    """Storage rows."""
    place_J: Sequence[int]
    """Positions in the answer."""
    key_place_C: Tensor
    """Positions of the stored rows behind the source, those of this feed last."""
    seen_JC: Tensor | None
    """Which of them each row sees; None: all."""


@dataclass(frozen=True, slots=True, eq=False)
class _Reach:
    """Stored rows that the rows of a pass attend to, sequence by sequence."""

    slots: Sequence[int]
    start_B: Sequence[int]
    count_B: Sequence[int]
    bias_BKJC: Tensor | None

    def of(self, store: Tensor, rows_last: bool) -> Tensor:
        """Rows of one layer's store, [B, K, D, C] or [B, K, C, D], filled up where they are fewer."""
        axis = 2 if rows_last else 1
        if len(self.slots) == 1:
            return store[self.slots[0]].narrow(axis, self.start_B[0], self.count_B[0])[None]
        longest, room = max(self.count_B), store.shape[axis + 1]
        place_C = torch.arange(longest, device=store.device)
        row_BC = (torch.tensor(self.start_B, device=store.device)[:, None] + place_C).clamp_max(room - 1)
        slot_B1 = torch.tensor(self.slots, device=store.device)[:, None]
        if rows_last:
            return store.permute(0, 3, 1, 2)[slot_B1, row_BC].permute(0, 2, 3, 1)
        return store.transpose(1, 2)[slot_B1, row_BC].transpose(1, 2)


class Seq2SeqTarget(Target):
    """T5, BART or Marian; rows of its decoder may branch."""

    encodes = True

    def __init__(
        self,
        config: Seq2SeqConfig,
        read: Read,
        embed: str,
        head: str,
        form: Form,
        *,
        name: str,
        digest: str,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        logit_bias_V: Tensor | None = None,
    ) -> None:
        """Lay out a model.

        Args:
            read: gives tensors by the names of the checkpoint.
            embed: name of the embedding.
            head: name of the matrix that gives logits.
        """
        self.config, self.name, self.digest = config, name, digest
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers = config.decoder.layers
        self.max_positions = 2 * config.source_positions
        self.why_shorter = f"a source and its answer have {config.source_positions} tokens at most, each"
        self.device, self.dtype = form.device, form.dtype
        self.can = frozenset({TREE})
        self.tokenizer, self.defaults = tokenizer, defaults
        self._embed_VH = read(embed).to(form.device, form.dtype)
        self._head = form.linear(read(head))
        self._logit_bias_V = logit_bias_V
        self._encoder = Stack(read, "encoder", config, form)
        self._decoder = Stack(read, "decoder", config, form)
        away_R = -torch.arange(config.source_positions, device=form.device)
        self._bias_RK = self._decoder.bias(away_R)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read by a pass over one row: of the decoder alone."""
        total = self._head.nbytes
        for layer in self._decoder.layers:
            assert layer.cross is not None
            parts = (layer.attention.query, layer.attention.out, layer.cross.query, layer.cross.out)
            total += sum(one.nbytes for one in (*parts, layer.into, layer.out))
        return total

    def framed(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The source with its end, and what begins an answer; of a text that goes on behind its
        source nothing is changed.

        Raises:
            PromptTooLong: the source has more tokens than the encoder takes.
            RequestError: the source ends, and something else than an answer begins.
        """
        config = self.config
        end = ids.index(config.eos_id) if config.eos_id in ids else len(ids)
        if end + 1 > config.source_positions:
            raise PromptTooLong(config.source_positions - 1, end, self.why_shorter)
        source, rest = (*ids[:end], config.eos_id), tuple(ids[end + 1 :])
        if not rest:
            return (*source, *config.start_ids)
        if rest[: len(config.start_ids)] != config.start_ids:
            raise RequestError(
                f"token {config.eos_id} ends a source of {self.name}, and the prompt goes on behind it; "
                f"leave it out, or begin the answer with {list(config.start_ids)}"
            )
        return (*source, *rest)

    def source_of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """What the encoder reads of a sequence."""
        end = ids.index(self.config.eos_id) + 1 if self.config.eos_id in ids else len(ids)
        return tuple(ids[:end])

    def longest(self, prompt: Sequence[int]) -> int:
        return len(self.source_of(prompt)) + self.config.source_positions

    def new_cache(self, capacity: int = 0) -> KVCache:
        """An empty cache; the rows of a source hold what cross-attention reads."""
        config = self.config
        return DenseCache(
            config.decoder.layers,
            config.decoder.heads,
            config.head_dim,
            device=self.device,
            capacity=capacity,
        )

    def score(
        self,
        feeds: Sequence[Feed],
        cache: KVCache,
        *,
        taps: frozenset[str] = frozenset(),
        layers: int | None = None,
    ) -> Scored:
        """Run one pass; see the contract. A feed that ends a source costs a run of the encoder too."""
        if layers is not None or taps:
            raise ModelError(
                f"{self.name} is an encoder-decoder and gives no layers and no taps {sorted(taps)}"
            )
        if not isinstance(cache, DenseCache):
            raise ModelError(f"{type(cache).__name__} is not a cache of {self.name}")
        with self.clock, torch.inference_mode():
            parts = [self._enter(feed, cache) for feed in feeds]
            real = [part for part in parts if part is not None]
            x_TH = self._decode(feeds, parts, real, cache) if real else self._embed_VH.new_empty(0, 0)
            return self._logits(feeds, parts, x_TH)

    def _enter(self, feed: Feed, cache: DenseCache) -> _Part | None:
        """Store the rows of a feed, and run the encoder if a source ends among them."""
        if feed.riders is not None or feed.resume is not None:
            raise ModelError(f"{self.name} is an encoder-decoder and takes no riders and no resume")
        state, eos = cache.slot(feed.slot), self.config.eos_id
        old = len(state.tail_ids)
        rows = cache.append(feed.slot, feed.token_J, feed.parent_J)
        held = len(state.ids)
        if eos in state.ids:
            source = state.ids.index(eos) + 1
        elif eos in state.tail_ids:
            ends = state.tail_ids.index(eos)
            if any(state.tail_parents[i] != i - 1 for i in range(ends + 1)):
                raise ModelError(f"{self.name}: a source is a chain of tokens, and this one branches")
            source = held + ends + 1
            if ends >= old:
                self._read_source([*state.ids, *state.tail_ids[: ends + 1]], feed.slot, cache)
        else:
            return None
        first = max(0, source - rows.start)  # of the feed's rows: those before belong to the source
        if first >= len(rows):
            return None
        skip = max(0, source - held)  # of the tail
        depths = state.tail_depths[skip:]
        place = [held + depth - source for depth in depths]
        key_place_C = torch.tensor([*range(held - source if skip == 0 else 0), *place], device=self.device)
        new, seen_JC = len(rows) - first, None
        if len(depths) > 1:
            parents = [max(-1, parent - skip) for parent in state.tail_parents[skip:]]
            own_JC = ancestors(parents)[-new:]
            seen_JC = F.pad(own_JC, (len(key_place_C) - len(depths), 0), value=True).to(self.device)
        return _Part(feed.slot, source, rows[first:], place[-new:], key_place_C, seen_JC)

    def _read_source(self, ids: Sequence[int], slot: int, cache: DenseCache) -> None:
        """Run the encoder; cross-attention's keys and values go to the rows of the source."""
        if len(ids) > self.config.source_positions:
            raise ModelError(
                f"{self.name} takes sources of {self.config.source_positions} tokens, got {len(ids)}"
            )
        id_S = torch.tensor(ids, device=self.device)
        x_SH = encode(self._encoder, F.embedding(id_S, self._embed_VH)).to(self.dtype)
        heads, width, size = self.config.decoder.heads, self.config.head_dim, len(ids)
        keys, values = cache.by_row
        for i, layer in enumerate(self._decoder.layers):
            assert layer.cross is not None
            k_SKD, v_SKD = layer.cross.keys_and_values(x_SH).view(size, 2, heads, width).unbind(1)
            keys[i, slot, :size], values[i, slot, :size] = k_SKD.float(), v_SKD.float()

    def _decode(
        self, feeds: Sequence[Feed], parts: Sequence[_Part | None], real: Sequence[_Part], cache: DenseCache
    ) -> Tensor:
        """Run the decoder over all rows behind their sources; what the head reads, [T, H]."""
        stack, config = self._decoder, self.config
        heads, width = config.decoder.heads, config.head_dim
        tokens = [
            token
            for feed, part in zip(feeds, parts, strict=True)
            if part is not None
            for token in feed.token_J[len(feed.token_J) - len(part.row_J) :]
        ]
        id_T = torch.tensor(tokens, device=self.device)
        place_T = torch.tensor([place for part in real for place in part.place_J], device=self.device)
        count_B = [len(part.row_J) for part in real]
        total, longest = len(tokens), max(count_B)
        slot_T = torch.tensor([part.slot for part in real for _ in part.row_J], device=self.device)
        row_T = torch.tensor([row for part in real for row in part.row_J], device=self.device)
        feed_T = torch.tensor(
            [b for b, count in enumerate(count_B) for _ in range(count)], device=self.device
        )
        column_T = torch.tensor([j for count in count_B for j in range(count)], device=self.device)
        own, source = self._own(real), self._source(real)
        keys, values = cache.by_row

        def attend(q_TKD: Tensor, reach: _Reach, layer: int) -> Tensor:
            if len(real) == 1:
                q_BKJD = q_TKD.transpose(0, 1)[None]
            else:
                q_BJKD = q_TKD.new_zeros(len(real), longest, heads, width)
                q_BJKD[feed_T, column_T] = q_TKD
                q_BKJD = q_BJKD.transpose(1, 2)
            k = reach.of(cache.key_store[layer], True)
            v = reach.of(cache.value_store[layer], False)
            mixed_BJKD = mix(q_BKJD, k, v, config.attention_scale, reach.bias_BKJC).transpose(1, 2)
            mixed_TKD = mixed_BJKD[0] if len(real) == 1 else mixed_BJKD[feed_T, column_T]
            return mixed_TKD.reshape(total, heads * width).to(self.dtype)

        x_TH = stack.enter(F.embedding(id_T, self._embed_VH), place_T)
        for i, layer in enumerate(stack.layers):
            assert layer.cross is not None

            def look_back(u_TH: Tensor, at: Attention = layer.attention, i: int = i) -> Tensor:
                q_TKD, k_TKD, v_TKD = at.query(u_TH).view(total, 3, heads, width).unbind(1)
                keys[i, slot_T, row_T], values[i, slot_T, row_T] = k_TKD.float(), v_TKD.float()
                return at.out(attend(q_TKD, own, i))

            def look_up(u_TH: Tensor, at: Attention = layer.cross, i: int = i) -> Tensor:
                return at.out(attend(at.query(u_TH).view(total, heads, width), source, i))

            x_TH = stack.sublayer(x_TH, layer.attention.norm, look_back)
            x_TH = stack.sublayer(x_TH, layer.cross.norm, look_up)
            x_TH = stack.sublayer(x_TH, layer.norm, layer.mlp)
        return stack.leave(x_TH)

    def _own(self, parts: Sequence[_Part]) -> _Reach:
        """The answer's own rows: who sees whom, and what the distance adds."""
        count_B = [len(part.key_place_C) for part in parts]
        size = (len(parts), 1, max(len(part.row_J) for part in parts), max(count_B))
        heads = 1 if self._bias_RK is None else self.config.decoder.heads
        plain = self._bias_RK is None and len(parts) == 1 and parts[0].seen_JC is None
        bias_BKJC = None
        if not plain:
            bias_BKJC = torch.zeros(size[0], heads, *size[2:], device=self.device)
            if len(parts) > 1:
                bias_BKJC.fill_(torch.finfo(torch.float32).min)
            for b, part in enumerate(parts):
                bias_KJC = torch.zeros(heads, len(part.row_J), count_B[b], device=self.device)
                if self._bias_RK is not None:
                    place_J1 = torch.tensor(part.place_J, device=self.device)[:, None]
                    away_JC = (place_J1 - part.key_place_C).clamp(0, len(self._bias_RK) - 1)
                    bias_KJC = self._bias_RK[away_JC].permute(2, 0, 1)
                if part.seen_JC is not None:
                    bias_KJC = bias_KJC.masked_fill(~part.seen_JC, -torch.inf)
                bias_BKJC[b, :, : len(part.row_J), : count_B[b]] = bias_KJC
        return _Reach([part.slot for part in parts], [part.source for part in parts], count_B, bias_BKJC)

    def _source(self, parts: Sequence[_Part]) -> _Reach:
        """The rows of the sources; all of them are seen."""
        count_B, bias = [part.source for part in parts], None
        if len(set(count_B)) > 1:
            place_C = torch.arange(max(count_B), device=self.device)
            hidden_BC = place_C >= torch.tensor(count_B, device=self.device)[:, None]
            bias = torch.zeros(hidden_BC.shape, device=self.device).masked_fill(hidden_BC, -torch.inf)
            bias = bias[:, None, None]
        return _Reach([part.slot for part in parts], [0] * len(parts), count_B, bias)

    def _logits(self, feeds: Sequence[Feed], parts: Sequence[_Part | None], x_TH: Tensor) -> Scored:
        """Logits of the wanted rows; zeros for those of a source."""
        picked: list[int] = []
        place: list[int] = []
        start, first = [0], 0
        for feed, part in zip(feeds, parts, strict=True):
            rows = 0 if part is None else len(part.row_J)
            lead = len(feed.token_J) - rows
            for i, row in enumerate(range(len(feed.token_J)) if feed.want is None else feed.want):
                if row >= lead:
                    picked.append(first + row - lead)
                    place.append(start[-1] + i)
            start.append(start[-1] + feed.wanted)
            first += rows
        if len(picked) < start[-1] or not picked:
            out_TV = torch.zeros(start[-1], self.vocab_size, device=self.device)
            if picked:
                out_TV[place] = self._unembed(x_TH[picked])
            return Scored(out_TV, tuple(start))
        return Scored(self._unembed(x_TH if len(picked) == len(x_TH) else x_TH[picked]), tuple(start))

    def _unembed(self, x_TH: Tensor) -> Tensor:
        logits_TV = self._head((x_TH * self.config.logit_scale).to(self.dtype)).float()
        return logits_TV if self._logit_bias_V is None else logits_TV + self._logit_bias_V
