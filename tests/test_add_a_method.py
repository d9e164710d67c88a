"""The package of docs/add-a-method.md: extracted, built, installed, and put to use."""

import contextlib
import functools
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from outpace import Engine, registry
from outpace.cli import serve, train
from outpace.cli.main import main
from outpace.engine import engine
from outpace.serving.service import Service
from tests.serving.test_learning import GREEDY, ask, prompts, rate
from tests.support import until

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
FILES = re.findall(r"^`([\w./]+)`\n\n```(?:python|toml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
"""(path, text); of a file that is shown twice, the later text is whole."""
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
LESS = {
    "methods": (),
    "generate": ("--model", "tiny", "--max-new-tokens", "6"),
    "bench": ("--model", "tiny", "--limit", "1", "--max-new-tokens", "8", "--json"),
    "train": (
        *("--model", "tiny", "--tokens", "1500", "--json"),
        *("--set", "pipeline.vocab=64", "--set", "pipeline.tokens_per_batch=256", "--set", "loop.steps=40"),
        *("--set", "loop.evaluate_every=20", "--set", "data.batch=32", "--set", "data.max_new_tokens=16"),
    ),
}
"""Added to commands: enough to see that they work."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder that the page starts in, with its package."""
    home = tmp_path_factory.mktemp("home")
    for name, text in FILES:
        path = home / "my-methods" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (home / "prompts.txt").write_text("".join(f"tell {i}\n" for i in range(120)))
    return home


@pytest.fixture(scope="module")
def installed(home):
    """Where the package is installed, by pip, as from an index."""
    site = home / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    how = ["--no-build-isolation", "--no-deps", "--target", str(site)]
    ran = subprocess.run([*pip, *how, str(home / "my-methods")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return site


@pytest.fixture(scope="module")
def at_home(home, installed):
    """This process with the package, in the page's folder; every model is loaded once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(installed)
        patch.chdir(home)
        patch.setenv("OUTPACE_DATA", str(home / "data"))
        patch.setattr(train, "MEASURED_TOKENS", 12)
        patch.setattr(engine, "load_target", functools.cache(engine.load_target))
        registry._table.cache_clear()
        yield home
    registry._table.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_methods"]:
        del sys.modules[name]


def run(name, *arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([name, *arguments, *LESS[name]])
    assert code == 0, err.getvalue()
    return out.getvalue()


@pytest.fixture(scope="module")
def trained(at_home):
    """All commands of the page but the last, which would not end; gives what they print."""
    said = {}
    for program, *words in COMMANDS:
        if program == "pip":
            assert words == ["install", "./my-methods"]
        elif words[0] != "serve":
            said[shlex.join(words)] = run(*words)
    return said


def test_the_files_obey_the_linters(home):
    settings = ["--config", str(ROOT / "pyproject.toml"), "--ignore", "D"]
    ours = ["--config", "lint.isort.known-first-party = ['outpace', 'my_methods']"]
    subprocess.run(
        [sys.executable, "-m", "ruff", "check", "-q", *settings, *ours, home / "my-methods"], check=True
    )


def test_its_own_tests_pass(at_home):
    spec = importlib.util.spec_from_file_location("theirs", at_home / "my-methods" / "test_my_methods.py")
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    wanted = [thing for word, thing in vars(tests).items() if word.startswith("test_")]
    for each in wanted:
        each()
    assert len(wanted) == 3


def test_it_enters_as_our_methods_do(at_home, capsys):
    table = importlib.import_module("my_methods").ENTRIES
    for row in table:
        assert registry.entry(row.kind, row.name) is row
        assert registry.load(row.kind, row.name).__module__.startswith("my_methods.")
    listed = {row["name"]: row for row in json.loads(run("methods", "--json"))}
    assert listed["markov"]["trained"] and not listed["bigram"]["trained"]
    for words, says in (
        (["train", "markof"], "unknown method to train 'markof'; did you mean markov"),
        (["train", "markov", "--set", "rang=3"], "did you mean rank"),
        (["generate", "--model", "tiny", "-d", "markov[modle=x]", "a"], "did you mean model"),
        (["generate", "--model", "tiny", "-d", "markov", "a"], "outpace train markov --model tiny"),
    ):
        assert main(words) == 2
        assert says in capsys.readouterr().err


def test_the_commands_of_the_page_work(trained, at_home):
    """From training to a column in a benchmark."""
    (made,) = (json.loads(said) for words, said in trained.items() if words.startswith("train"))
    shown = json.loads(trained["bench --drafters none,markov"])
    assert made["measured"]["method"] == "markov" and made["held_out"]["acceptance"][0] > 0.1
    (shown,) = (
        json.loads(said) for words, said in trained.items() if words == "bench --drafters none,markov"
    )
    rows = {row["method"]: row for row in shown["rows"]}
    assert rows["markov"]["mean_emitted"] > 1 and rows["markov"]["equal_to_none"] == 1
    status = {one["name"]: one["status"] for one in json.loads(run("methods", "--model", "tiny", "--json"))}
    assert status["markov"] == "trained here" and status["bigram"] == "ready"


def test_the_trained_drafter_is_lossless_and_auto_takes_it(trained):
    engine = Engine.load("tiny", drafter="none", dtype="float32")
    texts = prompts(4, 7)
    for settings in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3, "reproducible": True}):
        settings = {"max_new_tokens": 20, "ignore_eos": True, **settings}
        plain = engine.generate(texts, drafter="none", **settings)
        fast = engine.generate(texts, drafter="markov[tree=3x2x1]", **settings)
        assert [one.tokens for one in fast] == [one.tokens for one in plain]
        assert sum(one.counters.accepted for one in fast) > 0
    assert "markov" in engine.method("auto").members


def test_it_learns_while_serving(trained, at_home):
    (words,) = (words for _, *words in COMMANDS if words[0] == "serve")
    assert words == ["serve", "--drafter", "markov", "--learn"]
    engine = Engine.load("tiny", drafter="none", dtype="float32")
    learner = serve.learner_for(engine, ["markov"], 1, "learned")
    last = prompts(12, 50)
    with Service(engine, drafters=("markov",), learner=learner) as service:
        first = ask(service, last)
        for seed in range(3):
            ask(service, prompts(16, seed))
            until(lambda: not learner.busy, 60)
        final = ask(service, last)
        other = ask(service, last, key="another")
        learned = service.stats().learned
    assert learned["versions"] >= 1 and learned["broken"] == 0 and learned["branches"] == 2
    assert rate(final) > rate(first) + 0.03
    assert rate(other) == pytest.approx(rate(first)), "nothing goes from key to key"
    plain = [one.tokens for one in engine.generate(last, drafter="none", max_new_tokens=20, **GREEDY)]
    for results in (first, final, other):
        assert [one.tokens for one in results] == plain
    with pytest.raises(ValueError, match="unknown setting 'topics' of learner 'markov'"):
        serve.learner_for(engine, ["markov"], 2, "more")


def conformance(home, installed, which):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)])}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/conformance",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        which,
    ]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    return ran.stdout.count(".")


@pytest.mark.parametrize(
    "which",
    ["(bigram or markov) and (greedy or budgets)", pytest.param("bigram or markov", marks=pytest.mark.slow)],
)
def test_the_conformance_suite_passes(home, installed, which):
    assert 'pytest tests/conformance -k "bigram or markov"' in PAGE
    assert conformance(home, installed, which) >= 20
