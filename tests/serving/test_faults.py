"""Whatever breaks in a step, the texts of the other sequences are those of an undisturbed run."""

import threading

import pytest

from outpace import Engine
from outpace import step as step_module
from outpace.cache.base import KVCache
from outpace.engine.sequence import ActiveSequence
from outpace.methods.lookup.suffix import Suffix
from outpace.models.decoder import Decoder
from outpace.sampling import Warp
from outpace.serving.events import Done, Failed, Tokens
from outpace.serving.memory import Memory
from outpace.serving.per_request_policy import PerRequestPolicy
from outpace.serving.service import Service
from outpace.stops import StopChecker
from outpace.verifiers.coupled import Coupled
from outpace.verifiers.tree import Tree

PROMPTS = [[5, 9, 11, 5, 9], [7, 7, 3, 7, 7, 3, 7], [20, 21, 22, 20, 21]]
SETTINGS = [
    {"temperature": 0.0, "stop": ["zzzz"], "logprobs": 1},
    {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.1},
    {"temperature": 0.0, "presence_penalty": 0.2},
]
POINTS = {
    "make room": (Memory, "settle"),
    "begin": (Suffix, "begin"),
    "plan": (PerRequestPolicy, "plan"),
    "promise": (Suffix, "promise"),
    "draft": (Suffix, "propose"),
    "drop what a drafter tried": (KVCache, "drop"),
    "score": (Decoder, "score"),
    "laws of the batch": (step_module, "laws_of_batch"),
    "law": (Warp, "law"),
    "judge": (Tree, "judge"),
    "judge a seeded text": (Coupled, "judge"),
    "cut": (ActiveSequence, "cut"),
    "cut, in the text": (StopChecker, "cut"),
    "keep": (KVCache, "keep"),
    "extend": (ActiveSequence, "extend"),
    "extend, in the penalties": (Warp, "advance"),
    "extend, in the text": (StopChecker, "take"),
    "observe": (Suffix, "observe"),
    "learn": (PerRequestPolicy, "learn"),
}


class Fault(Exception):
    """What is thrown."""


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


class Heard:
    """What came of one request."""

    def __init__(self):
        self.text, self.ids, self.end = "", (), None

    def __call__(self, event):
        if isinstance(event, Tokens):
            self.text, self.ids = self.text + event.text, self.ids + event.ids
        else:
            assert isinstance(event, Done | Failed)
            self.end = event
            self.done.set()


def answers(engine, arm=None):
    heard = [Heard() for _ in PROMPTS]
    for one in heard:
        one.done = threading.Event()
    with Service(engine, drafters=("suffix",), chunk=3) as service:
        ready = [
            service.request(prompt, max_new_tokens=14, ignore_eos=True, **own)
            for prompt, own in zip(PROMPTS, SETTINGS, strict=True)
        ]
        if arm is not None:
            arm()
        for one, request in zip(heard, ready, strict=True):
            service.submit(request, one)
        assert all(one.done.wait(20) for one in heard)
    return heard


@pytest.fixture(scope="module")
def undisturbed(engine):
    return [(one.text, one.ids) for one in answers(engine)]


def throws(monkeypatch, owner, name, when):
    """Let a call raise as its ``when``-th one, before or after its work."""
    honest, calls = getattr(owner, name), [0]
    number, late = when

    def faulty(*args, **more):
        calls[0] += 1
        if calls[0] != number:
            return honest(*args, **more)
        if late:
            honest(*args, **more)
        raise Fault(name)

    monkeypatch.setattr(owner, name, faulty)
    return calls


BEFORE_COMMIT = {"plan", "promise", "draft", "score", "laws of the batch"}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_no_fault_reaches_another_sequence(engine, undisturbed, monkeypatch, point, late):
    reached = 0
    for number in (1, 2, 3, 5, 8, 13):
        with monkeypatch.context() as patch:
            calls = throws(patch, *POINTS[point], (number, late))
            heard = answers(engine)
        reached += calls[0] >= number
        failed = [one for one in heard if isinstance(one.end, Failed)]
        assert len(failed) <= (0 if point in BEFORE_COMMIT else 1), (point, number)
        assert all(isinstance(one.end.error, Fault) for one in failed)
        for one, (text, ids) in zip(heard, undisturbed, strict=True):
            if one in failed:
                assert text.startswith(one.text) and ids[: len(one.ids)] == one.ids
            else:
                assert (one.text, one.ids) == (text, ids), (point, number)
                assert one.end.result.text == text and one.end.result.tokens == ids
    assert reached or point == "promise", "the point was never reached"


def test_a_listener_of_the_engine_that_fails_changes_no_text(undisturbed):
    engine, calls = Engine.load("tiny", dtype="float32", drafter="none"), []

    def listener(record):
        calls.append(record)
        if len(calls) in (2, 9):
            raise Fault("listener")

    engine.listeners.append(listener)
    heard = answers(engine)
    assert [(one.text, one.ids) for one in heard] == undisturbed and len(calls) > 6


def test_a_drafter_that_cannot_begin_anew_costs_its_own_sequence_alone(engine, undisturbed, monkeypatch):
    ended, end = [], Suffix.end
    monkeypatch.setattr(Suffix, "end", lambda self, state: (ended.append(state), end(self, state)))
    throws(monkeypatch, Suffix, "observe", (3, False))
    throws(monkeypatch, Suffix, "begin", (len(PROMPTS) + 1, False))
    heard = answers(engine)
    assert sum(isinstance(one.end, Failed) for one in heard) == 1
    assert len(ended) == len({id(state) for state in ended}) >= len(PROMPTS), "each state ends once"
    for one, (text, ids) in zip(heard, undisturbed, strict=True):
        assert isinstance(one.end, Failed) or (one.text, one.ids) == (text, ids)
