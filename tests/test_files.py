"""A file is the old one or the new one, whatever happens while it is written."""

import errno
import os
from pathlib import Path

import pytest

from outpace import files
from outpace.errors import RequestError
from outpace.files import decoded, expanded, read_text, reading, replaced, write_whole


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("old")
    with pytest.raises(RuntimeError), replaced(file) as fresh:
        fresh.write_text("half")
        raise RuntimeError
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with replaced(file) as fresh:
        fresh.write_text("new")
        assert file.read_text() == "old", "until all of it is written"
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_folders_are_made_and_text_is_utf8(tmp_path):
    file = tmp_path / "a" / "b.txt"
    write_whole(file, "caf\u00e9\n")
    write_whole(file, "caf\u00e8\n")
    assert file.read_bytes() == b"caf\xc3\xa8\n" and list(file.parent.iterdir()) == [file]


def test_a_writer_that_keeps_files_private_does_not_make_the_result_private(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    with replaced(tmp_path / "whole") as fresh:
        fresh.unlink()
        fresh.touch(mode=0o600)
    assert (tmp_path / "whole").stat().st_mode == plain.stat().st_mode


def test_text_is_read_without_a_mark_and_with_one_kind_of_line_ends(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\nb\r\n")
    assert read_text(file) == "caf\u00e9\nb\n"
    with reading(file, newline="") as opened:
        assert opened.read() == "caf\u00e9\r\nb\r\n"
    assert decoded(file.read_bytes(), "it") == "caf\u00e9\r\nb\r\n"


@pytest.mark.parametrize("before", [b"caf", b"\xef\xbb\xbfcaf", b"ab\n" * 9000, "\u00e9".encode()])
def test_what_is_not_utf8_is_said_with_its_place(tmp_path, before):
    """Also behind a mark, and behind what a reader in pieces has forgotten."""
    file = tmp_path / "a.txt"
    file.write_bytes(before + b"\xe9 au lait")
    says = rf"is not UTF-8 text \(byte {len(before)}\); convert it first"
    with pytest.raises(RequestError, match=says):
        read_text(file)
    with pytest.raises(RequestError, match=says), reading(file) as opened:
        for _ in opened:
            pass
    with pytest.raises(RequestError, match=says):
        decoded(file.read_bytes(), "it")


def test_what_cannot_be_read_is_called_as_wanted(tmp_path):
    with pytest.raises(RequestError, match="cannot read prompt file x: No such file"):
        read_text(tmp_path / "x", "prompt file x")


def test_a_folder_is_filled_whole_or_not_at_all(tmp_path):
    there, new = tmp_path / "there", tmp_path / "a" / "b"
    there.mkdir()
    (there / "old").write_text("old")
    for folder in (there, new):
        with pytest.raises(ZeroDivisionError), files.filled(folder) as fresh:
            (fresh / "one").write_text("1")
            raise ZeroDivisionError
    assert [one.name for one in tmp_path.rglob("*")] == ["there", "old"]
    for folder in (there, new):
        with files.filled(folder) as fresh:
            (fresh / "one").write_text("1")
    assert sorted(one.name for one in there.iterdir()) == ["old", "one"]
    assert [one.name for one in new.iterdir()] == ["one"]


def test_a_full_disk_names_the_path(tmp_path, monkeypatch):
    """As Python and as libraries in Rust tell of it."""

    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught, files.replaced(tmp_path / "x"):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    assert caught.value.filename == str(tmp_path / "x") and caught.value.errno == errno.ENOSPC
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        files.write_whole(tmp_path / "x", "text")
    assert caught.value.filename == str(tmp_path / "x")
    with pytest.raises(OSError, match="No space left") as caught:
        files.check_writable(tmp_path / "new")
    assert caught.value.filename == str(tmp_path / "new") and not list(tmp_path.iterdir())


def test_a_home_that_nobody_knows_stays_as_it_is_written(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/x") == tmp_path / "x" == expanded(Path("~/x"))
    assert expanded("~nobody-of-that-name/x") == Path("~nobody-of-that-name/x")


def test_one_place_knows_of_homes():
    """pathlib raises RuntimeError where nobody knows a home."""
    root = Path(files.__file__).parent
    found = {path.name for path in root.rglob("*.py") if "expanduser" in path.read_text(encoding="utf-8")}
    assert found == {"files.py", "config.py"}
