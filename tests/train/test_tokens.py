import json
import os

import numpy as np
import pytest

from outpace import ModelError, OutpaceError, RequestError
from outpace.train import tokens
from outpace.train.tokens import HELD_OUT_SHARE, TokenSequence, TokenStore, held_out

TARGET = {"target": "tiny", "digest": "abc", "vocab_size": 100}


def sequence(number, prompt=3, answer=5, temperature=0.0):
    ids = np.arange(prompt + answer, dtype=np.int32) + number % 50
    return TokenSequence(number=number, ids=ids, prompt=prompt, temperature=temperature)


def make(folder, numbers=(4, 0, 2), more=(1, 7)):
    store = TokenStore.create(folder, **TARGET, about={"command": "test"})
    store.append([sequence(n) for n in numbers], {"cut": 2})
    if more:
        store.append([sequence(n, answer=n + 1, temperature=0.9) for n in more], {"cut": 1})
    return store


def test_what_goes_in_comes_out_in_the_order_of_numbers(tmp_path):
    for store in (make(tmp_path / "s"), TokenStore.open(tmp_path / "s")):
        assert [one.number for one in store] == [0, 1, 2, 4, 7]
        assert store[1].ids.tolist() == [1, 2, 3, 4, 5] and store[1].prompt == 3
        assert store[1].temperature == pytest.approx(0.9) and store[0].temperature == 0
        assert store.length_S.tolist() == [8, 5, 8, 8, 11]
        assert store.answer_tokens == 5 * 3 + 2 + 8
        counts = store.manifest["counts"]
        assert counts == {"sequences": 5, "tokens": 40, "answer_tokens": 25, "cut": 3}
        assert store.manifest["about"] == {"command": "test"}


def test_the_same_contents_have_the_same_digest(tmp_path):
    assert make(tmp_path / "a").digest == make(tmp_path / "b").digest
    assert make(tmp_path / "c", more=()).digest != make(tmp_path / "d", numbers=(3,)).digest


def test_a_shard_that_the_manifest_does_not_name_does_not_count(tmp_path):
    """As after kill -9 between the shard and the manifest."""
    make(tmp_path, more=())
    manifest = (tmp_path / "manifest.json").read_bytes()
    TokenStore.open(tmp_path).append([sequence(9)], {})
    (tmp_path / "manifest.json").write_bytes(manifest)
    store = TokenStore.open(tmp_path)
    assert len(store) == 3
    store.append([sequence(5)], {})
    assert [one.number for one in TokenStore.open(tmp_path)] == [0, 2, 4, 5]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    store = make(tmp_path, more=())

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.append([sequence(9)], {})
    monkeypatch.undo()
    assert len(TokenStore.open(tmp_path)) == 3
    assert not list(tmp_path.glob(".*.part"))


def test_damage_is_named(tmp_path):
    make(tmp_path)
    shard = tmp_path / "tokens-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(OutpaceError, match=r"tokens-00001.safetensors is corrupt: its digest"):
        TokenStore.open(tmp_path)
    shard.write_bytes(whole[:-1] + b"\x07")
    with pytest.raises(OutpaceError, match="corrupt"):
        TokenStore.open(tmp_path)
    shard.unlink()
    with pytest.raises(OutpaceError, match="it is missing"):
        TokenStore.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(OutpaceError, match=r"manifest.json is corrupt"):
        TokenStore.open(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 0}))
    with pytest.raises(OutpaceError, match="version 0"):
        TokenStore.open(tmp_path)
    with pytest.raises(RequestError, match="holds no manifest"):
        TokenStore.open(tmp_path / "nothing")


def test_a_manifest_that_was_changed_is_named(tmp_path):
    make(tmp_path)
    path = tmp_path / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content))
    assert len(TokenStore.open(tmp_path)) == 5, "its form does not matter"
    content["counts"]["tokens"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(OutpaceError, match=r"manifest.json is corrupt \(its sha256"):
        TokenStore.open(tmp_path)
    content["counts"]["tokens"] -= 1
    del content["sha256"]
    path.write_text(json.dumps(content))
    assert len(TokenStore.open(tmp_path)) == 5, "as earlier releases wrote it"


def test_another_target_is_refused_by_name(tmp_path):
    make(tmp_path)
    with pytest.raises(ModelError, match="answers of tiny"):
        TokenStore.create(tmp_path, target="big", digest="xyz", vocab_size=9, about={})
    assert len(TokenStore.create(tmp_path, **TARGET, about={})) == 5


def test_a_sequence_twice_is_an_error(tmp_path):
    store = make(tmp_path, more=())
    for numbers in ([4], [8, 8]):
        with pytest.raises(OutpaceError, match="twice"):
            store.append([sequence(n) for n in numbers], {})
    assert len(TokenStore.open(tmp_path)) == 3


def test_the_split_hangs_on_the_prompt_alone(tmp_path):
    share = np.mean([held_out([i, i + 1]) for i in range(4000)])
    # 4000 prompts: standard deviation 0.0027, so a right rule fails once in 10^9.
    assert abs(share - HELD_OUT_SHARE) < 6 * 0.0027
    kept = next(i for i in range(400) if held_out([i, i + 1]))
    store = TokenStore.create(tmp_path, **TARGET, about={})
    store.append(
        [
            TokenSequence(number=n, ids=np.array([kept, kept + 1, n], np.int32), prompt=2, temperature=0.0)
            for n in range(3)
        ]
        + [
            TokenSequence(
                number=3, ids=np.array([kept, kept + 1, 5], np.int32), prompt=0, temperature=tokens.GIVEN
            )
        ],
        {},
    )
    assert store.held_out_S.tolist()[:3] == [True] * 3
    assert store.held_out_S.tolist()[3] == held_out([kept, kept + 1, 5])
