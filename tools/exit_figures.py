"""Writes what a model of `outpace train target` is worth: losses of its exits, and speed-ups of its drafters.

    outpace bench --model OUT --workload OUT/prompts.jsonl --drafters none,... --repeat 3 --out REPORT
    python tools/exit_figures.py --model OUT --texts stories.txt --reports REPORT ... --out PAGE

Losses are those of the pieces that were kept from training: the files are split as the training split
them. The speed-ups are those of the reports, one per temperature and type. No row of them is left out.

Shape letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trained_papers
from pages import publish, told, tool
from readme_results import command

from outpace import Engine
from outpace.bench.plots import COLOURS, MARKERS
from outpace.errors import ModelError, RequestError
from outpace.files import parse_json, read_text
from outpace.models.base import Target
from outpace.train.target import Texts
from outpace.types import Feed

WINDOW = 256
"""Tokens of a held-out text that are read at once, from nothing."""
PAPERS = {
    "early_exit": "up to 2.16 x: LayerSkip, Llama-2-7B tuned on 52 billion tokens, CNN/DM, A100",
    "s2d": trained_papers.PAPERS["s2d"][0],
    "s3d": trained_papers.PAPERS["s3d"][0],
    "kangaroo": trained_papers.PAPERS["kangaroo"][0],
    "layer_skip": "1.99 x: Self-SD, Llama-2-70B, A100; SWIFT 1.3 to 1.6 x: LLaMA-2-13B and 70B",
}
"""What papers report, and where."""
ASKED = 1.7
"""The speed-up that is asked of a model that was made for it."""
LITTLE = 0.01
"""Share of the perplexity below which deep layers are said to bring little."""

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExitLoss:
    """What an exit says of held-out text."""

    layer: int
    loss: float
    """Nats per token."""
    same: float
    """Share of places where its likeliest token is the whole model's."""
    overlap: float
    """Mean of sum min(p, q): what sampling at temperature 1 keeps of its guesses."""


def held_out(files: Sequence[Path], target: Target) -> list[list[int]]:
    """Windows of the pieces that training kept apart.

    Raises:
        RequestError: no file has so many pieces that one was.
    """
    texts, tokenizer = Texts(), target.tokenizer
    assert tokenizer is not None
    for file in files:
        read_text(file)  # says what is wrong with it
        texts.read(file)
    ids = [tokenizer.encode(one) for one in texts.held_out]
    windows = [one[at : at + WINDOW] for one in ids for at in range(0, len(one), WINDOW)]
    if not windows:
        raise RequestError("no piece of these texts was kept from training; give the files of the training")
    return [one for one in windows if len(one) > 1]


def losses(target: Target, layers: Sequence[int], windows: Sequence[Sequence[int]]) -> list[ExitLoss]:
    """Read the windows with the first layers, and with all."""
    parts = [*(target.variant(layers=range(layer)) for layer in layers), target]
    sums = [[0.0, 0.0, 0.0] for _ in parts]
    for window in windows:
        logs = []
        for part in parts:
            cache = part.new_cache()
            feed = Feed.chain(cache.open(), list(window), want=range(len(window) - 1))
            logs.append(part.score([feed], cache).logits_TV.float().log_softmax(-1).clone())
        whole_TV = logs[-1]
        for total, log_TV in zip(sums, logs, strict=True):
            total[0] -= sum(log_TV[i, id].item() for i, id in enumerate(window[1:]))
            total[1] += (log_TV.argmax(1) == whole_TV.argmax(1)).sum().item()
            total[2] += log_TV.exp().minimum(whole_TV.exp()).sum().item()
    count = sum(len(window) - 1 for window in windows)
    return [
        ExitLoss(layer, *(one / count for one in total))
        for layer, total in zip((*layers, target.num_layers), sums, strict=True)
    ]


def load_report(path: Path) -> Report:
    """A report of `outpace bench`.

    Raises:
        RequestError: it is none.
    """
    file = path / "report.json" if path.is_dir() else path
    report = parse_json(read_text(file))
    if not isinstance(report, dict) or not report.get("paired"):
        raise RequestError(f"{file} is no report of outpace bench; give what its --out wrote")
    return report


def round_cost(row: Report) -> float:
    """What a draft and its verification cost, in steps of plain decoding."""
    return float(row["mean_emitted"] / row["speedup"])


def chance_of(tokens: float, depth: float) -> float | None:
    """How likely each guess of a chain is right that brings so many tokens; None: 1 is not enough."""
    low, high = 0.0, 1.0
    if tokens > 1 + depth:
        return None
    while high - low > 1e-4:
        chance = (low + high) / 2
        mean = (1 - chance ** (depth + 1)) / (1 - chance)
        low, high = (chance, high) if mean < tokens else (low, chance)
    return high


