"""Every block of every page is run by a test, or marked as something to read.

A block in ``python`` or ``sh`` is run. ``text`` is output, a formula, or a command that needs what a test
has not: a model of the reader's, hours, a second machine. Its names and options are looked up nonetheless
(`tests/test_docs.py`). ``json``, ``toml`` and ``yaml`` are read.

The commands of ``sh`` blocks are run with the model and the drafters that they name, in the slow run:
``pytest -m slow tests/test_doc_blocks.py``. A command that names no amount of work gets one from ``FEWER``.
"""

import json
import shlex

import pytest
import yaml

from tests.test_docs import FENCE, INDENTED, PAGES, joined, run

PYTHON = {"README.md", "integrations.md", "python.md", "add-a-method.md", "serve.md", "vllm.md"}
"""Pages whose Python a test runs: test_docs, test_add_a_method, server/test_docs."""
RUNS = ("outpace",)
LOOKED_AT = ("pip", "make", "git", "cd", ".ci/run", ".ci/wheel", ".venv/bin/pip", ".venv/bin/python")
"""Programs whose lines set up an environment: what runs the tests has done that."""
NOT_HERE = {"LOG.md": "lists", "add-a-method.md": "test_add_a_method runs it, with its package"}

FEWER = {
    "check": {"--prompts": "1", "--max-new-tokens": "12"},
    "bench": {"--limit": "1", "--max-new-tokens": "16"},
    "generate": {"--max-new-tokens": "48"},
}
"""Command -> options that make it answer less; what it answers with, and compares, stays all there is."""

OTHERS = (["bench", "passes"], ["bench", "serve"])
"""Commands below one of these, with amounts of their own."""


def scaled(words):
    """A command line with amounts where it names none."""
    fewer = {} if words[1:3] in OTHERS else FEWER.get(words[1], {})
    return [*words, *(w for name, many in fewer.items() if name not in words for w in (name, many))]


READ = {
    "json": lambda text: (
        [json.loads(line) for line in text.splitlines()] if "\n{" in text else json.loads(text)
    ),
    "toml": lambda text: pytest.importorskip("tomllib").loads(text),
    "yaml": yaml.safe_load,
}


def shell(page):
    """Command lines of a page, as words."""
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "sh":
            for line in joined(text).splitlines():
                if line and not line.startswith("#"):
                    yield shlex.split(line, comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_run_or_marked(page):
    text = page.read_text(encoding="utf-8")
    for language, block in FENCE.findall(text):
        assert language in ("python", "sh", "text", *READ), f"a block without a mark: {block[:60]}"
        if language in READ:
            READ[language](block)
        assert language != "python" or page.name in PYTHON, f"no test runs {block[:60]}"
    if page.name not in NOT_HERE:
        indented = [block for block in INDENTED.findall(FENCE.sub("", text)) if block.strip()]
        assert not indented, f"a block that no fence marks: {indented[0][:60]}"
    for words in shell(page):
        assert words[0] in RUNS + LOOKED_AT or page.name in NOT_HERE, f"no test runs {words}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in NOT_HERE and any(w[0] in RUNS for w in shell(page))],
    ids=lambda page: page.name,
)
def test_shell_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for name in ("notes/a.txt", "book.txt", "article.txt"):
        (tmp_path / name).write_text("A river runs to the sea, and a road to the town. " * 20)
    rows = ({"prompt": f"Tell me about the number {i}."} for i in range(120))
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words in shell(page):
        if words[0] in RUNS:
            found = (sorted(tmp_path.glob(word)) if "*" in word else [word] for word in scaled(words)[1:])
            run(*(str(word) for several in found for word in several))
