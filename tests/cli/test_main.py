"""Exit codes, errors in one line, start-up, and what happens to a process that is stopped."""

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
from importlib import metadata

import pytest

import outpace as package
from outpace.cli import main as cli

TINY = ("--model", "tiny", "--max-new-tokens", "4")
COMMAND = (sys.executable, "-m", "outpace.cli.main")

OPTIONS = {
    "generate": """
        --allow-lossy --allow-token-id --ban-token-id --chat --compare --device --draft-model
        --drafter --drafter-anyway --dtype --explain --frequency-penalty --help --ignore-eos
        --include-stop --json --logit-bias --logprobs --max-new-tokens --min-p --min-tokens
        --model --n --no-reproducible --out --presence-penalty --prompt-file --quantize --raw
        --repetition-penalty --reproducible --seed --stop --stop-token-id --system --temperature
        --thinking-mark --thinking-budget --threads --top-k --top-p --tree --tree-size
        --verifier -d -f -m -o -t
    """,
    "chat": """
        --allow-lossy --allow-token-id --ban-token-id --device --draft-model --drafter
        --drafter-anyway --dtype --frequency-penalty --help --ignore-eos --include-stop
        --logit-bias --max-new-tokens --min-p --min-tokens --model --no-reproducible
        --presence-penalty --quantize --repetition-penalty --reproducible --seed --stop
        --stop-token-id --system --temperature --thinking-mark --thinking-budget --threads
        --top-k --top-p --tree --tree-size --verifier -d -m -t
    """,
    "demo": """
        --allow-lossy --allow-token-id --ban-token-id --device --draft-model --drafter
        --drafter-anyway --dtype --frequency-penalty --help --ignore-eos --include-stop
        --logit-bias --max-new-tokens --min-p --min-tokens --model --no-reproducible --out
        --presence-penalty --quantize --repetition-penalty --reproducible --seed --stop
        --stop-token-id --temperature --thinking-mark --thinking-budget --threads --top-k
        --top-p --tree --tree-size --verifier -d -m -o -t
    """,
    "doctor": """
        -d -m -o -w --device --drafter --dtype --help --json --limit
        --max-new-tokens --model --out --quantize --threads --workload
    """,
    "serve": """
        --allow-lossy --allowed-host --allowed-origin --api-key --api-key-file --device
        --draft-model --drafter --drafter-anyway --dtype --grace --help --host --learn
        --learn-folder --learn-share --learn-topics --max-answers --max-batch --max-body-kb
        --max-connections --max-new-tokens --max-per-key --max-prompt-tokens --max-queue --model
        --name --pages --port --quantize --share-across-keys --stored-pages --thinking-mark
        --threads --timeout -d -m -p
    """,
    "check": """
        --allow-lossy --audit --audit-prompts --device --draft-model --drafter-anyway --drafters
        --dtype --help --json --labelled --max-new-tokens --model --out --prompts --quantize
        --samples --shapes --temperature --threads -d -m -o -t
    """,
    "bench": """
        -b -d -m -o -t -w --allow-lossy --answers --batch --device --draft-model --drafter-anyway
        --disturb --drafters --dtype --fresh --help --json --limit --max-new-tokens --max-repeat
        --model --out --peer-python --peers --quantize --repeat --seed --synthetic-acceptance
        --temperature --threads --tree --tree-size --verifier --workload
    """,
    "bench compare": """
        --help --json
    """,
    "bench passes": """
        -d -m -o --batches --contexts --device --drafter-anyway --drafters --dtype --help
        --json --model --out --quantize --repeat --rows --threads
    """,
    "bench serve": """
        -c -d -m -n -o -t -w --api-key-file --check-texts --concurrency --device --draft-model
        --drafter-anyway --drafters --dtype --help --json --max-new-tokens --max-prompt-tokens --mixed
        --model --out
        --quantize --rate --requests --rounds --seed --temperature --threads --timeout --url
        --workload
    """,
    "analyze": """
        --help -h
    """,
    "analyze acceptance": """
        -d -m -o -t -w --device --drafter-anyway --drafter --dtype --help --json
        --limit --max-new-tokens --model --out --quantize --temperature --threads --workload
    """,
    "analyze cascade": """
        -l -m -o -t -w --alpha --cost --device --drafter-anyway --dtype --help --json
        --k --lenience --levels --limit --max-new-tokens --measure --model --out --quantize
        --temperature --theory --threads --workload
    """,
    "analyze tree": """
        -d -f -m -o -t --allow-lossy --device --draft-model --drafter-anyway --drafter --dtype
        --help --json --max-new-tokens --model --out --prompt-file --quantize --seed --steps
        --temperature --threads --tree --tree-size --verifier
    """,
    "analyze policy": """
        -m -o -t -w --ablate --constants --device --draft-model --drafter-anyway --drafters --dtype
        --help --json --limit --max-new-tokens --measure --model --only --orders --out --policies
        --quantize --temperature --texts --threads --workload
    """,
    "analyze shape": """
        -d -m -o -t -w --depth --device --drafter-anyway --drafter --dtype --help
        --json --limit --max-new-tokens --model --nodes --out --quantize --temperature --threads
        --workload
    """,
    "train": """
        -m -o -s --device --dry-run --dtype --help --json --mean-with --model
        --only-data --out --prompts --quantize --resume --self-prompts --set --start --texts
        --threads --tokens --work
    """,
    "export": """
        --format --help --json --model --out --verifier -f -m -o
    """,
    "tune": """
        -d -m -o -w --device --draft-model --drafter-anyway --drafters --dtype --help --json --limit
        --max-new-tokens --model --out --quantize --threads --workload
    """,
    "version": """
        --help
    """,
    "methods": """
        --help --json --model -m
    """,
    "build": """
        --help
    """,
    "build bigram": """
        --help --json --model --out -m -o
    """,
    "build datastore": """
        --help --json --model --out -m -o
    """,
    "eval": """
        --allow-lossy --batch --chat --device --draft-model --drafter-anyway --drafters --dtype
        --help --json --limit --model --out --quantize --shots --tasks --threads -b -d -m -o
    """,
    "predict": """
        --acceptance --batch --calibrate-again --calibrate-with --config --context --device
        --draft-config --drafter-cost --dtype --help --json --kv-dtype --out --prompt --quantize
        --rows --sibling --threads --tree -m -o
    """,
    "analyze tokenizers": """
        --dtype --help --json --limit --max-new-tokens --measure --nodes --out --temperature
        --texts --threads --workload -o -t -w
    """,
    "analyze scaling": """
        --at --batch --context --device --help --json --out --plan --samples --threads --tokens
        -o
    """,
}
"""Command, as typed -> its options. A new one is added here on purpose, or not at all."""


