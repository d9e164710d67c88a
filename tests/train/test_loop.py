"""The loop: exact resume, schedules, stops, errors, several processes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outpace.errors import OutpaceError
from outpace.methods.draft_model.objective import DraftModelObjective, DraftModelTraining
from outpace.methods.eagle3.objective import Eagle3, Eagle3Config
from outpace.models.tiny import tiny
from outpace.train import checkpoint, curves, optimizers
from outpace.train.batches import Batch
from outpace.train.loop import LoopConfig, Progress, emitted, train
from outpace.train.objective import Step
from outpace.train.progress import clock_text
from tests.train.texts import Listed, most_used, written

TAPS = ("hidden.2", "hidden.1", "hidden.-1")


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def batches(target):
    return [written(target, 3, seed=seed, new=10, taps=TAPS) for seed in range(3)]


def trainee(target, batches, kind="eagle3"):
    vocab = most_used(batches, 60, target)
    if kind == "eagle3":
        return Eagle3.build(Eagle3Config(steps=2), target, vocab)
    options = DraftModelTraining(layers=1, on_policy=0.3)
    return DraftModelObjective.build(options, target, vocab)


def weights(objective):
    return {name: one.detach().clone() for name, one in objective.module.named_parameters()}


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("kind", "bf16", "optimizer"),
    [
        ("eagle3", False, "adamw"),
        ("eagle3", True, "muon"),
        ("draft_model", False, "adamw"),
        ("draft_model", True, "adamw"),
    ],
)
def test_killed_and_resumed_is_bit_for_bit_the_same(target, batches, tmp_path, kind, bf16, optimizer):
    config = LoopConfig(
        steps=8, evaluate_every=2, checkpoint_every=3, lr=1e-3, bf16=bf16, optimizer=optimizer
    )
    whole = trainee(target, batches, kind)
    start = weights(whole)
    places = {"out": tmp_path / "a", "work": tmp_path / "aw"}
    done = train(whole, Listed(batches), batches[:1], config, **places)
    places = {"out": tmp_path / "b", "work": tmp_path / "bw"}

    class Dying(Listed):
        def since(self, epoch=0, index=0):
            for count, one in enumerate(super().since(epoch, index)):
                if count == 5:
                    raise Killed
                yield one

    with pytest.raises(Killed):
        train(trainee(target, batches, kind), Dying(batches), batches[:1], config, **places)
    assert checkpoint.latest(places["work"]).name == "step-00000003.safetensors"
    again = trainee(target, batches, kind)
    resumed = train(again, Listed(batches), batches[:1], config, **places, resume=True)
    for name, one in weights(again).items():
        assert torch.equal(one, weights(whole)[name]), name
        assert not torch.equal(one, start[name]), f"{name} was trained"
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (resumed.steps, resumed.best_step) == (done.steps, done.best_step) == (8, done.best_step)
    measured = [[one["acceptance"] for one in run.history] for run in (done, resumed)]
    assert measured[0] == measured[1] and len(measured[0]) == 4
    # A finished run has nothing left to do.
    after = train(again, Listed(batches), batches[:1], config, **places, resume=True)
    assert after.steps == 8
    # Planted: without the moments of the optimizer the bits would differ.
    tensors, state = checkpoint.load(next(iter(checkpoint.paths(tmp_path / "aw"))))
    kept = {name: one for name, one in tensors.items() if name.startswith("weight.")}
    path = checkpoint.save(tmp_path / "cw", 6, kept, state)
    poor = trainee(target, batches, kind)
    train(poor, Listed(batches), [], config, out=tmp_path / "c", work=path.parent, resume=True)
    assert any(not torch.equal(one, weights(whole)[name]) for name, one in weights(poor).items())


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_keeps_the_step_and_goes_on_to_the_same_bits(target, batches, tmp_path, number):
    config = LoopConfig(steps=7, evaluate_every=3, checkpoint_every=200, report_every=1, bf16=False)
    whole, lines = trainee(target, batches), []
    train(whole, Listed(batches), batches[:1], config, out=tmp_path / "a", work=tmp_path / "aw")
    places = {"out": tmp_path / "b", "work": tmp_path / "bw", "say": lines.append}

    def ask(progress):
        if progress.step == 4:
            signal.raise_signal(number)

    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt) as stop:
        train(trainee(target, batches), Listed(batches), batches[:1], config, **places, report=ask)
    assert stop.value.args == (number,) and len(lines) == 1 and "Ctrl-C ends at once" in lines[0]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    assert [one.name for one in checkpoint.paths(tmp_path / "bw")] == ["step-00000004.safetensors"]
    again = trainee(target, batches)
    train(again, Listed(batches), batches[:1], config, **places, resume=True)
    assert all(torch.equal(one, weights(whole)[name]) for name, one in weights(again).items())
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.usefixtures("signals")
def test_a_second_ctrl_c_ends_at_once(target, batches, tmp_path):
    config = LoopConfig(steps=7, report_every=1, bf16=False)

    def ask(progress):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # whoever ends several processes may send more
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")

    places = {"out": tmp_path / "a", "work": tmp_path / "aw"}
    with pytest.raises(KeyboardInterrupt):
        train(trainee(target, batches), Listed(batches), batches[:1], config, **places, report=ask)
    assert not checkpoint.paths(tmp_path / "aw")


@pytest.mark.usefixtures("signals")
def test_asked_in_the_last_step_it_leaves_before_anything_else(target, batches, tmp_path):
    config = LoopConfig(steps=2, bf16=False)
    places = {"out": tmp_path / "a", "work": tmp_path / "aw"}

    def ask(progress):
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train(trainee(target, batches), Listed(batches), batches[:1], config, **places, report=ask)
    assert checkpoint.latest(tmp_path / "aw").name == "step-00000002.safetensors"


def test_muon_has_the_matrices_between_vectors_and_adamw_the_rest(target, batches):
    module = trainee(target, batches).module
    own = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": False}
    both = optimizers.made("muon", module, **own)
    names = {id(one): name for name, one in module.named_parameters()}
    muon, adamw = (
        {names[id(one)] for group in part.param_groups for one in group["params"]} for part in both.parts
    )
    assert muon | adamw == set(names.values()) and not muon & adamw
    assert "lm_head.weight" in adamw and "fc.weight" in muon
    assert all(name.endswith("proj.weight") or name == "fc.weight" for name in muon)
    with pytest.raises(ValueError, match="optimizer must be adamw or muon, got 'sgd'"):
        LoopConfig(steps=1, optimizer="sgd")


def test_the_rate_rises_and_falls():
    config = LoopConfig(steps=100, lr=1.0, warmup=0.1, last=0.2)
    rates = [config.rate(config.done(step, 0.0)) for step in range(101)]
    assert rates[0] == 0.0 and rates[5] == pytest.approx(0.5) and rates[10] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[100] == pytest.approx(0.2)
    by_time = LoopConfig(minutes=10, lr=1.0)
    assert by_time.done(10**6, 300.0) == 0.5 and by_time.done(0, 900.0) == 1.0
    both = LoopConfig(minutes=10, steps=100)
    assert both.done(20, 60.0) == 0.2 and both.done(20, 300.0) == 0.5
    for wrong in ({}, {"steps": 0}, {"minutes": -1.0}, {"steps": 1, "lr": 0.0}):
        with pytest.raises(ValueError):
            LoopConfig(**wrong)


class Scripted:
    """An objective whose held-out acceptance and loss follow a script."""

    on_policy_share = 0.0

    def gather(self, sum):
        pass

    def __init__(self, rates=(), losses=()):
        self.module = torch.nn.Linear(1, 1)
        self.rates, self.losses, self.saved = list(rates), list(losses), []

    def loss(self, batch):
        trained = torch.is_grad_enabled()  # and not held out
        given = self.losses.pop(0) if self.losses and trained else 1.0
        return Step(self.module.weight.square().sum() * 0 + given + self.module.bias.sum() * 0, 4)

    def evaluate(self, batch):
        rate = self.rates.pop(0)
        return Step(torch.zeros(()), 1, torch.tensor([100.0 * rate]), torch.tensor([100.0]))

    def save(self, folder, provenance):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "provenance.json").write_text(json.dumps(provenance))
        self.saved.append(provenance["steps"])


NOTHING = Batch(
    token_BT=torch.zeros(1, 4, dtype=torch.int64),
    length_B=torch.tensor([4]),
    answer_BT=torch.ones(1, 4, dtype=torch.bool),
)


def scripted(tmp_path, rates, losses=(), **settings):
    objective = Scripted(rates, losses)
    config = LoopConfig(**{"steps": 20, "evaluate_every": 2, "bf16": False, **settings})
    seen = []
    done = train(
        objective,
        Listed([NOTHING]),
        [NOTHING],
        config,
        out=tmp_path / "out",
        work=tmp_path / "work",
        provenance={"command": "test"},
        report=seen.append,
    )
    return objective, done, seen


def test_the_best_is_kept_and_patience_ends(tmp_path):
    rates = [0.1, 0.3, 0.2, 0.25, 0.9, 0.9]
    objective, done, _ = scripted(tmp_path, rates, patience=2)
    assert objective.saved == [2, 4] and done.stopped_early
    assert (done.steps, done.best_step) == (8, 4) and done.best.acceptance == (0.3,)
    kept = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert kept["command"] == "test" and kept["held_out"]["emitted"] == pytest.approx(1.3)
    objective, done, _ = scripted(tmp_path / "b", [0.1 * i for i in range(10)])
    assert objective.saved[-1] == 20 and not done.stopped_early


def test_without_held_out_texts_the_last_is_kept(tmp_path):
    objective = Scripted()
    config = LoopConfig(steps=3, bf16=False)
    done = train(objective, Listed([NOTHING]), [], config, out=tmp_path / "o", work=tmp_path / "w")
    assert objective.saved == [3] and done.best is None


def test_a_best_that_was_taken_away_is_not_believed(target, batches, tmp_path):
    """The checkpoint remembers it; without its folder the run would end with no drafter."""
    config = LoopConfig(steps=2, evaluate_every=2, checkpoint_every=2, bf16=False)
    places = {"out": tmp_path / "best", "work": tmp_path / "w"}
    done = train(trainee(target, batches), Listed(batches), batches[:1], config, **places)
    assert done.best is not None
    shutil.rmtree(places["out"])
    again = trainee(target, batches)
    train(again, Listed(batches), batches[:1], config, **places, resume=True)
    assert (places["out"] / "config.json").is_file()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_with_step_and_checkpoint(tmp_path, bad):
    with pytest.raises(OutpaceError, match=r"loss is (nan|inf) at step 2; there is no checkpoint"):
        scripted(tmp_path / "early", [], [1.0, bad])
    with pytest.raises(OutpaceError, match=r"at step 6; the last good checkpoint is .*00000004"):
        scripted(tmp_path, [0.1] * 9, [1.0] * 5 + [bad], checkpoint_every=4)


def test_a_gradient_that_is_no_number_stops_too(tmp_path):
    class Bad(Scripted):
        def loss(self, batch):
            zero = self.module.weight.sum() * 0
            return Step(zero.sqrt() + 1.0, 4)  # its derivative at 0 is infinite

    config = LoopConfig(steps=3, bf16=False)
    with pytest.raises(OutpaceError, match=r"gradient is (nan|inf) at step 1"):
        train(Bad(), Listed([NOTHING]), [], config, out=tmp_path / "o", work=tmp_path / "w")


def test_progress_says_what_matters(tmp_path):
    _, done, seen = scripted(tmp_path, [0.5] * 10, report_every=1)
    assert len(seen) == 20 and len(done.history) == 10
    assert "acceptance 0.500, emitted 1.50" in seen[1].line() and "acceptance" not in seen[0].line()
    assert seen[0].line().startswith("step 1 epoch 0 loss 1.0000 ") and "tokens/s" in seen[0].line()
    assert seen[-1].left == 0 and seen[0].left > 0 and seen[5].tokens_per_second > 0
    assert clock_text(3725) == "1:02:05" and clock_text(65) == "0:01:05"
    assert emitted([0.5, 0.5]) == pytest.approx(1.75)
    one = Progress(
        step=1,
        epoch=0,
        loss=1.0,
        rate=1.0,
        tokens_per_second=1.0,
        seconds=1.0,
        left=1.0,
        acceptance=(0.5,),
        overlap=(0.7,),
        emitted=1.5,
    )
    assert one.line().endswith("alpha 0.700")


def test_a_picture_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib")
    history = [{"step": s, "loss": 1.0 / s, "acceptance": (0.1 * s, 0.2)} for s in (1, 2)]
    assert curves.draw(history, tmp_path / "deep" / "training.png")
    assert (tmp_path / "deep" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert not curves.draw(history[:1], tmp_path / "no.png")


def test_no_picture_where_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    history = [{"step": s, "loss": 1.0, "acceptance": (0.1,)} for s in (1, 2)]
    assert not curves.draw(history, tmp_path / "training.png")


WORKER = """
import sys, torch
from pathlib import Path
from outpace.models.tiny import tiny
from outpace.train.loop import LoopConfig, train
from tests.train.test_loop import TAPS, joined, trainee, weights
from tests.train.texts import Listed, written
from outpace.config import world

