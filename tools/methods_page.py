"""Writes docs/methods.md from the registry and the classes of the methods.

python tools/methods_page.py           write the page
python tools/methods_page.py --check   exit with 1 if the page is out of date
"""

import sys
from pathlib import Path

from outpace import registry
from outpace.cli.settings import Setting, lacks, natural_shape, settings_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "methods.md"

HEAD = """\
<!-- Written by `make docs` from the registry and the docstrings. Do not edit. -->

# Methods

A *method spec* names a drafter and its settings, on the command line and in Python:

    prompt_lookup
    prompt_lookup[max_ngram=5 tree_size=16]
    draft_model[model=smollm2-135m layers=12 tree=4x2x1 policy=confidence]
    ./my-head[tree=chain]

The last one is a folder that `outpace train` wrote, and stands for `METHOD[model=./my-head tree=chain]`; a
path has a slash in it, or begins with a dot or `~`.

Besides its own settings, every drafter takes these; `auto` takes `policy` alone, and leaves the others to its
members:

| key | meaning |
|---|---|
| `tree` | shape of its drafts: `chain`, `dynamic` (grown where it pays; `dynamic:W` expands at most W nodes per level, `dynamic:W:L` takes guesses that are at least L / `tree_size` likely), children per level such as `4x2x1`, a table of parents such as `[-1,-1,0]`, or a `FILE.json` of `outpace analyze shape`; default: `chain`, unless the drafter below says otherwise |
| `tree_size` | most drafted tokens per pass; for a chain, its length |
| `verifier` | who decides what is kept, from the list below, with settings: `tree[replacement=true]`; default `tree` |
| `policy` | who sets the budget of every step, from the list below, with settings: `confidence[threshold=0.6]`; default `fixed`, of `auto` the policy `auto` |

A setting that does not exist is an error. `outpace methods` prints this list for the methods that
are installed, plug-ins included, and `outpace methods NAME` the settings of one.
"""  # noqa: E501

SECTIONS = (
    ("drafter", "Drafters", "A drafter guesses and never decides."),
    ("verifier", "Verifiers", "A verifier decides which guesses are kept, and adds one token."),
    ("policy", "Policies", "A policy sees numbers only, and says how much to draft."),
)


def render() -> str:
    """The page. Plug-ins are left out: the page describes this package."""
    own = [row for row in registry.entries() if row.path.startswith("outpace.")]
    parts = [HEAD]
    for kind, title, intro in SECTIONS:
        parts.append(f"## {title}\n\n{intro}\n")
        parts += [_method(row) for row in own if row.kind == kind]
    return "\n".join(parts)


def _method(row: registry.MethodEntry) -> str:
    cls = registry.load(row.kind, row.name)
    file = ROOT / (row.path.partition(":")[0].replace(".", "/") + ".py")
    facts = []
    if row.kind == "drafter":
        facts.append(f"Family `{row.family}`.")
        facts += [shape] if (shape := natural_shape(cls)) else []
    facts.append("Lossless." if row.lossless else "**Lossy**: needs `allow_lossy`.")
    if row.trained:
        facts.append(f"Needs {lacks(row)}.")
    out = [f"### `{row.name}`\n", f"{row.summary}.\n"]
    if row.paper:
        facts.append(f"After {row.paper.rstrip('.')}.")
    facts.append(f"Code: [{file.name}](../{file.relative_to(ROOT).as_posix()}).")
    out.append(" ".join(facts) + "\n")
    settings = settings_of(cls.Config)
    if settings:
        out += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        out += [_line(cls.Config, one) for one in settings]
        out.append("")
    return "\n".join(out)


def _line(config: type, one: Setting) -> str:
    """A row of the table; a bar in a cell would end it."""
    if not one.meaning:
        raise SystemExit(f"error: {config.__name__}.{one.name} has no docstring below it")
    default = "required" if one.default is None else f"`{one.default}`"
    cells = (f"`{one.name}`", f"`{one.kind}`", default, one.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    if arguments not in ([], ["--check"]):
        print("usage: python tools/methods_page.py [--check]", file=sys.stderr)
        return 2
    page, name = render(), PAGE.relative_to(ROOT)
    if arguments:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
            return 0
        print(f"error: {name} is out of date; run: make docs", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
