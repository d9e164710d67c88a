"""The project speaks of itself alone: no traces of the places and tools it was made with."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A ~ in each keeps this file from matching itself.
BANNED = tuple(
    re.compile(pattern.replace("~", ""), re.IGNORECASE)
    for pattern in (
        r"(?<![\w.])/(wo~rk|tm~p)\b|/wo~rk/",  # folders of one machine
        r"(?<![\w.])/ro~ot/",
        r"(?<![\w.])/ho~me/\w",
        r"/opt/~(wheels|pypi)",
        r"\.\./sha~red\b|(?<![\w/.])sha~red/(data|specs|hooks)",
        # Where packages come from is pip's business.
        r"py~pi\.(org|python)|pytho~nhosted|np~mjs\.|registry\.np~m|deb~ian\.org",
        r"ana~conda\.(org|com)|cra~tes\.io|pro~xy\.golang",
        r"\bTO~DO\b|\bFIX~ME\b|\bXX~X\b",  # finish it, or write it into LOG.md
        r"\bissues? (#|no\.? ?)?\d",  # a reader cannot look them up here
        r"(assistant|agent|coding|model) ses~sion",
        r"\b(cla~ude|chat~gpt|copi~lot)\b",
        r"co-author~ed-by|generated (by|with) (an? )?(ai|llm|language model)\b",
    )
)
TEXT = {
    "",
    *".py .c .h .md .toml .txt .cfg .ini .yml .yaml .json .jsonl .jinja .js .css .html .sh .svg".split(),
    ".typed",
}
BINARY = {".bigram", ".safetensors"}
"""What no person wrote."""


def banned(text: str) -> list[str]:
    """Lines that say what the project does not speak of."""
    return [
        f"line {number}: {match.group(0)!r}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in BANNED
        if (match := pattern.search(line))
    ]


def test_no_file_speaks_of_where_it_was_made():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    kinds = {Path(name).suffix for name in listed}
    assert kinds <= TEXT | BINARY, f"say here what {sorted(kinds - TEXT - BINARY)} hold"
    files = [ROOT / name for name in listed if Path(name).suffix in TEXT]
    found = [
        f"{file.relative_to(ROOT)}: {fault}"
        for file in files
        if file.exists()
        for fault in banned(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "see /wo~rk/main",
        "in /wo~rk",
        "to /tm~p/out",
        "'/tm~p'",
        "# TO~DO: later",
        "pip index at py~pi.org",
        "https://registry.np~mjs.org",
        "as iss~ue 2 says",
    ],
)
def test_the_list_matches_what_it_should(text):
    assert banned(text.replace("~", ""))


def test_ordinary_words_pass():
    assert not banned("The assistant's turn; a shared prefix; works; issues an error; homework")
    assert not banned("a draft/work ratio, {tmp_path}/out, data/tmp, /workers, npm install")
