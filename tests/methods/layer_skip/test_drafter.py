"""Layers left out: which ones are found, that the set is kept, and that the text stays the same."""

import json
from dataclasses import replace

import pytest
import torch

from outpace import Engine, ModelError, SpecError
from outpace.clock import PassClock
from outpace.errors import UnknownNameError
from outpace.methods.layer_skip import skip_sets
from outpace.methods.layer_skip.drafter import LayerSkip, LayerSkipConfig
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
        "skip=1+3+6 tree=3x2x1",
        "skip=5 tree=dynamic",
        "skip=2+4 tree_size=12 policy=confidence",
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
    """Both ways find them in the first prompt that is long enough, and not in a shorter one."""
    engine, spec = Engine(target, drafter="none"), f"layer_skip[find={find} share=0.25]"
    drafter = engine.method(spec).drafter
    engine.generate([1, 2, 3], drafter=spec, **LONG)
    assert drafter.traits.taps and drafter.skip == skip_sets.even(8, 2) != IDLE
    before = drafter.clock
    result = engine.generate(PROMPTS, drafter=spec, **LONG)[1]
    assert drafter.skip == IDLE and not drafter.traits.taps and drafter.clock is before
    assert result.counters.acceptance_rate == 1.0, "nothing that matters is left out"
    file = LayerSkip.file(drafter._config, target)
    assert json.loads(file.read_text())["skip"] == list(IDLE)
    assert LayerSkip.load(replace(drafter._config), target).skip == IDLE
    assert LayerSkip.load(replace(drafter._config, kind="code"), target).skip != IDLE


def test_who_runs_the_model_in_its_place_waits_for_the_set(target):
    """Not the layers that it leaves out until then: nobody would ever exchange them."""
    engine, cascade = Engine(target, drafter="none"), "cascade[levels=layer_skip+max_gram]"
    with pytest.raises(SpecError, match="layer_skip is no language model; every"):
        engine.method(cascade)
    phrases = "ouroboros[draft=layer_skip[share=0.25] faster=true]"
    plain = engine.generate(TEXT, drafter="none", **LONG)
    assert engine.generate(TEXT, drafter=phrases, **LONG).tokens == plain.tokens
    assert engine.method(phrases).drafter.draft.skip == IDLE, "it finds the set itself"
    ready = Engine(target, drafter="none")
    assert ready.method(phrases).drafter.sped, "the set is known"
    ready.method(cascade.replace("skip+", "skip[share=0.25]+"))


def test_a_set_is_swapped_under_running_sequences(target):
    """A sequence that was drafted for with the first set goes on with the next one."""
    engine, spec = Engine(target, drafter="none"), "layer_skip[share=0.25]"
    plain = engine.generate([[1, 2, 3], TEXT], drafter="none", **LONG)
    drafter = engine.method(spec).drafter
    early = engine.stream([1, 2, 3], drafter=spec, **LONG)
    texts = [next(early).tokens, next(early).tokens]
    old = drafter.model
    assert engine.generate(TEXT, drafter=spec, **LONG).tokens == plain[1].tokens
    assert drafter.model is not old
    texts += [chunk.tokens for chunk in early]
    assert tuple(token for text in texts for token in text) == tuple(plain[0].tokens)
    assert not drafter.cache._slots and not drafter._living


def agreement(target, skip):
    """The plain way to score a set: two models, token by token."""
    part, same = skip_sets.part(target, skip), 0
    for end in range(1, len(TEXT) + 1):
        said = []
        for model in (part, target):
            cache = model.new_cache()
            logits = model.score([Feed.chain(cache.open(), TEXT[:end])], cache).logits_TV
            said.append(int(logits[-1].argmax()))
        same += said[0] == said[1]
    return same / len(TEXT)


def test_a_score_is_the_share_of_guesses_that_were_right(target):
    cache = target.new_cache()
    guess = target.score([Feed.chain(cache.open(), TEXT)], cache).logits_TV.argmax(1)
    clock = PassClock()
    found = skip_sets.search(target, TEXT, guess, count=3, trials=5, clock=clock)
    assert found.tried == clock.count <= 5 and len(found.skip) == 3
    assert found.score == pytest.approx(agreement(target, found.skip))
    assert 0 not in found.skip and 7 not in found.skip
    again = skip_sets.search(target, TEXT, guess, count=3, trials=5, clock=clock)
    assert again == found


def test_the_model_of_scores_learns_what_layers_are_worth():
    """Scores are made of a worth per layer, and few of the 56 sets of three have to be tried."""
    worth = [0.0, -0.1, -0.01, -0.1, -0.1, -0.02, -0.1, -0.03, -0.1, 0.0]

    def score(skip):
        return 1.0 + sum(worth[layer] for layer in skip)

    tried = {skip: score(skip) for skip in ((1, 2, 3), (4, 5, 6), (2, 6, 8), (1, 4, 7))}
    while (skip := skip_sets.propose(tried, 10)) not in tried:
        assert len(skip) == 3 and not {0, 9} & set(skip)
        tried[skip] = score(skip)
    assert max(tried, key=tried.get) == (2, 5, 7) and len(tried) < 16


def test_even_sets():
    assert skip_sets.even(8, 3) == (2, 4, 6)
    assert skip_sets.even(3, 5) == (1,)
    assert skip_sets.even(2, 1) == ()


def test_what_does_not_fit_is_said(target, tmp_path):
    engine = Engine(target, drafter="none")
    for settings, words in (
        ("find=luck", "must be search or cosine"),
        ("share=1", "between 0 and 1"),
        ("skip=a", "numbers of layers"),
        ("kind=../x", "letters, digits"),
        ("trials=0", "at least"),
    ):
        with pytest.raises(SpecError, match=words):
            engine.generate([1, 2], drafter=f"layer_skip[{settings}]")
    for skip in ("8", "0+1+2+3+4+5+6+7"):
        with pytest.raises(ModelError, match="cannot leave out layers"):
            LayerSkip.load(LayerSkipConfig(skip=skip), target)
    file = LayerSkip.file(LayerSkipConfig(), target)
    file.parent.mkdir(parents=True)
    file.write_text('{"skip": [3, 9]}')
    with pytest.raises(ModelError, match=r"skip \[3, 9\] is no part of layers 0 to 7; delete it"):
        LayerSkip.load(LayerSkipConfig(), target)


def test_a_rounded_copy_drafts(target):
    engine = Engine(target, drafter="none")
    plain = engine.generate(PROMPTS, drafter="none", **LONG)
    fast = engine.generate(PROMPTS, drafter="quantized_self", **LONG)
    assert tokens(fast) == tokens(plain)
    drafted = sum(one.counters.drafted for one in fast)
    assert sum(one.counters.accepted for one in fast) > 0.5 * drafted > 0
    drafter = engine.method("quantized_self").drafter
    assert drafter.model.weight_bytes < 0.5 * target.weight_bytes
    rounded = drafter.model
    with pytest.raises(ModelError, match="is rounded to int8 itself"):
        QuantizedSelf.load(QuantizedSelfConfig(), rounded)
    with pytest.raises(UnknownNameError, match="int2"):
        QuantizedSelf.load(QuantizedSelfConfig(kind="int2"), target)
