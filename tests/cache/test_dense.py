import random

import pytest
import torch

from outpace.cache.base import PAGE
from outpace.cache.dense import DenseCache
from outpace.kernels import compiled
from tests.support import put_keys


def filled(slots: int, rows: int, *, capacity: int = 0) -> DenseCache:
    """A cache of 2 layers whose keys and values tell slot, storage row and kind."""
    cache = DenseCache(2, heads=3, width=4, capacity=capacity)
    for _ in range(slots):
        slot = cache.open()
        stored = cache.append(slot, range(rows), range(-1, rows - 1))
        write(cache, slot, stored)
        cache.keep(slot, range(rows))
    return cache


def write(cache, slot, stored):
    for row in stored:
        keys, values = cache.by_row
        keys[:, slot, row] = 100 * slot + row
        values[:, slot, row] = -100 * slot - row


def held(cache, slot):
    """What the keys of a slot's committed rows tell; the values must tell the same."""
    keys, values = (store[:, slot, : cache.length(slot)] for store in cache.by_row)
    assert torch.equal(keys, -values)
    assert torch.equal(keys, keys[:1, :, :1, :1].expand_as(keys))
    return [int(row) for row in keys[0, :, 0, 0]]


def test_keep_moves_a_path_to_the_front_in_its_own_slot_only():
    cache = filled(2, 5)
    #  5 (-1)   6 (5)   7 (5)   8 (6)   9 (7)
    write(cache, 1, cache.append(1, [50, 51, 52, 53, 54], [-1, 0, 0, 1, 2]))
    cache.keep(1, [0, 2, 4])
    assert held(cache, 1) == [100, 101, 102, 103, 104, 105, 107, 109]
    assert cache.ids(1) == [0, 1, 2, 3, 4, 50, 52, 54]
    assert held(cache, 0) == [0, 1, 2, 3, 4]
    cache.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_moves_rows_as_torch_does(dtype, monkeypatch):
    def kept():
        cache = DenseCache(3, heads=2, width=16, dtype=dtype)
        for slot in (cache.open(), cache.open()):
            cache.append(slot, range(9), range(-1, 8))
            cache.keep(slot, range(9))
        cache.append(1, range(6), [-1, 0, 0, 1, 2, 4])
        draw = torch.Generator().manual_seed(5)
        for store in cache.by_row:
            store.copy_(torch.rand(store.shape, generator=draw))
        cache.keep(1, [0, 2, 4, 5])
        return cache.by_row

    ours = kept()
    monkeypatch.setattr("outpace.cache.dense.move", lambda *given: False)
    assert all(map(torch.equal, ours, kept()))


