"""Bigram tables: which tokens follow a token most often in some text, and how often.

The weakest drafter that always has something to say. One table per vocabulary, made once from any
text by ``outpace build bigram``, or from the target's own answers, a folder of generated tokens. These
are best, but any prose or code teaches how words of several tokens go on.

    token -> WIDTH tokens and the share of its occurrences that each of them follows

Source: the statistical model of CS-Drafting's Max-Gram, arXiv:2312.11462, section 4.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outpace.config import data_folder
from outpace.drafters.trained import CONFIG, PROVENANCE
from outpace.errors import ModelError, RequestError
from outpace.files import check_writable, reading, write_whole
from outpace.methods.lookup.files import read, vocabulary_digest, write
from outpace.models.text import Tokenizer
from outpace.train.tokens import TokenStore

METHOD, TABLE = "max_gram", "pairs.bigram"
"""The method that reads a table of a target's answers, and the table's name in its folder."""
WIDTH = 4
"""Successors kept of every token."""
_KIND = "bigram table"
_REMEDY = "make one with `outpace build bigram FILES --model M`"
_PIECE = 1 << 20  # characters that are encoded at a time
_DOUBT = 1.0  # added to how often a token was seen: what was seen once proves little
_SCALE = 255


class BigramTable:
    """The likeliest successors of every token.

    Args:
        token: int32 [vocabulary, WIDTH], likeliest first; -1 where there are fewer.
        share: uint8 of the same shape, probabilities times 255.
    """

    def __init__(self, token: npt.NDArray[np.int32], share: npt.NDArray[np.uint8]) -> None:
        self.token = token
        self.share = share

    def after(self, token: int) -> list[tuple[int, float]]:
        """Successors and their probabilities, likeliest first; none for an unknown token."""
        if not 0 <= token < len(self.token):
            return []
        shares = self.share[token].tolist()
        pairs = zip(self.token[token].tolist(), shares, strict=True)
        return [(then, share / _SCALE) for then, share in pairs if then >= 0]

    @classmethod
    def count(cls, texts: Iterable[Sequence[int]], size: int) -> BigramTable:
        """Count the pairs of some texts.

        Args:
            texts: token ids; no pair spans two texts.

        Cost: about a second per 5 million tokens; memory for the distinct pairs.
        """
        pair = np.zeros(0, np.int64)
        times = np.zeros(0, np.int64)
        for text in texts:
            ids = np.asarray(text, np.int64)
            new, seen = np.unique(ids[:-1] * size + ids[1:], return_counts=True)
            pair, back = np.unique(np.concatenate([pair, new]), return_inverse=True)
            times = np.bincount(back, np.concatenate([times, seen]), len(pair)).astype(np.int64)
        first = pair // size
        total = np.bincount(first, times, size) + _DOUBT
        order = np.lexsort((pair, -times, first))  # by token, then by count
        pair, times, first = pair[order], times[order], first[order]
        starts = np.searchsorted(first, np.arange(size))
        rank = np.arange(len(pair)) - starts[first]
        top = rank < WIDTH
        token = np.full((size, WIDTH), -1, np.int32)
        share = np.zeros((size, WIDTH), np.uint8)
        token[first[top], rank[top]] = pair[top] % size
        share[first[top], rank[top]] = np.round(_SCALE * times[top] / total[first[top]])
        return cls(token, share)

    def save(self, path: Path, digest: str) -> None:
        """Write the table for the vocabulary of this digest; an existing file is replaced."""
        data = self.token.astype("<i4").tobytes() + self.share.tobytes()
        write(path, _KIND, digest, {"size": len(self.token), "width": WIDTH}, data)

    @classmethod
    def load(cls, path: Path, digest: str) -> BigramTable:
        """Read a table back.

        Raises:
            ModelError: missing, damaged, or made for another vocabulary.
        """
        header, data = read(path, _KIND, digest, _REMEDY)
        size, width = header.get("size", 0), header.get("width", 0)
        if len(data) != 5 * size * width or not data:
            raise ModelError(f"{_KIND} {path} is damaged; {_REMEDY}")
        token = np.frombuffer(data, "<i4", size * width).astype(np.int32).reshape(size, width)
        share = np.frombuffer(data, np.uint8, offset=4 * size * width).reshape(size, width)
        return cls(token, share)


def usual_place(digest: str) -> Path:
    """Where the user's own table for a vocabulary lies, if there is one."""
    return data_folder() / "bigram" / f"{digest}.bigram"


