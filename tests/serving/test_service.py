"""The service: many requests at once, each as if it were alone."""

import itertools
import os
import sys
import threading
import time

import pytest
import torch

from outpace import Engine, RequestError
from outpace.coins import later_seed
from outpace.drafters import model_rows
from outpace.drafters.base import Traits
from outpace.drafters.model_rows import ModelDrafter
from outpace.errors import QueueFull, ServiceClosed
from outpace.methods.lookup.adaptive_ngram import AdaptiveNgram
from outpace.methods.lookup.prompt_lookup import PromptLookup
from outpace.methods.lookup.suffix import Suffix
from outpace.models.tiny import TableTarget
from outpace.serving.events import Done, Failed, Tokens
from outpace.serving.memory import free_bytes
from outpace.serving.openmp import let_go
from outpace.serving.service import Service
from tests.support import until

PROMPT = [5, 9, 11, 5, 9]
LONG = [(7 * i) % 40 + 3 for i in range(400)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
PLAIN = {"drafters": ("none",)}


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self, answers=1, at=None):
        self.events, self.times, self._left = [], [], answers
        self.done = threading.Event()
        self._at = at

    def __call__(self, event):
        self.events.append(event)
        self.times.append(time.perf_counter())
        if self._at is not None:
            self._at(self)
        if isinstance(event, Done | Failed):
            self._left -= 1
            if not self._left:
                self.done.set()

    def wait(self):
        assert self.done.wait(20), self.events
        return self

    @property
    def ends(self):
        return [event for event in self.events if isinstance(event, Done | Failed)]

    @property
    def results(self):
        return {event.index: event.result for event in self.wait().ends}

    @property
    def result(self):
        (result,) = self.results.values()
        return result

    def tokens(self, index=0):
        return sum((e.ids for e in self.events if isinstance(e, Tokens) and e.index == index), ())


def ask(service, prompt, key="", heard=None, **settings):
    heard = Heard() if heard is None else heard
    heard.ticket = service.submit(service.request(prompt, **settings), heard, key=key)
    return heard


def ask_at_once(service, prompts, **settings):
    """Queue all prompts before the service sees the first, however slow this thread is."""
    with service._wake:
        return [ask(service, prompt, **settings) for prompt in prompts]


def empty(engine):
    engine.cache.check_integrity()
    return not engine.cache._slots


def many(count=64):
    """Prompts of all lengths, greedy and sampled, with every kind of drafter."""
    for i in range(count):
        prompt = [*LONG[: (37 * i) % 130], *PROMPT, i]
        heat = {"temperature": 0.8 * (i % 2), "seed": i, "ignore_eos": True}
        yield (
            prompt,
            ("prompt_lookup", "suffix", "auto", "none")[i % 4],
            {**heat, "max_new_tokens": 3 + i % 11},
        )


@pytest.fixture(scope="module")
def alone(engine):
    return [engine.generate(p, drafter=d, **own) for p, d, own in many()]


@pytest.mark.parametrize("limits", [{}, {"pages": 20, "chunk": 48, "stored_pages": 8}])
def test_64_requests_at_once_are_answered_as_if_alone(engine, alone, limits):
    drafters = ("prompt_lookup", "suffix", "auto")
    with Service(engine, drafters=drafters, max_batch=16, **limits) as service:
        heard = [ask(service, p, drafter=d, **own) for p, d, own in many()]
        for one, expected in zip(heard, alone, strict=True):
            assert one.result.tokens == expected.tokens == one.tokens()
            assert one.result.text == expected.text
        stats = service.stats()
        assert stats.finished == {"length": 64} and not stats.running and not stats.waiting
        assert sum(counts.accepted for counts in stats.drafters.values()) > 0
        assert stats.new_tokens == sum(len(one.tokens) for one in alone)
    assert empty(engine)