@pytest.mark.skipif(compiled.library() is None, reason="torch moves no rows of tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_in_tiles_are_those_in_one(dtype):
    """Texts grow, keep paths over borders of tiles, are forked, copied in pages and closed."""
    pair, coins = (
        [DenseCache(3, heads=2, width=16, dtype=dtype, tiled=tiled) for tiled in (False, True)],
        random.Random(3),
    )

    def told(rows):
        return torch.tensor([coins.random() for _ in range(3 * 2 * 16 * rows)]).view(3, rows, 2, 16).to(dtype)

    for turn in range(120):
        live = sorted(pair[0]._slots)
        at = coins.choice([*live, *[-1] * (len(live) < 4)])
        length = pair[0].length(at) if at >= 0 else 0
        if at < 0:
            assert pair[0].open() == pair[1].open()
        elif turn % 9 == 8:
            made = coins.choice(["fork", "cut", "close", "pages"])
            cut = coins.randint(0, length) if made == "cut" else length
            pages = length // PAGE
            for one in pair:
                if made == "fork" and len(live) < 4:
                    one.fork(at, length)
                elif made == "cut":
                    one.truncate(at, cut)
                elif made == "close":
                    one.close(at)
                elif made == "pages" and len(live) < 4:
                    parts = [one.copy(at, PAGE * i, PAGE * i + PAGE) for i in range(pages)]
                    one.restore(one.open(), one.ids(at)[: PAGE * pages], parts)
        else:
            count = coins.choice([1, 5, 40])
            parents = [-1, *(coins.randrange(max(0, i - 2), i) for i in range(1, count))]
            keys, values, path, node = told(count), told(count), [], count - 1
            while node >= 0:
                path.insert(0, node)
                node = parents[node]
            for one in pair:
                rows = one.append(at, range(count), parents)
                put_keys(one, slice(None), at, rows, keys.permute(0, 2, 3, 1))
                one.value_store[:, at, :, rows.start : rows.stop] = values.transpose(1, 2)
                one.keep(at, path)
        for slot in pair[0]._slots:
            rows = pair[0].length(slot)
            assert rows == pair[1].length(slot)
            if rows:
                assert torch.equal(*(one.first_keys(slice(None), slot, rows) for one in pair)), turn
                assert torch.equal(*(one.value_store[:, slot, :, :rows] for one in pair))
    assert pair[1].rows > 2 * PAGE


def test_prune_leaves_some_of_the_tail():
    cache = filled(2, 5)
    #  5 (-1)   6 (5)   7 (5)   8 (6)   9 (7)
    write(cache, 1, cache.append(1, [50, 51, 52, 53, 54], [-1, 0, 0, 1, 2]))
    cache.prune(1, range(5))
    assert cache.slot(1).tail_ids == [50, 51, 52, 53, 54]
    with pytest.raises(ValueError, match=r"rows \[3\] of \[0, 2, 3\] hang from rows"):
        cache.prune(1, [0, 2, 3])
    cache.prune(1, [0, 2, 4])
    state = cache.slot(1)
    assert (state.tail_ids, state.tail_parents) == ([50, 52, 54], [-1, 0, 1])
    assert state.tail_depths == [0, 1, 2] and cache.length(1) == 5
    cache.keep(1, [0, 1, 2])
    assert held(cache, 1) == [100, 101, 102, 103, 104, 105, 107, 109]
    assert held(cache, 0) == [0, 1, 2, 3, 4]
    cache.check_integrity()


def test_growth_keeps_what_is_stored():
    cache = filled(1, 60)
    before = held(cache, 0)
    old = cache.keys(range(1), range(64))
    write(cache, 0, cache.append(0, range(70), range(-1, 69)))
    cache.keep(0, range(70))
    second = cache.open()
    write(cache, second, cache.append(second, [1], [-1]))
    cache.keep(second, [0])
    assert held(cache, 0) == [*before, *range(60, 130)]
    assert held(cache, second) == [100]
    assert cache.rows % 64 == 0
    assert cache.keys(range(1), range(64))[0].data_ptr() != old[0].data_ptr()
    assert cache.nbytes == 2 * cache.key_store.nbytes


def test_slots_opened_together_are_allocated_once():
    cache = DenseCache(2, heads=3, width=4, capacity=100)
    slots = [cache.open() for _ in range(4)]
    assert cache.nbytes == 0
    cache.append(slots[0], [1], [-1])
    assert cache.key_store.shape[1] == 4
    assert cache.rows == 128
    place = cache.key_store.data_ptr()
    for slot in slots[1:]:
        cache.append(slot, range(99), range(-1, 98))
    assert cache.key_store.data_ptr() == place


def test_a_batch_that_grows_slot_by_slot_is_seldom_copied():
    cache, sizes = DenseCache(1, heads=1, width=2), set()
    for _ in range(64):
        cache.append(cache.open(), [1], [-1])
        sizes.add(cache.room[0])
    assert len(sizes) < 16 and 64 <= max(sizes) < 96


def test_a_closed_slot_is_taken_again_and_starts_empty():
    cache = filled(3, 4)
    cache.close(1)
    assert cache.open() == 1
    assert cache.length(1) == 0
    assert cache.append(1, [7], [-1]) == range(1)
    assert held(cache, 2) == [200, 201, 202, 203]


def test_views_follow_the_layout():
    cache = filled(2, 3)
    keys = cache.keys(range(2), range(64))
    assert keys[0].shape == (6, 4, 64)
    assert [int(keys[1][3 * slot, 0, 2]) for slot in (0, 1)] == [2, 102]
    values = cache.values(range(1, 2), range(64))
    assert values[0].shape == (3, 64, 4)
    assert int(values[0][1, 2, 3]) == -102


def test_scratch_rows_lie_behind_the_tail_and_are_reused():
    cache = filled(1, 3)
    cache.append(0, [9], [-1])
    assert cache.scratch(0, 70) == range(4, 74)
    assert cache.rows >= 74
    assert cache.append(0, [9], [0]) == range(4, 5)


def test_inference_mode_leaves_no_mark_on_the_memory():
    cache = DenseCache(1, heads=1, width=2)
    with torch.inference_mode():
        slot = cache.open()
        cache.append(slot, [1, 2, 3], [-1, 0, 0])
    assert not cache.value_store.is_inference()
    cache.keep(slot, [0, 2])
    assert cache.length(slot) == 2


@pytest.mark.parametrize("rows", [[1], [0, 3], [2, 0]])
def test_rows_that_are_no_path_are_refused(rows):
    cache = DenseCache(1, heads=1, width=2)
    slot = cache.open()
    cache.append(slot, [1, 2, 3, 4], [-1, 0, 0, 1])
    with pytest.raises(ValueError, match="no path"):
        cache.keep(slot, rows)
    assert cache.length(slot) == 0


def test_a_fork_holds_the_beginning_of_another_slot():
    cache = filled(2, 70)
    other = cache.fork(1, 65)
    assert cache.ids(other) == list(range(65)) and cache.twin(other) == (1, 65)
    assert held(cache, other) == held(cache, 1)[:65] and cache.length(1) == 70
    cache.truncate(other, 30)
    assert cache.twin(other) == (1, 30), "rows behind may now hold other text"
    cache.truncate(1, 20)
    assert cache.twin(other) == (1, 20), "those of the other too"
    third = cache.fork(1, 10)
    cache.close(1)
    assert cache.twin(other)[1] == cache.twin(third)[1] == 0, "another text may take the slot"
    cache.close(third)
    assert cache.open() == 1
    cache.close(other)
    assert cache.twin(other) == (0, 0) and cache.open() == other
    assert cache.twin(other) == (0, 0)
