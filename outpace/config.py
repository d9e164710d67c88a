"""Method specs, typed configs from text, and the user's folders.

A *method spec* names a method and its settings wherever a drafter is named; the folder of a
trained drafter is one as well:

    prompt_lookup
    draft_model[model=smollm2-135m layers=12 tree=4x2x1 policy=confidence]
    ./my-head[tree=chain]
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from outpace.errors import SpecError, UnknownNameError
from outpace.files import expanded, parse_json

C = TypeVar("C")

DEFAULT_DRAFTER = "auto"
"""Who drafts where nobody is named."""

PLAN_KEYS = ("tree", "tree_size", "verifier", "policy")
"""Keys that every method takes besides its own config: they say how its drafts are grown,
verified and budgeted."""


_WRITE = "write NAME or NAME[key=value ...]"


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method and its settings, as the user wrote them. Order of keys does not matter."""

    name: str
    options: tuple[tuple[str, str], ...] = ()
    """Sorted (key, text) pairs."""

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """Read ``NAME`` or ``NAME[key=value key=value]``; values may hold brackets themselves.

        A path may be in the place of the name: with a slash, or a dot or ``~`` at its beginning. It is the
        folder of a trained drafter, and stands for ``METHOD[model=FOLDER]`` with the same keys.

        Raises:
            SpecError: no text, unbalanced brackets, a word without ``=``, a key given twice, a
                folder that ``outpace train`` did not write.
        """
        if not isinstance(text, str):
            raise SpecError(f"a method spec is text, got {text!r}; {_WRITE}")
        text = text.strip()
        name, bracket, rest = text.partition("[")
        name = name.strip()
        if not name or (bracket and not rest.endswith("]")):
            raise SpecError(f"cannot read method spec {text!r}; {_WRITE}")
        options: dict[str, str] = {}
        for word in _words(rest[:-1], text) if bracket else ():
            key, equals, value = word.partition("=")
            if not equals or not key or not value:
                raise SpecError(f"method spec {text!r}: {word!r} is not key=value")
            if key in options:
                raise SpecError(f"method spec {text!r} gives {key!r} twice")
            options[key] = value
        if names_folder(name):
            if "model" in options:
                raise SpecError(f"method spec {text!r} names two folders; drop model=...")
            name, options["model"] = method_of(name), name
        return cls(name, tuple(sorted(options.items())))

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}[{' '.join(f'{k}={v}' for k, v in self.options)}]"

    def planned(self, **plan: str | int | None) -> MethodSpec:
        """The same method with settings of PLAN_KEYS put in or replaced; None leaves one alone."""
        given = {key: str(value) for key, value in plan.items() if value is not None}
        return MethodSpec(self.name, tuple(sorted({**dict(self.options), **given}.items())))

    def without(self, key: str) -> MethodSpec:
        """The same method, with nothing said of one key."""
        return MethodSpec(self.name, tuple(pair for pair in self.options if pair[0] != key))

    def split(self) -> tuple[dict[str, str], dict[str, str]]:
        """The method's own options, and those of PLAN_KEYS."""
        own = {k: v for k, v in self.options if k not in PLAN_KEYS}
        return own, {k: v for k, v in self.options if k in PLAN_KEYS}


def names_folder(spec: str) -> bool:
    """Whether a path stands where a method spec has its name."""
    name = spec.partition("[")[0].strip()
    return "/" in name or os.sep in name or name.startswith((".", "~"))


def method_of(folder: str) -> str:
    """The method of a trained drafter's folder.

    Raises:
        SpecError: it is none, or its name cannot stand in a method spec.
    """
    try:
        said = parse_json((expanded(folder) / "config.json").read_bytes())
        method = said["method"] if "target_digest" in said else None
    except (OSError, ValueError, TypeError, KeyError):
        method = None
    if not isinstance(method, str):
        raise SpecError(
            f"{folder} is no folder of a trained drafter; give one that outpace train "
            "wrote, or NAME[model=FOLDER] for a head of another program"
        )
    if " " in folder or "]" in folder:
        raise SpecError(
            f"a method spec cannot hold a space or a bracket, as in {folder!r}; "
            "rename the folder, or give a link to it"
        )
    return method


