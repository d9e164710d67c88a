import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outpace import ModelError, OutpaceError
from outpace.models.tiny import TableTarget, tiny
from outpace.train import features as module
from outpace.train.capture import compute
from outpace.train.features import FeatureStore, folder_for, size_text
from outpace.train.tokens import TokenSequence, TokenStore
from outpace.types import Feed

TAPS = ("hidden.-1", "hidden.1")
ROOM = 1 << 40


@pytest.fixture(scope="module")
def target():
    return tiny()


def sequences(lengths=(5, 30, 12, 41, 7), first=0):
    coins = np.random.default_rng(first)
    return [
        TokenSequence(
            number=3 * (first + i), prompt=2, temperature=0.0, ids=coins.integers(3, 90, n).astype(np.int32)
        )
        for i, n in enumerate(lengths)
    ]


def answers(prompt=70, lengths=(20, 0, 12), first=0):
    """Answers to one prompt after another; the second one ends with its prompt, but for a token."""
    coins = np.random.default_rng(first)
    out = []
    for _ in range(2):
        begin = coins.integers(3, 90, prompt)
        for n in lengths:
            ids = np.concatenate([begin, coins.integers(3, 90, n)]).astype(np.int32)
            out.append(TokenSequence(number=first + len(out), prompt=prompt, temperature=0.0, ids=ids))
    return out


def kept(target, folder, taps=TAPS, part=None):
    """A store that has the features of some sequences on disk."""
    store = FeatureStore(target, folder, taps, ROOM)
    store.of(sequences() if part is None else part)
    store.flush()
    return store


def alone(target, ids, tap):
    """The oracle: one sequence, one pass."""
    cache = target.new_cache()
    scored = target.score([Feed.chain(cache.open(), ids.tolist())], cache, taps=frozenset({tap}))
    return scored.taps[tap].to(torch.bfloat16), scored.logits_TV


def no_pass(target, monkeypatch):
    monkeypatch.setattr(target, "score", lambda *a, **k: pytest.fail("a pass was run"))


