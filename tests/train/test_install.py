"""A drafter folder takes its place whole, whatever stops it."""

import pytest

from outpace.train import install
from outpace.train.install import install_folder


def folder(path, **files):
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def held(path):
    return {one.name: one.read_text() for one in path.iterdir()}


def test_the_new_one_comes_whole_and_the_old_one_goes(tmp_path):
    source = folder(tmp_path / "work" / "best", config="new", weights="new")
    out = tmp_path / "a" / "b"
    install_folder(source, out)
    assert held(out) == {"config": "new", "weights": "new"} == held(source)
    (source / "weights").write_text("newer")
    (out / "tree").write_text("of the old one")
    install_folder(source, out)
    assert held(out) == {"config": "new", "weights": "newer"}
    assert [one.name for one in out.parent.iterdir()] == ["b"]


def test_a_link_stays_one(tmp_path):
    source, real = folder(tmp_path / "best", x="new"), folder(tmp_path / "real", x="old")
    link = tmp_path / "link"
    link.symlink_to(real)
    install_folder(source, link)
    assert link.is_symlink() and held(real) == {"x": "new"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_whoever_looks_finds_a_whole_one(tmp_path, monkeypatch, error):
    """Stopped at each file: the old folder is as it was, and no mixture of both."""
    source = folder(tmp_path / "best", config="new", weights="new")
    real = install.shutil.copyfile
    for after in range(2):
        out, copied = folder(tmp_path / str(after) / "out", config="old", weights="old"), []

        def stops(one, other, after=after, out=out, copied=copied):
            assert held(out) == {"config": "old", "weights": "old"}
            if len(copied) == after:
                raise error
            copied.append(real(one, other))

        monkeypatch.setattr(install.shutil, "copyfile", stops)
        with pytest.raises(error):
            install_folder(source, out)
        assert held(out) == {"config": "old", "weights": "old"}
        assert [one.name for one in out.parent.iterdir()] == ["out"]


def test_one_that_was_killed_between_the_two_moves_is_put_right(tmp_path, monkeypatch):
    source = folder(tmp_path / "best", x="new")
    out = tmp_path / "place" / "out"
    folder(out.with_name(".out.old"), x="old")
    folder(out.with_name(".out.part"), x="half", y="half")

    def full(one, other):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(install.shutil, "copyfile", full)
        with pytest.raises(OSError, match="no space"):
            install_folder(source, out)
    assert held(out) == {"x": "old"}
    install_folder(source, out)
    assert held(out) == {"x": "new"} and len(list(out.parent.iterdir())) == 1