def test_statistics_of_an_answer_add_up(engine):
    with Service(engine, drafters=("suffix",)) as service:
        result = ask(service, PROMPT, max_new_tokens=40, **GREEDY).result
    (counts,) = result.by_drafter.values()
    c = result.counters
    assert (counts.drafted, counts.accepted) == (c.drafted, c.accepted) and counts.accepted > 0
    assert counts.accepted == sum(counts.accepted_at) and counts.drafts <= c.passes
    assert result.finish_reason == "length" and result.prompt_tokens == len(PROMPT)
    assert result.queue_seconds >= 0 and 0 < result.prefill_seconds <= result.seconds


def test_drafts_keep_to_the_limit_of_their_request(engine):
    drafted = []
    engine.listeners.append(lambda record: drafted.extend(row.drafted for row in record.rows))
    try:
        for most in (0, 2, None):
            drafted.clear()
            with Service(engine, drafters=("suffix",)) as service:
                heard = ask(service, PROMPT, draft_tokens=most, max_new_tokens=40, **GREEDY)
                assert len(heard.result.tokens) == 40
            assert max(drafted) == (most if most is not None else max(drafted))
            assert most is not None or max(drafted) > 2
    finally:
        engine.listeners.clear()


def test_n_answers_have_seeds_of_their_own(engine):
    own = {"temperature": 0.9, "max_new_tokens": 8, "ignore_eos": True}
    with Service(engine, drafters=("none",)) as service:
        heard = ask(service, PROMPT, heard=Heard(3), n=3, seed=5, **own)
        results = heard.results
        free = ask(service, PROMPT, heard=Heard(2), n=2, **own).results
    for index, result in results.items():
        again = engine.generate(PROMPT, seed=later_seed(5, index), drafter="none", **own)
        assert result.tokens == again.tokens and result.seed == later_seed(5, index)
    assert free[0].seed != free[1].seed


def test_who_cancels_leaves_at_once_and_frees_memory(engine):
    with Service(engine, max_batch=2, **PLAIN) as service:
        long = {"max_new_tokens": 900, **GREEDY}

        def stop(heard):
            if len(heard.events) == 5:
                heard.ticket.cancel()

        first = Heard(at=stop)
        request = service.request(PROMPT, **long)
        # The ticket must be there before the first event is.
        with service._wake:
            first.ticket = service.submit(request, first)
        other = ask(service, PROMPT, **long)
        waits = ask(service, PROMPT, **long)
        assert first.result.finish_reason == "cancelled" and len(first.result.tokens) == 5
        until(lambda: waits.events)
        other.ticket.cancel()
        waits.ticket.cancel()
        queued = ask(service, PROMPT, **long)
        queued.ticket.cancel()
        reasons = {one.result.finish_reason for one in (other, waits, queued)}
        assert reasons == {"cancelled"}
        other.ticket.cancel()  # harmless
        assert len(ask(service, PROMPT, max_new_tokens=3, **GREEDY).result.tokens) == 3
        assert service.stats().finished == {"cancelled": 4, "length": 1}
    assert empty(engine)


def test_a_full_queue_refuses(engine):
    gate = threading.Event()
    with Service(engine, max_batch=1, max_queue=2, **PLAIN) as service:
        first = ask(service, PROMPT, heard=Heard(at=lambda _: gate.wait(20)), max_new_tokens=2)
        until(lambda: not service.stats().waiting)
        waiting = [ask(service, PROMPT, max_new_tokens=1) for _ in range(2)]
        with pytest.raises(QueueFull, match="max_queue=2"):
            ask(service, PROMPT, max_new_tokens=1)
        gate.set()
        assert all(one.result.tokens for one in (first, *waiting))
    with pytest.raises(ServiceClosed, match="closing"):
        ask(service, PROMPT)
    assert service.closing and service.broken is None


