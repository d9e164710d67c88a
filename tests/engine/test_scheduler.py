import itertools

import pytest
import torch

from outpace import Engine, RequestError, SamplingParams
from outpace.engine.scheduler import Scheduler
from outpace.machine import Machine
from outpace.methods.lookup.prompt_lookup import PromptLookup

PROMPTS = [[5, 9, 11, 5, 9], [40, 41, 42, 43, 44, 40], [77], list(range(3, 60)), [8, 8, 8], [12, 4]]
MIXED = {"temperature": 0.8, "seed": 3, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture
def engine():
    return Engine.load("tiny", dtype="float32")


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
def test_answers_do_not_depend_on_who_joins_and_leaves(engine, drafter):
    lengths = [3, 12, 7, 5, 9, 4]
    alone = [
        engine.generate(p, drafter=drafter, **{**MIXED, "max_new_tokens": n}).tokens
        for p, n in zip(PROMPTS, lengths, strict=True)
    ]
    sizes = []
    engine.listeners.append(lambda record: sizes.append(len(record.rows)))
    stop = {p[-1]: None for p in PROMPTS}
    assert len(stop) == len(PROMPTS)
    done = dict(engine.map(PROMPTS, batch=2, drafter=drafter, **MIXED))
    assert max(sizes) == 2, "never more than asked for"
    for i, tokens in enumerate(alone):
        assert done[i].tokens[: len(tokens)] == tokens
    engine.cache.check_integrity()
    assert engine.cache.open() == 0, "all slots were given back"


def test_map_takes_params_with_their_prompts(engine):
    asked = [SamplingParams(**{**MIXED, "seed": i, "temperature": i % 2}) for i in range(6)]
    done = dict(engine.map(PROMPTS, iter(asked), batch=4, drafter="none"))
    for i, (prompt, own) in enumerate(zip(PROMPTS, asked, strict=True)):
        assert done[i].tokens == engine.generate(prompt, own, drafter="none").tokens
    with pytest.raises(RequestError, match="2 params for more prompts"):
        list(engine.map(PROMPTS, asked[:2], batch=2))
    with pytest.raises(RequestError, match="not both"):
        next(engine.map(PROMPTS, asked, temperature=1.0))
    with pytest.raises(RequestError, match="the one text 'abc'; give a list"):
        next(engine.map("abc"))


@pytest.mark.parametrize("params", [5, "warm", {"temperature": 1.0}, [{"temperature": 1.0}]], ids=repr)
def test_params_of_another_kind_are_refused(engine, params):
    with pytest.raises(RequestError, match="params are SamplingParams, got"):
        engine.generate([1, 2], [params] if isinstance(params, str) else params)
    with pytest.raises(RequestError, match="params are SamplingParams, got"):
        next(engine.map([[1, 2]], params))


def test_map_takes_prompts_one_by_one_and_answers_out_of_order(engine):
    taken = []

    def endless():
        for number in itertools.count():
            taken.append(number)
            yield [number % 50 + 1, 2]

    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    answers = engine.map(endless(), params, batch=3)
    first = [next(answers)[0] for _ in range(5)]
    assert sorted(first) == list(range(5))
    assert len(taken) <= 9, "no more than there is room for"
    answers.close()
    assert engine.cache.open() == 0


def test_short_answers_leave_before_long_ones(engine):
    def stop_at(tokens):
        return SamplingParams(max_new_tokens=tokens, ignore_eos=True)

    rows = []
    engine.listeners.append(lambda record: rows.append(record))
    results = engine.generate(PROMPTS[:3], [stop_at(2), stop_at(8), stop_at(5)], drafter="none")
    assert [len(r.tokens) for r in results] == [2, 8, 5]
    assert [len(r.rows) for r in rows if not r.prompt] == [3, 2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("drafter", "most"), [("none", 256), ("draft_model[model=tiny tree=chain tree_size=2]", 3 * 256)]
)
def test_prompts_are_read_faster_where_a_step_brings_more(engine, drafter, most):
    """A drafter that is always right brings three tokens per step, and three chunks are read."""
    prompts = [[5, 9], [7], [3 + i % 50 for i in range(1000)]]
    asked = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (90, 1, 2)]
    engine.method(drafter)
    read = []
    engine.listeners.append(lambda record: read.append(record) if record.prompt else None)
    dict(engine.map(prompts, asked, batch=2, drafter=drafter))
    beside = [record.passed_rows for record in read if record.passed_rows > 16]
    assert max(beside) == most, "the long prompt is read beside the first answer"


