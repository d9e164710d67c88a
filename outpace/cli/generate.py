"""``outpace generate``: one prompt, its answer, and what it cost."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli import show
from outpace.cli.drafting import DrafterOptions
from outpace.cli.explain import Told
from outpace.cli.options import AutoOptions, SamplingOptions, notes, option, output, writes_folder
from outpace.cli.runs import REPEATS, Run, Sides
from outpace.errors import RequestError
from outpace.files import decoded, expanded, reading
from outpace.server.limits import Limits

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.engine.results import Result

_prompt = partial(option, panel="Prompt")
PromptArgument = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The text to answer.", show_default=False)
]
PROMPT_FILE = _prompt(
    None, "Read the prompt from a UTF-8 file, less a final newline; -: standard input.", "-f", metavar="FILE"
)

EXAMPLES = """
Examples:

  outpace generate "Why is the sky blue?"

  outpace generate --compare --prompt-file article.txt

  outpace generate --drafter auto --explain --prompt-file article.txt

  git diff | outpace generate -f - --system "Write a commit message." --json

  outpace generate -m ./my-model -t 0.8 --top-p 0.95 --seed 1 --raw "Once upon"

  outpace generate -d "draft_model[model=smollm2-135m layers=12]" "Say hello."
"""


def generate(
    prompt: PromptArgument = None,
    *,
    model: AutoOptions,
    drafting: DrafterOptions,
    prompt_file: str | None = PROMPT_FILE,
    chat: bool | None = _prompt(
        None,
        "Wrap the prompt in the model's chat template, or feed it as it stands.",
        "--chat/--raw",
        shown="chat, if the model has a template",
    ),
    system: str | None = _prompt(
        None, "What the model is told before the prompt, in chat form.", metavar="TEXT"
    ),
    sampling: SamplingOptions,
    n: int = output(1, "Answers to generate, in one batch."),
    logprobs: int | None = output(None, "With --json: log-probability of every token and of N alternatives."),
    compare: bool = output(
        False, f"Answer plainly as well, {REPEATS} times each in turns, and show the gain."
    ),
    explain: bool = output(
        False,
        "Show afterwards who drafted when, what it brought, and what the best drafter would have gained; "
        "for that the answer is read again.",
    ),
    as_json: bool = output(False, "Print one JSON object in place of the text.", "--json"),
    out: Path | None = writes_folder(None, "With --explain: write explain.json and a plot here.", "-o"),
) -> None:
    """Answer a prompt. The text goes to standard output, all else to standard error."""
    params = sampling.params(n=n, logprobs=logprobs)
    if compare and n > 1:
        raise RequestError(f"--compare times one answer, got --n {n}; drop one of the two")
    if explain and (compare or n > 1):
        other = "--compare" if compare else f"--n {n}"
        raise RequestError(f"--explain shows one answer, got {other} as well; drop one of the two")
    if logprobs is not None:
        if not as_json:
            raise RequestError("--logprobs are printed with --json only; add it")
        if logprobs > (most := Limits().logprobs):
            raise RequestError(f"--logprobs must be at most {most}, got {logprobs}")
    if out is not None and not explain:
        raise RequestError("--out is where --explain writes; add it")
    text = read_prompt(prompt, prompt_file)
    if system is not None:
        check_text(system, "--system")
    from outpace.models.measured import dtype_name

    engine = model.load(drafter=drafting.spec, allow_lossy=drafting.allow_lossy)
    engine.remember()
    run = Run(engine, to_ids(engine, text, chat, system), params, sampling.reproducible)
    params.check_vocab(engine.target.vocab_size, engine.eos_ids)  # said before any remark
    remarks = notes(engine, params)
    about = {"model": engine.target.name, "dtype": dtype_name(engine.target.dtype), "notes": remarks}
    if not as_json:
        for line in remarks:
            show.note(f"outpace: {line}")
    if compare:
        sides = run.compare(quiet=as_json)
        if as_json:
            show.write_json({**sides.to_json(), **about})
        else:
            show_sides(sides)
        return
    told = Told(run) if explain else None
    results = run.quiet() if as_json else run.aloud()
    with show.then_write(out, lambda file: told.save(results[0], file) if told else None):
        if as_json:
            answer = results[0].to_json()
            if told is not None:
                answer["explain"] = told.to_json(results[0])
            if n > 1:
                answer["choices"] = [result.to_json() for result in results]
            show.write_json({**answer, **about})
        else:
            show.note(f"outpace: {summary(results)}")
            if told is not None:
                told.show(results[0])


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt's text, from the command line, a file or standard input.

    Raises:
        RequestError: none or two prompts, an empty one, one that is unreadable or no UTF-8.
    """
    if (prompt is None) == (file is None):
        raise RequestError(
            "no prompt; give one as an argument, or --prompt-file FILE (- for standard input)"
            if prompt is None
            else "two prompts, an argument and --prompt-file; give one of them"
        )
    if prompt is not None:
        check_text(prompt, "the prompt")
    if file is not None:
        if file == "-":
            prompt = decoded(sys.stdin.buffer.read(), "standard input")
        else:
            with reading(expanded(file), f"prompt file {file}", newline="") as opened:
                prompt = opened.read()
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise RequestError("the prompt is empty; give some text")
    return prompt