def test_slots_that_are_free_are_room_in_the_queue(engine, monkeypatch):
    with Service(engine, max_batch=4, max_queue=2, **PLAIN) as service:
        with monkeypatch.context() as patch:
            patch.setattr(service, "_admit", lambda: None)  # as if all came before the first could enter
            first = [ask(service, PROMPT, max_new_tokens=1) for _ in range(6)]
            with pytest.raises(QueueFull, match=r"6 answers are waiting.*max_queue=2"):
                ask(service, PROMPT, max_new_tokens=1)
        assert all(one.result.tokens for one in first)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"drafter": "max_gram"}, "max_gram.*not started.*none"),
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"max_new_tokens": 1000}, "pages"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(engine, settings, words):
    with Service(engine, pages=8, **PLAIN) as service, pytest.raises(RequestError, match=words):
        ask(service, PROMPT, **settings)


def test_a_listener_that_fails_ends_its_request_alone(engine):
    def fail(heard):
        raise OSError("gone")

    with Service(engine, **PLAIN) as service:
        bad = ask(service, PROMPT, heard=Heard(at=fail), max_new_tokens=500, **GREEDY)
        good = ask(service, PROMPT, max_new_tokens=20, **GREEDY)
        assert len(good.result.tokens) == 20
        assert service.close() and len(bad.events) == 1
        assert service.stats().finished == {"length": 1, "cancelled": 1}
    assert empty(engine)


@pytest.mark.parametrize("where", ["begin", "propose", "observe"])
def test_a_drafter_that_fails_for_one_text_ends_that_alone(engine, monkeypatch, where):
    honest = getattr(PromptLookup, where)

    def tokens(first):
        if where == "begin":
            return [first.prompt]
        if where == "propose":
            return [row.tokens for row in first]
        return [state.tokens for state in first]

    def broken(self, first, *rest):
        if any(99 in text[:1] for text in tokens(first)):
            raise ZeroDivisionError("a defect")
        return honest(self, first, *rest)

    monkeypatch.setattr(PromptLookup, where, broken)
    own = {"max_new_tokens": 20, **GREEDY}
    # Before the service is open: from then on the engine belongs to it.
    expected = [engine.generate([first, *PROMPT], drafter="none", **own) for first in (4, 6, 8)]
    with Service(engine, drafters=("prompt_lookup",)) as service:
        heard = [ask(service, [first, *PROMPT], **own) for first in (4, 99, 6, 8)]
        ends = [one.wait().ends[0] for one in heard]
        assert isinstance(ends[1], Failed) and isinstance(ends[1].error, ZeroDivisionError)
        for alone, end in zip(expected, (ends[0], *ends[2:]), strict=True):
            assert end.result.tokens == alone.tokens
        assert service.stats().finished == {"length": 3, "error": 1}
    assert empty(engine)


def test_a_drafter_that_fails_at_the_end_loses_no_answer(engine, monkeypatch, caplog):
    """Nor a slot, nor the end of the other drafters of the sequence."""
    ended = []

    def broken(self, state):
        raise OSError("no space left")

    monkeypatch.setattr(Suffix, "end", broken)
    monkeypatch.setattr(PromptLookup, "end", lambda self, state: ended.append(state))
    expected = engine.generate(PROMPT, drafter="none", max_new_tokens=8, **GREEDY)
    spec = "auto[drafters=prompt_lookup+suffix+adaptive_ngram]"
    monkeypatch.setattr(AdaptiveNgram, "end", lambda self, state: ended.append(state))
    with Service(engine, drafters=(spec,)) as service:
        assert ask(service, PROMPT, max_new_tokens=8, **GREEDY).result.tokens == expected.tokens
        assert service.stats().finished == {"length": 1} and service.broken is None
    assert len(ended) == 2 and "no space left" in caplog.text
    assert empty(engine)


