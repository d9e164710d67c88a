"""Memory for logits that is kept from one pass to the next, and for results that outlive a pass.

Shape letters: T rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

ROOM = 512
"""Most rows of logits whose memory is kept."""


class Piece:
    """Memory for numbers of float32, to be written.

    Its address and its size are at hand: to ask a tensor for its length takes 16 us after a pass.
    """

    __slots__ = ("address", "size", "tensor")

    def __init__(self, size: int) -> None:
        self.size, self.tensor = size, torch.empty(size)
        self.address = self.tensor.data_ptr()


class Room:
    """Memory for the logits of one pass after another, on a CPU.

    Logits of a batch are many megabytes. Taken anew for every pass, of another size each time, they
    come from the system and go back to it, page by page. For 70 to 130 rows over 49152 tokens this takes
    13 to 23 ms on average, of which 9 are left where memory stays. So a result holds until the next.
    """

    def __init__(self) -> None:
        self._kept, self._most = torch.empty(0, 0), 0
        self._shown: dict[int, Tensor] = {}
        """By count, for a slice of a tensor takes 40 us after a pass."""

    def widened(self, x_TV: Tensor) -> Tensor:
        """The same in float32. Memory: the largest number of rows so far, up to `ROOM`."""
        if x_TV.dtype == torch.float32 or x_TV.device.type != "cpu":
            return x_TV.float()
        return self.rows(*x_TV.shape).copy_(x_TV)

    def rows(self, count: int, width: int) -> Tensor:
        """Memory for float32 [count, width], to be written; holds until the next call."""
        if count > ROOM or not torch.is_inference_mode_enabled():  # where autograd runs it may be kept
            return torch.empty(count, width)
        if self._most < count:
            self._kept, self._most, self._shown = torch.empty(count, width), count, {}
        shown = self._shown.get(count)
        if shown is None:
            shown = self._shown[count] = self._kept[:count]
        return shown


class Strip:
    """Rows of float32 that lie in a piece of memory, by their address; a tensor only if asked for one."""

    __slots__ = ("_first", "_piece", "address", "rows", "width")

    def __init__(self, piece: Tensor, first: int, address: int, rows: int, width: int) -> None:
        self._piece, self._first, self.address, self.rows, self.width = piece, first, address, rows, width

    @classmethod
    def of(cls, x_TF: Tensor | Strip) -> Strip:
        """Rows of a tensor, as they are if they are float32 side by side."""
        if isinstance(x_TF, Strip):
            return x_TF
        if x_TF.dtype is not torch.float32 or not x_TF.is_contiguous():
            x_TF = x_TF.float().contiguous()
        rows, width = x_TF.shape
        return cls(x_TF, int(x_TF.storage_offset()), x_TF.data_ptr(), rows, width)

    def part(self, first: int, width: int) -> Tensor:
        """Columns of all rows; a view."""
        return self._piece.as_strided((self.rows, width), (self.width, 1), self._first + first)

    @property
    def tensor(self) -> Tensor:
        """All of it; a view."""
        return self.part(0, self.width)

    def between(self, first: int, stop: int) -> Strip:
        """The rows from one to before another; of the same memory."""
        at, stop = first * self.width, min(stop, self.rows)
        return Strip(self._piece, self._first + at, self.address + 4 * at, stop - first, self.width)

    @staticmethod
    def joined(parts: Sequence[tuple[Strip, Sequence[int]]]) -> Strip:
        """Some rows of strips of one width, in memory of their own.

        Indexing of torch takes three times as long after a pass, and each tensor of a part as long as a row.
        """
        width, count = parts[0][0].width, sum([len(rows) for _, rows in parts])
        each, some = 4 * width, Piece(count * width)
        to = some.address
        for strip, rows in parts:
            for row in rows:
                assert 0 <= row < strip.rows
                ctypes.memmove(to, strip.address + row * each, each)
                to += each
        return Strip(some.tensor, 0, some.address, count, width)


_PIECE = 1 << 18
"""Numbers that are taken from the system at a time."""


class Lasting:
    """Memory for results that outlive a pass: ordinary tensors, also where inference mode is on.

    They are parts of larger pieces, each of which is given back with its last part. To leave the mode for
    every pass takes longer than all else that is done for such a result. Not for several threads at a time.
    """

    def __init__(self) -> None:
        self._piece, self._address, self._size, self._used = torch.empty(0), 0, 0, 0

    def rows(self, count: int, width: int) -> Tensor:
        """Memory for float32 [count, width], to be written."""
        return self.strip(count, width).tensor

    def strip(self, count: int, width: int) -> Strip:
        """The same, as a strip."""
        size = count * width
        if self._used + size > self._size:
            with torch.inference_mode(False):
                self._piece, self._used = torch.empty(max(_PIECE, size)), 0
            self._address, self._size = self._piece.data_ptr(), len(self._piece)
        first, self._used = self._used, self._used + size
        return Strip(self._piece, first, self._address + 4 * first, count, width)
