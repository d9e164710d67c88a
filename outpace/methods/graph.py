"""Graph: hypotheses of a draft model that meet again go on together; their tree is verified.

    run          the -+- cat - sat - on -+- a        "sat on" ends two hypotheses; behind it
                      +- dog - sat -/    +- the      the draft model is run once, and
    verified     the -+- cat - sat - on -+- a        verification sees a tree
                      |                  +- the
                      +- dog - sat - on -+- a
                                         +- the

Branches of a tree often differ in one token and agree again. A branch may end in the same tokens
(``agree`` of them before the last) as another one that the draft model has gone on from. Then it
is not run again. What the model said there is said here. The tree grows by any rule, to any shape,
in its budget. The copies are what unrolls the graph, and they cost the draft model nothing.

Guesses below a copy have the distribution of the place that it stands for. They are drawn from it afresh
in every copy, and it is the q that is recorded. So any verifier works, at any temperature. Only ancestors
are never stood for: text that goes in circles would be guessed to go on so.

Pays where a row costs the draft model something, and wide trees grow. Keys that were computed
behind other words are dropped when text is committed. So the draft model reads a few tokens again
after a path with a copy in it. What drafts in the target's own slot (`early_exit`) cannot share.

    graph[draft=draft_model[model=M] tree=4x3x2x1]
    graph[draft=eagle3 tree=dynamic tree_size=24]

Cost: a hash per expanded node; a copy of the logits' rows of every level, and another where copies are.
Paper: Gong et al. 2024 (GSD), arXiv:2407.16207. Theirs is greedy, or lossy; it keeps one merged
edge per node, which here every copy is.

Shape letters: F nodes of a frontier, D draft vocabulary, V columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.base import Drafter, ExpandingDrafter, Request, Traits
from outpace.drafters.parts import load_part, split_parts
from outpace.drafters.wrapping import WrappingDrafter
from outpace.errors import SpecError
from outpace.models.base import TREE, Target
from outpace.tree.growth import Branch, DraftRow
from outpace.types import ROOT, Draft, Outcome

_NOBODY = -2
"""A number by which the draft model knows no node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphConfig:
    draft: str = "draft_model"
    """Spec of the drafter that expands nodes: draft_model[model=M], eagle3."""
    agree: int = 1
    """Tokens before the last that have to agree as well, so that two hypotheses meet; -1: none
    ever meet, which leaves the plain tree."""

    def __post_init__(self) -> None:
        if self.agree < -1:
            raise ValueError(f"agree must be at least -1, got {self.agree}")


@dataclass(slots=True, eq=False)
class _Graph:
    """The expanded nodes of one draft under way."""

    text: tuple[int, ...]
    """The last committed tokens, as many as have to agree."""
    stands: dict[int, int] = field(default_factory=dict)
    """Node -> the node whose expansion it has: itself, or the one that it is a copy of."""
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """Last tokens -> nodes that were run."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Node that was run -> what the model said behind it [D]."""
    own: set[tuple[int, ...]] = field(default_factory=set)
    """Paths, in tokens, of the nodes that were run behind exactly this path."""

    def visit(self, node: int, branch: Branch[Any]) -> bool:
        """Note a node that is to be expanded; whether the model has to be run for it."""
        path = branch.path_tokens(node)
        end = (*self.text, *path)[len(path) :]
        above = (ROOT, *branch.path(node))[:-1]
        met = self._met(end, [self.stands[place] for place in above]) if end else None
        self.stands[node] = node if met is None else met
        if met is None:
            self.ends.setdefault(end, []).append(node)
            if not path or path[:-1] in self.own:
                self.own.add(path)
        return met is None

    def _met(self, end: tuple[int, ...], above: Sequence[int]) -> int | None:
        """The node to stand for: the newest, since its place is the closest."""
        found = (place for place in reversed(self.ends.get(end, ())) if place not in above)
        return next(found, None)


