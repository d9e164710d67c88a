"""The page and the picture of `tools/view_figures.py`; imported, not run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pages import told

from outpace.bench.plots import COLOURS, MARKERS, paint
from outpace.bench.stats import prompt_interval

Row = dict[str, Any]


def page(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the report."""
    runs = drafted(rows)
    texts, contexts = names(runs, "text"), sorted({row["context"] for row in runs})
    methods = [one for one in names(runs, "method") if one != "none"]
    yield "# Views of long texts\n"
    yield told(
        f"SmolLM2-135M, temperature 0. {len(texts)} texts: {', '.join(texts)}. Three tasks each: going on "
        "with the text, a fact hidden near its beginning, and a question about its passages. One thread; "
        "seconds are of the processor, and every run stands beside a plain one. Intervals resample texts "
        "(95 %). Where a view leaves nothing out there is no figure."
    )
    yield "```text"
    yield "python tools/view_figures.py --texts FILES --keep rows.jsonl --kept FOLDER --minutes 3"
    yield "python tools/view_figures.py --keep rows.jsonl --out docs/results/views.md --plot docs/images"
    yield "```\n"
    same = sum(row["same"] for row in runs)
    yield told(f"{same} of {len(runs)} texts are those of plain decoding, token by token.")
    yield "![Speed-up and acceptance of views by context](../images/views.svg)\n"
    yield "## Speed-up\n"
    yield "| drafter | " + " | ".join(f"{context} tokens" for context in contexts) + " |"
    yield "|---|" + "---|" * len(contexts)
    for method in ("none", *methods):
        cells = [shown(pick(runs, method=method, context=context), "speedup") for context in contexts]
        yield f"| `{method}` | " + " | ".join(cells) + " |"
    yield ""
    for method in methods:
        first = pays_from(runs, method, contexts)
        where = f"pays from {first} tokens of context on" if first else "pays at none of these contexts"
        yield f"- `{method}` {where}."
    yield "\n## Acceptance\n"
    yield told("Share of guesses kept, and tokens per pass of the whole model.")
    yield "| drafter | " + " | ".join(f"{context} tokens" for context in contexts) + " |"
    yield "|---|" + "---|" * len(contexts)
    for method in methods:
        cells = []
        for context in contexts:
            some = pick(runs, method=method, context=context)
            cells.append(f"{mean(some, 'accepted'):.2f}, {mean(some, 'emitted'):.2f}" if some else "")
        yield f"| `{method}` | " + " | ".join(cells) + " |"
    yield f"\n## By task, {contexts[-1]} tokens\n"
    tasks = names(runs, "task")
    yield "| drafter | " + " | ".join(f"{task}: kept | speed-up" for task in tasks) + " |"
    yield "|---|" + "---|" * (2 * len(tasks))
    for method in methods:
        cells = []
        for task in tasks:
            some = pick(runs, method=method, context=contexts[-1], task=task)
            cells.append(f"{mean(some, 'accepted'):.2f} | {shown(some, 'speedup')}" if some else " | ")
        yield f"| `{method}` | " + " | ".join(cells) + " |"
    found = pick([row for row in runs if row["task"] == "fact"], context=contexts[-1], method=methods[0])
    yield ""
    yield told(
        f"The model itself says the hidden fact in {sum(row['found'] for row in found)} of {len(found)} "
        f"texts of {contexts[-1]} tokens."
    )
    yield from passes(rows)
    yield from lossy(rows)
    yield from scores(rows)
    yield from rules(rows)


def passes(rows: Sequence[Row]) -> Iterator[str]:
    """What a pass costs by context and by what it sees."""
    some = sorted((row for row in rows if "pass_at" in row), key=lambda row: row["pass_at"])
    if not some:
        return
    kinds = list(dict.fromkeys(name for row in reversed(some) for name in row["cpu_ms"]))
    yield "## Cost of a pass\n"
    yield told("Milliseconds of the processor, the least of six. *Choosing* is the pass that selects anew.")
    yield "| rows and what they see | " + " | ".join(f"{row['pass_at']} tokens" for row in some) + " |"
    yield "|---|" + "---|" * len(some)
    for name in kinds:
        cells = [f"{row['cpu_ms'][name]:.1f}" if name in row["cpu_ms"] else "" for row in some]
        yield f"| {name} | " + " | ".join(cells) + " |"
    yield ""


def lossy(rows: Sequence[Row]) -> Iterator[str]:
    """What views in the place of the whole text bring and lose."""
    some = [row for row in rows if str(row.get("method", "")).startswith("lossy")]
    if not some:
        return
    yield "## Lossy: `token_select[lossy=true]`\n"
    yield told("Along the plain text of all tasks: mean KL, share of equal likeliest tokens, speed-up.")
    yield "| context | tokens seen | KL | equal | speed-up |"
    yield "|---|---|---|---|---|"
    for context in sorted({row["context"] for row in some}):
        for method in sorted(names(some, "method"), key=lambda one: int(one.split()[1])):
            own = pick(some, context=context, method=method)
            if own:
                seen = method.split()[1]
                cells = f"{mean(own, 'kl'):.4f} | {mean(own, 'agree'):.3f} | {shown(own, 'speedup')}"
                yield f"| {context} | {seen} | {cells} |"


