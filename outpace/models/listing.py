"""The operations of a decoder's pass, in their order: what ``outpace.models.program`` runs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from outpace.models.attention import HeadShape
from outpace.models.blocks import Block, Ends
from outpace.models.buffers import (
    ADDED,
    ATTENDED,
    FOUND,
    GATED,
    GIVEN,
    HEADS,
    LAST,
    LOGITS,
    NORMED,
    OPERANDS,
    PICKED,
    ROUTES,
    SCORES,
    STREAM,
    TAP,
    WIDE,
)
from outpace.models.families import DecoderConfig
from outpace.models.mlp import Dense, Experts
from outpace.models.operations import (
    ADD,
    ATTEND,
    BEST,
    COPY,
    DOWN,
    EMBED,
    GATE,
    MIX,
    NONE,
    NORM,
    PICK,
    PRODUCT,
    ROUTE,
    TURN,
    UP,
    Op,
)
from outpace.models.packed import Linear
from outpace.models.rowwise import KINDS, Norm

_ALL, _SOME, _HEADED = range(3)
"""Counts of rows: of the pass, of those whose results are wanted, of those with logits."""


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """Operations."""

    ops: ctypes.Array[Op]
    taps: tuple[str, ...]
    """Features that they copy, the first one to buffer ``TAP``."""


class Lister:
    """Lists operations of one pass after the other."""

    def __init__(
        self, config: DecoderConfig, shape: HeadShape, windows: Sequence[int | None], taps: frozenset[str]
    ) -> None:
        self._config, self._shape, self._windows = config, shape, windows
        self._wanted = taps
        self._taps: list[str] = []
        self._ops: list[Op] = []

    def list(self, blocks: Sequence[Block], layers: range, begins: Ends | None, ends: Ends | None) -> Listed:
        """The layers, the embedding before them and what follows them if these are given."""
        hidden, added = self._config.hidden_size, NONE
        vectors = None if begins is None else begins.embed.vectors
        if begins is not None and vectors is not None and vectors.product is not None:
            part = ctypes.addressof(vectors.product.matrices)
            self._op(EMBED, to=STREAM, width=hidden, part=part, floor=begins.embed.factor(self._config))
        for layer in layers:
            block = blocks[layer]
            if block.attends:
                self._norm(block.attn_norm, STREAM, NORMED, added)
            elif added != NONE:
                self._op(ADD, to=STREAM, more=added, width=hidden)
            self._tap(f"hidden.{layer}", STREAM)
            added = NONE
            if block.attends:
                self._attention(block, layer)
                added = ADDED
            if not block.has_mlp:
                continue
            self._norm(block.mlp_norm, STREAM, NORMED, added)
            self._mlp(block.mlp)
            if block.after_mlp is not None:
                self._norm(block.after_mlp, ADDED, ADDED)
            added = ADDED
        if added != NONE:
            self._op(ADD, to=STREAM, more=added, width=hidden)
        if ends is not None:
            if layers:
                self._tap(f"hidden.{layers.stop}", STREAM)
            if "hidden.-1" in self._wanted:
                self._taps.append("hidden.-1")
                normed = TAP + len(self._taps) - 1
                self._norm(ends.norm, STREAM, normed)
                self._op(PICK, rows=_SOME, from_=normed, to=LAST, width=hidden)
            else:
                self._op(PICK, rows=_SOME, from_=STREAM, to=PICKED, width=hidden)
                self._norm(ends.norm, PICKED, LAST, rows=_SOME)
            self._product(ends.head, LAST, LOGITS, rows=_HEADED)
            self._op(BEST, rows=_HEADED, from_=LOGITS, to=FOUND, width=ends.head.outputs)
        for op in self._ops:
            op.to_stride = hidden * len(self._taps) if op.to >= TAP else 0
            op.from_stride = hidden * len(self._taps) if op.from_ >= TAP else 0
        return Listed((Op * len(self._ops))(*self._ops), tuple(self._taps))

    def _attention(self, block: Block, layer: int) -> None:
        """What a layer attends to, from its normed rows; the result is still to be added."""
        self._tap(f"attn_in.{layer}", NORMED)
        self._product(block.qkv, NORMED, HEADS)
        each = block.qk_norm
        self._op(
            TURN,
            to=HEADS,
            width=self._shape.width,
            index=block.rope,
            weight=None if each is None else each.weight_H.data_ptr(),
            floor=0.0 if each is None else each.least,
        )
        self._op(ATTEND, index=self._windows.index(block.window), layer=layer)
        self._product(block.out, ATTENDED, ADDED)
        if block.after_attn is not None:
            self._norm(block.after_attn, ADDED, ADDED)
        self._tap(f"attn_out.{layer}", ADDED)

    def _mlp(self, mlp: Dense | Experts) -> None:
        """What an MLP makes of its normed rows; the result is still to be added."""
        kind = KINDS[self._config.activation]
        if isinstance(mlp, Dense):
            self._product(mlp.gate_up, NORMED, WIDE)
            self._op(GATE, from_=WIDE, to=GATED, width=mlp.width, index=kind)
            self._product(mlp.down, GATED, ADDED)
            return
        mixture, hidden = mlp.mixture, self._config.hidden_size
        said = {"experts": mixture.experts, "chosen": mixture.chosen, "normed": mixture.normed}
        said["routes"] = ROUTES
        self._product(mlp.router, NORMED, SCORES)
        self._op(ROUTE, from_=SCORES, to=ROUTES, **said)
        said |= {"more": OPERANDS, "index": kind}
        part, parts = mlp.matrices("gate_up")
        self._op(UP, from_=NORMED, to=WIDE, width=2 * mixture.width, part=part, parts=parts, **said)
        part, parts = mlp.matrices("down")
        self._op(DOWN, from_=WIDE, to=GIVEN, width=hidden, part=part, parts=parts, **said)
        self._op(MIX, from_=GIVEN, to=ADDED, width=hidden, **said)

    def _op(self, kind: int, **fields: object) -> None:
        self._ops.append(Op(kind=kind, **fields))

    def _norm(self, norm: Norm, from_: int, to: int, more: int = NONE, rows: int = _ALL) -> None:
        width, weight = self._config.hidden_size, norm.weight_H.data_ptr()
        self._op(NORM, rows=rows, from_=from_, to=to, more=more, width=width, weight=weight, floor=norm.least)

    def _product(self, linear: Linear, from_: int, to: int, rows: int = _ALL) -> None:
        assert linear.product is not None
        parts, width = linear.product.matrices, linear.outputs
        self._op(
            PRODUCT,
            rows=rows,
            from_=from_,
            to=to,
            more=OPERANDS,
            width=width,
            parts=len(parts),
            part=ctypes.addressof(parts),
        )

    def _tap(self, name: str, buffer: int) -> None:
        if name in self._wanted:
            self._op(COPY, from_=buffer, to=TAP + len(self._taps), width=self._config.hidden_size)
            self._taps.append(name)
