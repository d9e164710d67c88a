"""What a command line that cannot be read is told, in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

_MOST = 3  # commands that are named


def line(error: Any, whole: Any, arguments: Sequence[str]) -> str:
    """Say what is wrong, and which help to read.

    Args:
        error: of typer.
        whole: the command that took the arguments.
    """
    message = error.format_message().strip()
    message = message[:1].lower() + message[1:].rstrip(".")
    if said := _not_a_number(error):
        message = f"{message.partition(': ')[0]}: {said}"
    path = _begun(whole, arguments) if error.ctx is None else error.ctx.command_path
    unknown = re.fullmatch("no such command '(.+)'", message)
    if unknown:
        found = [*_called(unknown[1], whole, "outpace")][:_MOST]
        names = error.ctx.command.commands
        message += f"; there is {', '.join(found)}" if found else f"; choose from {', '.join(names)}"
    message = re.sub("'([^']{80})[^']+'", r"'\1...'", message)  # a word that somebody gave
    end = "" if message.endswith("?") else ";"
    return f"{message}{end} see {path} --help"


def _not_a_number(error: Any) -> str:
    """What was given in place of a number, where pydantic read it; "" for any other error."""
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    kind = found[0].get("type", "") if found else ""
    if not kind.startswith(("int_", "float_")):
        return ""
    return f"{found[0]['input']!r:.80} is no {'whole number' if kind.startswith('int_') else 'number'}"


def _begun(whole: Any, arguments: Sequence[str]) -> str:
    """The command that a command line begins with."""
    path = "outpace"
    for word in arguments:
        if word not in getattr(whole, "commands", ()):
            break
        whole, path = whole.commands[word], f"{path} {word}"
    return path


def _called(name: str, command: Any, path: str) -> Iterator[str]:
    """Commands that have this name, or an option of this name."""
    for word, one in getattr(command, "commands", {}).items():
        if word == name:
            yield f"{path} {word}"
        yield from _called(name, one, f"{path} {word}")
    if any(f"--{name}" in one.opts for one in command.params):
        yield f"{path} --{name}"
