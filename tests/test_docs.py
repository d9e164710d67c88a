"""Documentation that cannot rot: its code is run, its links lead somewhere, its words are known."""

import contextlib
import functools
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import outpace
from outpace import registry
from outpace.cli.main import app, main
from outpace.config import MethodSpec, split_specs
from outpace.engine import engine
from outpace.engine.results import Counters, Result
from outpace.sampling import TokenLogprobs
from outpace.types import RowRecord, StepRecord

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SHORT = ("--max-new-tokens", "6")
LESS = {"generate": SHORT, "check": (*SHORT, "--prompts", "1", "--drafters", "prompt_lookup")}
"""Added to commands: enough to see that they work."""


@pytest.fixture(scope="module", autouse=True)
def _each_model_is_loaded_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "load_target", functools.cache(engine.load_target))
        yield


def blocks(page):
    """(language, text) of every fenced block."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def joined(text):
    """A backslash at the end of a line joins it with the next, as in a shell."""
    return text.replace("\\\n", "")


def run(*arguments):
    """Output of a command; it must succeed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    assert code == 0, err.getvalue()
    return out.getvalue()


@pytest.mark.parametrize(
    "page", [README, ROOT / "docs" / "python.md", ROOT / "docs" / "vllm.md"], ids=lambda page: page.name
)
def test_python_of_a_page_prints_what_the_page_shows(page):
    found = blocks(page)
    names: dict[str, object] = {}
    ran = 0
    for (language, code), (after, shown) in zip(found, [*found[1:], ("", "")], strict=True):
        if language != "python":
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, page.name, "exec"), names)
        if after == "text" or page == README:
            assert out.getvalue() == shown
        ran += 1
    assert ran


def test_shell_of_the_readme_works(tmp_path, monkeypatch, enumerated_once):
    lines = [
        line
        for language, text in blocks(README)
        if language == "sh"
        for line in joined(text).splitlines()
        if line and not line.startswith("#")
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "article.txt").write_text("A short article about rivers.")
    ran = set()
    for line in lines:
        program, *arguments = shlex.split(line, comments=True)
        ran.add(program)
        if program == "outpace":
            run(*arguments, *LESS.get(arguments[0], ()))
        elif program == "make":
            dry = subprocess.run(["make", "-n", "-C", ROOT, *arguments], capture_output=True)
            assert dry.returncode == 0, line
        else:
            assert line.startswith(("git clone ", "cd ", "pip install ")), f"not run: {line}"
    assert {"outpace", "make"} <= ran


def test_the_demo_is_the_readmes():
    dry = subprocess.run(["make", "-n", "-C", ROOT, "demo"], capture_output=True, text=True)
    (command,) = [x for x in dry.stdout.splitlines() if "outpace generate" in x]
    prompt = shlex.split(command)[-1]
    assert f'outpace generate --compare "{prompt}"' in joined(README.read_text(encoding="utf-8"))


