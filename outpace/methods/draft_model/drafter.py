"""A smaller language model with the target's vocabulary guesses, chain or tree.

Any Target may draft: another model, or some layers of the target itself (which then share its
weights). Its cache follows the committed text by ids, so it may lag and catch up. Guesses that
were accepted keep their keys and values, so a step costs one pass per level and no more.

Without ``model`` it is the one that ``outpace train draft_model`` made for the target, which may
know a part of the vocabulary only.

With an acceptance head (``outpace train acceptance``) it estimates which of its guesses will be
accepted. The policy `specdecpp` ends drafts by that; other policies do not ask.

Pays if the model is several times cheaper than the target and agrees with it. The last level of a
draft is never run through the draft model.

Paper: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. As trees:
SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from outpace.drafters.base import Traits
from outpace.drafters.model_rows import ModelDrafter
from outpace.drafters.trained import find, is_drafter
from outpace.errors import ModelError
from outpace.methods.draft_model.acceptance_head import find_head
from outpace.methods.draft_model.files import load_trained
from outpace.models.base import LAYERS, Target
from outpace.models.load import fast_dtype, load_beside


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModelConfig:
    model: str | None = None
    """Name, folder, GGUF file or hub id of the draft model; it may be the target itself, or a
    folder that ``outpace train draft_model`` wrote. Without it, the one trained for the target."""
    layers: int | None = None
    """Use only the first so many layers."""
    dtype: str | None = None
    """float32 or bfloat16; by default the target's, and weights of a GGUF file as they are stored."""
    acceptance: str | None = None
    """Folder of an acceptance head; without it, the one trained for this model and target, if
    there is one."""
    quantize: str | None = "int8"
    """Round the weights of a model that was trained for the target to int8 or int4, where compiled
    code multiplies them; none keeps them. Other models are taken as they are."""

    def __post_init__(self) -> None:
        if self.layers is not None and self.layers < 1:
            raise ValueError(f"layers must be at least 1, got {self.layers}")


class DraftModel(ModelDrafter):
    """Drafts with a second Target; see `ModelDrafter`."""

    Config = DraftModelConfig
    # The dynamic tree is a chain where every guess is sure.
    traits = Traits(default_nodes=5, default_tree="dynamic", samples=True)

    @classmethod
    def load(cls, config: DraftModelConfig, target: Target) -> DraftModel:
        """Load the draft model, or borrow the target's own layers.

        Raises:
            ModelError: see ``load_model``; or an acceptance head that does not fit.
        """
        model, id_D = load_model(config, target)
        drafter = cls(model, target.vocab_size, id_D, find_head(config.acceptance, model, target))
        # A light one takes longer than its weights say.
        share = max(*drafter.traits.level_D, target.share(model))
        drafter.traits = replace(drafter.traits, level_D=(share,))
        return drafter


def load_model(config: DraftModelConfig, target: Target) -> tuple[Target, Tensor | None]:
    """Load a draft model without what belongs to it.

    Returns:
        The model, and the target ids [D] of its logits' columns; None: they are all ids.

    Raises:
        ModelError: unknown model, too many layers, another vocabulary, or a draft model that was
            trained for another target, or none.
    """
    model: Target
    id_D = None
    if config.model is None or is_drafter(config.model):
        folder = find("draft_model", target, config.model)
        model, id_D = load_trained(folder, target, config.dtype, config.quantize)
    elif config.model == target.name and config.dtype is None:
        model = target
    else:
        # As stored where that is fastest; else as the target.
        same = fast_dtype(target.device) == target.dtype
        model = load_beside(target, config.model, config.dtype or ("auto" if same else target.dtype))
        check_vocabulary(model, target)
    if config.layers is not None:
        if config.layers > model.num_layers:
            raise ModelError(f"draft_model: layers={config.layers}, but {model.name} has {model.num_layers}")
        model.require(frozenset({LAYERS}), "draft_model with layers=")
        model = model.variant(layers=range(config.layers))
    return model, id_D


def check_vocabulary(model: Target, target: Target) -> None:
    """Refuse a draft model that speaks another vocabulary.

    Sizes may differ by padding (Qwen pads differently from size to size) as long as the
    tokenizers agree on every token.

    Raises:
        ModelError: naming the first difference.
    """
    mine, theirs = model.tokenizer, target.tokenizer
    if mine is None or theirs is None or mine is theirs:
        if model.vocab_size != target.vocab_size:
            raise ModelError(
                f"draft model {model.name} has {model.vocab_size} tokens, target {target.name} "
                f"has {target.vocab_size}; use a draft model with the same vocabulary"
            )
        return
    for token in range(max(mine.vocab_size, theirs.vocab_size)):
        ours = mine.token_bytes(token) if token < mine.vocab_size else None
        other = theirs.token_bytes(token) if token < theirs.vocab_size else None
        if ours != other:
            raise ModelError(
                f"draft model {model.name} and target {target.name} differ at token {token} "
                f"({ours!r} and {other!r}); use a draft model with the same vocabulary"
            )
