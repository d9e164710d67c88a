"""What tools share: an end after errors; print figures, and write page and plots where that is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from textwrap import fill
from typing import Any

from sentences import WIDEST

from outpace.bench.plots import paint
from outpace.errors import OutpaceError
from outpace.files import write_whole


def tool(main: Callable[..., None]) -> Callable[..., int]:
    """Make a function give the status of the process: 2 after an OutpaceError, which is printed; else 0."""

    @wraps(main)
    def run(*arguments: Any) -> int:
        try:
            main(*arguments)
        except OutpaceError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0

    return run


def filled(text: str, indent: str = "") -> str:
    """A paragraph as wide as pages are."""
    return fill(text, WIDEST, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def told(text: str) -> str:
    """A paragraph, and an empty line."""
    return filled(text) + "\n"


def publish(
    lines: Iterable[str], page: Path | None, plots: Mapping[str, Callable[[Any], bool]], folder: Path | None
) -> None:
    """Print the lines of a page.

    Args:
        page: file to write them to.
        plots: name of a picture -> what paints it.
        folder: of the pictures.
    """
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if page is not None:
        write_whole(page, text)
    if folder is not None:
        paint(plots, folder)
