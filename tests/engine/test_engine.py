from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from outpace import (
    Conversation,
    Engine,
    ModelError,
    OutpaceError,
    RequestError,
    SamplingParams,
    SpecError,
    UnknownNameError,
)
from outpace.methods.eagle3.objective import Eagle3, Eagle3Config
from outpace.models.prefix import PIECE
from outpace.models.tiny import TableTarget
from outpace.types import Budget, Draft, Plan, Riders

SHORT = {"max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32")


def test_every_kind_of_prompt(engine):
    ids = engine.encode("ab ab ab")
    by_text = engine.generate("ab ab ab", **SHORT)
    assert by_text.tokens == engine.generate(list(ids), **SHORT).tokens
    assert by_text.tokens == engine.generate(torch.tensor(ids), **SHORT).tokens
    assert by_text.prompt_tokens == len(ids)
    chat = [{"role": "user", "content": "ab"}]
    if engine.target.tokenizer.chat_template:
        alone = engine.generate(chat, **SHORT)
        assert alone.tokens == engine.generate("ab", chat=True, **SHORT).tokens
    both = engine.generate(["ab ab ab", list(ids)], **SHORT)
    assert [r.tokens for r in both] == [by_text.tokens] * 2
    assert engine.generate([list(ids)], **SHORT)[0].tokens == by_text.tokens


def test_prompts_of_one_batch_have_their_own_settings(engine):
    params = [
        SamplingParams(**SHORT),
        SamplingParams(temperature=1.0, seed=5, **SHORT),
        SamplingParams(max_new_tokens=3, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=3, seed=5, n=2, **SHORT),
    ]
    batch = engine.generate(["abc abc"] * 4, params)
    assert len(batch) == 5
    singles = [engine.generate("abc abc", p) for p in params]
    assert [r.tokens for r in batch[:3]] == [r.tokens for r in singles[:3]]
    assert [r.tokens for r in batch[3:]] == [r.tokens for r in singles[3]]
    assert batch[3].tokens != batch[4].tokens and batch[3].seed != batch[4].seed


SAMPLED = {"temperature": 0.9, "max_new_tokens": 16, "ignore_eos": True}
DRAFTS = "draft_model[model=tiny layers=1 tree=2x2]"


def test_a_seed_asks_for_the_same_text_whoever_drafts(engine):
    """In any batch: beside a request without a seed, and with one that is greedy."""
    prompts = ["abc abc", "ab ab ab", "cd cd"]
    params = [
        SamplingParams(seed=5, **SAMPLED),
        SamplingParams(**SAMPLED),
        SamplingParams(seed=6, **{**SAMPLED, "temperature": 0.0}),
    ]
    plain = engine.generate(prompts, params, drafter="none")
    for spec in (DRAFTS, "auto", "prompt_lookup[tree_size=4]"):
        mixed = engine.generate(prompts, params, drafter=spec)
        alone = engine.generate(prompts[0], params[0], drafter=spec)
        assert [mixed[0].tokens, mixed[2].tokens] == [plain[0].tokens, plain[2].tokens]
        assert alone.tokens == plain[0].tokens


def test_without_a_seed_or_if_declined_coins_are_independent(engine):
    """What judges a request is told by its seed, by what it says, and by the method spec."""
    method, named = engine.method(DRAFTS), engine.method("prompt_lookup[verifier=match]")
    seeded, free = SamplingParams(seed=1), SamplingParams()
    names = [
        engine.verifier(*asked).name
        for asked in (
            (method, None, free),
            (method, None, seeded),
            (method, False, seeded),
            (method, True, free),
            (named, None, seeded),
            (named, False, seeded),
        )
    ]
    assert names == ["tree", "coupled", "tree", "coupled", "match", "match"]
    declined = engine.generate("abc abc", drafter=DRAFTS, seed=5, reproducible=False, **SAMPLED)
    plain = engine.generate("abc abc", drafter="none", seed=5, reproducible=False, **SAMPLED)
    keyed = engine.generate("abc abc", drafter=DRAFTS, seed=5, **SAMPLED)
    assert len({declined.tokens, plain.tokens, keyed.tokens}) == 3
    again = engine.generate("abc abc", drafter=DRAFTS, seed=5, reproducible=False, **SAMPLED)
    assert again.tokens == declined.tokens, "the same decisions, the same text"


