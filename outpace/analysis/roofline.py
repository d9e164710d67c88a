"""What a pass should cost, from the shape of a decoder and two numbers of a device.

An operator takes as long as its arithmetic or its memory traffic, whichever is longer, and a
pass is the sum of its operators:

    seconds = sum of max(FLOPs / peak, bytes / bandwidth) + operators * overhead

Weights are read once per pass whatever the rows, so rows are free until arithmetic takes longer
than reading. Keys and values are read once per sequence: they are not shared by a batch.

Where reading and computing do not overlap, their times add up instead; ``Device.overlaps`` says
where they do. `outpace.analysis.prediction.calibration` fits a device to
passes that were timed. ``measure_device`` measures the two numbers of this machine. With them and
an overhead of 0 this is about the least that a pass can cost. Traffic between caches and
communication are not modelled. Of a mixture of experts a pass reads those that its rows are expected to
choose, if each row chooses evenly and by itself. Rows of one text may choose more alike.

Source: LLM-Viewer, arXiv:2402.16363. Here the head has two operations per multiply-add as well, and its rows
and tying are counted. Key-value heads have their own count, and the MLP its own width.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outpace.models.families import DecoderConfig
from outpace.models.measured import machine
from outpace.models.mixtures import Mixture
from outpace.models.packed import Linear
from outpace.types import CostCurve

_REPEAT = 11


GATE_UP, DOWN = "experts' gate, up", "experts' down"
"""Operators of mixtures, whose matrices are those of one expert."""
PRODUCT, ATTENTION, ROWS = "product", "attention", "rows"
GROUPS = (PRODUCT, ATTENTION, ROWS)
"""Groups of operators: matrices, attention, and what happens row by row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A machine as a few numbers."""

    name: str
    peak: float
    """FLOP per second of a matrix product in the model's dtype."""
    bandwidth: float
    """Bytes of weights read per second."""
    overhead: float = 0.0
    """Seconds per operator."""
    call: float = 0.0
    """Seconds per pass, whatever it does."""
    attend: float | None = None
    """FLOP per second of attention; None: as of products."""
    traffic: float | None = None
    """Bytes per second of keys, values and activations; None: as of weights."""
    widen: float | None = None
    """Quantized weights made ready for products per second, once per tile; None: for nothing."""
    tile: int | None = None
    """Rows of a tile of quantized products; None: all rows of a pass."""
    overlaps: tuple[str, ...] = GROUPS
    """Groups whose operators read while they compute. Others take the sum of both times."""

    def __post_init__(self) -> None:
        speeds = (self.peak, self.bandwidth, *(one for one in self.rarer if one is not None))
        if not (min(speeds) > 0 and min(self.overhead, self.call) >= 0):
            raise ValueError(f"peak and bandwidth must be above 0, got {self}")

    @property
    def rarer(self) -> tuple[float | None, ...]:
        """Speeds that not every device has apart."""
        return self.attend, self.traffic, self.widen

    def better(self, other: Device) -> Device:
        """The higher peaks of the two, each measured at another moment."""
        return replace(self, peak=max(self.peak, other.peak), bandwidth=max(self.bandwidth, other.bandwidth))


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Bytes of a number."""

    weight: float
    """Of matrices, norms and biases; below 1 for weights packed tighter than a byte."""
    activation: float
    """Of what goes in and out of projections."""
    residual: float
    """Of the residual stream and the logits."""
    cache: float
    """Of keys and values."""

    @classmethod
    def of(cls, dtype: torch.dtype, cache: torch.dtype = torch.float32) -> Widths:
        """Those of the own decoder: residual stream and logits are float32.

        Args:
            cache: of keys and values, see ``outpace.models.fused.stored``.
        """
        size = dtype.itemsize
        return cls(weight=size, activation=size, residual=4, cache=cache.itemsize)


@dataclass(frozen=True, slots=True)
class Held:
    """A matrix as it is multiplied: the type of its weights, and their bytes, bias included."""

    kind: str
    nbytes: float
    coded: int = 0
    """How many of its weights are quantized, and widened to be multiplied."""
    times: int = 1
    """How many of its kind there are: experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One kind of operator in a pass. FLOPs and bytes are those of a single one."""

    name: str
    count: int
    """How many of them a pass has."""
    flops: float
    weights: float
    """Bytes of weights read."""
    moved: float
    """Other bytes read and written: activations, keys and values."""
    group: str = ROWS
    coded: int = 0
    """Quantized weights."""
    rows: int = 1
    """That are multiplied with the weights."""

    def widened(self, tile: int | None) -> int:
        """Weights made ready, where so many rows make a tile."""
        return self.coded * (1 if tile is None else -(-self.rows // tile))

    def work(self, device: Device) -> float:
        """Seconds of its arithmetic."""
        speed = device.attend or device.peak if self.group == ATTENTION else device.peak
        widened = self.widened(device.tile) / device.widen if device.widen else 0.0
        return self.flops / speed + widened

    def reading(self, device: Device) -> float:
        """Seconds of its memory traffic."""
        return self.weights / device.bandwidth + self.moved / (device.traffic or device.bandwidth)

    def seconds(self, device: Device) -> float:
        work, reading = self.work(device), self.reading(device)
        together = max(work, reading) if self.group in device.overlaps else work + reading
        return together + device.overhead


def parameters(config: DecoderConfig) -> int:
    """Numbers in the weights, a tied head counted once."""
    return sum(math.prod(shape) for shape in config.tensor_shapes().values())


def read_parameters(config: DecoderConfig) -> int:
    """Numbers that a pass reads: all but an embedding of which the head is no part."""
    return parameters(config) - (0 if config.tied_head else config.vocab_size * config.hidden_size)


def op_table(
    config: DecoderConfig,
    widths: Widths,
    *,
    rows: int = 1,
    context: int = 0,
    batch: int = 1,
    logits: int | None = None,
    held: Mapping[str, Sequence[Held]] | None = None,
) -> list[Op]:
    """Every operator of a pass, in order.

    Args:
        rows: rows of each sequence; a prompt is rows without context.
        logits: rows of each sequence whose logits are wanted; None: all.
        held: operator -> its matrix in every layer, where widths do not tell their bytes.

    Attention is fused: scores touch no memory. Each row is multiplied by every key of its
    sequence, hidden ones included, as attention with a tree's mask does.
    """
    headed = rows if logits is None else min(rows, logits)
    made = _Pass(config, widths, rows, context, batch, headed * batch, held or {})
    return [op for op in (*made.before(), *made.attention(), *made.behind()) if op.count]


@dataclass(frozen=True, slots=True)
class _Pass:
    """The operators of one pass, part by part."""

    config: DecoderConfig
    widths: Widths
    rows: int
    """Of each sequence."""
    context: int
    batch: int
    headed: int
    """Rows of all sequences together whose logits are wanted."""
    held: Mapping[str, Sequence[Held]]

    @property
    def total(self) -> int:
        """Rows of all sequences together."""
        return self.rows * self.batch

    @property
    def query_key(self) -> tuple[int, int]:
        """Numbers of a row's queries, and of its keys."""
        c = self.config
        return c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def linear(self, name: str, count: int, inputs: int, outputs: int, bias: bool, out: float) -> list[Op]:
        """A projection, for every type of weights apart; ``out`` is the bytes that it writes per row."""
        plain = Held("", self.widths.weight * (inputs + bias) * outputs)
        found = Counter(self.held.get(name) or [plain] * count)
        several, each = len(found) > 1, self.headed if name == "head" else self.total
        return [
            Op(
                name=f"{name} ({one.kind})" if several else name,
                count=times,
                flops=2 * each * inputs * outputs,
                weights=one.nbytes,
                moved=each * (self.widths.activation * inputs + out),
                group=PRODUCT,
                coded=one.coded,
                rows=each,
            )
            for one, times in found.items()
        ]

    def rowwise(self, name: str, count: int, work: float, moved: float, weights: float = 0) -> Op:
        """An operator on rows: FLOPs and bytes per row."""
        return Op(name=name, count=count, flops=self.total * work, weights=weights, moved=self.total * moved)

    def before(self) -> list[Op]:
        """What comes before attention."""
        c, layers, (query, key) = self.config, self.config.num_layers, self.query_key
        w, a, r = self.widths.weight, self.widths.activation, self.widths.residual
        sandwich = layers if c.sandwich_norms else 0
        normed, kept = layers if c.qk_norm else 0, query + key if c.wide_qk_norm else 2 * c.head_dim
        stored = a * query + 2 * self.widths.cache * key
        rowwise, width = self.rowwise, c.hidden_size
        return [
            rowwise("embed", 1, 0, width * (w + r)),
            rowwise("norm", 2 * layers * c.pre_norms + 1, 7 * width, width * (r + a), w * width),
            rowwise("norm after", 2 * sandwich, 7 * width, width * (a + r), w * width),
            *self.linear("qkv", layers, width, query + 2 * key, c.qkv_bias, stored),
            rowwise("qk norm", normed, 7 * (query + key), 2 * a * (query + key), w * kept),
            rowwise("rotate", layers, 3 * (query + key), 2 * a * (query + key)),
        ]

    def attention(self) -> list[Op]:
        """Attention, for every window apart."""
        c, rows, (query, key) = self.config, self.rows, self.query_key
        ops = []
        for window in sorted(set(c.windows), key=lambda one: one or 0):
            seen = self.context + rows if window is None else min(self.context, window - 1) + rows
            scores = self.batch * c.num_heads * rows * seen
            stored = 2 * self.batch * seen * key * self.widths.cache
            ops.append(
                Op(
                    name="attention" if window is None else f"attention in {window}",
                    count=sum(one == window for one in c.windows),
                    flops=scores * (4 * c.head_dim + 5),  # scores, values, and 5 for the softmax
                    weights=0,
                    moved=2 * self.total * query * self.widths.activation + stored,
                    group=ATTENTION,
                )
            )
        return ops

    def experts(self, mixture: Mixture) -> list[Op]:
        """What the sparse MLPs of a pass do."""
        c, a, count = self.config, self.widths.activation, sum(mixture.sparse)
        times, touched, ffn = mixture.chosen, mixture.touched(self.total), mixture.width
        routed = self.linear("router", count, c.hidden_size, mixture.experts, False, 4 * mixture.experts)
        products = [
            *self.linear(GATE_UP, count, c.hidden_size, 2 * ffn, False, 2 * a * ffn),
            *self.linear(DOWN, count, ffn, c.hidden_size, False, a * c.hidden_size),
        ]
        products = [
            replace(
                op,
                flops=times * op.flops,
                weights=touched * op.weights,
                moved=times * op.moved,
                coded=round(touched * op.coded),
                rows=math.ceil(self.total * times / touched),
            )
            for op in products
        ]
        gated = self.rowwise("experts' activation", count, 2 * times * ffn, 3 * a * times * ffn)
        mixed = self.rowwise("mix", count, 2 * times * c.hidden_size, (times + 1) * 4 * c.hidden_size)
        return [*routed, *products, gated, mixed]

    def behind(self) -> list[Op]:
        """What comes behind attention."""
        c, layers, a, r = self.config, self.config.num_layers, self.widths.activation, self.widths.residual
        width, ffn, mixture = c.hidden_size, c.ffn_size, c.mixture
        dense = layers - (0 if mixture is None else sum(mixture.sparse))
        return [
            *self.linear("out", layers, self.query_key[0], width, c.out_bias, a * width),
            *self.linear("gate, up", dense, width, 2 * ffn, c.mlp_bias, 2 * a * ffn),
            self.rowwise("activation", dense, 2 * ffn, 3 * a * ffn),
            *self.linear("down", dense, ffn, width, c.mlp_bias, a * width),
            *([] if mixture is None else self.experts(mixture)),
            self.rowwise("add", 2 * layers, width, width * (2 * r + a)),
            *self.linear("head", 1, width, c.vocab_size, False, r * c.vocab_size),
        ]


