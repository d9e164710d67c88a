"""Counts the words of every sentence in README.md and docs/, and fails over long ones.

python tools/sentences.py             say the median, and every sentence that is too long
python tools/sentences.py --over 25   list sentences over 25 words as well, without failing for them

Code, tables, headings and the addresses of links do not count. An item of a list ends a sentence.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
MOST, MEDIAN = 30, 16

CODE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->|<[^>\n]+>", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SPAN = re.compile(r"`[^`]+`")
ITEM = re.compile(r"^\s*([-*+]|\d+\.)\s+")
END = re.compile(r"[.!?]+[\"')*_]*\s+(?=[\"'(*_]*[A-Z0-9`])|[.!?]+[\"')*_]*$")
SHORT = re.compile(r"\b(e\.g|i\.e|vs|et al|etc|cf)\.")


def paragraphs(text: str) -> Iterator[str]:
    """Running text: a paragraph or an item of a list at a time."""
    text = COMMENT.sub("", CODE.sub("\n\n", text))
    lines: list[str] = []
    quoted = blank = True
    for line in [*text.splitlines(), ""]:
        quoted = line.startswith("    ") and (quoted or blank) and not ITEM.match(line)
        other = not line.strip() or quoted or line.lstrip().startswith(("|", "#", ":::", "!!!"))
        if other or ITEM.match(line):
            if lines:
                yield " ".join(lines)
            lines = []
        if not other:
            lines.append(ITEM.sub("", line).strip().removeprefix(":").strip())
        blank = not line.strip()


def sentences(text: str) -> Iterator[str]:
    """Every sentence of a page, without markup."""
    for paragraph in paragraphs(text):
        plain = SPAN.sub("`code`", LINK.sub(r"\1", paragraph))
        plain = SHORT.sub(r"\1", plain)
        yield from (one.strip() for one in END.split(plain) if words(one))


def words(sentence: str) -> int:
    """Words of a sentence: what holds a letter or a digit."""
    return sum(any(sign.isalnum() for sign in word) for word in sentence.split())


def pages(root: Path) -> list[Path]:
    """README.md and all of docs/."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def main(arguments: list[str]) -> int:
    """Print the median, and what is too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--over", type=int, default=MOST, metavar="N", help="list sentences over N words")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    found = [
        (words(one), page.relative_to(options.root), one)
        for page in pages(options.root)
        for one in sentences(page.read_text(encoding="utf-8"))
    ]
    for count, page, one in found:
        if count > min(options.over, MOST):
            print(f"{page}: {count} words: {one}", file=sys.stderr)
    middle, most = median(count for count, _, _ in found), max(found)[0]
    print(f"{len(found)} sentences, median {middle:g} words, longest {most}")
    if most > MOST or middle >= MEDIAN:
        limits = f"a sentence has at most {MOST} words, the median is under {MEDIAN}"
        print(f"error: {limits}; split the long ones", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
