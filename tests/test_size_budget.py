"""Small files stay readable, and the part that every method stands on stays small.

A leaf is a file that holds one registered method (or one training objective); everything else is
structure. Lines are physical, blank ones and comments included. Do not golf: split, or simplify.
"""

from pathlib import Path

from outpace import registry

ROOT = Path(__file__).parents[1]
LEAF, STRUCTURAL, TOTAL = 250, 400, 6000


def sizes() -> dict[str, tuple[bool, int]]:
    """File -> (is it a leaf, lines)."""
    leaves = {row.path.partition(":")[0].replace(".", "/") + ".py" for row in registry._BUILTIN}
    out = {}
    for file in sorted((ROOT / "outpace").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        objective = name.startswith("outpace/train/objectives/") and file.stem != "__init__"
        lines = len(file.read_text(encoding="utf-8").splitlines())
        out[name] = (name in leaves or objective, lines)
    return out


def overruns(table: dict[str, tuple[bool, int]]) -> list[str]:
    """What is too long, worst first, in one line each."""
    out = []
    for name, (leaf, lines) in sorted(table.items(), key=lambda item: -item[1][1]):
        most = LEAF if leaf else STRUCTURAL
        if lines > most:
            out.append(f"{lines:6d}  {name} (a {'leaf' if leaf else 'structural file'}: {most})")
    total = sum(lines for leaf, lines in table.values() if not leaf)
    if total > TOTAL:
        out.append(f"{total:6d}  all structural files together ({TOTAL}):")
        structural = [(lines, name) for name, (leaf, lines) in table.items() if not leaf]
        out += [f"{lines:14d}  {name}" for lines, name in sorted(structural, reverse=True)]
    return out


def test_files_keep_to_the_budget():
    found = overruns(sizes())
    assert not found, "\n" + "\n".join(found)


def test_the_budget_can_be_overrun():
    fits = {"leaf.py": (True, LEAF), "a.py": (False, STRUCTURAL)}
    assert overruns(fits) == []
    assert "leaf.py" in overruns({"leaf.py": (True, LEAF + 1)})[0]
    assert "a.py" in overruns({"a.py": (False, STRUCTURAL + 1)})[0]
    many = {f"{i}.py": (False, STRUCTURAL) for i in range(TOTAL // STRUCTURAL + 1)}
    assert "together" in overruns(many)[0]


def test_leaves_are_recognised():
    table = sizes()
    assert table["outpace/drafters/none.py"][0]
    assert table["outpace/verifiers/tree.py"][0]
    assert not table["outpace/step.py"][0]
    assert not table["outpace/drafters/base.py"][0]
