"""tools/learning_figures.py: its stream, what it keeps, how it takes turns, and its figures."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from outpace import Engine
from outpace.bench.load import Settings
from outpace.server.app import create_app
from outpace.server.limits import Limits
from outpace.serving.service import Service
from tests.server.test_wire import listening

DRAFTER = "draft_model[model=tiny]"
_FILE = Path(__file__).parents[2] / "tools" / "learning_figures.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("learning_figures", _FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def options(out, **more):
    given = {
        "model": "tiny",
        "dtype": "float32",
        "threads": 1,
        "drafter": DRAFTER,
        "out": out,
        "workload": None,
        "requests": 6,
        "characters": 60,
        "max_new_tokens": 16,
        "block": 4,
        "guesses": None,
        "rate": None,
        "share": 0.5,
        "seed": 0,
    }
    return argparse.Namespace(**given | more)


def test_the_stream_is_seeded_and_asks_nothing_twice(tool):
    first = tool.functions(60, 100, seed=0)
    assert first == tool.functions(60, 100, seed=0) != tool.functions(60, 100, seed=1)
    assert len({*first}) == 60
    assert all(text.lstrip().startswith("def ") and len(text) <= 101 for text in first)


class Turns:
    """In the place of a process: notes who works when."""

    def __init__(self, address, name, log):
        self.address, self._name, self._log = address, name, log

    def go(self):
        self._log.append(self._name)

    def hold(self):
        self._log.append("-")


@pytest.fixture(scope="module")
def url():
    limits = Limits(grace_seconds=1)
    service = Service(Engine.load("tiny", dtype="float32", drafter="none"), drafters=(DRAFTER,))
    with service, listening(create_app(service, name="tiny", limits=limits), limits) as address:
        yield address


def test_blocks_take_turns_and_are_kept(tool, url, tmp_path, capsys):
    def measured():
        args = options(str(tmp_path))
        return tool.Measurement(args, tool.questions(args))

    log = []
    servers = {side: Turns(url, side, log) for side in ("on", "off")}
    one = measured()
    tool.run(one, servers, Settings(max_new_tokens=16), DRAFTER)
    ready = ["on", "-", "off", "-"]
    assert log == [*ready, "off", "-", "on", "-", "off", "-", "off", "-", "on", "-"]
    report = one.report()
    assert (report["blocks"], report["requests"], report["on"]["errors"]) == (2, 6, 0)
    assert report["requests_per_second"] > 0 and report["about"]["drafter"] == DRAFTER
    assert 0 < report["on"]["accepted_all"] <= report["on"]["checked_all"] <= 1
    assert report["on"]["accepted_all"] == report["off"]["accepted_all"]  # neither learns
    assert report["seconds_per_token_p50_ratio"] > 0 and "6 requests" in tool.summary(report)
    # Stopped in the middle of a line, and begun again: what is whole is not measured anew.
    file = tmp_path / "blocks.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:40])
    log.clear()
    tool.run(measured(), servers, Settings(max_new_tokens=16), DRAFTER)
    assert log == [*ready, "on", "-"] and len(file.read_text().splitlines()) == len(lines)
    assert json.loads(file.read_text().splitlines()[-1])["side"] == "on"
    assert capsys.readouterr().out.count("versions") == 4
    with pytest.raises(SystemExit, match="another measurement"):
        args = options(str(tmp_path), max_new_tokens=9)
        tool.Measurement(args, tool.questions(args))


@pytest.mark.parametrize(
    ("histogram", "checked"), [([], 0), ([3], 3), ([4, 0], 4), ([2, 1, 5], 2 + 2 * 1 + 2 * 5), ([0, 0, 1], 2)]
)
def test_a_chain_is_checked_up_to_its_first_refusal(tool, histogram, checked):
    assert tool._checked({"acceptance_histogram": histogram}) == checked


def test_nothing_drafted_is_no_share(tool):
    assert tool._share([{"drafted": 0, "checked": 0, "accepted": 0}], "accepted") is None
    assert tool._checked({}) == 0
    assert tool._checked({"acceptance_histogram": [0, 1, 1], "num_draft_tokens": 3}) == 3
