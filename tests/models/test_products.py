"""Compiled products: the weights are those of the file, rows are alone, sums are near."""

import ctypes

import gguf
import pytest
import torch

from outpace.kernels import build
from outpace.kernels.compiled import library
from outpace.models.decoder import Decoder
from outpace.models.gguf.model import GGUFCheckpoint
from outpace.models.packed import Linear
from outpace.models.products import CODED, KINDS, Product, store_numbers, store_rows, works
from outpace.types import Feed, VocabMap
from tests.models.test_weights import make_gguf

pytestmark = pytest.mark.skipif(not works(), reason="code cannot be compiled here")
FLOAT16 = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}
"""Numbers of float16 at the start of a block, where they are not one."""
VNNI = {"avx512_vnni", "avx512bw"} <= build.features()
PAIRED = {"Q4_0", "Q4_1", "Q4_K"} if VNNI else set()
"""Types that are multiplied two codes at a time, by rows of 12 bits."""


def blocks(kind, outputs, inputs, seed=0):
    """Random bytes as a matrix, and the numbers that the reference makes of them."""
    generator = torch.Generator().manual_seed(seed)
    if kind in ("F32", "BF16"):
        weight = torch.randn(outputs, inputs, generator=generator)
        weight = weight.bfloat16() if kind == "BF16" else weight
        return weight, weight.float()
    type_ = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    count = inputs // block
    raw = torch.randint(0, 256, (outputs, count, size), generator=generator, dtype=torch.uint8)
    scales = FLOAT16.get(kind, 1)
    first = 208 if kind == "Q6_K" else 0
    numbers = torch.rand(outputs, count, scales, generator=generator).mul(0.02).add(0.001).half()
    raw[:, :, first : first + 2 * scales] = numbers.view(torch.uint8).view(outputs, count, -1)
    raw = raw.view(outputs, -1)
    return raw, torch.from_numpy(gguf.dequantize(raw.numpy(), type_)).view(outputs, inputs)


def made(kind, outputs=72, inputs=512, bias_O=None, seed=0):
    raw, dense = blocks(kind, outputs, inputs, seed)
    return Product([store_rows(kind, raw, inputs)], bias_O), dense


