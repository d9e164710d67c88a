"""The package without its methods: the engine, the service and the commands know none by name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALONE = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f)]\n"
"""An editable install would find the folder that is missing."""
SERVE = """
import json, threading, urllib.request
from outpace import Engine
from outpace.cli.serve import with_reference
from outpace.server.app import create_app
from outpace.server.limits import Limits
from outpace.serving.service import Service
from tests.server.test_wire import listening

drafters = tuple(with_reference(["auto", "none"]))
with Service(Engine.load("tiny", drafter="none"), drafters=drafters) as service:
    with listening(create_app(service, name="tiny"), Limits(grace_seconds=1)) as url:
        body = json.dumps({"model": "tiny", "prompt": "ab", "max_tokens": 4}).encode()
        head = {"content-type": "application/json"}
        asked = urllib.request.Request(f"{url}/v1/completions", body, head)
        answer = urllib.request.urlopen(asked, timeout=60)
        print(json.load(answer)["usage"]["completion_tokens"])
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Runs code on a copy of the package that has no `outpace/methods`."""
    home = tmp_path_factory.mktemp("bare")
    shutil.copytree(
        ROOT / "outpace",
        home / "outpace",
        ignore=lambda folder, names: {"methods", "weights", "__pycache__"} & set(names),
    )
    (home / "tests").symlink_to(ROOT / "tests")
    environment = {**os.environ, "PYTHONPATH": str(home), "OUTPACE_DATA": str(home / "data")}

    def run(code):
        command = [sys.executable, "-c", ALONE + code]
        ran = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return run


def test_no_method_is_there(bare):
    said = bare("from outpace import registry; print(*[e.path for e in registry.entries('drafter')])")
    assert not [path for path in said.split() if path.startswith("outpace.methods")]


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--max-new-tokens", "4", "--raw", "--ignore-eos", "ab"],
        ["bench", "--drafters", "none", "--limit", "1", "--max-new-tokens", "4"],
        ["check", "--prompts", "1", "--max-new-tokens", "4"],
    ],
    ids=lambda command: command[0],
)
def test_commands_run(bare, command):
    """The enumeration of verifiers, which knows no drafter, is left to its own tests."""
    arguments = ["outpace", command[0], "--model", "tiny", *command[1:]]
    laws = "from outpace.analysis import check; check.check_laws = check.check_oracle = dict\n"
    run = f"from outpace.cli.main import main; raise SystemExit(main({arguments[1:]!r}))"
    assert bare((laws if command[0] == "check" else "") + run)


def test_text_is_served(bare):
    assert bare(SERVE).strip() == "4"
