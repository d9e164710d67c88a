"""Options that several commands share, as groups: frozen dataclasses, one field per option.

A command names a group as one parameter, and ``spread`` gives it the group's fields as options.
Nothing here imports torch before a model is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outpace.cli import show
from outpace.errors import RequestError
from outpace.params import SamplingParams

if TYPE_CHECKING:
    from outpace.bench.workloads import Prompt
    from outpace.engine.engine import Engine

T = TypeVar("T")

UNDRAFTED = "neither the first nor the last token of a text is drafted"
"""Why some commands need texts of three tokens."""
MODEL = "Model"
"""Panel of the help with options about the model and its drafters."""
_LAW = "Sampling"
_END = "Length and stopping"


def option(*names: str, panel: str | None = None, help: str, **more: Any) -> Any:
    """A typer option whose help may hold square brackets."""
    return typer.Option(*names, help=help.replace("[", r"\["), rich_help_panel=panel, **more)


def spread(command: Callable[..., T]) -> Callable[..., T]:
    """Turn every parameter that is an option group into the options of its fields."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if not dataclasses.is_dataclass(hints[name]):
            flat.append(parameter.replace(annotation=hints[name]))
            continue
        groups[name] = hints[name]
        fields = typing.get_type_hints(hints[name], include_extras=True)
        flat += [
            inspect.Parameter(
                field.name, parameter.kind, default=field.default, annotation=fields[field.name]
            )
            for field in dataclasses.fields(hints[name])
        ]

    @functools.wraps(command)
    def flattened(**values: Any) -> T:
        for name, group in groups.items():
            own = {field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            values[name] = group(**own)
        return command(**values)

    flattened.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    flattened.__annotations__ = {p.name: p.annotation for p in flat}
    return flattened


def at_least(least: int, name: str, value: int | None, why: str = "") -> None:
    """Raise RequestError unless an option was left out or is as large as it has to be."""
    if value is not None and value < least:
        raise RequestError(f"{name} must be at least {least}, got {value}{why and f': {why}'}")


def at_least_one(name: str, value: int | None) -> None:
    """``at_least`` for what counts something."""
    at_least(1, name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Which model, and how it is run."""

    model: Annotated[
        str,
        option(
            "--model",
            "-m",
            panel=MODEL,
            metavar="M",
            help="Name, folder, GGUF file, or hub id such as owner/name.",
        ),
    ] = "smollm2-135m"
    dtype: Annotated[
        str,
        option(
            "--dtype",
            panel=MODEL,
            metavar="D",
            help="float32, bfloat16, or auto: weights of a GGUF file as stored, else the faster of the two.",
        ),
    ] = "auto"
    quantize: Annotated[
        str | None,
        option(
            "--quantize",
            panel=MODEL,
            metavar="K",
            show_default="as they are",
            help="Round the weights to int8 or int4: another model, with less to read (CPU).",
        ),
    ] = None
    device: Annotated[
        str, option("--device", panel=MODEL, metavar="D", help="Where to compute: cpu, cuda, cuda:1.")
    ] = "cpu"
    threads: Annotated[
        int | None,
        option(
            "--threads",
            panel=MODEL,
            metavar="N",
            show_default="all cores",
            help="CPU threads to compute with.",
        ),
    ] = None

    draft_model: Annotated[
        str | None,
        option(
            "--draft-model",
            panel=MODEL,
            metavar="M",
            show_default="none",
            help="A smaller model with the same tokenizer, for auto to draft with where that pays.",
        ),
    ] = None

    def load(self, **settings: Any) -> Engine:
        """Load the engine, with a spinner on a terminal.

        Args:
            **settings: more arguments of ``Engine.load``; None leaves one out.

        Raises:
            OutpaceError: whatever of it does not fit, in one line.
        """
        at_least_one("--threads", self.threads)
        with show.busy(f"loading {self.model}"):
            import torch

            from outpace.engine.engine import Engine

            if self.threads is not None:
                torch.set_num_threads(self.threads)
            own = dict(settings, draft_model=self.draft_model)
            given = {key: value for key, value in own.items() if value is not None}
            return Engine.load(
                self.model, dtype=self.dtype, device=self.device, quantize=self.quantize, **given
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadOptions:
    """Prompts to generate from."""

    workload: Annotated[
        str,
        option(
            "--workload",
            "-w",
            metavar="NAME|FILE",
            help="Prompts to generate from: builtin, or a file as for outpace bench.",
        ),
    ] = "builtin"
    limit: Annotated[int, option("--limit", metavar="N", help="Prompts, at most.")] = 8

    def read(self) -> list[Prompt]:
        """The prompts; needs no model, so that a bad file is said before one is loaded.

        Raises:
            RequestError: a file that cannot be read, or a limit below 1.
        """
        at_least_one("--limit", self.limit)
        from outpace.bench.formats import read_workload

        return read_workload(self.workload)

    def pick(self, engine: Engine, prompts: list[Prompt], max_new_tokens: int) -> list[tuple[int, ...]]:
        """Token ids of those that fit the context, as many as wanted, evenly spread.

        Raises:
            RequestError: none fits.
        """
        from outpace.bench.cases import evenly, fitting

        return [ids for _, ids in evenly(fitting(engine, prompts, max_new_tokens), self.limit)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How tokens are drawn, and where a text ends."""

    temperature: Annotated[
        float | None,
        option(
            "--temperature",
            "-t",
            panel=_LAW,
            metavar="T",
            show_default="the model's, else 0",
            help="Divides the logits; 0 always takes the likeliest token.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        option(
            "--top-p",
            panel=_LAW,
            metavar="P",
            show_default="the model's, else 1",
            help="Keep the likeliest tokens up to this probability, in (0, 1].",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        option(
            "--top-k",
            panel=_LAW,
            metavar="K",
            show_default="the model's, else 0",
            help="Keep the K likeliest tokens; 0: all.",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        option(
            "--min-p",
            panel=_LAW,
            metavar="P",
            show_default="the model's, else 0",
            help="Keep tokens at least P times as likely as the likeliest, in [0, 1].",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        option(
            "--repetition-penalty",
            panel=_LAW,
            metavar="R",
            show_default="the model's, else 1",
            help="Above 1: make tokens of prompt and output less likely.",
        ),
    ] = None
    presence_penalty: Annotated[
        float,
        option(
            "--presence-penalty",
            panel=_LAW,
            metavar="X",
            help="Taken off the logit of every token that the output holds.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        option(
            "--frequency-penalty",
            panel=_LAW,
            metavar="X",
            help="The same, times how often the output holds it.",
        ),
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        option(
            "--logit-bias", panel=_LAW, metavar="ID=X", help="Add X to the logit of token ID. Repeatable."
        ),
    ] = None
    ban_token_id: Annotated[
        list[int] | None,
        option("--ban-token-id", panel=_LAW, metavar="ID", help="Never generate this token. Repeatable."),
    ] = None
    allow_token_id: Annotated[
        list[int] | None,
        option(
            "--allow-token-id",
            panel=_LAW,
            metavar="ID",
            help="Generate nothing but the tokens so named. Repeatable.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        option(
            "--seed",
            panel=_LAW,
            metavar="S",
            show_default="a new one each time",
            help="Same seed, same prompt, same settings: same text.",
        ),
    ] = None
    reproducible: Annotated[
        bool | None,
        option(
            "--reproducible/--no-reproducible",
            panel=_LAW,
            show_default="on with --seed, unless --verifier says who decides",
            help="Make the text of a seed the same with any drafter, with none, in any batch.",
        ),
    ] = None
    max_new_tokens: Annotated[
        int, option("--max-new-tokens", panel=_END, metavar="N", help="Longest answer, tokens.")
    ] = 256
    min_tokens: Annotated[
        int, option("--min-tokens", panel=_END, metavar="N", help="No stop counts within the first N tokens.")
    ] = 0
    stop: Annotated[
        list[str] | None,
        option("--stop", panel=_END, metavar="TEXT", help="End the text before this string. Repeatable."),
    ] = None
    stop_token_id: Annotated[
        list[int] | None,
        option("--stop-token-id", panel=_END, metavar="ID", help="End the text at this token. Repeatable."),
    ] = None
    include_stop: Annotated[
        bool, option("--include-stop", panel=_END, help="Leave the stop string in the text.")
    ] = False
    ignore_eos: Annotated[
        bool, option("--ignore-eos", panel=_END, help="Go on after the model's end-of-sequence tokens.")
    ] = False

    def params(self, *, n: int = 1, logprobs: int | None = None) -> SamplingParams:
        """The settings that were given.

        Raises:
            RequestError: a value that is out of range.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(_read_bias(text) for text in self.logit_bias or ()),
            banned_tokens=frozenset(self.ban_token_id or ()),
            allowed_tokens=frozenset(self.allow_token_id) if self.allow_token_id else None,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=frozenset(self.stop_token_id or ()),
            include_stop=self.include_stop,
            ignore_eos=self.ignore_eos,
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
