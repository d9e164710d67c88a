"""Every sampling setting against an independent oracle, and along the paths of a tree."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outpace import rows
from outpace.errors import RequestError
from outpace.params import Defaults, SamplingParams
from outpace.sampling import Laws, Warp, laws_of_batch, logprobs
from outpace.types import ROOT, Draft, Scored

V = 200
EOS = frozenset({7})
PROMPT = (3, 5, 3, 11, 42)


def random_row(seed, size=V, scale=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).mul(scale).to(dtype)


def warp_of(prompt=PROMPT, size=V, **settings):
    return Warp(SamplingParams(**settings), prompt, EOS, size)


def dense(law, size=V):
    return law.dense(size)


def error(a, b):
    return float((a - b).abs().max())


# --- against transformers ---------------------------------------------------------------------

THEIRS = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "top_k": ({"temperature": 1.0, "top_k": 9}, [TopKLogitsWarper(9)]),
    "top_p": ({"temperature": 1.0, "top_p": 0.83}, [TopPLogitsWarper(0.83)]),
    "tiny_top_p": ({"temperature": 1.0, "top_p": 1e-6}, [TopPLogitsWarper(1e-6)]),
    "min_p": ({"temperature": 1.0, "min_p": 0.04}, [MinPLogitsWarper(0.04)]),
    "repetition_penalty": (
        {"temperature": 1.0, "repetition_penalty": 1.7},
        [RepetitionPenaltyLogitsProcessor(1.7)],
    ),
    "rewarded_repetition": (
        {"temperature": 1.0, "repetition_penalty": 0.6},
        [RepetitionPenaltyLogitsProcessor(0.6)],
    ),
    "all": (
        {"temperature": 1.6, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(1.6),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ],
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_law_is_that_of_transformers(name):
    settings, processors = THEIRS[name]
    for seed in range(20):
        row_V = random_row(seed)
        theirs_V = LogitsProcessorList(processors)(torch.tensor([PROMPT]), row_V[None])[0]
        law = warp_of(**settings).law(row_V)
        assert error(dense(law), theirs_V.softmax(0)) < 1e-12
        assert set(law.ids[law.prob_S > 0].tolist()) == set((theirs_V > -math.inf).nonzero()[:, 0].tolist())


# --- against a plain oracle, where ties, size and speed tricks matter -------------------------


def plain_law(row_V, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The definition: rank by (logit descending, id ascending), then cut three times."""
    order = sorted(range(len(row_V)), key=lambda i: (-row_V[i], i))
    order = order[:top_k] if top_k else order
    prob = (torch.tensor(row_V, dtype=torch.float64)[order] / temperature).softmax(0)
    keep = max(1, int(((prob.cumsum(0) - prob) < top_p).sum()))
    keep = min(keep, int((prob >= min_p * prob[0] * (1 - 1e-6)).sum()))
    return sorted(order[:keep]), prob[:keep] / prob[:keep].sum()


REGIMES = {
    "peaked": lambda: random_row(1, 6400, 6.0),
    "flat": lambda: random_row(2, 6400, 0.05),
    "tied": lambda: random_row(3, 6400).bfloat16().double(),
    "equal": lambda: torch.zeros(6400, dtype=torch.float64),
    "odd size": lambda: random_row(4, 6401).bfloat16().double(),
    "tiny": lambda: torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64),
}
CUTS = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 300},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.3},
    {"top_k": 20, "top_p": 0.6, "min_p": 0.1},
    {"top_p": 0.95, "min_p": 0.2},
]


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_truncation_keeps_the_defined_tokens(regime, cut):
    row_V = REGIMES[regime]()
    warp = warp_of((), len(row_V), temperature=0.9, **cut)
    want, prob = plain_law(row_V.tolist(), 0.9, **cut)
    law = warp.law(row_V)
    assert law.ids.tolist() == want
    assert torch.allclose(law.prob_S.sort(descending=True).values, prob, rtol=1e-9, atol=0)
    # In float32 a sum may reach top_p one token sooner or later.
    narrow = warp.law(row_V.float())
    assert narrow.prob_S.dtype == torch.float32
    assert len(set(narrow.ids.tolist()) ^ set(want)) <= ("top_p" in cut)
    assert error(dense(narrow, len(row_V)), dense(law, len(row_V))) < 1e-5


