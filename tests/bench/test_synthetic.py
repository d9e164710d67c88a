import pytest

from outpace import Engine
from outpace.bench.ours import Ours
from outpace.bench.records import Case, Settings
from outpace.bench.synthetic import Synthetic, SyntheticConfig, SyntheticDrafter, read_rates
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.errors import RequestError, SpecError
from outpace.tree.growth import DraftRow
from outpace.types import Budget, Drawn

ROOMY = Budget(max_nodes=9, max_depth=9)
ANSWER = tuple(range(10, 20))


def drafts(rates, count, budget=ROOMY, answer=ANSWER):
    drafter = SyntheticDrafter(SyntheticConfig(acceptance=rates), 50)
    state = drafter.begin(Request(prompt=(1, 2), reference=answer))
    rows = [
        DraftRow(state, [1, 2, answer[0]], budget, KeyedCoins(seed, 2, Stream.DRAFT), None, Drawn.CHOSEN)
        for seed in range(count)
    ]
    return drafter.propose(rows)


def test_guesses_are_right_at_the_given_rates():
    """4000 drafts; a share is off by more than 0.04 with probability below 1e-6."""
    rates = (0.8, 0.5, 0.9)
    reached = [0] * 4
    for draft in drafts(rates, 4000):
        assert len(draft) == 3  # what follows a mistake is drafted as well
        right = [token == ANSWER[1 + i] for i, token in enumerate(draft.token_N)]
        for depth in range(right.index(False) + 1 if False in right else 4):
            reached[depth] += 1
    found = [reached[i + 1] / reached[i] for i in range(3)]
    assert found == pytest.approx(rates, abs=0.04)


def test_drafts_keep_to_budget_and_answer():
    (short,) = drafts((1.0, 1.0, 1.0), 1, Budget(max_nodes=2, max_depth=9))
    assert short.token_N == ANSWER[1:3]
    (end,) = drafts((1.0, 1.0, 1.0), 1, answer=(10, 11))
    assert end.token_N == (11,)


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


@pytest.mark.parametrize(
    "settings",
    [Settings(max_new_tokens=31), Settings(max_new_tokens=31, temperature=0.8, reproducible=True)],
    ids=["greedy", "reproducible"],
)
def test_perfect_and_hopeless_guesses(engine, settings):
    unit = tuple(
        Case(id=text, group="x", ids=engine.encode(text), seed=i)
        for i, text in enumerate(("hello you", "what is it"))
    )
    plain = Ours(engine, engine.method("none")).run(unit, settings)
    texts = {
        (case.id, case.seed, settings.reproducible): tokens
        for case, tokens in zip(unit, plain.tokens, strict=True)
    }
    perfect = Synthetic(engine, (1.0, 1.0), texts)
    hopeless = Synthetic(engine, (0.0, 1.0), texts)
    assert perfect.about["synthetic"] and perfect.name == "synthetic[acceptance=1,1]"
    good, bad = perfect.run(unit, settings), hopeless.run(unit, settings)
    assert good.tokens == bad.tokens == plain.tokens
    assert [c.passes for c in good.counters] == [10, 10]  # 30 tokens, 3 in each pass
    assert all(c.accepted == 0 and c.passes == 30 and c.drafted > 30 for c in bad.counters)


def test_what_it_cannot_know(engine):
    case = Case(id="a", group="x", ids=(5, 6))
    synthetic = Synthetic(engine, (0.5,), {})
    with pytest.raises(RequestError, match="no plain answer to prompt a"):
        synthetic.run((case,), Settings())
    with pytest.raises(RequestError, match="unless the text is reproducible"):
        synthetic.run((case,), Settings(temperature=0.8))


@pytest.mark.parametrize("text", ["", "0.5,", "half", "1.5", "-0.1", "nan"])
def test_bad_rates(engine, text):
    with pytest.raises(SpecError):
        Synthetic(engine, read_rates(text), {})
