import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from outpace.analysis import roofline
from outpace.analysis.prediction.calibration import fit
from outpace.analysis.roofline import Device, Widths, op_table, parameters, seconds
from outpace.models.families import DecoderConfig
from outpace.models.tiny import tiny
from outpace.types import CostCurve

HALF = Widths(weight=2, activation=2, residual=2, cache=2)
SINGLE = Widths(weight=4, activation=4, residual=4, cache=4)
A100 = Device(name="A100 80 GB", peak=312e12, bandwidth=2039e9)
CPU = Device(name="2 cores", peak=100e9, bandwidth=20e9)


def llama(hidden, ffn, layers, heads, kv, vocab, **more):
    return DecoderConfig.from_hf(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "vocab_size": vocab,
            **more,
        }
    )


LLAMA_7B = llama(4096, 11008, 32, 32, 32, 32000)
SMALL = llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True)
GEMMA = DecoderConfig.from_hf(
    {
        "model_type": "gemma3_text",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 16,
        "sliding_window_pattern": 6,
    }
)
QWEN = DecoderConfig.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": True,
    }
)


def ops(config, **sizes):
    return {op.name: op for op in op_table(config, HALF, **sizes)}


def test_llama_7b_weighs_what_it_weighs():
    assert parameters(LLAMA_7B) == 6_738_415_616
    assert parameters(SMALL) == 134_515_008


@pytest.mark.parametrize("config", [LLAMA_7B, SMALL, GEMMA, QWEN], ids=lambda c: c.family)
def test_a_pass_reads_every_weight_once_but_an_untied_embedding(config):
    read = sum(op.count * op.weights for op in op_table(config, HALF, rows=5, batch=3))
    unread = 0 if config.tied_head else config.vocab_size * config.hidden_size
    assert read == 2 * (parameters(config) - unread)


def test_weight_bytes_of_the_own_decoder_are_those_of_its_matrices():
    target = tiny(dtype=torch.float32)
    table = op_table(target.config, Widths.of(torch.float32))
    matrices = sum(op.count * op.weights for op in table if "norm" not in op.name)
    norms = sum(op.count * op.weights for op in table if "norm" in op.name)
    assert target.weight_bytes in (matrices, matrices + norms)


def test_a_multiply_add_is_two_operations_in_the_head_too():
    table = op_table(SMALL, HALF, rows=3)
    matrices = [op for op in table if op.weights and "norm" not in op.name]
    assert {"qkv", "out", "gate, up", "down", "head"} == {op.name for op in matrices}
    for op in matrices:
        assert op.flops == 2 * 3 * op.weights / 2
    assert ops(SMALL, rows=3)["head"].moved == 3 * ops(SMALL)["head"].moved


def test_keys_are_counted_by_their_own_heads_and_read_once_per_sequence():
    one, many = ops(SMALL, context=1000)["attention"], ops(SMALL, rows=8, context=1000)["attention"]
    key_bytes = 2 * 3 * 64 * 2  # keys and values of 3 heads of 64, two bytes each
    assert one.moved == 1001 * key_bytes + 2 * 9 * 64 * 2
    assert many.moved == 1008 * key_bytes + 8 * 2 * 9 * 64 * 2
    assert ops(SMALL, context=1000, batch=4)["attention"].moved == 4 * one.moved
    assert one.flops == 1001 * 9 * (4 * 64 + 5)


def test_the_mlp_is_as_wide_as_it_is_and_a_head_width_of_its_own_counts():
    assert ops(SMALL)["activation"].flops == 2 * 1536
    assert ops(QWEN)["out"].flops == 2 * (4 * 32) * 64
    assert ops(QWEN)["qk norm"].count == 2 and "qk norm" not in ops(SMALL)


def test_a_window_bounds_what_its_layers_read():
    near, far = ops(GEMMA, context=8), ops(GEMMA, context=5000)
    assert near["attention in 16"].count == 5 and near["attention"].count == 1
    assert near["attention in 16"].moved == near["attention"].moved
    assert far["attention in 16"].moved < far["attention"].moved / 100
    assert far["attention in 16"].flops == 16 * 4 * (4 * 32 + 5)


@pytest.mark.parametrize(
    ("config", "device", "widths", "batch", "context", "want"),
    [
        (LLAMA_7B, A100, HALF, 1, 1024, {8: 1.00, 128: 1.07}),
        (LLAMA_7B, A100, HALF, 4, 1024, {16: 1.03, 64: 1.61, 128: 3.08}),
        (LLAMA_7B, A100, HALF, 64, 1024, {4: 1.19, 16: 2.60, 128: 15.8}),
        (SMALL, CPU, SINGLE, 1, 256, {8: 1.05, 16: 1.68, 64: 6.80}),
    ],
)
def test_verification_costs_what_was_predicted_before(config, device, widths, batch, context, want):
    """Against a table made by other code, which leaves rotary and residual traffic out: 6 %."""

    def cost(rows):
        return seconds(op_table(config, widths, rows=rows, context=context, batch=batch), device)

    for rows, ratio in want.items():
        assert cost(rows) / cost(1) == pytest.approx(ratio, rel=0.06)