def test_selection_is_that_of_torch():
    for regime in REGIMES.values():
        row_V = regime()
        many = torch.stack([row_V, row_V.flip(0), -row_V])
        assert rows.argmax_rows(many).tolist() == many.argmax(-1).tolist()
        assert rows.argmax_rows(many.bfloat16()).tolist() == many.bfloat16().argmax(-1).tolist()
        for k in (1, 3, 150):
            listed = rows.rank(many, None, k)
            best = many.softmax(-1).topk(min(k, len(row_V)))
            for got, prob in zip(listed, best.values.tolist(), strict=True):
                assert [p for _, p in got] == pytest.approx(prob, rel=1e-5)
                assert len({t for t, _ in got}) == len(prob)
            assert [got[0][0] for got in rows.rank(many, None, 1)] == many.argmax(-1).tolist()


# --- penalties, bias and bans by their definitions --------------------------------------------


def by_definition(row_V, output, prompt=PROMPT, **s):
    """One pass over the vocabulary, token by token."""
    x = row_V.double().clone()
    r = s.get("repetition_penalty", 1.0)
    for token in range(len(x)):
        x[token] += s.get("logit_bias", {}).get(token, 0.0)
        allowed = s.get("allowed_tokens")
        if (allowed is not None and token not in allowed) or token in s.get("banned_tokens", ()):
            x[token] = -math.inf
        ends = EOS | s.get("stop_token_ids", frozenset())
        if token in ends and len(output) < s.get("min_tokens", 0):
            x[token] = -math.inf
        if token in prompt or token in output:
            x[token] = x[token] * r if x[token] < 0 else x[token] / r
        count = output.count(token)
        x[token] -= s.get("presence_penalty", 0.0) * (count > 0)
        x[token] -= s.get("frequency_penalty", 0.0) * count
    for rule in s.get("processors", ()):
        x = rule((*prompt, *output), x)
    return (x / s.get("temperature", 1.0)).softmax(0)


PATH = (9, 7, 9, 5, 150)


def rule(tokens, logits_V):
    """Reads prompt, answer and path in order."""
    logits_V[sum((place + 1) * token for place, token in enumerate(tokens)) % len(logits_V)] += 8
    return logits_V


DEPENDENT = {
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.7},
    "negative": {"frequency_penalty": -0.4, "presence_penalty": -0.3},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": frozenset({9, 30})},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {9: 2.0, 100: -1.0},
        "banned_tokens": frozenset({8, 12}),
        "min_tokens": 4,
        "temperature": 0.8,
    },
    "processors": {
        "processors": [rule, lambda tokens, logits_V: logits_V / (1 + tokens[-1] % 3)],
        "repetition_penalty": 1.2,
    },
    "all within allowed": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "allowed_tokens": frozenset({5, 7, 9, 20, 150, 151, 152}),
        "banned_tokens": frozenset({20}),
        "logit_bias": {151: 1.0},
    },
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_a_node_has_the_law_of_its_own_path(name):
    settings = {"temperature": 1.0} | DEPENDENT[name]
    for seed in range(6):
        row_V = random_row(seed)
        row_V[list(PATH)] += 6  # so that what happens to them shows
        committed = (7, 60, 9)[: seed % 4]
        warp = warp_of(**settings)
        warp.advance(committed)
        without_path = dense(warp.law(row_V))
        for depth in range(len(PATH) + 1):
            law = warp.law(row_V, PATH[:depth])
            really = warp_of(**settings)
            for token in committed:  # one by one, where `warp` took all at once
                really.advance((token,))
            really.advance(PATH[:depth])
            assert error(dense(law), dense(really.law(row_V))) == 0
            want = by_definition(row_V, (*committed, *PATH[:depth]), **settings)
            assert error(dense(law), want) < 1e-12
        # A law that ignored the path would be this one:
        assert error(dense(warp.law(row_V, PATH)), without_path) > 1e-3
        # and evaluating a path must not have committed it.
        assert error(dense(warp.law(row_V)), without_path) == 0
        assert warp.generated == len(committed)


