"""The command ``outpace``: its sub-commands, its exit codes, its errors in one line.

Exit codes: 0 done; 1 a check found a broken promise; 2 bad input; 130 Ctrl-C. The code is 141 if the reader
of the output has left, and 143 for SIGTERM, of a command that first keeps its work. A traceback means a bug
of ours.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from outpace import __version__
from outpace.cli import (
    analyze,
    bench,
    build,
    chat,
    check,
    demo,
    doctor,
    eval,
    export,
    generate,
    interrupts,
    methods,
    predict,
    serve,
    show,
    train,
    tune,
    usage,
)
from outpace.cli.options import add
from outpace.errors import OutpaceError, shorten
from outpace.files import FULL

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer gives it no public name

app = typer.Typer(
    name="outpace",
    help="Make a language model generate faster, with exactly the text it would have given.",
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Try: outpace generate --compare "Explain how a refrigerator works."',
)


def _say_version(wanted: bool) -> None:
    if wanted:
        show.write(f"outpace {__version__}\n")
        raise typer.Exit


@app.callback()
def _whole(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, metavar="", help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command(name="version")
def _version() -> None:
    """Print versions, the processor, and which code computes on it."""
    from outpace.bench.provenance import cpu_name
    from outpace.kernels.compiled import described

    rows = {"outpace": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            rows[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            rows[name] = "not installed"
    rows |= {"processor": cpu_name(), "code": described()}
    show.write("".join(f"{name:12}  {what}\n" for name, what in rows.items()))


for _module, _command in (
    (generate, generate.generate),
    (chat, chat.chat),
    (demo, demo.demo),
    (serve, serve.serve),
    (check, check.check),
    (doctor, doctor.doctor),
    (bench, None),
    (eval, eval.evaluate),
    (train, train.train),
    (export, export.export),
    (analyze, None),
    (predict, predict.predict),
    (tune, tune.tune),
    (methods, methods.methods),
    (build, None),
):
    if _command is None:  # a group of commands
        _module.register(app)
    else:
        add(app, _command, _module.EXAMPLES, _module.__name__.rpartition(".")[2])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    if arguments is None:
        interrupts.leave_at_once()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started this process
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode is no error
    code = _main(list(sys.argv[1:] if arguments is None else arguments))
    if arguments is None:
        interrupts.leave_at_once()  # all is written; the interpreter has only to end
    return code


def _main(arguments: list[str]) -> int:
    try:
        interrupts.leave_imports()
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_stdout()
        return 141
    except KeyboardInterrupt as stop:
        return interrupts.exit_code(stop.args)
    except OutpaceError as error:
        return _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")


def _run(arguments: list[str]) -> int:
    command: Any = typer.main.get_command(app)
    try:
        # Not command.main(): it prints errors its own way and turns Ctrl-C into an exit code.
        with command.make_context("outpace", arguments or ["--help"]) as context:
            command.invoke(context)
        return 0
    except typer.Exit as done:
        return done.exit_code
    except _UsageError as error:
        return _fail(usage.line(error, command, arguments))


def _fail(message: str) -> int:
    _drop_stdout()
    for full in map(os.strerror, FULL):  # whoever has met it, and whatever it says of it
        message = message.replace(full, f"{full}; make room on that disk")
    print(f"outpace: error: {shorten(' '.join(message.split()))}", file=sys.stderr)
    return 2


def _drop_stdout() -> None:
    """Write out what is left; if that fails let it vanish, or the interpreter complains later."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