def seconds(ops: Sequence[Op], device: Device) -> float:
    return device.call + sum(op.count * op.seconds(device) for op in ops)


def estimated_like(ops: Callable[..., Sequence[Op]], device: Device, curve: CostCurve) -> CostCurve:
    """The estimate at the points of another curve.

    Args:
        ops: operators of a pass, by ``rows``, ``context`` and ``batch``; as ``op_table`` gives them.
    """

    def at(rows: int, context: int, batch: int) -> float:
        return seconds(ops(rows=rows, context=context, batch=batch), device)

    return replace(
        curve,
        seconds_CR=tuple(tuple(at(n, c, 1) for n in curve.rows_R) for c in curve.context_C),
        seconds_CB=tuple(tuple(at(1, c, b) for b in curve.batch_B) for c in curve.context_C),
        source="roofline",
    )


def error(guess: CostCurve, truth: CostCurve) -> float:
    """Mean of abs(guess - truth) / truth over the points of ``truth`` (MAPE, as a share)."""
    off = [
        abs(guess.seconds(rows, context) / cost - 1)
        for context, cost_R in zip(truth.context_C, truth.seconds_CR, strict=True)
        for rows, cost in zip(truth.rows_R, cost_R, strict=True)
    ]
    return sum(off) / len(off)