def test_path_acts_under_truncation_and_greediness():
    row_V = torch.linspace(1, 0, V)  # token 0 leads, by very little
    cut = warp_of((), presence_penalty=0.5, temperature=1.0, top_k=2)
    assert cut.law(row_V).ids.tolist() == [0, 1]
    assert cut.law(row_V, (0, 2)).ids.tolist() == [1, 3]
    greedy = warp_of((), presence_penalty=0.5)
    assert greedy.law(row_V).ids.tolist() == [0]
    assert greedy.law(row_V, (0,)).ids.tolist() == [1]
    assert greedy.ranking(row_V[None], [(0, 2)], 3)[0] == [[1, 3, 4]]
    greedy.advance((0, 1))
    assert greedy.law(row_V, (2,)).ids.tolist() == [3]


# --- reduced draft vocabularies ---------------------------------------------------------------


@pytest.mark.parametrize("name", [*DEPENDENT, "top_p"])
def test_draft_vocabulary_is_the_full_one_with_the_rest_impossible(name):
    settings = {"temperature": 0.9} | DEPENDENT.get(name, {"top_p": 0.7})
    generator = torch.Generator().manual_seed(5)
    id_V = torch.randperm(V, generator=generator)[:80]
    id_V = torch.cat((id_V, torch.tensor([t for t in (7, 9, 150) if t not in id_V])))
    row_V = random_row(8)
    impossible_V = torch.full_like(row_V, -math.inf)
    impossible_V[id_V] = row_V[id_V]
    warp = warp_of(**settings)
    for path in ((), PATH):
        small = warp.law(row_V[id_V], path, id_V)
        assert set(small.ids.tolist()) <= {*id_V.tolist(), *settings.get("allowed_tokens", ())}
        assert error(dense(small), dense(warp.law(impossible_V, path))) < 1e-12
        tokens, _ = warp.ranking(row_V[id_V][None], [path], 5, id_V)
        raw = warp_of(**(settings | {"temperature": 1.0, "top_p": 1.0}))
        assert tokens[0] == raw.law(impossible_V, path).top(5)[: len(tokens[0])]


def test_draft_without_any_allowed_token_still_guesses():
    id_V = torch.tensor([1, 2, 4])
    warp = warp_of(allowed_tokens=frozenset({50}), temperature=1.0)
    law = warp.law(torch.tensor([0.0, 1.0, 2.0]), (), id_V)
    assert law.ids.tolist() == [1, 2, 4]
    assert float(law.prob_S.sum()) == pytest.approx(1)
    assert warp.law(random_row(0)).ids.tolist() == [50]


def test_draft_vocabulary_may_be_a_prefix():
    warp = warp_of(frequency_penalty=0.5, temperature=1.0)
    warp.advance((V - 1, 2))
    law = warp.law(random_row(0)[:150])
    assert law.ids.tolist() == list(range(150))
    assert float(law.prob_S.sum()) == pytest.approx(1)


# --- greedy -----------------------------------------------------------------------------------


