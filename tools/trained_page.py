"""The page of `trained_table.py`: one table of all drafters, a plot, and what their papers say."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pages import filled
from trained_papers import PAPERS

from outpace.bench.plots import COLOURS, MARKERS, paint
from outpace.files import write_whole

SHOWN = 3
"""Depths in a cell."""
CLOSE = 0.05
"""Most that acceptance in use may differ from that of held-out texts without a reason."""

Row = dict[str, Any]


def write(asked: Any, rows: Sequence[Row]) -> None:
    """Write the page, its picture, and the figures as JSON beside the page, without the curves of losses."""
    rows = sorted(rows, key=lambda row: -row["use"]["default"]["emitted"])
    figures = [{**row, "trained": {**row["trained"], "losses": []}} for row in rows]
    write_whole(asked.page.with_suffix(".json"), json.dumps(figures, indent=1) + "\n")
    write_whole(asked.page, "\n".join(page(asked, rows)) + "\n")
    with tempfile.TemporaryDirectory() as place:
        images = asked.page.parents[1] / "images"
        for path in paint({asked.page.stem: partial(picture, rows=rows)}, Path(place)):
            if path.suffix == ".svg":
                write_whole(images / path.name, path.read_bytes())
            else:
                write_whole(asked.out / path.name, path.read_bytes())


def token_sets(rows: Sequence[Row]) -> dict[str, tuple[str, int]]:
    """Digest of each set of tokens that rows were trained on -> its letter, and its answer tokens."""
    sets = {_digest(row): row["trained"]["data"]["answer_tokens"] for row in rows}
    order = sorted(sets, key=sets.__getitem__)
    return {digest: (letter, sets[digest]) for digest, letter in zip(order, "ABCDEFGH", strict=False)}


def _digest(row: Row) -> str:
    digest: str = row["trained"]["data"]["digest"]
    return digest


def page(asked: Any, rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the report."""
    sets, use = token_sets(rows), rows[0]["use"]
    counts = [f"{count:,} ({letter})" if len(sets) > 1 else f"{count:,}" for letter, count in sets.values()]
    same = f"on {len(sets)} sets of answer tokens" if len(sets) > 1 else "on the same answer tokens"
    yield "# Trained drafters at equal time\n"
    yield filled(
        f"All for {asked.model}, {same} of the target's own, made by the same command: "
        f"{' and '.join(counts)}. All have the same {asked.minutes:g} minutes of one thread. A short trial "
        "says how many steps these are. Features of the target were computed once, before, and their time "
        "does not count. The command:"
    )
    yield "\n```text"
    yield "outpace train eagle3 --only-data --prompts FILE::LICENCE ... --texts FILE::LICENCE ... --work WORK"
    yield f"python tools/trained_table.py {' '.join(_told(asked))} --page docs/results/{asked.page.name}"
    yield "```\n"
    if asked.minutes < FULL:
        short = (
            f"**{asked.minutes:g} minutes are short.** Of methods that need longer, the table tells how they "
        )
        yield filled(
            f"{short}begin and not where they end. `--minutes {FULL}` compares them with time enough.\n"
        )
        yield ""
    picture = f"../images/{asked.page.stem}.svg"
    yield f"![Emitted tokens by the cost of drafting, and acceptance in use]({picture})\n"
    heads = ["drafter", *["tokens"] * (len(sets) > 1), "steps", "epochs", "MB"]
    heads += ["held-out", "in use", "chain", "as it comes", "drafting"]
    yield "| " + " | ".join([*heads, "a level", "speed-up"]) + " |"
    yield "|---" * (len(heads) + 2) + "|"
    for row in rows:
        letter = f"| {sets[_digest(row)][0]} " if len(sets) > 1 else ""
        yield f"| `{row['row']}` {letter}{_line(row)}"
    yield ""
    for point in _explained(asked, rows, use):
        yield filled(f"- {point}", "  ")
    held = [_apart(row) for row in rows]
    wrong = [f"`{row['row']}` ({apart:.2f})" for row, apart in zip(rows, held, strict=True) if apart > CLOSE]
    if wrong:
        yield f"\nFirst guesses in use differ from held-out ones by more than {CLOSE:g}: {', '.join(wrong)}."
    else:
        yield f"\nNo first guess in use differs from the held-out one by more than {max(held):.3f}."
    yield "\n## Beside the papers\n"
    yield "| drafter | the paper says | here |"
    yield "|---|---|---|"
    for name in dict.fromkeys(row["row"] for row in rows):
        paper, here = PAPERS[name.split()[0]]
        yield f"| `{name}` | {paper} | {here} |"


