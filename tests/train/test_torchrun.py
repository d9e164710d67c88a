"""Two processes of ``torchrun`` learn what one learns, and go on where one of them was killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outpace import Engine
from outpace.drafters.trained import read_tensors
from outpace.train.corpus import CorpusPrompt
from outpace.train.options import read_options
from outpace.train.pipeline import Pipeline
from tests.support import until

ROOT = Path(__file__).parents[2]
PROMPTS = [CorpusPrompt(messages=({"role": "user", "content": f"tell {i}"},), source=0) for i in range(120)]
COMMON = [
    "pipeline.vocab=64",
    "pipeline.tokens_per_batch=256",
    "loop.batches=2",
    "loop.bf16=false",
    "data.batch=32",
    "data.max_new_tokens=16",
]
METHODS = {
    # The coins of these are named by what stands in a batch, or by its number in a step.
    "draft_model": ["layers=1", "on_policy=0.5"],
    "eagle3": ["noise=0.1", "refused=2"],
    "ppd": [],
}
WORKER = """
import sys
from pathlib import Path
from tests.train.test_torchrun import learned

learned(Path(sys.argv[1]), *sys.argv[2:])
"""


def learned(work, method, *settings):
    """Trains a few steps; leaves weights in float32 and what was measured, of this process."""
    engine = Engine.load("tiny", dtype="float32", drafter="none")
    pipeline = Pipeline(
        engine, read_options(method, settings), work=work, out=work / f"out-{method}", say=lambda tick: None
    )
    kept = {}
    kind = pipeline.options.objective
    build = kind.build.__func__

    class Watched(kind):
        @classmethod
        def build(cls, *args):
            kept["objective"] = build(kind, *args)
            return kept["objective"]

    object.__setattr__(pipeline.options, "objective", Watched)
    made = pipeline.run(report=lambda progress: None)
    weights = {name: one.detach().clone() for name, one in kept["objective"].module.named_parameters()}
    history = [(note["acceptance"], note["loss"]) for note in made.trained.history]
    config = (made.folder / "config.json").read_text() if pipeline.rank == 0 else ""
    torch.save((weights, history, config), work / f"{method}.{pipeline.world}.{pipeline.rank}")


def torchrun(*words):
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *words]


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A work folder with answers of the tiny model."""
    folder = tmp_path_factory.mktemp("work")
    engine = Engine.load("tiny", dtype="float32", drafter="none")
    options = read_options("draft_model", COMMON, 1500)
    Pipeline(engine, options, prompts=PROMPTS, work=folder, out=folder / "o", say=lambda tick: None).data()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_learn_what_one_learns(work, method):
    script = work / "worker.py"
    script.write_text(WORKER)
    settings = [*COMMON, "loop.steps=8", "loop.evaluate_every=4", *METHODS[method]]
    words = [str(script), str(work), method, *settings]
    subprocess.run(torchrun(*words), env=environment(), check=True, timeout=200)
    subprocess.run([sys.executable, *words], env=environment(), check=True, timeout=200)
    first, second, alone = (torch.load(work / f"{method}.{name}") for name in ("2.0", "2.1", "1.0"))
    assert first[2] == alone[2], "what is written beside the weights is of all held-out rows"
    apart = {}
    for name, one in alone[0].items():
        assert torch.equal(first[0][name], second[0][name]), "every process has the same weights"
        apart[name] = float((first[0][name] - one).abs().max())
        torch.testing.assert_close(first[0][name], one, atol=2e-5, rtol=1e-3)
    print(f"{method}: weights in float32 at most {max(apart.values()):.1e} apart")
    for (rates, loss), (own_rates, own_loss) in zip(first[1], alone[1], strict=True):
        assert rates == pytest.approx(own_rates) and loss == pytest.approx(own_loss, rel=1e-4)


def workers(parent):
    """Process ids of the children of a process, in the order in which they began."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(parent):
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_process_is_started_anew_and_training_goes_on(work, tmp_path):
    settings = [*COMMON, "layers=1", "loop.steps=200", "loop.checkpoint_every=20", "loop.report_every=1"]
    settings += ["loop.evaluate_every=100"]
    common = ["train", "draft_model", "--model", "tiny", "--dtype", "float32", "--work", str(work)]
    common += [word for setting in settings if not setting.startswith("data.") for word in ("-s", setting)]
    command = torchrun("--max-restarts", "1", "-m", "outpace", *common, "--out", str(tmp_path / "two"))
    log = tmp_path / "log"
    with log.open("w") as heard:
        running = subprocess.Popen(command, env=environment(), stderr=heard, stdout=heard)
    try:
        until(lambda: len(list((work / "draft_model").glob("step-*"))) == 2, 200)
        pids = workers(running.pid)
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        assert running.wait(400) == 0, log.read_text()
    finally:
        running.kill()
    before, after = log.read_text().split("exitcode: -9")
    steps = [int(one) for one in re.findall(r"^step (\d+) epoch", after, re.MULTILINE)]
    assert before.startswith("step 1 ") and steps[-1] == 200
    assert steps[0] > 20 and steps[0] % 20 == 1, "from a checkpoint"
    alone = [sys.executable, "-m", "outpace", *common, "--out", str(tmp_path / "one")]
    subprocess.run(alone, env=environment(), check=True, timeout=400)
    two, one = read_tensors(tmp_path / "two"), read_tensors(tmp_path / "one")
    equal = sum(int((two[name] == one[name]).sum()) for name in one)
    total = sum(tensor.numel() for tensor in one.values())
    apart = max(float((two[name].float() - one[name].float()).abs().max()) for name in one)
    print(f"{equal / total:.4f} of the stored weights are equal, others at most {apart:.1e} apart")
    assert equal / total > 0.9 and apart < 0.01