def test_a_pass_is_bound_by_reading_below_the_ridge_and_by_arithmetic_above():
    few, many = ops(LLAMA_7B, rows=100)["down"], ops(LLAMA_7B, rows=10_000)["down"]
    assert few.seconds(A100) == (few.weights + few.moved) / A100.bandwidth
    assert many.seconds(A100) == many.flops / A100.peak
    slow = replace(A100, overhead=1e-3)
    assert few.seconds(slow) == few.seconds(A100) + 1e-3


def curve_of(config, device):
    flat = CostCurve(
        model="m",
        dtype="float32",
        threads=1,
        device="d",
        rows_R=(1, 4, 16, 64),
        context_C=(64, 1024),
        seconds_CR=((1.0,) * 4,) * 2,
        batch_B=(1, 8),
        seconds_CB=((1.0,) * 2,) * 2,
    )
    return roofline.estimated_like(table_of(config), device, flat)


def table_of(config, widths=SINGLE):
    return partial(op_table, config, widths)


def test_an_estimated_curve_holds_the_estimates():
    curve = curve_of(SMALL, CPU)
    for rows, context, batch in ((1, 64, 1), (64, 1024, 1), (1, 1024, 8)):
        ops = op_table(SMALL, SINGLE, rows=rows, context=context, batch=batch)
        assert curve.seconds(rows, context, batch) == pytest.approx(seconds(ops, CPU))
    assert curve.source == "roofline"
    half = seconds(op_table(SMALL, HALF, context=64), CPU)
    assert curve.seconds(1, 64) == pytest.approx(2 * half, rel=0.03)


def test_calibration_finds_what_a_machine_reaches_of_its_peaks():
    true = Device(name="d", peak=50e9, bandwidth=8e9, overhead=2e-5)
    curve = curve_of(SMALL, true)
    passes = [
        (op_table(SMALL, SINGLE, rows=rows, context=context), cost)
        for context, cost_R in zip(curve.context_C, curve.seconds_CR, strict=True)
        for rows, cost in zip(curve.rows_R, cost_R, strict=True)
    ]
    found = fit(passes, "d")
    guess = roofline.estimated_like(table_of(SMALL), found, curve)
    assert roofline.error(guess, curve) < 0.02
    assert found.peak == pytest.approx(true.peak, rel=0.05)
    assert found.bandwidth == pytest.approx(true.bandwidth, rel=0.05)
    assert roofline.error(roofline.estimated_like(table_of(SMALL), CPU, curve), curve) > 0.3


def test_keys_and_values_have_a_dtype_of_their_own():
    whole, half = (Widths.of(torch.bfloat16, cache) for cache in (torch.float32, torch.bfloat16))
    tables = [{op.name: op for op in op_table(SMALL, one, context=1000)} for one in (whole, half)]
    queries = 2 * 9 * 64 * 2
    assert tables[0]["attention"].moved - queries == 2 * (tables[1]["attention"].moved - queries)


def test_error_is_the_mean_relative_distance():
    truth = replace(curve_of(SMALL, CPU), batch_B=(1,), seconds_CB=())
    double = replace(truth, seconds_CR=tuple(tuple(2 * cost for cost in line) for line in truth.seconds_CR))
    assert roofline.error(double, truth) == 1 and roofline.error(truth, truth) == 0


def test_the_device_is_measured_by_work_of_known_size(monkeypatch):
    sizes = []
    monkeypatch.setattr(roofline, "_cache_bytes", lambda: 0)
    monkeypatch.setattr(
        roofline, "_seconds_of", lambda work, device, repeat: sizes.append(math.prod(work().shape)) or 0.5
    )
    found = roofline.measure_device(torch.float32, torch.device("cpu"))
    assert found.peak == 2 * 512 * 2048 * 2048 / 0.5 and found.bandwidth == (1 << 28) / 0.5
    assert sizes == [512 * 2048, 1]


def test_of_two_moments_the_better_one_counts():
    busy = replace(CPU, peak=CPU.peak / 2, bandwidth=CPU.bandwidth * 2)
    assert CPU.better(busy) == replace(CPU, bandwidth=CPU.bandwidth * 2) == busy.better(CPU)


@pytest.mark.parametrize("wrong", [{"peak": 0.0}, {"bandwidth": -1.0}, {"overhead": -1.0}])
def test_a_device_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="above 0"):
        replace(CPU, **wrong)


def test_the_cache_is_smaller_than_what_is_read():
    assert 0 <= roofline._cache_bytes() < 1 << 32
    assert roofline.machine(torch.device("cpu")).split()[-1] in ("core", "cores")
