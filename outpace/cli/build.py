"""``outpace build``: files that drafters look things up in, made from text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace import registry
from outpace.cli import show
from outpace.cli.options import AS_JSON, epilog, option, spread, writes_file
from outpace.errors import ModelError, RequestError, UnknownNameError

if TYPE_CHECKING:
    from outpace.models.text import Tokenizer

_EXAMPLES = """
Examples:

  outpace build bigram notes/*.txt
  outpace generate --drafter max_gram "..."

  outpace build bigram code/*.py --out code.bigram
  outpace generate --drafter "max_gram[table=code.bigram]" "..."

  outpace build datastore notes/*.txt --out notes.store
  outpace generate --drafter "retrieval[store=notes.store]" "..."
"""

FilesArgument = Annotated[
    list[Path], typer.Argument(metavar="FILES", help="Files of text.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the group of commands, one per builder."""
    group = typer.Typer(
        name="build", help="Make files for drafters that look things up.", epilog=epilog(_EXAMPLES)
    )
    for entry in registry.entries("builder"):
        group.command(entry.name, help=entry.summary)(_command(entry.name))
    app.add_typer(group)


def _command(kind: str) -> Callable[..., None]:
    @spread
    def build(
        files: FilesArgument,
        *,
        model: str = option(
            "smollm2-135m",
            "The model that the file is for: name, folder, GGUF file, or hub id.",
            "-m",
            metavar="M",
        ),
        out: Path | None = writes_file(
            None, "The file to write.", "-o", shown="the drafter's usual place; needed where it has none"
        ),
        as_json: bool = AS_JSON,
    ) -> None:
        if out is not None and out.exists() and any(one.exists() and out.samefile(one) for one in files):
            raise RequestError(f"--out {out} is one of the files to read; name another file")
        make = registry.load("builder", kind)
        with show.progress(sum(file.stat().st_size for file in files), "bytes") as tick:
            path, tokens = make(files, _tokenizer(model), out, progress=tick)
        if as_json:
            show.write_json({"written": {str(path): path.stat().st_size}, "tokens": tokens})
        else:
            size = show.count(path.stat().st_size, "byte")
            show.write(f"{path}: {size}, made from {show.count(tokens, 'token')}\n")

    return build


def _tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model; its weights are read only where there is no other way."""
    from outpace.models.zoo import open_checkpoint

    try:
        return open_checkpoint(model).tokenizer()
    except (ModelError, UnknownNameError):
        from outpace.models.load import load_target

        tokenizer = load_target(model).tokenizer
    if tokenizer is None:
        raise ModelError(f"{model} has no tokenizer; name a model that has one")
    return tokenizer
