import random
import threading

import numpy as np
import pytest

from outpace import Engine
from outpace.config import MethodSpec
from outpace.drafters.base import Request
from outpace.engine.method import SingleMethod
from outpace.errors import ModelError, SpecError
from outpace.methods.lookup import history as module
from outpace.methods.lookup.history import LEVELS, SAMPLES, SMALLEST, History, Keeper
from outpace.methods.lookup.suffix import Suffix, SuffixConfig
from outpace.models.load import load_target
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import budget as budget_of
from outpace.types import Budget, Draft, Drawn, Outcome, Verdict
from tests.support import until


def row_of(drafter, text, budget, doubt=1.0):
    state = drafter.begin(Request(prompt=tuple(text), num_cached=len(text)))
    state.trust.doubt = doubt
    return DraftRow(state, text, budget, None, None, Drawn.CHOSEN)


BUDGET = Budget(3, 3)


def propose(text, budget=BUDGET, history=None, doubt=1.0, **settings):
    drafter = Suffix(SuffixConfig(**settings), history)
    return drafter.propose([row_of(drafter, text, budget, doubt)])[0]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ([1, 2, 3, 9, 1, 2], (3, 9, 1)),
        ([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2], (3, 1, 2)),  # seen twice: not the newest
        ([1, 2, 3, 1, 2, 4, 1, 2], (4, 1, 2)),  # once each: the newest
        ([7, 1, 2, 5, 1, 2, 6, 1, 2, 6, 7, 1, 2], (5, 1, 2)),  # the longest suffix decides
        ([5, 5, 5], (5,)),  # what follows is known as far as the text goes
        ([1, 2, 3], ()),
        ([], ()),
    ],
)
def test_follows_what_came_most_often_after_the_longest_suffix(text, want):
    assert propose(text).token_N == want


def test_branches_carry_the_continuations_by_count():
    text = [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2]
    draft = propose(text, budget_of("2x2", None, 0), doubt=0.1)
    tree = {draft.path_tokens(node) for node in range(len(draft))}
    assert tree == {(3,), (4,), (3, 8), (3, 7), (4, 9)}
    first = draft.groups_of[-1][0]
    assert [draft.token_N[node] for node in first.nodes] == [3, 4]
    assert propose(text, Budget(3, 3)).parent_N == (-1, 0, 1), "a chain stays one"
    # Without a second continuation the template's first branch is followed.
    alone = propose([1, 2, 3, 9, 1, 2], budget_of("2x2x1", None, 0), doubt=0.1)
    assert (alone.token_N, alone.parent_N) == ((3, 9, 1), (-1, 0, 1))


def test_length_follows_the_match():
    rare, roomy = list(range(100, 150)), Budget(40, 40)
    lengths = [len(propose([*rare, *rare[:match]], roomy)) for match in (1, 3, 12, 30)]
    assert lengths == sorted(lengths) and lengths[0] <= 4 and lengths[-1] >= 16
    text = [*rare, *rare[:6]]
    assert len(propose(text, roomy, factor=0.5)) == 3
    assert propose(text, roomy, min_match=7).token_N == ()
    assert propose(text, Budget(2, 9)).token_N == (106, 107)


def oracle(tokens, query):
    """All places of the longest indexed phrase that ends the query, newest first."""

    def match(place):
        n = 0
        while n < min(module.LONGEST, len(query), place + 1) and tokens[place - n] == query[-1 - n]:
            n += 1
        return n

    for level in LEVELS:
        found = [
            (place, match(place))
            for place in range(len(tokens) - 2, -1, -1)
            if tokens[place + 1] >= 0 and match(place) >= level
        ]
        if found:
            return found
    return []


@pytest.mark.parametrize("alphabet", [2, 4, 30])
def test_the_history_finds_what_trying_everything_finds(alphabet):
    coins = random.Random(alphabet)
    history, texts = History(SMALLEST), []
    for _ in range(90):  # about 6700 tokens: the oldest are forgotten on the way
        texts.append([coins.randrange(alphabet) for _ in range(coins.randrange(1, 150))])
        history.add(texts[-1])
    tokens = list(history.tokens[: history.size])
    flat = [token for text in texts if len(text) > 1 for token in (*text, -1)]
    assert tokens == flat[-len(tokens) :] and len(tokens) <= SMALLEST < len(flat)
    hits = 0
    for _ in range(150):
        text = coins.choice(texts[-20:])
        start = coins.randrange(len(text))
        query = text[start : start + coins.randrange(1, 40)]
        want, got = oracle(tokens, query), history.find(query)
        hits += bool(want)
        if len(want) <= SAMPLES:
            assert got == want
        else:
            assert got and set(got) <= set(want)  # chains are walked so far and no further
    assert hits > 50


