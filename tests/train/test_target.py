"""A model with trained exits, made from texts: its recipe, its files, its second start."""

import json
from dataclasses import replace

import pytest
import tokenizers
import torch

from outpace import Engine, ModelError, OutpaceError, RequestError
from outpace.bench.formats import read_workload
from outpace.errors import SpecError, UnknownNameError
from outpace.methods.early_exit.drafter import EarlyExit, EarlyExitConfig
from outpace.methods.early_exit.objective import EarlyExitObjective, EarlyExitTraining
from outpace.methods.layer_skip.drafter import LayerSkip, LayerSkipConfig
from outpace.methods.layer_skip.skip_sets import SkipSet
from outpace.methods.s2d.objective import S2dTraining
from outpace.models.load import load_target
from outpace.models.lock import alone
from outpace.train import checkpoint
from outpace.train.loop import LoopConfig
from outpace.train.target import Texts, Windows, make, read_settings
from outpace.train.target_net import ExitModel, Recipe
from outpace.train.target_start import cut, start_from
from outpace.types import Feed

SMALL = {"start": "none", "layers": 3, "width": 64, "ffn": 96, "vocab": 300, "exits": "1+2"} | {
    "length": 32,
    "batch": 4,
}
LOOP = {"lr": 5e-3, "evaluate_every": 8, "checkpoint_every": 4, "report_every": 2, "bf16": False}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "stories.txt"
    stories = [
        f"Once {who} saw a {what}. " * 3 + f"The {what} and {who} were friends, number {i}. " * 6
        for i, (who, what) in enumerate(
            (who, what)
            for who in ("Ann", "Bob", "Cid", "Dan", "Eve") * 4
            for what in ("cat", "dog", "hen", "fox", "owl")
        )
    ]
    file.write_text("<|endoftext|>".join(stories))
    return file


