"""What the package carries besides code: that all of it is packed, and where weights come from."""

import ast
import json
import re
from pathlib import Path

import pytest

from outpace.drafters.trained import shipped_folder

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


def test_every_file_of_the_package_is_packed():
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = re.findall(r"^outpace = (\[.*\])$", settings, re.MULTILINE)
    package = ROOT / "outpace"
    packed = {path for pattern in ast.literal_eval(line) for path in package.glob(pattern)}
    there = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".py" and path.parent.name != "__pycache__"
    }
    assert there <= packed and {package / "py.typed", PAGE} <= there