def _words(text: str, whole: str) -> list[str]:
    depth_C = [0, *accumulate((char == "[") - (char == "]") for char in text)]
    if min(depth_C) < 0 or depth_C[-1]:
        raise SpecError(f"method spec {whole!r}: brackets do not match")
    return split_specs(text, " ")


def split_specs(text: str, mark: str = ",", *, empty: bool = False) -> list[str]:
    """Split a list of specs at commas, or another mark, outside brackets; keep empty ones if asked."""
    specs, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == mark and depth == 0:
            specs.append("")
        else:
            specs[-1] += char
    return [spec.strip() for spec in specs if empty or spec.strip()]


def build(config: type[C], options: Mapping[str, str], who: str, also: Sequence[str] = ()) -> C:
    """Make a frozen config from text options; unknown keys and bad values are errors.

    Args:
        config: a dataclass whose fields are int, float, bool, str, or ``X | None`` of these.
            Its ``REMEDY``, if any, says where to get a value that is missing.
        who: for messages, for example ``"drafter 'prompt_lookup'"``.
        also: keys that are read elsewhere, for messages.

    Raises:
        UnknownNameError: a key that is no field.
        SpecError: a value that cannot be read, or that the config refuses.
    """
    hints = typing.get_type_hints(config)
    fields = {field.name: field for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in fields:
            raise UnknownNameError(f"setting of {who}", key, [*fields, *also])
        try:
            values[key] = _read(text, hints[key])
        except ValueError:
            raise SpecError(f"{who}: {key}={text!r} is not {_kind(hints[key])}") from None
    missing = [name for name, field in fields.items() if name not in values and _required(field)]
    if missing:
        raise SpecError(f"{who} needs {'=..., '.join(missing)}=...{getattr(config, 'REMEDY', '')}")
    try:
        return config(**values)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{who}: {error}") from None


def needs_settings(config: type) -> bool:
    """Whether a method with this config cannot be had by its name alone."""
    return any(_required(field) for field in dataclasses.fields(config))


def _required(field: dataclasses.Field[Any]) -> bool:
    unset = dataclasses.MISSING
    return field.default is unset and field.default_factory is unset


def _read(text: str, hint: Any) -> Any:
    """Text to a value of the hinted type."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and text == "none":
        return None
    kind = next(o for o in options if o is not type(None))
    if (kind is bool and text not in ("true", "false")) or (kind is float and not math.isfinite(float(text))):
        raise ValueError
    return text == "true" if kind is bool else kind(text)


def _kind(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_kind(option) for option in typing.get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, "none")


def cache_folder() -> Path:
    """Where measurements are kept: ``$OUTPACE_CACHE``, else the user's cache folder."""
    return _folder("OUTPACE_CACHE", "XDG_CACHE_HOME", ".cache")


def may_compile() -> bool:
    """Whether C code may be compiled and kept in the cache folder; not if $OUTPACE_COMPILE is 0."""
    return os.environ.get("OUTPACE_COMPILE", "1") != "0"


def world() -> tuple[int, int]:
    """This process's rank and the number of processes, as ``torchrun`` says; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def restarts() -> int:
    """How often ``torchrun`` has started this process anew, as it says; 0 without it."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def data_folder() -> Path:
    """Where trained drafters are kept: ``$OUTPACE_DATA``, else the user's data folder."""
    return _folder("OUTPACE_DATA", "XDG_DATA_HOME", ".local/share")


def _folder(own: str, xdg: str, home: str) -> Path:
    if os.environ.get(own):
        return Path(os.environ[own])
    if os.environ.get(xdg):
        return Path(os.environ[xdg]) / "outpace"
    user = os.path.expanduser("~")  # as it is where nobody knows a home: then nothing can be kept
    return Path(os.devnull if user == "~" else user) / home / "outpace"
