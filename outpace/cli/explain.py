"""``outpace generate --explain``: who drafted when, and what the best drafter would have gained."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import show

if TYPE_CHECKING:
    from outpace.analysis.explain import Explained, Stretch
    from outpace.analysis.hindsight import Hindsight
    from outpace.cli.runs import Run
    from outpace.engine.results import Result

_STRETCHES = 24  # rows that people may still read
_WIDTH = 36  # characters of a text in a table
_NAMES = {"whole": "the best drafter for all", "passages": "of every row", "steps": "at every step"}


class Told:
    """Listens to the answer of a run, and tells of it afterwards.

    Args:
        run: not begun yet.
    """

    def __init__(self, run: Run) -> None:
        from outpace.analysis.explain import Explained

        self.run = run
        self.explained = Explained(run.engine.costs)
        run.engine.listeners.append(self.explained)
        self._seen: Hindsight | None = None

    def look_back(self, result: Result) -> Hindsight | None:
        """What the best drafter would have gained; None where there was no step. The answer is read again."""
        from outpace.analysis.hindsight import look_back

        engine, steps = self.run.engine, self.explained.steps
        if self._seen is None and steps:
            engine.listeners.remove(self.explained)
            request = engine.request(self.run.ids, self.run.params)
            method = engine.method(engine.drafter)
            with show.progress(3, "parts") as tick:
                self._seen = look_back(engine, method, request, result.tokens, steps, tick)
        return self._seen

    def to_json(self, result: Result) -> dict[str, Any]:
        """Plain values; ``hindsight`` is null where there was no step."""
        seen = self.look_back(result)
        return {**self.explained.to_json(), "hindsight": None if seen is None else seen.to_json()}

    def show(self, result: Result) -> None:
        """Draw both tables on standard error."""
        show_explained(self.explained)
        seen = self.look_back(result)
        if seen is not None:
            show_hindsight(seen, result.drafter)

    def save(self, result: Result, out: Path) -> None:
        """Write explain.json and a plot."""
        from outpace.bench.plots import paint

        show.save(out / "explain.json", json.dumps(self.to_json(result), indent=1) + "\n")
        seen = self.look_back(result)
        if seen is not None:
            picture = partial(_picture, seen=seen, drafter=result.drafter)
            paint({"explain": picture}, out, note=show.note)


def show_hindsight(seen: Hindsight, drafter: str) -> None:
    """Draw on standard error what the best drafter would have gained."""
    show.note("In hindsight, at measured prices (ms)")
    rows: list[tuple[str, ...]] = [
        (
            _span(one.first, one.last),
            short(one.text),
            " ".join(name.partition("[")[0] for name in one.drafters),
            _ms(one.plain),
            _ms(one.seconds),
            str(one.best),
            _ms(one.best_seconds),
            f"{one.plain / one.best_seconds:.2f}",
            f"{one.regret:+.0%}",
        )
        for one in seen.passages[:_STRETCHES]
    ]
    if left := seen.passages[_STRETCHES:]:
        more = f"({show.count(len(left), 'more row')}; --json has all)"
        rows.append((_span(left[0].first, left[-1].last), more, *[""] * 7))
    over = f"{seen.plain / seen.by_passage:.2f}"
    sums = (_ms(seen.plain), _ms(seen.seconds), "", _ms(seen.by_passage), over)
    rows.append(("all", "", "", *sums, f"{seen.regret['passages']:+.0%}"))
    columns = ("tokens", "text", "drafted by", "plain", drafter, "best", "its ms", "x plain", "regret")
    show.table(columns, rows, numbers=("plain", drafter, "its ms", "x plain", "regret"), to_stderr=True)
    whole = ", ".join(f"{one} {seen.plain / seconds:.2f} x" for one, seconds in seen.whole.items())
    show.note(f"one drafter for all, its best setting: {whole}; {drafter} {seen.plain / seen.seconds:.2f} x")
    lost = ", ".join(f"{_NAMES[name]} {regret:+.1%}" for name, regret in seen.regret.items())
    show.note(f"regret of {drafter} against {lost}")
    show.note(f"by the clock its steps took {1e3 * seen.measured:.0f} ms")
    for name in seen.left_out:
        show.note(f"left out: {name} remembers other answers")


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def short(text: str) -> str:
    """A text in one line of a table."""
    line = "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


def _label(text: str, tokens: str) -> str:
    """A text for a picture; the numbers of its tokens where the picture's font may lack its letters."""
    line = short(text).replace("$", r"\$")
    return line if line and max(line) < "\u0250" else tokens


