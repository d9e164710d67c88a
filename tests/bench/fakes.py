"""Contenders whose texts and times are known, and a session of them."""

from outpace.bench.records import Case, Run, Settings
from outpace.bench.runner import Runner
from outpace.engine.results import Counters
from outpace.errors import RequestError


class Fake:
    """Takes one second for the prompt, then ``pace(case, turn)`` seconds per token.

    Args:
        text: case -> tokens; cut to the settings' length.
        fails: the settings under which it refuses to run.
    """

    def __init__(
        self,
        name,
        pace=lambda case, turn: 1.0,
        *,
        kind="drafter",
        text=None,
        fails=lambda settings: False,
        log=None,
        **about,
    ):
        self.name, self.kind, self.about = name, kind, about
        self.pace, self.fails = pace, fails
        self.text = text or (lambda case: [(7 * i + ord(case.id[0])) % 997 for i in range(200)])
        self.log = [] if log is None else log
        self.turns = {}
        self.closed = False

    def run(self, unit, settings):
        if self.fails(settings):
            raise RequestError(f"{self.name} cannot do this")
        self.log.append((self.name, tuple(case.id for case in unit), settings.max_new_tokens))
        turn = 0
        if settings.max_new_tokens > 16:  # warm-up does not count
            turn = self.turns[unit] = self.turns.get(unit, -1) + 1
        count = settings.max_new_tokens
        pace = max(self.pace(case, turn) for case in unit)
        decode = pace * (count - 1)
        passes = max(1, int((count - 1) * min(1.0, pace)))  # as many as its speed-up needs
        return Run(
            tokens=tuple(tuple(self.text(case)[:count]) for case in unit),
            seconds=1.0 + decode,
            prefill_seconds=1.0,
            counters=()
            if self.kind == "peer"
            else tuple(Counters(new_tokens=count, passes=passes) for _ in unit),
            verb_seconds={} if self.kind == "peer" else {"score_pass": decode / 2},
            full_tokens=0 if self.kind == "peer" else 10 * len(unit),
            full_seconds=0.0 if self.kind == "peer" else 5 * pace,
        )

    def close(self):
        self.closed = True


def case(name, group="x", seed=0):
    return Case(id=name, group=group, ids=tuple(range(len(name))), seed=seed)


CASES = [case("a"), case("bb"), case("c", "y"), case("dd", "y")]
LONG = Settings(max_new_tokens=40)


def session(*contenders, cases=CASES, settings=(LONG,), texts=None, **more):
    runner = Runner(contenders, {} if texts is None else texts, **more)
    return runner.run(cases, list(settings))
