"""Printing: answers and reports to standard output, all else to standard error.

rich is imported where a table or a bar is drawn, never before: it costs start-up time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.errors import OutpaceError
from outpace.files import check_writable, write_whole

_WIDE = 160  # columns of a table that no terminal shows


def write(text: str) -> None:
    """Put text on standard output now.

    Raises:
        BrokenPipeError: the reader has left.
        OutpaceError: it cannot be written, for example because a disk is full.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutpaceError(f"cannot write to standard output: {error.strerror}") from error


def save(path: Path, text: str) -> None:
    """Write a file whole, and its folders.

    Raises:
        OutpaceError: it cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise OutpaceError(f"cannot write {path}: {error.strerror}") from error


def check_file(path: Path) -> None:
    """Refuse a file that cannot be written, for before the work begins; nothing is left there.

    Raises:
        OutpaceError: as ``save``.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        check_writable(path.parent)
    except OSError as error:
        raise OutpaceError(f"cannot write {path}: {error.strerror}") from error


def write_json(value: Any) -> None:
    """Put one JSON document on a line of its own; numbers that are not finite become null."""
    write(json.dumps(_finite(value), allow_nan=False) + "\n")


@contextlib.contextmanager
def then_write(path: Path | None, files: Callable[[Path], object]) -> Iterator[None]:
    """Print first, then write there, if anywhere, whatever fails: a disk may be full, a reader leave."""
    try:
        yield
    finally:
        if path is not None:
            files(path)


def finish(
    found: Mapping[str, Any],
    as_json: bool,
    say: Callable[[], None],
    out: Path | None = None,
    name: str = "",
    pictures: Mapping[str, Callable[[Any], bool]] | None = None,
) -> None:
    """Print a report, and write it where that was asked for, also where it cannot be printed.

    Args:
        found: plain values.
        say: prints it for people.
        out: folder of ``name``.json and of the pictures; None: nothing is written.
        pictures: by the names of their files; each draws into a figure, or says that there is nothing.
    """

    def files(folder: Path) -> None:
        save(folder / f"{name}.json", json.dumps(found, indent=1) + "\n")
        if pictures:
            from outpace.bench.plots import paint

            paint(pictures, folder, note=note)

    with then_write(out, files):
        if as_json:
            write_json(found)
        else:
            say()


def count(number: int, what: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def note(line: str) -> None:
    """Put a line on standard error, after what standard output holds."""
    sys.stdout.flush()
    print(line, file=sys.stderr, flush=True)


def hint(line: str) -> None:
    """A note for those who sit before a terminal."""
    if sys.stderr.isatty():
        note(line)


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Show a spinner while something takes its time; nothing unless on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)):
        yield


@contextlib.contextmanager
def progress(total: int, unit: str) -> Iterator[Callable[[str, int], None]]:
    """Show how far long work has come: a bar on a terminal, a line per part and at the end elsewhere.

    Yields:
        A function to call with the name of the part under way and how many units were done
        since the last call.
    """
    if not sys.stderr.isatty():
        last, done, told = "", 0, 0

        def tell(part: str, step: int) -> None:
            nonlocal last, done, told
            done += step
            if part != last:
                note(f"{done}/{total} {unit}: {part}")
                last, told = part, done

        yield tell
        if done > told:
            note(f"{done}/{total} {unit}")
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda part, step: bar.update(task, advance=step, description=part)


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    to_stderr: bool = False,
) -> None:
    """Draw a table.

    Args:
        numbers: headings of the columns that are aligned to the right.
        to_stderr: where it goes; standard output otherwise.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in columns:
        drawn.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    stream = sys.stderr if to_stderr else sys.stdout
    sys.stdout.flush()
    try:
        Console(file=stream, width=None if stream.isatty() else _WIDE).print(drawn)
    except SystemExit:  # rich ends the program where the reader has left
        raise BrokenPipeError from None


def listed(rows: Iterable[Sequence[Any]], columns: Mapping[str, str], texts: Collection[str] = ()) -> None:
    """Draw a table of records.

    Args:
        rows: the parts of each line, which templates call 0, 1 and so on.
        columns: heading -> template of its cells, as for ``str.format``.
        texts: headings of columns that are aligned to the left; all others hold numbers.
    """
    cells = [[template.format(*row) for template in columns.values()] for row in rows]
    table(list(columns), cells, numbers=[name for name in columns if name not in texts])