def build_bigram(
    paths: Sequence[Path], tokenizer: Tokenizer, out: Path | None, *, progress: Callable[[str, int], None]
) -> tuple[Path, int]:
    """Make a table from text files.

    Args:
        paths: files of UTF-8 text; or one folder of generated tokens (``outpace train --only-data``),
            of which the answers count that are not held out.
        tokenizer: of the model that is to use it.
        out: the file to write; None is the `usual_place`, where ``max_gram`` finds it. Of generated
            tokens it is a drafter folder, with provenance; None is where those of the target lie.
        progress: told the file under way and how many bytes of it were done.

    Returns:
        The file written, and the number of tokens read.

    Raises:
        RequestError: a file that cannot be read or is not UTF-8 text, or no text at all.
        OSError: the table cannot be written.
    """
    if len(paths) == 1 and paths[0].is_dir():
        return _from_answers(paths[0], tokenizer, out)
    digest = vocabulary_digest(tokenizer, tokenizer.vocab_size)
    path = out or usual_place(digest)
    check_writable(path.parent)
    read_tokens = 0

    def texts() -> Iterable[list[int]]:
        nonlocal read_tokens
        for text in paths:
            for piece in _pieces(text):
                ids = tokenizer.encode(piece, special=False)
                read_tokens += len(ids)
                yield ids
                progress(str(text), len(piece.encode()))

    table = BigramTable.count(texts(), tokenizer.vocab_size)
    if read_tokens < 2:
        raise RequestError(f"no text in {', '.join(map(str, paths))}; give files with some text")
    table.save(path, digest)
    return path, read_tokens


def _from_answers(folder: Path, tokenizer: Tokenizer, out: Path | None) -> tuple[Path, int]:
    """Count the pairs of a target's answers; write a drafter folder."""
    store = TokenStore.open(folder)
    target, about = store.manifest["target"], store.manifest["about"]
    place = out or data_folder() / "drafters" / target["digest"] / METHOD
    check_writable(place)
    read_tokens = 0

    def texts() -> Iterable[Sequence[int]]:
        nonlocal read_tokens
        for i in np.flatnonzero(~store.held_out_S):
            one = store[int(i)]
            if one.prompt:
                answer = one.ids[one.prompt - 1 :]  # the first pair begins with the prompt's last token
                read_tokens += len(answer)
                yield answer.tolist()

    table = BigramTable.count(texts(), tokenizer.vocab_size)
    if not read_tokens:
        raise RequestError(f"{folder} holds no answers to count")
    table.save(place / TABLE, vocabulary_digest(tokenizer, tokenizer.vocab_size))
    plans = [{key: plan[key] for key in plan if key != "command"} for plan in about.get("plans", ())]
    provenance = {
        "command": f"outpace build bigram WORK/tokens --model {target['name']}",
        "target": {"name": target["name"], "digest": target["digest"]},
        "data": {"digest": store.digest, "counted_tokens": read_tokens, "plans": plans},
    }
    config = {"method": METHOD, "target": target["name"], "target_digest": target["digest"]}
    for name, content in ((PROVENANCE, provenance), (CONFIG, config)):
        write_whole(place / name, json.dumps(content, indent=1) + "\n")
    return place / TABLE, read_tokens


def _pieces(path: Path) -> Iterable[str]:
    """A file's text in pieces that end at the end of a line, where there is one."""
    with reading(path, newline="") as file:
        while piece := file.read(_PIECE):
            yield piece + file.readline(_PIECE)