def test_a_conversation_keeps_the_promise_too(engine):
    params = SamplingParams(seed=5, **SAMPLED)
    texts = []
    for spec in ("none", DRAFTS):
        talk = Conversation(engine, params, drafter=spec)
        texts.append([list(talk.send(said))[-1].result.tokens for said in ("ab ab", "cd cd")])
        talk.close()
    assert texts[0] == texts[1]


def test_logprobs_are_the_models_own(engine):
    result = engine.generate("abab abab", logprobs=3, **SHORT)
    ids = engine.encode("abab abab")
    from outpace.types import Feed

    cache = engine.target.new_cache()
    with torch.no_grad():
        logits = engine.target.score([Feed.chain(cache.open(), [*ids, *result.tokens])], cache).logits_TV
    want = logits.float().log_softmax(-1)
    assert len(result.logprobs) == len(result.tokens)
    for i, lp in enumerate(result.logprobs):
        row = want[len(ids) - 1 + i]
        assert lp.token == result.tokens[i]
        assert lp.logprob == pytest.approx(float(row[lp.token]), abs=1e-3)
        assert [t for t, _ in lp.top] == row.topk(3).indices.tolist()


def test_stop_strings_trim_the_text(engine):
    whole = engine.generate("abab abab", max_new_tokens=24, ignore_eos=True)
    middle = whole.text[5:8]
    assert middle
    cut = engine.generate("abab abab", max_new_tokens=24, ignore_eos=True, stop=(middle,))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(middle)]


def test_counters_add_up(engine):
    result = engine.generate([7, 8, 9] * 4, max_new_tokens=30, ignore_eos=True)
    c = result.counters
    assert c.new_tokens == 30 == len(result.tokens)
    assert c.mean_emitted == pytest.approx(29 / c.passes)
    assert c.accepted == sum(c.accepted_at) and c.accepted <= sum(c.drafted_at)
    assert 0.0 <= c.acceptance_rate <= 1.0
    assert result.to_json()["mean_emitted"] == c.mean_emitted
    assert set(c.__dataclass_fields__) <= set(result.to_json()), "as docs/json.md says of its first table"


@pytest.mark.parametrize(
    ("prompt", "settings", "says"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        ([5, 10**6], {}, "outside the vocabulary"),
        (3.5, {}, "got float"),
        ([1.5, 2.5], {}, "token ids are whole numbers; a prompt holds [1.5, 2.5]"),
        (torch.tensor([1.5]), {}, "token ids are whole numbers"),
        (b"abc", {}, "a prompt is text, token ids or chat messages, got bytes"),
        ([b"abc"], {}, "got bytes"),
        ([1], {"reference": [5, 10**6]}, "the reference: token 1000000 is outside the vocabulary"),
        ([1], {"reference": [-1]}, "token -1 is outside the vocabulary"),
        ([1], {"reference": 5}, "a reference is text or token ids, got int"),
        ([1], {"reference": [[1.5]]}, "a reference holds [1.5]"),
        ([1], {"reference": b"ab"}, "got bytes"),
        ([1], {"stop": 3}, "stop must be a string or a list of strings, got 3"),
        ([1], {"logit_bias": [1, 2]}, "logit_bias must be a mapping"),
        ([1], {"banned_tokens": 7}, "banned_tokens must be a list of token ids, got 7"),
        ([1], {"logit_bias": {10**6: 1.0}}, "1000000"),
        ([1], {"allowed_tokens": {5}, "stop_token_ids": {5}, "min_tokens": 1}, "no token may be"),
    ],
)
def test_bad_requests_are_one_clear_line_and_leave_nothing(engine, prompt, settings, says):
    with pytest.raises(RequestError) as error:
        engine.generate(prompt, **settings)
    assert says in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(RequestError):
        engine.stream(prompt, **settings)  # before its first chunk
    assert not engine.cache._slots


