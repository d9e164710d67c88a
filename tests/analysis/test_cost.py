import json
import re
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from outpace.analysis import cost, roofline
from outpace.cache.base import KVCache
from outpace.config import MethodSpec
from outpace.engine.method import SingleMethod
from outpace.errors import RequestError
from outpace.models import measured
from outpace.models.base import Target
from outpace.models.tiny import TableCache, tiny
from outpace.types import CostCurve, Scored

CURVE = CostCurve(
    model="m",
    dtype="float32",
    threads=1,
    device="d",
    rows_R=(1, 4, 8),
    context_C=(100, 300),
    seconds_CR=((10.0, 16.0, 40.0), (20.0, 26.0, 50.0)),
    batch_B=(1, 2, 4),
    seconds_CB=((10.0, 14.0, 22.0), (20.0, 24.0, 40.0)),
)


class Paced(Target):
    """A target whose passes take known seconds of a clock that only they advance."""

    name, digest, vocab_size, hidden_size, num_layers = "paced", "d1", 50, 1, 1
    max_positions, can = 600, frozenset()
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self):
        self.time = 0.0
        self.passes = 0

    def new_cache(self, capacity: int = 0) -> KVCache:
        return TableCache()

    def price(self, rows, context, batch):
        return 1.0 + 0.5 * rows + 0.01 * context + 0.25 * (batch - 1)

    def score(self, feeds, cache, *, taps=frozenset(), layers=None):
        context = cache.length(feeds[0].slot)
        rows = sum(len(feed.token_J) for feed in feeds)
        self.passes += 1
        self.time += self.price(rows, context, len(feeds))
        for feed in feeds:
            cache.append(feed.slot, feed.token_J, feed.parent_J)
        return Scored(torch.zeros(0, 50), (0,) * (len(feeds) + 1))


@pytest.fixture
def paced(monkeypatch):
    target = Paced()
    monkeypatch.setattr(cost, "now", lambda device: target.time)
    return target


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "cache_folder", lambda: tmp_path)
    return tmp_path / "costs"


def test_a_curve_gives_back_its_points_and_is_linear_between_and_beyond():
    for c, context in enumerate(CURVE.context_C):
        for r, rows in enumerate(CURVE.rows_R):
            assert CURVE.seconds(rows, context) == pytest.approx(CURVE.seconds_CR[c][r])
        for b, batch in enumerate(CURVE.batch_B):
            assert CURVE.seconds(1, context, batch) == pytest.approx(CURVE.seconds_CB[c][b])
    assert CURVE.seconds(2.5, 100) == 13
    assert CURVE.seconds(6, 200) == 33  # 28 at context 100, 38 at 300
    assert CURVE.seconds(10, 100) == 52  # 6 per row beyond 8
    assert CURVE.seconds(1, 500) == 30 and CURVE.seconds(1, 0) == 5
    assert CURVE.ratio(4, 100) == 1.6


def test_a_batch_costs_its_rows_and_a_surcharge():
    # 2 rows of one sequence cost 12, of two sequences 14: the surcharge of the second is 2.
    assert CURVE.seconds(4, 100, 2) == CURVE.seconds(8, 100) + 2
    # At 4 sequences it is 6; between and beyond it is linear.
    assert CURVE.seconds(1, 100, 3) == CURVE.seconds(3, 100) + 4
    assert CURVE.seconds(1, 100, 6) == CURVE.seconds(6, 100) + 10
    assert CURVE.ratio(2, 100, 2) == (16 + 2) / 14
    alone = replace(CURVE, batch_B=(1,), seconds_CB=())
    assert alone.seconds(2, 100, 4) == alone.seconds(8, 100)


def test_beyond_its_points_a_curve_never_goes_downhill():
    noisy = replace(CURVE, seconds_CR=((10.0, 12.0, 11.0), (9.0, 11.0, 10.0)), seconds_CB=())
    assert noisy.seconds(100, 100) == 11 and noisy.seconds(1, 10_000) == 9
    assert noisy.seconds(6, 100) == 11.5  # between them it is as measured


