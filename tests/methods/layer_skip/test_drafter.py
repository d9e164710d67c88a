"""Sub-layers left out: which ones are found, that the set is kept, and that the text stays the same."""

import json
from dataclasses import replace

import pytest
import torch

from outpace import Engine, ModelError, SpecError
from outpace.errors import UnknownNameError
from outpace.methods.layer_skip.drafter import LayerSkip, LayerSkipConfig
from outpace.methods.layer_skip.search import Process, Search
from outpace.methods.layer_skip.skip_sets import SkipSet, Trial, choices, even, union
from outpace.methods.quantized_self import QuantizedSelf, QuantizedSelfConfig
from outpace.models.decoder import Decoder
from outpace.models.memory import MemoryCheckpoint
from outpace.models.tiny import tiny
from outpace.types import Feed

TEXT = [5, 9, 11, 5, 9, 11, 5, 9, 40, 41, 42, 43, 44, 77, 3, 1, 4, 1, 5, 9]
PROMPTS = [TEXT, [40, 41, 42, 43, 44], [77]]
LONG = {"max_new_tokens": 24, "ignore_eos": True}
IDLE = (3, 6)
"""Layers of the target that do nothing."""
ENOUGH = {"max_new_tokens": 60, "ignore_eos": True}
"""Of an answer, to find a set on."""


def idle_target():
    """A decoder of 8 layers, two of which add nothing to the residual stream."""
    whole = tiny(layers=8)
    tensors = {name: whole.checkpoint.tensor(name, torch.float32) for name in whole.config.tensor_shapes()}
    for layer in IDLE:
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{part}.weight"].zero_()
    checkpoint = MemoryCheckpoint(
        whole.config, tensors, name="idle", tokenizer=whole.tokenizer, defaults=whole.defaults
    )
    return Decoder.load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def target():
    return idle_target()


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))


def tokens(results):
    return [result.tokens for result in results]


@pytest.mark.parametrize(
    "settings",
    [
        "skip=3+6",
        "",
        "find=cosine share=0.3",
        "skip=1+a3+m6 tree=3x2x1",
        "skip=m0+5 tree=dynamic:8:0",
        "skip=2+a4 tree_size=12 policy=confidence",
    ],
)
def test_the_text_is_plain_text(target, settings):
    engine, spec = Engine(target, drafter="none"), f"layer_skip[{settings}]".replace("[]", "")
    for more in ({}, {"temperature": 0.8, "seed": 5, "reproducible": True}):
        plain = engine.generate(PROMPTS, drafter="none", **LONG, **more)
        fast = engine.generate(PROMPTS, drafter=spec, **LONG, **more)
        assert tokens(fast) == tokens(plain)
        assert sum(one.counters.accepted for one in fast) > 0
        single = [engine.generate(one, drafter=spec, **LONG, **more) for one in PROMPTS]
        assert tokens(single) == tokens(plain)


@pytest.mark.parametrize("find", ["search", "cosine"])
def test_idle_layers_are_the_ones_left_out(target, find):
    """Both ways find them in the first answer that is long enough, and not in a shorter one."""
    engine, spec = Engine(target, drafter="none"), f"layer_skip[find={find} share=0.25]"
    drafter = engine.method(spec).drafter
    engine.generate([1, 2, 3], drafter=spec, **LONG)
    assert not drafter.found and not drafter.traits.deterministic and drafter.skip == even(8, 2)
    plain = engine.generate(PROMPTS, drafter="none", **ENOUGH)
    assert tokens(engine.generate(PROMPTS, drafter=spec, **ENOUGH)) == tokens(plain), "found on the way"
    assert drafter.found and drafter.traits.deterministic and str(drafter.skip) == "3+6"
    result = engine.generate(PROMPTS, drafter=spec, **LONG)[1]
    assert result.counters.acceptance_rate == 1.0, "nothing that matters is left out"
    file = LayerSkip.file(drafter._config, target)
    assert json.loads(file.read_text())["skip"] == "3+6"
    assert str(LayerSkip.load(replace(drafter._config), target).skip) == "3+6"
    assert not LayerSkip.load(replace(drafter._config, kind="code"), target).found


def test_nothing_below_the_first_gap_is_computed_twice(target):
    """Rows that were drafted enter verification there; keys and values below it are in the slot."""
    engine, rows = Engine(target, drafter="none"), []
    drafter = engine.method("layer_skip[skip=3+6]").drafter
    propose = drafter.propose

    def watched(asked):
        drafts = propose(asked)
        rows.extend((one.resume.layer, len(one) - len(one.resume.row_K)) for one in drafts if len(one))
        return drafts

    drafter.propose = watched
    engine.generate(TEXT, drafter="layer_skip[skip=3+6]", **LONG)
    assert set(rows) == {(3, 0)}, "the pending token and all guesses but the last, from layer 3 on"


def test_who_runs_the_model_in_its_place_waits_for_the_set(target):
    """Not the layers that it leaves out until then: nobody would ever exchange them."""
    engine, cascade = Engine(target, drafter="none"), "cascade[levels=layer_skip+max_gram]"
    with pytest.raises(SpecError, match="layer_skip is no language model; every"):
        engine.method(cascade)
    phrases = "ouroboros[draft=layer_skip[share=0.25] faster=true]"
    plain = engine.generate(TEXT, drafter="none", **ENOUGH)
    assert engine.generate(TEXT, drafter=phrases, **ENOUGH).tokens == plain.tokens
    assert str(engine.method(phrases).drafter.draft.skip) == "3+6", "it finds the set itself"
    ready = Engine(target, drafter="none")
    assert ready.method(phrases).drafter.sped, "the set is known"
    ready.method(cascade.replace("skip+", "skip[share=0.25]+"))


