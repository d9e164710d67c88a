import json
import os
import sys

import pytest

from outpace import OutpaceError
from outpace.cli import show


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Call it to say whether standard error is a terminal."""
    monkeypatch.setenv("COLUMNS", "90")
    return lambda yes: monkeypatch.setattr(sys.stderr, "isatty", lambda: yes)


def test_progress_is_lines_in_a_file(capsys):
    with show.progress(4, "answers") as tick:
        for part, step in (("a", 0), ("a", 1), ("a", 1), ("b", 0), ("b", 2)):
            tick(part, step)
    out, err = capsys.readouterr()
    assert out == "" and err == "0/4 answers: a\n2/4 answers: b\n4/4 answers\n"


def test_progress_is_a_bar_on_a_terminal(terminal, capsys):
    terminal(True)
    with show.progress(4, "answers") as tick:
        tick("drafter[x=1]", 3)
    out, err = capsys.readouterr()
    assert out == "" and "3/4" in err and "0:00:00" in err and "drafter[x=1]" in err


def test_only_terminals_see_spinners_and_hints(terminal, capsys):
    terminal(True)
    with show.busy("loading"):
        show.hint("by the way")
    err = capsys.readouterr().err
    assert "loading" in err and "by the way" in err
    terminal(False)
    with show.busy("loading"):
        show.hint("by the way")
    assert capsys.readouterr() == ("", "")


def test_a_table_keeps_brackets_and_goes_where_it_should(capsys):
    show.table(("name", "n"), [("drafter[tree=2x1]", "7")], numbers=("n",))
    show.table(("name",), [("aside",)], to_stderr=True)
    out, err = capsys.readouterr()
    assert "drafter[tree=2x1]" in out and "7" in out and "aside" not in out
    assert "aside" in err


def test_json_is_one_line_without_infinities(capsys):
    show.write_json({"a": [1.5, float("nan")], "b": (float("-inf"), "\u00e9"), "c": None})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"a": [1.5, None], "b": [None, "\u00e9"], "c": None}


def test_counts_are_words():
    assert [show.count(n, "token") for n in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]


def test_output_that_cannot_be_written_is_an_error_of_the_user(monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

    class Gone:
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OutpaceError, match="cannot write to standard output: No space left"):
        show.write("a")
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        show.write("a")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_report_that_cannot_be_printed_is_written(monkeypatch, tmp_path, as_json):
    class Gone:
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        show.finish({"a": 1}, as_json, lambda: show.write("a"), tmp_path, "report")
    assert json.loads((tmp_path / "report.json").read_text()) == {"a": 1}


def test_a_table_whose_reader_has_left_is_as_other_text(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        with pytest.raises(BrokenPipeError):
            show.table(("a",), [("b",)])