def test_plain_says_when_the_raw_argmax_is_the_law():
    assert warp_of().plain and warp_of(temperature=1e-7).plain
    assert warp_of(top_k=5, top_p=0.5, min_p=0.1).plain  # truncation never drops the best
    assert not warp_of(temperature=1.0).plain
    for setting in (
        {"banned_tokens": frozenset({1})},
        {"allowed_tokens": frozenset({1})},
        {"logit_bias": {1: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
    ):
        assert not warp_of(**setting).plain, setting
    warp = warp_of(min_tokens=2)
    assert not warp.plain
    warp.advance((1, 1))
    assert warp.plain
    assert warp_of(min_tokens=2, ignore_eos=True).plain


def test_greedy_is_the_argmax_after_all_processors():
    row_V = torch.zeros(V)
    row_V[[7, 20, 30, 40]] = torch.tensor([5.0, 4.0, 3.0, 3.0])
    assert warp_of().law(row_V).ids.tolist() == [7]
    warp = warp_of(min_tokens=1, banned_tokens=frozenset({20}))
    assert warp.law(row_V).ids.tolist() == [30]  # 40 ties, the lower id wins
    assert warp.law(row_V, (30,)).ids.tolist() == [7]
    assert warp_of(logit_bias={40: 9.0}).law(row_V).ids.tolist() == [40]
    assert warp_of(allowed_tokens=frozenset({30, 31})).law(row_V).ids.tolist() == [30]
    tokens, probs = warp_of().ranking(torch.stack([row_V, row_V.flip(0)]), [(), ()], 2)
    assert tokens == [[7, 20], [V - 8, V - 21]]
    assert probs[0] == pytest.approx(row_V.softmax(0)[[7, 20]].tolist())
    assert warp_of(allowed_tokens=frozenset({1, 2})).ranking(row_V[None], [()], 4)[0] == [[1, 2]]


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -0.5}, "temperature must be a finite number of at least 0, got -0.5"),
        ({"temperature": math.inf}, "temperature must be a finite number of at least 0, got inf"),
        ({"temperature": "hot"}, "temperature must be a finite number of at least 0, got 'hot'"),
        ({"temperature": True}, "got True"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_k": -2}, "top_k must be a whole number, at least 1, or 0 or -1"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"min_p": 1.1}, r"min_p must be in \[0, 1\], got 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number above 0, got 0.0"),
        ({"presence_penalty": math.inf}, "presence_penalty must be a finite number, got inf"),
        ({"frequency_penalty": None}, "frequency_penalty must be a finite number, got None"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number, at least 1, got 0"),
        ({"min_tokens": -1}, "min_tokens must be a whole number, at least 0, got -1"),
        ({"min_tokens": 9, "max_new_tokens": 8}, r"at most max_new_tokens \(8\), got 9"),
        ({"seed": -1}, r"seed must be a whole number, in \[0, 2\*\*64\), got -1"),
        ({"seed": 10**400}, "seed must be"),
        ({"n": 0}, "n must be a whole number, between 1 and 16384, got 0"),
        ({"n": 10**8}, "n must be a whole number, between 1 and 16384, got 100000000"),
        ({"logprobs": -1}, "logprobs must be a whole number, at least 0, got -1"),
        ({"stop": ("a", "")}, "stop must hold non-empty strings, got ''"),
        ({"stop": (3,)}, "stop must hold non-empty strings, got 3"),
        ({"banned_tokens": {-4}}, "banned_tokens .* at least 0, got -4"),
        ({"stop_token_ids": {1.5}}, "stop_token_ids .* got 1.5"),
        ({"logit_bias": {4: math.inf}}, r"logit_bias of token 4 must be a number within \+-3e38, got inf"),
        ({"logit_bias": {"4": 1.0}}, "logit_bias .* got '4'"),
        ({"processors": 3}, "processors must be a list of functions, got 3"),
        ({"processors": [None]}, "processors and stop_when must be functions, got None"),
        ({"grammar": "a|b"}, "grammar must be compiled, an object with begin(), got 'a|b'"),
        ({"stop_when": 3}, "processors and stop_when must be functions, got 3"),
        ({"allowed_tokens": ()}, "allowed_tokens is empty"),
        ({"allowed_tokens": {4}, "banned_tokens": {4}}, "banned_tokens holds all 1 allowed"),
        ({"grammar": object(), "min_tokens": 5}, "min_tokens and grammar exclude each other"),
        ({"grammar": object(), "ignore_eos": True}, "ignore_eos and grammar exclude each other"),
        ({"grammar": object(), "allowed_tokens": {4}}, "allowed_tokens and grammar exclude"),
    ],
)
def test_bad_settings_are_refused_in_one_line(setting, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**setting)
    assert "\n" not in str(caught.value)