def test_growing_and_forgetting_keep_the_newest_texts(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 700)  # edges of portions within texts
    history = History(2 * SMALLEST)
    for number in range(60):
        history.add(list(range(1000 * number, 1000 * number + 400)))
        assert history.size <= 2 * SMALLEST
        for known in (number, max(0, number - 10)):
            query = list(range(1000 * known + 350, 1000 * known + 382))
            (found,) = history.find(query)
            assert history.tokens[found[0] + 1] == query[-1] + 1 and found[1] == 32
    assert history.find(list(range(350, 382))) == []
    assert history.nbytes < 100 * history.capacity
    history.add(range(10**6, 10**6 + 50_000))  # longer than all there is room for
    assert history.size <= 2 * SMALLEST and history.find([10**6 + 49_000, 10**6 + 49_001])


def test_no_match_and_no_continuation_spans_two_texts():
    history = History()
    history.add([1, 2, 3])
    history.add([4, 5, 6])
    assert history.find([3, 4]) == [] and history.find([2, 3]) == []
    assert propose([0, 1, 2], Budget(9, 9), history).token_N == (3,)


def test_a_history_survives_the_disk(tmp_path):
    history = History(SMALLEST * 4)
    for number in range(40):
        history.add(list(range(300 * number, 300 * number + 250)))
    history.save(tmp_path / "h", "abcd")
    again = History.load(tmp_path / "h", "abcd", SMALLEST * 4)
    np.testing.assert_array_equal(again.tokens[: again.size], history.tokens[: history.size])
    query = [300 * 20 + 7, 300 * 20 + 8]
    assert again.find(query) == history.find(query) != []
    again.add([7, 7, 7])
    small = History.load(tmp_path / "h", "abcd", SMALLEST)
    assert small.size <= SMALLEST and small.find([300 * 39 + 7, 300 * 39 + 8])
    with pytest.raises(ModelError, match=r"another vocabulary \(abcd, not dcba\); delete it"):
        History.load(tmp_path / "h", "dcba", SMALLEST)
    data = (tmp_path / "h").read_bytes()
    (tmp_path / "h").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"history .* is damaged"):
        History.load(tmp_path / "h", "abcd", SMALLEST)


def run(drafter, prompt, answer):
    """One request from its prompt to its end, in passes that are cut after their first token."""
    state = drafter.begin(Request(prompt=tuple(prompt)))
    drafter.observe(
        [state], [Outcome(Draft(), None, Verdict((), tuple(answer[:1])), tuple(prompt), (), 0, forced=True)]
    )
    drafts = []
    for i in range(1, len(answer)):
        row = DraftRow(state, [*prompt, *answer[:i]], Budget(8, 8), None, None, Drawn.CHOSEN)
        draft = drafter.propose([row])[0]
        drafts.append(draft.token_N)
        right = draft.token_N[:1] == (answer[i],)
        verdict = Verdict((0,) if right else (), (answer[i],), censored=right)
        drafter.observe([state], [Outcome(draft, None, verdict, (), (), 0)])
    drafter.end(state)
    return drafts


def stored(path):
    return History.load(path, "abcd", SMALLEST).size


def test_a_store_is_written_now_and_then_and_at_the_end(tmp_path):
    time, path, history = [0.0], tmp_path / "past", History()
    keeper = Keeper(history, path, "abcd", lambda: time[0])

    def answer():
        history.add([1, 2, 3])
        keeper.grown()
        keeper._writer.join(20)
        return stored(path)

    assert answer() == 4  # at once
    assert answer() == answer() == 4
    time[0] += module.SECONDS
    assert answer() == 16  # and then again
    assert answer() == 16
    keeper.close()
    assert stored(path) == 20
    path.unlink()
    keeper.close()
    assert not path.exists(), "nothing was new"


