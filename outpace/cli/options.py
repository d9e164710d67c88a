"""Options that several commands share, as groups: frozen dataclasses, one field per option.

A command names a group as one parameter, and ``spread`` gives it the group's fields as options.
Nothing here imports torch before a model is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import os
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outpace.cli import interrupts, show
from outpace.config import DEFAULT_DRAFTER, MethodSpec
from outpace.errors import RequestError
from outpace.files import check_writable, expanded
from outpace.params import SamplingParams

if TYPE_CHECKING:
    from outpace.bench.workloads import Prompt
    from outpace.engine.engine import Engine

T = TypeVar("T")

UNDRAFTED = "neither the first nor the last token of a text is drafted"
"""Why some commands need texts of three tokens."""
_PER_CORE = 16
"""Most threads for each core: ten times what is ever of use, and few enough to be started anywhere."""


def option(
    default: Any,
    help: str,
    *names: str,
    shown: str | None = None,
    least: int | None = None,
    check: Callable[[Any], None] | None = None,
    **more: Any,
) -> Any:
    """Declare an option, as the default of a parameter or of a field of an option group.

    Args:
        default: its value where it is not given; ``...`` where it must be.
        names: short ones, or a long one that is not the parameter's own.
        shown: what the help says in place of the default.
        least: the smallest number that it takes.
        check: called with what was given, each one of a list, before the command begins.
    """
    told = {"help": help, "names": names, "shown": shown, "least": least, "check": check, **more}
    return field(default=MISSING if default is ... else default, metadata=told)


model_option = partial(option, panel="Model")
"""An option about the model and its drafters."""
output = partial(option, panel="Output")
writes_folder = partial(output, check=check_writable, metavar="DIR")
"""An option whose folder is written in the end, and is tried before the work begins."""
writes_file = partial(output, check=show.check_file, metavar="FILE")
AS_JSON = output(False, "Print one JSON object.", "--json")
_sampling = partial(option, panel="Sampling")
_end = partial(option, panel="Length and stopping")
_METAVAR = {int: "N", int | None: "N", bool: "", bool | None: ""}
"""What the help calls a value, by its type; a switch has none."""


def spread(command: Callable[..., T]) -> Callable[..., T]:
    """Make a command of a function: its options, and those in the fields of option groups."""
    # Of Python 3.10, typing.get_type_hints would put Optional around Annotated.
    hints = inspect.get_annotations(command, eval_str=True)
    groups: dict[str, type] = {}
    flat: list[inspect.Parameter] = []
    checks: list[tuple[str, Callable[[Any], None]]] = []

    def add(name: str, hint: Any, declared: Field[Any]) -> None:
        made = dict(declared.metadata)
        own = "--" + name.replace("_", "-")
        names = made.pop("names")
        if not any(one.startswith("--") for one in names):
            names = (own, *names)
        if (number := made.pop("least")) is not None:
            checks.append((name, partial(at_least, number, names[0])))
        if (check := made.pop("check")) is not None:
            checks.append((name, check))
        shown = made.pop("shown")
        made.setdefault("metavar", _METAVAR.get(hint))
        shape = typer.Option(
            *names,
            help=made.pop("help").replace("[", r"\["),
            rich_help_panel=made.pop("panel", None),
            show_default=True if shown is None else shown,
            **made,
        )
        default = inspect.Parameter.empty if declared.default is MISSING else declared.default
        kind = inspect.Parameter.KEYWORD_ONLY
        flat.append(inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, shape]))

    for name, parameter in inspect.signature(command).parameters.items():
        if isinstance(parameter.default, Field):
            add(name, hints[name], parameter.default)
        elif dataclasses.is_dataclass(hints[name]):
            groups[name] = hints[name]
            fields = typing.get_type_hints(hints[name])
            for one in dataclasses.fields(hints[name]):
                add(one.name, fields[one.name], one)
        else:
            flat.append(parameter.replace(annotation=hints[name]))

    @functools.wraps(command)
    def flattened(**values: Any) -> T:
        values = {name: _at_home(value) for name, value in values.items()}
        for name, check in checks:
            given = values[name]
            for one in given if isinstance(given, list) else () if given is None else (given,):
                check(one)
        for name, group in groups.items():
            own = {one.name: values.pop(one.name) for one in dataclasses.fields(group)}
            values[name] = group(**own)
        return command(**values)

    flattened.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    flattened.__annotations__ = {p.name: p.annotation for p in flat}
    return flattened


def _at_home(value: Any) -> Any:
    """Paths with the home that a shell leaves as ``~``, as in ``--out=~/x``; all else as it is."""
    if isinstance(value, list):
        return [_at_home(one) for one in value]
    return expanded(value) if isinstance(value, Path) else value


def epilog(examples: str) -> str:
    """Examples below a command's help; their brackets are no markup."""
    return examples.strip().replace("[", r"\[")


