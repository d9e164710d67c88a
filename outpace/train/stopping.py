"""Ctrl-C and SIGTERM: what a command keeps is said before the process leaves.

While a training runs, the step ends and is kept first. A second Ctrl-C ends it at once, as the first
one does everywhere else.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from outpace.files import FULL
from outpace.train.progress import Say

_OURS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""Whoever ignores a signal, or handles it, goes on so."""


class Asked:
    """Whether this process was asked to stop."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.number: int | None = None
        """The signal that asked first."""

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.number is None:
            self.number = number
            with contextlib.suppress(RuntimeError):  # it came while the same file was written to
                self._say("stopping after this step, with a checkpoint; Ctrl-C ends at once")
        elif number == signal.SIGINT:
            signal.default_int_handler(number, frame)

    def leave(self) -> None:
        """End the training; KeyboardInterrupt with the number of the signal."""
        raise KeyboardInterrupt(signal.SIGINT if self.number is None else self.number)


class _End:
    """Ends what runs, as Ctrl-C does."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        """Of the signals that came: whoever catches what they raise may raise anew."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)
        raise KeyboardInterrupt(number)


@contextlib.contextmanager
def ended() -> Iterator[list[int]]:
    """Let SIGTERM end what runs as Ctrl-C does, in the main thread.

    Yields:
        The number of each SIGTERM that came.

    Raises:
        KeyboardInterrupt: with that number.
    """
    end = _End()
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield end.numbers
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def told(say: Say, kept: Callable[[], str]) -> Iterator[None]:
    """As ``ended``; after Ctrl-C and SIGTERM, say what was kept.

    Raises:
        KeyboardInterrupt: of these two, with the number of SIGTERM.
        OSError: of a full disk; it says what was kept as well.
    """
    with ended() as numbers:
        try:
            yield
        except KeyboardInterrupt as stop:
            say(kept())
            raise KeyboardInterrupt(*(numbers[:1] or stop.args)) from None
        except OSError as error:
            if error.errno not in FULL:
                raise
            said = kept().removeprefix("stopped: ")
            raise OSError(error.errno, f"{error.strerror}; {said}", error.filename) from error


@contextlib.contextmanager
def asked(say: Say) -> Iterator[Asked]:
    """Let signals ask; in the main thread, which alone can have them.

    Args:
        say: told at the first one.

    Raises:
        KeyboardInterrupt: at the end, if nobody left for the signal before.
    """
    found, before = Asked(say), {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number, usual in _OURS.items():
                present = signal.getsignal(number)
                if present == usual or isinstance(present, _End):
                    before[number] = signal.signal(number, found.take)
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if found.number is not None:
        found.leave()
