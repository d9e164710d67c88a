import random

import numpy as np
import pytest

from outpace.config import MethodSpec
from outpace.curve import assumed
from outpace.drafters import worth
from outpace.drafters.base import Request
from outpace.engine.method import SingleMethod
from outpace.errors import ModelError, SpecError
from outpace.methods.lookup.automaton import HOPS, SuffixAutomaton
from outpace.methods.lookup.bigram import WIDTH, BigramTable, usual_place
from outpace.methods.lookup.files import vocabulary_digest
from outpace.methods.lookup.max_gram import MaxGram, MaxGramConfig
from outpace.models.load import load_target
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import budget as budget_of
from outpace.types import Budget, Draft, Drawn, Outcome, Verdict

BUDGET = Budget(3, 3)


def table(rows, size=32):
    """A bigram table from token -> [(next, share), ...]."""
    made = BigramTable(np.full((size, WIDTH), -1, np.int32), np.zeros((size, WIDTH), np.uint8))
    for token, after in rows.items():
        for i, (then, share) in enumerate(after):
            made.token[token, i], made.share[token, i] = then, round(255 * share)
    return made


def propose(text, budget=BUDGET, pairs=None, doubt=1.0, **settings):
    drafter = MaxGram(MaxGramConfig(**settings), None if pairs is None else table(pairs))
    state = drafter.begin(Request(prompt=tuple(text), num_cached=len(text)))
    state.trust.doubt = doubt
    return drafter.propose([DraftRow(state, text, budget, None, None, Drawn.CHOSEN)])[0]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ([1, 2, 3, 9, 1, 2], (3, 9, 1)),
        ([1, 2, 3, 1, 2, 4, 1, 2], (4, 1, 2)),  # the newest occurrence wins
        ([7, 1, 2, 5, 1, 2, 6, 7, 1, 2], (5, 1, 2)),  # the longest suffix wins over the newest
        ([5, 5], (5, 5, 5)),  # a copy that touches the end goes round
        ([8, 9, 8], (9, 8, 9)),
        ([1, 2, 3], ()),
        ([7], ()),
        ([], ()),
    ],
)
def test_copies_what_followed_the_longest_suffix(text, want):
    assert propose(text).token_N == want


def test_shortest_match_and_budget_are_respected():
    text = [1, 2, 3, 9, 8, 2]
    assert propose(text).token_N == (3, 9, 8)
    assert propose(text, min_match=2).token_N == ()
    assert propose(text, Budget(1, 9)).token_N == (3,)
    assert propose(text, Budget(9, 2)).token_N == (3, 9)
    assert propose(text, Budget(0, 0)).token_N == ()


PAIRS = {3: [(4, 0.9), (6, 0.1)], 4: [(5, 0.9)], 5: [(3, 0.8)], 2: [(9, 0.5)]}


def test_the_table_speaks_where_nothing_matches():
    assert propose([1, 2, 3], pairs=PAIRS).token_N == (4, 5, 3)
    assert propose([1, 2, 7], pairs=PAIRS).token_N == ()


def test_a_match_is_followed_and_the_table_goes_on_where_its_text_ends():
    # Two tokens agree, and five lie between: that is no loop, so the copy does not go round.
    text, budget, pairs = [1, 2, 7, 8, 3, 1, 2], Budget(6, 6), {2: [(9, 1.0)]}
    assert propose(text, budget, doubt=0.1).token_N == (7, 8, 3, 1, 2, 7)
    assert propose(text, budget, pairs, doubt=0.1).token_N == (7, 8, 3, 1, 2, 9)
    loop = [1, 2, 3] * 3
    assert propose(loop, budget, {3: [(9, 1.0)]}, doubt=0.1).token_N == (1, 2, 3, 1, 2, 3)


def test_a_sure_pair_beats_a_short_match_and_loses_to_a_long_one():
    short = [2, 7, 8, 2]
    assert propose(short, Budget(1, 1), pairs={2: [(9, 1.0)]}).token_N == (9,)
    long = [0, 1, 2, 3, 2, 7, 0, 1, 2, 3, 2]
    assert propose(long, Budget(1, 1), pairs={2: [(9, 1.0)]}).token_N == (7,)


def test_a_template_takes_its_siblings_from_the_table():
    tree = budget_of("3x1", None, 0)
    draft = propose([1, 2, 3, 9, 8, 7, 3], tree, pairs=PAIRS)
    by_parent = {p: [draft.token_N[n] for n in g[0].nodes] for p, g in draft.groups_of.items()}
    assert by_parent[-1] == [4, 9]  # 0.9 halved, then 1 / 3.5; 6 is too rare to be drafted
    assert all(group.drawn is Drawn.CHOSEN for group in draft.groups)
    assert set(draft.token_N) == {4, 9, 5, 8}
    alone = propose([1, 2, 3, 9, 1, 2], budget_of("2x2x1", None, 0))
    assert alone.token_N == (3, 9, 1)
    assert alone.parent_N == (-1, 0, 1)