def test_the_methods_page_is_up_to_date():
    page = ROOT / "tools" / "methods_page.py"
    check = subprocess.run([sys.executable, page, "--check"], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for row in registry.entries():
        assert f"### `{row.name}`" in text


def test_an_old_methods_page_is_noticed(tmp_path):
    for name in ("tools", "docs", "outpace"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    page = tmp_path / "docs" / "methods.md"
    page.write_text(page.read_text(encoding="utf-8") + "more")
    check = [sys.executable, tmp_path / "tools" / "methods_page.py", "--check"]
    assert subprocess.run(check, capture_output=True).returncode == 1


def keys_of(value, path=()):
    """Keys of nested JSON; names of methods, verifiers and prompts are no keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if path[-1:] not in (("drafters",), ("distributions",), ("code",)):
                yield key
            yield from keys_of(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner, path)


def test_every_key_is_in_the_glossary(enumerated_once):
    logprobs = (TokenLogprobs(token=1, logprob=-0.5, top=((1, -0.5),)),)
    result = Result(
        text="",
        tokens=(1,),
        finish_reason="stop",
        prompt_tokens=1,
        counters=Counters(),
        seconds=1.0,
        prefill_seconds=0.5,
        drafter="none",
        seed=0,
        logprobs=logprobs,
    )
    keys = set(keys_of(result.to_json()))
    keys |= set(Counters.__dataclass_fields__)
    keys |= set(StepRecord.__dataclass_fields__) | set(RowRecord.__dataclass_fields__)
    tiny = ["--model", "tiny", "--json", *SHORT]
    keys |= set(keys_of(json.loads(run("generate", "a b a b", "--compare", *tiny))))
    keys |= set(keys_of(json.loads(run("generate", "a b a b", "--n", "2", *tiny))))
    keys |= set(keys_of(json.loads(run("generate", "a b a b", "--explain", *tiny))))
    keys |= set(keys_of(json.loads(run("methods", "--json"))))
    keys |= set(keys_of(json.loads(run("methods", "prompt_lookup", "--json"))))
    keys |= set(keys_of(json.loads(run("methods", "--model", "tiny", "--json"))))
    keys |= set(keys_of(json.loads(run("analyze", "tree", "a b a b", "--steps", "1", *tiny))))
    theory = ("--theory", "--alpha", "0.6,0.3", "--cost", "0.2,0.1", "--json")
    keys |= set(keys_of(json.loads(run("analyze", "cascade", *theory))))
    keys |= set(keys_of(json.loads(run("check", "--prompts", "1", *tiny))))
    assert {"speedup", "baseline", "same_tokens", "planted_bugs_caught", "first_difference"} <= keys
    glossary = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`([a-z_]+)`", glossary))
    assert not keys - known, f"not in docs/json.md: {sorted(keys - known)}"


def commands(group=None, depth=1):
    """Paths of the commands, down to ``depth``."""
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        yield (name,)
        if depth > 1 and hasattr(command, "commands"):
            yield from ((name, *path) for path in commands(command, depth - 1))


def test_every_command_prints_json_but_those_that_the_readme_excepts():
    without = re.search(r"All print JSON with `--json`, except (.*?)\.", README.read_text())
    assert without is not None
    excepted = set(re.findall(r"`(\w+)`", without[1]))
    found = set()
    for path in commands(depth=2):
        command = typer.main.get_command(app)
        for name in path:
            command = command.commands[name]
        group_alone = hasattr(command, "commands") and not command.invoke_without_command
        if not group_alone and not any("--json" in p.opts for p in command.params):
            found.add(" ".join(path))
    assert found == excepted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_tool_is_told_of():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(tools/\w+\.py)` \| \S", text, re.MULTILINE)
    assert told == sorted(f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py"))


def test_the_readme_names_every_command():
    text = README.read_text(encoding="utf-8")
    listed = re.findall(r"^\| `outpace (\w+)", text, re.MULTILINE)
    assert sorted(listed) == sorted(name for (name,) in commands())
    for command in listed:
        assert command in run("--help")
    assert "Apache-2.0" in text and outpace.__version__ in (ROOT / "pyproject.toml").read_text()


INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
PROGRAMS = (
    "outpace",
    "make",
    "pip",
    "python",
    "torchrun",
    "git",
    "cd",
    "serve",
    "vllm",
    ".ci/run",
    ".ci/wheel",
    ".venv/bin/pip",
    ".venv/bin/python",
)
NAMES = {"M": "tiny", "model-q4.gguf": "tiny", "owner/name": "tiny", "OUT": "tiny", "smollm2-135m": "tiny"}
"""Words of commands that stand for something."""
REDUCED = {"generate": (*SHORT, "--dtype", "float32"), "methods": (), "build": (), "train": ("--dry-run",)}
"""Commands that are run, with what makes them short; the others are read, names and options."""
TRAINED = re.compile(
    r"generate.*(draft_model|early_exit|kangaroo|bigram)|acceptance|exit_layer|\./|--resume|--start|--only-data"
    r"|--quantize|--self-prompts|s[23]d|\bsec\b|streaming|train target"
)
"""What needs a drafter that was trained, more layers than the smallest model, or another package."""


def written(page):
    """Every block of a page, fenced or indented, as text."""
    text = page.read_text(encoding="utf-8")
    yield from (block for _, block in FENCE.findall(text))
    for found in INDENTED.findall(FENCE.sub("", text)):
        if found.strip():
            yield "\n".join(line[4:] for line in found.strip("\n").splitlines())


def command_lines():
    """(page, words) of every command of every page; what follows two spaces or a # explains it."""
    for page in PAGES:
        if page.name == "add-a-method.md":
            continue  # tests/test_add_a_method.py runs its commands, with the package that it builds
        for block in written(page):
            lines = [line for line in joined(block).splitlines() if line and not line.startswith("#")]
            if lines and lines[0].split()[0] in PROGRAMS:
                for line in lines:
                    yield page.name, shlex.split(re.sub(r"\s{2,}[^-\s\"'].*$", "", line), comments=True)


COMMANDS = list(command_lines())


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: str(value)[:60])
def test_every_command_of_every_page_can_be_given(page, words, tmp_path, monkeypatch):
    """It is run where it is short, or can be made so; else its options and methods are looked up."""
    assert words[0] in PROGRAMS, f"{page}: a block of commands holds {words}"
    if words[0] in ("python", "torchrun"):
        assert words[1].startswith("tools/") is (ROOT / words[1]).is_file() or "-m" in words
    if words[0] != "outpace":
        return
    words = [NAMES.get(word, word) for word in words[1:] if word != "..." or words[1] != "train"]
    assert words[0] in {name for (name,) in commands()}, f"{page}: {words}"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for name in ("notes/a.txt", "book.txt", "article.txt", "stories.txt"):
        times = 10 if name == "article.txt" else 40  # a prompt has to fit the smallest model
        (tmp_path / name).write_text("A river runs to the sea, and a road to the town. " * times)
    rows = ({"prompt": f"tell {i}"} for i in range(120))
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(path) for w in words for path in (sorted(tmp_path.glob(w)) if "*" in w else [w])]
    if page != "README.md" and words[0] in REDUCED and not TRAINED.search(" ".join(words)):
        own = words[0] != "train" or {"--self-prompts", "--prompts"} & set(words)
        given = () if own else ("--prompts", "questions.jsonl")
        model = () if "--model" in words or "-m" in words else ("--model", "tiny")
        bare = words[0] == "methods" and "--model" not in words
        monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))
        run(*words, *given, *(() if bare else model), *REDUCED[words[0]])
        return
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    command.make_context("outpace", list(words), resilient_parsing=False)
    for flag in ("--drafter", "--drafters", "-d"):
        if flag in words:
            for spec in split_specs(words[words.index(flag) + 1]):
                name = MethodSpec.parse(spec).name
                assert spec in ("all", "bigram") or "/" in spec or registry.entry("drafter", name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_indented_python_runs(page):
    """Alone, on the smallest model."""
    for block in written(page):
        if (
            block.startswith(("import outpace\n", "from outpace"))
            and "Engine.load" in block
            and "def " not in block
        ):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.replace("smollm2-135m", "tiny"), page.name, "exec"), {})


def test_commands_were_found():
    assert len(COMMANDS) > 60 and {words[0] for _, words in COMMANDS} <= set(PROGRAMS)
