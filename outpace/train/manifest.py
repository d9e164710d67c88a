"""Manifests of what training keeps on disk: read, and checked for what their readers rely on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.errors import OutpaceError, shorten, shown
from outpace.files import parse_json

SHARD = re.compile(r"[a-z]+-\d+\.safetensors")
"""Name of a file beside its manifest."""


def read_manifest(path: Path, version: int, form: Mapping[str, Any], remedy: str) -> dict[str, Any]:
    """Read a manifest.

    Args:
        path: the file.
        version: that is read here.
        form: what has to be in it: key -> type, pattern of a string, or form of an object. A list of one
            of these stands for a list of such values. A key that ends in ``?`` may be absent.
        remedy: what to do about a damaged one.

    Raises:
        FileNotFoundError: there is none.
        OutpaceError: it is damaged, or of another version.
    """
    try:
        manifest = parse_json(path.read_bytes())
        found = manifest["version"]
        if found == version and (wrong := _misfit(manifest, form, "")):
            raise ValueError(wrong)
    except (ValueError, KeyError, TypeError) as error:
        raise OutpaceError(f"{path} is corrupt ({shorten(str(error), 200)}); {remedy}") from None
    if found != version:
        raise OutpaceError(f"{path} has version {shown(found)}, and {version} is read here; {remedy}")
    assert isinstance(manifest, dict)
    return manifest


def _misfit(value: Any, form: Any, at: str) -> str:
    """Say what is not as it should be; empty if all is."""
    if isinstance(form, Mapping):
        if not isinstance(value, dict):
            return f"{at or 'it'} is {shown(value)} and no object"
        for key, inner in form.items():
            name = key.removesuffix("?")
            if name not in value:
                if name == key:
                    return f"{at}{'.' if at else ''}{name} is missing"
            elif wrong := _misfit(value[name], inner, f"{at}{'.' if at else ''}{name}"):
                return wrong
        return ""
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{at} is {shown(value)} and no list"
        return next((wrong for one in value if (wrong := _misfit(one, form[0], at))), "")
    if isinstance(form, re.Pattern):
        return "" if isinstance(value, str) and form.fullmatch(value) else f"{at} is {shown(value)}"
    fits = type(value) is form and (form is not int or 0 <= value < 1 << 63)
    return "" if fits else f"{at} is {shown(value)}, and no {form.__name__} that it can be"
