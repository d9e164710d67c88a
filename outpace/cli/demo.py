"""``outpace demo``: one answer written twice, side by side, plain and speculative."""

from __future__ import annotations

import html
import io
import json
import re
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli import show
from outpace.cli.drafting import DrafterOptions
from outpace.cli.generate import read_prompt, to_ids
from outpace.cli.options import AutoOptions, SamplingOptions, writes_file
from outpace.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from outpace.analysis.take import Take

PROMPT = (
    "Correct the spelling, and change nothing else: The lighthous was built in 1871 on the northern tip of "
    "the iland. The keeper lived there alone, and the suply boat came once a month. When the light was "
    "automated in 1963, the keeper left, and the house stood emty until it became a small museum."
)
_COLORS = ("#12a594", "#e5484d", "#8e4ec6", "#f5a524", "#0091ff", "#d6409f")
"""Of drafters, the busiest first; the target's own tokens have the color of plain text."""
_WIDTH = 104  # characters of a picture
EXAMPLES = """
Examples:

  outpace demo

  outpace demo "List the months." -d prompt_lookup --out months.html

  outpace demo --out demo.svg
"""


def demo(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to answer.", show_default=False)
    ] = PROMPT,
    *,
    model: AutoOptions,
    drafting: DrafterOptions,
    sampling: SamplingOptions,
    out: list[Path] = writes_file(
        [], "Write a picture (.svg) or a page that plays it (.html). Repeatable.", "-o"
    ),
) -> None:
    """Write an answer twice, plainly and speculatively, and play both side by side, at their real speeds.

    Tokens that a drafter guessed have its color.
    """
    for path in out:
        if path.suffix not in (".svg", ".html"):
            raise RequestError(f"cannot write {path}; give a name that ends in .svg or .html")
    text = read_prompt(prompt, None)
    params = sampling.params()
    engine = model.load(drafter=drafting.spec, allow_lossy=drafting.allow_lossy)
    from outpace.analysis.take import take

    ids = to_ids(engine, text, None, None)
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(48))  # so that both write the same text
    for drafter in ("none", engine.drafter):
        engine.generate(
            list(ids), replace(params, max_new_tokens=8, min_tokens=0), drafter=drafter
        )  # warm-up
    with show.busy("writing the answer twice"):
        takes = [take(engine, drafter, ids, params) for drafter in ("none", engine.drafter)]
    for path in out:
        show.save(path, _picture(takes) if path.suffix == ".svg" else _page(takes, text))
        show.note(f"wrote {path}")
    if not out:
        _play(takes)


def _frame(takes: list[Take], seconds: float, width: int) -> RenderableType:
    """Both answers at a moment."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    colors = dict(zip(takes[1].authors, _COLORS, strict=False))
    grid = Table.grid(expand=True, padding=(0, 1))
    panels = []
    for one, title in zip(takes, ("plain", takes[1].drafter), strict=True):
        answer = Text()
        for text, by in one.at(seconds):
            answer.append(text, style=colors.get(by, ""))
        there = sum(piece.seconds <= seconds for piece in one.pieces)
        done = (
            f"{one.rate:.0f} tokens/s, {one.seconds:.2f} s" if there == len(one.pieces) else f"{there} tokens"
        )
        panels.append(Panel(answer, title=title, subtitle=done, height=_height(takes, width)))
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    legend = Text("the model itself", style="bold")
    for name, color in colors.items():
        legend.append(f"   {name}", style=f"bold {color}")
    return Group(grid, legend)


def _height(takes: list[Take], width: int) -> int:
    """Lines of a panel that holds all of the longer answer, its border included."""
    wide = max(20, width // 2 - 6)
    text = max(("".join(piece.text for piece in one.pieces) for one in takes), key=len)
    return 3 + sum(1 + len(line) // (wide - 6) for line in text.split("\n"))


def _play(takes: list[Take]) -> None:
    """Play both at their real speeds, if this is a terminal; else print the end."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    last = max(one.seconds for one in takes)
    if not console.is_terminal:
        console.print(_frame(takes, last, console.width))
        return
    began = time.perf_counter()
    with Live(console=console, auto_refresh=False) as live:
        while (now := time.perf_counter() - began) < last + 0.05:
            live.update(_frame(takes, now, console.width), refresh=True)
            time.sleep(0.03)
        live.update(_frame(takes, last, console.width), refresh=True)
    console.print(f"{takes[0].seconds / takes[1].seconds:.2f} x, prompt included")


def _picture(takes: list[Take]) -> str:
    """SVG of the moment in which the sooner answer is whole."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console

    console: Console = Console(
        record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(_frame(takes, min(one.seconds for one in takes), _WIDTH))
    plain_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S)
    ratio = takes[0].seconds / takes[1].seconds
    return console.export_svg(title=f"outpace demo: {ratio:.2f} x", code_format=plain_fonts, unique_id="demo")


def _page(takes: list[Take], prompt: str) -> str:
    """One HTML file that plays both; it loads nothing."""
    data = {
        "takes": [
            {
                "title": title,
                "rate": round(one.rate, 1),
                "pieces": [[p.seconds, p.text, p.by] for p in one.pieces],
            }
            for one, title in zip(takes, ("plain", takes[1].drafter), strict=True)
        ],
        "colors": dict(zip(takes[1].authors, _COLORS, strict=False)),
    }
    inside = json.dumps(data).replace("<", "\\u003c")
    page = Path(__file__).with_name("demo.html").read_text(encoding="utf-8")
    return page.replace("PROMPT", html.escape(prompt)).replace("DATA", inside)
