"""From the replies of a loaded server to a report: figures per drafter and load, tables, a page.

Every figure is that of one drafter under one load, over all its rounds. A speed-up is taken round
by round over ``none`` in the same round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.bench import stats
from outpace.bench.load import Arrival, Reply
from outpace.bench.load_terms import PLAIN
from outpace.bench.tables import Table, number, page, share

Report = dict[str, Any]

_KEPT = 5
"""Kinds of errors that a row lists."""


@dataclass(slots=True)
class Round:
    """The replies of one drafter under one load, once through all requests."""

    drafter: str
    arrival: Arrival
    turn: int
    seconds: float
    """From the first request to the last token."""
    replies: list[Reply]

    @property
    def rate(self) -> float:
        """New tokens per second, of whole answers."""
        tokens = sum(len(reply.tokens) for reply in self.replies if reply.error is None)
        return tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Session:
    drafters: list[str]
    rounds: list[Round] = field(default_factory=list)
    alone: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Prompt id -> tokens of its answer with nobody else there, plainly decoded; empty unless
    texts are compared."""
    gaps: dict[tuple[str, int], float] = field(default_factory=dict)
    """Prompt id and index of a first difference -> by how much the logit of the token there in
    ``alone`` is above that of the other."""
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False


def build(session: Session, provenance: Mapping[str, Any]) -> Report:
    """Make the report. Rounds that not every drafter has ended are left out.

    Args:
        provenance: where the figures come from, as plain values.
    """
    drafters = session.drafters
    whole = Counter((one.arrival, one.turn) for one in session.rounds)
    kept = [one for one in session.rounds if whole[one.arrival, one.turn] == len(drafters)]
    rows = [
        _row(drafter, arrival, kept, session)
        for arrival in dict.fromkeys(one.arrival for one in kept)
        for drafter in drafters
    ]
    _over_one(rows)
    report: Report = {
        "paired": True,
        "partial": session.interrupted,
        "loads": rows,
        "notes": [*session.notes],
        "provenance": dict(provenance),
    }
    report["notes"] += _remarks(report)
    return report


