"""Passes in fixed shapes against eager ones. Launches are recorded operation by operation and
replayed on the same memory, as a CUDA graph does, so that whatever changes must be in a buffer."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outpace.models import graphs, packed, rowwise
from outpace.models.decoder import Decoder
from outpace.models.tiny import tiny
from outpace.models.weights import SafetensorsCheckpoint
from outpace.types import Draft, Feed, Resume, Riders
from tests.models.making import save_hf

VOCABULARY = 96
GEMMA = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 20.0,
}
TAPS = frozenset({"hidden.0", "hidden.2", "hidden.4", "hidden.-1", "attn_out.1"})


class Tape(TorchDispatchMode):
    """Writes down every operation with the tensors that it read and wrote."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        for func, args, kwargs, result in self.calls:
            new = func(*args, **kwargs)
            for old, other in zip(tree_leaves(result), tree_leaves(new), strict=True):
                if old.data_ptr() != other.data_ptr():
                    old.copy_(other)


class Recorder:
    """Stands in for CUDA graphs: nothing of the launch's own Python runs at a replay."""

    def __init__(self):
        self.count = 0

    def __call__(self, launch):
        self.count += 1
        launch()  # as on a GPU, where libraries are warmed up first
        with Tape() as tape:
            launch()
        return tape.replay


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Nothing is compiled for a CPU: a tape holds operations of torch alone."""
    monkeypatch.setattr(rowwise, "_code", lambda: None)
    monkeypatch.setattr(packed, "works", lambda: False)


@pytest.fixture(scope="module", params=["llama", "gemma3", "granite", "olmo2"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    changes = GEMMA if request.param == "gemma3" else {}
    save_hf(path, request.param, initializer_range=0.3, **changes)
    return path


class Pair:
    """The same passes eagerly and in fixed shapes, each over a cache of its own."""

    def __init__(self, folder, capacity=512):
        self.eager = Decoder.load(SafetensorsCheckpoint(folder), dtype=torch.float32)
        self.fixed = Decoder.load(SafetensorsCheckpoint(folder), dtype=torch.float32)
        self.recorder = Recorder()
        self.fixed.static = self.fixed.static_passes(self.recorder)
        self.caches = self.eager.new_cache(capacity), self.fixed.new_cache(capacity)

    def do(self, name, *values):
        for cache in self.caches:
            result = getattr(cache, name)(*values)
        return result

    def off(self, feeds, **more):
        """Largest difference of logits and taps."""
        want, got = (
            model.score(feeds, cache, **more)
            for model, cache in zip((self.eager, self.fixed), self.caches, strict=True)
        )
        assert want.start_B == got.start_B
        assert set(want.taps) == set(got.taps)
        both = [(want.logits_TV, got.logits_TV), *((want.taps[t], got.taps[t]) for t in got.taps)]
        assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in both)
        return max(float((a - b).abs().max()) for a, b in both if a.numel())

    def same(self, feeds, **more):
        # The same sums in another order: rounding of float32 through four layers.
        assert self.off(feeds, **more) < 5e-4


def tokens(count, seed=0):
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(count)]


def tree(size, seed):
    generator = random.Random(seed)
    parents = [generator.randrange(-1, i) for i in range(size)]
    return Draft.chosen(generator.sample(range(VOCABULARY), size), parents)


def test_one_recording_serves_chains_and_trees_of_any_text(folder):
    pair = Pair(folder)
    slot = pair.do("open")
    pair.same([Feed.chain(slot, tokens(100))])  # too long for a bucket
    pair.do("keep", slot, range(100))
    assert pair.recorder.count == 0
    for seed in range(12):
        draft = tree(7, seed)
        pair.same([Feed.tree(slot, seed, draft)])
        path = draft.path(random.Random(seed).randrange(7))
        pair.do("keep", slot, [0, *(i + 1 for i in path)])
        pair.same([Feed.chain(slot, tokens(5, seed), want=(4, 1))])
        pair.do("keep", slot, range(2))
    assert pair.recorder.count == 1
    for count, recorded in ((1, 2), (4, 2), (3, 2), (16, 3), (9, 3), (64, 4), (65, 4)):
        pair.same([Feed.chain(slot, tokens(count))])
        pair.do("drop", slot)
        assert pair.recorder.count == recorded, count


def test_text_grows_past_the_keys_of_a_bucket_and_past_the_cache(folder):
    pair = Pair(folder, 0)
    slot = pair.do("open")
    pair.same([Feed.chain(slot, tokens(60))])
    pair.do("keep", slot, range(60))
    stores = [pair.caches[1].key_store]
    for step in range(56):
        pair.same([Feed.chain(slot, tokens(4, step))])
        pair.do("keep", slot, range(4))
        if pair.caches[1].key_store is not stores[-1]:
            stores.append(pair.caches[1].key_store)
    assert pair.caches[1].length(slot) == 284
    # One for the long feed, one per memory of the cache, one where 256 keys no longer suffice.
    assert [store.shape[4] for store in stores] == [64, 128, 192, 320]
    assert pair.recorder.count == 6
    assert pair.caches[1].ids(slot) == pair.caches[0].ids(slot)


def test_a_ragged_batch_with_gaps_is_scored_as_its_parts(folder):
    """Slots that are closed, idle, or hold a tail; nothing of theirs is touched."""
    pair = Pair(folder)
    texts = [tokens(n, n) for n in (5, 60, 9, 30, 200, 33, 12)]
    for text in texts:
        slot = pair.do("open")
        pair.same([Feed.chain(slot, text)])
        pair.do("keep", slot, range(len(text)))
    pair.do("close", 3)
    pair.recorder.count = 0
    for seed in range(3):
        feeds = [
            Feed.tree(4, 7, tree(6, seed)),
            Feed.chain(1, [5]),
            Feed.chain(2, [8, 9], want=()),
            Feed.chain(5, [1, 2, 3]),
        ]
        pair.same(feeds, taps=TAPS)
        for one in feeds:
            pair.do("keep", one.slot, [0])
    assert pair.recorder.count == 1
    # Level by level: slot 5 has a tail while others run, and goes on from it.
    pair.same([Feed(5, (1, 2), (-1, 0))])
    pair.same([Feed.chain(4, [1]), Feed.chain(6, [2])], layers=2)
    pair.same([Feed(5, (3, 4), (0, 1))])
    for slot in (4, 6):
        pair.do("drop", slot)
    pair.do("drop", 5)
    assert pair.do("open") == 3
    for slot in (3, 0, 1, 2, 4, 5, 6):
        pair.same([Feed.chain(slot, tokens(3, slot))])


def test_what_does_not_fit_runs_eagerly(folder):
    pair = Pair(folder)
    for _ in range(9):
        slot = pair.do("open")
        pair.same([Feed.chain(slot, tokens(70, slot))])
        pair.do("keep", slot, range(70))
    draft = Draft.chosen([1, 2], [-1, 0])
    draft = Draft(draft.token_N, draft.parent_N, draft.groups, riders=Riders((0,), (-1,), (11,)))
    pair.same([Feed.tree(0, 7, draft)])
    pair.do("drop", 0)
    # A lone row in the first and the last of nine slots would have 36 rows computed.
    pair.same([Feed.chain(0, [1]), Feed.chain(8, [2])])
    pair.do("drop", 0)
    pair.do("drop", 8)
    assert pair.recorder.count == 0
    early = [
        model.score([Feed.chain(1, [5])], cache, layers=2, taps=frozenset({"hidden.2"}))
        for model, cache in zip((pair.eager, pair.fixed), pair.caches, strict=True)
    ]
    assert pair.recorder.count == 1
    pair.same([Feed(1, (5, 6), (-1, 0), resume=Resume(2, (0,), early[0].taps["hidden.2"]))])
    assert pair.recorder.count == 1


def test_a_recording_that_forgets_an_input_is_noticed(folder):
    """Twice the same pass is right; other text is not. So the tests above can fail."""
    pair = Pair(folder)
    pair.fixed.static = pair.fixed.static_passes(lambda launch: (launch(), lambda: None)[1])
    slot = pair.do("open")
    pair.same([Feed.chain(slot, [1, 2, 3])])
    pair.do("keep", slot, range(3))
    assert pair.off([Feed.chain(slot, [4, 5, 6])]) > 0.01


@pytest.mark.parametrize("what", ["stored", "seen"])
def test_rows_at_a_wrong_place_are_noticed(folder, what, monkeypatch):
    pair = Pair(folder)
    fill = graphs.PaddedAttention.fill

    def wrong(self, stored, spans):
        fill(self, [0] * len(stored) if what == "stored" else stored, spans)
        if what == "seen":
            for seen in self._seen.values():
                seen[..., 1] = False

    monkeypatch.setattr(graphs.PaddedAttention, "fill", wrong)
    slot = pair.do("open")
    assert pair.off([Feed.chain(slot, tokens(6))]) > 0.01


def test_many_shapes_are_forgotten_and_recorded_anew(monkeypatch):
    monkeypatch.setattr(graphs, "_SHAPES", 2)
    monkeypatch.setattr("outpace.models.decoder.fits", lambda *given: False)  # as on a GPU
    decoder, recorder = tiny(), Recorder()
    decoder.static = decoder.static_passes(recorder)
    cache = decoder.new_cache(256)
    slot = cache.open()
    for count in (1, 5, 1, 5, 9, 5):
        decoder.score([Feed.chain(slot, tokens(count))], cache)
        cache.drop(slot)
    # The third shape has no room: the two before are forgotten, and one of them comes again.
    assert recorder.count == 4


@pytest.mark.parametrize("fixed", [False, True])
def test_a_pass_mixes_no_devices(folder, fixed):
    """On "meta", operations on tensors of two devices fail, as they do on a GPU."""
    decoder = Decoder.load(SafetensorsCheckpoint(folder), dtype=torch.bfloat16, device="meta")
    assert decoder.static is None
    if fixed:
        decoder.static = decoder.static_passes(lambda launch: (launch(), launch)[1])
    cache = decoder.new_cache()
    for slot in range(2):
        decoder.score([Feed.chain(cache.open(), tokens(40))], cache)
        cache.keep(slot, range(40))
    feeds = [Feed.tree(0, 7, tree(9, 0)), Feed.chain(1, [5])]
    scored = decoder.score(feeds, cache, taps=TAPS)
    assert scored.logits_TV.shape == (11, VOCABULARY)
    assert {one.device.type for one in (scored.logits_TV, *scored.taps.values())} == {"meta"}
    cache.keep(0, [0])
