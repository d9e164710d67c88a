"""``outpace check --audit refusals``: what is refused plainly must be refused with drafts too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import show
from outpace.cli.options import ModelOptions, option
from outpace.config import DEFAULT_DRAFTER
from outpace.errors import RequestError, UnknownNameError

if TYPE_CHECKING:
    from outpace.analysis.refusals.audit import Moved
    from outpace.analysis.refusals.judge import Agreement

AUDITS = ("refusals",)
_PANEL = "Audit"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOptions:
    """What is audited, and how."""

    audit: str | None = option(
        None,
        "refusals: label answers to prompts, plainly and with the drafters, and test whether refusals moved. "
        "Takes the place of the four levels.",
        metavar="NAME",
        shown="none",
        panel=_PANEL,
    )
    audit_prompts: Path | None = option(
        None,
        "Prompts: a JSON list of objects, or one per line, with prompt, and pid, task and level.",
        metavar="FILE",
        shown="harmless ones",
        panel=_PANEL,
    )
    labelled: Path | None = option(
        None,
        "Answers with labels (response, label: GOOD, BAD, UNCLEAR), to compare the judge with.",
        metavar="FILE",
        shown="own ones",
        panel=_PANEL,
    )
    temperature: float = option(0.0, "Of audited answers.", "-t", metavar="T", panel=_PANEL)
    samples: int = option(1, "Answers per prompt and side, above temperature 0.", least=1, panel=_PANEL)
    allow_lossy: bool = option(
        False, "Audit drafters that change the distribution; their change is reported.", panel=_PANEL
    )

    def check(self, out: Path | None) -> None:
        """Refuse what does not fit together, before a model is loaded.

        Raises:
            UnknownNameError, RequestError: an unknown audit, or settings of one that is not wanted.
        """
        if self.audit is not None and self.audit not in AUDITS:
            raise UnknownNameError("audit", self.audit, AUDITS)
        given = {
            "--audit-prompts": self.audit_prompts is not None,
            "--labelled": self.labelled is not None,
            "--temperature": self.temperature != 0,
            "--samples": self.samples != 1,
            "--allow-lossy": self.allow_lossy,
            "--out": out is not None,
        }
        if self.audit is None and any(given.values()):
            name = next(name for name, said in given.items() if said)
            raise RequestError(f"{name} belongs to an audit; add --audit refusals")

    def run(
        self,
        model: ModelOptions,
        named: Sequence[str] | None,
        prompts: int | None,
        max_new_tokens: int,
        as_json: bool,
        out: Path | None,
    ) -> bool:
        """Answer, label, test, and print; whether a promise is broken."""
        from outpace.analysis.refusals.audit import audit
        from outpace.analysis.refusals.files import read_asked, read_judged
        from outpace.analysis.refusals.judge import agreement, label
        from outpace.params import SamplingParams

        SamplingParams(temperature=self.temperature)  # refuses what is out of range
        asked = read_asked(self.audit_prompts)
        judged = read_judged(self.labelled)
        agreed = agreement([given for _, given in judged], [label(answer) for answer, _ in judged])
        asked = asked[:: max(1, len(asked) // prompts)][:prompts] if prompts is not None else asked
        engine = model.load(drafter="none", allow_lossy=self.allow_lossy)
        specs = list(named or [DEFAULT_DRAFTER])
        for spec in specs:
            engine.method(spec)  # one that cannot be loaded is said before the work
        settings: dict[str, Any] = {"temperature": self.temperature, "max_new_tokens": max_new_tokens}
        rounds = 1 if self.temperature == 0 else self.samples
        with show.progress(len(asked) * rounds * (1 + len(specs)), "answers") as tick:
            found = audit(engine, asked, specs, samples=self.samples, **settings, tick=tick)
        broken = {spec: line for spec, moved in found.items() if (line := moved.broken(len(found)))}
        report = {
            "audit": self.audit,
            "model": engine.target.name,
            "prompts": len(asked),
            "samples": rounds,
            **settings,
            "judge": agreed.to_json(),
            "drafters": {spec: moved.to_json() for spec, moved in found.items()},
            "broken": [f"{spec}: {line}" for spec, line in broken.items()],
        }
        pictures = {"refusals": partial(_picture, found=found, report=report)}
        show.finish(report, as_json, lambda: show_report(report, found, agreed), out, "audit", pictures)
        return bool(broken)


def show_report(report: Mapping[str, Any], found: Mapping[str, Moved], agreed: Agreement) -> None:
    """Print for people."""
    show.write(
        f"{report['model']}, temperature {report['temperature']:g}: "
        f"{show.count(report['prompts'], 'prompt')} x "
        f"{show.count(report['samples'], 'answer')} of {report['max_new_tokens']} tokens at most\n"
        f"judge: rules; they agree with {agreed.same} of {agreed.answers} labelled answers, "
        f"kappa {agreed.kappa:.2f}\n\n"
    )
    columns = {
        "drafter": "{0}",
        "pairs": "{1.pairs}",
        "equal texts": "{1.equal}",
        "GOOD": "{2[GOOD][0]} / {2[GOOD][1]}",
        "BAD": "{2[BAD][0]} / {2[BAD][1]}",
        "UNCLEAR": "{2[UNCLEAR][0]} / {2[UNCLEAR][1]}",
        "labels changed": "{1.changed}",
        "refusals lost / won": "{1.lost} / {1.won}",
        "change, points": "{3:+.1f} [{4:+.1f}, {5:+.1f}]",
        "chance": "{1.chance:.3f}",
        "accepted": "{1.acceptance:.0%}",
    }
    rows = []
    for spec, moved in found.items():
        points = (100 * one for one in (moved.change, *moved.interval))
        rows.append((spec if moved.lossless else f"{spec} (lossy)", moved, moved.counts(), *points))
    show.write("Labels plainly / with drafts; GOOD is a refusal\n")
    show.listed(rows, columns, texts=("drafter",))
    for line in report["broken"]:
        show.write(f"BROKEN  {line}\n")
    if not report["broken"]:
        show.write("No promise is broken.\n")


def _picture(figure: Any, found: Mapping[str, Moved], report: Mapping[str, Any]) -> bool:
    """Draw the change of refusals with its interval, a row per drafter."""
    figure.set_size_inches(8, 1.9 + 0.4 * len(found))
    axes = figure.subplots()
    for place, moved in enumerate(found.values()):
        low, high = moved.interval
        colour = "#0072B2" if moved.lossless else "#D55E00"
        axes.plot([100 * low, 100 * high], [place, place], color=colour, lw=1.6)
        axes.plot(100 * moved.change, place, "o" if moved.lossless else "s", color=colour, ms=7)
    axes.axvline(0.0, color="black", ls="--", lw=1.2)
    names = [spec if moved.lossless else f"{spec} (lossy)" for spec, moved in found.items()]
    axes.set_yticks(range(len(found)), names)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel("change of refusals, points of all pairs (95 % interval)")
    pairs = next(iter(found.values())).pairs
    axes.set_title(
        f"{report['model']}, temperature {report['temperature']:g}, {pairs} pairs of answers",
        loc="left",
        fontsize="medium",
    )
    return True
