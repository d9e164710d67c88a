"""The check of sentences counts what a reader reads, and fails over long ones."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "sentences.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("sentences", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_tables_headings_and_addresses_do_not_count(tool):
    page = """# A heading of many words

One [link text](https://example.org/a/long/address) here. Two with `some code of many words`!

```sh
not this. Nor this.
```

    nor an indented block

| nor | a table |
|---|---|

- An item
  goes on.
- Another, e.g. This one
"""
    found = list(tool.sentences(page))
    assert [tool.words(one) for one in found] == [4, 3, 4, 4]
    assert found[0] == "One link text here"


def test_a_long_sentence_fails(tool, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("Short. " * 3)
    assert tool.main(["--root", str(tmp_path)]) == 0
    (tmp_path / "docs" / "page.md").write_text("word " * 31 + "end.")
    assert tool.main(["--root", str(tmp_path)]) == 1
    assert "page.md: 32 words" in capsys.readouterr().err


def test_a_long_sentence_of_a_docstring_fails(tool, tmp_path, capsys):
    (tmp_path / "README.md").write_text("Short.")
    (tmp_path / "outpace").mkdir()
    labels = "".join(
        f"        {name}: Eight words that say what it is for.\n" for name in ("rows", "*more", "a, b")
    )
    module = tmp_path / "outpace" / "module.py"
    module.write_text(f'"""Fine.\n\n    Args:\n{labels}"""\nx = 1\n"""{"word " * 25}."""\n')
    assert tool.main(["--root", str(tmp_path)]) == 0
    module.write_text(module.read_text() + f'"""{"word " * 26}."""\n')
    assert tool.main(["--root", str(tmp_path)]) == 1
    assert "module.py: 26 words" in capsys.readouterr().err


def test_a_high_median_fails(tool, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("Word " * 16 + "end.")
    assert tool.main(["--root", str(tmp_path)]) == 1


def test_wide_lines_fail_and_are_broken(tool, tmp_path, capsys):
    page = tmp_path / "README.md"
    row = "| " + "cell " * 40 + "|\n"
    code = "```\n" + "code " * 40 + "\n```\n"
    (tmp_path / "docs").mkdir()
    page.write_text(f"Short.\n\n- {'An item. ' * 20}\n  It goes on.\n\n{row}\n{code}")
    assert tool.main(["--root", str(tmp_path)]) == 1 and "README.md has lines over" in capsys.readouterr().err
    assert tool.main(["--root", str(tmp_path), "--wrap"]) == 0 == tool.main(["--root", str(tmp_path)])
    text = page.read_text()
    assert text.count("An item.") == 20 and row in text and code in text and "\n  An item." in text
    assert max(len(line) for line in text.splitlines() if line.startswith(("-", "  "))) <= 118


def test_our_own_pages_pass(tool):
    assert tool.main([]) == 0
