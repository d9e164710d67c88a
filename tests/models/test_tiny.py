"""The small targets: laws that are known, and a decoder that is real."""

import itertools

import pytest
import torch

from outpace.errors import ModelError
from outpace.models.tiny import TableTarget, tiny
from outpace.types import Draft, Feed, Riders


def test_score_is_the_log_of_law_after():
    target = TableTarget.random(1, vocab_size=3, order=None, zeros=0.3)
    cache = target.new_cache()
    one, two = cache.open(), cache.open()
    target.score([Feed.chain(one, [0, 1]), Feed.chain(two, [2])], cache)
    cache.keep(one, [0, 1])
    cache.keep(two, [0])
    draft = Draft.chosen([0, 1, 2], [-1, -1, 1])
    scored = target.score([Feed.chain(two, [1, 1], want=(1,)), Feed.tree(one, 2, draft)], cache)
    paths = [(2, 1, 1), (0, 1, 2), (0, 1, 2, 0), (0, 1, 2, 1), (0, 1, 2, 1, 2)]
    want_TV = torch.stack([target.law_after(path) for path in paths])
    assert scored.start_B == (0, 1, 5)
    assert scored.logits_TV.dtype is torch.float64
    assert torch.equal(scored.logits_TV, want_TV.log())
    assert torch.isinf(scored.logits_TV).any()
    cache.keep(one, [0, 2, 3])
    assert cache.ids(one) == [0, 1, 2, 1, 2]
    after_V = target.score([Feed.chain(one, [0])], cache).logits_TV[0]
    assert torch.equal(after_V, target.law_after([0, 1, 2, 1, 2, 0]).log())
    cache.check_integrity()


def test_random_tables_are_laws_of_the_last_tokens():
    for seed in range(20):
        target = TableTarget.random(seed, vocab_size=4, order=2, sharpness=3.0, zeros=0.9)
        law_V = target.law_after([seed % 4, 1, 2])
        assert float(law_V.sum()) == pytest.approx(1, abs=1e-12)
        assert torch.equal(law_V, target.law_after([3, 3, 1, 2]))
        assert target.digest == TableTarget.random(seed, 4, 2, sharpness=3.0, zeros=0.9).digest
    assert not torch.equal(law_V, target.law_after([3, 3, 2, 1]))
    flat = TableTarget.random(0, vocab_size=5, sharpness=0.0)
    assert torch.allclose(flat.law_after([1]), torch.full((5,), 0.2, dtype=torch.float64))


def test_a_mixture_is_as_far_as_its_share():
    target, other = TableTarget.random(0), TableTarget.random(1)
    draft = target.mixed(other, 0.25)
    for context in [(), (0,), (2, 1), (0, 0, 1)]:
        p_V, q_V = target.law_after(context), draft.law_after(context)
        apart = float((p_V - other.law_after(context)).abs().sum())
        assert float((p_V - q_V).abs().sum()) == pytest.approx(0.25 * apart, abs=1e-12)


def test_given_laws_fall_back_to_shorter_contexts():
    target = TableTarget.of({(): [0.5, 0.5], (0,): [0.0, 1.0], (1, 0): [1.0, 0.0]})
    for context, law in [((), 0.5), ((1,), 0.5), ((0, 0), 0.0), ((0, 1, 0), 1.0)]:
        assert float(target.law_after(context)[0]) == law
    with pytest.raises(ValueError, match="empty context"):
        TableTarget.of({(0,): [1.0, 0.0]})
    with pytest.raises(ValueError, match="no distribution after"):
        TableTarget.of({(): [0.5, 0.4]})
    with pytest.raises(ValueError, match="share in"):
        target.mixed(target, 1.5)


def test_a_table_refuses_what_it_lacks():
    target = TableTarget.random(0)
    cache = target.new_cache()
    slot = cache.open()
    with pytest.raises(ModelError, match="no taps"):
        target.score([Feed.chain(slot, [0])], cache, taps=frozenset({"hidden.0"}))
    riders = Riders((-1,), (-1,), (0,))
    with pytest.raises(ModelError, match="riders"):
        target.score([Feed(slot, (0,), (-1,), riders=riders)], cache)


def greedy(target, prompt, count):
    cache = target.new_cache()
    slot = cache.open()
    out = []
    fed = target.tokenizer.encode(prompt)
    for _ in range(count):
        logits_V = target.score([Feed.chain(slot, fed, want=(len(fed) - 1,))], cache).logits_TV[0]
        cache.keep(slot, range(len(fed)))
        fed = [int(logits_V.argmax())]
        out += fed
    return out, logits_V


def test_tiny_talks_and_repeats_itself():
    first, second = tiny(0), tiny(1)
    assert first.digest == tiny(0).digest != second.digest
    assert (first.name, second.name) == ("tiny", "tiny:1")
    assert first.defaults.eos_ids == (first.tokenizer.encode("<|end|>")[0],)
    text, logits_V = greedy(first, "the cat sat on the mat and the dog", 64)
    assert text != greedy(second, "the cat sat on the mat and the dog", 64)[0]
    assert text != greedy(first, "the dog sat on the mat and the cat", 64)[0]
    assert len(set(text)) > 20
    pairs = list(itertools.pairwise(text))
    assert len(set(pairs)) < len(pairs)
    assert float(logits_V.softmax(0).max()) > 5 / len(logits_V)


def test_tiny_tokenizer_gives_text_back():
    tokenizer = tiny().tokenizer
    text = "The other caf\u00e9 \U0001f389\n\ttheir theatre  0.5"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("theatre")) < len("theatre")
    chat = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(chat) == "[user]\nhi\n[assistant]\n"
    assert set(chat) >= {tokenizer.bos_id, *tokenizer.eos_ids}