def rows(count, inputs, seed=1):
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_matrix_is_that_of_the_file(kind):
    for outputs, inputs in ((72, 512), (1, 256), (33, 1024)):
        raw, dense = blocks(kind, outputs, inputs)
        stored = store_rows(kind, raw, inputs)
        assert torch.equal(stored.dense(), dense)
        order = torch.randperm(outputs, generator=torch.Generator().manual_seed(2))[: outputs // 2 + 1]
        assert torch.equal(store_rows(kind, raw, inputs, order).dense(), dense[order])
        if outputs % 16 == 0 and kind in CODED:
            assert stored.memory.nbytes <= 1.03 * raw.nbytes, "no more bits than in the file"


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_nearer_than_that_of_bfloat16(kind):
    product, dense = made(kind)
    x = rows(70, 512)
    want = x.double() @ dense.double().T
    off = (product(x).double() - want).norm() / want.norm()
    expanded = (x.double() @ dense.bfloat16().double().T - want).norm() / want.norm()
    # Numbers of 16 bits: 2^-16 of the largest of 32, which is twice or thrice the usual one; or of 12.
    # Instructions for bfloat16 round the rows too, as oneDNN does.
    rounds = kind == "BF16" and "avx512_bf16" in build.features()
    paired = kind in PAIRED
    assert off < (5e-4 if paired else 3e-5 if kind in CODED else 3e-3 if rounds else 2e-6)
    assert kind == "BF16" or off < expanded / (3 if paired else 50)
    half = product(x.bfloat16())
    assert half.dtype == torch.bfloat16
    near = x.bfloat16().double() @ dense.double().T
    assert ((half.double() - near).norm() / near.norm()) < 3e-3


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_feel_each_other_nor_the_threads(kind, set_threads):
    product, _ = made(kind, 80, 768, torch.randn(80))
    x = rows(133, 768)
    x[7] *= 1e4
    whole = product(x)
    apart = ctypes.c_int.in_dll(library(), "outpace_apart")  # lines for other threads go past the caches
    for first, count in [(0, n) for n in range(1, 14)] + [(7, 1), (6, 3), (60, 65), (131, 2)]:
        set_threads(1 + count % 3)
        for apart.value in (0, 1):
            assert torch.equal(product(x[first : first + count]), whole[first : first + count]), count


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize("inputs", [1, 7, 33, 40])
def test_any_number_of_inputs_can_be_multiplied(kind, inputs):
    product, dense = made(kind, 5, inputs)
    x = rows(9, inputs)
    torch.testing.assert_close(product(x), x @ dense.T, rtol=1e-2 if kind == "BF16" else 1e-4, atol=1e-2)
    wide = rows(9, inputs + 3)
    assert torch.equal(product(wide[:, :inputs]), product(wide[:, :inputs].contiguous()))


def test_parts_of_several_kinds_stand_side_by_side():
    kinds = ("Q4_K", "BF16", "Q6_K", "F32", "Q4_K")
    each = [blocks(kind, 20 + 13 * i, 256, i) for i, kind in enumerate(kinds)]
    bias, x = torch.randn(sum(len(dense) for _, dense in each)), rows(6, 256)
    parts = [store_rows(kind, raw, 256) for kind, (raw, _) in zip(kinds, each, strict=True)]
    merged = Product(parts, bias)(x)
    apart = torch.cat([Product([part], None)(x) for part in parts], 1)
    assert torch.equal(merged, apart + bias)
    dense = torch.cat([dense for _, dense in each])
    assert torch.equal(Linear.stored(parts, bias, torch.float32).dense(), dense)


@pytest.mark.parametrize("kind", sorted(CODED))
def test_sums_of_whole_numbers_are_exact(kind):
    """Also of the largest and smallest that a row is cut into."""
    raw, dense = blocks(kind, 16, 256)
    top = 1919 if kind in PAIRED else 127 * 257
    x = torch.randint(-top, top + 1, (40, 256), generator=torch.Generator().manual_seed(3)).float()
    x[:, ::32], x[0], x[1], x[2, ::2] = top, top, -top, -top
    got = Product([store_rows(kind, raw, 256)], None)(x)
    want = x.double() @ dense.double().T
    # Scales and the sum of 8 blocks are of float32: 2^-24 for each operation that the compiler does not fuse.
    assert ((got - want).norm() / want.norm()) < 5e-7


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K"])
def test_the_largest_numbers_do_not_overflow(kind):
    raw, _ = blocks(kind, 16, 256)
    if kind == "Q8_0":
        raw.view(16, -1, 34)[:, :, 2:] = 0x80  # -128, every one
    else:
        raw.view(16, -1, 18 if kind == "Q4_0" else 210)[:, :, 2 if kind == "Q4_0" else 0 : 18] = 0
    dense = torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind])).view(16, 256)
    x = torch.full((3, 256), 1e30)
    got, want = Product([store_rows(kind, raw, 256)], None)(x), x.double() @ dense.double().T
    assert ((got - want) / want.abs().max()).abs().max() < (1e-3 if kind in PAIRED else 1e-4)
    assert torch.equal(Product([store_rows(kind, raw, 256)], None)(torch.zeros(2, 256)), torch.zeros(2, 16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_do_not_vanish(kind, wrong):
    product, _ = made(kind, 16, 256)
    x = rows(3, 256)
    x[1, 100] = wrong
    got = product(x)
    assert not got[1].isfinite().any()
    assert got[[0, 2]].isfinite().all()


def test_planted_bugs_are_caught():
    """A scale of the block before, or a row's scale of the row beside it."""
    product, dense = made("Q4_1", 16, 256)
    x = rows(2, 256)
    want = x.double() @ dense.double().T
    good = (product(x) - want).norm() / want.norm()
    memory = product.parts[0].memory
    blocks_ = memory.view(-1, 320)
    blocks_[:, 256:288] = blocks_[:, 256:288].roll(1, 0).clone()
    assert (product(x) - want).norm() / want.norm() > 100 * good
    assert ctypes.sizeof(product.matrices) == 40


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3"])
def test_a_file_is_multiplied_as_it_is_stored(tmp_path, arch):
    window = {"gemma3.attention.sliding_window": 16, "gemma3.rope.freq_base": 1e6}
    make_gguf(tmp_path / "m.gguf", arch, window if arch == "gemma3" else {}, sliding_window=16)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    stored = Decoder.load(checkpoint, dtype=torch.float32, stored=True)
    expanded = Decoder.load(checkpoint, dtype=torch.float32)
    rounded = Decoder.load(checkpoint, dtype=torch.bfloat16)
    assert stored.digest == expanded.digest
    assert "multiplied as stored" in stored.note
    assert stored.weight_bytes < expanded.weight_bytes
    text = list(range(3, 40))
    logits = []
    for target in (stored, expanded, rounded):
        cache = target.new_cache()
        logits.append(target.score([Feed.chain(cache.open(), text)], cache).logits_TV.float())
    assert (logits[0] - logits[1]).norm() < 0.5 * (logits[2] - logits[1]).norm()
    keep = torch.tensor([3, 60, 17])
    feed_V = torch.full((stored.vocab_size,), -1)
    feed_V[keep] = torch.arange(3)
    hidden = rows(4, stored.hidden_size)
    assert torch.equal(stored.head(hidden, VocabMap(keep, feed_V)), stored.head(hidden)[:, keep])
    assert torch.equal(stored.embed([5, 9]), expanded.embed([5, 9]))


def test_numbers_are_laid_out_in_their_own_dtype():
    weight = rows(40, 24).bfloat16()
    assert store_numbers(weight).kind == "BF16"
    assert torch.equal(Linear(weight).dense(), weight)
