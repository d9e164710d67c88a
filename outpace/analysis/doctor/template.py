"""Whether prompts are written the way the model was trained to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from outpace.analysis.doctor.findings import Diagnosis
from outpace.models.text import Tokenizer

FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ChatML": ("<|im_start|>", "<|im_end|>"),
        "Llama 3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "Gemma": ("<start_of_turn>", "<end_of_turn>"),
        "Phi 3": ("<|user|>", "<|assistant|>", "<|end|>"),
        "Mistral": ("[INST]", "[/INST]"),
        "DeepSeek": ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
    }
)
"""Chat formats, by the marks that a tokenizer made for them has as tokens of their own."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What marks a rendered conversation has."""

    whole: tuple[str, ...]
    """Formats of which it has every mark, each one token."""
    broken: tuple[str, ...]
    """Formats whose marks it has as text of several tokens."""
    offered: tuple[str, ...]
    """Formats for which the tokenizer has all marks as tokens."""


def look(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> Seen:
    """Render a conversation and look for marks."""
    text = tokenizer.chat_text(messages)
    single = {
        mark: len(tokenizer.encode(mark, special=False)) == 1 for marks in FORMATS.values() for mark in marks
    }
    used = {name for name, marks in FORMATS.items() if any(mark in text for mark in marks)}
    whole = {name for name in used if all(single[m] for m in FORMATS[name] if m in text)}
    offered = {name for name, marks in FORMATS.items() if all(single[m] for m in marks)}
    return Seen(tuple(sorted(whole)), tuple(sorted(used - whole)), tuple(sorted(offered)))


def check(tokenizer: Tokenizer | None, messages: Sequence[Mapping[str, str]], to: Diagnosis) -> None:
    """Find a chat template that is not the model's."""
    if tokenizer is None or not tokenizer.chat_template:
        return
    seen = look(tokenizer, messages)
    missing = [name for name in seen.offered if name not in seen.whole]
    if seen.broken or (missing and not seen.whole):
        used = ", ".join((*seen.broken, *seen.whole)) or "no known"
        have = ", ".join(seen.offered) or "no known"
        to.find(
            "template",
            "the chat template is not the one that the tokenizer was made for",
            f"it writes marks of {used} format, which are not single tokens here; "
            f"the tokenizer has the marks of {have} format",
            "take the chat template of the model's own tokenizer_config.json",
        )