def measure_device(dtype: torch.dtype, device: torch.device) -> Device:
    """The machine's two numbers, with the threads that torch has now."""
    return Device(name=machine(device), peak=flop_rate(dtype, device), bandwidth=read_bandwidth(device))


def read_bandwidth(device: torch.device, repeat: int = _REPEAT) -> float:
    """Bytes per second that are read from memory: a sum over more than the caches hold."""
    size = 1 << 30 if device.type == "cuda" else max(1 << 28, 4 * _cache_bytes())
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    return buffer.nbytes / _seconds_of(lambda: buffer.sum(), device, repeat)


def flop_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP per second of a product of 512 rows with a square matrix, packed where that works."""
    width = 8192 if device.type == "cuda" else 2048
    linear = Linear(torch.full((width, width), 0.5, dtype=dtype, device=device))
    x_TI = torch.full((512, width), 0.5, dtype=dtype, device=device)
    return 2 * x_TI.numel() * width / _seconds_of(lambda: linear(x_TI), device, _REPEAT)


def medians(
    points: Sequence[Callable[[], float]], repeat: int, tell: Callable[[int], None] | None = None
) -> list[float]:
    """Median seconds of measurements in turns.

    Args:
        points: each does its work and gives the seconds that it took.
        repeat: rounds that count, after one that does not. Each visits every point once, forth
            and back in turn, so that drift of the machine hits all alike.
        tell: called with 1 after every round.
    """
    times: list[list[float]] = [[] for _ in points]
    for turn in range(repeat + 1):
        order = range(len(points)) if turn % 2 == 0 else reversed(range(len(points)))
        for i in order:
            spent = points[i]()
            if turn:
                times[i].append(spent)
        if tell is not None:
            tell(1)
    return [statistics.median(each) for each in times]


def _seconds_of(work: Callable[[], Any], device: torch.device, repeat: int) -> float:
    def run() -> float:
        start = now(device)
        work()
        return now(device) - start

    return medians([run], repeat)[0]


def now(device: torch.device) -> float:
    """The time, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _cache_bytes() -> int:
    """Bytes of all last-level caches; 0 where the system does not tell."""
    found: dict[str, int] = {}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        with contextlib.suppress(OSError, ValueError):
            size = (folder / "size").read_text().strip().removesuffix("K")
            found[(folder / "shared_cpu_list").read_text()] = int(size) * 1024
    return sum(found.values())
