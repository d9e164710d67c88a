"""``outpace export``: a trained drafter in the format of another program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli import show
from outpace.cli.options import AS_JSON, option, writes_folder
from outpace.errors import RequestError
from outpace.files import expanded

EXAMPLES = """
Examples:

  outpace export eagle3 --format speculators --verifier owner/model --out head

  outpace export draft_model --format hf --out small-llama

  outpace export custom-generate --out folder
"""


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A drafter folder, or the method whose drafter for the model it is; or custom-generate, "
            "the code for `generate` of transformers, which needs no format.",
        ),
    ],
    *,
    form: str | None = option(
        None,
        "speculators (vLLM reads it) or eagle3 (its authors' layout) for a head; hf, a "
        "plain folder of transformers, for a draft model.",
        "--format",
        "-f",
        metavar="FORMAT",
        shown="needed for a drafter",
    ),
    out: Path = writes_folder(..., "The folder to write.", "-o"),
    model: str = option(
        "smollm2-135m", "The model it was trained for: name, folder, GGUF file, or hub id.", "-m", metavar="M"
    ),
    verifier: str | None = option(
        None,
        "What the other program calls that model, as a rule a hub id.",
        metavar="ID",
        shown="the model's name",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Write a trained drafter for another program.

    Heads for vLLM and SGLang, draft models for everything that loads a Llama.
    """
    if source == "custom-generate":
        if form is not None:
            raise RequestError(f"custom-generate has no formats; leave --format {form} out")
        from outpace.hf import write_folder

        _say(write_folder(out), source, as_json)
        return
    folder = expanded(source)
    from outpace.drafters.trained import find
    from outpace.models.load import load_target
    from outpace.train.export import export as write
    from outpace.train.export import exporter

    exporter(None if folder.is_dir() else source, form)
    assert form is not None

    with show.busy(f"exporting {source}"):
        target = load_target(model)
        if not folder.is_dir():
            folder = find(source, target)
        files = write(folder, form, out, target, verifier)
    _say(files, form, as_json)


def _say(files: Sequence[Path], form: str, as_json: bool) -> None:
    written = {str(file): file.stat().st_size for file in files}
    if as_json:
        show.write_json({"written": written, "format": form})
        return
    for path, size in written.items():
        show.write(f"{path}: {show.count(size, 'byte')}\n")
