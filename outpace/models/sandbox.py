"""A sandbox for chat templates of strangers: no access to the machine, bounded time and memory.

jinja2's own sandbox guards attributes, but a template may still loop for ever or build a string of
20 GB. Here every line that runs is counted, and every operation that can make a large value out of
small ones is checked before it runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

STEPS = 2_000_000
"""Lines of Python that one rendering may run; some two seconds."""
PER_MESSAGE = 1_000
"""So many more per message."""
LARGEST = 1 << 23
"""Characters of one text, items of one list, bytes of one number."""
TOTAL = 1 << 27
"""Of all values of one rendering together."""
_WIDEST = 10_000
"""Largest width in a format."""
_NUMBER = re.compile(r"\d+")
_SIZED = (str, bytes, bytearray, list, tuple)


class TooMuch(Exception):
    """A template takes too much time or memory."""


class _Meter:
    """What one rendering has taken so far."""

    def __init__(self, messages: int = 0) -> None:
        self.left, self.made = STEPS + PER_MESSAGE * messages, 0

    def trace(self, frame: FrameType, event: str, given: Any) -> Any:
        """Count a line; a trace function of Python."""
        self.left -= 1
        if self.left < 0:
            raise TooMuch(f"it runs more than {STEPS} steps")
        return self.trace

    def charge(self, size: int) -> None:
        """Count a value that is going to be made."""
        self.made += size
        if size > LARGEST or self.made > TOTAL:
            raise TooMuch(f"it makes values of more than {LARGEST} characters")


_METER: ContextVar[_Meter | None] = ContextVar("meter", default=None)


@contextmanager
def bounded(messages: int = 0) -> Iterator[None]:
    """Limit what the thread runs inside to ``STEPS``, ``LARGEST`` and ``TOTAL``.

    Args:
        messages: that are rendered; a long conversation may take more steps.

    Raises:
        TooMuch: at the line or operation that exceeds one.
    """
    meter = _Meter(messages)
    token, before = _METER.set(meter), sys.gettrace()
    sys.settrace(meter.trace)
    try:
        yield
    finally:
        sys.settrace(before)
        _METER.reset(token)


def _charge(size: int) -> None:
    (_METER.get() or _Meter()).charge(size)


def _size(value: Any) -> int:
    """Characters and items of a value, with all that is inside; shared parts count every time."""
    total, level = 0, [value]
    while level:
        one = level.pop()
        if isinstance(one, str | bytes | bytearray):
            total += len(one)
        elif isinstance(one, Mapping):
            level += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            level += one
        total += 1
        if total + len(level) > LARGEST:
            raise TooMuch(f"it makes values of more than {LARGEST} characters")
    return total


def _check_format(text: str | bytes) -> None:
    """Refuse formats whose fields are very wide."""
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    wide = any(len(digits) > 5 or int(digits) > _WIDEST for digits in _NUMBER.findall(text))
    if wide or "*" in text or re.search(r"\{[^{}]*\{", text):
        raise TooMuch(f"it formats a value to more than {_WIDEST} characters")


def _check_call(name: str, given: tuple[Any, ...], more: Mapping[str, Any]) -> None:
    """Check a filter, or a method with its object as the first value, before it runs."""
    values = [*given, *more.values()]
    if any(isinstance(one, int) and abs(one) > LARGEST for one in values):
        raise TooMuch(f"it gives {name} a number above {LARGEST}")
    text = given[0] if given else None
    if name in ("format", "format_map") and isinstance(text, str):
        _check_format(text)
    sizes = [_size(one) for one in values]
    if name in ("replace", "translate", "wordwrap", "indent", "urlize", "xmlattr"):
        # At most every character becomes the longest of the other values.
        other = max([*sizes[1:], *(n for n in values[1:] if isinstance(n, int))], default=0)
        if name == "replace" and len(values) > 2 and isinstance(text, str):
            old, new = str(values[1]), str(values[2])
            _charge(len(text) + text.count(old) * len(new))
        else:
            _charge(sizes[0] * max(1, other))
    elif name == "expandtabs" or (name == "tojson" and values[1:]):
        widths = [abs(n) for n in values[1:] if isinstance(n, int)]
        _charge(sizes[0] * max([1, *widths]))
    elif name == "join":
        between = max([len(one) for one in values[:2] if isinstance(one, str)], default=0)
        times = max([len(one) for one in values[:2] if isinstance(one, list | tuple)], default=between)
        _charge(sum(sizes) + between * times)
    elif name == "sum" and any(isinstance(one, _SIZED) for one in values[1:]):
        raise TooMuch("it sums lists")


def _whole(name: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Values of a call; those that ``join`` would draw from an iterator are drawn, to be measured."""
    return (
        tuple(list(one) if isinstance(one, Iterator) else one for one in given) if name == "join" else given
    )