def test_stop_strings_need_a_tokenizer_and_what_cannot_begin_leaves_nothing(monkeypatch):
    engine = Engine(TableTarget.random(seed=0), drafter="none")
    for ask in (engine.generate, engine.stream):
        with pytest.raises(RequestError, match=r"stop strings \('a',\) need a tokenizer"):
            ask([1], stop="a")
        with pytest.raises(RequestError, match=r"put its tokenizer\.json into the model's folder"):
            ask("a")

    def broken(request):
        raise OutpaceError("no room")

    monkeypatch.setattr(engine.method().drafter, "begin", broken)
    with pytest.raises(OutpaceError, match="no room"):
        engine.generate([1])
    assert not engine.cache._slots


@pytest.mark.parametrize(
    "spec",
    [
        "none[policy=goodput]",
        "recycling[tree_size=0 policy=goodput]",
        "auto[drafters=recycling[tree_size=0]+draft_model[model=tiny layers=1 tree_size=0]]",
    ],
)
def test_who_has_no_budget_drafts_nothing(engine, spec):
    answer = engine.generate("abc abc", drafter=spec, **SHORT)
    assert answer.tokens == engine.generate("abc abc", drafter="none", **SHORT).tokens
    assert answer.counters.drafted == 0


def test_the_last_token_of_a_context_is_not_drafted():
    target = TableTarget.of({(0,): (0, 1), (): (1, 0)})
    target.max_positions = 12
    engine, depths = Engine(target, drafter="none"), []
    engine.listeners.append(lambda record: depths.extend(row.depth for row in record.rows))
    answer = engine.generate([0, 1, 0, 1, 0, 1], drafter="prompt_lookup", max_new_tokens=99)
    assert len(answer.tokens) == 6 and answer.finish_reason == "length"
    assert depths == [0, 4], "one pass for 4 guesses and the last token"


def test_an_unknown_setting_is_told_from_a_bad_value(engine):
    with pytest.raises(UnknownNameError, match="unknown setting 'temprature'; did you mean temp"):
        engine.generate([1], temprature=1.0)


def test_a_prompt_that_is_too_long_says_by_how_much(engine):
    context = engine.target.max_positions
    with pytest.raises(RequestError, match=rf"has {context + 4} tokens, 5 more than fit"):
        engine.generate([3] * (context + 4))


def test_bad_methods_are_refused_by_name(engine):
    with pytest.raises(UnknownNameError, match="did you mean prompt_lookup"):
        engine.generate([1, 2], drafter="prompt_lokup")
    for wrong in (3, ""):
        with pytest.raises(SpecError, match="write NAME"):
            engine.generate([1, 2], drafter=wrong)
    with pytest.raises(ModelError, match="no trained draft_model for tiny"):
        engine.generate([1, 2], drafter="draft_model")
    with pytest.raises(ModelError, match="layers=9"):
        engine.generate([1, 2], drafter="draft_model[model=tiny layers=9]")
    with pytest.raises(SpecError, match="drop one of the two"):
        engine.generate([1, 2], drafter="prompt_lookup[verifier=tree]", reproducible=True)
    with pytest.raises(SpecError, match="chains only"):
        engine.generate([1, 2], drafter="draft_model[model=tiny tree=2x2 verifier=chain]", temperature=1.0)
    assert not engine.cache._slots


def test_another_vocabulary_is_refused(monkeypatch, engine):
    from outpace.methods.draft_model import drafter as draft_model

    other = TableTarget.random(seed=0, vocab_size=engine.target.vocab_size + 1)
    with pytest.raises(ModelError, match="same vocabulary"):
        draft_model.check_vocabulary(other, engine.target)


