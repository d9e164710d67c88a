"""Compare settings of a training at equal steps: tables of held-out acceptance, and a page of them.

    python tools/ablations.py --work WORK --out ROWS --page docs/results/ablations.md
    python tools/ablations.py divergences --work WORK --out ROWS
    python tools/ablations.py eagle3 --work WORK --out ROWS --steps 400 --try steps=5 --try noise=0.1

The first command runs all studies of this file, and the second one of them. The third one compares settings
of a method with its own, in the first row. All rows learn from the same tokens, with the same draft
vocabulary, one process after another. What is finished is not done again, and what was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import trained_table
from pages import filled, tool
from safetensors import safe_open

from outpace.bench.plots import COLOURS, paint
from outpace.errors import OutpaceError
from outpace.files import write_whole
from outpace.train.tokens import TokenStore

IMAGE = "ablations"
PROBE = "probe.safetensors"
"""What `probe_layers.py` writes. In settings ``{probe}`` is this file, and ``{layers}`` are its layers."""
SHARED = ("pipeline.tokens_per_batch=1024",)
"""Settings of all rows; a row's own come later and win."""
HEADS = ("settings", "guesses 1, 2, 3", "chain", "alpha", "held-out loss", "minutes")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Study:
    """Rows of one method that are compared with the first of them."""

    name: str
    title: str
    method: str
    steps: int
    rows: tuple[str, ...]
    """Settings of each; none: the method's own."""
    about: str = ""
    """What is compared."""
    brought: str = ""
    """What came of it where the page was made."""


DISTANCES = ("kl", "rkl", "jsd", "tv")
STUDIES = (
    Study(
        "recipe",
        "The recipe of eagle3",
        "eagle3",
        300,
        (
            *("", "steps=1", "steps=5", "steps=7", "refused=2", "refused=4", "noise=0.1"),
            *("loop.lr=0.002", "loop.lr=0.004", "loop.optimizer=muon", "loop.optimizer=muon loop.lr=0.002"),
        ),
        "The network is trained behind itself for 3 levels at a rate of 0.0005, unless said. Rows differ in "
        "the weight of guesses behind a refused one, in noise on the features, and in the optimizer.",
        "The rate matters most: 0.002 brings 0.11 tokens per pass, 0.004 hardly less. Muon loses at the "
        "usual rate. One level alone makes the first guess better and all later ones useless. Five are no "
        "better than three within so few steps. Weights behind refused guesses and noise change nothing.",
    ),
    Study(
        "fspad",
        "The two parts of FSPAD",
        "fspad",
        120,
        ("sampling=0 partial=false", "partial=false", "sampling=0", "", "loop.lr=0.001", "loop.lr=0.0003"),
        "The first row is plain EAGLE. Each part is switched on alone, and then both, at a rate of 0.0005. "
        "The last rows have both at other rates.",
        "Sampling brings 0.05 tokens per pass over plain EAGLE, most of it behind a right first guess. The "
        "partial alignment brings 0.01 alone and nothing beside it, which is within the error.",
    ),
    Study(
        "falcon",
        "Learning rate of Falcon",
        "falcon",
        60,
        ("loop.lr=0.001", "loop.lr=0.0003"),
        "Two rates for the network with two LSTM layers.",
        "The rates do not differ by more than the error: 60 steps of it are too few for any.",
    ),
    Study(
        "two_stage",
        "Features chosen by a weak probe",
        "eagle3",
        100,
        ("", "taps={layers}", "two_stage={probe}"),
        "Layers 2, 15 and 27 are the method's own. A linear probe of all layers chose others.",
        "The chosen layers are worth 0.01, which is within the error. Frozen features of the probe lose 0.04 "
        "to 0.05 tokens per pass: what the network makes of layers itself is worth more.",
    ),
    Study(
        "divergences",
        "What the distributions are compared by",
        "draft_model",
        60,
        tuple(f"loss={one}{more}" for more in ("", " on_policy=0.5") for one in DISTANCES),
        "Four distances between the distributions. The first rows learn from the target's answers alone. In "
        "the others half of the batches have answers that the draft model wrote itself.",
        "Jensen-Shannon and total variation keep most at temperature 1 (0.21 where forward KL has 0.17), and "
        "as much as it when greedy. Reverse KL keeps less of greedy guesses. Own answers cost four times the "
        "time of a step, and bring nothing within so few: the draft model still writes badly.",
    ),
    Study(
        "states",
        "States of the last layer",
        "early_exit",
        120,
        ("", "states=0.1", "states=0.5", "states=2"),
        "The squared distance from the target's last states, with four weights (FREE has 0.5).",
        "It brings nothing: first guesses are the same, and chains differ by 0.007 at most. Losses cannot be "
        "compared, since each holds its own distance.",
    ),
    Study(
        "dpace",
        "Weights of a block's rows",
        "dflash",
        200,
        tuple(f"rows=seeds layers=1 loop.lr=0.001{more}" for more in ("", " dpace=0.5")),
        "Rows count by a fixed decay of 0.78, or by what they bring to the block's expected length (D-PACE).",
        "These rows learned from another store, of 1,191,299 answer tokens, and the plot lacks them. They "
        "were measured on 8,000 held-out tokens. D-PACE brings 0.05 tokens per pass so early. Learning all "
        "rows by the fixed decay gives 1.190, so rows that the decay leaves out are 0.02 of that. A step "
        "takes more of the processor, and losses cannot be compared. The drafter that comes with the "
        "repository was trained for 200 more steps, too (4 slots, a rate of 0.0005, two orders of the "
        "batches). The decay gives 1.538 and 1.548 tokens per pass, D-PACE 1.553 twice. So it brings no more "
        "than the error there. Alpha is 0.367 twice, and 0.374 and 0.375 with D-PACE.",
    ),
)