def test_a_long_prompt_holds_nobody_up_for_more_than_a_chunk(engine):
    """Between two tokens of one answer lies at most one chunk of another's prompt."""
    records = []
    engine.listeners.append(records.append)
    try:
        with Service(engine, chunk=32, max_batch=4, **PLAIN) as service:

            def join(heard):
                if len(heard.events) == 2:
                    heard.late = ask(service, LONG, max_new_tokens=2, **GREEDY)
                    heard.short = ask(service, PROMPT, max_new_tokens=2, **GREEDY)

            first = ask(service, PROMPT, heard=Heard(at=join), max_new_tokens=40, **GREEDY).wait()
            late, short = first.late.result, first.short.result
    finally:
        engine.listeners.clear()
    assert late.tokens == engine.generate(LONG, max_new_tokens=2, drafter="none", **GREEDY).tokens
    assert short.tokens == first.result.tokens[:2]
    prompts = [record for record in records if record.prompt]
    assert max(record.passed_rows for record in prompts) == 32
    assert len(prompts) >= len(LONG) // 32
    kinds = [record.prompt for record in records]
    together = kinds[kinds.index(False) : len(kinds) - kinds[::-1].index(True)]
    assert not any(a and b for a, b in itertools.pairwise(together))
    assert first.short.times[-1] < first.late.times[0], "the short one does not wait for the long"


def test_chunks_change_nothing(engine):
    texts = []
    for chunk in (7, 64, 1000):
        with Service(engine, drafters=("suffix",), chunk=chunk, stored_pages=0) as service:
            heard = [ask(service, LONG[i:], max_new_tokens=12, **GREEDY) for i in (0, 100, 399)]
            texts.append([one.result.tokens for one in heard])
    assert texts[0] == texts[1] == texts[2]


def test_what_was_read_before_is_copied_within_one_key_only(engine):
    own = {"max_new_tokens": 4, **GREEDY}
    expected = engine.generate(LONG, drafter="none", **own).tokens
    with Service(engine, **PLAIN) as service:
        results = [ask(service, LONG, key=key, **own).result for key in ("a", "a", "b", "a")]
        assert [one.cached_tokens for one in results] == [0, 384, 0, 384]
        assert all(one.tokens == expected for one in results)
        changed = ask(service, [*LONG[:200], 50, *LONG[201:]], key="a", **own).result
        assert changed.cached_tokens == 192
        stats = service.stats()
        assert stats.cached_tokens == 960 and stats.pages_stored == 6 + 6 + 3
    assert empty(engine)


def test_what_a_lossy_view_wrote_is_copied_by_nobody():
    lossy = "token_select[budget=40 sinks=2 window=16 run=2 lossy=true]"
    engine = Engine.load("tiny", dtype="float32", drafter="none", allow_lossy=True)
    settings = {**GREEDY, "max_new_tokens": 70}
    with Service(engine, drafters=("none", lossy)) as service:
        first = ask(service, LONG[:140], drafter=lossy, **settings).result
        longer = [*LONG[:140], *first.tokens, 5, 9]
        found = ask(service, longer, drafter="none", logprobs=1, **GREEDY, max_new_tokens=4).result
    assert not first.lossless and found.lossless
    assert found.cached_tokens == 128, "the prompt was read without a view"
    plain = engine.generate(longer, logprobs=1, **GREEDY, max_new_tokens=4)
    assert [one.logprob for one in found.logprobs] == pytest.approx([one.logprob for one in plain.logprobs])


def test_those_that_come_together_read_their_common_beginning_once(engine):
    with Service(engine, max_batch=8, chunk=64, **PLAIN) as service:
        own = {"max_new_tokens": 3, **GREEDY}
        heard = ask_at_once(service, [[*LONG[:320], i] for i in range(6)], **own)
        cached = [one.result.cached_tokens for one in heard]
    assert cached[0] == 0 and min(cached[1:]) >= 256


