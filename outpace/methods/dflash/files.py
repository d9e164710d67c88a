"""Block drafters on disk: the project's own folders, the speculators format, the authors' checkpoints.

    own           config.json with "method"; "taps", "slots", "rows" (masks or seeds) and what else the
                  network is besides the keys of every folder, and once measured "acceptance" and "tree"
    speculators   config.json with "speculators_model_type" dflash or dspark; rows are masks
    authors       config.json of a Qwen3 with "block_size" and "dflash_config"; neither embedding nor head

Tensors have the names of speculators. The unembedding is the target's and in no folder of our own.

Shape letters: V vocabulary, D draft vocabulary, H hidden size, R rank, T rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.drafters.speculators import (
    KIND,
    check_fit,
    check_tensors,
    check_verifier,
    own_embedding,
    read_layers,
    read_taps,
)
from outpace.drafters.trained import (
    CONFIG,
    decoder_from_json,
    head_rows,
    read_config,
    read_temper,
    read_tensors,
    vocab_map,
)
from outpace.drafters.trained_file import read_tree
from outpace.errors import ModelError, shown
from outpace.law import VocabMap
from outpace.methods.dflash.net import W1, BlockShape
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.models.fields import Fields, read_json
from outpace.types import Shape

_MOST_LAYERS = 32
_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockFile:
    """A drafter folder as it was read."""

    shape: BlockShape
    tensors: Mapping[str, Tensor]
    vocab: VocabMap | None
    """The draft vocabulary; None is the target's whole."""
    tree: Shape | None = None
    """The calibrated tree, likeliest nodes first; None: nothing was measured."""
    embed_VH: Tensor | None = None
    """An embedding of its own, where it differs from the target's."""
    head_DH: Tensor | None = None
    """Likewise an unembedding."""
    temper_D: tuple[float, ...] = ()
    """By level, what to divide its logits by at temperature 0."""

    def embed(self, target: Target) -> Callable[[Sequence[int]], Tensor]:
        """What gives vectors of tokens."""
        if self.embed_VH is None:
            return target.embed
        own_VH = self.embed_VH.to(target.device)
        return lambda ids: own_VH[list(ids)].float()

    def head(self, target: Target) -> Callable[[Tensor], Tensor]:
        """What gives logits [T, D] of normed rows [T, H]."""
        if self.head_DH is None:
            return lambda y_TH: target.head(y_TH, self.vocab)
        own_DH = self.head_DH.to(target.device, target.dtype)
        return lambda y_TH: F.linear(y_TH.to(own_DH.dtype), own_DH)

    def after(self, vocab_size: int) -> Tensor:
        """What the Markov head reads after every token of the target, [V, R]: zeros where it knows none."""
        known = self.tensors[W1]
        if self.vocab is None or len(known) == vocab_size:
            return known
        after_VR = known.new_zeros(vocab_size, known.shape[1])
        after_VR[self.vocab.to_target_D] = known
        return after_VR


def read_block_drafter(folder: Path, target: Target, method: str = "dflash") -> BlockFile:
    """Read a folder of any known format.

    Raises:
        ModelError: files that are corrupt or of another target or method, or tensors that the
            config does not describe.
    """
    said, tensors = read_json(folder / CONFIG), read_tensors(folder)
    vocab = vocab_map(tensors, target.vocab_size)
    columns = target.vocab_size if vocab is None else len(vocab.to_target_D)
    if "target_digest" in said or ("method" in said and KIND not in said):
        shape = _own(read_config(folder, target, method), folder, columns)
    elif KIND in said:
        shape = _speculators(said, folder, target, method, columns)
    else:
        shape = _authors(said, folder, target, method, columns)
    if shape.rank and W1 in tensors:
        shape = dataclasses.replace(shape, known=len(tensors[W1]))
        if shape.known not in (columns, target.vocab_size):
            raise ModelError(f"{folder}: {W1!r} knows {shape.known} tokens of {target.vocab_size}")
    check_tensors(shape.tensor_shapes(), tensors, folder)
    if said.get("draft_vocab_size", columns) != columns:
        raise ModelError(
            f"{folder / CONFIG}: draft_vocab_size is {said.get('draft_vocab_size')}, but the "
            f"weights have {columns} draft tokens"
        )
    return BlockFile(
        shape=shape,
        tensors={name: tensors[name] for name in shape.tensor_shapes()},
        vocab=vocab,
        tree=read_tree(said, folder),
        embed_VH=own_embedding(tensors, target, folder),
        head_DH=_own_head(tensors, vocab, target, folder),
        temper_D=read_temper(said, folder / CONFIG),
    )


def write_shape(shape: BlockShape) -> dict[str, Any]:
    """The keys of an own folder's config.json that say what the network is."""
    flags = {"from_anchor": shape.from_anchor, "causal": shape.causal, "confident": shape.confident}
    rows = {"rows": "seeds"} if shape.mask is None else {"rows": "masks", "mask": shape.mask}
    return {"slots": shape.slots, **rows, **flags, "rank": shape.rank}


