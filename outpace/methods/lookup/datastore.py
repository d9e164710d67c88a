"""A corpus on disk that can be asked what followed any words: tokens and their suffix array.

    tokens     t h e . c a t . s a t #  t h e . d o g #        # ends a document
    suffixes   places of all tokens, sorted by the text from there on: the places where any
               n-gram stands are neighbours, found by bisection

One file holds a header of 512 bytes that can be read with `head`, the tokens and the suffixes. A token has 2
or 4 bytes, big end first, so that comparing bytes compares tokens. A suffix has 4 bytes, little end first.
Files are memory-mapped: processes share them, and what is never asked for is read once, when the checksum is
compared. Only the first `DEPTH` tokens of a suffix are sorted by.

Shape letters: M tokens of the corpus, V vocabulary, C columns.
Source: Manber and Myers 1990, "Suffix arrays" (prefix doubling); He et al. 2023 (REST),
arXiv:2311.08252 (the use).
"""

from __future__ import annotations

import json
import mmap
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from outpace.errors import ModelError, RequestError
from outpace.files import parse_json, reading, replaced
from outpace.methods.lookup.files import vocabulary_digest
from outpace.models.base import Target
from outpace.models.text import Tokenizer

DEPTH = 32
"""Longest n-gram that can be looked up."""
_MAGIC = b"outpace datastore 1\n"
_HEADER = 512
_PIECE = 1 << 16
"""Characters of a text that make a document, to the end of a line."""
_AGAIN = "build it again with `outpace build datastore FILES`"

Progress = Callable[[str, int], None]
"""Told what is under way, and how many tokens of it are done."""


