"""Files of token ids: one header line, then packed numbers; made for one vocabulary.

A file says what it is, for which vocabulary, and what its bytes add up to. So a wrong or damaged
one is refused in one line. It is written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.errors import ModelError
from outpace.files import parse_json, write_whole
from outpace.models.text import Tokenizer

_SAMPLED = 4096
_HEADER = 4096  # bytes; no header is longer


def vocabulary_digest(tokenizer: Tokenizer | None, size: int) -> str:
    """Digest of a vocabulary: 16 hex digits, the same on every machine.

    Args:
        tokenizer: about `_SAMPLED` of its tokens, evenly spread, and all special ones are
            hashed with its size; padding of a model's embedding does not count.
        size: tokens of the model, all there is to go by without a tokenizer.
    """
    if tokenizer is None:
        return hashlib.sha256(f"ids {size}".encode()).hexdigest()[:16]
    total = tokenizer.vocab_size
    lines = hashlib.sha256(f"tokens {total}\n".encode())
    chosen = {*range(0, total, max(1, total // _SAMPLED)), *tokenizer.special_ids}
    for token in sorted(chosen):
        lines.update(f"{token} {tokenizer.token_bytes(token).hex()}\n".encode())
    return lines.hexdigest()[:16]


def write(path: Path, kind: str, digest: str, facts: Mapping[str, int], data: bytes) -> None:
    """Write a file in one go: readers see the old one or the new one, never a part.

    Args:
        data: the packed numbers; they are compressed.

    Raises:
        OSError: it cannot be written.
    """
    packed = zlib.compress(data, 1)
    header = {"outpace": kind, "vocabulary": digest, **facts, "bytes": len(packed), "crc": zlib.crc32(packed)}
    write_whole(path, json.dumps(header).encode() + b"\n" + packed)


def read(path: Path, kind: str, digest: str, remedy: str) -> tuple[dict[str, Any], bytes]:
    """Read a file back.

    Args:
        digest: of the vocabulary of the model that is to use it.
        remedy: what to do if it does not fit, as the end of a sentence.

    Returns:
        The header and the packed numbers.

    Raises:
        ModelError: missing, damaged, something else, or made for another vocabulary.
    """
    try:
        with path.open("rb") as file:
            line, packed = file.readline(_HEADER), file.read()
    except OSError as error:
        raise ModelError(f"cannot read {kind} {path}: {error.strerror}; {remedy}") from error
    try:
        header = parse_json(line)
        said = header["outpace"], header["vocabulary"], header["bytes"], header["crc"]
    except (ValueError, TypeError, KeyError):
        raise ModelError(f"{path} is not a {kind}; {remedy}") from None
    if said[0] != kind:
        raise ModelError(f"{path} is a {said[0]}, not a {kind}; {remedy}")
    if said[2:] != (len(packed), zlib.crc32(packed)):
        raise ModelError(f"{kind} {path} is damaged ({len(packed)} bytes of {said[2]}); {remedy}")
    if said[1] != digest:
        raise ModelError(f"{kind} {path} was made for another vocabulary ({said[1]}, not {digest}); {remedy}")
    return header, zlib.decompress(packed)
