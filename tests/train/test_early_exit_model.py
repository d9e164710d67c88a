"""The tool that makes a model with trained exits: its recipe, its files, its second start."""

import sys
from pathlib import Path

import pytest
import torch

from outpace import Engine, OutpaceError
from outpace.bench.formats import read_workload
from outpace.train import checkpoint
from outpace.train.loop import LoopConfig
from outpace.types import Feed

TOOLS = Path(__file__).parents[2] / "tools"
SMALL = {"layers": 3, "width": 64, "ffn": 96, "vocab": 300, "exits": (1, 2), "length": 32}
LOOP = {"lr": 5e-3, "evaluate_every": 8, "checkpoint_every": 4, "report_every": 2, "bf16": False}


@pytest.fixture(scope="module")
def tool():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        import early_exit_model

        yield early_exit_model
    for name in ("early_exit_model", "early_exit_net"):
        del sys.modules[name]


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
def made(tool, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "model"
    tool.make(out, tool.Recipe(**SMALL), [texts], LoopConfig(steps=24, **LOOP), resume=False)
    return out


def test_the_folder_is_a_model_whose_first_layers_draft(made):
    engine = Engine.load(str(made), drafter="none", dtype="float32")
    assert not checkpoint.paths(made / "training"), "nothing is left to go on from"
    (prompt, *_) = read_workload(str(made / "prompts.jsonl"))
    ids = engine.encode(prompt.messages[0]["content"])
    settings = {"max_new_tokens": 24, "ignore_eos": True}
    plain = engine.generate(ids, drafter="none", **settings)
    for spec in ("early_exit[layer=1]", "early_exit[layer=2 tree=2x2]"):
        fast = engine.generate(ids, drafter=spec, **settings)
        assert fast.tokens == plain.tokens and fast.counters.accepted > 0


def test_what_is_saved_is_what_was_trained(tool, made, tmp_path):
    """The decoder gives the logits of the network in training, after every exit."""
    recipe = tool.Recipe(**SMALL)
    tokenizer = tool.tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    model = tool.ExitModel(recipe, tokenizer)
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


def test_deep_layers_drop_out_more_often_and_more_so_later(tool, made):
    tokenizer = tool.tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    model = tool.ExitModel(tool.Recipe(**SMALL, dropout=0.4), tokenizer)

    def shares():
        return [1 - len(kept) / 4000 for kept in model._kept(7, 4000)]

    assert shares() == [0, 0, 0]
    model.share = 1.0
    assert shares() == pytest.approx([0, 0.4 * (2**0.5 - 1), 0.4], abs=0.03)
    model.share = 0.5
    assert shares()[2] == pytest.approx(0.4 * (2**0.5 - 1), abs=0.03)
    again = [kept.tolist() for kept in model._kept(7, 9)]
    assert again == [kept.tolist() for kept in model._kept(7, 9)], "a step's own coins"
    x_BT = torch.randint(300, (6, 5))
    with torch.no_grad():
        (some,) = model.module(x_BT, (3,), [torch.arange(6), torch.arange(6), torch.tensor([1])])
        (all_,) = model.module(x_BT, (3,), [torch.arange(6)] * 3)
        (two,) = model.module(x_BT, (2,), [torch.arange(6)] * 2)
    assert torch.equal(some[1], all_[1]) and torch.equal(some[0], two[0])


def test_every_exit_has_its_turn(tool, made):
    tokenizer = tool.tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    model = tool.ExitModel(tool.Recipe(**SMALL), tokenizer)
    windows = tool.Windows(torch.arange(400) % 300, model.recipe)
    seen, real = [], model.module.forward
    model.module.forward = lambda token_BT, after, keep: seen.append(after) or real(token_BT, after, keep)
    for number in range(3):
        model.loss(windows.batch(torch.tensor([0, 50]), number))
    assert seen == [(1, 3), (2, 3), (1, 3)]


def test_a_stopped_training_goes_on(tool, texts, tmp_path, monkeypatch):
    out, recipe, loop = tmp_path / "model", tool.Recipe(**SMALL), LoopConfig(steps=8, **LOOP)
    lines = []

    def stop(text, **more):
        lines.append(text)
        if text.startswith("step 6"):
            raise KeyboardInterrupt

    monkeypatch.setattr(tool, "print", stop, raising=False)
    with pytest.raises(KeyboardInterrupt):
        tool.make(out, recipe, [texts], loop, resume=False)
    monkeypatch.setattr(tool, "print", lambda text, **more: lines.append(text), raising=False)
    with pytest.raises(OutpaceError, match="a training was stopped in"):
        tool.make(out, recipe, [texts], loop, resume=False)
    lines.clear()
    tool.make(out, recipe, [texts], loop, resume=True)
    steps = [line.split()[1] for line in lines if line.startswith("step")]
    assert steps == ["6", "8"] and "exit 1" in lines[-1] and (out / "config.json").is_file()


def test_options_of_bench_stand_behind_two_dashes(tool, tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(tool.subprocess, "run", lambda command, **_: ran.append(command) or _Ended)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["tool", str(tmp_path), "--only", "measure", *words])
        return tool.main()

    assert call("--exits", "1+2", "--", "--batch", "4", "--seed", "3") == 0
    assert ran[0][-4:] == ["--batch", "4", "--seed", "3"]
    assert "none,early_exit[layer=1],early_exit[layer=2]" in ran[0]
    for wrong in (["--minuts", "5"], ["--temperature", "1"], ["--only", "train", "--", "--x"]):
        with pytest.raises(SystemExit):
            call(*wrong)
    assert len(ran) == 1 and "--minuts 5" in capsys.readouterr().err


class _Ended:
    returncode = 0


def test_what_cannot_be_is_said(tool, texts, tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="exits must be layers 1 to 2, got"):
        tool.Recipe(**{**SMALL, "exits": (3,)})
    (tmp_path / "short.txt").write_text("A few words.")
    monkeypatch.setattr(
        sys,
        "argv",
        ["tool", str(tmp_path / "out"), "--texts", str(tmp_path / "short.txt"), "--only", "train"],
    )
    assert tool.main() == 1
    assert "give more" in capsys.readouterr().err