@pytest.fixture(scope="module")
def made(texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "model"
    make(out, Recipe(**SMALL), [texts], LoopConfig(steps=24, **LOOP), resume=False, say=str)
    return out


def test_the_folder_is_a_model_whose_first_layers_draft(made):
    engine = Engine.load(str(made), drafter="none", dtype="float32")
    assert not checkpoint.paths(made / "training"), "nothing is left to go on from"
    (prompt, *_) = read_workload(str(made / "prompts.jsonl"))
    ids = engine.encode(prompt.messages[0]["content"])
    assert engine.encode(list(prompt.messages)) == ids, "its chat template leaves text as it is"
    assert len(read_workload(str(made / "beginnings.jsonl"))) == 98
    settings = {"max_new_tokens": 24, "ignore_eos": True}
    plain = engine.generate(ids, drafter="none", **settings)
    for spec in ("early_exit[layer=1]", "early_exit[layer=2 tree=2x2]"):
        fast = engine.generate(ids, drafter=spec, **settings)
        assert fast.tokens == plain.tokens and fast.counters.accepted > 0


def test_what_is_saved_is_what_was_trained(made, tmp_path):
    """The decoder gives the logits of the network in training, after every exit."""
    recipe = Recipe(**SMALL)
    tokenizer = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    model = ExitModel(recipe, tokenizer)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.copy_(parameter.bfloat16())
    model.save(tmp_path, {})
    (tmp_path / "tokenizer.json").write_bytes((made / "tokenizer.json").read_bytes())
    target = Engine.load(str(tmp_path), drafter="none", dtype="float32").target
    text, all_rows = [5, 9, 200, 9, 31, 5, 77], [torch.arange(1)] * recipe.layers
    with torch.no_grad():
        states = model.module(torch.tensor([text]), (1, 2, 3), all_rows)
        wanted = [one[0] @ model.module.embed_tokens.weight.T for one in states]
    for layers, logits_TV in zip((1, 2, 3), wanted, strict=True):
        part = target.variant(layers=range(layers)) if layers < 3 else target
        cache = part.new_cache()
        feed = Feed.chain(cache.open(), text, want=range(len(text)))
        found = part.score([feed], cache).logits_TV
        torch.testing.assert_close(found, logits_TV, atol=2e-4, rtol=2e-4)


def test_deep_layers_drop_out_more_often_and_more_so_later(made):
    tokenizer = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    model = ExitModel(Recipe(**SMALL, dropout=0.4), tokenizer)

    def shares():
        return [1 - len(kept) / 4000 for kept in model._kept(7, 4000)]

    assert shares() == [0, 0, 0]
    model.done = 1.0
    assert shares() == pytest.approx([0, 0.4 * (2**0.5 - 1), 0.4], abs=0.03)
    model.done = 0.5
    assert shares()[2] == pytest.approx(0.4 * (2**0.5 - 1), abs=0.03)
    again = [kept.tolist() for kept in model._kept(7, 9)]
    assert again == [kept.tolist() for kept in model._kept(7, 9)], "a step's own coins"
    x_BT = torch.randint(300, (6, 5))
    with torch.no_grad():
        (some,) = model.module(x_BT, (3,), [torch.arange(6), torch.arange(6), torch.tensor([1])])
        (all_,) = model.module(x_BT, (3,), [torch.arange(6)] * 3)
        (two,) = model.module(x_BT, (2,), [torch.arange(6)] * 2)
    assert torch.equal(some[1], all_[1]) and torch.equal(some[0], two[0])


def test_every_exit_has_its_turn(made):
    tokenizer = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    model = ExitModel(Recipe(**SMALL, whole=3, grow=0), tokenizer)
    windows = Windows(torch.arange(400) % 300, model.recipe)
    seen, real = [], model.module.forward
    model.module.forward = lambda token_BT, after, keep: seen.append(after) or real(token_BT, after, keep)
    for number in range(6):
        model.loss(windows.batch(torch.tensor([0, 50]), number))
    assert seen == [(1, 2, 3), (2,), (1,), (1, 2, 3), (2,), (1,)]


def test_a_stopped_training_goes_on(texts, tmp_path):
    out, recipe, loop = tmp_path / "model", Recipe(**SMALL), LoopConfig(steps=8, **LOOP)
    lines = []

    def stop(text):
        lines.append(text)
        if text.startswith("step 6"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(out, recipe, [texts], loop, resume=False, say=stop)
    with pytest.raises(OutpaceError, match="a training was stopped in"):
        make(out, recipe, [texts], loop, resume=False, say=str)
    lines.clear()
    make(out, recipe, [texts], loop, resume=True, say=lines.append)
    steps = [line.split()[1] for line in lines if line.startswith("step")]
    assert steps == ["6", "8"] and "exit 1" in lines[-1] and (out / "config.json").is_file()


def test_all_exits_learn_in_every_step_if_asked(made):
    tokenizer = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    model = ExitModel(Recipe(**SMALL, together=True), tokenizer)
    model.done = 1.0
    seen, real = [], model.module.forward
    model.module.forward = lambda token_BT, after, keep: seen.append(after) or real(token_BT, after, keep)
    windows = Windows(torch.arange(400) % 300, model.recipe)
    for number in range(2):
        model.loss(windows.batch(torch.tensor([0, 50]), number))
    assert seen == [(1, 2, 3), (1, 2)]


def test_layers_behind_the_last_exit_come_in_later_and_change_nothing_at_first(made):
    tokenizer = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    model = ExitModel(Recipe(**SMALL, grow=0.5), tokenizer)
    batch = Windows(torch.arange(400) % 300, model.recipe).batch(torch.tensor([0, 50]), 0)
    early, late = (model.module.layers[i].self_attn.o_proj.weight for i in (0, 2))

    def touched():
        model.module.zero_grad(set_to_none=True)
        model.loss(batch).loss.backward()
        return [one.grad is not None and bool(one.grad.any()) for one in (early, late)]

    model.done = 0.4
    assert touched() == [True, False]
    before = model.evaluate(batch)
    assert before.overlap_by_depth[1] == before.tokens, "the last exit is the whole model"
    model.done = 0.5
    assert touched() == [True, True]
    assert torch.equal(model.evaluate(batch).accepted_by_depth, before.accepted_by_depth)
    assert model.evaluate(batch).overlap_by_depth.tolist() == before.overlap_by_depth.tolist()


def test_an_exit_learns_from_the_whole_model_and_not_the_other_way_round(made):
    tokenizer = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    coins = torch.Generator().manual_seed(1)
    grads = {}
    for distill in (0.0, 0.5):
        model = ExitModel(Recipe(**SMALL, grow=0, distill=distill, dropout=0), tokenizer)
        batch = Windows(torch.arange(400) % 300, model.recipe).batch(torch.tensor([0, 50]), 0)
        with torch.no_grad():
            coins.manual_seed(1)
            for one in model.module.parameters():
                one.add_(0.1 * torch.randn(one.shape, generator=coins))
        model.loss(batch).loss.backward()
        grads[distill] = [layer.mlp.down_proj.weight.grad for layer in model.module.layers]
        head_VH, label_R = model.module.embed_tokens.weight, batch.token_BT[:, 1:].flatten()
        with torch.no_grad():
            states = model.module(batch.token_BT[:, :-1], (1, 2, 3), [torch.arange(2)] * 3)
            logs = [(one.flatten(0, 1) @ head_VH.T).log_softmax(-1) for one in states]
        *texts, whole = (-one.gather(1, label_R[:, None]).mean() for one in logs)
        kls = [(logs[2].exp() * (logs[2] - one)).sum(1).mean() for one in logs[:2]]
        own = [(1 - distill) * text + distill * kl for text, kl in zip(texts, kls, strict=True)]
        torch.testing.assert_close(model.loss(batch).loss, (whole + sum(own) / 2) / 2)
    assert torch.allclose(grads[0.0][2], grads[0.5][2], atol=1e-6), "the last layer feels no exit"
    assert not torch.allclose(grads[0.0][0], grads[0.5][0], atol=1e-6)


def test_shallow_states_learn_from_deep_ones_and_not_the_other_way_round(made):
    """With ``states`` layers up to the last exit get more gradient, those behind it get none of it."""
    tokenizer = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    batch = Windows(torch.arange(400) % 300, Recipe(**SMALL)).batch(torch.tensor([0, 50]), 0)
    grads, losses = [], []
    for states in (0.0, 0.5):
        model = ExitModel(Recipe(**SMALL, grow=0, dropout=0, states=states), tokenizer)
        coins = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for one in model.module.parameters():
                one.add_(0.1 * torch.randn(one.shape, generator=coins))
        losses.append(model.loss(batch).loss)
        losses[-1].backward()
        grads.append([layer.mlp.down_proj.weight.grad for layer in model.module.layers])
        assert model.loss(replace(batch, number=1)).tokens, "a step of an exit alone has no deep states"
    with torch.no_grad():
        one, two, three = model.module(batch.token_BT[:, :-1], (1, 2, 3), [torch.arange(2)] * 3)

    def apart(a, b):
        return (a - b).square().mean()

    first, second = apart(one, one), min(apart(one, three), apart(two, three))
    torch.testing.assert_close(losses[1] - losses[0], 0.5 * (first + second) / 2, atol=1e-5, rtol=1e-4)
    assert torch.allclose(grads[0][2], grads[1][2], atol=1e-6), "what is learned from feels nothing"
    assert not torch.allclose(grads[0][0], grads[1][0], atol=1e-6)


def test_what_cannot_be_is_said(tmp_path):
    with pytest.raises(ValueError, match="exits must be numbers of layers, as in 3\\+6, got"):
        Recipe(**{**SMALL, "exits": "two"})
    with pytest.raises(ValueError, match="grow must be at least 0 and below 1, got 1"):
        Recipe(**SMALL, grow=1.0)
    with pytest.raises(ValueError, match="states must be 0 or more, got -1"):
        Recipe(**SMALL, states=-1)
    for name in ("layers", "ffn", "vocab", "whole", "length", "batch"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            Recipe(**{**SMALL, name: 0})
    with pytest.raises(SpecError, match="layers is of a model from nothing"):
        read_settings(["layers=5"])
    recipe, loop = read_settings(["start=none", "layers=8", "loop.minutes=7"])
    assert (recipe.layers, loop.steps, loop.minutes, loop.lr) == (8, None, 7, 0.005)
    assert read_settings([])[1].lr < loop.lr
    for pairs, error in ((["lairs=5"], UnknownNameError), (["layers"], SpecError)):
        with pytest.raises(error):
            read_settings(pairs)
    (tmp_path / "short.txt").write_text("A few words.")
    with pytest.raises(OutpaceError, match="tokens; give more, 20480 at least, or a smaller length than 256"):
        make(tmp_path / "out", recipe, [tmp_path / "short.txt"], loop, resume=False, say=str)


@pytest.fixture(scope="module")
def continued(made, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("continued") / "model"
    recipe = Recipe(start=str(made), vocab=290, exits="1+2", length=32, batch=4, whole=2)
    make(out, recipe, [texts], LoopConfig(steps=6, **LOOP), resume=False, say=str)
    return out


def test_training_goes_on_from_a_model(continued, made, texts):
    """Layers are those of the model, rows of the embedding go with their tokens, and exits are defaults."""
    pieces = Texts()
    pieces.read(texts)
    theirs = load_target(str(made), dtype="float32")
    start = start_from(theirs, pieces.train, 290)
    model = ExitModel(Recipe(start=str(made), exits="1+2"), start.tokenizer, start)
    whole = {name: theirs.checkpoint.tensor(f"model.{name}") for name, _ in model.module.named_parameters()}
    for name, one in model.module.named_parameters():
        other = whole[name][start.row_V] if name == "embed_tokens.weight" else whole[name]
        assert torch.equal(one, other.float())
    engine = Engine.load(str(continued), drafter="none", dtype="float32")
    assert engine.target.num_layers == theirs.num_layers and engine.target.vocab_size == 290
    settings = {"max_new_tokens": 24, "ignore_eos": True}
    plain = engine.generate("Once Ann saw", drafter="none", **settings)
    fast = engine.generate("Once Ann saw", drafter="early_exit", **settings)
    assert fast.tokens == plain.tokens and fast.counters.drafted > 0


@pytest.mark.parametrize("start", ["none", "a model"])
def test_a_killed_training_goes_on_to_the_same_bits(made, texts, tmp_path, start):
    """Killed between two checkpoints, in the middle of an epoch, with layers dropping out."""
    given = (
        SMALL
        if start == "none"
        else {"start": str(made), "vocab": 290, "exits": "1+2", "length": 32, "batch": 4}
    )
    recipe, loop = Recipe(**given, whole=2, dropout=0.5), LoopConfig(steps=11, **LOOP)

    said = []

    def kill(text):
        said.append(text)
        if text.startswith("step 6"):
            raise KeyboardInterrupt

    make(tmp_path / "whole", recipe, [texts], loop, resume=False, say=str)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "killed", recipe, [texts], loop, resume=False, say=kill)
    assert said[-1] == "stopped: the last checkpoint is step-00000004.safetensors; --resume goes on"
    tokenizer = tmp_path / "killed" / "tokenizer.json"
    whole = tokenizer.read_bytes()
    tokenizer.write_bytes(whole[:99])
    with pytest.raises(OutpaceError, match=r"tokenizer\.json is corrupt: .*; delete .* to begin anew"):
        make(tmp_path / "killed", recipe, [texts], loop, resume=True, say=str)
    tokenizer.write_bytes(whole)
    lines = []
    make(tmp_path / "killed", recipe, [texts], loop, resume=True, say=lines.append)
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["6", "8", "10", "11"]
    for name in ("model.safetensors", "config.json", "tokenizer.json", "prompts.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    if start != "none":
        assert (tmp_path / "whole" / "model.safetensors").read_bytes() != (
            made / "model.safetensors"
        ).read_bytes()


def test_a_model_is_not_overwritten_and_nothing_else_is_gone_on_with(made, texts, tmp_path):
    recipe, loop, out = Recipe(**SMALL), LoopConfig(steps=6, **LOOP), tmp_path / "model"
    before = {one.name: one.read_bytes() for one in made.iterdir() if one.is_file()}
    other = tmp_path / "other.txt"
    other.write_text(texts.read_text().replace("Once", "Twice"))

    def begin(out, recipe=recipe, texts=texts, loop=loop, resume=False, say=str):
        make(out, recipe, [texts], loop, resume=resume, say=say)

    def stop(text):
        if text.startswith("step"):
            raise KeyboardInterrupt

    with pytest.raises(OutpaceError, match=r"--out .* holds config\.json, which would be lost"):
        begin(made, texts=other)
    with pytest.raises(OutpaceError, match="holds no training that was stopped; leave --resume out"):
        begin(made, texts=other, resume=True)
    assert {one.name: one.read_bytes() for one in made.iterdir() if one.is_file()} == before
    with alone(out / "training", "busy"), pytest.raises(ModelError, match="another training works in"):
        begin(out)
    assert not (out / "tokenizer.json").exists()
    for _ in range(2):  # what was stopped before its first checkpoint is begun anew
        with pytest.raises(KeyboardInterrupt):
            begin(out, say=stop)
    with pytest.raises(KeyboardInterrupt):
        begin(out, loop=replace(loop, checkpoint_every=1), say=stop)
    checkpoint.save(out / "training", 1, {}, {})
    for change, said in (
        ({"recipe": replace(recipe, seed=3)}, "began with seed 0, not 3"),
        ({"loop": replace(loop, lr=0.1, checkpoint_every=1)}, "began with loop.lr 0.005, not 0.1"),
        ({"texts": other}, "began with texts "),
    ):
        given = {"loop": replace(loop, checkpoint_every=1), **change}
        with pytest.raises(RequestError, match=said):
            begin(out, resume=True, **given)


def test_a_tokenizer_is_cut_to_the_texts(made, texts):
    pieces = Texts()
    pieces.read(texts)
    backend = load_target(str(made)).tokenizer.backend
    whole, row_V = cut(backend, pieces.train, backend.get_vocab_size(), 0)
    for one in pieces.train[:5]:
        ids = [int(row_V[id]) for id in whole.encode(one).ids]
        assert ids == backend.encode(one, add_special_tokens=False).ids
    small, some_V = cut(backend, pieces.train, len(row_V) - 10, 0)
    assert len(some_V) <= len(row_V) - 10 and set(some_V.tolist()) < set(row_V.tolist())
    (text,) = pieces.train[:1]
    assert small.decode(small.encode(text).ids) == text, "what is gone is spelled in pieces"
    assert whole.token_to_id("<|endoftext|>") is not None


def test_drafters_know_the_exits_of_a_made_model(made, tmp_path):
    target = load_target(str(made), dtype="float32")
    assert EarlyExit.load(EarlyExitConfig(), target).layers == (1, 2)
    assert EarlyExit.load(EarlyExitConfig(layer=1), target).layers == (1,), "what is given goes first"
    skip = LayerSkip.load(LayerSkipConfig(), target)
    assert skip.found and skip.skip == SkipSet.read("2")
    assert LayerSkip.load(LayerSkipConfig(skip="1"), target).skip == SkipSet.read("1")
    assert S2dTraining().layers(target) == (1, 2)
    assert EarlyExitObjective.exit_layer(EarlyExitTraining(), target) == 1
    part = target.variant(layers=range(2))
    assert EarlyExit.load(EarlyExitConfig(), part).layers == (1,), "a part has no exit behind itself"
    plain = load_target("tiny")
    assert EarlyExit.load(EarlyExitConfig(), plain).layers == (1,)
    assert not LayerSkip.load(LayerSkipConfig(), plain).found
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(made / name)
    said = json.loads((made / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "early_exit_layers": [2, 1, 9]}))
    assert load_target(str(tmp_path)).checkpoint.exits == (1, 2), "those that the model has"
    for wrong in ("3", [0], [True], {"1": 2}):
        (tmp_path / "config.json").write_text(json.dumps({**said, "early_exit_layers": wrong}))
        with pytest.raises(ModelError, match="'early_exit_layers' must be a list of positive whole numbers"):
            load_target(str(tmp_path))
