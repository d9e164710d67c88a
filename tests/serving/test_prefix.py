"""Pages that are copied into slots, and caches that change their size."""

import mmap

import pytest
import torch

from outpace import Engine
from outpace.cache.base import PAGE
from outpace.cache.dense import DenseCache
from outpace.models.hf.gather import GatherCache
from outpace.models.prefix import PrefixStore
from outpace.models.tiny import TableCache
from outpace.serving.service import Service
from tests.conformance.targets import of_transformers
from tests.serving.test_service import ask


def put(cache, ids, mark=0):
    """A slot that holds a text; every key tells its token, every value its negative."""
    slot = cache.open()
    rows = cache.append(slot, ids, range(-1, len(ids) - 1))
    told = torch.tensor([float(token + mark) for token in ids])
    if isinstance(cache, DenseCache):
        keys, values = cache.by_row
        keys[:, slot, rows.start : rows.stop] = told[:, None, None]
        values[:, slot, rows.start : rows.stop] = -told[:, None, None]
    if isinstance(cache, GatherCache):
        key = told[None, None, :, None].expand(1, 2, len(ids), 4)
        for layer in range(3):
            cache.write(layer, key, -key, cache.spot([slot], [rows]))
    cache.keep(slot, range(len(ids)))
    return slot


def told(cache, slot):
    """What the keys of a slot tell, and the values must tell likewise."""
    length = cache.length(slot)
    if isinstance(cache, DenseCache):
        pairs = [[part[:, slot, :length, 0, 0] for part in cache.by_row]]
    else:
        pairs = [[part[slot, :, :length, 0] for part in pair] for pair in cache._stores]
    for keys, values in pairs:
        assert torch.equal(keys, -values) and torch.equal(keys, keys[:1].expand_as(keys))
    return [int(value) for value in pairs[0][0][0]]


def text(length, start=0):
    return list(range(start, start + length))


def dense():
    return DenseCache(3, heads=2, width=4)


def gather():
    return GatherCache(3, torch.device("cpu"))


@pytest.mark.parametrize("make", [dense, gather])
def test_a_slot_is_filled_with_what_was_stored(make):
    cache = make()
    store = PrefixStore(cache, 10)
    store.save(put(cache, text(3 * PAGE + 5)), "k")
    assert len(store) == 3, "whole pages only"
    for length, held in [(2 * PAGE - 1, 1), (2 * PAGE, 2), (500, 3)]:
        slot = cache.open()
        assert store.known("k", text(length)) == held * PAGE
        assert store.load(slot, "k", text(length)) == held * PAGE == cache.length(slot)
        assert told(cache, slot) == cache.ids(slot) == text(held * PAGE)
    other = cache.open()
    changed = [*text(PAGE), 7, *text(2 * PAGE)]
    assert store.load(other, "k", changed) == PAGE, "the same ids elsewhere are another page"
    assert store.known("another", text(500)) == 0
    assert store.known("k", text(500, start=1)) == 0
    store.check_integrity()
    cache.check_integrity()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_of_transformers_goes_on_from_stored_pages(family):
    """Passes run in inference mode, and pages are pasted between them."""
    engine = Engine(of_transformers(family), "none")
    settings = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}
    with Service(engine, drafters=("none",)) as service:
        for held in (0, PAGE):
            result = ask(service, text(PAGE + 9), **settings).result
            assert result.cached_tokens == held
            assert result.tokens == Engine(engine.target, "none").generate(text(PAGE + 9), **settings).tokens


def test_whoever_writes_writes_to_a_copy():
    cache = dense()
    store = PrefixStore(cache, 10)
    first = put(cache, text(PAGE))
    store.save(first, "")
    cache.by_row[0][:, first] = 999
    slot = cache.open()
    store.load(slot, "", text(PAGE))
    cache.by_row[0][:, slot, 3] = 999
    again = cache.open()
    store.load(again, "", text(PAGE))
    assert told(cache, again) == text(PAGE)


def test_the_least_lately_used_page_goes_first_and_children_before_parents():
    cache = TableCache()
    store = PrefixStore(cache, 4)
    store.save(put(cache, text(3 * PAGE)), "a")
    store.save(put(cache, text(PAGE, 900)), "a")
    assert store.known("a", text(3 * PAGE)) == 3 * PAGE
    store.save(put(cache, text(PAGE, 5000)), "a")
    assert store.known("a", text(PAGE, 900)) == 0, "nobody asked for it"
    assert store.known("a", text(3 * PAGE)) == 3 * PAGE
    store.check_integrity()
    store.shrink(2)
    store.check_integrity()
    assert store.known("a", text(3 * PAGE)) == 2 * PAGE, "its end goes first"
    store.save(put(cache, text(9 * PAGE, 20_000)), "a")
    assert store.known("a", text(9 * PAGE, 20_000)) == 4 * PAGE, "a long text keeps its beginning"
    store.check_integrity()


def test_a_store_without_room_stores_nothing():
    cache = dense()
    store = PrefixStore(cache, 0)
    store.save(put(cache, text(PAGE)), "")
    assert len(store) == 0


@pytest.mark.parametrize("make", [dense, gather])
def test_a_cache_shrinks_and_grows_around_what_it_holds(make):
    cache = make()
    slots = [put(cache, text(20 + i), mark=100 * i) for i in range(3)]
    long = put(cache, text(5 * PAGE))
    assert cache.room[0] == 4 and cache.room[1] >= 5 * PAGE
    cache.close(long)
    cache.close(slots[0])
    moved = cache.relocate(slots[2])
    assert (moved, cache.slots) == (0, 2)
    cache.resize(2, PAGE)
    assert cache.room == (2, PAGE)
    cache.check_integrity()
    for slot, i in ((moved, 2), (slots[1], 1)):
        assert told(cache, slot) == [token + 100 * i for token in text(20 + i)]
    cache.resize(4, 3 * PAGE)
    assert told(cache, moved) == [token + 200 for token in text(22)]
    assert cache.relocate(moved) == moved, "nothing lower is free"
    again = put(cache, text(2 * PAGE))
    assert told(cache, again) == text(2 * PAGE) and again == 2


def test_a_page_has_the_bytes_it_says():
    cache = dense()
    cache.resize(1, PAGE)
    assert cache.nbytes == cache.page_bytes == 2 * 3 * 2 * 4 * PAGE * 4


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="memory is written here")
def test_memory_that_is_not_written_is_zero_and_takes_no_time():
    cache = DenseCache(8, heads=4, width=64)
    cache.resize(16, 64 * PAGE)  # 1 GB, more than a test may touch
    assert cache.nbytes == 1 << 30
    slot = put(cache, text(100))
    assert cache.key_store[:, slot, :, :, 100:200].count_nonzero() == 0
    cache.resize(17, 65 * PAGE)
    assert told(cache, slot) == text(100)
    cache.close(slot)
    cache.resize(0, 0)
    assert cache.nbytes == 0


def test_the_integrity_check_can_fail():
    def broken(harm):
        store = PrefixStore(TableCache(), 4)
        store.save(put(store._cache, text(2 * PAGE)), "a")
        first, second = store._pages.values()
        harm(store, first, second)
        with pytest.raises(AssertionError):
            store.check_integrity()

    broken(lambda store, first, second: store._pages.pop(first.place))
    broken(lambda store, first, second: setattr(first, "children", 0))
    broken(lambda store, first, second: setattr(store, "most", 1))
