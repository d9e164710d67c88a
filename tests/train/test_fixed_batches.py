from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from outpace import Engine
from outpace.params import NEUTRAL, SamplingParams
from outpace.train import fixed_batches, generate, self_prompts
from outpace.train.batches import Batches
from outpace.train.capture import compute
from outpace.train.corpus import CorpusPrompt
from outpace.train.crowd import Wanted, answer_each
from outpace.train.features import FeatureStore
from outpace.train.fixed_batches import LOOK, SHORTEST, answer_all
from outpace.train.generate import GenerateConfig, generate_answers, without_loop
from outpace.train.self_prompts import SelfPromptConfig, write_prompts
from outpace.train.text_net import TextNet
from outpace.train.tokens import TokenSequence, TokenStore
from outpace.types import Feed
from tests.models.making import own_target


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


@pytest.fixture(scope="module")
def net(engine):
    return TextNet(engine.target)


def eager(launch):
    return launch


def recorded(launch):
    """Recording may run a launch before it counts."""
    launch()
    return launch


def params(temperature=0.0, most=20):
    return SamplingParams(**NEUTRAL | {"temperature": temperature}, max_new_tokens=most, seed=1)


def law(target, ids, temperature):
    """The target's distribution after a prompt, by a pass."""
    cache = target.new_cache()
    logits_TV = target.score([Feed.chain(cache.open(), list(ids))], cache).of(0).logits_TV
    return (logits_TV[-1] / temperature).softmax(-1).tolist()


def prompts(engine, count=7):
    return [
        engine.encode([{"role": "user", "content": f"tell {i} " + "more " * (9 * i)}]) for i in range(count)
    ]


def test_it_fits_targets_whose_layers_are_alike(engine):
    assert TextNet.fits(engine.target)
    assert TextNet.on_gpu(engine.target) is None, "a CPU has passes"
    assert not TextNet.fits(engine.target.quantized("int8"))


@pytest.mark.parametrize("family", ["mistral", "gemma3", "smollm3", "mixtral"])
def test_targets_with_windows_or_experts_are_left_to_passes(family):
    assert not TextNet.fits(own_target(family))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "granite", "olmo2"])
def test_a_family_computes_what_its_passes_do(family):
    target = own_target(family)
    net, ids, cache = TextNet(target), [3, 5, 9, 1, 4, 4, 7, 8, 2, 11], target.new_cache()
    want_TV = target.score([Feed.chain(cache.open(), ids)], cache).logits_TV
    last_TH = net.features(torch.tensor([ids]), torch.tensor([len(ids)]), ("hidden.-1",))["hidden.-1"][0]
    torch.testing.assert_close(net.logits(last_TH.float()), want_TV, rtol=2e-2, atol=2e-1)
    wanted = [Wanted(tuple(ids), [params(most=9)], 0), Wanted(tuple(ids[:4]), [params(most=9)], 1)]
    for one in answer_all(net, iter(wanted), 2, (), eager, 0):
        whole = [*wanted[one.number].ids, *one.tokens]
        got_TV = target.score([Feed.chain(cache.open(), whole)], cache).logits_TV
        start = len(whole) - len(one.tokens)
        assert one.tokens == got_TV[start - 1 : -1].argmax(-1).tolist()


