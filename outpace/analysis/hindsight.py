"""What the best drafter would have gained in one answer, stretch by stretch, and what the choice made lost.

    told = Explained(engine.costs)                   listens while the answer is given
    seen = look_back(engine, method, request, answer, told.steps)
    seen.passages, seen.whole, seen.regret

The answer is read once more, a token at a time, and every drafter is asked at every position. Passes of
several sizes are timed, and so are the drafts. All choices, those that were made too, then have the same
prices, so that noise of the clock favours none.

Where sampled guesses are judged by rejection, more of them are kept than equal the text. So drafters that
draw are held for worse than they are, unless the text is reproducible.

Shape letters: P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from outpace.analysis.cost import measure
from outpace.analysis.explain import PLAIN, Step
from outpace.analysis.recording import Recorded, record_given
from outpace.analysis.replay import Device
from outpace.engine.engine import Engine
from outpace.engine.method import Method
from outpace.engine.requests import GenerationRequest
from outpace.types import Budget

TOKENS = 24
"""Of a passage, at least; it ends where a step of the answer does."""
_LEAST = (0.0, 0.1, 0.2, 0.3, 0.4, 0.55, 0.7)
_ROWS = (1, 2, 3, 5, 9, 17, 33, 65)
_REPEAT = 5


@dataclass(frozen=True, slots=True)
class Setting:
    """A fixed choice: a drafter, and how far it goes."""

    drafter: str
    nodes: int = 0
    depth: int = 0
    least: float | None = None
    """Of a drafter that tells its chances: guesses are drafted that it holds so likely."""

    def __str__(self) -> str:
        name = self.drafter.partition("[")[0]
        if self.least is not None:
            return f"{name}>={self.least:g}"
        return f"{name} {self.nodes}/{self.depth}" if self.nodes else name


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """Some steps of the answer. Seconds are at measured prices."""

    first: int
    """Number of its first token in the answer, from 1; the prompt's pass gave token 1."""
    last: int
    text: str
    drafters: Mapping[str, int]
    """Who drafted -> in how many of its steps."""
    seconds: float
    plain: float
    """Of plain decoding."""
    best: Setting
    best_seconds: float

    @property
    def gained(self) -> float:
        """Seconds that the best drafter saves over plain decoding."""
        return self.plain - self.best_seconds

    @property
    def regret(self) -> float:
        """Share of the time that the best drafter would have saved; below 0 where none is as good."""
        return 1.0 - self.best_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "first_token": self.first,
            "last_token": self.last,
            "text": self.text,
            "drafted_by": list(self.drafters),
            "priced_seconds": self.seconds,
            "plain_seconds": self.plain,
            "best": str(self.best),
            "best_seconds": self.best_seconds,
            "best_gained_seconds": self.gained,
            "regret": self.regret,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Hindsight:
    """One answer, looked back on. Seconds are at measured prices, unless they say otherwise."""

    passages: tuple[Passage, ...]
    whole: Mapping[Setting, float]
    """Best setting of every drafter -> seconds of the answer with it alone, fastest first."""
    by_step: float
    """Seconds of the best choice at every single step, which nobody can know beforehand."""
    measured: float
    """Seconds that the steps took by the clock."""
    left_out: tuple[str, ...]
    """Drafters that remember other answers, this one too: their guesses would be no guesses."""

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.passages)

    @property
    def plain(self) -> float:
        return sum(one.plain for one in self.passages)

    @property
    def by_passage(self) -> float:
        """With the best drafter of every passage."""
        return sum(one.best_seconds for one in self.passages)

    @property
    def regret(self) -> dict[str, float]:
        """Share of the time lost against the best drafter for all, by passage, and by step."""
        best = {"whole": min(self.whole.values()), "passages": self.by_passage, "steps": self.by_step}
        return {name: 1.0 - seconds / self.seconds for name, seconds in best.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "passages": [one.to_json() for one in self.passages],
            "whole": [
                {"best": str(one), "best_seconds": spent, "over_plain": self.plain / spent}
                for one, spent in self.whole.items()
            ],
            "priced_seconds": self.seconds,
            "measured_seconds": self.measured,
            "plain_seconds": self.plain,
            "best_by_passage_seconds": self.by_passage,
            "best_by_step_seconds": self.by_step,
            "regrets": self.regret,
            "left_out": list(self.left_out),
        }


