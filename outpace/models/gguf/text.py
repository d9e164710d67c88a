"""Tokenizers out of GGUF metadata: byte-level BPE, and SentencePiece BPE by scores.

Patterns are those that the models' own tokenizer.json files hold; their short names are
llama.cpp's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from outpace.errors import ModelError, shown
from outpace.models.fields import Fields, brief
from outpace.models.text import SPACE_MARK, Tokenizer
from outpace.models.text_files import surround

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "tekken": (_TEKKEN,),
    "smaug-bpe": (_LLAMA3,),
    "gpt-4o": (_GPT4O,),
}
_SAME_AS = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_SAME_AS |= {"refact": "smollm", "dbrx": "smaug-bpe"}
_WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6

_END_TEXTS = frozenset(
    {
        *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<end_of_turn>"),
        *("<|eot_id|>", "<|eom_id|>", "<EOT>", "<eos>"),
    }
)


def end_ids(metadata: Mapping[str, Any]) -> set[int]:
    """Give every token that ends a text.

    Those are the ones the file names, and control tokens that end a text or a turn in every
    model that has them. Files name one token where the model was trained with two.
    """
    vocabulary, types = _vocabulary(metadata)
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    found = {id for id in named if type(id) is int and 0 <= id < len(vocabulary)}
    for id, (token, kind) in enumerate(zip(vocabulary, types, strict=True)):
        if kind in (_CONTROL, _USER_DEFINED) and token in _END_TEXTS:
            found.add(id)
    return found


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        ModelError: a kind of tokenizer or pre-tokenizer that is not supported (named), or
            metadata that is missing or contradicts itself.
    """
    vocabulary, types = _vocabulary(metadata)
    read = Fields("GGUF metadata", {}, metadata)
    kind = read.text("tokenizer.ggml.model")
    byte_level = kind == "gpt2"
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"GGUF tokenizer {shown(kind)} is not supported; supported: gpt2 (byte-level BPE) and "
            "llama (SentencePiece BPE)"
        )
    named = {
        role: vocabulary[id]
        for role, key in _NAMED.items()
        if type(id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is int and 0 <= id < len(vocabulary)
    }
    prefixed = not byte_level and bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    try:
        if byte_level:
            backend, begins = _byte_level(metadata, vocabulary)
        else:
            backend, begins = _sentencepiece(metadata, vocabulary, types, named, prefixed), True
        _mark(backend, vocabulary, types, prefixed)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the tokenizer in the GGUF metadata is corrupt: {brief(error)}") from error
    before = named.get("bos_token") if metadata.get(_ADD_BOS, begins) else None
    after = named.get("eos_token") if metadata.get(_ADD_EOS, False) else None
    if before or after:
        surround(backend, before, after)
    controls = [t for t, kind in zip(vocabulary, types, strict=True) if kind == _CONTROL]
    return Tokenizer(
        backend, named=named, special=controls, eos_ids=end_ids(metadata), templates=_templates(metadata)
    )


_ADD_BOS, _ADD_EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(vocabulary, list) or not vocabulary or not isinstance(vocabulary[0], str):
        raise ModelError("it holds no tokenizer (tokenizer.ggml.tokens)")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(vocabulary))
    if not isinstance(types, list) or len(types) != len(vocabulary):
        raise ModelError(f"GGUF metadata: {len(vocabulary)} tokens but other token types")
    return vocabulary, types


def _byte_level(metadata: Mapping[str, Any], vocabulary: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Build byte-level BPE; also say whether a text begins with bos if the file does not say."""
    said = metadata.get("tokenizer.ggml.pre", "default")
    pre = _SAME_AS.get(said, said)
    if pre not in _PATTERNS:
        raise ModelError(
            f"GGUF pre-tokenizer {shown(said)} is not supported; supported: "
            f"{', '.join(sorted({*_PATTERNS, *_SAME_AS}))}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: id for id, token in enumerate(vocabulary)},
            merges=merges,
            ignore_merges=pre in _WHOLE_WORDS_FIRST,
        )
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre == "llama-bpe"


def _sentencepiece(
    metadata: Mapping[str, Any],
    vocabulary: Sequence[str],
    types: Sequence[int],
    named: Mapping[str, str],
    prefixed: bool,
) -> tokenizers.Tokenizer:
    merges = metadata.get("tokenizer.ggml.merges")
    if merges:
        pairs = [(one[: (cut := one.index(" ", 1))], one[cut + 1 :]) for one in merges]
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(vocabulary):
            raise ModelError(f"GGUF metadata: {len(vocabulary)} tokens but other scores")
        pairs = merges_by_score(vocabulary, scores, types)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: id for id, token in enumerate(vocabulary)},
            merges=pairs,
            unk_token=named.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    marks = [normalizers.Replace(" ", SPACE_MARK)]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE_MARK), *marks] if prefixed else marks
    )
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend


def merges_by_score(
    vocabulary: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Give the merges of a SentencePiece BPE vocabulary, best first.

    SentencePiece joins the neighbours whose union has the highest score. Listing every way to
    cut a piece into two pieces, in the order of the pieces' scores, makes an ordinary BPE of it.
    """
    ids = {
        token: id
        for id, token in enumerate(vocabulary)
        if types[id] not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    }
    ranked = []
    for token, id in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[id], id, left, right))
    ranked.sort()
    return [(vocabulary[left], vocabulary[right]) for _, _, left, right in ranked]


def _mark(
    backend: tokenizers.Tokenizer, vocabulary: Sequence[str], types: Sequence[int], prefixed: bool
) -> None:
    """Make tokens of their own of everything that must never be cut up."""
    special, plain = [], []
    for token, kind in zip(vocabulary, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            special.append(tokenizers.AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            # Runs of spaces are written with the mark, which only normalized text contains. Where
            # normalizing puts a mark before everything, they are left to the merges.
            marked = SPACE_MARK in token
            if not (marked and prefixed):
                plain.append(tokenizers.AddedToken(token, normalized=marked))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    start = "tokenizer.chat_template"
    names = {start: "default"} | {
        key: key[len(start) + 1 :] for key in metadata if key.startswith(start + ".")
    }
    return {names[key]: metadata[key] for key in names if isinstance(metadata.get(key), str)}