class Datastore:
    """A corpus that was opened; make one with `open`."""

    def __init__(self, header: dict[str, Any], data: mmap.mmap) -> None:
        self.vocab_size: int = header["vocab_size"]
        """Ids of the tokenizer it was built with; also what ends a document."""
        self.digest: str = header["vocabulary"]
        self.size: int = header["tokens"]
        """M, ends of documents included."""
        self._data, self._width = data, _width(self.vocab_size)
        tokens_end = _HEADER + self.size * self._width
        self.token_M: NDArray[Any] = np.frombuffer(data, f">u{self._width}", self.size, _HEADER)
        """The corpus. Read only."""
        suffixes = np.frombuffer(data, "<u4", self.size, _aligned(tokens_end))
        self.suffix_M: NDArray[np.uint32] = suffixes.astype(np.uint32, copy=False)
        """Places in ``token_M``, in the order of the text from there on. Read only."""
        self._places = self.suffix_M.data
        counts = np.bincount(self.token_M, minlength=self.vocab_size + 1)
        self._starts = [0, *counts.cumsum().tolist()]
        """Token -> its first place in ``suffix_M``."""

    @classmethod
    def open(cls, path: Path) -> Datastore:
        """Map a file into memory.

        Raises:
            ModelError: the file is missing, something else, truncated or corrupt.

        Cost: reads the file once.
        """
        try:
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise ModelError(f"{path} is not a datastore; {_AGAIN}")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"no datastore at {path} ({error.strerror}); {_AGAIN}") from None
        try:
            header = parse_json(data[len(_MAGIC) : _HEADER])
            count, size = int(header["tokens"]), int(header["vocab_size"])
            sums = (str(header["checksum"]), str(header["vocabulary"]))
        except (ValueError, KeyError, TypeError):
            raise ModelError(f"the header of datastore {path} is corrupt; {_AGAIN}") from None
        expected = _aligned(_HEADER + count * _width(size)) + 4 * count
        if len(data) != expected:
            raise ModelError(f"datastore {path} has {len(data)} bytes, its header says {expected}; {_AGAIN}")
        if _checksum([memoryview(data)[_HEADER:]], header) != sums[0]:
            raise ModelError(f"datastore {path} is corrupt: its checksum differs; {_AGAIN}")
        return cls(header, data)

    def check_fits(self, target: Target) -> None:
        """Refuse a store of another vocabulary; a target without a tokenizer is taken on trust.

        Raises:
            ModelError: naming both.
        """
        tokenizer = target.tokenizer
        wrong = self.vocab_size > target.vocab_size
        if wrong or (tokenizer and vocabulary_digest(tokenizer, target.vocab_size) != self.digest):
            raise ModelError(
                f"the datastore was built for a vocabulary of {self.vocab_size} tokens "
                f"({self.digest}), which is not that of {target.name} ({target.vocab_size} "
                f"tokens); build it with `outpace build datastore FILES --model {target.name}`"
            )

    def find(self, text: Sequence[int], longest: int, shortest: int) -> tuple[int, range] | None:
        """The longest suffix of a text that the corpus holds.

        Args:
            longest: tokens of a suffix at most, up to `DEPTH`.
            shortest: tokens of a suffix worth finding, at least 1.

        Returns:
            Its length, and where its places are in ``suffix_M``; None if there is none.

        Cost: O(log(longest) * log(M)) comparisons of at most ``longest`` tokens.
        """
        found = None
        low, high = shortest, min(longest, len(text), DEPTH)
        while low <= high:  # if an n-gram is found, so are its suffixes
            middle = (low + high + 1) // 2
            span = self._span(text[-middle:])
            if span:
                found = middle, span
                low = middle + 1
            else:
                high = middle - 1
        return found

    def _span(self, ngram: Sequence[int]) -> range:
        """Where the places of an n-gram are in ``suffix_M``."""
        if not all(0 <= token < self.vocab_size for token in ngram):
            return range(0)
        data, width = self._data, self._width
        length = len(ngram) * width

        def there(place: int) -> bytes:
            start = _HEADER + place * width
            return data[start : start + length]

        low, high = self._starts[ngram[0]], self._starts[ngram[0] + 1]
        wanted = np.array(ngram, f">u{width}").tobytes()
        low = bisect_left(self._places, wanted, low, high, key=there)
        if low == high or there(self._places[low]) != wanted:
            return range(0)
        return range(low, bisect_right(self._places, wanted, low, high, key=there))

    def successors(self, columns: int) -> NDArray[np.int32]:
        """The commonest successors of every token, int32 [V, C]; -1 where there are fewer."""
        end = self.vocab_size
        pair = self.token_M[:-1].astype(np.int64) * (end + 1) + self.token_M[1:]
        pair, count = np.unique(pair, return_counts=True)
        first, then = pair // (end + 1), pair % (end + 1)
        inside = (first < end) & (then < end)
        first, then, count = first[inside], then[inside], count[inside]
        order = np.lexsort((then, -count, first))
        first, then = first[order], then[order]
        column = np.arange(len(first)) - np.searchsorted(first, first)
        table_VC = np.full((end, columns), -1, np.int32)
        best = column < columns
        table_VC[first[best], column[best]] = then[best]
        return table_VC


def build_datastore(
    paths: Sequence[Path], tokenizer: Tokenizer, out: Path | None, *, progress: Progress
) -> tuple[Path, int]:
    """Read files, tokenize them, sort them, and write a datastore.

    Args:
        paths: texts in UTF-8, cut into documents of 64 thousand characters at ends of lines. A
            ``.jsonl`` file has a document per line: its strings that hold white space (ids and
            roles do not).
        tokenizer: of the targets that the store is for.
        out: the file to write, which must be named. It appears whole or not at all.
        progress: gets the file under way and how many more of its bytes were read.

    Returns:
        The file written, and the number of tokens read.

    Raises:
        RequestError: no ``out``, a file that cannot be read, or no text at all.

    Cost: about 4 s per million tokens for tokenizing and 1 s for sorting, one thread; 60 bytes
    of memory per token.
    """
    if out is None:
        raise RequestError("a datastore has no usual place; name the file with --out")
    return out, write_datastore(_read(paths, tokenizer, progress), tokenizer, out)


