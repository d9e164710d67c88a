"""What a method can be told, from its config: for `outpace methods NAME` and docs/methods.md."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from outpace import registry
from outpace.config import PLAN_KEYS


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a config, as text."""

    name: str
    kind: str
    """Its type."""
    default: str | None
    """None: it must be given."""
    meaning: str
    """The docstring below it; empty where there is none."""


def settings_of(config: type) -> list[Setting]:
    """The fields of a config dataclass, as its source has them."""
    written: dict[str, Setting] = {}
    for cls in reversed(config.__mro__):
        if dataclasses.is_dataclass(cls):
            written.update(_written(cls))
    return [written.get(field.name) or _plain(field) for field in dataclasses.fields(config)]


def _written(cls: type) -> dict[str, Setting]:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, SyntaxError):  # a plug-in without its source
        return {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    out = {}
    for part, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(part, ast.AnnAssign):
            told = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                told = " ".join(str(after.value.value).split())
            out[ast.unparse(part.target)] = Setting(
                ast.unparse(part.target),
                ast.unparse(part.annotation),
                None if part.value is None else ast.unparse(part.value),
                told,
            )
    return out


def _plain(field: dataclasses.Field[Any]) -> Setting:
    unset = dataclasses.MISSING
    default = None if field.default is unset else repr(field.default)
    if default is None and field.default_factory is not unset:
        default = repr(field.default_factory())
    kind = field.type if isinstance(field.type, str) else field.type.__name__
    return Setting(field.name, kind, default, "")


def natural_shape(cls: Any) -> str:
    """What a drafter's drafts look like unless it is told otherwise, as a sentence or nothing."""
    traits = getattr(cls, "traits", None)
    if traits is None:
        return ""
    tree, nodes = traits.default_tree, traits.default_nodes
    if tree == "dynamic":
        return f"A tree unless told otherwise: `tree={tree}`."
    if tree is not None:
        return f"A tree of {nodes} nodes unless told otherwise, the first of `tree={tree}`."
    return f"Chains of {nodes} unless told otherwise." if nodes else ""


def plan_keys(cls: Any) -> tuple[str, ...]:
    """Those of PLAN_KEYS that a drafter takes; one that picks among others takes its policy."""
    return PLAN_KEYS if hasattr(cls, "propose") else ("policy",)


def lacks(row: registry.MethodEntry) -> str:
    """What a method needs besides the target; empty where it needs nothing."""
    if not row.trained:
        return ""
    known = {"compose": "a draft model", "lookup": "a file made of texts"}
    return known.get(row.family, "weights of its own")
