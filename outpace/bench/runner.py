"""The paired runner: contenders take turns unit by unit, so that drift hits all of them alike.

    noise floor   none against none
    warm-up       every contender, apart
    rounds        unit 1: A B C    unit 2: B C A    unit 3: C A B   ...

A unit is committed when every contender has answered it; what was interrupted halfway is dropped.
So whatever is measured is paired, and stopping at any time leaves a valid, smaller measurement.
A unit whose passes stall, or whose speed-up is impossible, is measured again, then left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from outpace.bench import stats
from outpace.bench.disturb import spinning
from outpace.bench.records import Case, Contender, Run, Settings
from outpace.bench.stats import Key
from outpace.bench.synthetic import Texts
from outpace.errors import OutpaceError

PLAIN = "none"
"""The contender that all others are compared with."""
NARROW = 0.02
"""A cell is settled once its interval is at most this much wide on either side."""
_WARM_UP = 16  # tokens
_TRIES = 3  # of a unit that is disturbed

Unit = tuple[Case, ...]
Tick = Callable[[str, int], None]
Runs = dict[Key, Run]


@dataclass(kw_only=True, slots=True)
class Measured:
    """What all contenders made of the same units under the same settings."""

    settings: Settings
    units: list[Unit]
    contenders: list[Contender] = field(default_factory=list)
    """Those that took part, `none` first."""
    runs: dict[str, Runs] = field(default_factory=dict)
    """Contender -> (unit, round) -> run. For every key of any of them `none` has a run."""
    beside: dict[str, Runs] = field(default_factory=dict)
    """The same once more, beside a process that takes a core; empty if that was not asked."""
    left_out: list[Key] = field(default_factory=list)
    """What was disturbed each time it was tried."""

    def group(self, unit: int) -> str:
        return self.units[unit][0].group


@dataclass(kw_only=True, slots=True)
class Session:
    noise: tuple[Runs, Runs] = field(default_factory=lambda: ({}, {}))
    """`none` and `none` again."""
    parts: list[Measured] = field(default_factory=list)
    """One per setting of ``reproducible``."""
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False


class Runner:
    """Runs contenders against each other.

    Args:
        texts: filled with plain answers as they become known.
        batch: most cases per unit.
        max_repeat: most rounds over the units of a category in which a contender's interval is
            still wide.
        need_texts: a contender wants the plain answers before its turn.
        disturb: let contenders answer every unit once more while another process takes a core.
        tick: told what is under way and how many units were answered since the last call.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        texts: Texts,
        *,
        batch: int = 1,
        repeat: int = 1,
        max_repeat: int = 1,
        need_texts: bool = False,
        disturb: bool = False,
        tick: Tick = lambda part, units: None,
    ) -> None:
        self.contenders = list(contenders)
        self.plain = self.contenders[0]
        assert self.plain.name == PLAIN, self.plain.name
        self.texts = texts
        self.batch, self.repeat, self.max_repeat = batch, repeat, max_repeat
        self.need_texts = need_texts or batch > 1
        self.disturb = disturb
        self.tick = tick
        self.session = Session()

    def run(self, cases: Sequence[Case], settings: Sequence[Settings]) -> Session:
        """Measure the noise floor, then all contenders under each of the settings.

        Returns:
            What was measured. If Ctrl-C ended it early, what was complete by then.

        Raises:
            KeyboardInterrupt: nothing was complete yet.
            OutpaceError: a drafter cannot serve the settings, and no other is left.
        """
        session = self.session
        try:
            self._noise(cases, settings[0])
            for one in settings:
                self._part(cases, one)
        except KeyboardInterrupt:
            session.parts = [part for part in session.parts if part.runs.get(PLAIN)]
            if not session.parts:
                raise
            session.interrupted = True
        return session

    def steps(self, cases: Sequence[Case], settings: Sequence[Settings]) -> int:
        """About how many units ``run`` answers, rounds beyond ``repeat`` left out."""
        units = len(make_units(cases, self.batch))
        count = 2 * len(make_units(first_seed(cases), self.batch))
        for one in settings:
            count += self.repeat * units * len(self._fit(one)) * (1 + self.disturb)
            count += self.need_texts * units
        return count

    def _fit(self, settings: Settings) -> list[Contender]:
        """A peer draws with coins of its own, so it has no part in reproducible text."""
        return [c for c in self.contenders if not (settings.reproducible and c.kind == "peer")]

    def _noise(self, cases: Sequence[Case], settings: Settings) -> None:
        units = make_units(first_seed(cases), self.batch)
        self._warm(self.plain, longest(units), settings)
        for number, unit in enumerate(units):
            for again in (number % 2, 1 - number % 2):
                self.tick(f"noise floor: {unit[0].group}", 0)
                for _ in range(_TRIES):
                    if not stats.stalled(run := self.plain.run(unit, settings)):
                        break
                self.session.noise[again][number, 0] = run
                self.tick(f"noise floor: {unit[0].group}", 1)
            self._remember(unit, run, settings)

    def _remember(self, unit: Unit, run: Run, settings: Settings) -> None:
        for case, tokens in zip(unit, run.tokens, strict=True):
            self.texts[case.id, case.seed, settings.reproducible] = tokens

    def _part(self, cases: Sequence[Case], settings: Settings) -> None:
        """All contenders under one of the settings."""
        label = "reproducible, " if settings.reproducible else ""
        if self.need_texts:
            known = {case for case in cases if self._key(case, settings) in self.texts}
            for unit in make_units([case for case in cases if case not in known], self.batch):
                self.tick(f"{label}plain answers: {unit[0].group}", 0)
                self._remember(unit, self.plain.run(unit, settings), settings)
                self.tick(f"{label}plain answers: {unit[0].group}", 1)
        units = make_units(cases, self.batch, lambda case: self._loops(case, settings))
        part = Measured(settings=settings, units=units)
        part.contenders = self._warmed(longest(units), settings)
        part.runs = {contender.name: {} for contender in part.contenders}
        self.session.parts.append(part)
        for turn in range(self.repeat):
            for number in range(len(units)):
                self._take_turns(part, part.contenders, number, turn, label)
                if self.disturb and (number, turn) in part.runs[PLAIN]:
                    with spinning():
                        done = self._turn(part, part.contenders, number, turn, f"{label}disturbed, ", 1)
                    for name, run in done.items():
                        part.beside.setdefault(name, {})[number, turn] = run
        for turn in range(self.repeat, self.max_repeat):
            wide = wide_cells(part)
            for number in range(len(units)):
                names = wide.get(part.group(number), set())
                again = [c for c in part.contenders if c.name in names]
                if again:
                    where = f"{label}round {turn + 1}, "
                    self._take_turns(part, [self.plain, *again], number, turn, where)

    def _key(self, case: Case, settings: Settings) -> tuple[str, int, bool]:
        return case.id, case.seed, settings.reproducible

    def _loops(self, case: Case, settings: Settings) -> bool:
        return stats.loops(self.texts.get(self._key(case, settings), ()))

    def _warm(self, contender: Contender, unit: Unit, settings: Settings) -> None:
        few = min(_WARM_UP, settings.max_new_tokens)
        contender.run(unit, replace(settings, max_new_tokens=few))

    def _warmed(self, unit: Unit, settings: Settings) -> list[Contender]:
        """Run each contender once, unmeasured; those that cannot serve the settings stay out."""
        warm: list[Contender] = []
        refused: list[OutpaceError] = []
        for contender in self._fit(settings):
            self.tick(f"warm-up: {contender.name}", 0)
            try:
                self._warm(contender, unit, settings)
                warm.append(contender)
            except OutpaceError as error:
                if contender is self.plain:
                    raise
                refused.append(error)
                self.session.notes.append(f"{contender.name} takes no part: {error}")
        if refused and len(warm) == 1 and not self.session.parts:
            raise refused[0]
        return warm

    def _take_turns(
        self, part: Measured, contenders: Sequence[Contender], unit: int, turn: int, label: str
    ) -> None:
        """Let contenders answer a unit until nothing disturbs them, a few times at most."""
        for attempt in range(_TRIES):
            done = self._turn(part, contenders, unit, turn, label, 0 if attempt else 1)
            plain = done[PLAIN]
            if not any(stats.disturbed(run, plain) for run in done.values()):
                break
        else:
            part.left_out.append((unit, turn))
            return
        for name, run in done.items():
            part.runs[name][unit, turn] = run

    def _turn(
        self, part: Measured, contenders: Sequence[Contender], unit: int, turn: int, label: str, count: int
    ) -> dict[str, Run]:
        """Let each contender answer a unit once, a different one first each time."""
        first = (unit + turn) % len(contenders)
        where = f"{label}{part.group(unit)}"
        done: dict[str, Run] = {}
        for contender in (*contenders[first:], *contenders[:first]):
            if contender not in part.contenders:
                continue
            self.tick(where, 0)
            try:
                done[contender.name] = contender.run(part.units[unit], part.settings)
            except OutpaceError as error:
                if contender.kind != "peer":
                    raise
                part.contenders.remove(contender)
                del part.runs[contender.name]
                self.session.notes.append(f"{contender.name} left the benchmark: {error}")
            self.tick(where, count)
        return done


