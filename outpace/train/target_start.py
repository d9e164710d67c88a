"""Where a target of `outpace.train.target` begins: another model, with the tokens that the texts use.

A tokenizer of pairs is cut. Of the most frequent tokens of the texts those stay that fit, with all that
they are put together from. A text is then spelled as before where its tokens stayed, and in smaller
pieces elsewhere. The rows of the embedding go with their tokens.

Shape letters: V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tokenizers
import torch
from torch import Tensor

from outpace.drafters.trained import lender
from outpace.errors import ModelError
from outpace.models.base import Target
from outpace.models.families import DecoderConfig
from outpace.train.networks import plain_shape

END = "<|endoftext|>"
"""The token that ends a text."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """What is taken over."""

    shape: DecoderConfig
    tokenizer: tokenizers.Tokenizer
    row_V: Tensor
    """Which rows of the embedding stay."""
    target: Target

    def tensor(self, name: str) -> Tensor:
        """A weight by its name in a file of Hugging Face, float32."""
        read = lender(self.target, "the training").checkpoint.tensor(name, torch.float32)
        return read[self.row_V] if name == "model.embed_tokens.weight" else read


def start_from(target: Target, texts: Sequence[str], vocab: int) -> Start:
    """Take over a decoder.

    Args:
        target: its weights are read when they are asked for.
        texts: decide which tokens stay.
        vocab: so many at most, if what cannot be put together is no more.

    Raises:
        ModelError: its layers or its tokenizer are of a kind that is not trained here.
    """
    theirs, tokenizer = lender(target, "the training").config, target.tokenizer
    plain = replace(
        plain_shape(theirs, theirs.num_layers, 0),
        tied_head=True,
        **{name: getattr(theirs, name) for name in ("qkv_bias", "out_bias", "mlp_bias", "qk_norm")},
    )
    if plain != theirs or tokenizer is None:
        raise ModelError(
            f"{target.name} is no plain decoder whose head is its embedding; give such a start, or none"
        )
    eos = next(iter(sorted(tokenizer.eos_ids)), None)
    backend, row_V = cut(tokenizer.backend, texts, vocab, eos)
    return Start(replace(theirs, vocab_size=len(row_V)), backend, row_V, target)


def cut(
    backend: tokenizers.Tokenizer, texts: Sequence[str], size: int, eos: int | None
) -> tuple[tokenizers.Tokenizer, Tensor]:
    """A tokenizer with fewer tokens, and the number that each had.

    Args:
        eos: becomes the token that ends a text, if there is none of that name.

    Raises:
        ModelError: it has no pairs, or no token that ends a text.
    """
    said = json.loads(backend.to_str())
    model = said["model"]
    if model["type"] != "BPE":
        raise ModelError(f"tokenizers of kind {model['type']} cannot be cut; begin with a model that has BPE")
    vocab: dict[str, int] = dict(model["vocab"])
    spelled = {number: token for token, number in vocab.items()}
    end = END if END in vocab else spelled.get(-1 if eos is None else eos)
    if end is None:
        raise ModelError("the tokenizer has no token that ends a text; begin with another model")
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    made = {first + second: (first, second) for first, second in reversed(pairs)}
    added = {one["content"] for one in said["added_tokens"]}
    kept = {end, *(token for token in vocab if token not in made and token not in added)}
    counts = Counter(
        number for one in backend.encode_batch(list(texts), add_special_tokens=False) for number in one.ids
    )
    for number, _ in counts.most_common():
        parts = _parts(spelled.get(number, end), made) - kept
        if len(kept) + len(parts) <= size:
            kept |= parts
    order = sorted(kept, key=vocab.__getitem__)
    names = {token: END if token == end else token for token in order}
    model["vocab"] = {names[token]: number for number, token in enumerate(order)}
    model["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= kept]
    said["added_tokens"] = [
        {**one, "content": END, "id": order.index(end), "special": True}
        for one in said["added_tokens"]
        if one["content"] == end
    ]
    said["post_processor"] = None
    fresh = tokenizers.Tokenizer.from_str(json.dumps(said))
    return fresh, torch.tensor([vocab[token] for token in order])


def _parts(token: str, made: dict[str, tuple[str, str]]) -> set[str]:
    """A token, and all that it is put together from."""
    found, left = set(), [token]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += made.get(one, ())
    return found
