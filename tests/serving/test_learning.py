"""Learning beside serving: when drafters change, how much time it takes, what it must not do."""

import logging
import threading
import types

import pytest
import torch

from outpace import Engine, RequestError
from outpace.cli.main import main
from outpace.config import data_folder
from outpace.drafters.base import Drafter, Request
from outpace.methods.draft_model.drafter import DraftModel
from outpace.methods.draft_model.objective import DraftModelObjective, DraftModelTraining
from outpace.methods.draft_model.online.data import OnlineConfig
from outpace.methods.draft_model.online.learner import OnlineLearner
from outpace.models.tiny import tiny
from outpace.server.metrics import Meters
from outpace.serving.events import Done, Failed, ServiceStats
from outpace.serving.learning import PATIENCE, RETRY, Learning, Watched, learning_spec
from outpace.serving.service import Service
from outpace.tree.growth import DraftRow
from outpace.types import Draft, Outcome, Scored, Verdict
from tests.support import until

GREEDY = {"temperature": 0.0, "ignore_eos": True}
QUICK = OnlineConfig(
    held_out=0.25,
    least_held=64,
    held_rows=160,
    round_rows=384,
    unit_tokens=512,
    update_units=1,
    lr=5e-3,
    piece=24,
    context=8,
    top=16,
    repeats=5.0,
    seed=3,
)


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def base(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "drafter"
    options = DraftModelTraining(layers=1, take="1")
    DraftModelObjective.build(options, target, None).save(folder, {})
    return folder


def prompts(count, seed):
    coins = torch.Generator().manual_seed(seed)
    return torch.randint(2, 258, (count, 7), generator=coins).tolist()


class Told:
    """A listener that waits for the end."""

    def __init__(self):
        self.end = None
        self._done = threading.Event()

    def __call__(self, event):
        if isinstance(event, Done | Failed):
            self.end = event
            self._done.set()

    @property
    def result(self):
        assert self._done.wait(20)
        assert isinstance(self.end, Done), self.end
        return self.end.result


def ask(service, asked, key="", **settings):
    told = [Told() for _ in asked]
    for prompt, one in zip(asked, told, strict=True):
        ready = service.request(prompt, **{**GREEDY, "max_new_tokens": 20, **settings})
        service.submit(ready, one, key=key)
    return [one.result for one in told]


def rate(results):
    done = [one.counters for one in results]
    return sum(c.accepted for c in done) / sum(c.drafted for c in done)


def test_a_service_learns_and_its_text_stays(target, base, tmp_path):
    spec = f"draft_model[model={base} tree_size=2]"
    engine = Engine(target, drafter="none")
    learner = OnlineLearner(target, base, tmp_path / "learned", QUICK, spec=spec)
    last = prompts(12, 50)
    with Service(engine, drafters=(spec, "prompt_lookup"), learner=learner) as service:
        first = ask(service, last)
        for seed in range(3):
            ask(service, prompts(16, seed))
            until(lambda: not learner.busy, 60)
        final = ask(service, last)
        mixed = ask(service, last[:4], drafter="prompt_lookup")
        stats = service.stats()
        figures = Meters("tiny", service.stats).text().decode()
    assert stats.learned["versions"] >= 1 and stats.learned["broken"] == 0
    assert 'outpace:learning_versions_total{model_name="tiny"}' in figures
    assert rate(final) > rate(first) + 0.05, stats.learned
    plain = [one.tokens for one in engine.generate(last, drafter="none", max_new_tokens=20, **GREEDY)]
    for results in (first, final, mixed):
        assert [one.tokens for one in results] == plain[: len(results)]
    assert isinstance(engine.method(spec).drafter, DraftModel), "as it was before"
    OnlineLearner(target, base, tmp_path / "learned", QUICK, spec=spec).close()


def test_it_is_off_unless_asked_for(target, base):
    spec = f"draft_model[model={base}]"
    engine = Engine(target, drafter="none")
    with Service(engine, drafters=(spec,)) as service:
        ask(service, prompts(2, 0), max_new_tokens=4)
        assert type(engine.method(spec).drafter) is DraftModel
        assert type(service.stats()) is ServiceStats
        assert "learning" not in Meters("tiny", service.stats).text().decode()
    assert not (data_folder() / "learned").exists()


# When drafters change.


class Toy(Drafter[list]):
    """Guesses a token, and notes what it sees of others' guesses."""

    def __init__(self, name):
        self.name, self.strange, self.begun, self.ended = name, 0, 0, 0
        self.meanwhile = lambda: None

    @classmethod
    def load(cls, config, target):
        raise NotImplementedError

    def begin(self, request):
        self.begun += 1
        return [request]

    def propose(self, rows):
        drafts = [Draft.chosen([5], memo=self.name) for _ in rows]
        self.meanwhile()
        return drafts

    def observe(self, states, outcomes):
        self.strange += sum(one.draft.memo != self.name for one in outcomes)

    def end(self, state):
        self.ended += 1


class Script:
    """A learner of which nothing is expected."""

    spec = "toy"

    def __init__(self):
        self.keys, self.cost, self.now, self.steps, self.drafter = [], 0.0, 0.0, 0, None
        self.busy = False
        self.error = None
        self.version = None

    def begin(self, key, prompt):
        self.keys.append(key)
        return types.SimpleNamespace(branch=key or "all", drafter=self.drafter)

    def observe(self, texts, outcomes):
        if self.error is not None:
            raise self.error

    def end(self, text):
        pass

    def step(self, budget_s):
        self.steps += 1
        self.now += self.cost
        version, self.version = self.version, None
        return version

    def counts(self):
        return {"steps": self.steps}

    def close(self):
        pass


class Hasty(Watched):
    """Changes drafters whenever a version is there."""

    def adopt(self, version):
        for state in self._living:
            state.out = None
        return super().adopt(version)


def mixed_up(kind):
    """Guesses that were shown to another drafter than the one that made them."""
    old, new = Toy("old"), Toy("new")
    watched = kind(old, Script())
    version = types.SimpleNamespace(branch="all", drafter=new)
    states = [watched.begin(Request(prompt=(1, 2))) for _ in range(2)]
    pending = [version]

    def try_it():
        if pending and watched.adopt(pending[0]):
            pending.pop()

    old.meanwhile = try_it
    names = []
    for _ in range(3):
        rows = [DraftRow(s, s.tokens, None, None, None, None) for s in states]
        drafts = watched.propose(rows)
        names.append({draft.memo for draft in drafts})
        try_it()
        outcomes = [
            Outcome(
                d,
                Scored(torch.zeros(2, 9), (0, 2)),
                Verdict((0,), (5, 6)),
                (2, 5),
                (0, 1),
                len(s.tokens) - 1,
                drafter="toy",
            )
            for d, s in zip(drafts, states, strict=True)
        ]
        watched.observe(states, outcomes)
        try_it()
    for state in states:
        watched.end(state)
    assert (old.begun, new.begun) == (old.ended, new.ended) == (2, 2)
    return old.strange + new.strange, names


def test_drafters_change_between_steps_and_for_all():
    wrong, names = mixed_up(Watched)
    assert wrong == 0 and names == [{"old"}, {"new"}, {"new"}]
    assert mixed_up(Hasty)[0] > 0, "a change within a step is noticed"


def test_a_moved_sequence_begins_anew_with_its_whole_text():
    old, new = Toy("old"), Toy("new")
    watched = Watched(old, Script())
    mine = watched.begin(Request(prompt=(1, 2, 3), num_cached=1, key="a"))
    other = watched.begin(Request(prompt=(1, 2, 3), key="b"))
    reading = Outcome(Draft(), Scored(torch.zeros(0, 9), (0, 0)), Verdict((), ()), (2,), (0,), 1, forced=True)
    watched.observe([mine], [reading])
    assert watched.adopt(types.SimpleNamespace(branch="a", drafter=new))
    (request,) = mine.inner
    assert (request.prompt, request.num_cached, request.key) == ((1, 2, 3), 2, "a")
    ended = Outcome(Draft(), Scored(torch.zeros(1, 9), (0, 1)), Verdict((), (7,)), (3,), (0,), 2, forced=True)
    watched.observe([mine], [ended])
    assert watched.adopt(types.SimpleNamespace(branch="a", drafter=None))
    (request,) = mine.inner
    assert (request.prompt, request.num_cached) == ((1, 2, 3, 7), 4) and mine.drafter is old
    assert other.drafter is old and other.inner[0].key == "b"


# How much time it takes.


def learning(share, cost):
    learner = Script()
    learner.cost, learner.busy = cost, True
    method = types.SimpleNamespace(drafter=Toy("old"), policy=types.SimpleNamespace(reads_estimates=False))
    method.members = {"toy": method}
    return learner, Learning(learner, {"toy": method}, share, now=lambda: learner.now)


@pytest.mark.parametrize(("share", "cost"), [(0.03, 0.05), (0.2, 0.5), (0.1, 0.001), (0.0, 0.1)])
def test_learning_keeps_to_its_share_of_busy_time(share, cost):
    learner, made = learning(share, cost)
    busy = 0.0
    for _ in range(2000):
        learner.now += 0.02  # a pass
        busy += 0.02
        made.after_pass()
        spent = learner.steps * cost
        assert spent <= share * busy + cost * (share > 0) + 1e-6
    if share:
        assert learner.steps * cost > 0.9 * min(share * busy, 2000 * cost)
    steps = learner.steps
    learner.now += 1000.0  # a long night without work
    for _ in range(5):
        made.after_pass()
    assert learner.steps - steps <= 5
    assert made.idle() and learner.steps > steps, "idle time is free"
    learner.busy = False
    assert not made.idle()


def test_while_there_is_idle_time_passes_are_left_alone():
    learner, made = learning(0.1, 0.001)
    made.idle()
    steps, began = learner.steps, learner.now
    while learner.now < began + PATIENCE - 0.1:
        learner.now += 0.02
        made.after_pass()
    assert learner.steps == steps > 0
    learner.now += 0.2  # none came for too long
    made.after_pass()
    assert learner.steps == steps + 1


def test_a_greedy_accountant_would_be_noticed():
    learner, made = learning(0.03, 0.05)
    made.share = 0.3
    for _ in range(500):
        learner.now += 0.02
        made.after_pass()
    assert learner.steps * 0.05 > 0.03 * 10.0 + 0.05


# What it must not do.


def test_learning_goes_on_when_the_disk_has_room_again(caplog):
    learner, made = learning(0.1, 0.001)
    step, tried = learner.step, []

    def full(budget_s):
        tried.append(learner.now)
        raise OSError("no space left on device")

    learner.step = full
    with caplog.at_level(logging.ERROR):
        assert not made.idle() and len(tried) == 1
    assert "learning pauses for 60 seconds" in caplog.text
    assert made.stats(ServiceStats()).learned["broken"] == 1
    learner.now += RETRY - 1
    assert not made.idle() and len(tried) == 1
    learner.now += 2
    learner.step = step
    assert made.idle() and learner.steps == 1
    assert made.stats(ServiceStats()).learned["broken"] == 0


@pytest.mark.parametrize("place", ["begin", "observe", "end", "step"])
def test_a_learner_that_fails_stops_learning_and_not_the_service(target, base, caplog, place):
    spec = f"draft_model[model={base}]"
    engine, learner = Engine(target, drafter="none"), Script()
    learner.spec, learner.busy = spec, True

    def broken(*_):
        raise OSError("the disk is full")

    setattr(learner, place, broken)
    with (
        caplog.at_level(logging.ERROR, "outpace.learning"),
        Service(engine, drafters=(spec,), learner=learner) as service,
    ):
        asked = prompts(3, 0)
        for _ in range(2):
            results = ask(service, asked, max_new_tokens=6)
        stats = service.stats()
    plain = engine.generate(asked, drafter="none", max_new_tokens=6, **GREEDY)
    assert [one.tokens for one in results] == [one.tokens for one in plain]
    assert stats.learned["broken"] == 1 and "the disk is full" in caplog.text


@pytest.mark.parametrize("shared", [False, True])
def test_keys_are_apart_unless_they_share(target, base, shared):
    spec = f"draft_model[model={base}]"
    engine, learner = Engine(target, drafter="none"), Script()
    learner.spec = spec
    with Service(engine, drafters=(spec,), learner=learner, share_across_keys=shared) as service:
        long = [(7 * i) % 40 + 3 for i in range(130)]
        for key in ("a", "b"):
            (result,) = ask(service, [long], key, max_new_tokens=2)
    assert learner.keys == (["", ""] if shared else ["a", "b"])
    assert bool(result.cached_tokens) is shared, "prefixes too"


def test_what_does_not_learn_is_said(capsys, target):
    engine = Engine(target, drafter="none")
    methods = {name: engine.method(name) for name in ("suffix", "prompt_lookup")}
    with pytest.raises(RequestError, match="suffix, prompt_lookup do not learn"):
        learning_spec(methods)
    learner, made = learning(0.1, 0.1)
    made._method.policy.reads_estimates = True
    with pytest.raises(RequestError, match="toy: its policy reads estimates"):
        Learning(learner, {"toy": made._method})
    for arguments, says in (
        (["-d", "none", "--learn"], "--learn is for draft_model, and none, reference do not learn"),
        (["--learn-share", "1"], "--learn-share must be in [0, 1), got 1"),
        (["--learn-topics", "0"], "--learn-topics must be at least 1"),
    ):
        assert main(["serve", "--model", "tiny", "--port", "0", *arguments]) == 2
        assert says in capsys.readouterr().err
