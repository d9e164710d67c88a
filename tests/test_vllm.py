"""Drafters inside vLLM, against a caller that moves, removes, preempts and resumes rows as vLLM does."""

import os
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import outpace.vllm as proposers
from outpace.errors import ModelError, SpecError
from outpace.vllm import PATIENCE, Auto, Proposer, Suffix

LONGEST, MOST = 160, 6


class Shared(Proposer):
    drafter = "suffix[shared=true]"


def config(longest=LONGEST, most=MOST):
    """What vLLM hands over, as far as it is read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="some/model", tokenizer="some/model", max_model_len=longest, get_vocab_size=lambda: 50
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=most, method="custom_class", model=""),
    )


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """No tokenizer, and a clock that only passes move."""
    monkeypatch.setattr("outpace.models.hf.config.read_tokenizer", lambda place: None)
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(proposers, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    monkeypatch.setattr(Caller, "clock", now)
    return now


def text_of(seed, length=LONGEST):
    """A text that repeats pieces of itself, with slips."""
    rng = random.Random(seed)
    pieces = [[rng.randrange(12) for _ in range(rng.randrange(4, 9))] for _ in range(4)]
    tokens = []
    while len(tokens) < length:
        piece = list(rng.choice(pieces))
        piece[rng.randrange(len(piece))] = rng.randrange(12)
        tokens += piece if rng.random() < 0.4 else rng.choice(pieces)
    return tokens[:length]


class Caller:
    """The part of vLLM that calls a drafter: rows of one matrix, judged by what the model would say.

    Holes are filled with the last row, rows swap places, prompts are read in chunks, and preempted requests
    come back with all they said as their prompt.
    """

    clock = None

    def __init__(self, drafter, slots, price=0.0):
        self.drafter, self.price = drafter, price  # of a guess, in passes
        self.matrix = np.full((slots, LONGEST), 7, np.int32)
        self.rows = []  # names, by row
        self.texts, self.done, self.read, self.drafts = {}, {}, {}, {}
        self.heard = {}  # (name, tokens so far) -> draft
        self.passes = self.drafted = self.kept = 0

    def add(self, name, text, prompt):
        """A new request, or one that resumes: its tokens so far are its prompt."""
        self.texts[name] = text
        self.done.setdefault(name, prompt)
        self.read[name] = 0
        self.drafts[name] = []
        self.rows.append(name)
        self.matrix[len(self.rows) - 1, : self.done[name]] = text[: self.done[name]]

    def remove(self, name):
        i, last = self.rows.index(name), len(self.rows) - 1
        self.matrix[i] = self.matrix[last]
        self.rows[i] = self.rows[last]
        self.rows.pop()

    def swap(self, i, j):
        self.matrix[[i, j]] = self.matrix[[j, i]]
        self.rows[i], self.rows[j] = self.rows[j], self.rows[i]

    def step(self, chunk=1000, silent=False):
        """A pass. ``silent``: vLLM does not ask the drafter, and checks guesses of token 0."""
        self.passes += 1
        self.clock.seconds += 0.01 * (1 + self.price * sum(len(self.drafts[name]) for name in self.rows))
        sampled = []
        for i, name in enumerate(self.rows):
            text, done = self.texts[name], self.done[name]
            self.read[name] = min(done, self.read[name] + chunk)
            if self.read[name] < done:
                sampled.append([])
                continue
            draft, kept = self.drafts[name], 0
            assert done + len(draft) <= LONGEST
            while kept < len(draft) and draft[kept] == text[done + kept]:
                kept += 1
            self.drafted += len(draft)
            self.kept += kept
            new = text[done : done + kept + 1]
            self.matrix[i, done : done + len(new)] = new
            self.done[name] = self.read[name] = done + len(new)
            sampled.append(new)
        counts = np.array([self.done[name] for name in self.rows] + [0] * (len(self.matrix) - len(self.rows)))
        if silent:
            for name in self.rows:
                self.drafts[name] = [0] * min(MOST, LONGEST - self.done[name])
            return
        answers = self.drafter.propose(sampled, counts, self.matrix, slot_mappings=None)
        assert len(answers) == len(self.rows)
        for name, new, answer in zip(self.rows, sampled, answers, strict=True):
            assert len(answer) <= min(MOST, LONGEST - self.done[name])
            assert new or not answer
            assert all(type(token) is int for token in answer)
            self.drafts[name] = list(answer)
            if new:
                self.heard[name, self.done[name]] = answer

    def ended(self):
        return [name for name in self.rows if self.done[name] >= LONGEST - 1]


def alone(cls, name, text, prompt):
    caller = Caller(cls(config()), 1)
    caller.add(name, text, prompt)
    while not caller.ended():
        caller.step()
    return caller


def test_a_request_gets_nearly_the_same_guesses_whatever_happens_to_its_row():
    texts = {f"r{i}": text_of(i) for i in range(9)}
    texts["twin"] = texts["r3"]  # two requests of equal text
    rng = random.Random(5)
    caller, waiting, gone = Caller(Suffix(config()), 4), list(texts), {}
    while waiting or caller.rows or gone:
        for name, back in list(gone.items()):
            if caller.passes >= back and len(caller.rows) < 4:
                caller.add(name, texts[name], 20)
                del gone[name]
        if waiting and len(caller.rows) < 4 and rng.random() < 0.5:
            caller.add(name := waiting.pop(0), texts[name], 20)
        if len(caller.rows) > 1 and rng.random() < 0.5:
            caller.swap(*rng.sample(range(len(caller.rows)), 2))
        if len(caller.rows) > 1 and rng.random() < 0.1:
            name = rng.choice(caller.rows)
            if caller.read[name] == caller.done[name]:  # preempted: its guesses are lost
                caller.remove(name)
                gone[name] = caller.passes + rng.randrange(1, PATIENCE // 2)
        caller.step(chunk=rng.choice([64, 1000]))
        for name in caller.ended():
            caller.remove(name)
    assert caller.kept > 100
    compared = same = 0
    for name, text in texts.items():
        by_itself = alone(Suffix, name, text, 20)
        shared = [key for key in by_itself.heard.keys() & caller.heard.keys() if by_itself.heard[key]]
        compared += len(shared)
        same += sum(by_itself.heard[key] == caller.heard[key] for key in shared)
    # Guesses of a request that was preempted were never judged whole, so it trusts itself a little otherwise.
    assert compared > 100
    assert same > 0.9 * compared


def test_nothing_differs_where_rows_only_move():
    texts = {f"r{i}": text_of(i) for i in range(6)}
    rng = random.Random(1)
    caller, waiting = Caller(Suffix(config()), 3), list(texts)
    while waiting or caller.rows:
        if waiting and len(caller.rows) < 3:
            caller.add(name := waiting.pop(0), texts[name], 20)
        if len(caller.rows) > 1:
            caller.swap(*rng.sample(range(len(caller.rows)), 2))
        caller.step()
        for name in caller.ended():
            caller.remove(name)
    for name, text in texts.items():
        by_itself = alone(Suffix, name, text, 20)
        assert {key: draft for key, draft in caller.heard.items() if key[0] == name} == by_itself.heard


def spied(drafter, monkeypatch):
    """Counts of requests that began and ended, for the only member of a drafter."""
    counts = {"begin": 0, "end": 0}
    (member,) = drafter._members.values()
    for what in counts:
        real = getattr(member.drafter, what)

        def call(given, real=real, what=what):
            counts[what] += 1
            return real(given)

        monkeypatch.setattr(member.drafter, what, call)
    return counts


def test_states_end_a_while_after_their_rows_left(monkeypatch):
    drafter = Suffix(config())
    counts = spied(drafter, monkeypatch)
    caller = Caller(drafter, 2)
    caller.add("stays", text_of(1), 10)
    for i in range(5):
        caller.add(f"short{i}", text_of(10 + i), 10)
        caller.step()
        caller.remove(f"short{i}")
    assert counts == {"begin": 6, "end": 0}
    for _ in range(PATIENCE + 1):
        caller.step()
    assert counts == {"begin": 6, "end": 5}
    assert sum(map(len, drafter._texts.values())) == 1


def test_a_request_that_comes_back_in_time_is_known_again(monkeypatch):
    drafter = Suffix(config())
    counts = spied(drafter, monkeypatch)
    caller, text = Caller(drafter, 2), text_of(2)
    caller.add("other", text_of(3), 10)
    caller.add("one", text, 10)
    caller.step()
    caller.remove("one")
    for _ in range(PATIENCE - 1):
        caller.step()
    caller.add("one", text, 10)
    caller.step()
    assert counts["begin"] == 2
    caller.remove("one")
    for _ in range(PATIENCE + 1):
        caller.step()
    caller.add("one", text, 10)
    caller.step()
    assert counts == {"begin": 3, "end": 1}


def test_steps_that_nobody_told_of_are_caught_up(monkeypatch):
    drafter = Suffix(config())
    counts = spied(drafter, monkeypatch)
    caller = Caller(drafter, 2)
    caller.add("one", text_of(4), 10)
    caller.add("two", text_of(5), 10)
    for i in range(12):
        caller.step(silent=i % 3 == 1)
        caller.swap(0, 1)
    assert counts == {"begin": 2, "end": 0}
    (texts,) = zip(*[(text.tokens,) for same in drafter._texts.values() for text in same], strict=True)
    assert sorted(texts) == sorted(caller.texts[name][: caller.done[name]] for name in ("one", "two"))


def test_lookups_save_passes_and_auto_picks_among_them():
    for cls in (Suffix, Auto):
        caller = Caller(cls(config()), 4)
        for i in range(4):
            caller.add(f"r{i}", text_of(20 + i), 30)
        while not caller.ended():
            caller.step()
        said = sum(caller.done.values()) - 4 * 30
        assert caller.kept > 0.3 * said, cls
        assert 4 * caller.passes < 0.7 * said, cls
    assert len(Auto(config())._members) > 1


@pytest.mark.parametrize("cls", [Suffix, Auto])
def test_a_pass_that_reads_prompts_alone_gets_no_guesses(cls):
    caller = Caller(cls(config()), 1)
    caller.step()  # no rows at all
    caller.add("long", text_of(40), 100)
    for _ in range(3):
        caller.step(chunk=30)
    assert not caller.heard
    while not caller.ended():
        caller.step()
    assert caller.kept > 10


def test_auto_stops_guessing_where_guesses_cost_too_much():
    """Passes whose time is that of their rows: a guess must then be nearly sure."""
    drafted = {}
    for price in (0.0, 1.0):
        caller = Caller(Auto(config()), 1, price)
        caller.add("one", text_of(30), 30)
        while not caller.ended():
            caller.step()
        drafted[price] = caller.drafted
    assert 0 < drafted[1.0] < 0.5 * drafted[0.0]


def test_a_shared_store_serves_the_next_request():
    rng = random.Random(0)
    text = [rng.randrange(50) for _ in range(LONGEST)]  # repeats little of its own
    kept = {}
    for cls in (Suffix, Shared):
        caller = Caller(cls(config()), 2)
        caller.add("first", text, 30)
        while not caller.ended():
            caller.step()
        caller.remove("first")
        caller.add("between", text_of(9), 30)
        for _ in range(PATIENCE + 1):
            caller.step()
        caller.remove("between")
        caller.kept = 0
        caller.add("again", text, 30)
        while not caller.ended():
            caller.step()
        kept[cls] = caller.kept
    assert kept[Shared] > 60 > kept[Suffix]


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("recycling", SpecError, "reads more than text"),
        ("eagle3", ModelError, "cannot"),
        ("suffix[tree=4x2]", SpecError, "chains only"),
        ("grammar", SpecError, "reads more than text"),
    ],
)
def test_drafters_that_read_more_than_text_are_refused(spec, error, says):
    own = type("Own", (Proposer,), {"drafter": spec})
    with pytest.raises(error, match=says):
        own(config())


def test_the_module_needs_neither_vllm_nor_transformers():
    code = (
        "import sys, outpace.vllm\n"
        "print([name for name in ('vllm', 'transformers', 'gguf', 'fastapi') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Suffix", "Auto"])
def test_vllm_itself_makes_the_classes(name):
    made = pytest.importorskip(
        "vllm.v1.spec_decode.custom_class_proposer",
        reason="vLLM is not installed; docs/vllm.md names the version that was tried",
    )
    given = config()
    given.speculative_config.model = f"outpace.vllm.{name}"
    caller = Caller(made.create_custom_proposer(given), 1)
    caller.drafter.load_model(None)
    caller.add("one", text_of(6), 30)
    while not caller.ended():
        caller.step()
    assert caller.kept > 20