@pytest.mark.parametrize("rows", [1024, 32, 8])
def test_features_are_those_of_the_sequence_alone(target, rows):
    """Also where a sequence is longer than a pass."""
    part = sequences()
    for one, found in zip(part, compute(target, [one.ids for one in part], TAPS, rows), strict=True):
        for tap in TAPS:
            want, logits = alone(target, one.ids, tap)
            assert found[tap].dtype == torch.bfloat16 and torch.equal(found[tap], want)
        # Row t of the last state gives the distribution of token t + 1.
        assert torch.equal(target.head(found["hidden.-1"].float()).argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("rows", [1024, 32])
def test_prompts_are_read_and_kept_once(target, tmp_path, monkeypatch, rows):
    part, read = answers(), []
    want = [{tap: alone(target, one.ids, tap)[0] for tap in TAPS} for one in part]
    usual = target.score
    monkeypatch.setattr(target, "score", lambda feeds, *a, **k: read.append(feeds) or usual(feeds, *a, **k))
    for found, wanted in zip(compute(target, [one.ids for one in part], TAPS, rows), want, strict=True):
        assert all(torch.equal(found[tap], wanted[tap]) for tap in TAPS)
    # Two prompts with their first answers; of the others a token of the prompt and what differs.
    fed = sum(len(feed.token_J) for feeds in read for feed in feeds)
    assert fed == 2 * (90 + 1 + 12)
    read.clear()
    many = [np.append(part[0].ids[:70], n % 90) for n in range(150)]  # which all begin alike
    for ids, found in zip(many, compute(target, many, TAPS, 100), strict=True):
        assert all(torch.equal(found[tap], alone(target, ids, tap)[0]) for tap in TAPS)
    assert max(sum(len(feed.token_J) for feed in feeds) for feeds in read) == 100
    store = kept(target, tmp_path, part=part)
    assert store.nbytes < 2 * (90 + 1 + 12) * 2 * 2 * target.hidden_size + 500
    no_pass(target, monkeypatch)
    again = FeatureStore(target, tmp_path, TAPS, ROOM)
    for length in (1000, 75, 70, 3):
        for found, wanted in zip(again.of([one.beginning(length) for one in part]), want, strict=True):
            assert all(torch.equal(found[tap], wanted[tap][:length]) for tap in TAPS)


def test_all_texts_are_computed_as_far_as_there_is_room(target, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_BYTES", 1 << 14)
    monkeypatch.setattr(module, "_FEW", 3)
    part, said = [*answers(), *answers(first=10)], []
    store = FeatureStore(target, tmp_path, TAPS, ROOM)
    store.fill(part, said.append)
    store.flush()
    assert str(said[-1]).startswith("features: 12/12 texts (100.0 %)")
    no_pass(target, monkeypatch)
    store.fill(part, said.append)
    assert len(said) == 1 and len(store) == len(part), "nothing is missing any more"
    monkeypatch.undo()
    monkeypatch.setattr(module, "SHARD_BYTES", 1 << 14)
    monkeypatch.setattr(module, "_FEW", 3)
    small = FeatureStore(target, tmp_path / "small", TAPS, 3 << 14)
    small.fill(part, said.append)
    assert len(said) == 1 and 0 < len(small) < len(part)


def test_stopped_halfway_it_keeps_what_was_computed(target, tmp_path, monkeypatch):
    texts = sequences(lengths=[9] * 100)
    store = FeatureStore(target, tmp_path, TAPS, ROOM)
    real, left = store.ensure, [None, KeyboardInterrupt]

    def ensure(part):
        if (stop := left.pop(0)) is not None:
            raise stop
        real(part)

    monkeypatch.setattr(store, "ensure", ensure)
    with pytest.raises(KeyboardInterrupt):
        store.fill(texts, print)
    assert sum(map(FeatureStore(target, tmp_path, TAPS, ROOM)._has, texts)) == module._FEW


def test_what_is_on_disk_is_not_computed_again(target, tmp_path, monkeypatch):
    part = sequences()
    want = FeatureStore(target, tmp_path, TAPS, 0).of(part)
    assert not (tmp_path / "features").exists(), "without room nothing is kept"
    store = kept(target, tmp_path)
    more = sequences((9, 9), first=50)
    store.of(more)
    no_pass(target, monkeypatch)
    shorter = [one.beginning(3) for one in (*part, *more)]
    for opened in (store, FeatureStore(target, tmp_path, TAPS, ROOM)):
        assert len(opened) == 5
        for one, found, wanted in zip(part, opened.of(part), want, strict=True):
            assert all(torch.equal(found[tap], wanted[tap]) for tap in TAPS), one.number
        for found, wanted in zip(opened.of(shorter[:5]), want, strict=True):
            assert all(torch.equal(found[tap], wanted[tap][:3]) for tap in TAPS)
    assert [len(found["hidden.1"]) for found in store.of(shorter)] == [3] * 7, "two wait for their shard"


def test_a_longer_part_of_a_sequence_is_computed(target, tmp_path):
    part = sequences()
    store = kept(target, tmp_path, part=[one.beginning(4) for one in part])
    for found, wanted in zip(store.of(part), FeatureStore(target, tmp_path, TAPS, 0).of(part), strict=True):
        assert all(torch.equal(found[tap], wanted[tap]) for tap in TAPS)
    store.flush()
    assert len(store) == 5


@pytest.mark.parametrize("full", ["room", "disk"])
def test_features_without_room_are_computed_again(target, tmp_path, monkeypatch, full):
    monkeypatch.setattr(module, "SHARD_BYTES", 6000)
    if full == "disk":
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 20_000}))
    store = FeatureStore(target, tmp_path, TAPS, 20_000)
    part = [one for first in range(0, 50, 10) for one in sequences(first=first)]
    want = FeatureStore(target, tmp_path, TAPS, 0).of(part)
    for one in part:
        store.of([one])
    store.flush()
    assert store.nbytes <= 20_000 and (len(store) == 0) == (full == "disk")
    for found, wanted in zip(store.of(part), want, strict=True):
        assert all(torch.equal(found[tap], wanted[tap]) for tap in TAPS)


def test_a_killed_process_loses_the_last_shard(target, tmp_path):
    store = kept(target, tmp_path)
    store.of(sequences((9, 9), first=50))
    store.flush()
    path = store.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"].pop()
    path.write_text(json.dumps(manifest))  # as if killed before the manifest was written
    again = FeatureStore(target, tmp_path, TAPS, ROOM)
    assert len(again) == 5
    again.of(sequences((9, 9), first=50))
    again.flush()
    assert len(again) == 7


