"""What can go wrong by the user's hand, said in one line each.

Every message names what was wrong, the value that was given, and what to do. The command
line prints the message and exits with 2; a traceback means a bug of ours.
"""

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

_FEW = 6  # names that fit into a message even where one of them is near
_LONGEST, _SHOWN = 1500, 200  # characters of a message, and of a value in it


def shown(value: Any) -> str:
    """Write a value as in Python, cut to what fits into a message."""
    writer = reprlib.Repr()
    writer.maxstring = writer.maxother = writer.maxlong = _SHOWN // 2
    writer.maxlist = writer.maxtuple = writer.maxdict = 8
    writer.maxlevel = 3
    return shorten(writer.repr(value), _SHOWN)


def shorten(text: str, longest: int = _LONGEST) -> str:
    """Cut the middle out of a text that is longer than so many characters."""
    if len(text) <= longest:
        return text
    half = longest // 2 - 3
    return f"{text[:half]} ... {text[-half:]}"


class OutpaceError(ValueError):
    """Base of all errors that a user can mend; a message too long to read loses its middle."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shorten(message))


class ModelError(OutpaceError):
    """A model that is unknown, unsupported, corrupt, or does not fit its drafter."""


class LogitsError(ModelError):
    """Logits that are not finite: no token can be drawn from them."""


class RequestError(OutpaceError):
    """A prompt or a sampling setting that cannot be served."""


class PromptTooLong(RequestError):
    """A prompt of ``count`` tokens (None: not counted) where at most ``most`` fit the context.

    ``why`` says why the context is shorter than the model is said to take.
    """

    def __init__(self, most: int, count: int | None = None, why: str | None = None) -> None:
        has = f"more than {most} tokens" if count is None else f"{count} tokens, {count - most} more than fit"
        super().__init__(
            f"the prompt has {has}: this model's maximum context length is {most + 1} tokens, "
            f"one of them for the answer; shorten the prompt{f' ({why})' if why else ''}"
        )


class QueueFull(RequestError):
    """A service that has as many requests waiting as it may; come back later."""


class ServiceClosed(RequestError):
    """A service that takes no more requests, because it ends or has failed; go elsewhere."""


class SpecError(OutpaceError):
    """A method spec that cannot be parsed, or a pair of methods that do not fit."""


class UnknownNameError(OutpaceError):
    """A name that no table holds; near names are suggested, or all of a few.

    Args:
        kind: what was looked up: ``"drafter"``, ``"setting of drafter 'suffix'"``.
        known: every name that would have been right.
        notes: sentences to add, such as why a package's names are missing.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], notes: Sequence[str] = ()) -> None:
        self.kind, self.name, self.known = kind, name, sorted(set(known))
        near = difflib.get_close_matches(name, self.known, n=3, cutoff=0.6)
        hints = [f"did you mean {' or '.join(near)}?"] if near else []
        if not near or len(self.known) <= _FEW:
            hints.append(f"known: {', '.join(self.known)}")
        thing, of, whose = kind.partition(" of ")
        super().__init__("; ".join([f"unknown {thing} {name!r}{of}{whose}; {' '.join(hints)}", *notes]))
