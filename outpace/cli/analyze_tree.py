"""``outpace analyze tree`` and ``shape``: trees to look at, and the tree to take."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli import show
from outpace.cli.drafting import DrafterOptions, known
from outpace.cli.generate import read_prompt, to_ids
from outpace.cli.options import (
    UNDRAFTED,
    ModelOptions,
    WorkloadOptions,
    at_least,
    at_least_one,
    option,
    spread,
)
from outpace.config import DEFAULT_DRAFTER
from outpace.errors import RequestError
from outpace.params import SamplingParams

if TYPE_CHECKING:
    from outpace.analysis.picture import Trace
    from outpace.analysis.siblings import Best

_PROMPT = "Prompt"
_OUTPUT = "Output"
_COLOURS = {
    "pending": "bold",
    "accepted": "bold green",
    "added": "bold yellow",
    "refused": "bright_black",
    "unreached": "bright_black",
}

_TREE = """
Examples:

  outpace analyze tree "Name three colours." --steps 3

  outpace analyze tree "Name three colours." -d "draft_model[model=smollm2-135m layers=20]" --tree 3x2x1 --out tree.html

  outpace analyze tree -f prompt.txt -t 0.8 --out tree.svg
"""  # noqa: E501
_SHAPE = """
Examples:

  outpace analyze shape -d "draft_model[model=smollm2-135m layers=20]" --out tree.json

  outpace analyze shape -d "draft_model[model=./small]" --nodes 16 --depth 5 --out tree.json

  outpace generate -d "draft_model[model=./small]" --tree tree.json "Why is the sky blue?"