@pytest.mark.parametrize("drafter", ["prompt_lookup", "draft_model[model=tiny layers=1]", "auto"])
@pytest.mark.parametrize("settings", [GREEDY, {"temperature": 0.8, "seed": 4, "ignore_eos": True}])
def test_who_loses_its_memory_goes_on_as_if_nothing_had_happened(engine, drafter, settings):
    own = {"max_new_tokens": 72, **settings}
    prompts = [LONG[: 61 + i] for i in range(3)]
    with Service(engine, drafters=(drafter,), pages=7, stored_pages=0) as service:
        heard = ask_at_once(service, prompts, draft_tokens=3, **own)
        results = [one.result for one in heard]
        assert service.stats().preempted > 0
        assert service.stats().pages == 7
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == engine.generate(prompt, drafter=drafter, **own).tokens
    order = [one.times[-1] for one in heard]
    assert order[0] == min(order), "the first to come is never sent away"
    assert empty(engine)


def test_a_cache_of_unknown_size_has_no_limit_and_shares_pages_all_the_same():
    engine = Engine(TableTarget.random(0, vocab_size=50), drafter="none")
    prompt, own = LONG[:200], {"max_new_tokens": 5, "temperature": 1.0, "seed": 3}
    with Service(engine, drafters=("none",)) as service:
        results = [ask(service, prompt, **own).result for _ in range(2)]
        assert service.stats().pages == 0 and service.stats().pages_stored == 3
    assert [one.cached_tokens for one in results] == [0, 192]
    again = engine.generate(prompt, drafter="none", **own)
    assert {one.tokens for one in results} == {again.tokens}


def test_drafters_that_read_features_are_shown_them_again(engine, monkeypatch):
    """All features from where a state begins, each position once, whatever was lost between."""
    monkeypatch.setattr(PromptLookup, "traits", Traits(taps=frozenset({"hidden.-1"})))
    begin, observe, kept, place = PromptLookup.begin, PromptLookup.observe, [], {}

    def begins(self, request):
        kept.append(begin(self, request))
        place[id(kept[-1])] = request.num_cached
        return kept[-1]

    def observes(self, states, outcomes):
        for state, outcome in zip(states, outcomes, strict=True):
            assert place[id(state)] == outcome.start
            assert len(outcome.scored.taps["hidden.-1"]) > max(outcome.row_F)
            place[id(state)] += len(outcome.fed)
        observe(self, states, outcomes)

    monkeypatch.setattr(PromptLookup, "begin", begins)
    monkeypatch.setattr(PromptLookup, "observe", observes)
    own = {"max_new_tokens": 72, **GREEDY}
    with Service(engine, drafters=("prompt_lookup",), pages=7) as service:
        heard = ask_at_once(service, [LONG[: 61 + i] for i in range(3)], **own)
        results = [one.result for one in heard]
        assert service.stats().preempted > 0 and len(kept) > 3
    for i, result in enumerate(results):
        assert result.tokens == engine.generate(LONG[: 61 + i], drafter="none", **own).tokens
    assert empty(engine)


