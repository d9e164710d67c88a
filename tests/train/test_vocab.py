import numpy as np
import pytest
import torch

from outpace import RequestError
from outpace.models.tiny import TableTarget, tiny
from outpace.train.tokens import TokenSequence, TokenStore, held_out
from outpace.train.vocab import always_kept, count_tokens, coverage, reduced_vocab, size_for


def test_the_most_frequent_tokens_are_kept_in_order_of_their_ids():
    counts = np.array([0, 5, 1, 9, 1, 0, 7])
    vocab = reduced_vocab(counts, 4, [5])
    assert vocab.to_target_D.tolist() == [1, 3, 5, 6]
    assert vocab.feed_V.tolist() == [-1, 0, -1, 1, -1, 2, 3]
    assert reduced_vocab(counts, 4).to_target_D.tolist() == [1, 2, 3, 6], "2 ties with 4: 2 wins"
    whole = reduced_vocab(counts, 99)
    assert torch.equal(whole.to_target_D, torch.arange(7))
    assert torch.equal(whole.feed_V, torch.arange(7))


def test_coverage_is_the_share_of_what_was_said():
    counts = np.array([0, 5, 1, 9, 1, 0, 4])
    assert coverage(counts, reduced_vocab(counts, 2)) == 14 / 20
    assert coverage(np.zeros(7, np.int64), reduced_vocab(counts, 2)) == 1.0


def test_a_vocabulary_grows_until_it_covers_enough():
    counts, held = np.arange(100)[::-1].copy(), np.ones(100, np.int64)
    assert size_for(counts, held, 40, 0.3) == 40, "what is there already is not cut"
    assert size_for(counts, held, 40, 0.62) == 65, "40 and five eighths of 40"
    assert size_for(counts, held, 40, 1.0) == size_for(counts, held, 3, 1.0) == 100


def test_no_room_is_an_error():
    with pytest.raises(RequestError, match="a draft vocabulary of 2 has no room beside the 2"):
        reduced_vocab(np.zeros(7, np.int64), 2, [1, 2])


def test_ends_and_chat_marks_are_always_kept():
    target = tiny()
    kept = always_kept(target)
    assert target.tokenizer.eos_ids <= kept and target.tokenizer.bos_id in kept
    assert kept <= target.tokenizer.special_ids
    assert always_kept(TableTarget.random(0, eos_ids=[1])) == {1}


def test_answers_are_counted_by_split_and_prompts_are_not(tmp_path):
    inside = next(i for i in range(900) if held_out([i, i]))
    store = TokenStore.create(tmp_path, target="t", digest="d", vocab_size=9, about={})
    store.append(
        [
            TokenSequence(number=n, ids=np.array([p, p, *answer], np.int32), prompt=2, temperature=0.0)
            for n, (p, answer) in enumerate([(inside, [1, 2]), (inside + 1, [3, 3, 4]), (inside + 1, [4])])
        ],
        {},
    )
    assert not held_out([inside + 1] * 2)
    assert count_tokens(store, 9).tolist() == [0, 0, 0, 2, 2, 0, 0, 0, 0]
    assert count_tokens(store, 9, held_out=True).tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0]
