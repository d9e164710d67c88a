"""Every training can go on from the drafter that it made."""

from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file

from outpace.methods.dflash.dspark_objective import DsparkObjective, DsparkTraining
from outpace.methods.dflash.objective import DflashObjective, DflashTraining
from outpace.methods.draft_model.acceptance_objective import Acceptance, AcceptanceTraining
from outpace.methods.draft_model.objective import DraftModelObjective, DraftModelTraining
from outpace.methods.eagle3.objective import Eagle3, Eagle3Config
from outpace.methods.early_exit.kangaroo_objective import KangarooObjective, KangarooTraining
from outpace.methods.early_exit.objective import EarlyExitObjective, EarlyExitTraining
from outpace.methods.falcon.objective import Falcon, FalconTraining
from outpace.methods.fspad.objective import Fspad, FspadTraining
from outpace.methods.medusa.hydra_objective import Hydra, HydraTraining
from outpace.methods.medusa.objective import Medusa, MedusaTraining
from outpace.methods.mtp.objective import Mtp, MtpTraining
from outpace.methods.ppd.objective import Ppd, PpdTraining
from outpace.methods.recurrent.objective import ReDrafter, ReDrafterTraining
from outpace.methods.s2d.objective import S2d, S2dTraining
from outpace.methods.s2d.sec_objective import Sec, SecTraining
from outpace.methods.s3d.objective import S3d, S3dTraining
from outpace.methods.streaming.objective import Coral, CoralTraining, Streaming, StreamingTraining
from outpace.models.load import load_target
from outpace.train.starts import begin_from
from outpace.types import VocabMap

KINDS = {
    "falcon": (Falcon, FalconTraining()),
    "fspad": (Fspad, FspadTraining()),
    "mtp": (Mtp, MtpTraining(modules=2)),
    "redrafter": (ReDrafter, ReDrafterTraining()),
    "acceptance": (Acceptance, AcceptanceTraining(draft="tiny", draft_layers=1)),
    "dflash": (DflashObjective, DflashTraining()),
    "dspark": (DsparkObjective, DsparkTraining()),
    "draft_model": (DraftModelObjective, DraftModelTraining(take="0,1")),
    "eagle3": (Eagle3, Eagle3Config()),
    "early_exit": (EarlyExitObjective, EarlyExitTraining()),
    "hydra": (Hydra, HydraTraining()),
    "kangaroo": (KangarooObjective, KangarooTraining()),
    "medusa": (Medusa, MedusaTraining()),
    "ppd": (Ppd, PpdTraining()),
    "s2d": (S2d, S2dTraining()),
    "s3d": (S3d, S3dTraining()),
    "sec": (Sec, SecTraining()),
    "streaming": (Streaming, StreamingTraining()),
    "coral": (Coral, CoralTraining()),
}


@pytest.fixture(scope="module")
def target():
    return load_target("tiny", dtype="float32")


def saved(objective, folder):
    objective.save(folder, {"command": "test"})
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("method", KINDS)
def test_what_was_saved_is_where_the_next_training_begins(target, tmp_path, method):
    kind, config = KINDS[method]
    trained, fresh = kind.build(config, target, None), kind.build(config, target, None)
    coins = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trained.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=coins))
    first = saved(trained, tmp_path / "first")
    untrained = saved(fresh, tmp_path / "untrained")
    begin_from(fresh, tmp_path / "first")
    second = saved(fresh, tmp_path / "second")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], untrained[name]) for name in first)


SURE = {
    f"{name}, confident": (kind, replace(config, confidence=1.0))
    for name, (kind, config) in KINDS.items()
    if "confidence" in {field.name for field in fields(config)}
}


@pytest.mark.parametrize("method", [*KINDS, *SURE])
def test_a_training_begins_with_the_same_weights_whatever_was_drawn_before(target, method):
    kind, config = {**KINDS, **SURE}[method]
    built = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            built.append(kind.build(config, target, None).module.state_dict())
    assert all(torch.equal(one, built[1][name]) for name, one in built[0].items())


@pytest.mark.parametrize("sizes", [(None, 60), (60, None), (60, 90)], ids=repr)
def test_an_unembedding_of_other_tokens_gives_the_rows_of_those_that_both_have(target, tmp_path, sizes):
    kind, config = KINDS["eagle3"]
    maps = [None if size is None else kept(target.vocab_size, size) for size in sizes]
    first, second = (kind.build(config, target, one) for one in maps)
    ids = [range(target.vocab_size) if one is None else one.to_target_D.tolist() for one in maps]
    stored = saved(first, tmp_path / "first")["lm_head.weight"]
    before = second.named()["lm_head.weight"].clone()
    begin_from(second, tmp_path / "first")
    place, both = {token: row for row, token in enumerate(ids[0])}, 0
    for row, token in enumerate(ids[1]):
        both += token in place
        wanted = stored[place[token]] if token in place else before[row]
        assert torch.equal(second.named()["lm_head.weight"][row], wanted), token
    assert 0 < both <= min(map(len, ids))


def kept(vocab_size, count):
    """A draft vocabulary of every ``vocab_size // count``-th token."""
    to_target_D = torch.arange(count) * (vocab_size // count)
    feed_V = torch.full((vocab_size,), -1)
    feed_V[to_target_D] = torch.arange(count)
    return VocabMap(to_target_D, feed_V)
