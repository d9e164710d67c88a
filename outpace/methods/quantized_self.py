"""The target with its weights rounded to 8 or 4 bits guesses.

Its guesses are nearly always right, and cost what reading the rounded weights costs: about half
a pass in int8 where the target runs in bfloat16, less in int4. So it gains where a pass over one
row is bound by memory, at most about 1.5 times; memory grows by the rounded copy.

Source: the idea of QSpec, arXiv:2410.11305, where both precisions share one cache as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.drafters.base import Traits
from outpace.drafters.model_rows import ModelDrafter
from outpace.drafters.trained import lender
from outpace.errors import ModelError
from outpace.models.base import Target
from outpace.models.load import shared


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedSelfConfig:
    kind: str = "int8"
    """``int8`` or ``int4``."""


class QuantizedSelf(ModelDrafter):
    """Drafts with a rounded copy of the target; see `ModelDrafter`."""

    Config = QuantizedSelfConfig
    traits = Traits(default_nodes=4, samples=True)

    @classmethod
    def load(cls, config: QuantizedSelfConfig, target: Target) -> QuantizedSelf:
        """Read the weights anew, and round them.

        Raises:
            ModelError: a target that is rounded itself, or not of the own decoder.
        """
        model = lender(target, "quantized_self")
        if model.quantize is not None:
            raise ModelError(
                f"quantized_self: {target.name} is rounded to {model.quantize} itself, and a "
                "rounded copy is no cheaper; load it without quantize="
            )
        rounded = shared(target, ("quantized", config.kind), lambda: model.quantized(config.kind))
        return cls(rounded, target.vocab_size)
