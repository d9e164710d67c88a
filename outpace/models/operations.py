"""Operations of a pass as compiled code reads them: see pass.c.

Shape letters: T rows of a pass.
"""

from __future__ import annotations

import ctypes

NORM, PRODUCT, TURN, ATTEND, GATE, ADD, COPY, PICK, EMBED, BEST, BEND, ROUTE, UP, DOWN, MIX = range(15)
"""Kinds of operations, as in pass.c."""
NONE = -1
"""No buffer."""


class Op(ctypes.Structure):
    """``Op`` of pass.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in "kind rows from_ to more width index layer".split()),
        *((name, ctypes.c_int64) for name in ("parts", "from_stride", "to_stride")),
        *((name, ctypes.c_int64) for name in "experts chosen normed routes".split()),
        ("part", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("floor", ctypes.c_float),
    ]


class Call(ctypes.Structure):
    """``Program`` of pass.c."""

    _fields_ = [
        ("op", ctypes.c_void_p),
        ("ops", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in "buffer rows picked ids positions pass_ turn keys values".split()
        ),
        *((name, ctypes.c_int64) for name in "key_layer value_layer threads heads turned".split()),
    ]
    known: tuple[object, ...] = ()
    """What ``outpace.models.fused.tell`` has told it."""
    held: object = ()
    """Memory of that."""