class _Generator(CodeGenerator):
    """Compiles templates so that the environment sees every text and list that is put together."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """``a ~ b``."""
        self._built("tilde", node.nodes, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        """``[a, b]``."""
        self._built("listed", node.items, frame)

    def _built(self, name: str, parts: Iterable[nodes.Node], frame: Frame) -> None:
        self.write(f"environment.{name}((")
        for part in parts:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates take bounded time and memory, inside ``bounded``."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, run in list(self.filters.items()):
            self.add_filter(name, run)

    def add_filter(self, name: str, run: Callable[..., Any]) -> None:
        """Let templates use a filter, checked."""
        self.filters[name] = _checked(name, run)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the pieces of a text."""
        found, size = [], 0
        for part in parts:
            found.append(part)
            size += len(part)
            if size > LARGEST:
                break
        _charge(size)
        return "".join(found)

    @staticmethod
    def tilde(parts: tuple[Any, ...]) -> str:
        """``a ~ b``."""
        _charge(sum(map(_size, parts)))
        return "".join(map(str, parts))

    @staticmethod
    def listed(parts: tuple[Any, ...]) -> list[Any]:
        """``[a, b]``."""
        _charge(_size(parts))
        return list(parts)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``text.format`` as templates get it."""
        run, text = super().wrap_str_format(value), getattr(value, "__self__", None)
        if run is None:
            return None

        def checked(*given: Any, **more: Any) -> str:
            _check_call("format", (text, *given), more)
            return run(*given, **more)

        return checked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check what a binary operation makes, then run it."""
        if isinstance(left, int) and isinstance(right, int):
            bits = max(1, left.bit_length())
            _charge(bits * abs(right) if operator == "**" else bits + right.bit_length())
        elif operator == "%" and isinstance(left, str | bytes):
            _check_format(left)
            _charge(_size(left) + _size(right))
        elif operator == "*":
            times = next((n for n in (left, right) if isinstance(n, int)), 1)
            _charge(max(_size(left), _size(right)) * max(0, times))
        else:
            _charge(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *given: Any, **more: Any) -> Any:
        """Check the values of a call, then run it."""
        owner = getattr(__obj, "__self__", None)
        name = getattr(__obj, "__name__", "")
        given = _whole(name, given)
        if isinstance(owner, str | bytes | bytearray | int):
            _check_call(name, (owner, *given), more)
        else:
            _check_call("", given, more)
        found = super().call(__context, __obj, *given, **more)
        if isinstance(found, _SIZED):
            _charge(len(found))
        return found


def _checked(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks its values first."""
    passes = getattr(run, "jinja_pass_arg", None)

    def checked(*given: Any, **more: Any) -> Any:
        given = _whole(name, given)
        own = given if passes is None else given[1:]
        if name == "list" or name == "string":
            _charge(_size(own))
        _check_call(name, own, more)
        found = run(*given, **more)
        if isinstance(found, _SIZED):
            _charge(len(found))
        return found

    if passes is not None:
        checked.jinja_pass_arg = passes  # type: ignore[attr-defined]
    if hasattr(run, "jinja_async_variant"):
        checked.jinja_async_variant = True  # type: ignore[attr-defined]
    return checked
