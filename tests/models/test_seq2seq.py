"""Encoder-decoders against transformers: logits, whole answers, folders."""

import pytest
import torch

from outpace import Engine
from outpace.errors import ModelError, RequestError
from outpace.models.load import load_target
from outpace.types import Draft, Feed
from tests.models.making import seq2seq

KINDS = ("t5", "t5 gated", "bart", "marian")
SOURCES = [[7, 9, 11, 9, 30, 31, 32, 7], [5, 6, 50, 51], [8] * 20]


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    model = seq2seq(request.param)
    return model, load_target(model)


def theirs(model, source, answer):
    """Logits of transformers after every token of an answer."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([answer])).logits[0]


def assert_same(got, want):
    """To 1e-5 of the largest logit."""
    off = (got - want).abs().max()
    assert off <= 1e-5 * want.abs().max(), off


def test_logits_are_those_of_transformers(pair):
    model, target = pair
    for source in SOURCES:
        text = target.framed(source)
        answer = [*target.config.start_ids, 12, 13, 40, 12]
        tokens = [*text[: -len(target.config.start_ids)], *answer]
        cache = target.new_cache()
        got_TV = target.score([Feed.chain(cache.open(), tokens)], cache).logits_TV[-len(answer) :]
        want_TV = theirs(model, list(text[: text.index(target.config.eos_id) + 1]), answer)
        assert_same(got_TV, want_TV)


def test_a_tree_in_a_batch_is_its_paths_alone(pair):
    model, target = pair
    cache = target.new_cache()
    draft = Draft.chosen([12, 13, 14, 15], [-1, -1, 0, 2])
    feeds = []
    for source in SOURCES:
        slot, text = cache.open(), target.framed(source)
        target.score([Feed.chain(slot, text[:-1], want=())], cache)
        cache.keep(slot, range(len(text) - 1))
        feeds.append(Feed.tree(slot, text[-1], draft))
    scored = target.score(feeds, cache)
    for b, source in enumerate(SOURCES):
        text = target.framed(source)
        ends = text.index(target.config.eos_id) + 1
        for row, path in enumerate([[], [12], [13], [12, 14], [12, 14, 15]]):
            want_V = theirs(model, list(text[:ends]), [*text[ends:], *path])[-1]
            assert_same(scored.of(b).logits_TV[row], want_V)


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "reference", "adaptive_ngram"])
def test_greedy_answers_are_those_of_transformers(pair, drafter):
    model, target = pair
    engine = Engine(target, drafter)
    got = engine.generate(SOURCES, max_new_tokens=24, temperature=0.0)
    for source, one in zip(SOURCES, got, strict=True):
        text = target.framed(source)
        ends = text.index(target.config.eos_id) + 1
        want = model.generate(
            torch.tensor([text[:ends]]),
            max_new_tokens=24,
            do_sample=False,
            num_beams=1,
            forced_eos_token_id=None,
        )[0].tolist()
        assert [*text[ends:], *one.tokens] == want[: len(text) - ends + len(one.tokens)]
        assert len(one.tokens) == 24 or one.tokens[-1] == target.config.eos_id


def test_a_folder_is_read_like_the_model_that_wrote_it(pair, tmp_path):
    model, target = pair
    model.save_pretrained(tmp_path)
    other = load_target(str(tmp_path), dtype="float32")
    tokens = [*target.framed(SOURCES[0]), 12, 13]
    logits = []
    for one in (target, other):
        cache = one.new_cache()
        logits.append(one.score([Feed.chain(cache.open(), tokens)], cache).logits_TV)
    assert torch.equal(*logits)


def test_a_source_that_was_dropped_is_read_again(pair):
    _, target = pair
    cache = target.new_cache()
    slot = cache.open()
    for source in SOURCES:
        tokens = target.framed(source)
        cache.sync(slot, tokens[:3])
        held = cache.length(slot)
        got_V = target.score([Feed.chain(slot, tokens[held:])], cache).logits_TV[-1]
        cache.keep(slot, range(len(tokens) - held))
        fresh = target.new_cache()
        want_V = target.score([Feed.chain(fresh.open(), tokens)], fresh).logits_TV[-1]
        assert_same(got_V, want_V)


def test_what_does_not_fit_is_refused():
    target = load_target(seq2seq("t5"))
    engine = Engine(target, "none")
    with pytest.raises(RequestError, match="holds no chats"):
        engine.generate([{"role": "user", "content": "hi"}])
    with pytest.raises(RequestError, match="ends a source"):
        engine.generate([5, 1, 7])
    with pytest.raises(RequestError, match="at most"):
        engine.generate([5] * 600)
    with pytest.raises(ModelError, match="taps"):
        Engine(target, "eagle3").generate([5, 6])