def test_threads_take_turns(engine):
    """Calls and conversations of many threads get what they get alone, and leave no slot behind."""
    spec = "auto[drafters=suffix+prompt_lookup]"

    def ask(number):
        settings = {"max_new_tokens": 12, "temperature": 1.0, "seed": number}
        if number % 3:
            return engine.generate((1, 2, 3, number, 2, 3), drafter=spec, **settings).tokens
        with Conversation(engine, SamplingParams(**settings), drafter=spec) as talk:
            return [token for turn in ("a b", "c") for chunk in talk.send(turn) for token in chunk.tokens]

    alone = [list(ask(number)) for number in range(12)]
    with ThreadPoolExecutor(6) as threads:
        assert [list(tokens) for tokens in threads.map(ask, range(12))] == alone
    assert engine.cache.slots == 0


def test_a_turn_that_another_one_overtook_is_no_text(engine):
    talk = Conversation(engine, SamplingParams(max_new_tokens=6, ignore_eos=True))
    first = talk.send("abc")
    next(first)
    assert len(list(talk.send("def"))[-1].result.tokens) == 6
    with pytest.raises(RequestError, match="another turn has begun"):
        next(first)
    assert talk.messages[0]["content"] == "def" and len(talk.messages) == 2
    last = talk.send("ghi")
    next(last)
    talk.close()
    with pytest.raises(RequestError, match="or the conversation ended"):
        next(last)


def test_a_conversation_reads_each_token_once(engine):
    if not engine.target.tokenizer.chat_template:
        pytest.skip("the tiny model has no chat template")
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    talk = Conversation(engine, params)
    first = list(talk.send("ab ab"))[-1].result
    again = list(talk.send("cd cd"))[-1].result
    assert again.cached_tokens > 0, "the second turn found the first in the cache"
    fresh = engine.generate(talk.messages[:3], params)
    assert again.tokens == fresh.tokens
    assert talk.messages[1]["content"] == first.text
    before = list(talk.messages)
    broken = talk.send("ef")
    next(broken)
    broken.close()
    assert talk.messages == before, "a turn broken off leaves the dialogue unchanged"
    third = list(talk.send("gh"))[-1].result
    assert third.tokens == engine.generate(talk.messages[:5], params).tokens
    with pytest.raises(RequestError, match="empty"):
        talk.send("  ")
    with pytest.raises(RequestError, match="one answer per turn, got n=3"):
        Conversation(engine, SamplingParams(n=3))
    with pytest.raises(RequestError, match="params are SamplingParams, got int"):
        Conversation(engine, 5)
    with pytest.raises(RequestError, match="content of type int; give a string"):
        Conversation(engine).send(5)
    talk.close()
    assert not engine.cache._slots


