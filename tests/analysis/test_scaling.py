"""Scaling laws: recovered from made points, sure of what they know, and refused where nothing tells."""

import json
import math
import random

import pytest
import torch

from outpace.analysis.planner import Candidate, plan
from outpace.analysis.prediction import model
from outpace.analysis.prediction.model import read, shaped
from outpace.analysis.roofline import Device
from outpace.analysis.scaling import Bridge, Law, Point, bridge, fit, fitted, read_points
from outpace.drafters.trained import decoder_to_json
from outpace.errors import RequestError

# The law that its authors' C4 runs give, and their smallest sizes.
TRUE = Law(floor=1.508, by_weights=113.7, by_tokens=189.5 * 6**-0.12125, power=0.2425)
SIZES = (10.6e6, 78.9e6, 153.7e6, 411.6e6)


def made(noise=0.0, seed=0):
    """Points of the law: all sizes at 20 tokens per weight, the smallest at 320 as well, and some more."""
    draw = random.Random(seed)
    pairs = [(n, 20 * n) for n in SIZES] + [(SIZES[0], 320 * SIZES[0]), (SIZES[1], 80 * SIZES[1])]
    return [Point(weights=n, tokens=d, loss=TRUE.loss(n, d) * (1 + draw.gauss(0, noise))) for n, d in pairs]


def test_numbers_of_a_law_are_recovered():
    found = fit(made())
    assert found.power == pytest.approx(TRUE.power, rel=1e-3)
    assert found.floor == pytest.approx(TRUE.floor, rel=1e-3)
    assert found.by_weights == pytest.approx(TRUE.by_weights, rel=0.02)
    assert found.by_tokens == pytest.approx(TRUE.by_tokens, rel=0.02)


def test_both_forms_of_the_law_are_one():
    told = TRUE.to_json()
    for n, m in ((1e7, 5), (4e8, 640)):
        point = Point(weights=n, tokens=m * n, loss=1.0)
        assert point.per_weight == m and point.flops == 6 * n * n * m
        h = told["h"]
        by_compute = told["floor"] + (told["a"] * m**h + told["b"] * m**-h) * point.flops**-h
        assert by_compute == pytest.approx(TRUE.loss(n, m * n))
    assert told["b"] == pytest.approx(189.5) and told["a"] == pytest.approx(113.7 * 6**0.12125)


def test_a_larger_model_on_more_tokens_is_predicted_from_small_ones():
    found = fitted(made(noise=0.003), samples=60)
    large = (1.4e9, 1.4e9 * 320)
    assert found.law.loss(*large) == pytest.approx(TRUE.loss(*large), rel=0.05)
    low, high = found.interval(lambda law: law.loss(*large))
    assert low < TRUE.loss(*large) < high and high - low < 0.6
    assert 0 < found.error < 0.05


def test_more_noise_makes_wider_intervals_and_larger_errors():
    wide, narrow = (fitted(made(noise), samples=60) for noise in (0.01, 0.001))

    def reach(found):
        low, high = found.interval(lambda law: law.loss(1e9, 1e11))
        return high - low

    assert reach(wide) > 3 * reach(narrow) and wide.error > 3 * narrow.error


def test_no_number_of_a_law_is_negative():
    """Points whose loss does not depend on weights, and falls to nothing."""
    points = [Point(weights=n, tokens=d, loss=3e4 / d) for n in (1e6, 2e6) for d in (1e4, 3e4, 1e5)]
    found = fit(points)
    assert min(found.floor, found.by_weights, found.by_tokens) >= 0
    assert found.loss(1e6, 2e5) == pytest.approx(0.15, rel=0.05)


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (made()[:4], "needs 5 points or more, got 4"),
        ([Point(weights=1e6, tokens=d, loss=1.0) for d in (1, 2, 3, 4, 5)], "same weights"),
        ([Point(weights=n, tokens=1e6, loss=1.0) for n in (1, 2, 3, 4, 5)], "same tokens"),
    ],
)
def test_points_that_determine_no_law_are_refused(points, said):
    with pytest.raises(RequestError, match=said):
        fitted(points)


