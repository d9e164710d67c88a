"""Answers by the thousand on a GPU: batches of fixed size, whose slots all get one token per step.

    512 keys     [prompt + answer ..................]                     x 1024 slots
    1024 keys    [prompt + answer ....................................]   x 512 slots

A step launches the same kernels on the same memory, so it is recorded once and replayed. Every ``LOOK``
steps finished answers leave. Prompts are read into free slots, once for all answers to a prompt.

The next token is argmax(logits - T log E) with E ~ Exp(1): a draw from softmax(logits / T), and the
likeliest token at T = 0 (Gumbel-max). One stream of coins serves all slots, so an answer depends on what is
answered beside it.

Shape letters: S slots, M longest answer, C keys of a slot, K key heads, G query heads per key head, D width
of a head, R prompts that are read together, T tokens of the longest, X some slots.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.models.graphs import Record
from outpace.train.crowd import Wanted
from outpace.train.networks import KeyValue
from outpace.train.text_net import TextNet

LOOK = 16
"""Steps between two looks at what is finished: a look waits for the device."""
SHORTEST = 512
"""Keys of a slot in the smallest batch; every further one has twice as many, and half the slots."""
AHEAD = 256
"""Most prompts that are taken between two looks, while the device is at work."""
READ = 1 << 16
"""Tokens of prompts that are read together, padding included."""


@dataclass(frozen=True, slots=True)
class Answer:
    number: int
    tokens: list[int]
    ended: bool
    """By a token that ends a text, which is its last."""


def answer_all(
    net: TextNet,
    wanted: Iterator[Wanted],
    slots: int,
    stops: Collection[int],
    record: Record,
    seed: int,
    loop: tuple[int, int] | None = None,
) -> Iterator[Answer]:
    """Answer prompts, ``slots`` short ones at a time.

    Args:
        wanted: taken while there is room; of the settings of an answer, temperature and
            ``max_new_tokens`` count.
        stops: tokens that end an answer.
        record: makes a step that can be repeated; see `outpace.models.graphs`.
        seed: of all answers together.
        loop: an answer ends when its last so many tokens repeat a period of at most so many.

    Memory: keys and values of ``slots * SHORTEST`` tokens for each size that is needed.

    Effects: seeds torch's own generators, for these alone draw in what is recorded.
    """
    torch.manual_seed(seed)
    batches: dict[int, _FixedBatch] = {}
    queues: dict[int, deque[Wanted]] = {}
    stop_N = torch.tensor(sorted(stops), dtype=torch.int64, device=net.device)
    while True:
        hungry = not queues or not all(queues.values())
        for one in itertools.islice(wanted, AHEAD if hungry else 0):
            size = _size(len(one.ids) + max(p.max_new_tokens for p in one.params))
            count = max(1, slots * SHORTEST // size)
            if size not in batches:
                batches[size], queues[size] = _FixedBatch(net, count, size, stop_N, record), deque()
            for i in range(0, len(one.params), count):
                queues[size].append(Wanted(one.ids, one.params[i : i + count], one.first + i))
        for size, batch in batches.items():
            yield from batch.finished(loop)
            batch.fill(queues[size])
        if not any(batch.busy for batch in batches.values()):
            return
        for batch in batches.values():
            batch.run()


def _size(tokens: int) -> int:
    size = SHORTEST
    while size < tokens:
        size *= 2
    return size


class _FixedBatch:
    """Slots of one size, some of them free.

    Args:
        stop_N: tokens that end an answer.
    """

    def __init__(self, net: TextNet, slots: int, size: int, stop_N: Tensor, record: Record) -> None:
        config, device = net.config, net.device
        self._net, self._stop_N, self._record, self._size = net, stop_N, record, size

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def kept() -> Tensor:
            shape = slots, config.num_kv_heads, size, config.head_dim
            return torch.zeros(shape, dtype=net.dtype, device=device)

        self._kept = [(kept(), kept()) for _ in range(config.num_layers)]
        self._slot_S, self._key_C = torch.arange(slots, device=device), torch.arange(size, device=device)
        self._token_S, self._place_S, self._count_S, self._most_S = (whole(slots) for _ in range(4))
        self._heat_S = torch.zeros(slots, device=device)
        self._done_S = torch.ones(slots, dtype=torch.bool, device=device)
        self._out_SM = whole(slots, size + 1)  # the last column is for what is done
        self._number: dict[int, int] = {}  # slot -> number of its answer
        self._free = list(range(slots))
        self._replay: Callable[[], object] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._number)

    def run(self) -> None:
        """Launch ``LOOK`` steps, without waiting for them; recording may run one more."""
        if self.busy:
            self._replay = self._replay or self._record(self._step)
            for _ in range(LOOK):
                self._replay()

    @torch.no_grad()
    def _step(self) -> None:
        net = self._net
        unseen_SC = self._key_C > self._place_S[:, None]
        bias_SC = torch.zeros(unseen_SC.shape, device=net.device).masked_fill_(unseen_SC, -torch.inf)

        def attend(layer: int, q_SKG1D: Tensor, own: KeyValue) -> Tensor:
            for kept, new in zip(self._kept[layer], own, strict=True):
                kept[self._slot_S, :, self._place_S] = new[:, :, 0].to(kept.dtype)
            k_SKCD, v_SKCD = self._kept[layer]
            score = (q_SKG1D.squeeze(3).to(k_SKCD.dtype) @ k_SKCD.transpose(2, 3)).float()
            share = (score + bias_SC[:, None, None]).softmax(-1).to(v_SKCD.dtype)
            return (share @ v_SKCD).unsqueeze(3)

        turn = net.turn(self._place_S[:, None])
        last_SH = net.run(self._token_S[:, None], turn, attend)["hidden.-1"][:, 0]
        logits_SV = net.logits(last_SH)
        log_SV = torch.empty_like(logits_SV).exponential_().log_()
        token_S = (logits_SV - self._heat_S[:, None] * log_SV).argmax(-1)
        live_S = ~self._done_S
        self._out_SM.scatter_(
            1, self._count_S.masked_fill(self._done_S, self._size)[:, None], token_S[:, None]
        )
        self._count_S += live_S
        self._done_S |= (token_S[:, None] == self._stop_N).any(1) | (self._count_S >= self._most_S)
        self._token_S.copy_(token_S)
        self._place_S += live_S

    def finished(self, loop: tuple[int, int] | None) -> Iterator[Answer]:
        """Give the answers that are done, and free their slots."""
        if not self.busy:
            return
        if loop is not None:
            self._done_S |= self._looping(*loop)
        slots = [slot for slot in self._done_S.nonzero().squeeze(1).tolist() if slot in self._number]
        if not slots:
            return
        slot_X = torch.tensor(slots, device=self._net.device)
        counts, stops = self._count_S[slot_X].tolist(), set(self._stop_N.tolist())
        rows = self._out_SM[slot_X, : max(counts)].tolist()
        for slot, count, row in zip(slots, counts, rows, strict=True):
            self._free.append(slot)
            yield Answer(self._number.pop(slot), row[:count], row[count - 1] in stops)

    def _looping(self, tokens: int, period: int) -> Tensor:
        """Which answers repeat themselves at their ends, bool [S]."""
        back_1T = torch.arange(-tokens, 0, device=self._net.device)[None]
        last_ST = self._out_SM.gather(1, (self._count_S[:, None] + back_1T).clamp_min(0))
        same = [(last_ST[:, p:] == last_ST[:, : tokens - p]).all(1) for p in range(1, period + 1)]
        return torch.stack(same).any(0) & (self._count_S >= tokens)

    def fill(self, queue: deque[Wanted]) -> None:
        """Read prompts into the free slots."""
        coming: list[Wanted] = []
        taken = longest = 0
        while queue and taken + len(queue[0].params) <= len(self._free):
            longest = max(longest, len(queue[0].ids))
            if coming and longest * (len(coming) + 1) > READ:
                self._read(coming)
                coming, taken, longest = [], 0, len(queue[0].ids)
            coming.append(queue.popleft())
            taken += len(coming[-1].params)
        if coming:
            self._read(coming)

    def _read(self, coming: list[Wanted]) -> None:
        device = self._net.device
        # The last token is read by the first step.
        tokens = [torch.tensor(one.ids[:-1] or one.ids) for one in coming]
        longest = max(map(len, tokens))
        token_RT = torch.stack([F.pad(one, (0, longest - len(one))) for one in tokens]).to(device)
        rows = [row for row, one in enumerate(coming) for _ in one.params]
        slots = [self._free.pop() for _ in rows]
        numbers = [one.first + i for one in coming for i in range(len(one.params))]
        self._number |= dict(zip(slots, numbers, strict=True))
        slot_X, row_X = torch.tensor(slots, device=device), torch.tensor(rows, device=device)

        def keep(layer: int, own: KeyValue) -> None:
            for kept, new in zip(self._kept[layer], own, strict=True):
                kept[:, :, :longest].index_copy_(0, slot_X, new.index_select(0, row_X).to(kept.dtype))

        self._net.read(token_RT, keep)
        params = [p for one in coming for p in one.params]

        def put(state_S: Tensor, values: list[int] | list[float]) -> None:
            state_S.index_copy_(0, slot_X, torch.tensor(values, dtype=state_S.dtype).to(device))

        put(self._token_S, [coming[row].ids[-1] for row in rows])
        put(self._place_S, [len(coming[row].ids) - 1 for row in rows])
        put(self._most_S, [p.max_new_tokens for p in params])
        put(self._heat_S, [p.temperature or 0.0 for p in params])
        self._count_S.index_fill_(0, slot_X, 0)
        self._done_S.index_fill_(0, slot_X, False)