def scores(rows: Sequence[Row]) -> Iterator[str]:
    """What a view in the place of the whole text makes of things that are true."""
    some = [row for row in rows if str(row.get("method", "")).startswith("score")]
    if not some:
        return
    yield "\n### What it tells of the truth\n"
    yield told(
        "Nats per token of what is true. *Continue*: the file's own next tokens. *Fact*: the hidden number, "
        "after the beginning of the right answer. *Full* is the target that sees all."
    )
    tasks = names(some, "task")
    yield "| context | tokens seen | " + " | ".join(f"{task}: full | view | KL" for task in tasks) + " |"
    yield "|---|---|" + "---|" * (3 * len(tasks))
    for context in sorted({row["context"] for row in some}):
        for method in sorted(names(some, "method"), key=lambda one: int(one.split()[1])):
            groups = [pick(some, context=context, method=method, task=task) for task in tasks]
            if all(groups):
                cells = [
                    f"{mean(own, 'truth'):.2f} | {mean(own, 'truth_seen'):.2f} | {mean(own, 'kl'):.4f}"
                    for own in groups
                ]
                yield f"| {context} | {method.split()[1]} | " + " | ".join(cells) + " |"


def rules(rows: Sequence[Row]) -> Iterator[str]:
    """What other ways of choosing lose and cost."""
    some = [row for row in rows if str(row.get("method", "")).startswith("rule")]
    if not some:
        return
    yield "\n### Other ways to choose\n"
    yield told(
        f"1024 of {some[0]['context']} tokens, the files' own text. *Read* are coordinates of keys, 0 "
        "for all 64. *Run* are neighbours chosen together, and *every* counts tokens from choice to choice."
    )
    yield "| settings | KL | equal | speed-up |"
    yield "|---|---|---|---|"
    for method in names(some, "method"):
        own, settings = pick(some, method=method), method.removeprefix("rule ")
        name = f"`{settings}`" if settings else "**the default**"
        yield f"| {name} | {mean(own, 'kl'):.4f} | {mean(own, 'agree'):.3f} | {shown(own, 'speedup')} |"


def drafted(rows: Sequence[Row]) -> list[Row]:
    """Runs of plain decoding, and of drafters that guessed all along."""
    runs = [
        row for row in rows if "speedup" in row and not row["method"].startswith(("lossy", "score", "rule"))
    ]
    return [row for row in runs if row["method"] == "none" or row["emitted"] > 1.05]


def names(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def pick(rows: Sequence[Row], **key: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in key.items())]


def mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def interval(rows: Sequence[Row], key: str) -> tuple[float, float] | None:
    """Of the mean over texts; None for a few."""
    texts = names(rows, "text")
    return prompt_interval([row[key] for row in rows], [texts.index(row["text"]) for row in rows])


def shown(rows: Sequence[Row], key: str) -> str:
    """Mean and interval."""
    if not rows:
        return ""
    reach = interval(rows, key)
    more = "" if reach is None else f" ({reach[0]:.2f} to {reach[1]:.2f})"
    return f"{mean(rows, key):.2f}{more}"


def pays_from(rows: Sequence[Row], method: str, contexts: Sequence[int]) -> int | None:
    """The least context from which on the whole interval of the speed-up lies above 1."""
    first = None
    for context in reversed(contexts):
        some = pick(rows, method=method, context=context)
        reach = interval(some, "speedup") if some else None
        if reach is None or reach[0] <= 1:
            break
        first = context
    return first


def paint_views(rows: Sequence[Row], out: Path) -> list[Path]:
    """Write the picture as PNG and as SVG."""
    return paint({"views": partial(picture, runs=drafted(rows))}, out)


def picture(figure: Any, runs: Sequence[Row]) -> bool:
    """Speed-up with intervals, and share of guesses kept, by context."""
    contexts = sorted({row["context"] for row in runs})
    if not contexts:
        return False
    figure.set_size_inches(10, 4.2)
    left, right = figure.subplots(1, 2)
    methods = [one for one in names(runs, "method") if one != "none"]
    for i, method in enumerate(methods):
        groups = [(c, some) for c in contexts if (some := pick(runs, method=method, context=c))]
        x = [context * 1.02 ** (i - len(methods) / 2) for context, _ in groups]
        y = [mean(some, "speedup") for _, some in groups]
        ends = [interval(some, "speedup") or (v, v) for (_, some), v in zip(groups, y, strict=True)]
        errors = [
            [v - low for v, (low, _) in zip(y, ends, strict=True)],
            [high - v for v, (_, high) in zip(y, ends, strict=True)],
        ]
        look = {"color": COLOURS[i], "marker": MARKERS[i % len(MARKERS)], "ms": 5, "lw": 1.4, "label": method}
        left.errorbar(x, y, yerr=errors, capsize=2, **look)
        right.plot(x, [mean(some, "accepted") for _, some in groups], **look)
    left.axhline(1.0, color="#000000", lw=1.2, ls="--")
    left.set_ylabel("speed-up over plain decoding")
    right.set_ylabel("share of guesses kept")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [str(context) for context in contexts])
        axes.minorticks_off()
        axes.set_xlabel("tokens of context")
    right.set_ylim(0, 1)
    left.legend(fontsize="small")
    return True
