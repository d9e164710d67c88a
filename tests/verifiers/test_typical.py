import math

import pytest
import torch

from outpace import Engine
from outpace.analysis.agreement import check_oracle
from outpace.analysis.tables import World, best, outputs, step_error
from outpace.coins import KeyedCoins, Stream
from outpace.errors import SpecError
from outpace.law import Law
from outpace.types import ROOT, Draft
from outpace.verifiers.base import TargetLaws
from outpace.verifiers.typical import Typical, TypicalConfig

TYPICAL = Typical(TypicalConfig())


class Given(TargetLaws):
    def __init__(self, laws):
        self.laws = laws

    def law(self, node):
        return self.laws[node]


def test_the_threshold_follows_the_entropy():
    flat = Law(torch.full((16,), 1 / 16))
    assert TYPICAL.threshold(flat) == pytest.approx(0.3 / 16)
    assert TYPICAL.threshold(Law.one_hot(3)) == 0.09
    sharp = Law(torch.tensor([0.9, 0.1]))
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert Typical(TypicalConfig(epsilon=0.5)).threshold(sharp) == pytest.approx(0.3 * math.exp(-entropy))


def test_the_longest_plausible_path_wins_then_the_likelier():
    #  ROOT - 0 (0.6), 1 (0.3), 2 (0.05: not plausible);  0 - 3;  1 - 4;  4 - 5
    draft = Draft.chosen([0, 1, 2, 0, 1, 0], [ROOT, ROOT, ROOT, 0, 1, 4])
    laws = {
        ROOT: Law(torch.tensor([0.6, 0.3, 0.05, 0.05])),
        0: Law(torch.tensor([0.5, 0.5])),
        1: Law(torch.tensor([0.5, 0.5])),
        4: Law.one_hot(3),
        3: Law.one_hot(8),
    }
    verdict = TYPICAL.judge(draft, Given(laws), KeyedCoins(0, 1, Stream.JUDGE), want_laws=True)
    # 5 is not plausible after 4, so 0-3 (0.30) and 1-4 (0.15) are equally long.
    assert (verdict.kept, verdict.emitted) == ((0, 3), (0, 0, 8))
    assert verdict.laws == (laws[ROOT], laws[0], laws[3])
    laws[4] = Law.one_hot(0)
    laws[5] = Law.one_hot(9)
    verdict = TYPICAL.judge(draft, Given(laws), KeyedCoins(0, 1, Stream.JUDGE))
    assert (verdict.kept, verdict.emitted) == ((1, 4, 5), (1, 1, 0, 9))


def test_it_is_not_lossless_and_by_how_much():
    """A plausible token always comes out: the error is the mass that p gives to the others."""
    for seed in (1, 3, 4):
        world = World(seed)
        p = world.p(())
        (token,) = world.q((), 2).top(1)
        likely = p.prob(token) > TYPICAL.threshold(p)
        expected = 1 - p.prob(token) if likely else 0.0
        law, _ = outputs(TYPICAL, best([1]), world)
        first = sum(prob for tokens, prob in law.items() if tokens[0] == token)
        assert first - p.prob(token) == pytest.approx(expected)
    assert max(step_error(TYPICAL, best([2, 1]), World(seed)) for seed in (1, 3)) > 0.05


def test_at_temperature_0_it_is_exact():
    sure = World(1, p_edit=lambda law: Law.one_hot(int(law.prob_S.argmax()), torch.float64))
    for recipe in (best([1, 1]), best([2, 1])):
        assert step_error(TYPICAL, recipe, sure) < 1e-12


def test_it_decides_as_its_oracle():
    report = check_oracle(seed=1, cases=77, names=["typical"])["typical"]
    assert report.agreed == report.cases


@pytest.mark.parametrize(
    ("settings", "says"), [({"epsilon": 1.0}, "epsilon must be in"), ({"delta": 0.0}, "delta must")]
)
def test_bad_settings_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        TypicalConfig(**settings)


def test_the_engine_wants_to_be_told():
    spec = "draft_model[model=tiny layers=1 tree=2x1 verifier=typical[delta=0.2]]"
    prompt = [5, 9, 11, 5, 9, 11, 5, 9]
    strict = Engine.load("tiny", drafter="none", dtype="float32")
    with pytest.raises(SpecError, match="changes the distribution of the output"):
        strict.generate(prompt, drafter=spec)
    loose = Engine.load("tiny", drafter="none", dtype="float32", allow_lossy=True)
    settings = {"max_new_tokens": 24, "ignore_eos": True}
    greedy = loose.generate(prompt, drafter=spec, temperature=0.0, **settings)
    assert greedy.tokens == loose.generate(prompt, drafter="none", temperature=0.0, **settings).tokens
    warm = loose.generate(prompt, drafter=spec, temperature=0.9, seed=1, **settings)
    assert not warm.lossless and not greedy.lossless and greedy.counters.accepted > 0
