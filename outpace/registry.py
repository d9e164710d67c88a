"""The one table of methods: name -> where its class is.

Classes are imported on first use. The drafting methods of this package are listed in
`outpace.methods`, and nowhere else. Other packages add methods by a table of the same form: an entry
point of the group ``outpace.methods`` names a module that holds ``ENTRIES``. The table is read at the
start of every command, so its module should import nothing but this one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, get_args

from outpace.config import MethodSpec, build
from outpace.errors import OutpaceError, UnknownNameError

Kind = Literal[
    "drafter", "verifier", "policy", "objective", "learner", "builder", "exporter", "planner", "pair"
]


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """One method."""

    name: str
    kind: Kind
    family: str
    """Drafters: none, lookup, lm, own, heads, compose. Others: their kind."""
    path: str
    """``module:Class``, ``module:function``, or a module."""
    summary: str
    """One line for help and docs."""
    paper: str | None = None
    lossless: bool = True
    trained: bool = False
    """Whether it needs weights of its own."""
    auto: bool = False
    """Whether `auto` takes it as a member unasked; trained ones are, where they are found."""
    borrows: str | None = None
    """The method whose trained drafter it takes, where it has none of its own."""
    can: tuple[str, ...] = ()
    """What others look for by ability and not by name; see ``able``."""


REPRODUCES = "reproduces"
READS_REFERENCE, KEEPS_STORE, RUNS_MODEL = "reads-reference", "keeps-store", "runs-model"
LONG_TEXTS = "long-texts"

_METHODS = "outpace.methods"
_DECODING = ("drafter", "verifier", "policy")
_CALLED = {"objective": "method to train", "exporter": "method to export", "builder": "file to build"}


def _verifier(name: str, cls: str, summary: str, paper: str, **more: Any) -> MethodEntry:
    return MethodEntry(
        name, "verifier", "verifier", f"outpace.verifiers.{name}:{cls}", summary, paper, **more
    )


_CORE = (
    MethodEntry(
        "none", "drafter", "none", "outpace.drafters.none:NoDrafter", "Plain decoding: the empty draft"
    ),
    MethodEntry(
        "auto",
        "drafter",
        "compose",
        "outpace.engine.portfolio:Portfolio",
        "Picks among drafters, and none, by what pays best per sequence and step",
    ),
    _verifier(
        "match",
        "Match",
        "Draws the target's token and follows the branch that holds it",
        "SpecInfer's naive sampling, arXiv:2305.09781",
    ),
    _verifier(
        "chain",
        "Chain",
        "Rejection sampling along one sampled chain",
        "Leviathan et al. 2023, arXiv:2211.17192",
    ),
    _verifier(
        "tree",
        "Tree",
        "Recursive rejection over all groups of a token tree",
        "SpecInfer, arXiv:2305.09781; Sequoia, arXiv:2402.12374",
    ),
    _verifier(
        "block",
        "Block",
        "Keeps a prefix of a chain, judged as a whole: at least as long as chain's on average",
        "Sun et al. 2024, arXiv:2403.10444",
    ),
    _verifier(
        "k_seq",
        "KSeq",
        "Tries independent siblings against one discounted distribution",
        "SpecTr, arXiv:2310.15141",
    ),
    _verifier(
        "greedy_plus_one",
        "GreedyPlusOne",
        "Optimal for the likeliest siblings and one random one",
        "Hu et al. 2025, arXiv:2502.18779",
    ),
    _verifier(
        "spechub",
        "SpecHub",
        "Optimal for a draw and the likeliest token beside it, the draw first",
        "SpecHub, arXiv:2411.05289",
    ),
    _verifier(
        "traversal",
        "Traversal",
        "Judges the paths of a tree from its leaves",
        "Weng et al. 2025, arXiv:2505.12398",
    ),
    _verifier(
        "typical",
        "Typical",
        "Keeps what the target finds plausible; changes the distribution of the output",
        "Medusa, arXiv:2401.10774",
        lossless=False,
    ),
    _verifier(
        "coupled",
        "Coupled",
        "Draft and target share position-keyed noise: same seed, same text, any drafter",
        "Gumbel coupling, arXiv:2408.07978",
        can=(REPRODUCES,),
    ),
    MethodEntry(
        "fixed",
        "policy",
        "policy",
        "outpace.policies.fixed:Fixed",
        "The same number of guesses at every step",
    ),
    MethodEntry(
        "confidence",
        "policy",
        "policy",
        "outpace.policies.confidence:Confidence",
        "Stops a branch after a token that the drafter itself held unlikely",
        "transformers' assistant_confidence_threshold",
    ),
    MethodEntry(
        "specdecpp",
        "policy",
        "policy",
        "outpace.policies.specdecpp:SpecDecPlusPlus",
        "Ends a draft where a trained head foresees a refusal; for draft models",
        "Huang et al. 2024 (SpecDec++), arXiv:2405.19715",
        trained=True,
    ),
    MethodEntry(
        "schedule",
        "policy",
        "policy",
        "outpace.policies.schedule:Schedule",
        "Two levels more after a draft that was kept whole, one fewer after any other",
        "transformers' heuristic num_assistant_tokens_schedule",
    ),
    MethodEntry(
        "bandit",
        "policy",
        "policy",
        "outpace.policies.bandit:Bandit",
        "Draws plausible acceptance rates, and takes the drafter and depth that would then pay best",
        "Thompson sampling as in EESD, arXiv:2406.03853",
    ),
    MethodEntry(
        "goodput",
        "policy",
        "policy",
        "outpace.policies.goodput:Goodput",
        "The drafter and depth with most tokens per second, by moving averages of acceptance",
        "SmartSpec, arXiv:2406.14066",
    ),
    MethodEntry(
        "two_lines",
        "policy",
        "policy",
        "outpace.policies.two_lines:TwoLines",
        "A lookup while it is sure, else a trained drafter, and nothing in a large batch",
    ),
    MethodEntry(
        "auto",
        "policy",
        "policy",
        "outpace.policies.auto:Auto",
        "Picks the drafter, or none, and its depth by what they gain over the present throughput",
    ),
)


@dataclass(frozen=True, slots=True)
class _Table:
    """Every method, and why tables of other packages are left out."""

    methods: Mapping[tuple[str, str], MethodEntry]
    package: Mapping[tuple[str, str], str]
    """The package of each method that comes with another one."""
    broken: tuple[str, ...]


@lru_cache(maxsize=1)
def _table() -> _Table:
    """Read all tables once, ours first. Imports no class."""
    methods: dict[tuple[str, str], MethodEntry] = {(one.kind, one.name): one for one in builtin()}
    package: dict[tuple[str, str], str] = {}
    broken = []
    for point in entry_points(group=_METHODS):
        who = _source(point)
        try:
            rows: dict[tuple[str, str], MethodEntry] = {(r.kind, r.name): r for r in _rows(point.load())}
            for kind, name in rows.keys() & methods.keys():
                raise ValueError(f"there is a {kind} {name!r} already; rename this one")
        except Exception as error:  # whatever a stranger's module may raise
            broken.append(
                f"the methods of {who} are left out, {point.value} cannot be used: "
                f"{type(error).__name__}: {error}; mend or uninstall it"
            )
            continue
        methods.update(rows)
        package.update(dict.fromkeys(rows, who))
    return _Table(methods, package, tuple(broken))


def builtin() -> tuple[MethodEntry, ...]:
    """All methods of this package, in table order."""
    return (*_CORE[:1], *_methods(), *_CORE[1:])


def _methods() -> tuple[MethodEntry, ...]:
    """What `outpace.methods` lists; nothing if the folder was left out."""
    if importlib.util.find_spec(_METHODS) is None:
        return ()
    return _rows(importlib.import_module(_METHODS))


def _rows(module: Any) -> tuple[MethodEntry, ...]:
    """The rows of a table."""
    rows = tuple(module.ENTRIES)
    for row in rows:
        if not isinstance(row, MethodEntry):
            raise TypeError(f"ENTRIES holds {row!r}, which is no MethodEntry")
        if row.kind not in get_args(Kind):
            raise ValueError(f"{row.name!r} has the kind {row.kind!r}; known: {', '.join(get_args(Kind))}")
        if sum((one.kind, one.name) == (row.kind, row.name) for one in rows) > 1:
            raise ValueError(f"ENTRIES holds two {row.kind}s {row.name!r}")
    return rows


def _source(point: Any) -> str:
    """Who installed an entry point."""
    dist = getattr(point, "dist", None)
    return f"the plug-in {point.name!r}" if dist is None else f"the package {dist.name} {dist.version}"


def broken() -> tuple[str, ...]:
    """Why packages that are installed add no methods; a sentence each."""
    return _table().broken


def entries(kind: Kind | None = None) -> list[MethodEntry]:
    """Methods of one kind, or all drafters, verifiers and policies, in table order."""
    kinds = _DECODING if kind is None else (kind,)
    return [one for one in _table().methods.values() if one.kind in kinds]


def entry(kind: Kind, name: str, *others: str) -> MethodEntry:
    """One method.

    Args:
        others: names that are right as well where users write ``name``, to be suggested.

    Raises:
        UnknownNameError: with near names, and what was left out.
    """
    table = _table()
    found = table.methods.get((kind, name))
    if found is not None:
        return found
    if kind == "drafter" and (Path(name) / "config.json").is_file():
        raise OutpaceError(f"no drafter is called {name!r}; for the folder write ./{name}")
    known = [n for of_kind, n in table.methods if of_kind == kind]
    raise UnknownNameError(_CALLED.get(kind, kind), name, [*known, *others], table.broken)


def able(kind: Kind, ability: str) -> list[MethodEntry]:
    """Methods of a kind with an ability.

    REPRODUCES: a verifier whose text is a function of prompt and seed, whoever drafts.
    READS_REFERENCE: a drafter that follows a text given with the request.
    KEEPS_STORE: a drafter whose option ``store`` names a file of past answers.
    RUNS_MODEL: a drafter whose option ``model`` names a language model of the same vocabulary.
    LONG_TEXTS: a drafter that pays where keys and values are most of what a pass reads.
    """
    return [one for one in entries(kind) if ability in one.can]


def can(kind: Kind, name: str, ability: str) -> bool:
    """Whether a method has an ability. Raises as ``entry``."""
    return ability in entry(kind, name).can


def load(kind: Kind, name: str) -> Any:
    """The class (or function, or module) of a method; imports its module on first use.

    Raises:
        UnknownNameError: as ``entry``.
        OutpaceError: a method of another package that cannot be imported.
    """
    row = entry(kind, name)
    module, _, attribute = row.path.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found
    except Exception as error:  # whatever a stranger's module may raise
        who = _table().package.get((kind, name))
        if who is None:
            raise
        raise OutpaceError(
            f"{kind} {name!r} of {who} cannot be loaded from {row.path}: "
            f"{type(error).__name__}: {error}; mend or uninstall it"
        ) from error


def make(kind: Kind, spec: str) -> Any:
    """A verifier or policy from its spec."""
    parsed = MethodSpec.parse(spec)
    cls = load(kind, parsed.name)
    return cls(build(cls.Config, dict(parsed.options), f"{kind} {parsed.name!r}"))
