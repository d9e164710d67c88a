"""What both trainings behind an early layer owe: a gain, and errors that say what is wrong."""

import pytest
import torch

from outpace.errors import ModelError
from outpace.methods.early_exit.kangaroo_objective import KangarooObjective
from outpace.methods.early_exit.objective import EarlyExitObjective
from outpace.models.tiny import TableTarget, tiny
from outpace.train.loop import LoopConfig, train
from tests.support import off_start
from tests.train.texts import Listed, most_used, written

TAPS = ("hidden.2", "hidden.-1")
BOTH = pytest.mark.parametrize("kind", [KangarooObjective, EarlyExitObjective])


@pytest.fixture(scope="module")
def target():
    return tiny(layers=3)


@pytest.fixture(scope="module")
def rows(target):
    return [written(target, 16, seed=seed, new=24, taps=TAPS) for seed in range(3)]


@BOTH
def test_a_short_training_raises_acceptance(kind, target, rows, tmp_path):
    """From where it is off its start, on texts that it has not seen."""
    unseen, seen = written(target, 12, seed=99, new=24, taps=TAPS), []
    vocab = most_used(rows, 200, target)
    objective = off_start(kind.build(kind.Config(exit_layer=2), target, vocab), noise=0.1)
    with torch.no_grad():
        before = objective.evaluate(unseen)
    config = LoopConfig(steps=40, lr=4e-3, evaluate_every=100, bf16=False)
    train(
        objective,
        Listed(rows),
        [unseen],
        config,
        out=tmp_path / "drafter",
        work=tmp_path / "work",
        report=seen.append,
    )
    first, overlap = (
        float(sums[0] / before.counted_by_depth[0])
        for sums in (before.accepted_by_depth, before.overlap_by_depth)
    )
    assert seen[-1].acceptance[0] > first + 0.1 and seen[-1].overlap[0] > overlap + 0.1


@BOTH
def test_what_cannot_be_built_is_said(kind, target):
    for layer in (0, 3):
        words = f"{kind.method}: exit_layer={layer}, but tiny has 3 layers; leave after layer 1 to"
        with pytest.raises(ModelError, match=words):
            kind.build(kind.Config(exit_layer=layer), target, None)
    with pytest.raises(ModelError, match=f"{kind.method} needs head, layers, taps"):
        kind.build(kind.Config(), TableTarget.random(0), None)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        kind.Config(temperature=0.0)
    assert kind.taps(kind.Config(), tiny(layers=30))[0] == "hidden.6"