def test_settings_are_stored_as_declared():
    params = SamplingParams(stop="END", stop_token_ids=[4, 4], logit_bias={1: 2}, top_k=-1)
    assert params.stop == ("END",)
    assert params.stop_token_ids == frozenset({4})
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize("name", ["logit_bias", "allowed_tokens", "banned_tokens", "stop_token_ids"])
def test_ids_outside_the_vocabulary_are_named(name):
    value = {V: 1.0} if name == "logit_bias" else {V}
    with pytest.raises(RequestError, match=f"{name} holds token {V}, but ids go from 0 to {V - 1}"):
        warp_of(**{name: value})


def test_banning_everything_is_refused_before_the_first_token():
    for settings in (
        {"banned_tokens": range(V)},
        {"allowed_tokens": {7}, "min_tokens": 1},
        {"banned_tokens": set(range(V)) - {7, 8}, "stop_token_ids": {8}, "min_tokens": 1},
    ):
        with pytest.raises(RequestError, match=r"no token may be generated.*banned_tokens"):
            warp_of(**settings)
    assert warp_of(allowed_tokens={7}, min_tokens=1, ignore_eos=True).law(random_row(0))


def test_none_means_the_models_default_then_neutral():
    params = SamplingParams(top_p=0.5)
    neutral = params.resolved(None)
    assert (neutral.temperature, neutral.top_k, neutral.top_p, neutral.min_p) == (0.0, 0, 0.5, 0.0)
    assert neutral.repetition_penalty == 1.0 and neutral.resolved(None) == neutral
    said = Defaults(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
    full = params.resolved(said)
    assert (full.temperature, full.top_k, full.top_p) == (0.6, 20, 0.5)
    assert params.taken(said) == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert SamplingParams(temperature=0.0).taken(said) == {"repetition_penalty": 1.1}
    assert SamplingParams(temperature=2.0).resolved(said).temperature == 2.0


@pytest.mark.parametrize(
    ("said", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.6}, 0.6),
        ({"do_sample": True, "temperature": 0.6}, 0.6),
    ],
)
def test_whether_a_model_samples(said, temperature):
    assert SamplingParams().resolved(Defaults(**said)).temperature == temperature


def test_a_bad_default_is_not_blamed_on_the_user():
    with pytest.raises(RequestError, match=r"top_p .* got 3 .*default of the model"):
        SamplingParams().resolved(Defaults(top_p=3))


# --- laws of a tree and of a batch ------------------------------------------------------------


