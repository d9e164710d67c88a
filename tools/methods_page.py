"""Writes docs/methods.md from the registry and the source of the methods. Imports no torch.

    python tools/methods_page.py           write the page
    python tools/methods_page.py --check   exit with 1 if the page is out of date
"""

import ast
import sys
from pathlib import Path

from outpace import registry

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "methods.md"

HEAD = """\
<!-- Written by `make docs` from the registry and the docstrings. Do not edit. -->

# Methods

A *method spec* names a drafter and its settings, on the command line and in Python:

    prompt_lookup
    prompt_lookup[max_ngram=5 tree_size=16]
    draft_model[model=smollm2-135m layers=12 tree=4x2x1 policy=confidence]

Besides its own settings, every drafter takes these:

| key | meaning |
|---|---|
| `tree` | shape of its drafts: `chain` (the default), children per level such as `4x2x1`, or a table of parents such as `[-1,-1,0]` |
| `tree_size` | most drafted tokens per pass; for a chain, its length |
| `verifier` | who decides what is kept, from the list below, with settings: `tree[replacement=true]`; default `tree` |
| `policy` | who sets the budget of every step, from the list below, with settings: `confidence[threshold=0.6]`; default `fixed` |

A setting that does not exist is an error. `outpace methods` prints this list for the methods that
are installed, plug-ins included.
"""  # noqa: E501

SECTIONS = (
    ("drafter", "Drafters", "A drafter guesses and never decides."),
    ("verifier", "Verifiers", "A verifier decides which guesses are kept, and adds one token."),
    ("policy", "Policies", "A policy sees numbers only, and says how much to draft."),
)


def render() -> str:
    """The page. Plug-ins are left out: the page describes this package."""
    own = [row for row in registry.rows() if row.path.startswith("outpace.")]
    parts = [HEAD]
    for kind, title, intro in SECTIONS:
        parts.append(f"## {title}\n\n{intro}\n")
        parts += [_method(row) for row in own if row.kind == kind]
    return "\n".join(parts)


def _method(row: registry.Row) -> str:
    module, _, cls = row.path.partition(":")
    file = ROOT / (module.replace(".", "/") + ".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    values = _attributes(_class(tree, cls))
    facts = []
    if row.kind == "drafter":
        facts.append(f"Family `{row.family}`.")
        if "default_tree" in values:
            facts.append("A tree unless told otherwise.")
        elif "default_nodes" in values:
            facts.append(f"Chains of {ast.unparse(values['default_nodes'])} unless told otherwise.")
    facts.append("Lossless." if row.lossless else "**Lossy**: needs `allow_lossy`.")
    if row.trained:
        facts.append("Needs weights of its own.")
    out = [f"### `{row.name}`\n", f"{row.summary}.\n"]
    if row.paper:
        facts.append(f"After {row.paper.rstrip('.')}.")
    facts.append(f"Code: [{file.name}](../{file.relative_to(ROOT).as_posix()}).")
    out.append(" ".join(facts) + "\n")
    config = values.get("Config")
    if not isinstance(config, ast.Name):
        raise SystemExit(f"error: {cls}.Config does not name a class; every method names its own")
    settings = _settings(_class(tree, config.id))
    if settings:
        out += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        out += [_cells(f"`{name}`", *more) for name, *more in settings]
        out.append("")
    return "\n".join(out)


def _cells(*cells: str) -> str:
    """A row of a table; a bar in a cell would end it."""
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _attributes(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Name -> value of what is assigned in the body of a class."""
    out = {}
    for part in node.body:
        targets = part.targets if isinstance(part, ast.Assign) else []
        if isinstance(part, ast.AnnAssign):
            targets = [part.target]
        for target in targets:
            if isinstance(part, (ast.Assign, ast.AnnAssign)) and part.value is not None:
                out[ast.unparse(target)] = part.value
    return out


def _settings(config: ast.ClassDef) -> list[tuple[str, str, str, str]]:
    """(field, type, default, docstring below it) of a config dataclass."""
    out = []
    for part, after in zip(config.body, [*config.body[1:], None], strict=True):
        if isinstance(part, ast.AnnAssign):
            name = ast.unparse(part.target)
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                raise SystemExit(f"error: {config.name}.{name} has no docstring below it")
            default = "required" if part.value is None else f"`{ast.unparse(part.value)}`"
            words = " ".join(str(after.value.value).split())
            out.append((name, f"`{ast.unparse(part.annotation)}`", default, words))
    return out


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)


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