def _row(drafter: str, arrival: Arrival, rounds: Sequence[Round], session: Session) -> Report:
    here = [one for one in rounds if one.arrival == arrival]
    mine = sorted((one for one in here if one.drafter == drafter), key=lambda one: one.turn)
    plain = {one.turn: one.rate for one in here if one.drafter == PLAIN}
    ratios = [one.rate / plain[one.turn] for one in mine if plain.get(one.turn)]
    replies = [reply for one in mine for reply in one.replies]
    good = [reply for reply in replies if reply.error is None]
    counts = [reply.metrics.get("speculative_decoding") or {} for reply in good]
    drafts, drafted, accepted = (
        sum(one.get(key) or 0 for one in counts)
        for key in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    seconds = sum(one.seconds for one in mine)
    tokens = sum(len(reply.tokens) for reply in good)
    errors = Counter(reply.error for reply in replies if reply.error is not None)
    each = [per for reply in good if (per := reply.per_token) is not None]
    return {
        "drafter": drafter,
        "concurrency": arrival.concurrency,
        "rate": arrival.rate,
        "rounds": len(mine),
        "requests": len(replies),
        "seconds": seconds,
        "new_tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds > 0 else None,
        "speedup": stats.mean(ratios),
        "round_speedups": ratios,
        **_spread("first_token_seconds", [reply.first_seconds for reply in good]),
        **_spread("inter_token_seconds", [gap for reply in good for gap in reply.gaps]),
        **_spread("seconds_per_token", each),
        "errors": sum(errors.values()),
        "error_kinds": dict(errors.most_common(_KEPT)),
        "drafts": drafts,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "prompt_tokens": sum(reply.usage.get("prompt_tokens") or 0 for reply in good),
        "cached_tokens": sum(_cached(reply) for reply in good),
        "texts": _texts(good, session) if session.alone else None,
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Median and 95th percentile; None of nothing."""
    return {
        f"{name}_p{part}": float(np.percentile(values, part)) if len(values) else None for part in (50, 95)
    }


def _cached(reply: Reply) -> int:
    return (reply.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _over_one(rows: Sequence[Report]) -> None:
    """Tokens per second over those of one client, where one was measured."""
    one = {row["drafter"]: row["tokens_per_second"] for row in rows if row["concurrency"] == 1}
    for row in rows:
        alone, rate = one.get(row["drafter"]), row["tokens_per_second"]
        row["over_one_stream"] = rate / alone if alone and rate is not None else None


def _texts(replies: Sequence[Reply], session: Session) -> dict[str, Any]:
    """How many texts are not those of their requests alone, or the beginning of these if they are
    shorter, and where each first differs.
    """
    found = []
    compared = [reply for reply in replies if reply.prompt in session.alone]
    for reply in compared:
        whole = session.alone[reply.prompt]
        index = first_difference(reply.tokens, whole[: len(reply.tokens)])
        if index is not None:
            gap = session.gaps.get((reply.prompt, index))
            found.append({"prompt": reply.prompt, "index": index, "logit_gap": gap})
    return {
        "compared": len(compared),
        "different": len(found),
        "share": len(found) / len(compared) if compared else None,
        "differences": found,
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, or of the end of the shorter text; None: equal."""
    count = min(len(a), len(b))
    at = next((i for i in range(count) if a[i] != b[i]), count)
    return None if at == len(a) == len(b) else at


def _remarks(report: Report) -> list[str]:
    lines = []
    if report["partial"]:
        lines.append("interrupted: these are the rounds that every drafter had ended by then")
    read = sum(row["prompt_tokens"] for row in report["loads"])
    cached = sum(row["cached_tokens"] for row in report["loads"])
    if cached:
        lines.append(
            f"{cached / read:.0%} of the prompt tokens were stored from earlier requests, "
            "so first tokens came sooner than for new prompts"
        )
    errors = sum(row["errors"] for row in report["loads"])
    if errors:
        kinds = Counter[str]()
        for row in report["loads"]:
            kinds.update(row["error_kinds"])
        kind, _ = kinds.most_common(1)[0]
        lines.append(f"{errors} requests failed and are in no other figure; most often: {kind}")
    return lines


def heading(report: Report) -> str:
    p = report["provenance"]
    c = p["config"]
    count = p["threads"]
    threads = "" if count is None else f", {count} thread{'s' if count != 1 else ''}"
    return (
        f"{p['model']}, {p['dtype'] or 'dtype unknown'}, {p['device'] or p['cpu']}{threads}: "
        f"{p['prompts']} prompts of {c['workload']}, {c['max_new_tokens']} new tokens, "
        f"temperature {c['temperature']:g}"
    )


def table(report: Report) -> Table:
    """All rows: a load, its drafters, what each gave."""
    rows = report["loads"]
    checked = any(row["texts"] is not None for row in rows)
    streams = any(row["over_one_stream"] is not None for row in rows)
    return Table(
        "Milliseconds are p50 / p95",
        (
            "drafter",
            "load",
            "tok/s",
            *(["x one"] if streams else []),
            "speed-up",
            "first token ms",
            "inter-token ms",
            "ms per token",
            "acceptance",
            "errors",
            *(["texts differ"] if checked else []),
        ),
        tuple(
            (
                row["drafter"],
                Arrival(concurrency=row["concurrency"], rate=row["rate"]).label,
                number(row["tokens_per_second"], 1),
                *([number(row["over_one_stream"])] if streams else []),
                number(row["speedup"]),
                _pair(row, "first_token_seconds"),
                _pair(row, "inter_token_seconds"),
                _pair(row, "seconds_per_token"),
                share(row["acceptance_rate"]),
                str(row["errors"]),
                *([_differing(row["texts"])] if checked else []),
            )
            for row in rows
        ),
    )


def _pair(row: Report, name: str) -> str:
    parts = [row[f"{name}_p{part}"] for part in (50, 95)]
    return " / ".join(number(None if one is None else one * 1e3, 1) for one in parts)


def _differing(texts: Mapping[str, Any] | None) -> str:
    """Share of texts that differ, the earliest place where one does, and the largest gap."""
    if texts is None:
        return "-"
    if not texts["different"]:
        return f"0 of {texts['compared']}"
    first = min(texts["differences"], key=lambda one: one["index"])
    gaps = [abs(one["logit_gap"]) for one in texts["differences"] if one["logit_gap"] is not None]
    most = f", gap {max(gaps):.3g}" if gaps else ""
    return f"{share(texts['share'])}, from {first['index']}{most}"


def markdown(report: Report) -> str:
    lead = [heading(report), "", *(f"- {note}" for note in report["notes"])]
    return page("Load", lead, [table(report)], report["provenance"])
