"""``outpace analyze tree`` and ``shape``: trees to look at, and the tree to take."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli import show
from outpace.cli.drafting import DrafterOptions, known
from outpace.cli.generate import PROMPT_FILE, PromptArgument, read_prompt, to_ids
from outpace.cli.options import (
    AS_JSON,
    UNDRAFTED,
    AutoOptions,
    TrainedOptions,
    WorkloadOptions,
    at_least,
    option,
    writes_file,
)
from outpace.config import DEFAULT_DRAFTER
from outpace.errors import RequestError
from outpace.params import SamplingParams

if TYPE_CHECKING:
    from outpace.analysis.picture import Trace
    from outpace.analysis.siblings import Best

_COLOURS = {
    "pending": "bold",
    "accepted": "bold green",
    "added": "bold yellow",
    "refused": "bright_black",
    "unreached": "bright_black",
}

TREE = """
Examples:

  outpace analyze tree "Name three colours." --steps 3

  outpace analyze tree "Name three colours." -d "draft_model[model=smollm2-135m layers=20]" --tree 3x2x1 --out tree.html

  outpace analyze tree -f prompt.txt -t 0.8 --out tree.svg
"""  # noqa: E501
SHAPE = """
Examples:

  outpace analyze shape -d "draft_model[model=smollm2-135m layers=20]" --out tree.json

  outpace analyze shape -d "draft_model[model=./small]" --nodes 16 --depth 5 --out tree.json

  outpace generate -d "draft_model[model=./small]" --tree tree.json "Why is the sky blue?"
"""


def tree(
    prompt: PromptArgument = None,
    *,
    model: AutoOptions,
    drafting: DrafterOptions,
    prompt_file: str | None = PROMPT_FILE,
    max_new_tokens: int = option(32, "Longest answer, tokens."),
    temperature: float | None = option(
        None,
        "Divides the logits; 0 always takes the likeliest token.",
        "-t",
        metavar="T",
        shown="the model's, else 0",
    ),
    seed: int = option(0, "The same seed gives the same text.", metavar="S"),
    steps: int | None = option(None, "Passes to show, from the first.", metavar="K", shown="all", least=1),
    out: Path | None = writes_file(
        None, "Draw into FILE.svg, or FILE.html to step through the passes.", "-o"
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Draw the token tree of every pass: what was guessed, what was kept, and how likely it was."""
    if out is not None and out.suffix not in (".svg", ".html"):
        raise RequestError(f"--out {out}: give a file that ends in .svg or .html")
    params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
    text = read_prompt(prompt, prompt_file)
    spec = drafting.spec or DEFAULT_DRAFTER
    engine = model.load(drafter=spec, allow_lossy=drafting.allow_lossy)
    from outpace.analysis.picture import film

    trace = film(engine, spec, to_ids(engine, text, None, None), params, passes=steps)
    with show.then_write(out, partial(draw, trace)):
        show.finish(trace.to_json(), as_json, lambda: show_trace(trace))


def draw(trace: Trace, file: Path) -> None:
    """Write a picture of a trace, or a page where the file ends in .html."""
    from outpace.analysis.draw_page import html
    from outpace.analysis.draw_tree import svg

    show.save(file, html(trace) if file.suffix == ".html" else svg(trace))


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
    model: TrainedOptions,
    texts: WorkloadOptions,
    drafter: str = option(
        ..., "Who guesses; one that grows trees, such as draft_model[model=M].", "-d", metavar="SPEC"
    ),
    max_new_tokens: int = option(48, "Longest answer, tokens."),
    temperature: float = option(0.0, "Of both distributions.", "-t", metavar="T"),
    nodes: int | None = option(
        None, "Guesses per pass.", shown="as many as pay here, by measured costs", least=1
    ),
    depth: int = option(6, "Levels, at most.", metavar="D", least=1),
    out: Path | None = writes_file(None, "Write the tree into FILE.json, for --tree FILE.json.", "-o"),
    as_json: bool = AS_JSON,
) -> None:
    """Find the best fixed tree: which sibling is accepted how often, and what follows from it."""
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
    folder, name = (None, "") if out is None else (out.parent, out.stem)
    show.finish(report, as_json, lambda: show_shape(best, len(cases)), folder, name)


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