def check_text(text: str, what: str) -> None:
    """Raise RequestError for text of a command line or a terminal whose bytes were no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = len(text[: error.start].encode())
        raise RequestError(f"{what} is not UTF-8 text (byte {at}); convert it first") from error


def to_ids(engine: Engine, text: str, chat: bool | None, system: str | None) -> tuple[int, ...]:
    """Token ids of the prompt, in chat form if that is wanted or, unsaid, possible."""
    tokenizer = engine.target.tokenizer
    if chat is None:
        chat = system is not None or (tokenizer is not None and bool(tokenizer.chat_template))
    if not chat:
        if system is not None:
            raise RequestError("--system needs the chat form; drop it, or --raw")
        return engine.encode(text)
    if not text.strip():
        raise RequestError("the prompt is empty; give some text")
    messages = [] if system is None else [{"role": "system", "content": system}]
    return engine.encode([*messages, {"role": "user", "content": text}])


def summary(results: list[Result]) -> str:
    """One line: how much, how fast, by whom."""
    first, tokens = results[0], sum(len(result.tokens) for result in results)
    seconds = max(result.seconds for result in results)
    decode = max(result.seconds - result.prefill_seconds for result in results)
    passes = sum(result.counters.passes for result in results)
    parts = [f"{show.count(tokens, 'token')} in {seconds:.2f} s"]
    if passes:
        later = tokens - len(results)  # what prefill yields is in no pass
        parts += [f"{later / decode:.1f} tokens/s", f"mean emitted {later / passes:.2f}"]
    parts.append(f"drafter {first.drafter}")
    return ", ".join(parts if first.lossless else [*parts, LOSSY])


def show_sides(sides: Sides) -> None:
    fast, plain = sides.fast, sides.plain
    show.table(
        ("", "plain", "speculative"),
        [
            ("drafter", plain.drafter, fast.drafter),
            ("new tokens", str(len(plain.tokens)), str(len(fast.tokens))),
            ("tokens/s (decode)", f"{plain.tokens_per_second:.1f}", f"{fast.tokens_per_second:.1f}"),
            ("speed-up (decode)", "1.00 x", _times(sides.speedup)),
            ("speed-up (end to end)", "1.00 x", _times(sides.end_to_end)),
            ("mean emitted", f"{plain.counters.mean_emitted:.2f}", f"{fast.counters.mean_emitted:.2f}"),
            ("acceptance rate", "", f"{fast.counters.acceptance_rate:.0%}"),
        ],
        numbers=("plain", "speculative"),
        to_stderr=True,
    )
    same = _SAME[sides.same_tokens] if fast.lossless else f"not promised ({LOSSY})"
    show.note(f"same tokens: {same}; median of {len(sides.ratios)} runs each, in turns after a warm-up")
    if sides.disturbed:
        show.note(
            f"{show.count(sides.disturbed, 'pair')} of runs left out: something else used the machine "
            "meanwhile"
        )


def _times(speedup: float | None) -> str:
    return "unknown" if speedup is None else f"{speedup:.2f} x"


LOSSY = "lossy: not the model's own distribution"
"""What is said of a text that a lossy verifier let through."""
_SAME = {True: "yes", False: "no", None: "not promised (sampled)"}
