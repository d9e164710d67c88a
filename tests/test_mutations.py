"""Damaged files end in one line; 300 of them here, any number by `python -m tests.mutations`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.errors import OutpaceError
from outpace.files import parse_json

ROOT = Path(__file__).parents[1]


def test_every_damaged_file_is_answered_in_one_line():
    command = [sys.executable, "-m", "tests.mutations", "--files", "300"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_an_error_is_cut_and_keeps_its_ends():
    said = str(OutpaceError("start " + "x" * 10**7 + " end"))
    assert len(said) < 2000 and said.startswith("start x") and said.endswith("x end")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 70 + "1" + "}" * 70, '"\\ud800"', "9" * 60])
def test_json_beyond_bounds_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)
    assert parse_json('[{"a": 1e400}, "\\ud83d\\ude00"]')[1] == "\U0001f600"