@tool
def main(arguments: list[str] | None = None) -> None:
    """Train the rows that are missing, print the tables, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = ", ".join(study.name for study in STUDIES)
    parser.add_argument("what", nargs="*", help=f"studies ({names}), or a method; all studies by default")
    parser.add_argument("--work", type=Path, required=True, help="folder of the tokens, as of outpace train")
    parser.add_argument("--out", type=Path, required=True, help="folder for the rows' drafters")
    parser.add_argument("--steps", type=int, help="of every row, in place of a study's own")
    parser.add_argument("--try", dest="rows", action="append", default=[], help="settings of a method's row")
    parser.add_argument("--set", dest="shared", action="append", default=[], help="a setting of all rows")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--page", type=Path, help="Markdown file to write; its plot goes to ../images")
    parser.add_argument("--page-only", action="store_true", help="show what is finished, and train nothing")
    asked = parser.parse_args(arguments)
    asked.shared = [*SHARED, *asked.shared]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the stage, too
    studies = chosen(asked)
    failed = [] if asked.page_only else [row for study in studies for row in missed(asked, study)]
    tables = {study.name: (study, found(asked, study)) for study in studies}
    show(asked, tables)
    if failed:
        raise OutpaceError(f"not finished: {', '.join(failed)}; the same command goes on with them")


def chosen(asked: Any) -> list[Study]:
    """The studies asked for, with the steps asked for.

    Raises:
        OutpaceError: no such study; a method without steps.
    """
    known = {study.name: study for study in STUDIES}
    if asked.rows or not set(asked.what) <= set(known):
        if len(asked.what) != 1 or asked.steps is None:
            raise OutpaceError(f"give studies ({', '.join(known)}), or one method with --steps and --try")
        method = asked.what[0]
        return [Study(method, "Own settings", method, asked.steps, ("", *asked.rows))]
    studies = [known[name] for name in asked.what or known]
    return [replace(study, steps=asked.steps or study.steps) for study in studies]


def missed(asked: Any, study: Study) -> list[str]:
    """Train what is missing of a study; the rows that failed."""
    if any("{" in row for row in study.rows):
        probe(asked)
    inside, failed = within(asked, study), list[str]()
    rows = named(asked, study)
    left = [row for row in rows if not trained_table.stage_file(inside, row, "trained").is_file()]
    for row in left:
        plan = {"steps": study.steps, "settings": [*asked.shared, *row.split()[1:]]}
        trained_table.put(trained_table.stage_file(inside, row, "plan"), plan)
        try:
            trained_table.alone(trained_table.trained, inside, row)
        except OutpaceError as failure:
            print(f"error: {failure}", file=sys.stderr, flush=True)
            failed.append(row)
    return failed


def within(asked: Any, study: Study) -> argparse.Namespace:
    """What `trained_table.py` is asked for: rows of so many steps lie together."""
    return argparse.Namespace(**vars(asked) | {"out": asked.out / f"{study.steps}-steps"})


def named(asked: Any, study: Study) -> list[str]:
    """A study's rows as `trained_table.py` calls them."""
    file, layers = asked.out.resolve() / PROBE, "none"
    if file.is_file():
        with safe_open(file, "pt") as held:
            layers = held.metadata()["layers"]
    return [f"{study.method} {row.format(probe=file, layers=layers)}".strip() for row in study.rows]