"""


def register(group: typer.Typer) -> None:
    """Add the commands to ``outpace analyze``."""
    for command, examples in ((tree, _TREE), (shape, _SHAPE)):
        group.command(epilog=examples.strip().replace("[", r"\["))(spread(command))


def tree(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text to answer.", show_default=False)
    ] = None,
    *,
    model: ModelOptions,
    drafting: DrafterOptions,
    prompt_file: Annotated[
        str | None,
        option(
            "--prompt-file",
            "-f",
            panel=_PROMPT,
            metavar="FILE",
            help="Read the prompt from a UTF-8 file, less a final newline; -: standard input.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, option("--max-new-tokens", metavar="N", help="Longest answer, tokens.")
    ] = 32,
    temperature: Annotated[
        float | None,
        option(
            "--temperature",
            "-t",
            metavar="T",
            show_default="the model's, else 0",
            help="Divides the logits; 0 always takes the likeliest token.",
        ),
    ] = None,
    seed: Annotated[int, option("--seed", metavar="S", help="The same seed gives the same text.")] = 0,
    steps: Annotated[
        int | None, option("--steps", metavar="K", show_default="all", help="Passes to show, from the first.")
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "--out",
            "-o",
            panel=_OUTPUT,
            metavar="FILE",
            help="Draw into FILE.svg, or FILE.html to step through the passes.",
        ),
    ] = None,
    as_json: Annotated[bool, option("--json", panel=_OUTPUT, help="Print one JSON object.")] = False,
) -> None:
    """Draw the token tree of every pass: what was guessed, what was kept, and how likely it was."""
    at_least_one("--steps", steps)
    if out is not None and out.suffix not in (".svg", ".html"):
        raise RequestError(f"--out {out}: give a file that ends in .svg or .html")
    params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
    text = read_prompt(prompt, prompt_file)
    spec = drafting.spec or DEFAULT_DRAFTER
    engine = model.load(drafter=spec, allow_lossy=drafting.allow_lossy)
    from outpace.analysis.picture import film

    trace = film(engine, spec, to_ids(engine, text, None, None), params, passes=steps)
    if as_json:
        show.write_json(trace.to_json())
    else:
        show_trace(trace)
    if out is not None:
        from outpace.analysis.draw_page import html
        from outpace.analysis.draw_tree import svg

        show.save(out, html(trace) if out.suffix == ".html" else svg(trace))


def show_trace(trace: Trace) -> None:
    """Draw all passes on standard output, coloured on a terminal."""
    from rich.console import Console
    from rich.text import Text

    from outpace.analysis.draw_tree import caption, lines, subtitle

    plain = not _knows(sys.stdout.encoding)
    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False)
    show.write(f"{trace.model}, drafter {trace.drafter}\n{subtitle(trace)}\n")
    for number, picture in enumerate(trace.passes, start=1):
        show.write(f"\npass {number}: {caption(picture)}\n")
        for pieces in lines(picture, plain=plain):
            if not terminal:
                show.write("".join(text for text, _ in pieces).rstrip() + "\n")
                continue
            line = Text()
            for text, role in pieces:
                line.append(text, style="dim" if role is None else _COLOURS[role])
            console.print(line)


def _knows(encoding: str | None) -> bool:
    """Whether a stream can hold the characters of a drawing."""
    try:
        "\u251c\u2500\u2514\u2502\u00b7\u21b5\u2026".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def shape(
    *,
    model: ModelOptions,
    texts: WorkloadOptions,
    drafter: Annotated[
        str,
        option(
            "--drafter",
            "-d",
            metavar="SPEC",
            help="Who guesses; one that grows trees, such as draft_model[model=M].",
        ),
    ],
    max_new_tokens: Annotated[
        int, option("--max-new-tokens", metavar="N", help="Longest answer, tokens.")
    ] = 48,
    temperature: Annotated[
        float, option("--temperature", "-t", metavar="T", help="Of both distributions.")
    ] = 0.0,
    nodes: Annotated[
        int | None,
        option(
            "--nodes",
            metavar="N",
            show_default="as many as pay here, by measured costs",
            help="Guesses per pass.",
        ),
    ] = None,
    depth: Annotated[int, option("--depth", metavar="D", help="Levels, at most.")] = 6,
    out: Annotated[
        Path | None,
        option(
            "--out",
            "-o",
            panel=_OUTPUT,
            metavar="FILE",
            help="Write the tree into FILE.json, for --tree FILE.json.",
        ),
    ] = None,
    as_json: Annotated[bool, option("--json", panel=_OUTPUT, help="Print one JSON object.")] = False,
) -> None:
    """Find the best fixed tree: which sibling is accepted how often, and what follows from it."""
    at_least_one("--nodes", nodes)
    at_least_one("--depth", depth)
    at_least(3, "--max-new-tokens", max_new_tokens, UNDRAFTED)
    if out is not None and out.suffix != ".json":
        raise RequestError(f"--out {out}: give a file that ends in .json")
    drafter = known(drafter)
    prompts = texts.read()
    engine = model.load(drafter="none")

    from outpace.analysis.siblings import find

    cases = texts.pick(engine, prompts, max_new_tokens)
    params = SamplingParams(temperature=temperature, seed=0, max_new_tokens=max_new_tokens)
    with show.progress(2 * len(cases), "prompts") as tick:
        best = find(engine, drafter, cases, params, depth=depth, nodes=nodes, tick=tick, note=show.note)
    report = {**best.to_json(), "workload": texts.workload, "prompts": len(cases)}
    if as_json:
        show.write_json(report)
    else:
        show_shape(best, len(cases))
    if out is not None:
        show.save(out, json.dumps(report, indent=1) + "\n")


def show_shape(best: Best, prompts: int) -> None:
    """Print a tree and the numbers behind it for people."""
    show.write(
        f"{best.model}, drafter {best.drafter}, temperature {best.temperature:g}: "
        f"{show.count(best.positions, 'position')} of {show.count(prompts, 'text')}\n\n"
        "Probability that a sibling is the first accepted\n"
    )
    ranks = tuple(str(rank + 1) for rank in range(len(best.acceptance)))
    show.table(ranks, [[f"{value:.3f}" for value in best.acceptance]], numbers=ranks)
    if not best.parents:
        show.write("No tree pays here: a guess costs more than it brings.\n")
        return
    rate = best.expected_tokens_per_second
    show.write(
        f"{show.count(len(best.parents), 'node')}, {show.count(best.levels, 'level')}: expected "
        f"{best.expected_emitted:.2f} tokens per pass, measured {best.mean_emitted:.2f}\n"
        + (f"expected {rate:.1f} tokens/s\n" if rate is not None else "")
        + f"{best.spec}\n"
    )
