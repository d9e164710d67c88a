"""Small files stay readable, and the part that every method stands on stays small.

A leaf is a file that holds one registered method (or one training objective). The core is what
every method stands on: records, contracts, the step, sampling, trees, caches, the engine and the
decoder's pass. Everything else (reading models, reports, commands) is rooms around it, small file
by small file but without a total. Lines are physical, blank ones and comments included. Do not
golf: split, or simplify.
"""

from pathlib import Path

from outpace import registry

ROOT = Path(__file__).parents[1]
LEAF, STRUCTURAL, TOTAL = 300, 450, 7740
TABLE = "outpace/methods/__init__.py"
"""A row per method: it grows with the methods."""
ROOMS = ("analysis", "bench", "cli", "kernels", "methods", "ray", "server", "serving", "train")
FAMILIES = ("drafters", "verifiers", "policies")
CORE_MODELS = {"attention", "base", "blocks", "decoder", "packed", "passes"}


def sizes() -> dict[str, tuple[bool, int]]:
    """File -> (is it a leaf, lines)."""
    kinds = ("drafter", "objective", "verifier", "policy")
    paths = [entry.path for entry in registry.builtin() if entry.kind in kinds]
    leaves = {path.partition(":")[0].replace(".", "/") + ".py" for path in paths}
    out = {}
    for file in sorted((ROOT / "outpace").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        lines = len(file.read_text(encoding="utf-8").splitlines())
        out[name] = (name in leaves, lines)
    return out


def overruns(table: dict[str, tuple[bool, int]]) -> list[str]:
    """What is too long, worst first, in one line each."""
    out = []
    for name, (leaf, lines) in sorted(table.items(), key=lambda item: -item[1][1]):
        if name == TABLE:
            continue
        most = LEAF if leaf else STRUCTURAL
        if lines > most:
            out.append(f"{lines:6d}  {name} (a {'leaf' if leaf else 'structural file'}: {most})")
    core = [(n, name) for name, (leaf, n) in table.items() if not leaf and is_core(name)]
    total = sum(lines for lines, _ in core)
    if total > TOTAL:
        out.append(f"{total:6d}  all core files together ({TOTAL}):")
        out += [f"{lines:14d}  {name}" for lines, name in sorted(core, reverse=True)]
    return out


def is_core(name: str) -> bool:
    """Whether every method stands on this file."""
    _, *folders, file = name.split("/") if "/" in name else ("", name)
    if not folders:
        # A table with a row per method grows with the methods; those that speak to other programs are none.
        return file not in ("registry.py", "hf.py", "llm.py", "vllm.py")
    if folders[0] == "models":
        return len(folders) == 1 and file.removesuffix(".py") in CORE_MODELS
    # What the methods of one family share is theirs; every method stands on the contract alone.
    if folders[0] in FAMILIES:
        return file == "base.py"
    return folders[0] not in ROOMS


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