def probe(asked: Any) -> None:
    """Let a weak head choose layers, unless it did.

    Raises:
        OutpaceError: it could not.
    """
    file = asked.out / PROBE
    if not file.is_file():
        command = [sys.executable, str(Path(__file__).with_name("probe_layers.py")), "--model", asked.model]
        command += ["--work", str(asked.work), "--out", str(file)]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise OutpaceError("the layers were not probed; see above")


def found(asked: Any, study: Study) -> list[Row]:
    """What is known of the rows that are finished."""
    out, inside = list[Row](), within(asked, study)
    for row in named(asked, study):
        file = trained_table.stage_file(inside, row, "trained")
        if file.is_file():
            out.append({"row": label(asked, row), **json.loads(file.read_text(encoding="utf-8"))})
    return out


def label(asked: Any, row: str) -> str:
    """A row's settings without the folder of this machine."""
    return " ".join(row.split()[1:]).replace(f"{asked.out.resolve()}/", "") or "as it is"


def cells(row: Row) -> list[str]:
    """One line of a table, under ``HEADS``."""
    held = row["held_out"]
    return [
        f"`{row['row']}`" if "=" in row["row"] else row["row"],
        " ".join(f"{one:.2f}" for one in held["acceptance"][:3]),
        f"{held['emitted']:.3f}",
        f"{held['overlap'][0]:.3f}" if held["overlap"] else "-",
        "-" if held["held_out_loss"] is None else f"{held['held_out_loss']:.2f}",
        f"{row['processor_seconds'] / 60:.1f}",
    ]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of a table."""
    yield f"| {' | '.join(HEADS)} |"
    yield "|---" * len(HEADS) + "|"
    for row in rows:
        yield f"| {' | '.join(cells(row))} |"


def show(asked: Any, tables: dict[str, tuple[Study, list[Row]]]) -> None:
    """Print the tables, and write the page and its picture if asked for."""
    done = {name: table for name, table in tables.items() if table[1]}
    if asked.json:
        print(
            json.dumps({name: {"steps": study.steps, "rows": rows} for name, (study, rows) in done.items()})
        )
    else:
        for name, (study, rows) in done.items():
            print("\n".join([f"{name}: `{study.method}`, {study.steps} steps", "", *table(rows), ""]))
    if asked.page is None or not done:
        return
    write_whole(asked.page, "\n".join(page(asked, list(tables.values()))) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        for path in paint({IMAGE: partial(picture, tables=list(done.values()))}, Path(folder)):
            place = asked.page.parents[1] / "images" if path.suffix == ".svg" else asked.out
            write_whole(place / path.name, path.read_bytes())


def page(asked: Any, tables: Sequence[tuple[Study, list[Row]]]) -> Iterator[str]:
    """The lines of the report."""
    data = next(rows[0]["data"] for _, rows in tables if rows)
    counted = guesses(asked)
    yield "# Settings of training at equal steps\n"
    yield filled(
        f"All for {asked.model}, on the same {data['answer_tokens']:,} answer tokens of the target's own. "
        "Rows of a table have the same steps, the same batches in the same order, and the same draft "
        "vocabulary. Each row is one thread. The command:"
    )
    yield "\n```text"
    yield "outpace train eagle3 --only-data --prompts FILE::LICENCE ... --texts FILE::LICENCE ... --work WORK"
    yield "python tools/ablations.py --work WORK --out ROWS --page docs/results/ablations.md"
    yield "```\n"
    yield f"![Tokens per pass by settings, one panel a study](../images/{IMAGE}.svg)\n"
    for point in (
        "*Guesses 1, 2, 3*: held-out acceptance at temperature 0, given that those before were right.",
        "*Chain*: tokens per pass that these give to chains as deep as the method learns.",
        "*Alpha*: the chance that a first guess drawn at temperature 1 is kept.",
        "*Held-out loss*: of rows with the same loss, these can be compared.",
        "*Minutes*: of the processor, with the measurement and without features of the target.",
        f"Held-out texts have {counted:,} answer tokens. One standard error of a first guess is "
        f"{error(0.4, counted):.3f} at 0.4. Rows share texts, so their differences are known better.",
        "The steps are few, so this tells how settings begin. Ten times the steps may turn an order around.",
    ):
        yield filled(f"- {point}", "  ")
    for study, rows in tables:
        yield f"\n## {study.title}\n"
        epochs = "".join(f", {row['epochs']:.1f} epochs" for row in rows[:1])
        yield filled(f"`{study.method}`, {study.steps} steps{epochs}. {study.about}")
        if rows:
            yield ""
            yield from table(rows)
        names = [label(asked, row) for row in named(asked, study)]
        if missing := [name for name in names if name not in {row["row"] for row in rows}]:
            yield ""
            yield filled(f"Not run: {', '.join(missing)}.")
        if study.brought:
            yield ""
            yield filled(study.brought)


def guesses(asked: Any) -> int:
    """Held-out tokens that are guessed."""
    store = TokenStore.open(asked.work / "tokens")
    return sum(len(one.ids) - one.prompt for one, held in zip(store, store.held_out_S, strict=True) if held)


def error(share: float, count: int) -> float:
    """Of a share of so many that were counted."""
    return math.sqrt(share * (1 - share) / count)


def picture(figure: Any, tables: Sequence[tuple[Study, list[Row]]]) -> bool:
    """Tokens per pass of every row; the first of a study is the one to compare with."""
    figure.set_size_inches(10, 1.2 + 0.3 * sum(len(rows) + 1 for _, rows in tables))
    shares = [len(rows) + 1 for _, rows in tables]
    for axes, (study, rows) in zip(
        figure.subplots(len(tables), 1, height_ratios=shares, squeeze=False)[:, 0], tables, strict=True
    ):
        chains = [row["held_out"]["emitted"] - 1 for row in rows]
        axes.barh(range(len(rows)), chains, left=1.0, color=[COLOURS[0], *[COLOURS[5]] * (len(rows) - 1)])
        axes.axvline(1 + chains[0], color=COLOURS[0], lw=1, ls="--")
        axes.set_yticks(range(len(rows)), [row["row"] for row in rows], fontsize="small")
        axes.invert_yaxis()
        axes.set_title(f"{study.method}: {study.title}", loc="left", fontsize="medium")
    axes.set_xlabel("tokens per pass, held-out chains")
    return True


if __name__ == "__main__":
    raise SystemExit(main())
