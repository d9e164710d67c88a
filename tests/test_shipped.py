"""What the package carries besides code: what of it is packed, and where weights come from."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

from outpace import Engine
from outpace.drafters import trained
from outpace.drafters.trained import PROVENANCE, home, shipped_folder
from outpace.errors import ModelError

ROOT = Path(__file__).parents[1]
PAGE = shipped_folder() / "README.md"
FOLDERS = sorted(path.parent for path in shipped_folder().glob("*/*/config.json"))


def untold(text, name, files, sources):
    """What a page does not say of a shipped folder: itself, its files, sources and licences.

    All folders of a target share a part of the page: a row for each, and one for each source.
    """
    target, method = name.split("/")
    heading, _, rest = text.partition(f"## {target}\n")
    rows = rest.partition("\n## ")[0].splitlines()
    if sum(row.startswith(f"| `{method}` |") for row in rows) != 1:
        return [name]
    missing = [f"{name}/{file}" for file in files if f"`{file}`" not in heading]
    for source in sources:
        told = [row for row in rows if row.startswith("|") and f"`{source['name']}`" in row]
        if len(told) != 1 or not told[0].endswith(f"| {source['licence']} |"):
            missing.append(f"{name}: {source['name']} ({source['licence']})")
        elif any(not cell.strip() for cell in told[0].strip("|").split("|")):
            missing.append(f"{name}: something about {source['name']}")
    return missing


def about(folder):
    told = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    name = folder.relative_to(shipped_folder()).as_posix()
    sources = [source for work in told["data"]["plans"] for source in work["sources"]]
    return name, [file.name for file in sorted(folder.iterdir())], sources


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_page_tells_where_weights_come_from(folder):
    text = PAGE.read_text(encoding="utf-8")
    assert untold(text, *about(folder)) == [] and "Apache-2.0" in text.partition("\n## ")[0]


def test_what_the_page_leaves_out_is_noticed():
    name, files, sources = about(FOLDERS[0])
    text = PAGE.read_text(encoding="utf-8")
    assert untold(text, "other/eagle3", files, sources) == ["other/eagle3"]
    assert untold(text, name, ["more.bin"], []) == [f"{name}/more.bin"]
    new = [{"name": "new.txt", "licence": "MIT"}, {**sources[0], "licence": "none"}]
    assert len(untold(text, name, files, new)) == 2
    blank = re.sub(r"\| [^|]* \|( \S+ \|)$", r"|  |\1", text, flags=re.MULTILINE)
    assert len(untold(blank, name, files, sources)) > 5


def packed():
    """What a wheel has besides code, by the patterns of pyproject.toml."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = re.findall(r"^outpace = (\[.*\])$", settings, re.MULTILINE)
    package = ROOT / "outpace"
    return {path for pattern in ast.literal_eval(line) for path in package.glob(pattern)}


def test_every_file_of_the_package_is_packed_but_most_weights():
    package = ROOT / "outpace"
    there = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".py" and path.parent.name != "__pycache__"
    }
    assert {package / "py.typed", PAGE} <= packed() <= there
    left = there - packed()
    assert left and all(path.is_relative_to(shipped_folder()) for path in left)


def test_weights_of_a_wheel_are_few():
    files = {path for path in packed() if path.is_relative_to(shipped_folder())}
    names = {path.relative_to(shipped_folder()).as_posix() for path in files if path.name != PROVENANCE}
    eagle3 = {f"smollm2-135m/eagle3/{name}" for name in ("config.json", "model.safetensors")}
    table = {f"smollm2-135m/max_gram/{name}" for name in ("config.json", "pairs.bigram")}
    assert names == {"README.md", *eagle3, *table}
    assert {path.parent for path in files if path.name == PROVENANCE} == set(FOLDERS)
    assert sum(path.stat().st_size for path in files) < 25e6


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The weights of a wheel, in the place of those of the repository."""
    for path in packed():
        if path.is_relative_to(shipped_folder()):
            copy = tmp_path / "weights" / path.relative_to(shipped_folder())
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(trained, "shipped_folder", lambda: tmp_path / "weights")
    return tmp_path


def test_a_wheel_has_what_auto_uses_and_says_how_the_rest_is_made(monkeypatch, wheel):
    engine = Engine.load("smollm2-135m", drafter="auto")
    with_the_wheel = list(engine.method("auto").members)
    with pytest.raises(ModelError) as error:
        engine.method("hydra")
    line = str(error.value)
    assert line.startswith(
        "no trained hydra for smollm2-135m; make one with: outpace train hydra --model smollm2-135m"
    )
    assert ", once 71 minutes of training; it goes into " in line and "\n" not in line
    assert line.endswith(str(home("hydra", engine.target)))
    monkeypatch.undo()
    monkeypatch.setenv("OUTPACE_DATA", str(wheel / "data"))
    again = Engine(engine.target, "auto")
    assert list(again.method("auto").members) == with_the_wheel and "eagle3" in with_the_wheel