def make_units(
    cases: Sequence[Case], batch: int, apart: Callable[[Case], bool] = lambda case: False
) -> list[Unit]:
    """Put cases of one category and seed together, at most ``batch`` of them.

    Categories take turns: none pays alone for what a method learns first, and a run cut short has seen all.

    Args:
        cases: a case alone is a unit where ``batch`` is 1.
        batch: the last unit of a category may be smaller.
        apart: cases for which it is true share no unit with the others; loops, for example,
            whose speed is reported on its own.
    """
    piles: dict[tuple[str, int, bool], list[Case]] = {}
    for case in cases:
        key = (case.group, case.seed, batch > 1 and apart(case))
        piles.setdefault(key, []).append(case)
    units: dict[str, list[Unit]] = {}
    for (group, _, _), pile in piles.items():
        units.setdefault(group, []).extend(
            tuple(pile[start : start + batch]) for start in range(0, len(pile), batch)
        )
    return [unit for turn in zip_longest(*units.values()) for unit in turn if unit is not None]


def first_seed(cases: Sequence[Case]) -> list[Case]:
    """Every prompt once."""
    return [case for case in cases if case.seed == cases[0].seed]


def longest(units: Iterable[Unit]) -> Unit:
    """The unit with the most prompt tokens: it makes the caches as large as they will get."""
    return max(units, key=lambda unit: sum(len(case.ids) for case in unit))


def wide_cells(part: Measured) -> dict[str, set[str]]:
    """Category -> contenders whose speed-up there is not settled by the rounds so far."""
    wide: dict[str, set[str]] = {}
    plain = part.runs[PLAIN]
    for contender in part.contenders:
        if contender.name == PLAIN:
            continue
        by_group: dict[str, Runs] = {}
        for key, run in part.runs[contender.name].items():
            by_group.setdefault(part.group(key[0]), {})[key] = run
        for group, runs in by_group.items():
            interval = stats.repeat_interval(stats.paired_ratios(runs, plain))
            if stats.half_width(interval) > NARROW:
                wide.setdefault(group, set()).add(contender.name)
    return wide


def compared(runs: Mapping[Key, Run], units: Iterable[int]) -> Runs:
    wanted = set(units)
    return {key: run for key, run in runs.items() if key[0] in wanted}