def test_a_text_that_comes_while_the_writer_starts_is_written_at_the_end(tmp_path, monkeypatch):
    history, path = History(), tmp_path / "past"
    keeper = Keeper(history, path, "abcd")

    class Late(threading.Thread):
        def run(self):
            history.add([4, 5, 6])  # after the copy was taken
            keeper.grown()
            super().run()

    monkeypatch.setattr(threading, "Thread", Late)
    history.add([1, 2, 3])
    keeper.grown()
    keeper._writer.join(20)
    assert stored(path) == 4
    keeper.close()
    assert stored(path) == 8


def test_the_end_of_a_drafter_is_the_end_of_its_keeper(tmp_path):
    drafter = Suffix.load(SuffixConfig(store=str(tmp_path / "past")), load_target("tiny"))
    for number in range(3):
        run(drafter, [1, 2, 3], [number, 5, 6])
    whole = drafter.history.packed()
    del drafter
    assert (
        Suffix.load(SuffixConfig(store=str(tmp_path / "past")), load_target("tiny")).history.packed() == whole
    )


def test_a_store_that_cannot_be_written_fails_nobody_and_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    time, history = [0.0], History()
    keeper = Keeper(history, tmp_path / "file" / "past", "abcd", lambda: time[0])
    drafter = Suffix(SuffixConfig(shared=True), history, keeper)
    for _ in range(3):
        run(drafter, [1, 2, 3], [4, 5, 6])
        keeper._writer.join(20)
        time[0] += module.SECONDS
    keeper.close()
    assert len(caplog.records) == 1 and "cannot be written (" in caplog.text
    assert history.find([4, 5]), "it is remembered all the same"


def test_past_answers_are_followed_where_they_promise_more():
    shared = Suffix(SuffixConfig(shared=True), History())
    answer = list(range(50, 80))
    assert not any(run(shared, [1, 2, 3], answer)), "nothing is known yet"
    drafts = run(shared, [7, 8, 2, 3], answer)
    right = [draft[:1] == (token,) for draft, token in zip(drafts, answer[1:], strict=True)]
    assert all(right[1:-1]) and len(drafts[20]) > 4
    alone = Suffix(SuffixConfig())
    assert not any(run(alone, [7, 8, 2, 3], answer))
    # Its own text promises more than a shorter match in the past.
    own = [*range(200, 230), 60, 61, *range(200, 212)]
    past = History()
    past.add([99, 210, 211, 55, 56])
    assert propose(own, Budget(2, 2), past).token_N == (212, 213)


def test_an_unfinished_prompt_leaves_nothing_behind():
    drafter = Suffix(SuffixConfig(shared=True), History())
    state = drafter.begin(Request(prompt=(1, 2, 3, 4)))
    drafter.observe([state], [Outcome(Draft(), None, Verdict((), ()), (1, 2), (), 0, forced=True)])
    drafter.end(state)
    assert drafter.history.size == 0


def test_the_engine_remembers_between_requests_and_runs(tmp_path):
    engine = Engine.load("tiny", dtype="float32", drafter="none")
    settings = {"max_new_tokens": 30, "ignore_eos": True}
    store = tmp_path / "past"
    plain = engine.generate([5, 9, 11], **settings)
    spec = f"suffix[store={store}]"
    first = engine.generate([5, 9, 11], drafter=spec, **settings)
    until(store.exists)
    again = Engine(engine.target, spec).generate([5, 9, 11], **settings)
    assert first.tokens == again.tokens == plain.tokens
    assert again.counters.passes < first.counters.passes / 2
    batch = engine.generate([[5, 9, 11]] * 3, drafter="suffix[shared=true]", **settings)
    assert [result.tokens for result in batch] == [plain.tokens] * 3


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("suffix[min_match=0]", "min_match must be at least 1, got 0"),
        ("suffix[factor=0]", "factor must be above 0, got 0"),
        ("suffix[capacity=5]", "capacity must be between 4096 and 1073741824, got 5"),
        ("suffix[sharde=true]", "did you mean shared"),
    ],
)
def test_bad_settings_are_refused(spec, says):
    with pytest.raises(ValueError, match=says) as caught:
        SingleMethod(MethodSpec.parse(spec), load_target("tiny"))
    assert isinstance(caught.value, SpecError) or "mean" in says


def test_a_store_of_another_vocabulary_is_refused(tmp_path):
    history = History()
    history.add([1, 2, 3])
    history.save(tmp_path / "past", "of another model")
    with pytest.raises(ModelError, match="another vocabulary"):
        SingleMethod(MethodSpec.parse(f"suffix[store={tmp_path / 'past'}]"), load_target("tiny"))