class Priced:
    """Settings along one recorded answer, in seconds.

    Args:
        drafters: spec -> what it would have drafted.
        positions: of the answer.
    """

    def __init__(self, drafters: Mapping[str, Recorded], positions: int, device: Device) -> None:
        self.drafters, self.positions, self.device = drafters, positions, device

    def step(self, drafter: str, nodes: int, depth: int, looks: bool = True) -> float:
        """Seconds of a step."""
        price, drafts = self.device, nodes > 0
        level = price.level(drafter, 1) * depth if drafts else 0.0
        more = price.judge * drafts + price.look * looks
        return 1e-3 * (price.passed(1 + nodes, 1) + level + price.step + more)

    def settings(self, drafter: str) -> Iterator[Setting]:
        """Those of a drafter that are tried."""
        if drafter == PLAIN:
            yield Setting(PLAIN)
            return
        found = self.drafters[drafter]
        if found.previews_P is not None:
            yield from (Setting(drafter, least=least) for least in _LEAST)
            return
        for nodes in sorted({1, 2, *found.guesses}):
            for depth in range(1, min(nodes, found.budget.max_depth) + 1):
                yield Setting(drafter, nodes, depth)

    def walk(self, setting: Setting, start: int, end: int) -> tuple[float, list[tuple[int, float]]]:
        """Go from one position to another, or beyond, with one setting.

        Returns:
            Seconds of the steps together, and for each where it ends and its seconds.
        """
        place, steps = start, []
        while place < end:
            nodes, depth, kept = self._drafted(setting, place)
            place += kept + 1
            steps.append((place, self.step(setting.drafter, nodes, depth, setting.least is not None)))
        return sum(seconds for _, seconds in steps), steps

    def best(self) -> dict[Setting, float]:
        """The best setting of every drafter for the whole answer, and plain decoding; fastest first."""
        found = {}
        for drafter in (PLAIN, *self.drafters):
            tried = {one: self.walk(one, 0, self.positions)[0] for one in self.settings(drafter)}
            if tried:
                setting = min(tried, key=lambda one: tried[one])
                found[setting] = tried[setting]
        return dict(sorted(found.items(), key=lambda one: one[1]))

    def by_passage(self, ends: Sequence[int]) -> list[tuple[Setting, float]]:
        """The best setting of every passage, and its seconds; a step across an end counts for both in part.

        Args:
            ends: of the passages; the last one is that of the answer.

        Cost: every passage is walked with every setting, from all places where one before may end.
        """
        settings = [one for drafter in (PLAIN, *self.drafters) for one in self.settings(drafter)]
        starts: list[set[int]] = [{0}]
        for end in ends[:-1]:
            found = {max((end, *self._ends(one, place, end))) for one in settings for place in starts[-1]}
            starts.append(found)
        left = {self.positions: 0.0}
        chosen: list[dict[int, Setting]] = []
        for end, places in zip(reversed(ends), reversed(starts), strict=True):
            now: dict[int, float] = {}
            picked: dict[int, Setting] = {}
            for place in places:
                if place >= end:
                    now[place] = left[place]
                    continue
                tried = {one: self.walk(one, place, end) for one in settings}
                totals = {one: spent + left[steps[-1][0]] for one, (spent, steps) in tried.items()}
                picked[place] = min(totals, key=lambda one: totals[one])
                now[place] = totals[picked[place]]
            left = now
            chosen.insert(0, picked)
        return self._shares(ends, chosen)

    def _shares(
        self, ends: Sequence[int], chosen: Sequence[Mapping[int, Setting]]
    ) -> list[tuple[Setting, float]]:
        """Follow the choices, and share the seconds of every step among the passages of its tokens."""
        place, setting = 0, Setting(PLAIN)
        per_token: list[float] = []
        found = []
        for end, picked in zip(ends, chosen, strict=True):
            if place < end:
                setting = picked[place]
                for after, seconds in self.walk(setting, place, end)[1]:
                    per_token += [seconds / (after - place)] * (after - place)
                    place = after
            found.append(setting)
        borders = zip((0, *ends[:-1]), ends, strict=True)
        return [(one, sum(per_token[a:b])) for one, (a, b) in zip(found, borders, strict=True)]

    def _ends(self, setting: Setting, place: int, end: int) -> list[int]:
        return [after for after, _ in self.walk(setting, place, end)[1][-1:]]

    def by_step(self) -> float:
        """Seconds with the best choice at every step: the shortest way through the answer."""
        left_P = [0.0] * (self.positions + 1)
        for place in reversed(range(self.positions)):
            ways = [self.step(PLAIN, 0, 0, False) + left_P[place + 1]]
            for drafter, found in self.drafters.items():
                drafts = {self._drafted(one, place) for one in self.settings(drafter)}
                for nodes, depth, kept in drafts.union(self._drafts(found, place)):
                    after = place + 1 + min(kept, self.positions - 1 - place)
                    looks = found.previews_P is not None
                    ways.append(self.step(drafter, nodes, depth, looks) + left_P[after])
            left_P[place] = min(ways)
        return left_P[0]

    def _drafted(self, setting: Setting, place: int) -> tuple[int, int, int]:
        """Nodes, levels and accepted tokens."""
        if setting.drafter == PLAIN:
            return 0, 0, 0
        found = self.drafters[setting.drafter]
        nodes, depth = setting.nodes, setting.depth
        if setting.least is not None:
            assert found.previews_P is not None
            nodes = depth = sum(chance >= setting.least for chance in found.previews_P[place])
        nodes, depth, kept, _ = found.draft(place, Budget(nodes, depth))
        return nodes, depth, min(kept, self.positions - 1 - place)

    def _drafts(self, found: Recorded, place: int) -> Iterator[tuple[int, int, int]]:
        """Every draft that could be asked for here."""
        for most, guesses in found.guesses.items():
            for depth in range(1, len(guesses[place].nodes_D) + 1):
                nodes = depth if found.budget.shape.beam == 0 else most
                yield found.draft(place, Budget(nodes, depth))[:3]


