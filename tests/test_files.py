"""A file is the old one or the new one, whatever happens while it is written."""

import pytest

from outpace.files import replaced, write_whole


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
