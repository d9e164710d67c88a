"""Rounded weights: what the products are, that rows stay bit-equal, and whose drafter fits."""

import random

import pytest
import torch

from outpace import Engine
from outpace.errors import ModelError, UnknownNameError
from outpace.models import quantize
from outpace.models.decoder import Decoder
from outpace.models.load import load_target
from outpace.models.products import works
from outpace.models.weights import SafetensorsCheckpoint
from outpace.types import Draft, Feed, VocabMap
from tests.models.making import save_hf
from tests.models.test_decoder import sums_are_ordered

DTYPES = [torch.float32, torch.bfloat16]
STEPS = {"int8": 127, "int4": 7.5}
"""Half the whole numbers between the smallest and the largest weight of a scale."""
WIDE = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "head_dim": 16,
    "intermediate_size": 64,
    "initializer_range": 0.3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_hf(path, "llama", **WIDE)
    return path


def problem(dtype, rows, outputs, inputs):
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (rows, outputs))
    return x.to(dtype), weight.to(dtype), torch.randn(outputs, generator=generator).to(dtype)


def tokens(count, seed=0):
    generator = random.Random(seed)
    return [generator.randrange(96) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", quantize.KINDS)
@pytest.mark.parametrize("outputs", [96, 50])
def test_a_product_is_that_of_the_rounded_matrix(dtype, kind, outputs):
    x, weight, bias = problem(dtype, 5, outputs, 64)
    rounded = quantize.quantized(weight, bias, kind)
    assert rounded.product is not None or not works()
    dense = rounded.dense()
    want = x.double() @ dense.double().T + bias.double()
    # Rows are rounded to 16 bits, for int4 to 12, or to the dtype, over 64 terms of size 1.
    slack = 0.15 if dtype is torch.bfloat16 else {"int8": 1e-3, "int4": 1e-2}[kind]
    assert (rounded(x).double() - want).abs().max() < slack
    # No weight moved by more than half a step (int4: a whole one, at the ends of its range).
    groups = weight.float().view(outputs, -1, quantize.BLOCK)
    step = groups.abs().amax(-1, keepdim=True) / STEPS[kind]
    moved = (dense.float().view_as(groups) - groups).abs() / step
    assert 0.2 < moved.max() < 1.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", quantize.KINDS)
def test_a_row_does_not_feel_the_others(dtype, kind):
    x, weight, bias = problem(dtype, 33, 96, 576)
    rounded = quantize.quantized(weight, bias, kind)
    whole = rounded(x)
    for rows in range(1, 33):
        assert torch.equal(rounded(x[:rows]), whole[:rows]), rows
        assert torch.equal(rounded(x[rows : rows + 1]), whole[rows : rows + 1]), rows


@pytest.mark.parametrize("kind", quantize.KINDS)
def test_portions_are_rounded_as_the_whole(kind, monkeypatch):
    _, weight, _ = problem(torch.bfloat16, 1, 288, 64)
    whole = quantize.quantized(weight, None, kind)
    monkeypatch.setattr(quantize, "_PORTION", 128)
    parts = quantize.quantized(weight, None, kind)
    assert torch.equal(parts.dense(), whole.dense())
    assert parts.nbytes == whole.nbytes


@pytest.mark.skipif(not works(), reason="code cannot be compiled here")
def test_bytes_are_counted_as_they_lie():
    _, weight, bias = problem(torch.bfloat16, 1, 96, 64)
    # A scale of two bytes for every 32, and as much for a least value; and the bias.
    assert quantize.quantized(weight, bias, "int8").nbytes == 96 * 64 + 96 * 2 * 2 + 2 * 96
    assert quantize.quantized(weight, bias, "int4").nbytes == 96 * 64 // 2 + 96 * 2 * 4 + 2 * 96


@pytest.mark.parametrize("kind", quantize.KINDS)
def test_blocks_that_are_not_full_are_filled_up(kind):
    x, weight, bias = problem(torch.float32, 4, 24, 40)
    rounded = quantize.quantized(weight + 5, bias, kind)
    want = x.double() @ rounded.dense().double().T + bias.double()
    assert (rounded(x).double() - want).abs().max() < {"int8": 0.01, "int4": 0.1}[kind]
    step = 2 * (weight + 5).abs().max() / 15
    assert ((rounded.dense() - weight - 5).abs() < step).all()
    same = torch.full((16, 64), 0.25)
    assert torch.equal(quantize.quantized(same, None, "int4").dense(), same), "no range to divide by"
    assert not quantize.quantized(torch.zeros(16, 64), None, kind).dense().any()


@pytest.mark.parametrize("kind", quantize.KINDS)
def test_what_cannot_be_compiled_is_expanded(kind, monkeypatch):
    _, weight, bias = problem(torch.float32, 5, 48, 64)
    stored = quantize.quantized(weight, bias, kind)
    monkeypatch.setattr(quantize, "works", lambda: False)
    expanded = quantize.quantized(weight, bias, kind)
    assert torch.equal(expanded.dense(), stored.dense())
    assert expanded.nbytes == expanded.plain_nbytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", quantize.KINDS)
def test_rows_of_a_decoder_are_bit_equal_however_they_are_fed(folder, dtype, kind):
    """One by one, among 4 and 16, in a chain, in a tree, beside another sequence."""
    if not sums_are_ordered():
        pytest.skip("matrix products of this machine do not add up their terms in order")
    decoder = Decoder.load(SafetensorsCheckpoint(folder), dtype=dtype, quantize=kind)
    for base in (3, 120):
        cache = decoder.new_cache()
        for slot in range(3):
            decoder.score([Feed.chain(cache.open(), tokens(base))], cache)
            cache.keep(slot, range(base))
        generator = random.Random(base)
        parents = [generator.randrange(-1, i) for i in range(15)]
        draft = Draft.chosen(generator.sample(range(96), 15), parents)
        tree = decoder.score([Feed.tree(0, 7, draft), Feed.chain(2, [1, 2])], cache).of(0)
        cache.drop(0)
        cache.drop(2)
        for node in set(range(15)) - set(parents):
            chain = [7, *draft.path_tokens(node)]
            ones = []
            for token in chain:
                ones.append(decoder.score([Feed.chain(1, [token])], cache).logits_TV)
                cache.keep(1, [0])
            cache.truncate(1, base)
            whole = decoder.score([Feed.chain(0, [*chain, *tokens(16 - len(chain))])], cache)
            cache.drop(0)
            assert torch.equal(whole.logits_TV[: len(chain)], torch.cat(ones))
            assert torch.equal(tree.logits_TV[[0, *(i + 1 for i in draft.path(node))]], torch.cat(ones))


@pytest.mark.parametrize("kind", quantize.KINDS)
def test_the_rounded_model_is_a_model_of_its_own(folder, kind):
    plain = load_target(folder, dtype="bfloat16")
    rounded = load_target(folder, dtype="bfloat16", quantize=kind)
    assert rounded.quantize == kind
    assert plain.quantize is None
    assert rounded.digest != plain.digest
    assert rounded.digest == plain.quantized(kind).digest
    assert rounded.name == f"{plain.name}[{kind}]"
    assert rounded.dtype == plain.dtype
    linears = [rounded._ends.head, *(one for b in rounded._blocks for one in b.linears)]
    assert rounded.weight_bytes == sum(one.nbytes for one in linears) < 0.6 * plain.weight_bytes
    before, after = plain.weight_bytes / 1e6, rounded.weight_bytes / 1e6
    assert f"{before:,.1f} MB of bfloat16 before, {after:,.1f} MB after" in rounded.note
    assert "\n" not in rounded.note
    part = rounded.variant(layers=[0])
    assert part.quantize == kind
    assert rounded.digest in part.digest
    text = tokens(40)
    logits = {}
    for target in (plain, rounded):
        cache = target.new_cache()
        logits[target] = target.score([Feed.chain(cache.open(), text)], cache).logits_TV
    off = (logits[rounded] - logits[plain]).std() / logits[plain].std()
    # Unrelated logits would be off by 1.4; random weights as large as these magnify roundings.
    assert 0.01 < off < {"int8": 0.3, "int4": 0.9}[kind]


@pytest.mark.parametrize("kind", quantize.KINDS)
def test_the_head_learns_and_unembeds_a_part_of_the_vocabulary(folder, kind):
    decoder = load_target(folder, dtype="float32", quantize=kind)
    hidden = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    whole, keep = decoder.head(hidden), torch.tensor([3, 90, 17])
    feed_V = torch.full((96,), -1)
    feed_V[keep] = torch.arange(3)
    # The same rounded matrix, in another product.
    close = {"int8": {"rtol": 1e-3, "atol": 1e-3}, "int4": {"rtol": 1e-2, "atol": 1e-2}}[kind]
    torch.testing.assert_close(decoder.head(hidden, VocabMap(keep, feed_V)), whole[:, keep], **close)
    learner = hidden.clone().requires_grad_()
    logits = decoder.head(learner)
    torch.testing.assert_close(logits.detach(), whole, **close)
    logits.sum().backward()
    assert learner.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", quantize.KINDS)
def test_greedy_text_is_the_same_with_any_drafter(kind):
    engine = Engine.load("tiny", quantize=kind)
    more = {"max_new_tokens": 40, "ignore_eos": True}
    prompts = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42, 43]]
    plain = engine.generate(prompts, drafter="none", **more)
    for drafter in ("prompt_lookup", "draft_model[model=tiny layers=1 tree=3x2x1]"):
        drafted = engine.generate(prompts, drafter=drafter, **more)
        assert [one.tokens for one in drafted] == [one.tokens for one in plain], drafter
    exact = Engine.load("tiny").generate(prompts, drafter="none", **more)
    assert [one.tokens for one in exact] != [one.tokens for one in plain]


