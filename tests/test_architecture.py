"""Imports point one way, and state has no place to hide. Reads the source; imports no torch.

The table of allowed edges is the architecture; docs/how/architecture.md says why it is so.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from outpace import registry

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "outpace"

MAY_IMPORT = {
    # layer: layers of other packages that it may import, lowest first. `types` includes `law`.
    "errors": "",
    "clock": "",
    "files": "errors",
    "curve": "",
    "config": "errors files",
    # Compiled code, and how it is built and loaded.
    "kernels": "config files",
    "law": "kernels",
    "registry": "errors config",
    "params": "errors",
    "rows": "kernels",
    "stops": "params",
    "records": "",
    "types": "law curve records",
    "coins": "kernels types",
    "sampling": "kernels errors params rows types",
    # The contracts: what a step is written against. A tree's row lends a slot of a cache.
    "cache.base": "",
    "tree": "errors files types coins sampling cache.base",
    "models.base": "errors clock types cache.base",
    "drafters.base": "clock types tree models.base",
    "drafters.wrapping": "clock types drafters.base",
    "verifiers.base": "errors types coins",
    "policies.tuning": "",
    "policies.costs": "types policies.tuning",
    "policies.base": "types coins policies.costs",
    # The step knows contracts and no implementation, so methods may stand on it.
    "machine": "errors types coins sampling tree cache.base models.base drafters.base verifiers.base"
    " policies.base",
    "step": "errors clock types coins sampling machine policies.base",
    # The implementations. A policy sees numbers only; a verifier sees laws and coins only,
    # and has their numbers compared by compiled code.
    "cache": "kernels cache.base",
    "models": "kernels errors files config params types tree cache cache.base models.base",
    # Folders of trained drafters, whoever wrote them: no method is known there.
    "drafters.trained": "errors files config types models models.base",
    # What is made of other drafters finds them through the registry.
    "drafters": "errors config registry clock types coins sampling tree cache"
    " cache.base models models.base drafters.base drafters.trained",
    "verifiers": "kernels types coins verifiers.base",
    "policies": "types coins policies.base policies.costs policies.tuning",
    # The engine finds methods through the registry and never names one.
    "engine": "errors config registry params stops types coins sampling tree machine step"
    " models models.base drafters.base drafters.trained verifiers.base policies.base"
    " policies.costs",
    # What other programs call.
    "hf": "config errors files params engine models",
    "vllm": "errors config registry params types coins sampling tree models models.base drafters.base"
    " policies.base engine",
    "train": "errors config files registry params types machine cache.base models models.base drafters"
    " drafters.trained engine",
    "analysis": "kernels errors config files registry params types coins sampling tree machine step"
    " cache.base models models.base drafters.base drafters.trained verifiers verifiers.base"
    " policies policies.base policies.costs policies.tuning engine",
    # A room may import everything below it, and no other room.
    "methods": "errors config files registry params clock rows stops types coins sampling tree machine step"
    " cache cache.base models models.base drafters drafters.base drafters.wrapping drafters.trained"
    " verifiers.base policies.base engine analysis train",
    "bench": "errors config files params types tree models models.base drafters.base engine",
    # Many requests at once, and their way in from the network.
    "serving": "errors clock config registry params types sampling tree machine cache.base"
    " models models.base drafters.base drafters.wrapping policies.base engine",
    "server": "errors config registry params sampling models engine serving",
    "llm": "errors files engine server serving",
    "cli": "hf kernels errors config files registry params tree models models.base drafters drafters.trained"
    " engine analysis bench train serving server",
    "ray": "errors config serving server cli",
    "__main__": "cli",
}
TYPE_ONLY = {("models.base", "models")}
"""Edges that exist in annotations alone, below ``if TYPE_CHECKING``."""
EXEMPT = {"outpace"}
"""The public surface names the public names of every layer."""

NAMES = {
    # module: names of methods that its strings may hold, outside docstrings; and why.
    "outpace.bench.peers.child": "prompt_lookup",  # an option of OpenVINO
    "outpace.bench.peers.contenders": "prompt_lookup",  # an option of transformers and OpenVINO
    "outpace.bench.formats": "reference",  # a field of a file of prompts
    "outpace.bench.workloads": "reference",  # the same
    "outpace.server.bounds": "grammar",  # a field of requests
    "outpace.server.parsing": "grammar",  # a setting of `SamplingParams`
    "outpace.server.structured_output": "grammar",  # a field of requests
    "outpace.server.tools": "grammar",  # the same
    "outpace.vllm": "suffix",  # vLLM is given the name of a class
}
"""`none` and `auto`, which are no rooms, may be named by all. Texts that hold a name among other words
are help and examples."""

CHANGERS = frozenset("append add update setdefault pop popitem clear extend insert remove discard".split())


def sources() -> dict[str, str]:
    """Module name -> source."""
    out = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        out[name] = file.read_text(encoding="utf-8")
    return out


def layer(module: str) -> str:
    """``outpace.models.hf.target`` -> ``models``; contracts are layers of their own."""
    inner = module.removeprefix("outpace.")
    return inner if inner in MAY_IMPORT else inner.split(".")[0]


def methods() -> set[str]:
    """Modules that hold a registered method."""
    return {row.path.partition(":")[0] for row in registry.builtin()}


def room(module: str) -> str:
    """``outpace.methods.eagle3.net`` -> ``eagle3``."""
    return module.split(".")[2] if module.count(".") > 1 else ""


def imports(tree: ast.Module, known: set[str]) -> Iterator[tuple[str, bool]]:
    """(module, whether for annotations only) of every import, wherever it stands."""
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in for_types
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write absolute imports"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                named = full in known or full == "outpace.__version__"
                yield (full if named else str(node.module)), id(node) in for_types


def drafters() -> set[str]:
    """Names of drafters that have a room."""
    return {row.name for row in registry.builtin() if row.kind == "drafter"} - {"none", "auto"}


def _names(module: str, tree: ast.Module) -> list[str]:
    """Strings that name a method or a room: the name alone, a method spec of it, or a module."""
    if layer(module) == "methods":
        return []
    words = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    wrong, out = drafters() - set(NAMES.get(module, "").split()), []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or id(node) in words:
            continue
        name = node.value.strip().partition("[")[0]
        if name in wrong:
            out.append(f"line {node.lineno}: names the method {name!r}; look it up by ability or kind")
        if node.value.startswith("outpace.methods") and module != "outpace.registry":
            out.append(f"line {node.lineno}: names a module of outpace.methods")
    return out


def faults(module: str, source: str, known: set[str]) -> list[str]:
    """Everything that is wrong with one module."""
    if not source.isascii():
        return ["holds characters outside ASCII; write escapes"]
    tree = ast.parse(source, feature_version=(3, 10))
    out = []
    if not ast.get_docstring(tree):
        out.append("has no docstring")
    for target, type_only in imports(tree, known):
        if target.startswith("outpace") and module not in EXEMPT:
            out += _edge(module, target, type_only)
    out += _transformers(module, tree)
    out += _names(module, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            out.append(f"line {node.lineno}: global")
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            out.append(f"line {node.lineno}: wildcard import")
        if module != "outpace.config" and _reads_environment(node):
            out.append(f"line {node.lineno}: environment variable outside config.py")
    out += _state(module, tree)
    return out


def _edge(module: str, target: str, type_only: bool) -> list[str]:
    if target == "outpace.__version__":
        return []
    if target == "outpace":
        return ["imports the public surface; import the module that defines the name"]
    here, there = layer(module), layer(target)
    if here not in MAY_IMPORT:
        return [f"layer {here!r} has no row in MAY_IMPORT; add it, with what it may import"]
    if type_only and (here, there) in TYPE_ONLY:
        return []
    table = methods()
    if here != "methods" and module in table and target in table and module != target:
        return [f"method imports method {target}; move what they share to a file of its own"]
    if here == there == "methods" and target != "outpace.methods" and room(module) != room(target):
        return [f"reaches into the room of {target}; move what they share below outpace/methods"]
    allowed = {here, *MAY_IMPORT[here].replace("types", "types law curve records").split()}
    if there not in allowed:
        return [f"imports {target}; {here} may import: {MAY_IMPORT[here] or 'nothing of ours'}"]
    return []


def _transformers(module: str, tree: ast.Module) -> list[str]:
    """transformers takes seconds to import, and only the general path needs it."""
    at_top = {id(node) for node in tree.body}
    out = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        if any(name.split(".")[0] == "transformers" for name in names):
            if not module.startswith(("outpace.models.hf.", "outpace.bench.peers.hf", "outpace.hf")):
                out.append(f"line {node.lineno}: transformers outside models/hf/")
            if id(node) in at_top:
                out.append(f"line {node.lineno}: transformers imported at module level")
    return out


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("environ", "getenv", "environb", "putenv")
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any("env" in alias.name for alias in node.names)
    return False


def _state(module: str, tree: ast.Module) -> list[str]:
    """Module-level variables: all are constants, and no function changes one."""
    out: list[str] = []
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets = [node.target]
        else:
            continue
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple):
                targets += target.elts
            elif not isinstance(target, ast.Name):
                out.append(f"line {node.lineno}: changes something at import")
            elif target.id.startswith("__") or (layer(module), target.id) == ("cli", "app"):
                continue  # typer wants its application at module level, under this name
            elif isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "partial":
                continue  # a function
            elif target.id.lstrip("_")[:1].islower():
                out.append(f"line {node.lineno}: module-level variable {target.id}")
            else:
                names.add(target.id)
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for node in ast.walk(function):
                changed = _changed(node)
                if changed in names:
                    out.append(f"line {node.lineno}: a function changes the constant {changed}")
    return out


def _changed(node: ast.AST) -> str | None:
    """The name whose object this node changes in place."""
    held: ast.AST | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        held = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGERS:
        held = node.func.value
    return held.id if isinstance(held, ast.Name) else None


def test_every_module_obeys():
    modules = sources()
    known = set(modules)
    wrong = [
        f"{module}: {fault}" for module, source in modules.items() for fault in faults(module, source, known)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_table_has_no_cycle_and_no_unknown_name():
    done: set[str] = set()
    for name, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) <= done, f"{name}: rows must stand above those that use them"
        done.add(name)
    modules = set(sources())
    for name in MAY_IMPORT:
        assert f"outpace.{name}" in modules, f"row {name!r} of MAY_IMPORT names nothing"


def test_every_edge_of_the_table_is_used():
    modules = sources()
    used: dict[str, set[str]] = {}
    for module, source in modules.items():
        for target, _ in imports(ast.parse(source), set(modules)):
            if target.startswith("outpace.") and module not in EXEMPT:
                used.setdefault(layer(module), set()).add(layer(target))
    for name, allowed in MAY_IMPORT.items():
        if name == "methods":  # a plug-in of its own may need any
            continue
        found = used.get(name, set())
        found |= {"types"} if found & {"law", "curve", "records"} else set()
        assert set(allowed.split()) <= found, f"{name} imports none of {sorted(set(allowed.split()) - found)}"


def test_the_registry_names_classes_that_exist():
    modules = sources()
    for entry in registry.builtin():
        module, _, name = entry.path.partition(":")
        tree = ast.parse(modules[module])
        defined = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
        assert not name or name in defined, entry


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("outpace.step", "from outpace.models.hf.target import HFTarget", "imports outpace.models.hf.target"),
        ("outpace.policies.fixed", "from outpace.sampling import Warp", "imports outpace.sampling"),
        ("outpace.types", "import outpace.errors", "types may import: law curve records"),
        ("outpace.law", "def f():\n    import outpace.types", "law may import: kernels"),
        ("outpace.verifiers.tree", "from outpace.verifiers.match import follow", "imports method"),
        ("outpace.methods.lookup.other", "from outpace.methods.graph import Graph", "reaches into the room"),
        ("outpace.engine.engine", "from outpace.methods.graph import Graph", "imports outpace.methods.graph"),
        (
            "outpace.server.app",
            "def f():\n    import outpace.methods.lookup",
            "imports outpace.methods.lookup",
        ),
        ("outpace.drafters.parts", "import outpace.methods", "imports outpace.methods"),
        ("outpace.engine.engine", "HOME = 'outpace.methods.graph'", "names a module of outpace.methods"),
        ("outpace.engine.engine", "A = x == 'eagle3'", "names the method 'eagle3'"),
        ("outpace.engine.engine", "A = f'suffix[tree={x}]'", "names the method 'suffix'"),
        ("outpace.engine.portfolio", "A = 'suffix[tree=2x2]'", "names the method 'suffix'"),
        ("outpace.engine.engine", "from outpace import Engine", "the public surface"),
        ("outpace.quantum.core", "import outpace.types", "has no row"),
        ("outpace.coins", "X = 1", "no docstring"),
        ("outpace.coins", "from math import *", "wildcard"),
        ("outpace.coins", "X = 1\ndef f():\n    global X", "global"),
        ("outpace.coins", "import os\nX = os.environ.get('A')", "environment variable"),
        ("outpace.coins", "from os import getenv", "environment variable"),
        ("outpace.coins", "cache = {}", "module-level variable cache"),
        ("outpace.coins", "_seen: list[int] = []", "module-level variable _seen"),
        ("outpace.coins", "SEEN = []\ndef f(x):\n    SEEN.append(x)", "changes the constant SEEN"),
        ("outpace.coins", "SEEN = {}\ndef f(x):\n    SEEN[x] = 1", "changes the constant SEEN"),
        ("outpace.coins", "import torch\ntorch.x = 1", "changes something at import"),
        ("outpace.coins", "X = '\u00e9'", "ASCII"),
        ("outpace.models.hf.target", "import transformers", "at module level"),
        ("outpace.models.text", "def f():\n    import transformers.utils", "outside models/hf"),
        ("outpace.coins", "try:\n    pass\nexcept* ValueError:\n    pass", "3.11"),
    ],
)
def test_the_checks_can_fail(module, source, fault):
    documented = source if fault == "no docstring" else f'"""Words."""\n{source}'
    known = {*sources(), module}
    try:
        found = faults(module, documented, known)
    except SyntaxError as error:
        found = [str(error)]
    assert any(fault in line for line in found), found


def test_every_exception_is_needed():
    modules = sources()
    for module, names in NAMES.items():
        tree = ast.parse(modules[module])
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        held = {text.strip().partition("[")[0] for text in texts if isinstance(text, str)}
        assert set(names.split()) <= held, module


def test_a_good_module_passes():
    good = '"""Words."""\nfrom outpace.law import Law as Law\nA = 1\ndef f(a):\n    a.append(A)\n'
    assert faults("outpace.types", good, set(sources())) == []
