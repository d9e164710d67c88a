"""A distribution that does not exist is an error, and of one request alone."""

import math
import threading

import pytest
import torch

from outpace import Engine, RequestError
from outpace.errors import LogitsError
from outpace.models.tiny import TableTarget
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.serving.events import Done, Failed
from outpace.serving.service import Service

V, BAD = 5, 4
LAW = (0.4, 0.3, 0.2, 0.1, 0.0)
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0, "seed": 3}
NUCLEUS = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}
DRAFTERS = ["none", "suffix", "suffix[verifier=traversal]"]


class Breaks(TableTarget):
    """A model whose logits break once the text holds BAD."""

    def __init__(self, broken):
        self.broken = torch.tensor(broken, dtype=torch.float64)
        super().__init__(lambda context: torch.tensor(LAW, dtype=torch.float64), V)

    def law_after(self, tokens):
        return self.broken if BAD in tokens else super().law_after(tokens)


BROKEN = {
    "nan": [math.nan] * V,
    "one nan": [0.5, math.nan, 0.2, 0.2, 0.1],
    "infinity": [0.5, math.inf, 0.2, 0.2, 0.1],
    "nothing": [0.0] * V,
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED, NUCLEUS], ids=["greedy", "sampled", "nucleus"])
@pytest.mark.parametrize("broken", BROKEN)
def test_logits_that_are_not_finite_are_an_error(broken, settings, drafter):
    engine = Engine(Breaks(BROKEN[broken]), drafter=drafter)
    good = engine.generate([0, 1, 0, 1, 0], max_new_tokens=6, **settings)
    assert len(good.tokens) == 6
    with pytest.raises(LogitsError, match=r"sequence \d+, pass \d+: the model's logits are not finite"):
        engine.generate([0, 1, BAD, 0, 1, 0], max_new_tokens=6, **settings)
    assert engine.generate([0, 1, 0, 1, 0], max_new_tokens=6, **settings).tokens == good.tokens


class Nothing:
    """A grammar that allows one token."""

    def begin(self):
        return self

    def advance(self, tokens):
        return

    def allowed(self, path):
        return torch.tensor([token == 2 for token in range(V)])


FORBIDDING = [
    {"grammar": Nothing(), "banned_tokens": {2}},
    {"logit_bias": {1: 3e38, 2: 3e38}, "temperature": 0.5, "repetition_penalty": 0.5},
    {"logit_bias": dict.fromkeys(range(V), -3e38), "presence_penalty": 3e38, "frequency_penalty": 3e38},
]


@pytest.mark.parametrize("settings", FORBIDDING, ids=["grammar", "bias", "penalties"])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_settings_that_leave_no_distribution_are_an_error(settings, temperature):
    engine = Engine(Breaks(BROKEN["nan"]), drafter="suffix")
    if temperature == 0 and "penalties" not in str(settings) and "repetition_penalty" in settings:
        settings = {**settings, "repetition_penalty": 0.1}
    with pytest.raises(RequestError, match=r"sequence \d+, pass \d+: the sampling settings leave no"):
        engine.generate([0, 1, 2, 1, 0], max_new_tokens=8, **{**settings, "temperature": temperature})


class OnlyTo:
    """A grammar in which nothing but a banned token follows texts other than one."""

    def __init__(self, wanted, said=()):
        self.wanted, self.said = tuple(wanted), tuple(said)

    def begin(self):
        return OnlyTo(self.wanted)

    def advance(self, tokens):
        self.said += tuple(tokens)

    def allowed(self, path):
        text = self.said + tuple(path)
        return None if text == self.wanted[: len(text)] else torch.arange(286) == 7


@pytest.mark.parametrize("growth", ["verifier=chain", "verifier=block", "", "tree=2x2", "tree=dynamic"])
def test_a_guess_after_which_nothing_may_come_is_the_last(growth):
    engine = Engine.load("tiny", drafter="none")
    settings = {"temperature": 0.0, "max_new_tokens": 12, "banned_tokens": {7}}
    plain = engine.generate([5, 9, 11, 5, 9], **settings)
    got = engine.generate(
        [5, 9, 11, 5, 9],
        drafter=f"draft_model[model=tiny layers=1 {growth}]",
        grammar=OnlyTo(plain.tokens),
        **settings,
    )
    assert got.tokens == plain.tokens


def test_a_bias_beyond_float32_is_refused_at_once():
    with pytest.raises(RequestError, match=r"logit_bias of token 3 must be a number within \+-3e38, got 1e"):
        SamplingParams(logit_bias={3: 1e39})


def test_a_target_narrower_than_its_vocabulary_is_no_draft():
    """What a draft may fall back to, a target may not."""
    warp = Warp(SamplingParams(temperature=1.0, banned_tokens={0, 1, 2}), (), frozenset(), V)
    with pytest.raises(RequestError, match="leave no distribution"):
        warp.law(torch.zeros(3))
    assert len(warp.law(torch.zeros(3), (), torch.tensor([0, 1, 2])).prob_S) == 3