def test_a_bad_prompt_in_a_map_is_named_and_loses_no_slot(engine):
    answers = engine.map([[5, 6], []], batch=4, max_new_tokens=3)
    with pytest.raises(RequestError, match="empty"):
        list(answers)
    assert engine.cache.open() == 0
    with pytest.raises(RequestError, match="batch must be at least 1"):
        list(engine.map([[5]], batch=0))


def test_a_stream_that_is_never_read_holds_nothing(engine):
    stream = engine.stream(PROMPTS, **MIXED)
    assert engine.cache.open() == 0
    stream.close()


def test_steps_tell_passes_from_host_work(engine):
    records = []
    engine.listeners.append(records.append)
    engine.method("draft_model[model=tiny layers=1]")
    engine.generate(PROMPTS[0], drafter="draft_model[model=tiny layers=1]", **MIXED)
    for record in (r for r in records if not r.prompt):
        for verb in ("draft", "score"):
            assert 0 <= record.pass_seconds[verb] <= record.seconds[verb]
        assert record.pass_seconds["judge"] == record.pass_seconds["plan"] == 0
        assert (record.draft_levels > 0) == (record.rows[0].drafted > 0)
    assert sum(r.pass_seconds.get("draft", 0.0) for r in records) > 0


def test_steps_tell_what_previews_take(engine):
    records = []
    with engine.listening(records.append):
        engine.generate(PROMPTS[0], drafter="auto[drafters=suffix]", **MIXED)
    told = [record for record in records if not record.prompt]
    assert told and all(0 < record.preview_seconds < record.seconds["plan"] for record in told)


@pytest.mark.parametrize("given", ["text", "ids"])
def test_a_reference_reaches_the_drafter(monkeypatch, engine, given):
    seen = []
    begin = PromptLookup.begin
    monkeypatch.setattr(
        PromptLookup, "begin", lambda self, request: (seen.append(request.reference), begin(self, request))[1]
    )
    ids = engine.target.tokenizer.encode("abcabc", special=False)
    reference = "abcabc" if given == "text" else torch.tensor(ids).tolist()
    asked = {"drafter": "prompt_lookup", "max_new_tokens": 1}
    engine.generate(PROMPTS[:2], reference=reference, **asked)
    engine.generate(PROMPTS[:2], reference=[reference, None], **asked)
    assert seen == [tuple(ids)] * 3 + [None]
    with pytest.raises(RequestError, match="3 references for 2 prompts"):
        engine.generate(PROMPTS[:2], reference=[None] * 3)


def test_a_text_that_is_back_in_its_slot_goes_on_alone(engine):
    """A pass may fail behind its commit, so the slot holds all that was to be read."""
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    method = engine.method("none")
    request = engine.request(PROMPTS[0], params)
    row = engine.start_sequence(request, engine.cache.open(), method, method.verifier)
    drafters = {name: one.drafter for name, one in method.members.items()}
    scheduler = Scheduler(Machine(engine.target, engine.cache, drafters, method.policy))
    scheduler.join(row)
    while row.new_tokens < 2:
        scheduler.advance()
    row.behind = True
    while not row.finished:
        scheduler.advance_one(row)
    assert row.result().tokens == engine.generate(PROMPTS[0], params, drafter="none").tokens