class Graph(WrappingDrafter[Any]):
    """Lets the branches of a tree share what the draft model says.

    Its states are those of the draft model.

    Args:
        draft: expands nodes. From now on its growing trees ask this drafter instead.
    """

    Config = GraphConfig
    traits = Traits(default_nodes=16, default_tree="dynamic", needs=frozenset({TREE}), samples=True)

    def __init__(self, config: GraphConfig, draft: ExpandingDrafter[Any]) -> None:
        self.config, self.draft = config, draft
        super().__init__([draft])
        self._graphs: dict[int, _Graph] = {}
        self._id_D: Tensor | None = None
        draft.between = self._expand

    @classmethod
    def load(cls, config: GraphConfig, target: Target) -> Graph:
        """Load the draft model.

        Raises:
            SpecError: none, several, or one that expands no nodes, or only in the target's slots.
            ModelError: as it raises it.
        """
        who = "drafter 'graph'"
        spec, *more = split_parts(config.draft, who)
        draft = load_part(spec, target)
        apart = (
            draft.language_model is not None or bool(draft.traits.taps)
        ) and not draft.traits.uses_target_cache
        if more or not apart or not isinstance(draft, ExpandingDrafter):
            raise SpecError(
                f"{who}: draft must be one drafter with a model and a cache of its own, such as "
                f"draft_model[model=M] or eagle3, got {config.draft}"
            )
        return cls(config, draft)

    def inner(self, state: Any) -> list[tuple[Drafter[Any], Any]]:
        """The draft model, with the same state."""
        return [(self.draft, state)]

    def begin(self, request: Request) -> Any:
        return self.draft.begin(request)

    def propose(self, rows: Sequence[DraftRow[Any]]) -> list[Draft]:
        """Trees as the draft model grows them, with fewer rows of it."""
        count = self.config.agree + 1
        self._graphs = {id(row.state): _Graph(tuple(row.tokens[-count:] if count else ())) for row in rows}
        # A row that ran behind other words must not be resumed, so no slot is lent.
        drafts = self.draft.propose([replace(row, lease=None) for row in rows])
        for row, draft in zip(rows, drafts, strict=True):
            graph = self._graphs[id(row.state)]
            if any(node != stood for node, stood in graph.stands.items()):
                self.draft.renumber(
                    row.state,
                    [node if draft.path_tokens(node) in graph.own else _NOBODY for node in range(len(draft))],
                )
        self._graphs = {}
        return drafts

    def _expand(self, branches: Sequence[Branch[Any]]) -> tuple[Tensor, Tensor | None]:
        """Run what has not been met yet; see ``ExpandingDrafter.expand``."""
        graphs = [self._graphs[id(branch.state)] for branch in branches]
        asked = []
        for branch, graph in zip(branches, graphs, strict=True):
            fresh = tuple(node for node in branch.nodes if graph.visit(node, branch))
            parents = [graph.stands.get(parent, parent) for parent in branch.parent_N]
            asked.append(replace(branch, nodes=fresh, parent_N=parents))
        run = [branch for branch in asked if branch.nodes]
        if run:
            logits_FD, self._id_D = self.draft.expand(run)
            new = iter(logits_FD)
            for branch in run:
                graph = self._graphs[id(branch.state)]
                # The next pass may overwrite what this one returned, and copies come later.
                graph.logits |= {node: next(new).clone() for node in branch.nodes}
            if len(logits_FD) == sum(len(branch.nodes) for branch in branches):
                return logits_FD, self._id_D
        rows = [
            graph.logits[graph.stands[node]]
            for branch, graph in zip(branches, graphs, strict=True)
            for node in branch.nodes
        ]
        return torch.stack(rows), self._id_D

    def observe(self, states: Sequence[Any], outcomes: Sequence[Outcome]) -> None:
        self.draft.observe(states, outcomes)
        self.follow()

    def mark(self, state: Any) -> Any:
        return self.draft.mark(state)

    def rewind(self, state: Any, mark: Any) -> Any:
        return self.draft.rewind(state, mark)
