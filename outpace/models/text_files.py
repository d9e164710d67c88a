"""The small files beside a tokenizer.json: special tokens, what surrounds a text, templates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from outpace.errors import ModelError
from outpace.models.fields import read_json

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
"""Keys of tokenizer_config.json that name one special token each."""


def _content(token: Any) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Give the special tokens that have a role."""
    contents = {role: _content(config.get(role)) for role in ROLES}
    return {role: token for role, token in contents.items() if token is not None}


def more_special(config: Mapping[str, Any]) -> list[str]:
    """Give the special tokens that have none."""
    found: list[Any] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key) or []
        found += value.values() if isinstance(value, Mapping) else value
    table = config.get("added_tokens_decoder") or {}
    found += [entry for entry in table.values() if entry.get("special")]
    return [token for token in map(_content, found) if token is not None]


def surround_as_said(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Add bos and eos exactly where tokenizer_config.json says so, if it says anything."""
    if not {"add_bos_token", "add_eos_token"} & set(config):
        return
    surround(
        backend,
        named.get("bos_token") if config.get("add_bos_token") else None,
        named.get("eos_token") if config.get("add_eos_token") else None,
    )


def surround(backend: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Make ``encode`` put a token before and one after every text; None for none."""
    single = [token for token in (before, "$A", after) if token is not None]
    ids = {token: backend.token_to_id(token) for token in single if token != "$A"}
    for token, id in ids.items():
        if id is None:
            raise ModelError(f"the vocabulary lacks the special token {token!r}")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=list(ids.items())
    )


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collect chat templates: those in files win over those in tokenizer_config.json."""
    said = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(said, str):
        templates["default"] = said
    elif isinstance(said, list):
        templates |= {entry["name"]: entry["template"] for entry in said}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return templates