def drafting(row: Report) -> tuple[float, float]:
    """Shares of the time: passes that draft, and the host's work for them."""
    shares = row["verb_shares"]
    return shares["draft_pass"], shares["draft_host"]


def best_of(report: Report) -> dict[str, Report]:
    """The fastest row of each method: spec without settings -> row."""
    best: dict[str, Report] = {}
    for row in report["rows"]:
        name = row["method"].partition("[")[0]
        if name != "none" and row["speedup"] > best.get(name, {"speedup": 0})["speedup"]:
            best[name] = row
    return best


def page(
    provenance: Report, exits: Sequence[ExitLoss], reports: Sequence[Report], typed: str, note: str = ""
) -> Iterator[str]:
    """The lines of the page.

    Args:
        typed: the command that made the model.
        note: more to say of the training.
    """
    yield "# A target that drafts for itself\n"
    held, said = provenance.get("held_out") or {}, reports[0]["provenance"]
    trained = set(provenance["exits"])
    start = provenance.get("start", "none")
    config = reports[0]["provenance"]["config"]
    texts = ", ".join(provenance["texts"])
    yield told(
        f"`outpace train target` made a decoder of {provenance['weights'] / 1e6:.1f} million weights from "
        + ("" if start == "none" else f"{start} and ")
        + f"{provenance['tokens']} tokens of {texts}: {provenance['steps']} steps in "
        f"{held.get('seconds', math.nan) / 60:.0f} minutes of one thread, beside other programs. Prompts are "
        f"beginnings of held-out pieces; every answer has {config['max_new_tokens']} tokens."
        + f" {note}".rstrip()
    )
    commands = [
        re.sub(r"--(model|workload) \S*/", r"--\1 ", command(one["provenance"]["command"])) for one in reports
    ]
    yield "```text\n" + "\n".join([typed, *dict.fromkeys(commands)]) + "\n```\n"
    yield "![Speed-up by the tokens of a round](../images/own-layers.svg)\n"
    yield "## What the exits know\n"
    yield told(
        "Held-out text. *Same* counts the places where the exit's likeliest token is that of the whole "
        "model. *Overlap* is what sampling at temperature 1 keeps of its guesses. Layers in brackets had no "
        "loss of their own."
    )
    yield "| layers | loss | perplexity | same | overlap |\n|---|---|---|---|---|"
    *parts, whole = exits
    for one in exits:
        shares = f"{one.same:.3f} | {one.overlap:.3f}"
        layer = f"{one.layer}" if one is whole or one.layer in trained else f"({one.layer})"
        yield f"| {layer} | {one.loss:.3f} | {math.exp(one.loss):.1f} | {shares} |"
    last = [one for one in parts if one.layer in trained][-1]
    gain = 1 - math.exp(whole.loss - last.loss)
    yield ""
    yield told(
        f"The {whole.layer - last.layer} layers behind the last exit lower the perplexity by {gain:.1%}."
        + (
            " That is little, so the speed-up of this exit tells of the machine and not of the recipe: its "
            "guesses are right because the whole model says little else."
            if gain < LITTLE
            else ""
        )
    )
    for report in reports:
        yield from _table(report)
    yield "## Beside the papers\n"
    yield told(
        "*A round* is a draft with its verification, in steps of plain decoding. *Drafting* is its share of "
        "the time: passes, and the host's work."
    )
    yield "| drafter | the paper says | here | a round | drafting |"
    yield "|---|---|---|---|---|"
    for name, row in ((name, row) for name, row in best_of(reports[0]).items() if name in PAPERS):
        passes, host = drafting(row)
        yield (
            f"| `{row['method']}` | {PAPERS.get(name, '')} | {row['speedup']:.2f} x, "
            f"{row['mean_emitted']:.2f} per pass | {round_cost(row):.2f} | {passes:.0%}, {host:.0%} |"
        )
    yield ""
    yield f"## What {ASKED:g} x takes\n"
    yield told(
        "A round that costs R plain steps has to bring S R tokens to be S times as fast. *Needed* is how "
        f"likely each guess of a chain as long as these has to be right for {ASKED:g} x, and for 1 x. *Here* "
        "is the chance that gives the tokens per pass measured."
    )
    yield f"| drafter | guesses a pass | a round | needed for {ASKED:g} x | for 1 x | here |"
    yield "|---|---|---|---|---|---|"
    for row in reports[0]["rows"]:
        if row["method"].startswith("early_exit") and row["drafted"] and not row["reproducible"]:
            depth, cost = row["drafted"] / row["passes"], round_cost(row)
            found = [chance_of(one, depth) for one in (ASKED * cost, cost, row["mean_emitted"])]
            shares = " | ".join("more than all" if one is None else f"{one:.2f}" for one in found)
            yield f"| `{row['method']}` | {depth:.1f} | {cost:.2f} | {shares} |"
    yield ""
    yield told(
        f"Measured on {said['cpu']}, threads: {said['threads']}, {said['date'][:10]}, preferred by the "
        "system before other programs."
    ).rstrip()