def outcome(draft, kept, emitted, censored=False):
    verdict = Verdict(tuple(range(kept)), tuple(emitted), censored=censored)
    return Outcome(draft, None, verdict, (), (), 0)


def test_drafts_grow_with_the_match_and_shrink_with_misses():
    roomy = Budget(30, 30)
    rare = list(range(40))
    short = propose([*rare, 5], roomy)
    long = propose([*rare, *range(20)], roomy)
    assert 1 <= len(short) <= 4 < 15 < len(long)
    drafter = MaxGram(MaxGramConfig())
    text = (*rare, *range(6))
    state = drafter.begin(Request(prompt=text, num_cached=len(text)))
    row = DraftRow(state, text, roomy, None, None, Drawn.CHOSEN)
    first = drafter.propose([row])[0]
    for _ in range(4):
        state.trust.learn(outcome(first, 0, (99,)))
    shorter = drafter.propose([row])[0]
    for _ in range(8):
        state.trust.learn(outcome(first, len(first), (99,) * (len(first) + 1)))
    longer = drafter.propose([row])[0]
    assert len(shorter) < len(first) < len(longer)
    assert shorter.token_N == first.token_N[: len(shorter)]


def test_what_a_stop_cut_off_teaches_nothing():
    trust = worth.Trust()
    draft = worth.grow(lambda n: [(n, 0.5, n + 1)], 0, Budget(3, 3))
    trust.learn(outcome(draft, 0, (), censored=True))
    trust.learn(outcome(Draft.chosen([1, 2]), 0, (5,)))  # somebody else's draft
    assert trust.doubt == 1.0
    trust.learn(outcome(draft, 1, (0,), censored=True))
    assert trust.doubt < 1.0
    trust.learn(outcome(draft, 0, (7,)))
    trust.learn(outcome(draft, 0, (7,)))
    assert trust.doubt > 1.0


@pytest.mark.parametrize("shape", [None, "4x3x2", "[-1,-1,0,0,1,1,2,4,6]"])
def test_the_best_paying_part_of_a_tree_is_drafted(shape):
    """Against all prefixes of all nodes in order of their chance."""
    coins = random.Random(3)
    for _ in range(40):
        laws = {}

        def after(path, laws=laws):
            if path not in laws:
                left, out = 1.0, []
                for token in range(4):
                    chance = left * coins.random()
                    left -= chance
                    out.append((token, chance, (*path, token)))
                laws[path] = sorted(out, key=lambda item: -item[1])
            return laws[path]

        limit = budget_of(shape, 9, 9)
        draft = worth.grow(after, (), limit)
        assert len(draft) <= 9 and max(draft.depth_N, default=0) <= limit.max_depth
        chances = []
        for node in range(len(draft)):
            chance = 1.0
            for place in draft.path(node):
                before = draft.path_tokens(place)[:-1]
                chance *= next(c for t, c, _ in laws[before] if t == draft.token_N[place])
            chances.append(chance)
        assert chances == sorted(chances, reverse=True)
        paid = [(1 + sum(chances[:n])) / assumed(1 + n) for n in range(len(draft) + 1)]
        assert not chances or max(paid) == pytest.approx(draft.memo.worth) == paid[-1]
        assert min(chances, default=1.0) >= worth.LEAST


def suffix_oracle(text):
    """(length, newest end, count) of the longest suffix that occurred before, by trying all."""
    for length in range(len(text) - 1, 0, -1):
        tail = text[-length:]
        ends = [e for e in range(length - 1, len(text) - 1) if text[e - length + 1 : e + 1] == tail]
        if ends:
            return length, ends[-1], len(ends) + 1
    return 0, -1, 0


def occurrences(text, piece):
    places = range(len(text) - len(piece) + 1)
    return sum(text[i : i + len(piece)] == piece for i in places)


@pytest.mark.parametrize("alphabet", [2, 3, 9])
def test_the_automaton_finds_what_trying_everything_finds(alphabet):
    coins = random.Random(alphabet)
    text, automaton = [], SuffixAutomaton()
    for _ in range(160):
        text.append(coins.randrange(alphabet))
        automaton.extend(text[-1:])
        state, length = next(automaton.suffixes(), (0, 0))
        want = suffix_oracle(text)
        assert (length, automaton.newest[state] if length else -1) == want[:2]
        if length:
            assert automaton.count[state] == want[2]
            tail = text[-length:]
            got = {token: count for token, count, _ in automaton.after(state)}
            assert got == {token: n for token in range(alphabet) if (n := occurrences(text, [*tail, token]))}
        lengths = [n for _, n in automaton.suffixes()]
        assert lengths == sorted(lengths, reverse=True)
    assert len(automaton.next) <= 2 * len(text)


