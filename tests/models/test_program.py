"""A pass in one call gives what torch gives operation by operation, on any number of threads."""

import ctypes
import math

import pytest
import torch

from outpace.kernels.compiled import library
from outpace.models import buffers, listing, operations
from outpace.models.decoder import Decoder
from outpace.models.program import Programs
from outpace.models.weights import SafetensorsCheckpoint
from outpace.rows import best_rows
from outpace.types import Draft, Feed, Resume, Riders
from tests.models.making import save_hf

pytestmark = pytest.mark.skipif(library() is None, reason="C cannot be compiled for this machine")

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "initializer_range": 0.2}
MODELS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": False}),
    "mixtral": ("mixtral", {}),
    "gemma3": (
        "gemma3",
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 30.0,
        },
    ),
    **{family: (family, {}) for family in ("gemma2", "granite", "smollm3", "phi3", "olmo2")},
}
TREE = Draft.chosen([1, 2, 3, 4, 5, 6], [-1, 0, 0, 2, -1, 4])
TAPS = frozenset({"hidden.0", "hidden.2", "hidden.4", "hidden.-1", "attn_in.1", "attn_out.3"})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Models by name and dtype: one that runs compiled, and one that torch runs."""
    known = {}

    def pair(name, dtype=torch.float32):
        if (name, dtype) not in known:
            folder, (family, changes) = tmp_path_factory.mktemp(name), MODELS[name]
            save_hf(folder, family, **{**SIZES, **changes})
            checkpoint = SafetensorsCheckpoint(folder)
            both = [Decoder.load(checkpoint, dtype=dtype, packed=packed) for packed in (True, False)]
            assert both[0]._programs is not None and both[1]._programs is None
            known[name, dtype] = both
        return known[name, dtype]

    return pair


def begun(decoder, length=40, slots=3):
    cache = decoder.new_cache()
    for slot in range(slots):
        text = [(7 * i + slot) % 90 for i in range(length + slot)]
        decoder.score([Feed.chain(cache.open(), text)], cache)
        cache.keep(slot, range(len(text)))
    return cache


def everything(decoder, taps=TAPS):
    """Numbers of passes of every kind, one after another on the same cache."""
    cache, out = begun(decoder), []

    def score(*feeds, **more):
        scored = decoder.score(list(feeds), cache, **more)
        out.extend([scored.logits_TV.clone(), *(scored.taps[name] for name in sorted(scored.taps))])
        out.extend(x for x in (scored.rider_hidden_RH, scored.rider_logits_RV) if x is not None)
        return scored

    def drop(*slots):
        for slot in slots:
            cache.drop(slot)

    score(Feed.chain(0, [3]))
    cache.keep(0, [0])
    score(Feed.tree(0, 7, TREE), Feed.chain(1, [5, 6, 7], want=(2,)), Feed.chain(2, [9]), taps=taps)
    cache.keep(0, [0, 1, 3, 4])
    drop(1, 2)
    score(Feed.chain(0, list(range(20)), want=()), Feed.chain(1, [2]))
    drop(0, 1)
    for riders in (Riders((3, -1), (-1, -1), (11, 12)), Riders((0, 0), (-1, 0), (1, 2), logits=False)):
        ridden = Draft(TREE.token_N, TREE.parent_N, TREE.groups, riders=riders)
        score(Feed.tree(0, 7, ridden), Feed.chain(2, [4]), taps=frozenset({"hidden.-1", "hidden.1"}))
        drop(0, 2)
    score(Feed.chain(1, [8, 9]), layers=3, taps=frozenset({"hidden.3"}))
    drop(1)
    early = score(Feed.chain(0, [7, 1]), layers=2, taps=frozenset({"hidden.2"}))
    resume = Resume(2, (0, 1), early.taps["hidden.2"])
    joined = Feed(0, (7, 1, 2), (-1, 0, 1), resume=resume)
    score(joined, Feed.chain(2, [5, 6]), taps=frozenset({"hidden.3", "hidden.4"}))
    cache.keep(0, [0, 1, 2])
    score(Feed.chain(0, [1]))
    out += [cache.first_keys(slice(None), slice(None), 40).float(), cache.value_store[:, :, :, :40].float()]
    return out


def off(got, want):
    """The largest difference beside the size of what is compared."""
    assert [x.shape for x in got] == [x.shape for x in want]
    pairs = ((x.float(), y.float()) for x, y in zip(got, want, strict=True) if x.numel())
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_passes_of_every_kind_agree_with_torch(made, name):
    compiled, plain = made(name)
    assert off(everything(compiled), everything(plain)) < 2e-5
    assert off(everything(compiled.variant(layers=[0, 3, 1, 2])), everything(compiled)) > 1e-2
    some = [decoder.variant(layers=[3, 0, 1, 2]) for decoder in (compiled, plain)]
    assert off(*(everything(decoder) for decoder in some)) < 2e-5


def test_bfloat16_agrees_up_to_rounding(made):
    compiled, plain = made("llama", torch.bfloat16)
    difference = off(everything(compiled), everything(plain))
    assert 0 < difference < 0.15


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(made, dtype, threads, monkeypatch):
    compiled, _ = made("qwen3", dtype)
    want = everything(compiled)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert all(torch.equal(x, y) for x, y in zip(everything(compiled), want, strict=True))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "granite", "smollm3", "phi3", "olmo2"])
def test_a_row_gets_the_same_bits_in_any_company(made, name):
    for dtype in (torch.float32, torch.bfloat16):
        compiled, _ = made(name, dtype)
        cache = begun(compiled)
        tokens = list(range(40))
        whole = compiled.score([Feed.chain(1, [3, 4]), Feed.chain(0, tokens)], cache).of(1).logits_TV.clone()
        cache.drop(0)
        cache.drop(1)
        for start in (0, 1, 7, 39):
            if start:
                compiled.score([Feed.chain(0, tokens[:start])], cache)
            alone = compiled.score([Feed(0, (tokens[start],), (start - 1,))], cache).logits_TV
            assert torch.equal(alone[0], whole[start])
            cache.drop(0)


def broken(kind, nth, **changes):
    """A way to list operations with a fault: the ``nth`` of a kind differs, or is left out."""
    true = listing.Lister._op

    def op(self, listed, **fields):
        count = sum(one.kind == listed for one in self._ops) + getattr(self, "left_out", 0)
        if listed != kind or count != nth:
            return true(self, listed, **fields)
        if changes:
            return true(self, listed, **{**fields, **changes})
        self.left_out = 1
        return None

    return op


@pytest.mark.parametrize(
    "fault",
    [
        (operations.NORM, 3, {"more": -1}),
        (operations.NORM, 2, {"floor": 3.0}),
        (operations.TURN, 1, {}),
        (operations.TURN, 2, {"weight": None}),
        (operations.ATTEND, 3, {"layer": 0}),
        (operations.ATTEND, 2, {"index": 1}),
        (operations.GATE, 0, {"index": 1}),
        (operations.ADD, 0, {}),
        (operations.COPY, 1, {"from_": buffers.ADDED}),
        (operations.PICK, 0, {"from_": buffers.ADDED}),
        (operations.ROUTE, 0, {"normed": 1}),
        (operations.DOWN, 0, {"index": 1}),
        (operations.MIX, 1, {}),
    ],
    ids=lambda fault: f"{fault[0]}-{fault[1]}",
)
def test_a_fault_in_a_list_is_noticed(made, fault, monkeypatch):
    kind, nth, changes = fault
    name = "qwen3" if kind == operations.TURN else "gemma3" if kind == operations.ATTEND else "llama"
    name = "qwen3_moe" if kind >= operations.ROUTE else name
    compiled, plain = made(name)
    monkeypatch.setattr(listing.Lister, "_op", broken(kind, nth, **changes))
    with monkeypatch.context() as patch:
        fresh = Programs(compiled.config, compiled._blocks, compiled._ends, compiled._turns, compiled._shape)
        patch.setattr(compiled, "_programs", fresh)
        assert not off(everything(compiled), everything(plain)) < 1e-3


def test_what_it_does_not_know_is_left_to_torch(made, tmp_path):
    compiled, _ = made("llama")
    config, blocks, ends, shape = compiled.config, compiled._blocks, compiled._ends, compiled._shape
    assert Programs.runs(config, blocks, ends, shape)
    save_hf(tmp_path, "llama", **{**SIZES, "head_dim": 8})
    narrow = Decoder.load(SafetensorsCheckpoint(tmp_path))
    assert narrow._programs is None
    plain = made("llama")[1]
    assert not Programs.runs(config, plain._blocks, ends, shape)
    assert not Programs.runs(config, blocks, plain._ends, shape)


def test_a_pass_that_fails_leaves_nothing_behind(made, monkeypatch):
    compiled, plain = made("llama")

    def fails(ids):
        raise RuntimeError("no embedding")

    cache = begun(compiled)
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "embed", fails)
        with pytest.raises(RuntimeError, match="no embedding"):
            compiled.score([Feed.chain(0, [1])], cache)
    cache.drop(0)
    again = compiled.score([Feed.chain(0, [1])], cache).logits_TV
    assert off([again], [plain.score([Feed.chain(0, [1])], begun(plain)).logits_TV]) < 2e-5


def best_of(x_RV):
    """What the operation for it says of rows."""
    out, rows = (ctypes.c_double * (2 * len(x_RV)))(), (ctypes.c_int64 * 1)(len(x_RV))
    buffer = (ctypes.c_void_p * 2)(x_RV.data_ptr(), ctypes.addressof(out))
    op = operations.Op(kind=operations.BEST, from_=0, to=1, width=x_RV.shape[1])
    call = operations.Call(
        op=ctypes.addressof(op),
        ops=1,
        buffer=ctypes.addressof(buffer),
        rows=ctypes.addressof(rows),
        threads=2,
    )
    library().outpace_run(ctypes.byref(call))
    return [int(i) for i in out[::2]], out[1::2]


@pytest.mark.parametrize("width", [1, 7, 16, 100, 5003])
def test_the_largest_of_a_row_is_the_first_of_equal_ones(width):
    generator = torch.Generator().manual_seed(width)
    x_RV = torch.randint(-5, 5, (40, width), generator=generator).float()
    x_RV[1] = -math.inf
    x_RV[2, width // 2] = math.inf
    x_RV[3, : width - 1] = -math.inf
    assert best_of(x_RV) == best_rows([x_RV])
    for at in {0, width // 2, width - 1}:
        x_RV[5, at] = math.nan
        assert math.isnan(best_of(x_RV)[1][5]), at
        x_RV[5, at] = 0.0


def test_a_pass_says_what_is_largest(made):
    for name in ("llama", "gemma3"):
        compiled, _ = made(name)
        scored = compiled.score([Feed.tree(0, 7, TREE), Feed.chain(1, [1], want=())], begun(compiled))
        assert scored.best == (best_rows([scored.logits_TV]) if name == "llama" else None), "caps make ties"


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_gives_the_vectors_of_ids(tmp_path, dtype, quantize):
    save_hf(tmp_path, "gemma3", **{**SIZES, "tie_word_embeddings": True})
    decoder = Decoder.load(SafetensorsCheckpoint(tmp_path), dtype=dtype, quantize=quantize)
    assert decoder._programs._vectors is not None and decoder.config.embed_scale != 1.0
    ids = [0, 1, 15, 16, 40, 95, 95]
    scored = decoder.score(
        [Feed.chain(0, ids)], begun(decoder, slots=1, length=1), taps=frozenset({"hidden.0"})
    )
    assert torch.equal(scored.taps["hidden.0"], decoder.embed(ids))