def _own(said: Mapping[str, Any], folder: Path, columns: int) -> BlockShape:
    taps, slots, rank = said.get("taps"), said.get("slots"), said.get("rank", 0)
    if not taps or type(slots) is not int or slots < 1:
        raise ModelError(f"{folder / CONFIG}: need taps, and slots of at least 1, got {taps} and {slots}")
    mask = _mask(said.get("mask"), folder) if said.get("rows", "seeds") == "masks" else None
    if type(rank) is not int or not 0 <= rank <= 4096:
        raise ModelError(f"{folder / CONFIG}: 'rank' must be a whole number, got {shown(rank)}")
    return BlockShape(
        decoder=decoder_from_json(said.get("decoder", {}), folder / CONFIG),
        taps=tuple(taps),
        slots=slots,
        mask=mask,
        from_anchor=bool(said.get("from_anchor", True)),
        causal=bool(said.get("causal", False)),
        rank=rank,
        known=columns,
        draft_vocab=columns,
        confident=bool(said.get("confident", False)),
    )


def _speculators(
    said: Mapping[str, Any], folder: Path, target: Target, method: str, columns: int
) -> BlockShape:
    name = check_verifier(said, method, folder, target)
    read = Fields(str(folder / CONFIG), {}, said)
    decoder = read_layers(read.mapping("transformer_layer_config"), folder, "qwen3", _MOST_LAYERS)
    check_fit(read.whole("target_hidden_size") or decoder.hidden_size, decoder, folder, target, name)
    kind = said.get("markov_head_type", "vanilla")
    if kind != "vanilla" or said.get("projector_type", "dflash") != "dflash":
        raise ModelError(f"{folder}: Markov heads are vanilla or none here, this one is {shown(kind)}")
    rank = read.whole("markov_rank") or 0
    confident = bool(said.get("enable_confidence_head"))
    if confident and rank and not said.get("confidence_head_with_markov"):
        raise ModelError(f"{folder}: a confidence head reads the Markov head's vectors here")
    # Both of these say that a row guesses the token behind it.
    shifted = said.get("sample_from_anchor", said.get("shift_label", method == "dspark"))
    return BlockShape(
        decoder=decoder,
        taps=read_taps(said.get("aux_hidden_state_layer_ids"), 0, folder, target),
        slots=read.whole("block_size") or 8,
        mask=_mask(said.get("mask_token_id"), folder),
        from_anchor=bool(shifted),
        rank=rank,
        known=target.vocab_size,
        draft_vocab=columns,
        confident=confident,
    )


def _authors(said: Mapping[str, Any], folder: Path, target: Target, method: str, columns: int) -> BlockShape:
    more = said.get("dflash_config")
    more = more if isinstance(more, dict) else {}
    decoder = read_layers(said, folder, "qwen3", _MOST_LAYERS)
    check_fit(decoder.hidden_size, decoder, folder, target, "another model")
    causal = bool(more.get("causal_head"))
    if method not in ("dflash", "jetspec") or causal != (method == "jetspec"):
        raise ModelError(f"{folder} holds a {'jetspec' if causal else 'dflash'} drafter, not {method!r}")
    size = said.get("block_size", more.get("block_size"))
    if type(size) is not int or size < 2:
        raise ModelError(f"{folder / CONFIG}: need a block_size of at least 2, got {shown(size)}")
    return BlockShape(
        decoder=decoder,
        taps=read_taps(more.get("target_layer_ids"), 1, folder, target),
        slots=size,
        mask=_mask(more.get("mask_token_id"), folder),
        from_anchor=False,
        causal=causal,
        draft_vocab=columns,
    )


def _mask(token: Any, folder: Path) -> int:
    if type(token) is not int or token < 0:
        raise ModelError(f"{folder / CONFIG}: need the id of the mask token, got {shown(token)}")
    return token


def _own_head(
    tensors: Mapping[str, Tensor], vocab: VocabMap | None, target: Target, folder: Path
) -> Tensor | None:
    """The unembedding that came with a drafter, unless it is the target's."""
    if _HEAD not in tensors:
        return None
    mine_DH = tensors[_HEAD]
    columns = target.vocab_size if vocab is None else len(vocab.to_target_D)
    if tuple(mine_DH.shape) != (columns, target.hidden_size):
        raise ModelError(
            f"{folder}: {_HEAD!r} has shape {list(mine_DH.shape)}, need {[columns, target.hidden_size]}"
        )
    if isinstance(target, Decoder):
        theirs_DH = head_rows(target, vocab, mine_DH.dtype).cpu()
        if torch.equal(mine_DH, theirs_DH):
            return None
    return mine_DH