def test_a_long_run_costs_no_more_per_token():
    """The counters of a run are kept for its longest suffixes; its newest place stays right."""
    automaton = SuffixAutomaton([4] * (10 * HOPS))
    state, length = next(automaton.suffixes())
    assert length == 10 * HOPS - 1 and automaton.newest[state] == 10 * HOPS - 2
    assert automaton.count[state] == 2


def test_bigrams_are_counted_text_by_text():
    texts = [[1, 2, 1, 2, 1, 3], [2, 4, 1, 2], [5], []]
    counted = BigramTable.count(texts, 6)
    after = {token: dict(counted.after(token)) for token in range(6)}
    # 1 -> 2 three times of four, and one more for doubt; 2 | 2 and 3 | 2 span texts.
    assert after[1] == {2: pytest.approx(3 / 5, abs=0.01), 3: pytest.approx(1 / 5, abs=0.01)}
    assert after[2] == {1: pytest.approx(2 / 4, abs=0.01), 4: pytest.approx(1 / 4, abs=0.01)}
    assert [t for t, _ in counted.after(2)] == [1, 4]
    assert not after[3] and not after[5] and counted.after(6) == counted.after(-1) == []
    many = BigramTable.count([[0, n] for n in range(6) for _ in range(n + 1)], 6)
    assert [t for t, _ in many.after(0)] == [5, 4, 3, 2]


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "deep" / "t.bigram"
    table({1: [(2, 0.5)]}, size=8).save(path, "abcd")
    return path


def test_a_table_survives_the_disk(saved):
    again = BigramTable.load(saved, "abcd")
    assert again.after(1) == [(2, pytest.approx(0.5, abs=0.01))] and again.after(2) == []
    assert list(saved.parent.iterdir()) == [saved], "nothing half-written is left"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda b: b[:-5], "is damaged"),
        (lambda b: b[:-1] + bytes([b[-1] ^ 1]), "is damaged"),
        (lambda b: b"\x00\xff" * 300, "is not a bigram table"),
        (lambda b: b"", "is not a bigram table"),
        (lambda b: b"[1, 2]\n", "is not a bigram table"),
        (lambda b: b.replace(b"bigram table", b"history"), "is a history, not a bigram table"),
        (lambda b: b.replace(b"abcd", b"dcba"), "another vocabulary (dcba, not abcd)"),
        (lambda b: b.replace(b'"size": 8', b'"size": 9'), "is damaged"),
    ],
)
def test_a_wrong_table_is_refused_in_one_line(saved, damage, says):
    saved.write_bytes(damage(saved.read_bytes()))
    with pytest.raises(ModelError) as caught:
        BigramTable.load(saved, "abcd")
    message = str(caught.value)
    assert says in message and "\n" not in message
    assert str(saved) in message and "outpace build bigram" in message


def test_the_users_own_table_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path))
    target = load_target("tiny", dtype="float32")
    load = MaxGram.load
    assert load(MaxGramConfig(), target).table is None
    digest = vocabulary_digest(target.tokenizer, target.vocab_size)
    table({1: [(2, 0.5)]}, target.vocab_size).save(usual_place(digest), digest)
    assert load(MaxGramConfig(), target).table.after(1)
    assert load(MaxGramConfig(bigram=False), target).table is None
    usual_place(digest).rename(usual_place("else"))
    assert load(MaxGramConfig(), target).table is None, "of another vocabulary"
    with pytest.raises(ModelError, match=r"cannot read bigram table .*nowhere.* No such file"):
        load(MaxGramConfig(table=str(tmp_path / "nowhere")), target)
    spec = f"max_gram[table={usual_place('else')}]"
    assert SingleMethod(MethodSpec.parse(spec), target).drafter.table.after(1)
    for wrong, says in (
        ("max_gram[min_match=0]", "min_match must be at least 1, got 0"),
        ("max_gram[table=x bigram=false]", "table=x contradicts bigram=false"),
    ):
        with pytest.raises(SpecError, match=says):
            SingleMethod(MethodSpec.parse(wrong), target)


def test_vocabularies_are_told_apart():
    target = load_target("tiny", dtype="float32")
    mine = vocabulary_digest(target.tokenizer, target.vocab_size)
    assert mine == vocabulary_digest(load_target("tiny:5").tokenizer, 999), "padding does not count"
    others = {vocabulary_digest(None, target.vocab_size), vocabulary_digest(None, 7)}
    assert len({mine, *others}) == 3
