"""Contracts that the cache of every target keeps, as sequences come, change and go."""

import pytest
import torch

from outpace.cache.base import PAGE
from outpace.types import Feed
from tests.conformance.targets import TARGETS
from tests.conformance.test_targets import TEXT, alone, assert_same, read

LONG = [(7 * i + 3) % 11 for i in range(2 * PAGE + 5)]


@pytest.fixture(params=TARGETS)
def target(request):
    return TARGETS[request.param]()


@pytest.fixture
def cache(target):
    cache = target.new_cache()
    yield cache
    cache.check_integrity()


def follows(target, cache, slot, text):
    """The slot goes on as the text does."""
    assert cache.ids(slot) == text and cache.length(slot) == len(text)
    assert_same(target.score([Feed.chain(slot, [8])], cache).logits_TV[-1], alone(target, [*text, 8]))
    cache.drop(slot)


def test_the_lowest_free_slot_is_taken_and_is_empty(target, cache):
    slots = [read(target, cache, TEXT)[0] for _ in range(3)]
    assert slots == [0, 1, 2] and cache.slots == 3
    cache.close(1)
    assert cache.open() == 1 and cache.length(1) == 0
    follows(target, cache, 2, TEXT)


def test_only_a_path_can_be_kept(target, cache):
    slot, _ = read(target, cache, TEXT)
    target.score([Feed.chain(slot, [1, 2, 3])], cache)
    with pytest.raises(ValueError, match="are no path"):
        cache.keep(slot, [1, 2])
    cache.keep(slot, [0, 1])
    follows(target, cache, slot, [*TEXT, 1, 2])


def test_a_text_is_cut_and_written_anew(target, cache):
    slot, _ = read(target, cache, TEXT)
    assert cache.sync(slot, [*TEXT[:6], 1, 1]) == 6
    follows(target, cache, slot, TEXT[:6])
    target.score([Feed.chain(slot, [4, 2])], cache)
    cache.keep(slot, range(2))
    follows(target, cache, slot, [*TEXT[:6], 4, 2])
    with pytest.raises(ValueError, match="cannot truncate 8 committed tokens to 9"):
        cache.truncate(slot, 9)


def test_growth_keeps_what_is_stored(target, cache):
    first, _ = read(target, cache, TEXT)
    second, _ = read(target, cache, LONG)
    follows(target, cache, first, TEXT)
    follows(target, cache, second, LONG)


def test_copies_fill_other_slots(target, cache):
    if not cache.copies:
        with pytest.raises(NotImplementedError):
            cache.copy(read(target, cache, TEXT)[0], 0, 4)
        return
    slot, _ = read(target, cache, LONG)
    text, parts = LONG[: 2 * PAGE], [cache.copy(slot, 0, PAGE), cache.copy(slot, PAGE, 2 * PAGE)]
    cache.truncate(slot, 0)  # copies stay good
    for _ in range(2):
        other = cache.open()
        cache.restore(other, text, parts)
        follows(target, cache, other, text)
    cache.close(slot)
    moved = cache.relocate(other)
    assert moved == slot
    follows(target, cache, moved, text)


def test_the_test_of_a_cache_can_fail(monkeypatch):
    """A planted bug: what is kept stays where it was written."""
    target = TARGETS["decoder"]()
    cache = target.new_cache()
    slot, _ = read(target, cache, TEXT)
    monkeypatch.setattr(cache, "_move", lambda *given: None)
    cache.append(slot, [1, 2], [-1, -1])
    cache.drop(slot)
    logits_TV = target.score([Feed(slot, (1, 2), (-1, -1), want=None)], cache).logits_TV
    assert torch.isfinite(logits_TV).all()
    cache.keep(slot, [1])
    with pytest.raises(AssertionError):
        follows(target, cache, slot, [*TEXT, 2])
