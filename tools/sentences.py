"""Counts the words of every sentence in README.md, docs/ and docstrings; fails over long ones and wide lines.

python tools/sentences.py             say the median, and every sentence that is too long
python tools/sentences.py --over 20   list sentences over 20 words as well, without failing for them
python tools/sentences.py --wrap      break wide lines of running text

Code, tables, headings and the addresses of links do not count. An item of a list ends a sentence.
"""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from textwrap import wrap

ROOT = Path(__file__).resolve().parents[1]
MOST, MEDIAN, WIDEST = 25, 16, 118

CODE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->|<[^>\n]+>", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SPAN = re.compile(r"(`+)[^`]+\1")
ITEM = re.compile(r"^\s*([-*+]|\d+\.)\s+")
END = re.compile(r"[.!?]+[\"')*_]*\s+(?=[\"'(*_]*[A-Z0-9`])|[.!?]+[\"')*_]*$")
FIXED = re.compile(r"\s*(\||#|<|>|!|:|```|~~~|\[[^\]]+\]:)")
"""Lines that are no running text: tables, headings, markup, pictures."""
MARK, GLUE = re.compile(r" (?=([-*+]|\d+\.|\||#+|>) )"), "\x00"
"""What would be markup at the beginning of a line stays behind the word before."""
LABEL = re.compile(r"^[ \t]*\*{0,2}[\w.`]+(, \*{0,2}[\w.`]+)*:(?=\s)", re.MULTILINE)
"""What begins an entry of a docstring: a parameter, or a heading."""
LETTERS = re.compile(r"^Shape letters: .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
"""A list of what the letters of shapes mean."""
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


def wrapped(text: str) -> str:
    """A page whose running text has no line over the limit; paragraphs without one stay as they are."""
    out: list[str] = []
    lines, fence = text.splitlines(), ""
    while lines:
        line = lines.pop(0)
        if mark := re.match(r"\s*(```+|~~~+)", line):
            fence = "" if mark[1] == fence else fence or mark[1]
        if fence or len(line) <= WIDEST or FIXED.match(line):
            out.append(line)
            continue
        indent = re.match(r"\s*(?:[-*+]\s+|\d+\.\s+)?", line)[0]  # type: ignore[index]
        whole = [line.removeprefix(indent)]
        while lines and lines[0].strip() and not (ITEM.match(lines[0]) or FIXED.match(lines[0])):
            whole.append(lines.pop(0).strip())
        rest = " " * len(indent)
        joined = MARK.sub(GLUE, " ".join(whole))
        broken = wrap(
            joined,
            WIDEST,
            initial_indent=indent,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
        out += [one.replace(GLUE, " ") for one in broken]
    return "\n".join(out) + "\n" * text.endswith("\n")


def pages(root: Path) -> list[Path]:
    """README.md and all of docs/."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def docstrings(source: str) -> Iterator[str]:
    """What a reader of a module is told: its strings that stand alone, entry by entry."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield LABEL.sub("\n\n", LETTERS.sub("", inspect.cleandoc(node.value.value)))


def main(arguments: list[str]) -> int:
    """Print the median, and what is too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--over", type=int, default=MOST, metavar="N", help="list sentences over N words")
    parser.add_argument("--wrap", action="store_true", help="break wide lines of running text")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    wide = []
    for page in pages(options.root):
        text = page.read_text(encoding="utf-8")
        if wrapped(text) != text and options.wrap:
            page.write_text(wrapped(text), encoding="utf-8")
        elif wrapped(text) != text:
            wide.append(page.relative_to(options.root))
    found = [
        (words(one), page.relative_to(options.root), one)
        for page in pages(options.root)
        for one in sentences(page.read_text(encoding="utf-8"))
    ]
    told = [
        (words(one), module.relative_to(options.root), one)
        for module in sorted((options.root / "outpace").rglob("*.py"))
        for text in docstrings(module.read_text(encoding="utf-8"))
        for one in sentences(text)
    ]
    for count, page, one in found + told:
        if count > min(options.over, MOST):
            print(f"{page}: {count} words: {one}", file=sys.stderr)
    middle, most = median(count for count, _, _ in found), max(found + told)[0]
    print(f"{len(found)} sentences, median {middle:g} words; {len(told)} in docstrings; longest {most}")
    if most > MOST or middle >= MEDIAN:
        limits = f"a sentence has at most {MOST} words, the median is under {MEDIAN}"
        print(f"error: {limits}; split the long ones", file=sys.stderr)
        return 1
    if wide:
        print(
            f"error: {wide[0]} has lines over {WIDEST} columns; run python {sys.argv[0]} --wrap",
            file=sys.stderr,
        )
    return int(bool(wide))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