def test_features_of_answers_that_are_gone_are_not_those_of_others(target, tmp_path):
    """Other answers, in a folder whose manifest of tokens was removed, have the same numbers."""
    own = {"target": target.name, "digest": target.digest, "vocab_size": target.vocab_size, "about": {}}
    TokenStore.create(tmp_path, **own).append(sequences((9, 9)), {})
    kept(target, tmp_path, part=sequences((9, 9)))
    TokenStore.create(tmp_path, **own)
    assert len(FeatureStore(target, tmp_path, TAPS, ROOM)) == 2
    (tmp_path / "manifest.json").unlink()
    TokenStore.create(tmp_path, **own)
    assert len(FeatureStore(target, tmp_path, TAPS, ROOM)) == 0


def test_damage_is_named(target, tmp_path):
    shard = kept(target, tmp_path).folder / "features-00000.safetensors"
    whole = shard.read_bytes()

    def read():
        return FeatureStore(target, tmp_path, TAPS, ROOM).of(sequences())

    assert read()[0]["hidden.1"].shape == (5, 64)
    shard.write_bytes(whole[:-10])
    with pytest.raises(OutpaceError, match=r"features-00000.safetensors is corrupt: it has"):
        read()
    damaged = bytearray(whole)
    damaged[-40] ^= 1  # within the tap that comes last
    shard.write_bytes(damaged)
    with pytest.raises(OutpaceError, match="its checksum"):
        read()
    shard.write_bytes(b"\xff" * len(whole))
    with pytest.raises(OutpaceError, match="corrupt"):
        read()
    shard.unlink()
    with pytest.raises(OutpaceError, match="it is missing"):
        read()
    told = json.loads((shard.parent / "manifest.json").read_text())
    told["shards"][0]["sequences"][1][3:5] = [12, 4]  # which comes after it
    follows = json.dumps(told), r"sequence 3 follows 12\)"
    for manifest, reason in (("[", "manifest.json is corrupt"), ('{"version": 9}', "version 9"), follows):
        (shard.parent / "manifest.json").write_text(manifest)
        with pytest.raises(OutpaceError, match=reason):
            read()


def test_another_target_is_refused(target, tmp_path):
    kept(target, tmp_path)
    with pytest.raises(ModelError, match=r"holds features of tiny .*not of tiny:1"):
        FeatureStore(tiny(seed=1), tmp_path, TAPS, ROOM)
    with pytest.raises(ModelError, match=r"no tap 'hidden.7'"):
        FeatureStore(target, tmp_path, ("hidden.7",), ROOM).of(sequences())
    with pytest.raises(ModelError, match="training on features needs taps"):
        FeatureStore(TableTarget.random(0, vocab_size=100), tmp_path / "t", TAPS, ROOM)


def test_features_that_are_not_finite_are_refused(target, monkeypatch):
    score = target.score

    def broken(*given, **more):
        scored = score(*given, **more)
        scored.taps["hidden.1"][3, 0] = torch.nan
        return scored

    monkeypatch.setattr(target, "score", broken)
    with pytest.raises(ModelError, match=r"hidden.1 that are not finite for text 0"):
        list(compute(target, [sequences()[0].ids], TAPS))


def test_features_that_another_method_kept_are_used(target, tmp_path, monkeypatch):
    wide = kept(target, tmp_path, ("hidden.0", *TAPS))
    narrow = FeatureStore(target, tmp_path, ("hidden.1",), ROOM)
    assert narrow.folder == wide.folder and narrow.taps == wide.taps
    assert FeatureStore(target, tmp_path, ("hidden.2",), ROOM).folder != wide.folder
    no_pass(target, monkeypatch)
    assert narrow.of([replace(sequences()[0])])[0]["hidden.1"].shape == (5, 64)


def test_sizes_and_folders_in_words(tmp_path):
    assert [size_text(n) for n in (999, 1500, 2.5e6, 14.2e9)] == ["999 bytes", "1.5 kB", "2.5 MB", "14.2 GB"]
    assert folder_for(Path("a"), ("b", "a")).as_posix() == "a/features/a+b"
    layers = [*range(9), 12, 13, *range(40, 90)]
    long = folder_for(tmp_path, ["hidden.-1", *(f"kv.{i}" for i in layers)])
    assert long.name == "hidden.-1+kv.0-8+kv.12-13+kv.40-89", "names of files are short"
    long.mkdir(parents=True)
    (long / "manifest.json").touch()
    assert folder_for(tmp_path, ["kv.8", "hidden.-1", "kv.41"]) == long
    assert folder_for(tmp_path, ["kv.9"]) != long