def test_a_curve_survives_json():
    assert CostCurve.from_json(json.loads(json.dumps(CURVE.to_json()))) == CURVE
    with pytest.raises(KeyError):
        CostCurve.from_json({"model": "m"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows_R": (2, 4, 8)},
        {"rows_R": (1, 8, 4)},
        {"rows_R": (1, 4)},
        {"context_C": ()},
        {"context_C": (300, 100)},
        {"seconds_CR": ((10.0, 16.0, 40.0),)},
        {"seconds_CR": ((10.0, 16.0, 0.0), (20.0, 26.0, 50.0))},
        {"seconds_CR": ((10.0, 16.0, float("nan")), (20.0, 26.0, 50.0))},
        {"batch_B": (2, 4, 8)},
        {"seconds_CB": ((10.0,), (20.0,))},
        {"seconds_CB": ((10.0, 14.0, 22.0), (21.0, 24.0, 40.0))},
    ],
)
def test_what_is_no_curve_is_refused(wrong):
    with pytest.raises(ValueError, match=r"rows and batches|need 2 lines|above 0|a batch of one"):
        replace(CURVE, **wrong)


@pytest.mark.parametrize("point", [(0, 10, 1), (1, -1, 1), (1, 10, 0)])
def test_no_pass_has_less_than_a_row(point):
    with pytest.raises(ValueError, match="no pass over"):
        CURVE.seconds(*point)


def test_measure_finds_the_price_of_every_point(paced):
    curve = cost.measure(paced, rows=(4, 2), contexts=(300, 40), batches=(3,), repeat=2)
    assert (curve.rows_R, curve.context_C, curve.batch_B) == ((1, 2, 4), (40, 300), (1, 3))
    for context in (40, 300):
        for rows in (1, 2, 4):
            assert curve.seconds(rows, context) == pytest.approx(paced.price(rows, context, 1))
        assert curve.seconds(1, context, 3) == pytest.approx(paced.price(3, context, 3))
    assert (curve.model, curve.dtype, curve.source) == ("paced", "float32", "measured")
    assert curve.threads == torch.get_num_threads() and "core" in curve.device


def test_rounds_alternate_and_the_first_is_not_counted():
    seen, clock = [], count(100, -1)

    def point(name):
        seen.append(name)
        return float(next(clock))

    told = []
    points = [lambda: point("a"), lambda: point("b")]
    assert roofline.medians(points, 3, told.append) == [96, 95]
    assert seen == ["a", "b", "b", "a", "a", "b", "b", "a"] and told == [1, 1, 1, 1]


def test_contexts_that_do_not_fit_are_left_out_or_refused(paced):
    assert cost.measure(paced, rows=(1,), batches=(), repeat=1).context_C == (64, 256)
    with pytest.raises(RequestError, match=r"between 0 and 599.*got 600"):
        cost.measure(paced, rows=(1,), contexts=(600,))
    with pytest.raises(RequestError, match="rows must be at least 1, got 0"):
        cost.measure(paced, rows=(0,))
    with pytest.raises(RequestError, match="repeat must be at least 1, got 0"):
        cost.measure(paced, repeat=0)


def test_a_curve_is_measured_once_per_model_dtype_threads_machine_and_version(paced, own_folder, monkeypatch):
    assert cost.curve_for(paced, measure_if_missing=False) is None and paced.passes == 0
    curve = cost.curve_for(paced, measure_if_missing=True, repeat=1)
    assert paced.passes > 0 and len(list(own_folder.iterdir())) == 1
    paced.passes = 0
    assert cost.curve_for(paced, measure_if_missing=True) == curve and paced.passes == 0
    changes = (
        lambda m: m.setattr(paced, "digest", "d2", raising=False),
        lambda m: m.setattr(paced, "dtype", torch.bfloat16, raising=False),
        lambda m: m.setattr(measured, "machine", lambda device: "another"),
        lambda m: m.setattr(measured, "__version__", "0"),
        lambda m: m.setattr(cost.torch, "get_num_threads", lambda: 77),
    )
    for change in changes:
        with monkeypatch.context() as m:
            change(m)
            assert cost.curve_for(paced, measure_if_missing=False) is None
    assert cost.curve_for(paced, measure_if_missing=False) == curve