class Counting(Warp):
    """A warp that notes what it was asked."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = []

    def law(self, logits_V, path=(), id_V=None):
        self.asked.append(tuple(path))
        return super().law(logits_V, path, id_V)


def counting(**settings):
    return Counting(SamplingParams(**settings), PROMPT, EOS, V)


def test_a_row_is_warped_when_first_read():
    draft = Draft.chosen([4, 5, 6], [ROOT, ROOT, 1])
    row_JV = torch.stack([random_row(seed) for seed in range(4)])
    warp = counting(temperature=1.0, frequency_penalty=1.0)
    laws = Laws(row_JV, warp, draft)
    assert warp.asked == []
    assert laws.law(2) is laws.law(2)
    assert warp.asked == [(5, 6)]
    assert (
        error(
            dense(laws.law(2)), dense(warp_of(temperature=1.0, frequency_penalty=1.0).law(row_JV[3], (5, 6)))
        )
        == 0
    )
    laws.law(ROOT)
    assert warp.asked == [(5, 6), ()]


def test_a_batch_costs_one_argmax(monkeypatch):
    calls = []
    real = rows.argmax_rows
    monkeypatch.setattr(rows, "argmax_rows", lambda x: calls.append(len(x)) or real(x))
    drafts = [Draft.chosen([1, 2]), Draft(), Draft.chosen([3])]
    logits = torch.stack([random_row(seed, dtype=torch.float32) for seed in range(6)])
    scored = Scored(logits, (0, 3, 3, 4, 6))  # the second feed is a prompt's unfinished part
    plain = [counting(), counting(), counting()]
    laws = laws_of_batch(scored, plain, drafts)
    assert calls == [6]
    got = [law.law(n).ids.item() for law, d in zip(laws, drafts, strict=True) for n in range(ROOT, len(d))]
    assert got == logits.argmax(-1).tolist()
    assert [warp.asked for warp in plain] == [[], [], []]

    mixed = [counting(), counting(temperature=1.0), counting()]
    laws = laws_of_batch(scored, mixed, drafts)
    assert calls == [6, 3, 2]
    assert laws[0].law(1).ids.item() == logits[2].argmax()
    assert laws[2].law(0).ids.item() == logits[5].argmax()
    assert error(laws[1].law(ROOT).prob_S, logits[3].softmax(0)) < 1e-6
    assert [warp.asked for warp in mixed] == [[], [()], []]


def test_logprobs_are_the_models_own():
    row_RV = torch.stack([random_row(seed, dtype=torch.float32) for seed in range(3)])
    want_RV = row_RV.log_softmax(-1)
    for k in (0, 1, 4, V + 5):
        for r, entry in enumerate(logprobs(row_RV, [9, 8, 7], k)):
            assert entry.token == 9 - r
            assert entry.logprob == pytest.approx(float(want_RV[r, 9 - r]))
            best = want_RV[r].topk(min(k, V))
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [lp for _, lp in entry.top] == pytest.approx(best.values.tolist())


@pytest.mark.parametrize("size", [290, 8192, 49152])
def test_equal_alternatives_are_the_same_ones_beside_other_rows(size):
    """A draft puts more rows into a pass, and bfloat16 has many ties."""
    row_RV = torch.randn(9, size, generator=torch.Generator().manual_seed(0)).mul(3).bfloat16()
    for k in (1, 3, 20):
        alone = [logprobs(row_V[None], [0], k)[0] for row_V in row_RV]
        assert logprobs(row_RV, [0] * 9, k) == alone
        for row_V, one in zip(row_RV, alone, strict=True):
            best = row_V.float().sort(descending=True, stable=True).indices[:k]
            assert [token for token, _ in one.top] == best.tolist()
    (one,) = logprobs(torch.tensor([[0.0, -math.inf, 0.0]]), [0], 9)
    assert [token for token, _ in one.top] == [0, 2]


def test_a_processor_of_another_shape_is_refused():
    warp = warp_of(processors=[lambda tokens, logits_V: logits_V[1:]])
    with pytest.raises(RequestError, match=rf"must return logits \[{V}\], got torch.Size\(\[{V - 1}\]\)"):
        warp.law(random_row(0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("allowed", [None, [2, 3, 5, 6]])
def test_no_processor_gives_tokens_that_a_drafter_does_not_know(temperature, allowed):
    """Its law is that over its own tokens, whatever scores the processor invents for others."""
    flat = lambda tokens, logits_V: torch.zeros_like(logits_V)  # noqa: E731
    warp = warp_of(temperature=temperature, processors=[flat], allowed_tokens=allowed)
    id_V = torch.tensor([3, 5, 7])
    law = warp.law(torch.randn(3), (), id_V)
    some = {3, 5} if allowed else {3, 5, 7}
    drawn = {token for token, prob in zip(law.ids.tolist(), law.prob_S.tolist(), strict=True) if prob > 0}
    assert drawn <= some and (drawn == some or temperature == 0)
    (tokens,), _ = warp.ranking(torch.randn(1, 3), [()], 8, id_V)
    assert set(tokens) == some