def _table(report: Report) -> Iterator[str]:
    """One report."""
    said, floor = report["provenance"], report["noise_floor"]
    config = said["config"]
    plain = next(row for row in report["rows"] if row["method"] == "none")
    looped = plain["units"] - (plain["without_loops"] or {"units": 0})["units"]
    yield f"## Temperature {config['temperature']:g}, {said['dtype']}\n"
    low, high = floor["speedup_interval"] or (floor["speedup"],) * 2
    yield told(
        f"{plain['sequences']} answers. {plain['looping']:.1%} of the plain tokens repeat a period; {looped} "
        f"of {plain['units']} prompts lead to a text with more than a fifth of them. The column *no "
        f"loops* is without these. Plain decoding against itself: {floor['speedup']:.3f} ({low:.3f} to "
        f"{high:.3f})."
    )
    yield "| drafter | speed-up | no loops | per pass | kept | guesses a pass | equal to plain |"
    yield "|---|---|---|---|---|---|---|"
    rows = [row for row in report["rows"] if row["method"] != "none"]
    for row in sorted(rows, key=lambda row: (row["reproducible"], -row["speedup"])):
        calm, span = row["without_loops"] or {}, row["speedup_interval"]
        span = "" if span is None else f" ({span[0]:.2f} to {span[1]:.2f})"
        name = f"`{row['method']}`" + (", reproducible" if row["reproducible"] else "")
        equal = "" if row["equal_to_none"] is None else f"{row['equal_to_none']:.0%}"
        yield (
            f"| {name} | {row['speedup']:.2f}{span} | {calm.get('speedup') or math.nan:.2f} | "
            f"{row['mean_emitted']:.2f} | {row['acceptance_rate'] or 0:.2f} | "
            f"{row['drafted'] / max(1, row['passes']):.1f} | {equal} |"
        )
    yield ""


def picture(figure: Any, reports: Sequence[Report]) -> bool:
    """What a round costs by what it brings; lines are equal speed-ups."""
    figure.set_size_inches(6.4, 4.4)
    axes = figure.add_subplot()
    rows = [row for row in reports[0]["rows"] if row["method"] != "none"]
    names = list(dict.fromkeys(row["method"].partition("[")[0] for row in rows))
    for i, name in enumerate(names):
        own = [row for row in rows if row["method"].partition("[")[0] == name]
        x, y = [round_cost(row) for row in own], [row["mean_emitted"] for row in own]
        axes.plot(x, y, MARKERS[i % len(MARKERS)], color=COLOURS[i % len(COLOURS)], label=name, ms=6)
    most = 1.08 * max(round_cost(row) for row in rows)
    for speed in (1.0, 1.5, 2.0):
        axes.plot([1, most], [speed, speed * most], color="#999999", lw=0.8, ls="--", zorder=0)
        axes.annotate(f"{speed:g} x", (most, speed * most), color="#666666", fontsize=8)
    axes.set_xlabel("cost of a draft and its verification, in plain steps")
    axes.set_ylabel("tokens per pass")
    axes.legend(fontsize=8)
    return bool(rows)


@tool
def main(arguments: list[str] | None = None) -> None:
    """Read, compute, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of outpace train target")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="files it was trained on")
    parser.add_argument("--reports", type=Path, nargs="+", required=True, help="of outpace bench")
    parser.add_argument("--note", default="", help="more to say of the training")
    parser.add_argument("--plot", type=Path, help="folder for the picture")
    parser.add_argument("--out", type=Path, help="write the page, besides printing it")
    args = parser.parse_args(arguments)
    reports = [load_report(path) for path in args.reports]
    file = args.model / "provenance.json"
    provenance = json.loads(read_text(file))
    if "exits" not in provenance:
        raise ModelError(f"{file} names no exits; give a folder of outpace train target")
    target = Engine.load(str(args.model), drafter="none", dtype="bfloat16").target
    deep = target.num_layers
    layers = sorted({*provenance["exits"], *(deep * i // 5 for i in (2, 3, 4))})
    exits = losses(target, layers, held_out(args.texts, target))
    typed = " ".join(["outpace train target --texts", *(path.name for path in args.texts), "--out OUT"])
    lines = page(provenance, exits, reports, typed, args.note)
    publish(lines, args.out, {"own-layers": partial(picture, reports=reports)}, args.plot)


if __name__ == "__main__":
    sys.exit(main())