def slow_agreement(target, skip, first):
    """The plain way to judge a set: one guess at a time, over keys and values of the whole target."""
    part, same = skip.part(target), 0
    for end in range(first, len(TEXT)):
        cache = target.new_cache()
        slot = cache.open()
        target.score([Feed.chain(slot, TEXT[:end])], cache)
        cache.keep(slot, range(end))
        said = part.score([Feed.chain(slot, TEXT[end : end + 1])], cache).logits_TV.argmax(1)
        cache.drop(slot)
        same += bool(said == target.score([Feed.chain(slot, TEXT[end : end + 1])], cache).logits_TV.argmax(1))
    return same / (len(TEXT) - first)


def test_a_set_is_judged_as_it_is_used(target):
    trial = Trial(target, TEXT, 5)
    before = target.clock.count
    found = Search(trial, 0.4).bayes(5)
    assert found.tried == target.clock.count - before <= 5
    assert found.agreement == pytest.approx(slow_agreement(target, found.skip, 5))
    assert not {0, 7} & (found.skip.attentions | found.skip.mlps)
    body = 1 - trial.cost(SkipSet(frozenset(range(8)), frozenset(range(8))))
    assert 0.4 <= (1 - found.cost) / body < 0.5
    assert Search(Trial(target, TEXT, 5), 0.4).bayes(5) == found
    for skip in (SkipSet.read("1+a4"), SkipSet.read("m2+5")):
        assert trial.agreement(skip) == pytest.approx(slow_agreement(target, skip, 5))


def test_the_process_tells_what_is_near_from_what_is_far():
    coins = torch.Generator().manual_seed(0)
    worth_N = torch.rand(20, generator=coins, dtype=torch.float64) / 20
    x_SN = (torch.rand(40, 20, generator=coins) < 0.4).double()
    process = Process(x_SN[:30], 1 - x_SN[:30] @ worth_N)
    mean_C, spread_C = process.predict(x_SN)
    truth_C = 1 - x_SN @ worth_N
    assert float((mean_C - truth_C)[30:].abs().mean()) < 0.4 * float(truth_C.std())
    assert float(spread_C[:30].max()) < float(spread_C[30:].min())


def test_sets_are_written_as_they_are_read():
    for text in ("3+6", "a1+2+m9", "m4"):
        assert str(SkipSet.read(text)) == text
    assert SkipSet.read("a3+m3") == SkipSet.read("3") and SkipSet.read("x3") is SkipSet.read("") is None
    assert str(even(8, 3)) == "2+4+6" and str(even(3, 5)) == "1" and len(even(2, 1)) == 0
    assert union(choices(4)) == SkipSet.read("1+2") and SkipSet.read("a2+5").first == 2


def test_what_does_not_fit_is_said(target, tmp_path):
    engine = Engine(target, drafter="none")
    for settings, words in (
        ("find=luck", "must be search or cosine"),
        ("share=1", "between 0 and 1"),
        ("skip=a", "layers and sub-layers"),
        ("kind=../x", "letters, digits"),
        ("trials=0", "at least"),
    ):
        with pytest.raises(SpecError, match=words):
            engine.generate([1, 2], drafter=f"layer_skip[{settings}]")
    for skip in ("8", "0+1+2+3+4+5+6+7"):
        with pytest.raises(ModelError, match="cannot leave out layers"):
            LayerSkip.load(LayerSkipConfig(skip=skip), target)


@pytest.mark.parametrize("content", ["", '{"skip": "3', "[1]", '{"skip": "3+m9"}', '{"skip": 5}'])
def test_a_damaged_set_is_ignored_in_one_line(target, content, caplog):
    file = LayerSkip.file(LayerSkipConfig(), target)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert not LayerSkip.load(LayerSkipConfig(), target).found
    (line,) = caplog.messages
    assert str(file) in line and "another set will be found" in line and "\n" not in line


@pytest.mark.parametrize(
    ("spec", "share"), [("layer_skip[skip=3", 7 / 8), ("early_exit[threshold=0 layer=7", 7 / 8)]
)
def test_levels_of_a_dynamic_tree_are_priced_by_the_weights_that_they_read(target, spec, share):
    engine = Engine(target, drafter="none")
    (level,) = engine.method(f"{spec} tree=dynamic]").drafter.traits.level_D
    assert level == pytest.approx(share, abs=0.05)
    priced = engine.generate(PROMPTS, drafter=f"{spec} tree=dynamic]", **LONG)
    filled = engine.generate(PROMPTS, drafter=f"{spec} tree=dynamic:8:0]", **LONG)
    assert {len(one.counters.drafted_at) for one in priced} == {1}, "a second level costs a pass"
    assert min(len(one.counters.drafted_at) for one in filled) > 1


def test_a_rounded_copy_drafts(target):
    engine = Engine(target, drafter="none")
    plain = engine.generate(PROMPTS, drafter="none", **LONG)
    fast = engine.generate(PROMPTS, drafter="quantized_self", **LONG)
    assert tokens(fast) == tokens(plain)
    drafted = sum(one.counters.drafted for one in fast)
    assert sum(one.counters.accepted for one in fast) > 0.5 * drafted > 0
    drafter = engine.method("quantized_self").drafter
    assert drafter.model.weight_bytes < 0.5 * target.weight_bytes
    assert drafter.traits.level_D == (drafter.model.weight_bytes / target.weight_bytes,)
    rounded = drafter.model
    with pytest.raises(ModelError, match="is rounded to int8 itself"):
        QuantizedSelf.load(QuantizedSelfConfig(), rounded)
    with pytest.raises(UnknownNameError, match="int2"):
        QuantizedSelf.load(QuantizedSelfConfig(kind="int2"), target)