def _picture(figure: Any, seen: Hindsight, drafter: str) -> bool:
    """Draw tokens per second over plain decoding by passage: what was done, and the best."""
    rows = seen.passages
    figure.set_size_inches(9, 1.9 + 0.34 * len(rows))
    axes = figure.subplots()
    places = range(len(rows))
    for place, one in enumerate(rows):
        ends = one.plain / one.seconds, one.plain / one.best_seconds
        axes.plot(ends, (place, place), color="0.7", lw=2, zorder=1)
        axes.annotate(
            str(one.best), (max(ends), place), (7, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.plot([one.plain / one.best_seconds for one in rows], places, "s", color="#D55E00", label="best")
    axes.plot([one.plain / one.seconds for one in rows], places, "o", color="#0072B2", label=drafter)
    axes.axvline(1.0, color="black", ls="--", lw=1.2, label="none = 1.0")
    axes.set_yticks(places, [_label(one.text, _span(one.first, one.last)) for one in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.2)
    axes.set_xlabel("tokens per second over plain decoding, at measured prices")
    axes.set_title(
        f"{drafter}: {seen.plain / seen.seconds:.2f} x; best drafter of every row: "
        f"{seen.plain / seen.by_passage:.2f} x",
        loc="left",
        fontsize="medium",
    )
    figure.legend(loc="outside lower center", ncols=3)
    return True


def show_explained(told: Explained) -> None:
    """Draw on standard error who drafted when, then each drafter's sum."""
    total = told.total()
    if total is None:
        show.note("nothing to explain: the answer had no step after its first token")
        return
    runs = told.stretches()
    rows = [_cells(one, _span(one.first, one.last)) for one in runs[:_STRETCHES]]
    if len(runs) > _STRETCHES:
        left = show.count(len(runs) - _STRETCHES, "more run")
        rows.append(
            (
                _span(runs[_STRETCHES].first, total.last),
                f"({left}; --json has all)",
                *[""] * (len(_COLUMNS) - 2),
            )
        )
    rows += [_cells(one, show.count(one.passes, "step")) for one in told.by_drafter()]
    if len(told.by_drafter()) > 1:
        rows.append(_cells(total, "all"))
    show.table(_COLUMNS, rows, numbers=_COLUMNS[3:], to_stderr=True)
    if total.plain is None:
        show.note("x plain: unknown, since this policy expects nothing and no pass had one row")
    else:
        show.note(
            f"{total.over_plain:.2f} x plain decoding as {total.plain:.1f} tokens/s: "
            f"{total.gained:+.2f} s gained over {show.count(total.passes, 'step')}"
        )


def _cells(one: Stretch, steps: str) -> tuple[str, ...]:
    def rate(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    return (
        steps,
        one.drafter,
        " ".join(one.reasons),
        str(one.drafted),
        str(one.accepted),
        str(one.emitted),
        rate(one.expected),
        rate(one.rate),
        rate(one.over_plain, 2),
        rate(one.gained, 3),
    )


_COLUMNS = (
    "steps",
    "drafter",
    "why",
    "drafted",
    "accepted",
    "emitted",
    "expected tok/s",
    "measured tok/s",
    "x plain",
    "gained s",
)