def write_datastore(documents: Iterable[Sequence[int]], tokenizer: Tokenizer, out: Path) -> int:
    """Write a datastore of token ids; give their number."""
    end, kind = tokenizer.vocab_size, f"u{_width(tokenizer.vocab_size)}"
    parts, count = [], 0
    for document in documents:
        if document:
            parts.append(np.array([*document, end], kind))
            count += len(parts[-1])
    if not parts:
        raise RequestError("the files hold no text; give files with some")
    token_M = np.concatenate(parts)
    if len(token_M) >= 1 << 32:
        raise RequestError(f"{len(token_M)} tokens are too many for one datastore; give fewer")
    suffix_M = suffix_array(token_M.astype(np.uint32), DEPTH)
    filling = bytes(_aligned(_HEADER + token_M.nbytes) - _HEADER - token_M.nbytes)
    payload = [token_M.astype(f">{kind}").tobytes(), filling, suffix_M.astype("<u4").tobytes()]
    header = {"tokens": count, "vocab_size": end, "vocabulary": vocabulary_digest(tokenizer, end)}
    header["checksum"] = _checksum(payload, header)
    try:
        with replaced(out) as part, part.open("wb") as file:
            line = _MAGIC + json.dumps(header).encode()
            file.write(line.ljust(_HEADER - 1) + b"\n")
            for piece in payload:
                file.write(piece)
    except OSError as error:
        raise RequestError(f"cannot write datastore {out}: {error.strerror}") from None
    return count


def suffix_array(token_M: NDArray[np.uint32], depth: int) -> NDArray[np.int64]:
    """Sort all places by the ``depth`` tokens from there on; equal ones by place.

    Sorted by some tokens at first, as many as fit into 64 bits. Then places sorted by h tokens are
    sorted by 2 h: the rank of the place h further on says how the rest compares.
    """
    size = len(token_M)
    bits = int(token_M.max()).bit_length()
    seen = 64 // bits
    key = np.zeros(size, np.uint64)
    for i in range(seen):
        key[: size - i] += token_M[i:].astype(np.uint64) << np.uint64(bits * (seen - 1 - i))
    while True:
        order = np.argsort(key, kind="stable")
        if seen >= depth:
            return order
        new = np.empty(size, np.uint64)
        in_order = key[order]
        new[0], new[1:] = 1, in_order[1:] != in_order[:-1]
        rank = np.empty(size, np.uint64)
        rank[order] = new.cumsum()
        if rank[order[-1]] == size:
            return order
        key = rank << np.uint64(32)
        key[: size - seen] |= rank[seen:]
        seen *= 2


def _read(paths: Sequence[Path], tokenizer: Tokenizer, progress: Progress) -> Iterator[list[int]]:
    for path in paths:
        with reading(path) as file:
            for text in _documents(path, file):
                yield tokenizer.encode(text, special=False)
                progress(str(path), len(text.encode()))


def _documents(path: Path, file: TextIO) -> Iterator[str]:
    if path.suffix != ".jsonl":
        while lines := file.readlines(_PIECE):
            yield "".join(lines)
        return
    for number, line in enumerate(file, 1):
        try:
            value = parse_json(line) if line.strip() else ""
        except ValueError:
            raise RequestError(f"{path} line {number} is not JSON; give one value per line") from None
        yield "\n".join(_strings(value))


def _strings(value: Any) -> Iterator[str]:
    """Strings of a JSON value that hold white space, in order."""
    if isinstance(value, str):
        if len(value.split()) > 1:
            yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _width(vocab_size: int) -> int:
    """Bytes of a token; ``vocab_size`` itself must fit."""
    return 2 if vocab_size < 1 << 16 else 4


def _aligned(offset: int) -> int:
    return -(-offset // 8) * 8


def _checksum(parts: Iterable[bytes | memoryview], header: dict[str, Any]) -> str:
    """Of the header's facts and all bytes behind it."""
    facts = [header["tokens"], header["vocab_size"], header["vocabulary"]]
    value = zlib.crc32(json.dumps(facts).encode())
    for part in parts:
        value = zlib.crc32(part, value)
    return f"{value:08x}"