def test_a_seed_says_the_answers(engine, net):
    (ids, *_) = prompts(engine)
    drawn = [
        [one.tokens for one in answer_all(net, iter([Wanted(ids, [params(1.0)] * 3, 0)]), 4, (), eager, seed)]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({tuple(one) for one in drawn[0]}) == 3, "each answer has its own coins"


def test_features_of_padded_texts_are_those_of_passes(engine, net, tmp_path):
    taps = ("hidden.0", "hidden.1", f"hidden.{engine.target.num_layers}", "hidden.-1")
    texts = [list(ids) for ids in prompts(engine)]
    part = [
        TokenSequence(number=i, ids=np.array(t, np.int32), prompt=3, temperature=0.0)
        for i, t in enumerate(texts)
    ]
    longest = max(map(len, texts))
    token_BT = torch.stack([torch.tensor([*t, *[0] * (longest - len(t))]) for t in texts])
    store = FeatureStore(engine.target, tmp_path, taps, 1 << 30, net)
    found = store.padded(part, token_BT)
    for i, want in enumerate(compute(engine.target, texts, taps)):
        for tap in taps:
            got_TH = found[tap][i].float()
            assert not got_TH[len(texts[i]) :].any(), "nothing behind the end"
            torch.testing.assert_close(got_TH[: len(texts[i])], want[tap].float(), rtol=2e-2, atol=2e-2)
    store.fill(part, print)
    assert len(store) == 0, "nothing is kept that is computed sooner"


@pytest.mark.parametrize("record", [eager, recorded])
@pytest.mark.parametrize("slots", [2, 5, 64])
def test_greedy_answers_are_those_of_passes(engine, net, slots, record):
    wanted = [
        Wanted(ids, [params(most=5 + 6 * (i % 4))] * (1 + i % 3), 10 * i)
        for i, ids in enumerate(prompts(engine))
    ]
    want = {number: list(result.tokens) for number, result in answer_each(engine, iter(wanted), 4)}
    found = list(answer_all(net, iter(wanted), slots, engine.eos_ids, record, 0))
    assert {one.number: one.tokens for one in found} == want
    assert len(found) == len(want)
    assert all(one.ended == (one.tokens[-1] in engine.eos_ids) for one in found)


def test_prompts_of_several_sizes_are_answered_side_by_side(engine, net):
    long = tuple(engine.encode("a" * 3 * SHORTEST)[: SHORTEST - 8])
    wanted = [
        Wanted(long, [params()] * 3, 0),
        Wanted(long[:9], [params()], 7),
        Wanted(long[:-40], [params()], 9),
    ]
    want = {number: list(result.tokens) for number, result in answer_each(engine, iter(wanted), 4)}
    assert len(long) + 20 > SHORTEST > len(long) - 20
    assert {one.number: one.tokens for one in answer_all(net, iter(wanted), 2, (), eager, 0)} == want


def test_stops_and_loops_end_an_answer(engine, net):
    (ids, *_) = prompts(engine)
    (whole,) = answer_all(net, iter([Wanted(ids, [params(most=120)], 0)]), 2, (), eager, 0)
    stop = whole.tokens[7]
    (short,) = answer_all(net, iter([Wanted(ids, [params(most=120)], 0)]), 2, (stop,), eager, 0)
    assert short.ended and short.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    (again,) = answer_all(net, iter([Wanted(ids, [params(most=120)], 0)]), 2, (), eager, 0, (64, 32))
    assert again.tokens == whole.tokens and without_loop(whole.tokens) == 120
    (looped,) = answer_all(net, iter([Wanted(ids, [params(most=120)], 0)]), 2, (), eager, 0, (8, 3))
    looks = range(LOOK, 120, LOOK)
    first = next(n for n in looks if any(repeats(whole.tokens[n - 8 : n], period) for period in (1, 2, 3)))
    assert looped.tokens == whole.tokens[:first] and not looped.ended


def repeats(tokens, period):
    return all(a == b for a, b in zip(tokens, tokens[period:], strict=False))


def test_tokens_are_drawn_from_the_targets_distribution(engine, net, monkeypatch):
    """Each first token of many answers to one prompt, at two temperatures side by side."""
    (ids, *_) = prompts(engine)
    monkeypatch.setattr(fixed_batches, "LOOK", 1)
    count = 2000
    wanted = [Wanted(ids, [params(0.7, 1)] * count, 0), Wanted(ids, [params(1.3, 1)] * count, count)]
    found = list(answer_all(net, iter(wanted), 512, (), eager, 0))
    assert sorted(one.number for one in found) == list(range(2 * count))
    for low, temperature in ((0, 0.7), (count, 1.3)):
        drawn = Counter(one.tokens[0] for one in found if low <= one.number < low + count)
        p_V = law(engine.target, ids, temperature)
        common = [token for token in range(len(p_V)) if p_V[token] * count >= 8]
        expected = np.array([p_V[token] * count for token in common] + [0.0])
        expected[-1] = count - expected.sum()
        seen = np.array([drawn[token] for token in common] + [0])
        seen[-1] = count - seen.sum()
        score = float((np.square(seen - expected) / np.maximum(expected, 1e-9)).sum())
        assert len(common) > 3 and score < len(common) + 6 * (2 * len(common)) ** 0.5, (score, len(common))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(TextNet, "on_gpu", classmethod(lambda cls, target: cls(target)))
    for module in (generate, self_prompts):
        monkeypatch.setattr(module, "CudaRecorder", lambda device: recorded)


def test_a_store_is_made_and_added_to_as_with_passes(engine, as_on_a_gpu, tmp_path):
    asked = [CorpusPrompt(messages=({"role": "user", "content": f"tell {i}"},), source=0) for i in range(40)]
    config = GenerateConfig(tokens=600, max_new_tokens=24, batch=8, shard_tokens=150)
    store = generate_answers(engine, asked, tmp_path, config, say=lambda tick: None)
    assert 600 <= store.answer_tokens < 600 + 8 * 24
    greedy = [one for one in store if one.temperature == 0]
    assert greedy and len(greedy) < len(store)
    for one in greedy[:4]:
        answer = engine.generate(one.ids[: one.prompt].tolist(), temperature=0, max_new_tokens=24)
        assert one.ids[one.prompt :].tolist() == list(answer.tokens[: without_loop(answer.tokens)])
    before = {one.number for one in store}
    more = generate_answers(engine, asked, tmp_path, replace(config, tokens=900), say=lambda tick: None)
    assert before < {one.number for one in more} and more.answer_tokens >= 900
    features = FeatureStore(engine.target, tmp_path, ("hidden.-1",), 0, TextNet(engine.target))
    batches = Batches(TokenStore.open(tmp_path), 200, taps=("hidden.-1",), features=features)
    assert batches.at(0, 0).feature["hidden.-1"].shape[:2] == batches.at(0, 0).token_BT.shape


def test_the_target_writes_prompts(engine, as_on_a_gpu, tmp_path, monkeypatch):
    turn = self_prompts.user_turn
    monkeypatch.setattr(self_prompts, "_FEWEST", 1)
    monkeypatch.setattr(self_prompts, "user_turn", lambda *given, **said: (turn(*given, **said)[0], "e"))
    end = engine.target.tokenizer.encode("e", special=False)
    assert len(end) == 1, "the letter ends a prompt as a token does"
    count = write_prompts(
        engine,
        tmp_path / "p.jsonl",
        SelfPromptConfig(count=9, max_new_tokens=40, batch=4),
        say=lambda tick: None,
    )
    text = (tmp_path / "p.jsonl").read_text()
    assert count == 9 and text.count("\n") == 9


def test_a_turn_that_ends_with_several_tokens_is_left_to_passes(engine):
    assert self_prompts._stops(engine, None) == engine.eos_ids
    assert self_prompts._stops(engine, "two words and more") is None