class Circle(TableTarget):
    """A model that counts in a circle, mostly; behind the last number its logits may break."""

    def __init__(self, breaks=False):
        self.breaks = breaks
        law_VV = 0.02 + 0.9 * torch.eye(V, dtype=torch.float64).roll(1, 1)
        super().__init__(lambda seen: law_VV[seen[-1] if seen else 0], V)

    def law_after(self, tokens):
        beyond = self.breaks and len(tokens) > 8 and tokens[-1] == BAD
        return torch.full((V,), math.nan, dtype=torch.float64) if beyond else super().law_after(tokens)


def blind(bad):
    """A rule that forbids everything behind some tokens."""
    return lambda seen, x_V: torch.full_like(x_V, -math.inf) if seen[-1] in bad else x_V


ENDS = {"max_new_tokens": 30, "stop_token_ids": {BAD}}
BLIND = {"processors": [blind({BAD})]}


@pytest.mark.parametrize(
    "drafter", ["suffix", *(f"suffix[verifier={v}]" for v in ("match", "block", "traversal"))]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("settings", [{}, BLIND], ids=["logits", "settings"])
def test_a_guess_may_lead_where_there_is_no_distribution(settings, temperature, drafter):
    """Plain decoding never asks there: it has stopped."""
    engine = Engine(Circle(breaks=not settings), drafter=drafter)
    prompt, settings = [0, 1, 2, 3, 4, 0, 1, 2], {**settings, "temperature": temperature}
    for seed in range(8):
        plain = engine.generate(prompt, seed=seed, drafter="none", **settings, **ENDS)
        found = engine.generate(prompt, seed=seed, **settings, **ENDS)
        assert found.finish_reason == plain.finish_reason == "stop"
        assert found.tokens == plain.tokens or (temperature and "[" in drafter)
    with pytest.raises((LogitsError, RequestError), match=r"sequence \d+, pass \d+: the"):
        engine.generate(prompt, max_new_tokens=30, **settings)


@pytest.mark.parametrize(
    "drafter", ["draft_model[model=tiny layers=1]", "draft_model[model=tiny tree=dynamic]"]
)
def test_a_draft_may_go_where_there_is_no_distribution(drafter):
    engine = Engine.load("tiny", drafter=drafter)
    low = frozenset(range(150))
    settings = {"temperature": 1.0, "processors": [blind(low)], "stop_token_ids": low, "max_new_tokens": 20}
    for seed in range(8):
        plain, found = (
            engine.generate([200, 201, 202, 203], seed=seed, drafter=one, **settings)
            for one in ("none", None)
        )
        assert found.tokens == plain.tokens


@pytest.mark.parametrize(
    "drafter",
    [
        "triforce[budget=4 chunk=1 window=2 verifier=match]",
        "cascade[levels=draft_model[model=tiny layers=1]+max_gram k=3,2/2 verifier=match]",
    ],
)
def test_a_level_may_go_where_there_is_no_distribution(drafter):
    """It chooses its guesses: of no tokens none is the likeliest."""
    engine = Engine.load("tiny", dtype="float32", drafter=drafter)
    few, stop = {93, 98, 101, 123, 125, 131}, {125}
    settings = {
        "temperature": 1.5,
        "processors": [blind(stop)],
        "stop_token_ids": stop,
        "allowed_tokens": few,
    }
    for seed in range(12):
        result = engine.generate([101, 101, 93] * 4 + [101, 101], seed=seed, max_new_tokens=20, **settings)
        assert result.finish_reason in ("stop", "length") and few.issuperset(result.tokens)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_only_the_broken_sequence_of_a_batch_fails(settings):
    engine = Engine(Breaks(BROKEN["one nan"]), drafter="none")
    prompts = {0: [0, 1, 0, 1, 0], 1: [0, 1, BAD, 0], 2: [2, 2, 1]}
    settings = {**settings, "max_new_tokens": 7, "drafter": "suffix"}
    alone = {i: engine.generate(prompts[i], **settings).tokens for i in (0, 2)}
    ends, done = {}, threading.Event()

    def hear(number):
        def listen(event):
            if isinstance(event, Done | Failed):
                ends[number] = event
                if len(ends) == len(prompts):
                    done.set()

        return listen

    with Service(engine, drafters=("suffix",)) as service:
        for number, prompt in prompts.items():
            service.submit(service.request(prompt, **settings), hear(number))
        assert done.wait(20)
    assert isinstance(ends[1], Failed) and isinstance(ends[1].error, LogitsError)
    assert {i: ends[i].result.tokens for i in (0, 2)} == alone