def test_what_cannot_be_rounded_is_refused_in_one_line(folder):
    with pytest.raises(UnknownNameError, match="did you mean int8"):
        load_target(folder, quantize="int88")
    with pytest.raises(ModelError, match="works on the CPU, not on meta"):
        Decoder.load(SafetensorsCheckpoint(folder), device="meta", quantize="int8")
    with pytest.raises(ModelError, match="works with the own decoder"):
        load_target(folder, backend="hf", quantize="int8")
    target = load_target("tiny")
    with pytest.raises(ModelError, match="in memory and not rounded to 'int4'"):
        load_target(target, quantize="int4")
    assert load_target(target.quantized("int4"), quantize="int4").quantize == "int4"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_passes_that_begin_above_the_embedding_see_the_vectors_that_others_do(tmp_path, kind):
    save_hf(tmp_path, "llama", **{**WIDE, "tie_word_embeddings": True, "num_hidden_layers": 2})
    engine = Engine.load(tmp_path, drafter="none", dtype="float32", quantize=kind)
    prompts = [[(i * j) % 90 + 2 for j in range(1, 9)] for i in range(1, 13)]
    settings = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.0}
    want = [result.tokens for result in engine.generate(prompts, **settings)]
    for drafter in ("early_exit[layer=1]", "early_exit[layer=1 tree=3x2x1]"):
        got = [result.tokens for result in engine.generate(prompts, drafter=drafter, **settings)]
        assert got == want, drafter