def test_acceptance_is_a_power_of_loss():
    true = Bridge(k=0.3, v=0.7, deeper=(1.0, 0.8))
    points = [
        Point(weights=1, tokens=1, loss=loss, acceptance=true.acceptance(loss)) for loss in (0.2, 0.9, 2.0)
    ]
    found = bridge(points)
    assert (found.k, found.v) == pytest.approx((0.3, 0.7)) and found.deeper == pytest.approx((1.0, 0.8))
    assert found.acceptance(0.0) == pytest.approx((1.0, 0.8)) and found.acceptance(1e9) == (0.0, 0.0)
    with pytest.raises(RequestError, match="three points or more"):
        bridge(points[:2])


def test_points_are_read_from_csv_and_json(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("Params,tokens,loss,note\n1e6,2e7,3.5,x\n2e6,4e7,3.1,y\n")
    want = [Point(weights=1e6, tokens=2e7, loss=3.5), Point(weights=2e6, tokens=4e7, loss=3.1)]
    assert read_points(table) == want
    rows = [{"N": 1e6, "D": 2e7, "loss": 3.5, "acceptance": [0.5, 0.25]}]
    file = tmp_path / "a.json"
    for content in (rows, {"points": rows}):
        file.write_text(json.dumps(content))
        assert read_points(file)[0].acceptance == (0.5, 0.25)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "", "holds no points"),
        ("a.csv", "weights,tokens\n1,2\n", "point 1: loss must be a number above 0, got None"),
        ("a.csv", "weights,tokens,loss\n1,many,3\n", "point 1: tokens must be a number above 0, got 'many'"),
        ("a.json", '[{"weights":1,"tokens":2,"loss":-1}]', "loss must be a number above 0, got -1"),
        ("a.json", "[1]", "point 1 is no object"),
        ("a.json", "[", "is not JSON"),
        ("a.json", '[{"weights":1,"tokens":2,"loss":1,"acceptance":[2]}]', "acceptance must be shares"),
    ],
)
def test_points_that_cannot_be_are_refused(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=said):
        read_points(tmp_path / name)


def test_a_plan_takes_the_size_that_pays(monkeypatch):
    """A device on which drafting costs nothing takes the largest size; a dear one a smaller one."""
    monkeypatch.setattr(model, "_fast", lambda kind: torch.bfloat16)  # on any processor
    target = read("smollm2-135m", dtype="bfloat16")
    sizes = {layers: decoder_to_json(target.cut(layers).config) for layers in (1, 4, 16)}
    candidates = [
        Candidate(weights=layers * 3.5e6, shape=shaped(f"{layers}", shape)) for layers, shape in sizes.items()
    ]
    law = Law(floor=0.05, by_weights=200.0, by_tokens=200.0, power=0.4)
    points = [Point(weights=n, tokens=d, loss=law.loss(n, d)) for n in (1e6, 1e7, 1e8) for d in (1e6, 1e8)]
    found = fitted(points, samples=20)
    across = Bridge(k=0.5, v=0.5, deeper=(1.0,))
    slow = Device(name="slow", peak=100e9, bandwidth=20e9, overlaps=())
    settings = {"context": 100, "host": 1e-4}
    choices = plan(found, across, candidates, (1e6, 1e9), target, slow, **settings)
    assert choices == sorted(choices, key=lambda one: -one.speedup) and len(choices) == 6
    for one in choices:
        low, high = one.loss_interval
        assert low <= one.loss <= high and math.isclose(
            one.loss, law.loss(one.weights, one.tokens), rel_tol=0.02
        )
    by_size = {(one.weights, one.tokens): one for one in choices}
    large, small = (max(candidates, key=lambda c: c.weights), min(candidates, key=lambda c: c.weights))
    assert by_size[large.weights, 1e9].acceptance > by_size[small.weights, 1e9].acceptance
    assert by_size[large.weights, 1e9].cost > 2 * by_size[small.weights, 1e9].cost
    assert choices[0].tokens == 1e9 and choices[0].weights < large.weights
