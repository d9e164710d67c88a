"""A comparison knows when something else used the machine."""

import json
from dataclasses import replace

import pytest

from outpace.cli import runs

COMPARE = ("generate", "--ignore-eos", "--model", "tiny", "--dtype", "float32", "--raw")
COMPARE += ("--max-new-tokens", "24", "-d", "prompt_lookup", "--compare", "one two three, one two three,")


def slow(seconds, stalled=0.0):
    """Make what is timed take so long; ``stalled`` seconds of it the machine was elsewhere."""

    def change(timed):
        result = replace(timed.result, seconds=seconds, prefill_seconds=0.0)
        run = replace(timed.run, seconds=seconds, prefill_seconds=0.0, stalled_seconds=stalled)
        return replace(timed, result=result, run=run)

    return change


@pytest.fixture
def clock(monkeypatch):
    """Gives the seconds of plain and speculative runs, one after the other."""
    told = {"none": [], None: []}
    real = runs.Run.timed

    def timed(self, drafter):
        return slow(*told[drafter].pop(0))(real(self, drafter))

    monkeypatch.setattr(runs.Run, "timed", timed)
    return told


def test_pairs_that_cannot_be_are_repeated_and_left_out(outpace, clock):
    """The second plain run had less of the machine, and the third speculative one stalled."""
    clock["none"] += [(1.0,), (90.0,), (1.0,), (1.0,), (1.0,)]
    clock[None] += [(1.0,), (1.0,), (1.0, 0.9), (0.99,), (1.0,)]
    ran = outpace(*COMPARE, "--json")
    got = json.loads(ran.out)
    assert got["repeats"] == 3 and got["disturbed_pairs"] == 2
    assert got["pair_speedups"] == pytest.approx([1.0, 1 / 0.99, 1.0])
    assert got["speedup"] == pytest.approx(1.0) and got["same_tokens"] is True


def test_a_speedup_that_cannot_be_is_no_result(outpace, clock):
    clock["none"] += [(90.0,)] * 12
    clock[None] += [(1.0,)] * 12
    got = json.loads(outpace(*COMPARE, "--json").out)
    assert got["speedup"] is None and got["end_to_end_speedup"] is None
    assert got["disturbed_pairs"] == 6 and got["pair_speedups"] == [] and got["repeats"] == 0
    told = outpace(*COMPARE).err
    assert "unknown" in told and "6 pairs of runs left out: something else used the machine" in told
    assert "90." not in told
