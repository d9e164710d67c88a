"""How a model's authors sample from it, as its files say it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.models.fields import Fields, token_ids
from outpace.params import Defaults


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults(Defaults):
    """How a model's authors sample from it, and which tokens begin and end its texts."""

    eos_ids: tuple[int, ...] = ()
    """Every token that ends a text, ascending."""
    bos_id: int | None = None
    """The token that begins a text."""
    unsupported: tuple[str, ...] = ()
    """Sampling settings of the file that are not honoured, as ``key=value``."""

    @classmethod
    def from_hf(cls, *files: Mapping[str, Any]) -> "GenerationDefaults":
        """Read generation_config.json and config.json, best source first.

        End-of-sequence ids are collected from all of them; of the rest the first file that
        says something wins. Settings are read from the first file only.

        Raises:
            ModelError: a value has the wrong type.
        """
        settings = Fields("generation_config.json", {}, files[0])
        do_sample = settings.get("do_sample")
        temperature = settings.maybe("temperature", zero=True)
        return cls(
            eos_ids=tuple(sorted({i for file in files for i in token_ids(file, "eos_token_id")})),
            bos_id=_first_id(files, "bos_token_id"),
            do_sample=do_sample,
            temperature=0.0 if do_sample is False else temperature,
            top_p=settings.maybe("top_p"),
            top_k=settings.whole("top_k"),
            min_p=settings.maybe("min_p", zero=True),
            repetition_penalty=settings.maybe("repetition_penalty"),
            unsupported=tuple(
                f"{key}={settings.get(key)}"
                for key, neutral in _NEUTRAL.items()
                if settings.get(key, neutral) != neutral
            ),
        )


# Settings of transformers that change what is generated, with the value that switches them off.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}


def _first_id(files: Sequence[Mapping[str, Any]], key: str) -> int | None:
    return next((i for file in files for i in token_ids(file, key)), None)
