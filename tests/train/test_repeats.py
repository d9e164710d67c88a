import numpy as np
import pytest

from outpace.train.batches import Batches
from outpace.train.repeats import near_duplicates
from outpace.train.tokens import TokenSequence, TokenStore


@pytest.fixture
def fill(tmp_path):
    def make(answers, prompts=None):
        store = TokenStore.create(tmp_path / "s", target="t", digest="d", vocab_size=90, about={})
        coins = np.random.default_rng(1)
        store.append(
            [
                TokenSequence(
                    number=i,
                    ids=np.concatenate([coins.integers(1, 90, 9) if prompts is None else prompts[i], answer]),
                    prompt=9,
                    temperature=0.0,
                )
                for i, answer in enumerate(answers)
            ],
            {},
        )
        return store

    return make


def answers(count, length=200):
    return np.random.default_rng(0).integers(1, 90, (count, length)).astype(np.int32)


def test_an_answer_that_mostly_repeats_an_earlier_one_is_found(fill):
    rows = answers(40)
    most, least, moved = rows[0].copy(), rows[1].copy(), np.roll(rows[2], 50)
    most[:50] = rows[5][:50]  # three quarters are as in row 0
    least[:150] = rows[6][:150][::-1]
    rows[20], rows[21], rows[22], rows[23] = most, least, moved, rows[3]
    store = fill(rows)
    found = set(np.flatnonzero(near_duplicates(store)).tolist())
    held = set(np.flatnonzero(store.held_out_S).tolist())
    twins = {20: 0, 22: 2, 23: 3}
    want = {copy if first in held or copy not in held else first for copy, first in twins.items()}
    assert found == want - held and 21 not in found


def test_what_is_held_out_is_not_learned_from(fill):
    """Also where the held-out answer came later."""
    rows = answers(200)
    store = fill(rows)
    held = int(np.flatnonzero(store.held_out_S)[-1])
    assert held > 0
    rows[0] = rows[held]
    prompts = [store[i].ids[:9] for i in range(200)]
    store = TokenStore.create(store.folder.parent / "t", target="t", digest="d", vocab_size=90, about={})
    store.append(
        [
            TokenSequence(number=i, ids=np.concatenate([prompts[i], rows[i]]), prompt=9, temperature=0.0)
            for i in range(200)
        ],
        {},
    )
    assert np.flatnonzero(near_duplicates(store)).tolist() == [0]
    learned = Batches(store, 1000)
    assert learned.tokens == 209 * (200 - int(store.held_out_S.sum()) - 1)


def test_short_answers_and_no_answers_are_no_duplicates(fill):
    assert not near_duplicates(fill(np.ones((5, 14), np.int32))).any()


def test_an_empty_store_has_none(fill):
    assert near_duplicates(fill(answers(1))).tolist() == [False]
