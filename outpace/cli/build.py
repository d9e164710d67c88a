"""``outpace build``: files that drafters look things up in, made from text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli import show
from outpace.cli.options import option
from outpace.errors import ModelError, UnknownNameError

if TYPE_CHECKING:
    from outpace.models.text import Tokenizer

_EXAMPLES = """
Examples:

  outpace build bigram notes/*.txt --model smollm2-135m

  outpace build datastore notes/*.txt --model smollm2-135m --out notes.store
"""

_BIGRAM = """
Example:

  outpace build bigram notes/*.txt
  outpace generate --drafter max_gram "..."

  outpace build bigram code/*.py --out code.bigram
  outpace generate --drafter "max_gram[table=code.bigram]" "..."
"""

_DATASTORE = """
Example:

  outpace build datastore notes/*.txt --out notes.store
  outpace generate --drafter "retrieval[store=notes.store]" "..."
"""

FilesArgument = Annotated[
    list[Path], typer.Argument(metavar="FILES", help="Files of text.", show_default=False)
]
ModelOption = Annotated[
    str,
    option(
        "--model",
        "-m",
        metavar="M",
        help="The model whose tokens are counted: name, folder, GGUF file, or hub id.",
    ),
]

JsonOption = Annotated[bool, option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(
        name="build",
        help="Make files for drafters that look things up: bigram tables, datastores.",
        epilog=_epilog(_EXAMPLES),
    )
    group.command(epilog=_epilog(_BIGRAM))(bigram)
    group.command(epilog=_epilog(_DATASTORE))(datastore)
    app.add_typer(group)


def bigram(
    files: FilesArgument,
    model: ModelOption = "smollm2-135m",
    out: Annotated[
        Path | None,
        option(
            "--out",
            "-o",
            metavar="FILE",
            show_default="where max_gram looks for one of this vocabulary",
            help="The table to write.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count which tokens follow which, for the drafter max_gram.

    Text like the answers that are wanted is best; a megabyte is enough to be of use.
    """
    from outpace.methods.lookup.bigram import build_bigram

    total = sum(file.stat().st_size for file in files)
    with show.progress(total, "bytes") as tick:
        path, tokens = build_bigram(files, _tokenizer(model), out, progress=tick)
    if as_json:
        show.write_json({"written": {str(path): path.stat().st_size}, "tokens": tokens})
    else:
        show.write(f"{path}: made from {show.count(tokens, 'token')}\n")


def datastore(
    files: FilesArgument,
    out: Annotated[Path, option("--out", "-o", metavar="FILE", help="The datastore to write.")],
    model: ModelOption = "smollm2-135m",
    as_json: JsonOption = False,
) -> None:
    """Index a corpus, for the drafter retrieval.

    A .jsonl file has a document per line; other files are plain text.
    """
    from outpace.methods.lookup.datastore import build_datastore

    under_way = ""

    def tell(part: str, done: int) -> None:
        nonlocal under_way
        if part != under_way:
            show.note(f"{part}: from {show.count(done, 'token')} on")
            under_way = part

    tokenizer = _tokenizer(model)
    with show.busy("building a datastore"):
        build_datastore(files, tokenizer, out, progress=tell)
    size = out.stat().st_size
    if as_json:
        show.write_json({"written": {str(out): size}})
    else:
        show.write(f"{out}: {show.count(size, 'byte')}\n")


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


def _epilog(text: str) -> str:
    return text.strip().replace("[", r"\[")