def look_back(
    engine: Engine,
    method: Method,
    request: GenerationRequest,
    answer: Sequence[int],
    steps: Sequence[Step],
    tick: Callable[[str, int], None] = lambda part, done: None,
) -> Hindsight:
    """Ask all drafters of a method again, price their drafts, and compare.

    Args:
        request: of the answer.
        answer: its tokens, at least two.
        steps: those after the prompt, one of them at least.
        tick: told of the parts, of which there are three.

    Cost: a pass per token, a draft of each size of every drafter per token, and some timed passes.
    """
    serving = method.serving((request.rule or request.params.grammar) is not None)
    others = {name: one for name, one in serving.items() if name != PLAIN}
    asked = {name: one for name, one in others.items() if one.drafter.traits.deterministic}
    took: dict[str, list[float]] = {}

    def timed(drafter: str, levels: int, seconds: float) -> None:
        if levels:
            took.setdefault(drafter, []).append(1e3 * seconds / levels)

    tick("asking all drafters again", 0)
    drafters: Mapping[str, Recorded] = {}
    if asked:
        drafters = record_given(engine, asked, request, answer, timed).drafters
    tick("timing passes", 1)
    most = max((one.budget.max_nodes for one in drafters.values()), default=0)
    rows = [count for count in _ROWS if count <= 1 + max(2, most)]
    context = min(len(request.prompt) + len(answer) // 2, engine.target.max_positions - rows[-1])
    curve = measure(engine.target, rows=rows, contexts=(max(1, context),), batches=(1,), repeat=_REPEAT)
    tick("comparing", 1)
    look, step, judge = _overheads(steps)
    device = Device(
        name="here",
        rows_R=curve.rows_R,
        pass_R=rising([1e3 * seconds for seconds in curve.seconds_CR[0]]),
        levels={name: (median(found), 0.0) for name, found in took.items()},
        look=look,
        step=step,
        judge=judge,
    )
    found = compare(Priced(drafters, len(answer) - 1, device), steps, _texts(engine, answer))
    tick("comparing", 1)
    left = tuple(name for name in others if name not in asked)
    return Hindsight(
        passages=found[0],
        whole=found[1],
        by_step=found[2],
        measured=sum(step.seconds for step in steps),
        left_out=left,
    )


def rising(values: Sequence[float]) -> tuple[float, ...]:
    """The nearest values that never fall: a pass over more rows does not take less."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return tuple(mean for mean, count in pools for _ in range(count))


def compare(
    priced: Priced, steps: Sequence[Step], text: Callable[[int, int], str]
) -> tuple[tuple[Passage, ...], dict[Setting, float], float]:
    """Passages, the best setting of every drafter for the whole answer, and seconds of the best steps.

    Args:
        text: what stands from one position to before another.
    """
    cuts = _cut(steps)
    best = priced.by_passage([end for _, end, _ in cuts])
    passages = []
    for (start, end, part), (setting, seconds) in zip(cuts, best, strict=True):
        drafters: dict[str, int] = {}
        for step in part:
            drafters[step.drafter] = drafters.get(step.drafter, 0) + 1
        passages.append(
            Passage(
                first=start + 2,
                last=end + 1,
                text=text(start, end),
                drafters=dict(sorted(drafters.items(), key=lambda one: -one[1])),
                seconds=sum(
                    priced.step(step.drafter, step.drafted, step.depth, bool(priced.drafters))
                    for step in part
                ),
                plain=(end - start) * priced.step(PLAIN, 0, 0, False),
                best=setting,
                best_seconds=seconds,
            )
        )
    return tuple(passages), priced.best(), priced.by_step()


def _cut(steps: Sequence[Step]) -> list[tuple[int, int, list[Step]]]:
    """Runs of steps of at least TOKENS tokens, with the positions that they cover."""
    found: list[tuple[int, int, list[Step]]] = []
    start = place = 0
    part: list[Step] = []
    for step in steps:
        part.append(step)
        place += step.emitted
        if place - start >= TOKENS:
            found.append((start, place, part))
            start, part = place, []
    if part and found and place - start < TOKENS // 2:
        first, _, before = found.pop()
        found.append((first, place, before + part))
    elif part:
        found.append((start, place, part))
    return found


def _overheads(steps: Sequence[Step]) -> tuple[float, float, float]:
    """Milliseconds outside of passes and drafts: of planning, of the rest of a step, of a draft besides."""
    after = [1e3 * (step.verbs["judge"] + step.verbs["commit"]) for step in steps]
    plain = [ms for ms, step in zip(after, steps, strict=True) if not step.drafted]
    drafted = [ms for ms, step in zip(after, steps, strict=True) if step.drafted]
    usual = median(plain or after)
    look = median(1e3 * step.verbs["plan"] for step in steps)
    return look, usual, max(0.0, median(drafted or [usual]) - usual)


def _texts(engine: Engine, answer: Sequence[int]) -> Callable[[int, int], str]:
    """Text of the answer by position; empty without a tokenizer."""
    tokenizer = engine.target.tokenizer
    if tokenizer is None:
        return lambda start, end: ""
    return lambda start, end: tokenizer.decode(answer[start + 1 : end + 1], continues=True)
