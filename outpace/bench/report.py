"""From runs to a report: rows of figures, whole, by category, and without texts that loop.

A report is plain values, with the keys of docs/json.md, so that it can be written, read back
and laid beside another. `outpace.bench.tables` shows it to people.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from outpace.bench import stats
from outpace.bench.records import Contender, Run
from outpace.bench.runner import PLAIN, Measured, Runs, Session, Unit, compared
from outpace.errors import RequestError
from outpace.files import parse_json

Report = dict[str, Any]

_SAME_SETTINGS = ("max_new_tokens", "temperature", "batch", "ignore_eos")
_MAY_DIFFER = ("model", "dtype", "threads", "device", "cpu", "gpu", "commit", "versions")
_WANTED = 5  # sequences of a category that should be left without loops


def build(session: Session, provenance: Mapping[str, Any], end_ids: Collection[int] = ()) -> Report:
    """Make the report of a benchmark.

    Args:
        end_ids: tokens that would have ended the texts, had they counted.

    Raises:
        RequestError: a run has no plain run to be compared with.
    """
    rows = [row for part in session.parts for row in _rows(part, end_ids)]
    report: Report = {
        "paired": True,
        "partial": session.interrupted,
        "rows": rows,
        "noise_floor": _noise_floor(session),
        "notes": [*session.notes],
        "provenance": dict(provenance),
    }
    left_out = sum(len(part.left_out) for part in session.parts)
    report["left_out"] = left_out
    if left_out:
        report["notes"].append(
            f"{left_out} units are left out: the machine did something else each time they were measured"
        )
    report["notes"] += _remarks(report)
    return report


def _noise_floor(session: Session) -> dict[str, Any]:
    """How far apart `none` and `none` are: smaller differences mean nothing."""
    again, first = session.noise
    ratios = [rounds[0] for rounds in stats.paired_ratios(again, first)]
    return {
        "units": len(ratios),
        "speedup": stats.mean(ratios),
        "speedup_interval": _plain(stats.prompt_interval(ratios, range(len(ratios)))),
        "largest_deviation": max((abs(ratio - 1) for ratio in ratios), default=None),
    }


def _rows(part: Measured, end_ids: Collection[int]) -> list[dict[str, Any]]:
    plain = part.runs[PLAIN]
    looped = {
        unit
        for (unit, turn), run in plain.items()
        if (unit, turn - 1) not in plain and any(stats.loops(tokens) for tokens in run.tokens)
    }
    measured = sorted({unit for runs in part.runs.values() for unit, _ in runs})
    prompt_of = prompts_of(part.units)
    groups: dict[str, list[int]] = {}
    for unit in measured:
        groups.setdefault(part.group(unit), []).append(unit)
    rows = []
    for contender in part.contenders:
        runs = part.runs[contender.name]
        head = {
            "method": contender.name,
            "kind": contender.kind,
            "reproducible": part.settings.reproducible,
            "synthetic": bool(contender.about.get("synthetic")),
            "lossless": bool(contender.about.get("lossless", True)),
        }
        promised = _promised(part, contender)

        def cell(
            units: Sequence[int], runs: Runs = runs, head: dict[str, Any] = head, promised: bool = promised
        ) -> dict[str, Any]:
            kept = [unit for unit in units if unit not in looped]
            return {
                **head,
                **figures(compared(runs, units), plain, prompt_of, promised, end_ids),
                "without_loops": figures(compared(runs, kept), plain, prompt_of, promised, end_ids)
                if kept
                else None,
            }

        rows.append(
            {
                **cell(measured),
                "about": dict(contender.about),
                "disturbed": _disturbed(part.beside.get(contender.name, {}), runs),
                "groups": {name: cell(units) for name, units in groups.items()},
            }
        )
    return rows


def _disturbed(runs: Runs, idle: Runs) -> dict[str, Any] | None:
    """Speed beside a process that takes a core, over the speed without it, unit by unit."""
    if not runs:
        return None
    ratios = sorted(one for rounds in stats.paired_ratios(runs, idle) for one in rounds)
    return {"ratio": median(ratios) if ratios else None, "least": min(ratios, default=None)}


def prompts_of(units: Sequence[Unit]) -> list[int]:
    """Number the units so that those of one prompt, whatever seed or turn, have one number.

    Batches that share a prompt have one number, too. Cost: O(units^2) at most.
    """
    known = {case.id for unit in units for case in unit}
    first: dict[str, int] = {}
    number = list(range(len(units)))
    for unit, cases in enumerate(units):
        for case in cases:
            prompt, _, turn = case.id.rpartition("#")  # see `outpace.bench.cases.turn_id`
            name = prompt if turn.isdecimal() and prompt in known else case.id
            same = {number[first.setdefault(name, unit)], number[unit]}
            if len(same) > 1:
                number = [min(same) if one in same else one for one in number]
    return number


def _promised(part: Measured, contender: Contender) -> bool:
    """Whether the text has to be that of plain decoding, up to rounding."""
    keyed = part.settings.temperature == 0 or part.settings.reproducible
    return keyed and contender.kind == "drafter" and bool(contender.about.get("lossless", True))


def figures(
    runs: Runs, plain: Runs, prompt_of: Sequence[int], promised: bool, end_ids: Collection[int] = ()
) -> dict[str, Any]:
    """Figures of one contender over some units.

    Args:
        runs: its runs; counters and texts are those of the first round, which the later ones
            repeat, times those of all rounds.
        plain: runs of plain decoding, of these units and rounds at least.
        promised: whether its texts ought to equal the plain ones.
    """
    first = list({unit: runs[unit, turn] for unit, turn in sorted(runs, reverse=True)}.values())[::-1]
    texts = [tokens for run in first for tokens in run.tokens]
    by_round = stats.unit_ratios(runs, plain)
    ratios = list(by_round.values())
    by_unit = [sum(rounds) / len(rounds) for rounds in ratios]
    speedup, bound = stats.mean(by_unit), stats.mean(_emitted(runs.values()))
    if refused := speedup is not None and stats.impossible(speedup, bound):
        by_unit, by_round, ratios = [], {}, []
    whole, full = (
        [sum(rounds) / len(rounds) for rounds in stats.paired_ratios(runs, plain, rate)]
        for rate in (stats.end_to_end_rate, stats.full_rate)
    )
    batched = any(len(run.tokens) > 1 for run in first)
    counted = [one for run in first for one in run.counters]
    sums = stats.add_up(counted) if counted else None
    seconds = sum(run.seconds for run in runs.values())
    decode = sum(run.decode_seconds for run in runs.values())
    peaks = [p for run in runs.values() if (p := run.peak_memory_bytes) is not None]
    return {
        "units": len(first),
        "sequences": len(texts),
        "repeats": 1 + max((turn for _, turn in runs), default=-1),
        "tokens_per_second": _per(
            sum(len(tokens) for run in runs.values() for tokens in run.tokens), seconds
        ),
        "decode_tokens_per_second": _per(sum(run.decode_tokens for run in runs.values()), decode),
        "prefill_seconds": stats.median([run.prefill_seconds for run in runs.values()]),
        "speedup": stats.mean(by_unit),
        "impossible_speedup": speedup if refused else None,
        "speedup_interval": _plain(stats.prompt_interval(by_unit, [prompt_of[unit] for unit in by_round])),
        "speedup_median": stats.median(by_unit),
        "repeat_interval": _plain(stats.repeat_interval(ratios)),
        "repeat_speedups": _by_round(ratios),
        "end_to_end_speedup": None if refused else stats.mean(whole),
        "full_batch_speedup": stats.mean(full) if batched and not refused else None,
        "mean_emitted": None if sums is None else sums.mean_emitted,
        "acceptance_rate": None if sums is None else sums.acceptance_rate,
        "acceptance_by_depth": None if sums is None else stats.acceptance_by_depth(sums),
        "drafted_by_depth": None if sums is None else list(sums.drafted_at),
        "passes": None if sums is None else sums.passes,
        "drafted": None if sums is None else sums.drafted,
        "drafted_share": None if sums is None else stats.drafted_share(sums),
        "accepted": None if sums is None else sums.accepted,
        "verb_shares": stats.verb_shares(runs.values()),
        "draft_levels": None if sums is None else sum(run.draft_levels for run in first),
        "peak_memory_bytes": max(peaks) if peaks else None,
        "equal_to_none": _equal(runs, plain) if promised else None,
        "looping": stats.looping(texts),
        "past_end": stats.past_end(texts, end_ids),
    }


def _emitted(runs: Iterable[Run]) -> list[float]:
    """Tokens per pass of each run that tells."""
    return [emitted for run in runs if (emitted := run.mean_emitted) is not None]


def _by_round(ratios: Sequence[Sequence[float]]) -> list[float]:
    """The speed-up of every round that all units took part in."""
    rounds = min(map(len, ratios), default=0)
    return [sum(unit[turn] for unit in ratios) / len(ratios) for turn in range(rounds)]


def _equal(runs: Runs, plain: Runs) -> float | None:
    """Share of texts that are those of plain decoding, over all rounds."""
    same = [
        mine == theirs
        for key, run in runs.items()
        for mine, theirs in zip(run.tokens, plain[key].tokens, strict=True)
    ]
    return sum(same) / len(same) if same else None


def _per(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _plain(interval: stats.Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _remarks(report: Report) -> list[str]:
    """What a reader has to know before the figures, a line each."""
    lines = []
    plain = next(row for row in report["rows"] if row["method"] == PLAIN)
    if report["partial"]:
        lines.append("interrupted: these are the units that every method had answered by then")
    kept = plain["without_loops"]
    left = 0 if kept is None else kept["sequences"]
    if left < plain["sequences"]:
        lines.append(
            f"{plain['sequences'] - left} of {plain['sequences']} plain texts loop "
            f"(looping above {stats.LOOPS:g}), and loops are easy prey: read the figures without "
            "them"
        )
    for name, cell in plain["groups"].items():
        kept = cell["without_loops"]
        left = 0 if kept is None else kept["sequences"]
        if left < _WANTED <= cell["sequences"]:
            lines.append(f"{name}: only {left} of {cell['sequences']} texts do not loop")
    if plain["past_end"] > 0:
        lines.append(
            f"{plain['past_end']:.0%} of the plain tokens follow an end of sequence, which was "
            "ignored so that all answers are equally long"
        )
    for row in report["rows"]:
        cells = {"all prompts": row, **row["groups"]}
        for name, cell in cells.items():
            if (wrong := cell["impossible_speedup"]) is not None:
                lines.append(
                    f"{row['method']}, {name}: no speed-up, since {wrong:.2f} at {cell['mean_emitted']:.2f} "
                    "tokens per pass is impossible: something disturbed the plain runs"
                )
        if row["synthetic"]:
            lines.append(f"{row['method']} is synthetic: its guesses were looked up and cost nothing")
    return lines


def read(path: Path) -> Report:
    """Read a report back.

    Args:
        path: ``report.json``, or the folder that holds it.

    Raises:
        RequestError: no file, no JSON, or no report of a benchmark.
    """
    file = path / "report.json" if path.is_dir() else path
    try:
        report = parse_json(file.read_bytes())
    except OSError as error:
        raise RequestError(f"cannot read report {file}: {error.strerror}") from error
    except ValueError as error:
        raise RequestError(f"{file} is not JSON: {error}") from None
    if not isinstance(report, dict) or not {"rows", "provenance"} <= set(report):
        raise RequestError(
            f"{file} is no report of a benchmark; give what outpace bench --out or --json wrote"
        )
    return report


def check_comparable(a: Report, b: Report) -> list[str]:
    """Refuse to lay reports side by side that did not measure the same.

    Returns:
        What differs and may: the machine, the version and so on, a line each.

    Raises:
        RequestError: a report that is not of paired runs, or other prompts or settings.
    """
    for name, report in (("first", a), ("second", b)):
        if report.get("paired") is not True:
            raise RequestError(
                f"the {name} report is not of paired runs, so its ratios mean nothing; "
                "measure with outpace bench"
            )
    mine, theirs = a["provenance"], b["provenance"]
    wrong = []
    if mine["prompts_digest"] != theirs["prompts_digest"]:
        wrong.append(f"prompts ({mine['prompts']} and {theirs['prompts']})")
    for key in _SAME_SETTINGS:
        if mine["config"][key] != theirs["config"][key]:
            wrong.append(f"{key} ({mine['config'][key]} and {theirs['config'][key]})")
    if mine["seeds"] != theirs["seeds"]:
        wrong.append(f"seeds ({mine['seeds']} and {theirs['seeds']})")
    if wrong:
        raise RequestError(f"the reports measured different things: {', '.join(wrong)}")
    return [
        f"{key}: {mine[key]} and {theirs[key]}" for key in _MAY_DIFFER if mine.get(key) != theirs.get(key)
    ]
