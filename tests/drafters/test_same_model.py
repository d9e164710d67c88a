"""One model in several files, and in memory: the drafter that was trained for one serves them all."""

import json

import pytest
import torch
import transformers

from outpace import Engine
from outpace.drafters.trained import CONFIG, candidates, find, home
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.eagle3.objective import Eagle3, Eagle3Config
from outpace.models.decoder import Decoder
from outpace.models.hf.target import HFTarget
from outpace.models.likeness import Likeness
from outpace.models.load import load_target
from outpace.models.weights import SafetensorsCheckpoint
from outpace.train.install import install_folder
from tests.models.making import GGUF_TOKENS, gguf_metadata, gguf_name, permuted, save_hf, write_gguf

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": len(GGUF_TOKENS),
    "head_dim": 16,
    "initializer_range": 0.3,
}
PROMPT = [5, 9, 11, 40, 7, 5, 9, 12, 77, 8]
GREEDY = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("same") / "folder"
    save_hf(path, "llama", **SIZES)
    return path


@pytest.fixture(scope="module")
def rounded(folder):
    """The same model as converters write it, its matrices rounded to 4 bits."""
    checkpoint = SafetensorsCheckpoint(folder)
    config, tensors, kinds = checkpoint.config, {}, {}
    for name in config.tensor_shapes():
        tensor = checkpoint.tensor(name, torch.float32).numpy()
        if "q_proj" in name or "k_proj" in name:
            tensor = permuted(tensor, config.num_heads if "q_proj" in name else config.num_kv_heads)
        tensors[gguf_name(name, "llama")] = tensor
        if tensor.ndim == 2:
            kinds[gguf_name(name, "llama")] = "Q4_0"
    path = folder.parent / "rounded.gguf"
    write_gguf(path, tensors, gguf_metadata(config, "llama"), arch="llama", kinds=kinds)
    return path


@pytest.fixture(scope="module")
def head(folder):
    """A head that was trained for the folder, where training puts it."""
    target = load_target(folder, dtype="float32")
    ids = torch.arange(0, target.vocab_size, 2)
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[ids] = torch.arange(len(ids))
    torch.manual_seed(0)
    Eagle3.build(Eagle3Config(), target, VocabMap(ids, feed_V)).save(folder.parent / "head", {})
    install_folder(folder.parent / "head", home("eagle3", target))
    return home("eagle3", target)


def test_the_same_model_rounded_finds_the_head(folder, rounded, head):
    whole, small = load_target(folder, dtype="float32"), load_target(rounded, dtype="float32")
    assert whole.digest != small.digest
    assert find("eagle3", whole) == find("eagle3", small) == head
    engine = Engine(small, "eagle3")
    plain = engine.generate(PROMPT, drafter="none", **GREEDY)
    assert engine.generate(PROMPT, **GREEDY).tokens == plain.tokens
    assert small.note is None or "trained for" not in small.note


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_model_that_is_rounded_while_loading_finds_it_too(folder, head, quantize):
    assert find("eagle3", load_target(folder, dtype="float32", quantize=quantize)) == head


def test_a_model_of_transformers_in_memory_drafts_with_it(folder, head):
    """Embedding and head come from its modules; drafts are those on the own decoder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs, own = Engine.load(model, drafter="eagle3"), Engine.load(model, drafter="eagle3", backend="own")
    assert isinstance(theirs.target, HFTarget) and isinstance(own.target, Decoder)
    plain = own.generate(PROMPT, drafter="none", **GREEDY)
    results = [engine.generate(PROMPT, **GREEDY) for engine in (theirs, own)]
    assert [one.tokens for one in results] == [plain.tokens] * 2
    counts = [(one.counters.drafted, one.counters.accepted) for one in results]
    assert counts[0] == counts[1] and counts[0][0] > 0


def test_another_model_is_refused_with_the_reason_or_taken_anyway(folder, head, tmp_path):
    save_hf(tmp_path / "other", "llama", **SIZES)
    weights = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.copy_(torch.randn_like(parameter))
    weights.save_pretrained(tmp_path / "other")
    spec = f"eagle3[model={head}]"
    with pytest.raises(
        ModelError, match=r"was trained for folder .*, not for other .*embedding differ by .*%"
    ):
        Engine.load(tmp_path / "other", dtype="float32", drafter=spec)
    with pytest.raises(ModelError, match="no trained eagle3 for other"):
        Engine.load(tmp_path / "other", dtype="float32", drafter="eagle3")
    for one in (spec, "eagle3"):
        engine = Engine.load(tmp_path / "other", dtype="float32", drafter=one, drafter_anyway=True)
        assert "was trained for folder" in engine.target.note
        assert "not checked against other" in engine.target.note and "\n" not in engine.target.note
        plain = engine.generate(PROMPT, drafter="none", **GREEDY)
        assert engine.generate(PROMPT, **GREEDY).tokens == plain.tokens
    save_hf(tmp_path / "wide", "llama", **SIZES | {"hidden_size": 96})
    with pytest.raises(ModelError, match="hidden_size 64, but wide has 96"):
        Engine.load(tmp_path / "wide", dtype="float32", drafter=spec, drafter_anyway=True)


def test_what_likeness_compares(folder, rounded):
    whole, small = SafetensorsCheckpoint(folder).likeness, load_target(rounded).checkpoint.likeness
    assert whole.difference(small) is None and small.difference(whole) is None
    again = Likeness.from_json(json.loads(json.dumps(whole.to_json())), "x")
    assert again.difference(whole) is None and torch.equal(again.sample_N, whole.sample_N)
    assert "hidden_size is 65" in whole.difference(
        Likeness((whole.shape[0], 65, *whole.shape[2:]), whole.sample_N)
    )
    # Tokens in another order are another vocabulary; every part counts.
    rows = whole.sample_N.clone()
    rows[: 48 * 8] = rows[: 48 * 8].roll(8)
    assert "embedding" in whole.difference(Likeness(whole.shape, rows))
    for place, part in ((48 * 8, "norms"), (-1, "projections")):
        other = whole.sample_N.clone()
        other[place] += 2.0
        assert part in whole.difference(Likeness(whole.shape, other))
    for wrong in (None, [], {"shape": [1]}, {"shape": [96] * 7, "sample": "!"}, {"shape": "x", "sample": 1}):
        with pytest.raises(ModelError, match="target_likeness"):
            Likeness.from_json(wrong, "config.json")


def test_a_broken_folder_of_another_model_does_not_disturb(folder, head):
    broken = head.parents[1] / "0000" / "eagle3"
    broken.mkdir(parents=True)
    (broken / CONFIG).write_text("{no json")
    assert candidates("eagle3", load_target(folder, dtype="float32")) == [head]
