"""A trained draft model as a plain folder of transformers, with the whole vocabulary.

Shape letters: V vocabulary, D draft vocabulary, W width.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from outpace.drafters.trained import (
    CONFIG,
    decoder_from_json,
    head_name,
    lender,
    read_config,
    read_embedding,
    read_tensors,
    vocab_map,
)
from outpace.models.base import Target
from outpace.train.llama import DTYPE, hf_config, write

FORMATS = ("hf",)
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def export(source: Path, form: str, out: Path, target: Target, verifier: str | None = None) -> list[Path]:
    """Write a draft model as a Llama; everything that loads one reads it.

    Args:
        form: ``hf``, the only format.
        out: folder to write to; files of the same names are replaced.
        verifier: not used; a Llama does not name the model that it drafts for.

    Returns:
        The files written.

    Raises:
        ModelError: a drafter of another kind, or a shape that the format cannot say.
    """
    return write(out, *_plain_llama(source, target))


def _plain_llama(source: Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A draft model with all it borrows, and a head over the whole vocabulary."""
    said = read_config(source, target, "draft_model")
    lent, tensors = lender(target, "the export"), read_tensors(source)
    vocab = vocab_map(tensors, target.vocab_size)
    decoder = decoder_from_json(said.get("decoder", {}), source / CONFIG)
    borrows = [name for name in (_EMBED, _HEAD) if name not in tensors]
    tied = borrows == [_EMBED, _HEAD] and lent.config.tied_head
    if _EMBED in borrows:
        tensors[_EMBED] = read_embedding(lent).cpu()
    if _HEAD in borrows and not tied:
        tensors[_HEAD] = lent.checkpoint.tensor(head_name(lent))
    elif vocab is not None and not tied:
        tensors[_HEAD] = whole_head(tensors[_HEAD], vocab.to_target_D, target.vocab_size)
    config = hf_config(dataclasses.replace(decoder, tied_head=tied))
    defaults = lent.defaults
    if defaults is not None:
        ends = list(defaults.eos_ids)
        config |= {"bos_token_id": defaults.bos_id, "eos_token_id": ends or None}
    kept = {name for name in tensors if name not in ("d2t", "t2d")}
    return config, {name: tensors[name].to(DTYPE) for name in kept}


def whole_head(head_DW: Tensor, to_target_D: Tensor, vocab_size: int) -> Tensor:
    """A head over all tokens [V, W] that ranks the draft tokens as before.

    The rows of the others are the mean of the rows there are. Their logit is then the mean of
    all logits whatever the state, so that none of them is ever the likeliest token.
    """
    whole_VW = head_DW.float().mean(0, keepdim=True).repeat(vocab_size, 1)
    whole_VW[to_target_D] = head_DW.float()
    return whole_VW
