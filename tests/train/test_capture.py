import json

import numpy as np
import pytest
import torch

from outpace import ModelError, OutpaceError, RequestError
from outpace.models.tiny import TableTarget, tiny
from outpace.train import capture as module
from outpace.train.capture import FeatureStore, capture, folder_for, size_text
from outpace.train.tokens import TokenSequence, TokenStore
from outpace.types import Feed

TAPS = ("hidden.1", "hidden.-1")


@pytest.fixture(scope="module")
def target():
    return tiny()


def fill(folder, target, lengths=(5, 30, 12, 41, 7), first=0):
    store = TokenStore.create(
        folder, target=target.name, digest=target.digest, vocab_size=target.vocab_size, about={}
    )
    coins = np.random.default_rng(first)
    store.append(
        [
            TokenSequence(
                number=3 * (first + i),
                prompt=2,
                temperature=0.0,
                ids=coins.integers(3, 90, n).astype(np.int32),
            )
            for i, n in enumerate(lengths)
        ],
        {},
    )
    return store


def alone(target, ids, tap):
    """The oracle: one sequence, one pass."""
    cache = target.new_cache()
    scored = target.score([Feed.chain(cache.open(), ids.tolist())], cache, taps=frozenset({tap}))
    return scored.taps[tap].to(torch.bfloat16), scored.logits_TV


@pytest.mark.parametrize("rows", [1024, 32, 8])
def test_features_are_those_of_the_sequence_alone(target, tmp_path, rows):
    """Also where a sequence is longer than a pass."""
    store = fill(tmp_path, target)
    features = capture(target, store, TAPS, rows=rows, shard_bytes=6000, say=print)
    assert (len(features._manifest["shards"]) > 1) == (rows < 1024)
    for opened in (features, FeatureStore.open(features.folder)):
        for one in store:
            for tap in TAPS:
                got = opened.read(one.number, len(one.ids), tap)
                want, logits = alone(target, one.ids, tap)
                assert got.dtype == torch.bfloat16 and torch.equal(got, want)
                assert torch.equal(opened.read(one.number, 3, tap), want[:3])
            # Row t of the last state gives the law of token t + 1.
            assert torch.equal(target.head(got.float()).argmax(-1), logits.argmax(-1))


def test_it_goes_on_where_it_was(target, tmp_path, monkeypatch):
    store = fill(tmp_path, target)
    passes = []
    score = target.score
    monkeypatch.setattr(target, "score", lambda *a, **k: (passes.append(a), score(*a, **k))[1])
    folder = capture(target, store, TAPS, rows=32, shard_bytes=6000).folder
    before = len(passes)
    shards = json.loads((folder / "manifest.json").read_text())
    last = shards["shards"].pop()
    (folder / "manifest.json").write_text(json.dumps(shards))  # as if killed before the last one
    features = capture(target, store, TAPS, rows=32, shard_bytes=6000)
    assert len(features) == len(store) and 0 < len(passes) - before < before
    assert {n for n, *_ in last["sequences"]} == {
        n for n, *_ in features._manifest["shards"][-1]["sequences"]
    }
    passes.clear()
    capture(target, store, TAPS)
    assert not passes, "nothing is captured twice"
    more = fill(tmp_path, target, (9, 9), first=50)
    assert len(capture(target, more, TAPS)) == 7


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(target, tmp_path, monkeypatch):
    store = fill(tmp_path, target)
    usage = type("Usage", (), {"free": 20_000})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RequestError, match=r"needs 24.3 kB of disk and 20.0 kB are free"):
        capture(target, store, TAPS)
    assert not (tmp_path / "features").exists()


def test_damage_is_named(target, tmp_path):
    store = fill(tmp_path, target)
    folder = capture(target, store, TAPS).folder
    shard = folder / "features-00000.safetensors"
    whole = shard.read_bytes()

    def read(path=folder):
        return FeatureStore.open(path).read(0, 2, "hidden.1")

    assert read().shape == (2, 64)
    shard.write_bytes(whole[:-10])
    with pytest.raises(OutpaceError, match=r"features-00000.safetensors is corrupt: it has"):
        read()
    damaged = bytearray(whole)
    damaged[-40] ^= 1  # within the tap that comes last
    shard.write_bytes(damaged)
    with pytest.raises(OutpaceError, match="its checksum"):
        for one in store:
            for tap in TAPS:
                FeatureStore.open(folder).read(one.number, 2, tap)
    shard.write_bytes(b"\xff" * len(whole))
    with pytest.raises(OutpaceError, match="corrupt"):
        read()
    shard.unlink()
    with pytest.raises(OutpaceError, match="it is missing"):
        read()
    (folder / "manifest.json").write_text("[")
    with pytest.raises(OutpaceError, match=r"manifest.json is corrupt"):
        read()
    (folder / "manifest.json").write_text('{"version": 9}')
    with pytest.raises(OutpaceError, match="version 9"):
        read()
    with pytest.raises(RequestError, match="holds no features"):
        read(tmp_path / "nothing")


def test_what_is_not_there_cannot_be_read(target, tmp_path):
    features = capture(target, fill(tmp_path, target), TAPS)
    for number, length, tap in ((1, 2, "hidden.1"), (0, 6, "hidden.1"), (0, 2, "hidden.2")):
        with pytest.raises(RequestError, match="has no"):
            features.read(number, length, tap)
    assert 3 in features and 4 not in features


def test_another_target_is_refused(target, tmp_path):
    store = fill(tmp_path, target)
    other = tiny(seed=1)
    with pytest.raises(ModelError, match="holds answers of tiny"):
        capture(other, store, TAPS)
    features = capture(target, store, TAPS)
    with pytest.raises(ModelError, match=r"holds features of tiny .*not of tiny:1"):
        features.check(other)
    with pytest.raises(ModelError, match=r"no tap 'hidden.7'"):
        capture(target, store, ("hidden.7",))
    table = TableTarget.random(0, vocab_size=100)
    table_store = fill(tmp_path / "t", table, (4,))
    with pytest.raises(ModelError, match="capturing features needs taps"):
        capture(table, table_store, TAPS)


def test_features_that_are_not_finite_are_refused(target, tmp_path, monkeypatch):
    store = fill(tmp_path, target)
    score = target.score

    def broken(*given, **more):
        scored = score(*given, **more)
        scored.taps["hidden.1"][3, 0] = torch.nan
        return scored

    monkeypatch.setattr(target, "score", broken)
    with pytest.raises(ModelError, match=r"hidden.1 that are not finite for sequence 0"):
        capture(target, store, TAPS)


def test_features_that_another_method_wanted_are_used(target, tmp_path):
    store = fill(tmp_path, target)
    wide = capture(target, store, ("hidden.0", *TAPS))
    narrow = capture(target, store, ("hidden.1",))
    assert narrow.folder == wide.folder and narrow.taps == tuple(sorted(("hidden.0", *TAPS)))
    more = fill(tmp_path, target, (8,), first=60)
    both = capture(target, more, ("hidden.-1",))
    assert len(both) == 6 and both.read(180, 8, "hidden.0").shape == (8, 64)
    assert capture(target, store, ("hidden.2",)).folder != wide.folder


def test_sizes_in_words():
    assert [size_text(n) for n in (999, 1500, 2.5e6, 14.2e9)] == ["999 bytes", "1.5 kB", "2.5 MB", "14.2 GB"]
    assert folder_for(module.Path("a"), ("b", "a")).as_posix() == "a/features/a+b"