rank, size = world()
target = tiny()
parts = [written(target, 3, seed=seed, new=10, taps=TAPS) for seed in range(4)]
objective = trainee(target, parts)
mine = parts[rank::size] if size > 1 else [joined(parts[i], parts[i + 1]) for i in (0, 2)]
folder = Path(sys.argv[1]) / str(size)
config = LoopConfig(steps=3, bf16=False, lr=1e-3, evaluate_every=2)
done = train(objective, Listed(mine), mine[:1], config, out=folder, work=folder / "work")
torch.save((weights(objective), done.best.acceptance, done.steps), folder.with_suffix(f".{rank}"))
"""


def joined(a, b):
    """Both batches as one; they are of one width."""
    assert a.token_BT.shape[1] == b.token_BT.shape[1]
    both = {
        name: torch.cat([getattr(a, name), getattr(b, name)])
        for name in ("token_BT", "length_B", "answer_BT")
    }
    feature = {tap: torch.cat([a.feature[tap], b.feature[tap]]) for tap in a.feature}
    return Batch(**both, feature=feature)


def test_a_step_of_two_batches_is_one_of_both_together(target, tmp_path):
    parts = [written(target, 3, seed=seed, new=10, taps=TAPS) for seed in range(4)]
    together = [joined(parts[i], parts[i + 1]) for i in (0, 2)]
    found = []
    for name, given, batches in (("two", parts, 2), ("one", together, 1)):
        objective = trainee(target, parts)
        config = LoopConfig(steps=3, batches=batches, bf16=False, lr=1e-3, evaluate_every=2)
        folder = tmp_path / name
        done = train(objective, Listed(given), together[:1], config, out=folder, work=folder / "work")
        found.append((weights(objective), done.best.acceptance))
    for name, one in found[0][0].items():
        torch.testing.assert_close(one, found[1][0][name], atol=2e-5, rtol=1e-3)
    assert found[0][1] == pytest.approx(found[1][1])


@pytest.mark.slow
def test_two_processes_train_as_one_with_batches_twice_as_large(tmp_path):
    root = Path(__file__).parents[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    pair = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    runs = [subprocess.Popen(command, env=common | pair | {"RANK": str(r)}) for r in (0, 1)]
    assert [run.wait(240) for run in runs] == [0, 0]
    subprocess.run(command, env=common, check=True, timeout=240)
    first, second, alone = (torch.load(tmp_path / name) for name in ("2.0", "2.1", "1.0"))
    for name, one in first[0].items():
        assert torch.equal(one, second[0][name]), "every process has the same weights"
        torch.testing.assert_close(one, alone[0][name], atol=2e-5, rtol=1e-3)
    assert first[1] == second[1] == pytest.approx(alone[1])
    assert len(list((tmp_path / "2" / "work").glob("*.safetensors"))) == 1