@pytest.mark.parametrize("harm", ["", "[]", "{", '{"key": 1, "value": {}}', "cost", "format"])
def test_a_corrupt_or_old_file_is_measured_again_with_one_note(paced, own_folder, harm, monkeypatch):
    monkeypatch.setattr(measured, "_digest", lambda value: "of whoever wrote it")
    curve = cost.curve_for(paced, measure_if_missing=True, repeat=1)
    (file,) = own_folder.iterdir()
    good = file.read_text()
    bad = {
        "cost": good.replace('"seconds_CR": [[', '"seconds_CR": [[-'),
        "format": good.replace('"format": 2', '"format": 0'),
    }.get(harm, harm)
    assert bad != good
    file.write_text(bad)
    notes = []
    assert cost.curve_for(paced, measure_if_missing=False, note=notes.append) is None
    assert len(notes) == 1 and str(file) in notes[0] and "\n" not in notes[0]
    again = cost.curve_for(paced, measure_if_missing=True, repeat=1, note=notes.append)
    assert len(notes) == 2
    assert [f.name for f in own_folder.iterdir()] == [file.name]
    assert again.seconds(4, 64) == pytest.approx(curve.seconds(4, 64))
    assert cost.curve_for(paced, measure_if_missing=False, note=notes.append) == again
    assert len(notes) == 2


def test_a_figure_that_changed_on_the_disk_is_not_believed(paced, own_folder):
    curve = cost.curve_for(paced, measure_if_missing=True, repeat=1)
    (file,) = own_folder.iterdir()
    good = file.read_text()
    notes = []
    for place in [m.start() for m in re.finditer(r"[0-9]", good)][::7]:
        flipped = chr(ord(good[place]) ^ 1)  # another digit, so that it still is JSON
        file.write_text(good[:place] + flipped + good[place + 1 :])
        # A last digit may be one that no float tells apart.
        assert cost.curve_for(paced, measure_if_missing=False, note=notes.append) in (None, curve), place
    assert any("it is damaged" in note for note in notes)
    file.write_text(good)
    assert cost.curve_for(paced, measure_if_missing=False) == curve


def test_a_folder_that_cannot_be_written_is_a_note(paced, own_folder):
    own_folder.write_text("a file where the folder should be")
    notes = []
    assert cost.curve_for(paced, measure_if_missing=True, repeat=1, note=notes.append)
    assert len(notes) == 2 and "cannot be written" in notes[1]


def test_drafters_are_timed_level_by_level():
    target = tiny()
    small = SingleMethod(MethodSpec.parse("draft_model[model=tiny layers=1 tree=chain]"), target)
    drafts = cost.measure_drafter(small, target, levels=4, repeat=3)
    assert drafts.passes_L == drafts.depth_L == (1, 2, 3, 4)  # a pass per level, none for the last
    assert all(0 < a < b for a, b in zip(drafts.pass_seconds_L, drafts.seconds_L, strict=True))
    assert drafts.per_level == drafts.seconds_L[-1] / 4
    tree = SingleMethod(MethodSpec.parse("draft_model[model=tiny tree=4x2x1]"), target)
    assert cost.measure_drafter(tree, target, repeat=1).depth_L == (1, 2, 3)
    words = SingleMethod(MethodSpec.parse("prompt_lookup"), target)
    found = cost.measure_drafter(words, target, levels=3, repeat=1)
    assert found.depth_L == (1, 2, 3) and found.passes_L == (0, 0, 0)
    assert found.pass_seconds_L == (0, 0, 0)
    nobody = SingleMethod(MethodSpec.parse("none"), target)
    assert cost.measure_drafter(nobody, target).seconds_L == ()
    assert small.drafter.cache.open() == 0  # the slot was given back


def test_drafts_are_kept_apart_from_curves(paced, own_folder):
    found = cost.DraftCost(spec="x", seconds_L=(1.0,), pass_seconds_L=(0.5,), passes_L=(1,), depth_L=(1,))
    for value in (CURVE, found):
        cost.keep(paced, value)
    assert len(list(own_folder.iterdir())) == 2
    method = SimpleNamespace(spec="x")
    assert cost.draft_cost_for(method, paced, measure_if_missing=False) == found
    method.spec = "y"
    assert cost.draft_cost_for(method, paced, measure_if_missing=False) is None


def test_the_tests_clock_is_the_one_that_is_read(paced):
    """Were passes timed by another clock, the prices above would be met by accident only."""
    paced.price = lambda rows, context, batch: 5.0
    curve = cost.measure(paced, rows=(1, 2), contexts=(10,), batches=(2,), repeat=1)
    assert curve.seconds_CR == ((5.0, 5.0),) and curve.seconds_CB == ((5.0, 5.0),)