def _explained(asked: Any, rows: Sequence[Row], use: dict[str, Any]) -> Iterator[str]:
    """What the columns are."""
    yield (
        f"*Held-out* and *in use*: conditional acceptance of guesses 1 to {SHOWN}, greedy. Both count the "
        f"guesses at every token of the same {use['prompts']} answers of {use['max_new_tokens']} tokens. One "
        "is the training graph, the other the drafter."
    )
    yield (
        "*Chain* and *as it comes*: tokens per pass of the target, with chains of five guesses and with the "
        "method's own shape."
    )
    yield f"All rows have {' and '.join(f'`{one}`' for one in asked.shared)}, whatever suits them best."
    if many := [f"`{row['row']}`" for row in rows if row["trained"]["epochs"] > MANY]:
        yield (
            f"{', '.join(many)} read the texts more than {MANY} times. More texts may help them more than "
            "more minutes."
        )
    yield "*Drafting* and *a level*: what they take, in passes of plain decoding, as it comes."
    yield "*Speed-up*: over plain decoding in the same process, in turns, prompt by prompt, one thread."
    if asked.loaded:
        noise = max(row["use"]["noise"] or 0 for row in rows)
        yield (
            "Other programs ran beside: counts hold, times are rough. Plain decoding differed from itself by "
            f"up to {noise:.0%} on a prompt."
        )
    names = {row["row"] for row in rows}
    if missing := [f"`{row}`" for row in asked.rows if row not in names]:
        yield f"Not run: {', '.join(missing)}."
    for name in sorted(name for name in names if [row["row"] for row in rows].count(name) > 1):
        steps = [f"{row['plan']['step_seconds']:.2f} s" for row in rows if row["row"] == name]
        yield (
            f"`{name}` was trained on each set, to see how far sets and processors differ. In the order of "
            f"the table, a step took {' and '.join(steps)}."
        )
    most = max(row["trained"]["peak_memory_bytes"] for row in rows)
    yield f"No training took more than {most / 1e9:.1f} GB of memory."


FULL = 30
"""Minutes that would be enough."""
MANY = 10
"""Epochs from which a row is named: four such rows ended at 0.1 to 0.6 of their held-out loss."""


def _told(asked: Any) -> list[str]:
    """The arguments, with names in place of the folders of this machine."""
    names = {"--work": "WORK", "--out": "DRAFTERS"}
    told = list[str]()
    for before, one in zip(["", *asked.given], asked.given, strict=False):
        if one not in ("--page", "--page-only", "--loaded") and before != "--page":
            told.append(names.get(before, f'"{one}"' if " " in one else one))
    return told


def _line(row: Row) -> str:
    plan, trained, use = row["plan"], row["trained"], row["use"]
    shaped = use["default"]
    cells = [
        str(plan["steps"]),
        f"{trained['epochs']:.1f}",
        f"{trained['weights_bytes'] / 1e6:.1f}",
        " ".join(f"{one:.2f}" for one in use["held_out"][:SHOWN]),
        " ".join(f"{one:.2f}" for one in use["in_use"][:SHOWN]),
        f"{use['chain']['emitted']:.2f}",
        f"{shaped['emitted']:.2f}",
        f"{shaped['drafting']:.2f}",
        "-" if shaped["level"] is None else f"{shaped['level']:.2f}",
        "-" if shaped["speedup"] is None else f"{shaped['speedup']:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _apart(row: Row) -> float:
    """How far the first guess in use is from the held-out one."""
    use = row["use"]
    return abs((use["in_use"] or [0.0])[0] - (use["held_out"] or [0.0])[0])


def picture(figure: Any, rows: Sequence[Row]) -> bool:
    """Emitted by the cost of drafting, and the first guess in use by the held-out one."""
    figure.set_size_inches(10, 4.6)
    cost, close = figure.subplots(1, 2)
    points = [(row["use"]["default"]["drafting"], row["use"]["default"]["emitted"]) for row in rows]
    _scatter(cost, points, rows)
    most = max(x for x, _ in points) * 1.15
    cost.plot([0, most], [1, 1 + most], color="#999999", lw=1, ls="--")
    cost.set_ylim(0.95, max(y for _, y in points) * 1.05)
    cost.set_title("below the line drafting costs more than it brings", loc="left", fontsize="medium")
    cost.set_xlabel("drafting, in plain passes per step")
    cost.set_ylabel("tokens per pass, as it comes")
    points = [(row["use"]["held_out"][0], row["use"]["in_use"][0]) for row in rows if row["use"]["in_use"]]
    _scatter(close, points, [row for row in rows if row["use"]["in_use"]])
    ends = [0.0, max(max(point) for point in points) + 0.05]
    close.plot(ends, ends, color="#999999", lw=1)
    close.fill_between(
        ends, [e - CLOSE for e in ends], [e + CLOSE for e in ends], color="#999999", alpha=0.15
    )
    close.set_title("first guess", loc="left", fontsize="medium")
    close.set_xlabel("held-out acceptance")
    close.set_ylabel("acceptance in use")
    handles = {label: handle for handle, label in zip(*cost.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside right center", fontsize="small")
    return True


def _scatter(axes: Any, points: Sequence[tuple[float, float]], rows: Sequence[Row]) -> None:
    names = sorted({row["row"] for row in rows})
    for (x, y), row in zip(points, rows, strict=True):
        number = names.index(row["row"])
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number // 3 % len(MARKERS)]}
        axes.scatter([x], [y], s=46, label=row["row"], zorder=3, **style)
