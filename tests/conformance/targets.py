"""Which targets, and so which caches, the suites run. A new kind of target adds a row."""

from functools import cache

import torch

from outpace.models.load import load_target
from outpace.models.tiny import TableTarget, tiny
from tests.models.making import hf_config, seq2seq


@cache
def of_transformers(family):
    import transformers

    torch.manual_seed(0)
    config = hf_config(family)
    return load_target(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def by_torch(experts=0):
    """The same without compiled code."""
    made = tiny(layers=3, experts=experts)
    made._programs = None
    return made


@cache
def encoder_decoder(kind):
    """The first token of the suite's text ends the source."""
    return load_target(seq2seq(kind, eos_token_id=5))


TARGETS = {
    "table": cache(lambda: TableTarget.random(0, 12, sharpness=2.0)),
    "decoder": cache(lambda: tiny(layers=3)),
    "decoder, by torch": cache(by_torch),
    "mixtures of experts": cache(lambda: tiny(layers=3, experts=6)),
    "mixtures of experts, by torch": cache(lambda: by_torch(6)),
    "some of its layers": cache(lambda: tiny(layers=3).variant(layers=[0, 2])),
    "transformers": lambda: of_transformers("llama"),
    "transformers, with windows": lambda: of_transformers("gemma3"),
    "encoder-decoder, relative": lambda: encoder_decoder("t5"),
    "encoder-decoder, absolute": lambda: encoder_decoder("bart"),
}