def commands(group, path=()):
    """Every command and group below, with the words that reach it."""
    for name, one in group.commands.items():
        yield " ".join((*path, name)), one
        if hasattr(one, "commands"):
            yield from commands(one, (*path, name))


def test_a_folder_named_without_a_slash_is_told_how_to_write_it(outpace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    ran = outpace("generate", "hello", "-d", "mine")
    assert ran.code == 2 and "for the folder, write ./mine" in ran.err.splitlines()[-1]


def test_doctor_shows_no_empty_table_for_a_drafter_that_cannot_be_loaded(outpace):
    ran = outpace("doctor", "-m", "tiny", "-d", "draft_model[model=./nosuch]")
    assert ran.code == 0 and "cannot_load" in ran.out and "./nosuch" in ran.out
    assert "value" not in ran.out and "mend what the evidence says" in ran.out


def test_the_options_are_as_agreed():
    command = cli.typer.main.get_command(cli.app)
    found = {}
    for name, one in commands(command):
        with one.make_context(name, [], resilient_parsing=True) as context:
            names = [
                flag
                for parameter in one.get_params(context)
                if parameter.param_type_name == "option"
                for flag in (*parameter.opts, *parameter.secondary_opts)
            ]
        found[name] = sorted(names)
    assert found == {name: sorted(text.split()) for name, text in OPTIONS.items()}


def test_paragraphs_of_help_break_where_the_terminal_ends():
    for name, one in commands(cli.typer.main.get_command(cli.app)):
        assert not [part for part in (one.help or "").split("\n\n") if "\n" in part.strip()], name


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_without_a_command_it_helps(outpace, arguments):
    ran = outpace(*arguments)
    assert ran.code == 0 and ran.err == ""
    assert all(name.split()[0] in ran.out for name in OPTIONS)


@pytest.mark.parametrize("command", OPTIONS)
def test_every_command_has_help_with_examples(outpace, command):
    ran = outpace(*command.split(), "--help")
    assert ran.code == 0 and ran.err == ""
    assert f"outpace {command}" in ran.out
    for flag in OPTIONS[command].split():
        assert flag in ran.out


def test_the_help_names_the_default_drafter(outpace):
    from outpace.engine.engine import DEFAULT_DRAFTER

    assert f"[default: ({DEFAULT_DRAFTER})]" in outpace("generate", "--help").out


@pytest.mark.parametrize("command", OPTIONS)
def test_the_help_gives_a_switch_no_value(outpace, command):
    lines = outpace(*command.split(), "--help").out.splitlines()
    assert not [line for line in lines if "<bool>" in line and "--help" not in line]


def test_version(outpace):
    ran = outpace("--version")
    assert (ran.code, ran.out) == (0, f"outpace {package.__version__}\n")


def test_the_command_version_tells_what_computes(outpace):
    ran = outpace("version")
    assert ran.code == 0
    rows = dict(line.split(maxsplit=1) for line in ran.out.splitlines())
    assert list(rows) == ["outpace", "python", "torch", "transformers", "processor", "code"]
    assert rows["outpace"] == package.__version__
    assert rows["torch"] == metadata.version("torch") and rows["python"] in sys.version


JUNK = b"GGUF" + bytes(range(64))


@pytest.fixture
def bad_files(tmp_path, monkeypatch):
    """Files that a user may give by mistake, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "junk.gguf").write_bytes(JUNK)
    (tmp_path / "folder").mkdir()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generat"], "did you mean 'generate'"),
        (["explain"], "there is outpace generate --explain; see outpace --help"),
        (["tree"], "there is outpace generate --tree, "),
        (["passes"], "there is outpace bench passes; see"),
        (["optimize"], "no such command 'optimize'; choose from "),
        (["analyze", "xyz"], "choose from acceptance, "),
        (["z" * 9000], "zzz...'; choose from"),
        (["chat", "--system"], "'--system' requires an argument; see outpace chat --help"),
        (["bench", "serve", "--url"], "see outpace bench serve --help"),
        (["generate", "--temprature", "1", "a"], "--temperature"),
        (["generate", "--top-k", "many", "a"], "invalid value for '--top-k': 'many' is no"),
        (["generate", "--top-p", "x", "a"], "invalid value for '--top-p': 'x' is no"),
        (["generate", "--ban-token-id", "1", "--ban-token-id", "b", "a"], "'b' is no"),
        (["generate", "--seed", "9" * 9000, "a"], "invalid value for '--seed': '999"),
        (["generate", "a", "b"], "extra argument"),
        (["generate", *TINY], "no prompt"),
        (["generate", *TINY, ""], "the prompt is empty"),
        (["generate", *TINY, "a\udce9", "--raw"], "the prompt is not utf-8 text (byte 1); convert it first"),
        (["generate", *TINY, "\u00e9\udce9"], "the prompt is not utf-8 text (byte 2)"),
        (["generate", *TINY, "--system", "\udcff", "a"], "--system is not utf-8 text (byte 0)"),
        (["chat", *TINY, "--system", "\udcff"], "--system is not utf-8 text (byte 0)"),
        (["generate", *TINY, "a", "-f", "latin.txt"], "two prompts"),
        (["generate", *TINY, "-f", "latin.txt"], "latin.txt is not utf-8 text (byte 3)"),
        (["generate", *TINY, "-f", "empty.txt"], "the prompt is empty"),
        (["generate", *TINY, "-f", "-"], "the prompt is empty"),
        (["generate", *TINY, "-f", "nowhere.txt"], "cannot read prompt file nowhere.txt"),
        (["generate", *TINY, "-f", "folder"], "cannot read prompt file folder"),
        (
            ["generate", *TINY, "-t", "1e400", "a"],
            "temperature must be a finite number of at least 0, got inf",
        ),
        (["generate", *TINY, "--explain", "a", "--out", "latin.txt"], "latin.txt: not a directory"),
        (["generate", *TINY, "--thinking-budget", "5", "a"], "name them with --thinking-mark, or "),
        (["generate", *TINY, "-t", "-1", "a"], "temperature must be a finite number of at least 0, got -1"),
        (["generate", *TINY, "--top-p", "0", "a"], "top_p must be in (0, 1], got 0"),
        (["generate", *TINY, "--top-p", "1.5", "a"], "got 1.5"),
        (["generate", *TINY, "--top-p", "nan", "a"], "got nan"),
        (["generate", *TINY, "--seed", "-7", "a"], "seed must be"),
        (["generate", "--max-new-tokens", "-1", "a"], "max_new_tokens must be"),
        (["generate", *TINY, "--min-tokens", "-1", "a"], "min_tokens must be"),
        (["generate", *TINY, "--n", "0", "a"], "n must be"),
        (["generate", *TINY, "--n", "2", "--compare", "a"], "drop one of the two"),
        (["generate", *TINY, "--n", "2", "--explain", "a"], "drop one of the two"),
        (["generate", *TINY, "--compare", "--explain", "a"], "drop one of the two"),
        (["generate", *TINY, "--logprobs", "1", "a"], "--json"),
        (["generate", *TINY, "--logit-bias", "5", "a"], "--logit-bias '5' is not id=x"),
        (["generate", *TINY, "--ban-token-id", "999999999", "a"], "999999999"),
        (["generate", "--threads", "0", "a"], "--threads must be at least 1, got 0"),
        (["generate", "--model", "tiny", "--threads", "9999999", "a"], "16 per core, got 9999999"),
        (["generate", *TINY, "--raw", "--system", "b", "a"], "--system needs the chat form"),
        (["generate", *TINY, "--raw", "word " * 1000], "more than fit"),
        (["generate", *TINY, "--dtype", "bfloat61", "a"], "did you mean bfloat16"),
        (["generate", *TINY, "--drafter", "prompt_lokup", "a"], "did you mean prompt_lookup"),
        (["generate", *TINY, "--drafter", "prompt_lookup[max=1]", "a"], "known: max_ngram"),
        (["generate", *TINY, "--drafter", "draft_model[", "a"], "cannot read method spec"),
        (["generate", *TINY, "--device", "toaster", "a"], "toaster"),
        (
            ["generate", *TINY, "--draft-model", "tiny", "-d", "suffix", "a"],
            "--draft-model is for auto, got --drafter suffix; leave one of the two out",
        ),
        (["generate", "--model", "smollm2-135n", "a"], "did you mean smollm2-135m"),
        (["generate", "--model", "./nowhere", "a"], "no model at ./nowhere"),
        (["generate", "--model", "junk.gguf", "a"], "junk.gguf"),
        (["chat", *TINY, "--top-p", "2"], "top_p must be"),
        (["check", "--model", "tiny", "--prompts", "0"], "--prompts must be at least 1, got 0"),
        (["check", "--model", "./nowhere", "--drafters", "none,lookup"], "unknown drafter 'lookup'"),
        (["check", "--model", "./nowhere", "--drafters", ",,"], "names no drafter"),
        (["bench", "--model", "./nowhere", "--drafters", ""], "names no drafter"),
        (["bench", "--model", "./nowhere", "--drafters", "lookup"], "unknown drafter 'lookup'"),
        (["bench", "--model", "./nowhere", "--verifier", "tre"], "unknown verifier 'tre'"),
        (["bench", "passes", "--model", "./nowhere", "--drafters", ",,"], "names no drafter"),
        (["generate", "--model", "./nowhere", "--drafter", "", "a"], "cannot read method spec ''"),
        (
            ["generate", "--model", "./nowhere", "--verifier", "nope", "a"],
            "unknown verifier 'nope'; known: block, ",
        ),
        (
            ["generate", "--model", "./nowhere", "--tree", "4x2x1", "--verifier", "match", "a"],
            "auto picks among several; name one, as in -d eagle3 --tree 4x2x1 --verifier match",
        ),
        (
            ["generate", "--model", "./nowhere", "-d", "auto", "--tree-size", "8", "a"],
            "--tree-size 8 is for one drafter, and auto picks",
        ),
        (["chat", "--model", "./nowhere", "--tree", "chain"], "as in -d eagle3 --tree chain"),
        (["analyze", "tree", "--model", "./nowhere", "--tree", "chain", "a"], "as in -d eagle3 --tree chain"),
        (
            ["generate", *TINY, "-d", "suffix", "--verifier", "typical", "a"],
            "say --allow-lossy, or engine.load",
        ),
        (["analyze", "acceptance", "--model", "./nowhere", "-d", "lookup"], "unknown drafter 'lookup'"),
        (["methods", "all", "none"], "extra argument"),
        (["bench", "--workload", "~nosuch/x"], "no workload '~nosuch/x'"),
        (["predict", "--device", "~nosuch/x"], "unknown device '~nosuch/x'"),
        (["predict", "-m", "~nosuch/x"], "no model at ~nosuch/x: no such file"),
        (["analyze", "tokenizers", "~nosuch/x"], "no model at ~nosuch/x: no such file"),
        (["train", "target", "--texts", "~nosuch/x", "--out=~nosuch/y"], "~nosuch/x: there is no such"),
        (["train", "eagle3", "-m", "tiny", "--texts", "~nosuch/x"], "cannot read ~nosuch/x: no such file"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(outpace, bad_files, arguments, says):
    ran = outpace(*arguments)
    assert ran.code == 2 and ran.out == ""
    error = ran.err.splitlines()[-1]
    assert error.startswith("outpace: error: ")
    assert says in error.lower()
    assert len([line for line in ran.err.splitlines() if "error" in line]) == 1


def test_a_truncated_weight_file_and_another_vocabulary(outpace, tmp_path):
    from outpace.models.zoo import _KNOWN, _packaged

    whole = _packaged(_KNOWN[0])
    cut = tmp_path / "cut.gguf"
    shutil.copyfile(whole, cut)
    os.truncate(cut, whole.stat().st_size // 2)
    ran = outpace("generate", "--model", str(cut), "a")
    assert ran.code == 2 and "truncated" in ran.err and ran.err.count("\n") == 1
    ran = outpace("generate", *TINY, "--drafter", "draft_model[model=smollm2-135m]", "a")
    assert ran.code == 2 and "vocabular" in ran.err.splitlines()[-1]


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_takes_less_than_half_a_second(tmp_path):
    """Of the processor, for the clock on the wall counts other programs too; the first one may compile."""
    seconds, usual = [], os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    while len(seconds) < 10 and min(seconds, default=1.0) >= 0.5:
        before = os.times()
        assert subprocess.run([*COMMAND, "--help"], capture_output=True, env=usual).returncode == 0
        after = os.times()
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(seconds) < 0.5, seconds


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], ("torch", "numpy", "transformers", "tokenizers")),
        (["methods"], ("torch", "numpy", "transformers", "tokenizers")),
        (["generate", *TINY, "-d", "suffix", "hello"], ("transformers", "rich.table", "outpace.analysis")),
        (["generate", *TINY, "hello"], ("transformers", "rich.table", "matplotlib")),
    ],
    ids=lambda value: value[0],
)
def test_start_up_imports_only_what_is_needed(arguments, heavy):
    ran = run_python(
        "import sys\nfrom outpace.cli.main import main\n"
        f"code = main({arguments!r})\n"
        f"found = [name for name in {heavy!r} if name in sys.modules]\n"
        "sys.exit(f'imported {found}' if found else code)"
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "command",
    [
        "analyze acceptance -d early_exit",
        "analyze cascade --theory",
        "analyze policy --texts x",
        "analyze scaling x",
        "analyze shape -d eagle3",
        "analyze tokenizers x y",
        "analyze tree a",
        "bench",
        "bench passes",
        "bench serve",
        "check --audit refusals",
        "demo a",
        "doctor -d eagle3",
        "eval",
        "export custom-generate",
        "generate a --explain",
        "predict",
        "tune",
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_loaded(outpace, monkeypatch, command):
    monkeypatch.setattr("outpace.models.load.load_target", None)
    ran = outpace(*command.split(), "--out", "/dev/null/a.svg")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert "/dev/null/a.svg: Not a directory" in ran.err


def test_a_shell_that_leaves_the_sign_of_a_home_is_helped(outpace, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    ran = outpace("predict", "--device", "h100", "--out=~/x")
    assert ran.code == 0 and (tmp_path / "x").is_dir()


def test_output_that_cannot_be_written():
    with open("/dev/full", "w") as full:
        ran = subprocess.run([*COMMAND, "methods", "--json"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 2
    assert ran.stderr.startswith("outpace: error: cannot write to standard output: ")
    assert ran.stderr.endswith("No space left on device; make room on that disk\n")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_a_stream_that_is_closed_from_the_start_is_no_error(monkeypatch, closed):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None if name == closed else io.StringIO())
    assert cli.main(["chat", "--model", "tiny", "--max-new-tokens", "2"]) == 0
    assert cli.main(["methods", "suffix"]) == 0
    getattr(sys, closed).close()


def test_a_full_disk_is_one_line_that_asks_for_room(outpace, monkeypatch, tmp_path):
    def full(number):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("os.fsync", full)
    ran = outpace("predict", "--device", "h100", "--out", str(tmp_path))
    assert ran.err == f"outpace: error: {tmp_path}: {os.strerror(errno.EDQUOT)}; make room on that disk\n"


@pytest.fixture
def endless():
    """A process in the middle of a long answer, and the first characters of it."""
    process = subprocess.Popen(
        [*COMMAND, "generate", "--threads", "1", "--max-new-tokens", "2000", "--ignore-eos", "Count."],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background may have left the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    yield process, process.stdout.read(20)
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()


def test_ctrl_c_keeps_the_text_and_ends_the_line(endless):
    process, begin = endless
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (begin + out).endswith("\n")
    assert "Traceback" not in err and "error" not in err


def test_a_reader_that_leaves_is_no_error(endless):
    process, _ = endless
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert "Traceback" not in process.stderr.read()
