"""Predictions from a shape: bytes and FLOPs by hand, devices, the fit, and what a drafter gains."""

import dataclasses
import json
import math
from itertools import product

import pytest
import torch

from outpace.analysis.prediction import calibration, devices
from outpace.analysis.prediction.calibration import POINTS, Timed, calibrated, fit, misfit, ops_of
from outpace.analysis.prediction.model import planned, read, shaped
from outpace.analysis.prediction.report import gains, predicted
from outpace.analysis.prediction.speedup import SIBLING, Drafter, best_tree, chains, gain
from outpace.analysis.roofline import ATTENTION, PRODUCT, Device, seconds
from outpace.analysis.theory import emitted, plain
from outpace.drafters.trained import decoder_to_json
from outpace.errors import ModelError, RequestError, UnknownNameError
from outpace.models import measured, products
from outpace.models.families import DecoderConfig
from outpace.models.load import load_target
from outpace.models.products import store_rows, stored_bytes, works
from outpace.models.tiny import tiny

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
}
HERE = Device(name="here", peak=100e9, bandwidth=20e9, attend=80e9, traffic=15e9, overhead=1e-6, overlaps=())


@pytest.fixture
def folder(tmp_path):
    """A model that is nothing but its config."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


def by_name(ops):
    return {op.name: op for op in ops}


def test_operators_of_a_small_config_by_hand(folder):
    shape = read(str(folder), kind="cuda", dtype="float32")
    ops = by_name(shape.ops(rows=3, context=10, batch=2))
    # Heads of 16: queries 64 wide, keys and values 32 each.
    assert ops["qkv"].flops == 2 * 6 * 64 * (64 + 2 * 32)
    assert ops["qkv"].weights == 4 * 64 * 128
    assert ops["gate, up"].flops == 2 * 6 * 64 * 192 and ops["down"].weights == 4 * 96 * 64
    assert ops["head"].flops == 2 * 6 * 64 * 160 and ops["head"].weights == 4 * 64 * 160
    # Each of 2 x 3 rows meets 13 keys of 4 heads: scores and values, and 5 for the softmax.
    assert ops["attention"].flops == 2 * 4 * 3 * 13 * (4 * 16 + 5)
    # Queries in and out, then keys and values of 13 tokens of both sequences.
    assert ops["attention"].moved == 2 * 6 * 64 * 4 + 2 * 2 * 13 * 32 * 4
    assert shape.token_bytes == 2 * 2 * 2 * 16 * 4
    matrices = 2 * (64 * 128 + 64 * 64 + 2 * 64 * 96 + 96 * 64) + 64 * 160
    assert shape.weight_bytes == 4 * matrices
    # An embedding of its own, and five norms, are in memory as well.
    assert shape.resident_bytes == 4 * (matrices + 160 * 64 + 5 * 64)


def test_only_the_last_row_of_a_prompt_has_logits(folder):
    shape = read(str(folder))
    few, all_ = (by_name(shape.ops(rows=9, logits=n))["head"] for n in (1, None))
    assert 9 * few.flops == all_.flops and few.weights == all_.weights


@pytest.mark.parametrize("kind", products.KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 256), (24, 512), (7, 2304)])
@pytest.mark.skipif(not works(), reason="needs compiled code")
def test_bytes_of_a_layout_are_told_without_laying_it_out(kind, outputs, inputs):
    size = {"F32": 4 * inputs, "BF16": 2 * inputs}.get(kind)
    if size is None:
        import gguf

        block, count = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        size = inputs // block * count
    held = store_rows(kind, torch.zeros(outputs, size, dtype=torch.uint8), inputs)
    assert stored_bytes(kind, outputs, inputs) == held.nbytes


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", None), ("bfloat16", None), ("float32", "int8")])
def test_of_experts_those_are_counted_that_rows_choose(dtype, quantize):
    target = tiny(layers=3, experts=6, dtype=getattr(torch, dtype))
    target = target if quantize is None else target.quantized(quantize)
    shape = planned(target)
    assert shape.weight_bytes == target.weight_bytes and shape.form == (quantize or dtype)
    everything = sum(one.nbytes for block in target._blocks for one in block.linears)
    assert shape.weight_bytes < everything < shape.resident_bytes
    few, more, all_ = (by_name(shape.ops(rows=n)) for n in (1, 2, 1000))
    name = "experts' down"
    assert more[name].weights == pytest.approx(1.5 * few[name].weights), "half of a row's are new"
    assert all_[name].weights == pytest.approx(2 * few[name].weights), "a row goes through 3 of 6"
    assert all_[name].flops == 1000 * few[name].flops
    assert shape.cut(2).weight_bytes == target.variant(layers=[0, 1]).weight_bytes


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_bytes_are_those_of_the_loaded_model(dtype, quantize):
    target = load_target("tiny", dtype=dtype, quantize=quantize)
    shape = read("tiny", dtype=dtype, quantize=quantize)
    assert shape.weight_bytes == target.weight_bytes == planned(target).weight_bytes
    assert planned(target).form == shape.form == (quantize or dtype)


def test_the_embedded_model_is_told_from_its_header():
    shape = read("smollm2-135m")
    target = load_target("smollm2-135m")
    assert shape.weight_bytes == target.weight_bytes and planned(target).held == shape.held
    cache = target.new_cache(8)
    slot = cache.open()
    cache.append(slot, [0], (-1,))
    slots, rows = cache.room
    assert cache.nbytes == slots * rows * shape.token_bytes
    if works():
        assert shape.form == "stored" and shape.weight_bytes < target.vocab_size * target.hidden_size * 5
    # One whose weights are expanded is another: 135 million numbers.
    assert read("smollm2-135m", dtype="float32").weight_bytes == 4 * 134_479_872


def test_a_gpu_expands_weights_unless_told_otherwise():
    auto, stored = (read("smollm2-135m", kind="cuda", dtype=dtype) for dtype in ("auto", "stored"))
    assert auto.form == "bfloat16" and auto.cache == "float32"
    assert stored.weight_bytes < auto.weight_bytes / 2.5
    narrow = read("smollm2-135m", kind="cuda", cache="int8")
    assert 4 * narrow.token_bytes == auto.token_bytes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"cache": "float64"}, "unknown KV cache dtype 'float64'"),
        ({"quantize": "int3"}, "unknown quantization 'int3'"),
        ({"quantize": "int8", "kind": "cuda"}, "works on the CPU, not on cuda"),
        ({"dtype": "stored"}, "holds no quantized weights"),
    ],
)
def test_forms_that_cannot_be_are_refused(folder, settings, said):
    with pytest.raises((ModelError, UnknownNameError), match=said):
        read(str(folder), **settings)


def test_models_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ModelError, match="no such file or folder"):
        read(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "olmoe"}))
    with pytest.raises(ModelError, match="architecture 'olmoe' is not supported"):
        read(str(tmp_path))
    with pytest.raises(UnknownNameError, match="did you mean smollm2-135m"):
        read("smollm2-135")


def test_a_trained_drafter_is_a_decoder_with_the_head_of_its_vocabulary(tmp_path):
    config = DecoderConfig.from_hf(CONFIG)
    said = {"decoder": decoder_to_json(config), "draft_vocab_size": 40, "target_digest": "x", "taps": []}
    (tmp_path / "config.json").write_text(json.dumps(said))
    shape = read(str(tmp_path))
    assert shape.config.vocab_size == 40 and shape.form == "int8"
    assert shape.held == shaped("d", decoder_to_json(shape.config), quantize="int8").held
    (tmp_path / "config.json").write_text(json.dumps(said | {"taps": ["hidden.1"]}))
    with pytest.raises(ModelError, match="give --drafter-cost"):
        read(str(tmp_path))


def test_more_of_anything_takes_longer(folder):
    shape = read(str(folder), kind="cuda")
    for device in (HERE, dataclasses.replace(HERE, overlaps=(PRODUCT, ATTENTION))):

        def over(rows, context, batch, device=device):
            return shape.seconds(device, rows=rows, context=context, batch=batch)

        for rows, context, batch in product((1, 2, 5, 33), (0, 7, 300), (1, 2, 8)):
            now = over(rows, context, batch)
            assert over(rows + 1, context, batch) >= now
            assert over(rows, context + 50, batch) > now
            assert over(rows, context, batch + 1) > now


def test_records_of_devices_have_their_sources():
    for name, one in devices.known().items():
        assert one.source and one.memory and one.kind in ("cuda", "metal"), name
        assert one.device("bfloat16").peak >= one.device("float32").peak


def test_a_device_of_a_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps({"title": "mine", "kind": "cpu", "peak": {"float32": 1e11}, "bandwidth": 2e10})
    )
    found = devices.find(str(file))
    assert found.name == "mine" and found.device("float32").peak == 1e11
    with pytest.raises(RequestError, match="no peak for bfloat16; it has float32"):
        found.device("bfloat16")


GOOD = {"title": "t", "kind": "cuda", "peak": {"bfloat16": 1e12}, "bandwidth": 1e12}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bandwidth": 0}, "bandwidth must be a number above 0"),
        ({"bandwidth": "fast"}, "bandwidth must be a number above 0, got 'fast'"),
        ({"bandwidth": True}, "bandwidth must be a number"),
        ({"peak": {}}, "peak must give FLOP/s by dtype"),
        ({"peak": {"bfloat16": -1}}, "bfloat16 must be a number above 0"),
        ({"kind": "tpu"}, "kind must be cpu, cuda or metal"),
        ({"speed": 1}, "a device needs title"),
        ({"overlaps": ["norm"]}, "overlaps must name some of"),
        ({"title": 7}, "title must be text"),
    ],
)
def test_a_record_that_cannot_be_is_refused(change, said):
    with pytest.raises(RequestError, match=said):
        devices.read_record("x", GOOD | change)


def test_a_device_that_nobody_knows(tmp_path):
    with pytest.raises(UnknownNameError, match="cpu-here"):
        devices.find("b200")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(RequestError, match="cannot be read as JSON"):
        devices.find(str(tmp_path / "x.json"))


TRUE = [
    HERE,
    Device(name="t", peak=50e9, bandwidth=8e9, attend=50e9, traffic=8e9, overhead=2e-6),
    Device(
        name="t",
        peak=90e9,
        bandwidth=25e9,
        attend=70e9,
        traffic=9e9,
        widen=30e9,
        tile=8,
        overhead=1e-6,
        overlaps=(PRODUCT,),
    ),
]


@pytest.mark.parametrize("true", TRUE, ids=["sum", "overlap", "quantized"])
def test_the_fit_finds_the_device_that_made_the_times(true):
    """From seven passes; then passes of other sizes are right as well."""
    shape = read("smollm2-135m", dtype="auto" if true.widen else "bfloat16")
    if true.widen and shape.form != "stored":
        pytest.skip("needs compiled code")

    passes = [(ops_of(shape, point), seconds(ops_of(shape, point), true)) for point in POINTS]
    found = fit(passes, "t")
    assert misfit(passes, found) < 0.015 and (true.widen or found.overlaps == true.overlaps)
    for rows, context, batch in product((1, 3, 20), (16, 2000), (1, 5)):
        ops = shape.ops(rows=rows, context=context, batch=batch)
        assert seconds(ops, found) == pytest.approx(seconds(ops, true), rel=0.1)


def test_noise_in_seven_passes_stays_noise():
    shape = read("smollm2-135m", dtype="bfloat16")
    passes = []
    for point, noise in zip(POINTS, (1.05, 0.96, 1.04, 0.97, 1.03, 0.95, 1.02), strict=True):
        ops = ops_of(shape, point)
        passes.append((ops, noise * seconds(ops, HERE)))
    found = fit(passes, "t")
    assert misfit(passes, found) < 0.05
    ops = shape.ops(rows=6, context=500)
    assert seconds(ops, found) == pytest.approx(seconds(ops, HERE), rel=0.1)


@pytest.fixture
def cached(monkeypatch, tmp_path):
    monkeypatch.setattr(measured, "cache_folder", lambda: tmp_path)
    shape, calls = read("tiny", dtype="float32"), []

    def times(target, points):
        calls.append(target)
        spent = [seconds(ops_of(shape, point), HERE) for point in points]
        return Timed(model="tiny", passes=tuple(zip(points, spent, strict=True)), host=1e-4)

    monkeypatch.setattr(calibration, "time_passes", times)
    notes = []

    def get(**more):
        return calibrated(shape, lambda: "target", model="tiny", note=notes.append, **more)

    return get, calls, notes, tmp_path


def test_a_calibration_is_timed_once_and_kept(cached):
    get, calls, notes, folder = cached
    first = get()
    again = get()
    assert first.fresh and not again.fresh and calls == ["target"] and not notes
    assert again.device == first.device and first.misfit < 0.01
    assert get(fresh=True).fresh and len(calls) == 2
    assert len(list((folder / "costs").iterdir())) == 1


@pytest.mark.parametrize("harm", ["version", "threads", "times", "points", "cut"])
def test_a_calibration_that_does_not_fit_is_not_used(cached, monkeypatch, harm):
    get, calls, notes, folder = cached
    get()
    (file,) = (folder / "costs").iterdir()
    kept = json.loads(file.read_text())
    if harm == "threads":
        kept["key"]["threads"] += 1
    if harm == "version":
        monkeypatch.setattr(calibration, "__version__", "another")
    if harm == "times":
        kept["value"]["passes"][0][1] = -1.0
    if harm == "points":
        kept["value"]["passes"][0][0]["rows"] = 2
    file.write_text(json.dumps(kept)[: 40 if harm == "cut" else None])
    assert get().fresh and len(calls) == 2
    assert bool(notes) == (harm != "version")


def test_passes_of_a_model_are_timed():
    target = tiny(dtype=torch.float32)
    points = [
        calibration.Point(1, 8),
        calibration.Point(3, 0),
        calibration.Point(2, 8, 3),
        calibration.Point(1, 4, layers=1),
    ]
    found = calibration.time_passes(target, points, repeat=1)
    assert [point for point, _ in found.passes] == points and 0 < found.host < 1
    assert all(0 < spent < 10 for _, spent in found.passes)


# ---- Drafters ----


def linear(rows):
    return 1 + 0.05 * (rows - 1)


@pytest.mark.parametrize(("a", "c"), list(product((0.0, 0.3, 0.7, 1.0), (0.0, 0.07, 0.5))))
def test_chains_of_one_acceptance_are_the_closed_form(a, c):
    for one in chains(Drafter(acceptance=(a,), cost=c), lambda rows: 1.0):
        n = len(one.parents)
        assert one.emitted == pytest.approx(emitted(a, n))
        assert one.speedup == pytest.approx(plain(a, n, c))


def test_acceptance_by_depth_goes_on_with_the_last():
    one = gain(Drafter(acceptance=(0.8, 0.5), cost=0.1), linear, (-1, 0, 1))
    assert one.emitted == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert one.cost == pytest.approx(1.15 + 0.3) and one.levels == 3


def test_siblings_take_a_share_of_what_is_left():
    drafter = Drafter(acceptance=(0.6, 0.5), cost=0.0, sibling=0.25)
    one = gain(drafter, linear, (-1, -1, -1, 1))
    second = 0.25 * 0.4
    assert one.emitted == pytest.approx(1 + 0.6 + second + 0.25 * (0.4 - second) + second * 0.5)
    assert gain(dataclasses.replace(drafter, sibling=0.0), linear, (-1, -1)).emitted == pytest.approx(1.6)


def trees(nodes):
    for count in range(nodes + 1):
        yield from product(*(range(-1, node) for node in range(count)))


@pytest.mark.parametrize("acceptance", [(0.7,), (0.6, 0.9), (0.3, 0.2), (0.95, 0.9, 0.4)])
@pytest.mark.parametrize("cost", [0.0, 0.2])
def test_the_best_tree_is_the_best_of_all_small_trees(acceptance, cost, monkeypatch):
    monkeypatch.setattr("outpace.analysis.prediction.speedup.LARGEST", 5)
    drafter = Drafter(acceptance=acceptance, cost=cost)
    best = max(gain(drafter, linear, parents).speedup for parents in trees(5))
    assert best_tree(drafter, linear).speedup == pytest.approx(best, rel=1e-9)


def test_no_draft_is_best_where_none_pays():
    found = gains(Drafter(acceptance=(0.1,), cost=0.5), linear)
    assert found["best_chain"]["guesses"] == found["best_tree"]["guesses"] == 0
    assert found["best_chain"]["speedup"] == 1.0 and found["break_even_cost"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "wrong", [{"acceptance": ()}, {"acceptance": (1.2,)}, {"cost": -1.0}, {"sibling": 2.0}]
)
def test_a_drafter_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        Drafter(**({"acceptance": (0.5,), "cost": 0.1} | wrong))


def test_better_drafters_gain_more():
    def best(a, c, s=SIBLING):
        drafter = Drafter(acceptance=(a,), cost=c, sibling=s)
        return max(one.speedup for one in chains(drafter, linear)), best_tree(drafter, linear).speedup

    for a, c in product((0.2, 0.5, 0.8), (0.0, 0.1, 0.4)):
        chain, tree = best(a, c)
        assert tree >= chain - 1e-9
        assert best(a + 0.1, c)[0] >= chain and best(a, c + 0.05)[0] <= chain
        assert best(a, c, 0.4)[1] >= tree - 1e-9


def test_the_report_adds_up(folder):
    shape, record = read(str(folder), kind="cuda"), devices.find("a100")
    report = predicted(
        shape, record.device("bfloat16"), record, None, prompt=40, context=50, batch=3, rows=(1, 4)
    )
    for phase in (report["prefill"], report["decode"]):
        assert math.fsum(one["seconds"] for one in phase["operators"]) == pytest.approx(phase["seconds"])
    assert report["decode"]["seconds"] == report["verify"]["pass_seconds"][0]
    memory = report["memory"]
    assert memory["kv_bytes"] == shape.token_bytes * 54 * 3
    assert memory["room_for"] == (80e9 - memory["resident_bytes"]) // (shape.token_bytes * 54)
    assert {one["bound"] for one in report["decode"]["operators"]} == {"reading"}
