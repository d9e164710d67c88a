"""What is wrong with a request, in the client's words: its names of fields, and values as JSON has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.server.schema import ChatBody, CompletionBody

Names = Mapping[str, str]
"""Name of a field -> what another form of chats calls it."""

_FIELDS = ({*CompletionBody.model_fields} | {*ChatBody.model_fields}) - {"prompt"}
_OURS = (
    (r"banned_tokens or |, banned_tokens(?: \(0 ids\))?", ""),  # which no request can name
    (r"\ballowed_tokens\b", "allowed_token_ids"),
    (r"\bmax_new_tokens\b", "max_tokens"),
    (r"(?:, or|; Python also takes .*, and) Engine\.load\(.*\)$", ""),
    (r"(?<=of type )'?(?:NoneType|None)\b'?|(?<!['\w])None(?!['\w])", "null"),
    (r"(?<=of type )'?(?:int|float)\b'?", "number"),
    (r"(?<=of type )'?bool\b'?", "boolean"),
    (r"(?<=of type )'?dict\b'?", "object"),
)
"""Words of the engine, and what clients call it."""
_BEGINNINGS = (
    (r"(?:the|a)(?: text)? prompt\b", "prompt"),
    (r"drafter\b", "speculation.drafter"),
    (r"no token may be generated\b", "allowed_token_ids"),
    (r"(?:the model's|this model has no) chat template\b|a chat needs\b", "messages"),
)
"""How mistakes begin that do not begin with the field's name, and the field."""
_RENAMED = re.compile(r"^(?:messages|stop)\b|(?<!['\w])[a-z]+(?:_[a-z]+)+(?!['\w])")
"""Where names of fields stand in a message: names that are words may be words elsewhere."""

_UNION = re.compile(r"str|int|float|bool|[A-Z]\w*|.*\[.*\]")
"""What pydantic puts into a place for a member of a union."""
_KINDS = {
    "none_required": "null",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
}
_LONG_NUMBER = re.compile(r"\b10{20,}\b|\b0\.0{9,}\d+\b")  # a bound that pydantic writes out
_JSON = {"True": "true", "False": "false", "None": "null"}
_LONGEST = 60  # characters of a value in a message


def of_engine(text: str) -> tuple[str, str | None]:
    """A mistake as the engine tells it: in the client's words, and the field if it is known."""
    for ours, theirs in _OURS:
        text = re.sub(ours, theirs, text)
    for beginning, field in _BEGINNINGS:
        if re.match(beginning, text):
            return text, field
    if found := re.match(r"message (\d+) (?:has (?:a )?(role|content|part))?", text):
        key = {"role": ".role", "content": ".content", "part": ".content"}.get(found[2], "")
        return text, f"messages.{int(found[1]) - 1}{key}"
    first = re.match(r"\w*", text)
    return text, first[0] if first and first[0] in _FIELDS else None


def renamed(text: str, names: Names) -> str:
    """A message with other names of fields."""
    return _RENAMED.sub(lambda found: names.get(found[0], found[0]), text)


def place(error: Mapping[str, Any]) -> list[str]:
    """The names of fields down to a mistake that pydantic found, without those of kinds of objects."""
    parts = error["loc"][1:] if error["loc"][:1] == ("body",) else error["loc"]
    named = error["type"] in ("missing", "extra_forbidden")
    kept = [part for part in parts[: len(parts) - named] if not (_tag(part) or _member(part))]
    return [str(part) for part in (*kept, *parts[len(parts) - named :])]


def likeliest(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first mistake; of a union all that were found at the deepest place, which fits it best."""
    first = errors[0]
    if not any(map(_member, first["loc"])):
        return [first]
    above = place(first)
    same = [one for one in errors if place(one)[: len(above)] == above]
    deepest = max((place(one) for one in same), key=len)
    return [one for one in same if place(one) == deepest]


def of_kind(error: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same mistake; where the kind of an object is not known, at the field that names the kind."""
    if not error["type"].startswith("unknown_"):
        return error
    key, value = error["type"].removeprefix("unknown_"), error["input"]
    if not isinstance(value, dict):
        return {**error, "type": "dict_type"}
    there = {**error, "loc": (*error["loc"], key), "input": value.get(key)}
    if key not in value:
        return {**there, "type": "missing"}
    return {**there, "msg": "Input is none that is read here"}


def reason(errors: Sequence[Mapping[str, Any]]) -> str:
    """What a value should be, by mistakes at one place."""
    reasons = list(dict.fromkeys(map(_reason, errors)))
    common = "should be "
    if all(one.startswith(common) for one in reasons):
        return common + " or ".join(one.removeprefix(common) for one in reasons)
    return " or ".join(reasons)


def given(error: Mapping[str, Any]) -> str:
    """The value that is wrong, cut to size; of a list that is too long or short, how many it holds."""
    value, count = error["input"], error.get("ctx", {}).get("actual_length")
    if count is not None:
        return str(count)
    try:
        if isinstance(value, str):
            text = repr(value[:_LONGEST])
        else:
            few = value[:_LONGEST] if isinstance(value, list) else value
            text = json.dumps(few, ensure_ascii=False, default=str)
    except RecursionError:
        return "a value of very many levels"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _reason(error: Mapping[str, Any]) -> str:
    if error["type"] in _KINDS:
        return f"should be {_KINDS[error['type']]}"
    text = re.sub(r"^(?:Value error, |Input |List |String )| after validation.*", "", error["msg"])
    text = _LONG_NUMBER.sub(lambda found: f"{float(found[0]):g}", text)
    if error["type"] == "literal_error":
        text = re.sub(r"\b(?:True|False|None)\b", lambda found: _JSON[found[0]], text)
    return text[:1].lower() + text[1:]


def _tag(part: Any) -> bool:
    return isinstance(part, str) and part.startswith("~")


def _member(part: Any) -> bool:
    return isinstance(part, str) and _UNION.fullmatch(part) is not None