def test_drafters_remember_within_one_key_only(engine):
    own = {"max_new_tokens": 40, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    with Service(engine, drafters=("suffix[shared=true]",)) as service:
        accepted = [ask(service, PROMPT, key=key, **own).result.counters.accepted for key in ("a", "b", "a")]
    assert accepted[0] == accepted[1] < accepted[2], accepted


def test_workers_are_let_go_and_come_back():
    """A thread with a worker of its own: the worker ends, and the next piece of work has one."""
    rows, seen = torch.arange(600.0 * 600).view(600, 600) / 1e6, []

    def work():
        torch.set_num_threads(2)
        results = [rows.exp()]
        seen.append(threads())
        done = let_go()
        end = time.monotonic() + 5
        while done and threads() >= seen[0] and time.monotonic() < end:
            time.sleep(0.01)
        seen.extend((done, threads()))
        results.append(rows.exp())
        seen.extend((threads(), torch.equal(*results)))

    def threads():
        return len(os.listdir("/proc/self/task"))

    if not sys.platform.startswith("linux"):
        assert not let_go()
        return
    before = torch.get_num_threads()
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
    finally:
        torch.set_num_threads(before)
    with_worker, done, without, again, equal = seen
    assert equal
    if not done:
        pytest.skip("this build of torch has workers of another library")
    assert without == with_worker - 1 and again == with_worker


def test_a_text_that_was_stored_is_read_by_portions_by_drafters_too(engine, monkeypatch):
    """The target knows it already; the draft model reads it between passes, not in one of them."""
    monkeypatch.setattr(model_rows, "CATCH_UP", 48)
    spec, rows, own = "draft_model[model=tiny]", [], {"max_new_tokens": 40, **GREEDY}
    fresh = Engine(engine.target, "none")
    score = ModelDrafter.expand, ModelDrafter.observe

    def counted(self, verb, *arguments):
        before = {slot: self.cache.length(slot) for slot in self.cache._slots}
        found = score[verb](self, *arguments)
        rows.extend(
            len(self.cache.slot(slot).tail_ids) + self.cache.length(slot) - was
            for slot, was in before.items()
        )
        return found

    monkeypatch.setattr(ModelDrafter, "expand", lambda self, *more: counted(self, 0, *more))
    monkeypatch.setattr(ModelDrafter, "observe", lambda self, *more: counted(self, 1, *more))
    with Service(fresh, drafters=(spec,), chunk=32) as service:
        first = ask(service, LONG, **own).result
        assert first.cached_tokens == 0 and sum(rows) >= len(LONG)
        rows.clear()
        again = ask(service, LONG, **own).result
    assert again.tokens == first.tokens and again.cached_tokens > 300
    assert max(rows) <= 48 < sum(rows), max(rows)
    assert 0 < again.counters.accepted < first.counters.accepted


def test_what_is_free_counts_files_that_may_be_forgotten(tmp_path):
    """A container that has read the weights of its model has used their size, and may use it."""
    group, cpu = tmp_path / "sys/fs/cgroup", torch.device("cpu")
    assert free_bytes(cpu, tmp_path) is None
    for name, text in (
        ("proc/meminfo", "MemTotal: 99 kB\nMemAvailable:  90 kB\n"),
        ("sys/fs/cgroup/memory.max", "max\n"),
        ("sys/fs/cgroup/memory.current", "40960\n"),
        ("sys/fs/cgroup/memory.stat", "anon 8192\nactive_file 1024\ninactive_file 30720\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_bytes(cpu, tmp_path) == 90 * 1024
    (group / "memory.max").write_text("51200\n")
    assert free_bytes(cpu, tmp_path) == 51200 - 40960 + 30720
    (group / "memory.max").write_text("35840\n")
    assert free_bytes(cpu, tmp_path) == 35840 - 40960 + 30720


@pytest.mark.parametrize("pages", [0, 1])
def test_a_limit_must_leave_room_for_one(engine, pages):
    with pytest.raises(RequestError, match=f"pages must be at least 2, got {pages}"):
        Service(engine, pages=pages, **PLAIN)


def test_rows_beyond_the_limit_are_given_back(engine):
    """Riders are more rows than guesses; the bookkeeping still holds when nobody asks any more."""
    with Service(engine, drafters=("lookahead[window=60]",), pages=6) as service:
        ids = [(7 * i) % 100 + 3 for i in range(service.longest - 60)]
        heard = ask(service, ids, max_new_tokens=60, **GREEDY)
        assert len(heard.result.tokens) == 60
        until(lambda: not service._batch.running and service._memory._allocated <= 6)
        assert ask(service, PROMPT, max_new_tokens=2, **GREEDY).result.tokens


def test_closing_answers_what_was_asked_or_drops_it(engine):
    service = Service(engine, max_batch=1, **PLAIN)
    heard = [ask(service, PROMPT, max_new_tokens=5, **GREEDY) for _ in range(3)]
    assert service.close() and all(len(one.result.tokens) == 5 for one in heard)
    service = Service(engine, max_batch=1, **PLAIN)
    heard = [ask(service, PROMPT, max_new_tokens=900, **GREEDY) for _ in range(3)]
    assert not service.close(drain=False)
    assert {one.result.finish_reason for one in heard} == {"cancelled"}
    assert not service._thread.is_alive() and empty(engine)
