"""What tools do with figures that are ready: print them, and write page and plots where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from sentences import WIDEST

from outpace.bench.plots import paint
from outpace.files import write_whole


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
