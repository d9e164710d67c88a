"""Modules in a model's own checkpoint: both layouts, and which state of the model they read."""

import pytest
import torch

from outpace import Engine
from outpace.errors import ModelError, SpecError
from outpace.methods.mtp import files
from outpace.methods.mtp.drafter import Mtp, MtpConfig
from outpace.methods.mtp.objective import Mtp as MtpObjective
from outpace.methods.mtp.objective import MtpTraining
from outpace.methods.mtp.self_test import LENGTH, TEXTS
from outpace.models.decoder import Decoder
from outpace.models.memory import MemoryCheckpoint
from outpace.models.tiny import tiny
from tests.train.texts import written

DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
MIMO = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
MIMO["norm"] = "final_layernorm"


@pytest.fixture(scope="module")
def model():
    """Tensors of a small model whose last norm changes directions, as trained ones do."""
    plain = tiny()
    names = plain.config.tensor_shapes()
    tensors = {name: plain.checkpoint.tensor(name).clone() for name in names}
    norm = tensors["model.norm.weight"]
    norm *= (1.5 * torch.randn(norm.shape, generator=torch.Generator().manual_seed(1))).exp()
    return plain, tensors


def with_modules(model, more):
    plain, tensors = model
    checkpoint = MemoryCheckpoint(plain.config, {**tensors, **more}, name="made")
    return Decoder.load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module", params=["raw", "normed"])
def module(request, model):
    """A module that knows by heart the texts of the self-test, from one of both states."""
    target = with_modules(model, {})
    objective = MtpObjective.build(
        MtpTraining(modules=1, steps=1, base=request.param, loss="ce"), target, None
    )
    starts = [[target.vocab_size * (i + 1) // (TEXTS + 1)] for i in range(TEXTS)]
    taps = MtpObjective.taps(objective.config, target)
    batch = written(target, TEXTS, seed=0, new=LENGTH, taps=taps, prompts=starts)
    optimizer = torch.optim.AdamW(objective.module.parameters(), lr=3e-3)
    for _ in range(40):
        loss = objective.loss(batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    named = {name.removeprefix("modules.0."): one.detach() for name, one in objective.named().items()}
    return request.param, named


def stored(named, place, parts, swap):
    out = {}
    for name, one in named.items():
        if name.startswith("layer."):
            out[place + name.removeprefix("layer.")] = one
        else:
            part, kind = name.rsplit(".", 1)
            wide = one.shape[-1] // 2
            turned = torch.cat([one[:, wide:], one[:, :wide]], 1) if swap and part == "eh_proj" else one
            out[f"{place}{parts[part]}.{kind}"] = turned
    return out


@pytest.mark.parametrize("layout", ["deepseek", "mimo"])
def test_the_state_that_a_module_reads_is_found_out(model, module, layout):
    base, named = module
    place = f"model.layers.{model[0].num_layers}." if layout == "deepseek" else "model.mtp_layers.0."
    parts = DEEPSEEK if layout == "deepseek" else MIMO
    target = with_modules(model, stored(named, place, parts, layout == "mimo"))
    drafter = Mtp.load(MtpConfig(), target)
    state = "hidden.-1" if base == "normed" else f"hidden.{target.num_layers}"
    assert drafter.file.shape.base == state and drafter.traits.taps == {state}
    assert drafter.file.shape.hidden_first == (layout == "mimo")
    assert f"modules read the {base} state" in target.note and "is better" not in target.note
    other = "raw" if base == "normed" else "normed"
    target.note = None
    wrong = Mtp.load(MtpConfig(base=other), target)
    assert wrong.file.shape.base != state, "the user decides"
    assert f"base={base} is better" in target.note, "and is told"


def test_modules_of_a_checkpoint_draft_as_deep_as_they_were_trained_for(model, module):
    target = with_modules(model, stored(module[1], f"model.layers.{model[0].num_layers}.", DEEPSEEK, False))
    engine = Engine(target, drafter="none")
    settings = {"max_new_tokens": 12, "ignore_eos": True}
    levels = {
        spec: len(engine.generate([5, 9, 11], drafter=spec, **settings).counters.drafted_at)
        for spec in ("mtp", "mtp[tree=chain tree_size=8]")
    }
    assert levels == {"mtp": 1, "mtp[tree=chain tree_size=8]": files.AHEAD}


def test_what_cannot_be_read_is_said(model, module):
    _, named = module
    target = with_modules(model, {})
    with pytest.raises(ModelError, match="outpace train mtp"):
        Mtp.load(MtpConfig(), target)
    with pytest.raises(SpecError, match="base must be normed or raw, got 'last'"):
        Mtp.load(MtpConfig(base="last"), target)
    with pytest.raises(SpecError, match="a drafter folder says its own"):
        Mtp.load(MtpConfig(base="raw"), target)
    place = f"model.layers.{target.num_layers}."
    whole = stored(named, place, DEEPSEEK, False)
    less = {name: one for name, one in whole.items() if not name.endswith("down_proj.weight")}
    with pytest.raises(ModelError, match=r"lacks model.layers.2.mlp.down_proj.weight"):
        files.read_mtp(None, None, with_modules(model, less))
    odd = {**whole, f"{place}enorm.weight": torch.ones(3)}
    with pytest.raises(ModelError, match=r"enorm.weight has shape \[3\]"):
        files.read_mtp(None, None, with_modules(model, odd))
