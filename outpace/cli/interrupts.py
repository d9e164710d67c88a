"""Ctrl-C while a command starts: it leaves at once, with exit code 130 and without a traceback.

An exception that is raised inside an import may be lost, or become another one. Some C code of numpy and
torch takes it for its own failure. So an import that is interrupted ends the process. Outside imports Ctrl-C
raises KeyboardInterrupt as ever, so that files and other processes are tidied up. With the model loaded,
Python's own handler is back.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

STOPPED = 130
"""Exit code of a command that Ctrl-C ended."""
_IMPORTS = "<frozen importlib._bootstrap>"
_SHOW = b"\r\x1b[2K\x1b[?25h"  # clears the line of a spinner, and shows the cursor again


def exit_code(signals: Sequence[int]) -> int:
    """Of a command that the first of these signals ended; by Ctrl-C, if there is none."""
    return 128 + signals[0] if signals else STOPPED


def is_command() -> bool:
    """Whether this process was started as ``outpace``, and does not only import it."""
    *folders, name = os.path.normpath(sys.argv[0] if sys.argv else "").split(os.sep)
    return name in ("outpace", "outpace.exe") or (folders[-1:], name) == (["outpace"], "__main__.py")


def leave_at_once() -> None:
    """From now on Ctrl-C ends the process, whatever it does; if Ctrl-C is Python's to handle."""
    _change((signal.default_int_handler, _leave_import), _leave)


def leave_imports() -> None:
    """From now on Ctrl-C ends imports at once and raises elsewhere; if it was to end the process."""
    _change((_leave,), _leave_import)


def done() -> None:
    """What takes long to import is there: Ctrl-C raises again, wherever it comes."""
    _change((_leave, _leave_import), signal.default_int_handler)


def _change(before: tuple[object, ...], after: object) -> None:
    """Put one handler in place of others. Whoever ignores Ctrl-C, or handles it, goes on so."""
    if signal.getsignal(signal.SIGINT) not in before:
        return
    try:
        signal.signal(signal.SIGINT, after)  # type: ignore[arg-type]
    except ValueError:  # another thread than the main one
        return


def _leave(signum: int, frame: FrameType | None) -> None:
    try:
        if os.isatty(2):
            os.write(2, _SHOW)
    finally:
        os._exit(STOPPED)


def _leave_import(signum: int, frame: FrameType | None) -> None:
    at = frame
    while at is not None:
        if at.f_code.co_filename == _IMPORTS:
            _leave(signum, frame)
        at = at.f_back
    signal.default_int_handler(signum, frame)
