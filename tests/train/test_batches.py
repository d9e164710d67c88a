import numpy as np
import pytest
import torch

from outpace import RequestError
from outpace.train.batches import Batches, padded
from outpace.train.tokens import TokenSequence, TokenStore


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    coins = np.random.default_rng(0)
    sequences = []
    for number in range(300):
        length = int(coins.integers(4, 60))
        ids = coins.integers(1, 90, length).astype(np.int32)
        sequences.append(TokenSequence(number=2 * number, ids=ids, prompt=int(length // 3), temperature=0.0))
    store = TokenStore.create(
        tmp_path_factory.mktemp("store"), target="t", digest="d", vocab_size=90, about={}
    )
    store.append(sequences, {})
    return store


class Counting:
    """Features that say which token of which sequence they are of."""

    def padded(self, part, token_BT):
        found = [{tap: self.read(one.number, len(one.ids), tap) for tap in ("a", "b")} for one in part]
        return padded(found, ("a", "b"), token_BT.shape[1])

    def read(self, number, length, tap):
        base = number * 1000 + (500 if tap == "b" else 0)
        return torch.stack([torch.arange(length) % 128, torch.full((length,), base % 251)], 1).to(
            torch.bfloat16
        )


def contents(batches, epoch=0):
    rows = []
    for index in range(batches.count(epoch)):
        batch = batches.at(epoch, index)
        for i, length in enumerate(batch.length_B.tolist()):
            rows.append(tuple(batch.token_BT[i, :length].tolist()))
    return rows


def test_an_epoch_holds_every_sequence_of_its_split_once(store):
    train, held = Batches(store, 400), Batches(store, 400, split="held_out")
    want = [tuple(one.ids.tolist()) for one in store]
    assert sorted(contents(train) + contents(held)) == sorted(want)
    assert sorted(contents(train, 1)) == sorted(contents(train))
    assert contents(train, 1) != contents(train)
    assert contents(held, 1) == contents(held), "held-out batches never change"
    assert 0 < len(contents(held)) < 0.1 * len(store)


def test_a_split_without_sequences_asks_for_more_prompts(tmp_path):
    empty = TokenStore.create(tmp_path / "store", target="t", digest="d", vocab_size=90, about={})
    with pytest.raises(RequestError, match=r"no held-out prompt .* give more prompts"):
        Batches(empty, 400, split="held_out")


@pytest.mark.parametrize("settings", ({"max_length": 12}, {"tokens_per_batch": 12}))
def test_texts_that_are_cut_before_their_answers_are_left_out(store, settings):
    batches = Batches(store, **{"tokens_per_batch": 400, **settings})
    whole = {tuple(one.ids.tolist())[:12]: one.prompt for one in store}
    assert max(whole.values()) > 12
    read = contents(batches)
    assert all(bool(batch.answer_BT.any()) for batch in batches)
    assert {whole[ids] for ids in read} == {prompt for prompt in whole.values() if prompt < 12}
    with pytest.raises(RequestError, match="answer begins before token 1;"):
        Batches(store, 400, max_length=1)


def test_batches_keep_to_their_size_and_waste_little(store):
    batches = Batches(store, 400)
    padded = real = 0
    for batch in batches:
        assert batch.token_BT.numel() <= 400
        padded += batch.token_BT.numel()
        real += batch.tokens
    assert real / padded > 0.9
    assert real == batches.tokens


def test_a_batch_says_what_to_learn(store):
    for batch in Batches(store, 300):
        for i, length in enumerate(batch.length_B.tolist()):
            prompt = length // 3
            assert batch.answer_BT[i].tolist() == [
                prompt <= t < length for t in range(batch.answer_BT.shape[1])
            ]
            assert batch.token_BT[i, length:].sum() == 0
        assert batch.token_BT.dtype == batch.length_B.dtype == torch.int64
        assert batch.feature == {}


def test_features_stand_at_their_tokens(store):
    batches = Batches(store, 300, features=Counting(), taps=("a", "b"))
    numbers = {tuple(one.ids.tolist()): one.number for one in store}
    batch = batches.at(0, 3)
    for i, length in enumerate(batch.length_B.tolist()):
        number = numbers[tuple(batch.token_BT[i, :length].tolist())]
        for tap in ("a", "b"):
            assert batch.feature[tap].dtype == torch.bfloat16
            assert torch.equal(batch.feature[tap][i, :length], Counting().read(number, length, tap))
            assert not batch.feature[tap][i, length:].any()


def test_it_goes_on_where_it_was(store):
    batches = Batches(store, 400, seed=5)
    whole = []
    for epoch, index, batch in batches.since():
        whole.append((epoch, index, batch.token_BT))
        if epoch == 2:
            break
    epoch, index, _ = whole[len(whole) // 2]
    rest = Batches(store, 400, seed=5).since(epoch, index + 1)
    for (e, i, tokens), (e2, i2, batch) in zip(whole[len(whole) // 2 + 1 :], rest, strict=False):
        assert (e, i) == (e2, i2)
        assert torch.equal(tokens, batch.token_BT)
    assert contents(Batches(store, 400, seed=6)) != contents(batches)


def test_processes_share_an_epoch(store):
    whole = contents(Batches(store, 400))
    parts = [Batches(store, 400, rank=rank, world=3) for rank in range(3)]
    assert len({part.count(0) for part in parts}) == 1, "as many batches each"
    shared = [row for part in parts for row in contents(part)]
    assert len(set(shared)) == len(shared) and set(shared) <= set(whole)
    assert len(shared) > 0.8 * len(whole)


def test_steps_have_the_same_batches_however_many_processes_share_them(store):
    def steps(world, epoch):
        parts = [Batches(store, 400, rank=rank, world=world, per_step=6) for rank in range(world)]
        assert len({part.count(epoch) for part in parts}) == 1
        each = [
            [sorted(part.at(epoch, i).token_BT.flatten().tolist()) for i in range(part.count(epoch))]
            for part in parts
        ]
        size = 6 // world
        whole = range(parts[0].count(epoch) // size)
        return [sorted(one for own in each for one in own[size * s : size * (s + 1)]) for s in whole]

    assert steps(1, 1) == steps(2, 1) == steps(3, 1) == steps(6, 1) and len(steps(1, 1)) > 1
    with pytest.raises(RequestError, match="multiple of the 4 processes that share them, got 6"):
        Batches(store, 400, world=4, per_step=6)


def test_processes_share_all_that_is_held_out_and_no_more_than_is_wanted(store):
    whole = contents(Batches(store, 60, split="held_out"))
    parts = [contents(Batches(store, 60, split="held_out", rank=rank, world=2)) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(whole) and len(whole) > 2
    few = list(Batches(store, 60, split="held_out", most_tokens=50))
    assert sum(batch.tokens for batch in few) >= 50 > sum(batch.tokens for batch in few[:-1])


def test_long_sequences_lose_their_ends(store):
    batches = Batches(store, 400, max_length=10)
    assert max(int(batch.length_B.max()) for batch in batches) == 10
    for batch in batches:
        assert batch.answer_BT.shape == batch.token_BT.shape


def test_what_does_not_fit_is_refused(store, tmp_path):
    with pytest.raises(RequestError, match="tokens_per_batch must be at least 1"):
        Batches(store, 0)
    with pytest.raises(RequestError, match="rank must be in 0 to 1"):
        Batches(store, 10, rank=2, world=2)
    with pytest.raises(RequestError, match="nothing to compute them"):
        Batches(store, 10, taps=("a",))
    with pytest.raises(IndexError):
        Batches(store, 400).at(0, 10**6)
    empty = TokenStore.create(tmp_path, target="t", digest="d", vocab_size=90, about={})
    with pytest.raises(RequestError, match="no training prompt whose answer"):
        Batches(empty, 10)