def test_a_conversation_reads_again_what_heads_do_not_know(engine, monkeypatch):
    """Drafters that read features share whole pieces of a prefix, and others all of it."""
    if not engine.target.tokenizer.chat_template:
        pytest.skip("the tiny model has no chat template")
    drafter, params = engine.method(DRAFTS).drafter, SamplingParams(max_new_tokens=6, ignore_eos=True)
    cached = []
    for taps in (frozenset[str](), frozenset({"hidden.-1"})):
        monkeypatch.setattr(drafter, "traits", replace(drafter.traits, taps=taps))
        with Conversation(engine, params, drafter=DRAFTS) as talk:
            results = [list(talk.send(text))[-1].result for text in ("ab ab", "cd cd", "ef")]
        cached.append([one.cached_tokens for one in results])
        assert results[2].tokens == engine.generate(talk.messages[:5], params).tokens
    assert cached[1] == [count // PIECE * PIECE for count in cached[0]] != cached[0]


def test_a_turn_that_nobody_reads_opens_nothing(engine, monkeypatch):
    method = engine.method(DRAFTS)
    open_states = []
    begin, end = method.drafter.begin, method.drafter.end

    def began(request):
        open_states.append(begin(request))
        return open_states[-1]

    def ended(state):
        open_states.remove(state)
        end(state)

    monkeypatch.setattr(method.drafter, "begin", began)
    monkeypatch.setattr(method.drafter, "end", ended)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with Conversation(engine, params, drafter=DRAFTS) as talk:
        talk.send("ab ab")
        assert not open_states and not engine.cache._slots
        with pytest.raises(RequestError, match="more than fit"):
            talk.send("word " * engine.target.max_positions)
        unread = talk.send("cd cd")
        next(unread)
        assert len(open_states) == 1 and engine.cache._slots
        unread.close()
        assert not open_states
        answer = list(talk.send("ab ab"))[-1].result
        assert answer.tokens == engine.generate(talk.messages[:1], params, drafter="none").tokens
    assert not engine.cache._slots and not open_states


@pytest.fixture
def greedy_drafter(engine, monkeypatch):
    """Makes the drafter of a spec propose what it likes, as a stranger's might."""

    def make(draft, spec="prompt_lookup[tree_size=3]"):
        method = engine.method(spec)
        monkeypatch.setattr(method.drafter, "propose", lambda rows: [draft for _ in rows], raising=False)
        return method.spec

    return make


@pytest.mark.parametrize(
    ("draft", "room", "says"),
    [
        (Draft.chosen([5] * 4), 9, "4 nodes, 4 levels and 4 rows, where 3, 3"),
        (Draft.chosen([5, 6, 7]), 3, "3 nodes, 3 levels and 3 rows, where 3, 1"),
        (
            replace(Draft.chosen([5, 6]), riders=Riders((-1,) * 2, (-1,) * 2, (1, 2))),
            9,
            "2 nodes, 2 levels and 4 rows, where 3, 3 and 3",
        ),
    ],
)
def test_a_drafter_that_exceeds_its_budget_is_named(engine, greedy_drafter, monkeypatch, draft, room, says):
    spec = greedy_drafter(draft)
    method = engine.method(spec)
    monkeypatch.setattr(method, "budget", replace(method.budget, max_rows=3))
    with pytest.raises(OutpaceError) as error:
        engine.generate([1, 2], drafter=spec, max_new_tokens=room, ignore_eos=True)
    assert f"drafter '{spec}' broke its contract" in str(error.value)
    assert says in str(error.value) and not engine.cache._slots


def test_a_drafter_that_branches_where_chains_are_wanted_is_named(engine, greedy_drafter):
    chains = greedy_drafter(Draft.chosen([5, 6], [-1, -1]), "prompt_lookup[verifier=chain]")
    with pytest.raises(OutpaceError, match="a draft of several branches, where chains"):
        engine.generate([1, 2], drafter=chains, max_new_tokens=9, ignore_eos=True)


def test_a_policy_that_exceeds_its_limit_is_named(engine, monkeypatch):
    method = engine.method("prompt_lookup[tree_size=2]")
    plan = Plan(method.spec, Budget(max_nodes=2, max_depth=99))
    monkeypatch.setattr(method.policy, "plan", lambda rows, load: [plan for _ in rows])
    with pytest.raises(OutpaceError, match="policy Fixed broke its contract"):
        engine.generate([1, 2], drafter=method.spec, max_new_tokens=9, ignore_eos=True)


def test_a_trained_folder_drafts_by_its_path(tmp_path):
    tiny = Engine.load("tiny", dtype="float32")
    Eagle3.build(Eagle3Config(), tiny.target, None).save(tmp_path / "head", {})
    spec = f"{tmp_path}/head"
    by_path = tiny.generate([7, 8, 9], drafter=f"{spec}[tree=chain]", **SHORT)
    assert by_path.drafter == f"eagle3[model={spec} tree=chain]" and by_path.counters.drafted
    assert by_path.tokens == tiny.generate([7, 8, 9], drafter="none", **SHORT).tokens
    assert Engine(tiny.target, spec).drafter == f"eagle3[model={spec}]"
    assert tiny.generate([7, 8], drafter=f"auto[drafters={spec}]", **SHORT).tokens
