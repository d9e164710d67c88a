"""Block drafters for other programs: ``speculators``, which vLLM reads.

The unembedding and the embedding are written with it, since that library looks for them there.

Shape letters: V vocabulary, R rank.
"""

from __future__ import annotations

from pathlib import Path

from outpace.drafters.speculators import EMBED, layer_numbers, maps, verifier_name, written
from outpace.drafters.trained import head_rows, lender, method_of, read_embedding
from outpace.errors import ModelError
from outpace.methods.dflash.files import read_block_drafter
from outpace.methods.dflash.net import CONFIDENCE, W1
from outpace.models.base import Target
from outpace.models.measured import dtype_name
from outpace.train.llama import DTYPE, class_of, hf_config, write

FORMATS = ("speculators",)
_CLASSES = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}


def export(source: Path, form: str, out: Path, target: Target, verifier: str | None = None) -> list[Path]:
    """Write a block drafter in another program's format.

    Args:
        source: drafter folder of our own.
        out: folder to write to; files of the same names are replaced.
        verifier: how the other program calls the target, a hub id as a rule; None: its name here.

    Returns:
        The files written.

    Raises:
        ModelError: a network that the format cannot say.
    """
    method = method_of(source) or "dflash"
    file = read_block_drafter(source, target, method)
    shape = file.shape
    if shape.mask is None or method not in _CLASSES:
        seeds = "rows of masks alone; train it with --set rows=masks"
        takes = seeds if method in _CLASSES else f"{' and '.join(_CLASSES)} alone, not {method}"
        raise ModelError(f"{source}: the format {form} takes {takes}")
    more: dict[str, object] = {}
    tensors = {name: one.to(DTYPE) for name, one in file.tensors.items()}
    if method != "dspark":  # its class alone has a confidence head
        tensors = {name: one for name, one in tensors.items() if not name.startswith(CONFIDENCE)}
    else:
        tensors[W1] = file.after(target.vocab_size).to(DTYPE)
        more = {
            "markov_rank": shape.rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": shape.confident,
            "confidence_head_with_markov": shape.confident,
        }
    lent = lender(target, "the export")
    tensors["lm_head.weight"] = head_rows(lent, file.vocab, DTYPE).cpu()
    tensors[EMBED] = read_embedding(target).to("cpu", DTYPE)
    config = written(
        method,
        _CLASSES[method],
        shape.guesses,
        {"name_or_path": verifier_name(target, verifier, form), "architectures": [class_of(target)]},
        target,
        transformer_layer_config=hf_config(shape.decoder),
        draft_vocab_size=shape.draft_vocab,
        block_size=shape.slots,
        target_hidden_size=None,
        aux_hidden_state_layer_ids=layer_numbers(shape.taps),
        mask_token_id=shape.mask,
        sample_from_anchor=shape.from_anchor,
        sliding_window_non_causal=True,
        tie_word_embeddings=False,
        torch_dtype=dtype_name(DTYPE),
        **more,
    )
    vocabulary = maps(None if file.vocab is None else file.vocab.to_target_D, target)
    return write(out, config, {**tensors, **vocabulary})
