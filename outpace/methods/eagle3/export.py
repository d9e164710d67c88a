"""EAGLE-3 heads for other programs.

    speculators   config.json of the speculators library and model.safetensors; vLLM reads it
    eagle3        the layout of EAGLE-3's authors: config.json of a Llama, ``midlayer.*``

Heads hold no embedding: their readers share the target's.

Loaded and compared: speculators 0.9.0 computes the same logits from an export. A head that it
saved is read here (``tools/check_speculators.py``). In vLLM 0.32 as many of its guesses are
accepted (``tools/vllm_figures.py``). SGLang: checked by format alone.

Shape letters: D draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from outpace.drafters.speculators import layer_numbers, maps, verifier_name, written
from outpace.errors import ModelError
from outpace.methods.eagle3.files import Head, default_taps, read_head
from outpace.methods.eagle3.net import CONFIDENCE
from outpace.models.base import Target
from outpace.models.measured import dtype_name
from outpace.train.llama import DTYPE, class_of, hf_config, write

FORMATS = ("speculators", "eagle3")


def export(source: Path, form: str, out: Path, target: Target, verifier: str | None = None) -> list[Path]:
    """Write a head in another program's format.

    Args:
        source: drafter folder, of any format that can be read.
        out: folder to write to; files of the same names are replaced.
        verifier: how the other program calls the target, a hub id as a rule; None: its name here.

    Returns:
        The files written.

    Raises:
        ModelError: a drafter of another kind, or a shape that the format cannot say.
    """
    head = read_head(source, target)
    if not head.shape.fused:
        raise ModelError(f"{source} is an EAGLE-1 or EAGLE-2 head; {form} is for EAGLE-3")
    if form == "speculators":
        name = verifier_name(target, verifier, form)
        return write(out, *_speculators(head, target, name))
    return write(out, *_authors(head, target))


def _head_tensors(head: Head, target: Target) -> dict[str, Tensor]:
    """All tensors of a head by the names of speculators, the vocabulary's maps with them."""
    tensors = {name: one.to(DTYPE) for name, one in head.tensors.items() if name not in CONFIDENCE}
    if head.embed_VH is not None:
        tensors["embed_tokens.weight"] = head.embed_VH.to(DTYPE)
    return tensors | maps(head.id_D, target)


def _speculators(head: Head, target: Target, verifier: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    shape = head.shape
    config = written(
        "eagle3",
        "Eagle3Speculator",
        4,
        {"name_or_path": verifier, "architectures": [class_of(target)]},
        target,
        transformer_layer_config=hf_config(shape.decoder),
        draft_vocab_size=shape.draft_vocab,
        target_hidden_size=None,
        # Readers differ in what they take when it is absent.
        norm_before_residual=shape.residual_normed,
        norm_before_fc=shape.joint_norm,
        fc_norm=shape.each_norm,
        norm_output=shape.output_normed,
        embed_requires_grad=False,
        eagle_aux_hidden_state_layer_ids=layer_numbers(shape.taps),
        tie_word_embeddings=False,
        torch_dtype=dtype_name(DTYPE),
    )
    return config, _head_tensors(head, target)


def _authors(head: Head, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    shape = head.shape
    if shape.residual_normed or shape.output_normed or shape.joint_norm or shape.each_norm:
        raise ModelError("the layout of EAGLE-3's authors has no extra norms; write speculators")
    if shape.taps != default_taps(target):
        # Engines that read this layout count explicit layers differently, by one.
        raise ModelError(
            f"the layout of EAGLE-3's authors has features {', '.join(default_taps(target))}, "
            f"this head reads {', '.join(shape.taps)}; write speculators"
        )
    config = hf_config(shape.decoder) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": shape.draft_vocab,
    }
    if config["model_type"] != "llama":
        raise ModelError(
            f"the layout of EAGLE-3's authors is a Llama's, this head is a "
            f"{config['model_type']}; write speculators"
        )
    tensors = {
        name.replace("layers.0.", "midlayer."): one for name, one in _head_tensors(head, target).items()
    }
    return config, tensors