def add(app: typer.Typer, command: Callable[..., None], examples: str, name: str | None = None) -> None:
    """Put a function into an application as a command, with examples below its help."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    said = "\n\n".join(" ".join(one.split()) for one in paragraphs)  # the terminal breaks the lines
    app.command(name, help=said, epilog=epilog(examples))(spread(command))


def whole(text: str) -> int:
    """Read digits alone.

    Raises:
        ValueError: anything else.
    """
    if not (text.strip().isascii() and text.strip().isdigit()):
        raise ValueError(text)
    return int(text)


def numbers(
    name: str,
    text: str,
    what: str,
    example: str,
    kind: Callable[[str], T],
    fits: Callable[[T], bool] = lambda _: True,
) -> tuple[T, ...]:
    """Read numbers with commas between them.

    Args:
        name: of the option.
        what: the numbers that it takes, for the error.

    Raises:
        RequestError: something else, or a number that does not fit.
    """
    try:
        found = tuple(kind(part) for part in text.split(","))
        if all(map(fits, found)):
            return found
    except ValueError:
        pass
    raise RequestError(f"{name} {text!r:.80} is no list of {what}; give some, such as {example}")


def at_least(least: int, name: str, value: int | None, why: str = "") -> None:
    """Raise RequestError unless an option was left out or is as large as it has to be."""
    if value is not None and value < least:
        raise RequestError(f"{name} must be at least {least}, got {value}{why and f': {why}'}")


def marks_of(given: Sequence[str] | None) -> tuple[str, ...]:
    """What ``--thinking-mark`` was given, if it was given as often as there are marks."""
    if given and len(given) not in (2, 3):
        raise RequestError(f"--thinking-mark is given two or three times, got {len(given)}")
    return tuple(given or ())


def use_threads(count: int | None) -> None:
    """Compute with so many threads from now on; None leaves what is set.

    Raises:
        RequestError: far more than there are cores. Where the system grants no more threads, the
            library that starts them ends the process.
    """
    if count is None:
        return
    import torch

    most = _PER_CORE * (os.cpu_count() or 1)
    if count > most:
        raise RequestError(f"--threads must be at most {most}, {_PER_CORE} per core, got {count}")
    torch.set_num_threads(count)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Which model, and how it is run."""

    model: str = model_option(
        "smollm2-135m", "Name, folder, GGUF file, or hub id such as owner/name.", "-m", metavar="M"
    )
    dtype: str = model_option(
        "auto",
        "float32, bfloat16, or auto: weights of a GGUF file as stored, else the faster of the two.",
        metavar="D",
    )
    quantize: str | None = model_option(
        None,
        "Round the weights to int8 or int4: another model, with less to read (CPU).",
        metavar="K",
        shown="as they are",
    )
    device: str = model_option("cpu", "Where to compute: cpu, cuda, cuda:1.", metavar="D")
    threads: int | None = model_option(None, "CPU threads to compute with.", shown="all cores", least=1)

    def load(self, **settings: Any) -> Engine:
        """Load the engine, with a spinner on a terminal.

        Args:
            **settings: more arguments of ``Engine.load``; None leaves one out.

        Raises:
            OutpaceError: whatever of it does not fit, in one line.
        """
        with show.busy(f"loading {self.model}"):
            from outpace.engine.engine import Engine

            use_threads(self.threads)
            own = dataclasses.asdict(self) | settings
            given = {key: value for key, value in own.items() if value is not None and key != "threads"}
            engine = Engine.load(given.pop("model"), **given)
            gc.freeze()  # a search for garbage takes 90 ms where it looks at libraries and the model
        interrupts.done()
        return engine


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedOptions(ModelOptions):
    """The same, of commands that draft with what was trained."""

    drafter_anyway: bool = model_option(
        False,
        "Take a drafter that was trained for another model, if its sizes fit. Fewer drafts may be "
        "accepted; the output has the same distribution.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoOptions(TrainedOptions):
    """The same, of commands that may leave the choice of the drafter to `auto`."""

    draft_model: str | None = model_option(
        None,
        "A smaller model with the same tokenizer, for auto to draft with where that pays.",
        metavar="M",
        shown="none",
    )

    def load(self, **settings: Any) -> Engine:
        """As ``ModelOptions.load``. A draft model beside a drafter that does not use it is refused.

        Commands that compare drafters load with the drafter `none`, and name others later.
        """
        spec = settings.get("drafter") or DEFAULT_DRAFTER
        if self.draft_model is not None and MethodSpec.parse(spec).name not in ("none", DEFAULT_DRAFTER):
            raise RequestError(
                f"--draft-model is for {DEFAULT_DRAFTER}, got --drafter {spec:.80}; leave one of the "
                f"two out, or give --drafter 'draft_model[model={self.draft_model:.80}]'"
            )
        return ModelOptions.load(self, **settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadOptions:
    workload: str = option(
        "builtin",
        "Prompts to generate from: builtin, or a file as for outpace bench.",
        "-w",
        metavar="NAME|FILE",
    )
    limit: int = option(8, "Prompts, at most.", least=1)

    def read(self) -> list[Prompt]:
        """The prompts; needs no model, so that a bad file is said before one is loaded.

        Raises:
            RequestError: a file that cannot be read, or a limit below 1.
        """
        from outpace.bench.formats import read_workload

        return read_workload(self.workload)

    def pick(self, engine: Engine, prompts: list[Prompt], max_new_tokens: int) -> list[tuple[int, ...]]:
        """Token ids of those that fit the context, as many as wanted, evenly spread.

        Raises:
            RequestError: none fits.
        """
        from outpace.bench.cases import fitting
        from outpace.models.prompts import evenly

        return [ids for _, ids in evenly(fitting(engine, prompts, max_new_tokens), self.limit)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How tokens are drawn, and where a text ends."""

    temperature: float | None = _sampling(
        None,
        "Divides the logits; 0 always takes the likeliest token.",
        "-t",
        metavar="T",
        shown="the model's, else 0",
    )
    top_p: float | None = _sampling(
        None,
        "Keep the likeliest tokens up to this probability, in (0, 1].",
        metavar="P",
        shown="the model's, else 1",
    )
    top_k: int | None = _sampling(
        None, "Keep the K likeliest tokens; 0: all.", metavar="K", shown="the model's, else 0"
    )
    min_p: float | None = _sampling(
        None,
        "Keep tokens at least P times as likely as the likeliest, in [0, 1].",
        metavar="P",
        shown="the model's, else 0",
    )
    repetition_penalty: float | None = _sampling(
        None,
        "Above 1: make tokens of prompt and output less likely.",
        metavar="R",
        shown="the model's, else 1",
    )
    presence_penalty: float = _sampling(
        0.0, "Taken off the logit of every token that the output holds.", metavar="X"
    )
    frequency_penalty: float = _sampling(0.0, "The same, times how often the output holds it.", metavar="X")
    logit_bias: list[str] | None = _sampling(
        None, "Add X to the logit of token ID. Repeatable.", metavar="ID=X"
    )
    ban_token_id: list[int] | None = _sampling(None, "Never generate this token. Repeatable.", metavar="ID")
    allow_token_id: list[int] | None = _sampling(
        None, "Generate nothing but the tokens so named. Repeatable.", metavar="ID"
    )
    thinking_budget: int | None = _sampling(
        None, "Most tokens of thinking; then its end is written.", shown="no limit"
    )
    thinking_mark: list[str] | None = _sampling(
        None,
        "What begins and what ends thinking; a third one is written before the end where the budget ends. "
        "Repeatable.",
        metavar="TEXT",
        shown="the model's own",
    )
    seed: int | None = _sampling(
        None, "Same seed, same prompt, same settings: same text.", metavar="S", shown="a new one each time"
    )
    reproducible: bool | None = _sampling(
        None,
        "Make the text of a seed the same with any drafter, with none, in any batch.",
        "--reproducible/--no-reproducible",
        shown="on with --seed, unless --verifier says who decides",
    )
    max_new_tokens: int = _end(256, "Longest answer, tokens.")
    min_tokens: int = _end(0, "No stop counts within the first N tokens.")
    stop: list[str] | None = _end(None, "End the text before this string. Repeatable.", metavar="TEXT")
    stop_token_id: list[int] | None = _end(None, "End the text at this token. Repeatable.", metavar="ID")
    include_stop: bool = _end(False, "Leave the stop string in the text.")
    ignore_eos: bool = _end(False, "Go on after the model's end-of-sequence tokens.")

    def params(self, *, n: int = 1, logprobs: int | None = None) -> SamplingParams:
        """The settings that were given.

        Raises:
            RequestError: a value that is out of range.
        """
        own = dataclasses.asdict(self)
        alike = {one.name for one in dataclasses.fields(SamplingParams)} - {"logit_bias", "stop"}
        return SamplingParams(
            **{name: value for name, value in own.items() if name in alike},
            logit_bias=dict(_read_bias(text) for text in self.logit_bias or ()),
            banned_tokens=frozenset(self.ban_token_id or ()),
            allowed_tokens=frozenset(self.allow_token_id) if self.allow_token_id else None,
            thinking_token_budget=self.thinking_budget,
            thinking_marks=marks_of(self.thinking_mark),
            stop=tuple(self.stop or ()),
            stop_token_ids=frozenset(self.stop_token_id or ()),
            n=n,
            logprobs=logprobs,
        )


def _read_bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise RequestError(
            f"--logit-bias {text!r} is not ID=X; give a token id and a number, such as 42=-5"
        ) from None


def notes(engine: Engine, params: SamplingParams) -> list[str]:
    """What a user should know about a model and what was taken from it, a line each."""
    lines = [] if engine.target.note is None else [engine.target.note]
    defaults = engine.target.defaults
    if taken := params.taken(defaults):
        settings = ", ".join(f"{name} {value:g}" for name, value in taken.items())
        lines.append(f"taken from the model's generation config: {settings}")
    if defaults is not None and defaults.unsupported:
        lines.append(f"not honoured of it: {', '.join(defaults.unsupported)}")
    return lines
