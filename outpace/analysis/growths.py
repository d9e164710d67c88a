"""Every rule by which a draft grows, under every verifier that may judge it: one step, counted exactly.

A growth is a budget (its shape and its stop rule) in the hands of the code that grows drafts in
production. Only the drafter's distributions are a table. What is drawn, and how many, is decided
there, so this is where a number of siblings that depends on the draws would show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.analysis.tables import Recipe, Sapling, World
from outpace.drafters.base import Drafter, ExpandingDrafter, Request, Traits
from outpace.models.base import Target
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import ROOT, Budget, Draft, Group, Outcome, Shape, Signals
from outpace.verifiers.base import Verifier

PROMPT = (0, 1, 0, 0, 1, 0)
"""The committed text, whose last token is pending. It repeats itself, so that lookups guess."""


class TableDrafter(ExpandingDrafter[None]):
    """Guesses by the draft distributions of a world, and estimates by another table."""

    Config: ClassVar[type] = World
    traits = Traits(default_nodes=8, samples=True, estimates=True)

    def __init__(self, world: World) -> None:
        self.world = world

    @classmethod
    def load(cls, config: World, target: Target) -> TableDrafter:
        return cls(config)

    def begin(self, request: Request) -> None:
        return

    def expand(self, branches: Sequence[Branch[None]]) -> tuple[Tensor, None]:
        vocab = self.world.vocab
        return torch.stack([self.world.q(path).dense(vocab).log() for path in _paths(branches)]), None

    def estimate(self, branches: Sequence[Branch[None]]) -> Tensor:
        """How likely nodes are accepted; all that matters is that it depends on what was drawn."""
        return torch.tensor([self.world.q(path, 5).prob(path[-1]) for path in _paths(branches)])

    def observe(self, states: Sequence[None], outcomes: Sequence[Outcome]) -> None:
        return


class Foreseeing(TableDrafter):
    """A drafter that tells how likely a draw is kept before it draws, as `dspark` does."""

    traits = replace(TableDrafter.traits, estimates=False, foresees=True)

    def foresee(self, branches: Sequence[Branch[None]]) -> Tensor:
        """All that matters is that it depends on the tokens above."""
        return torch.tensor([self.world.q(path, 6).prob(0) for path in _paths(branches)])


def _paths(branches: Sequence[Branch[None]]) -> list[tuple[int, ...]]:
    return [(*branch.tokens[1:], *branch.path_tokens(node)) for branch in branches for node in branch.nodes]


class Doubt:
    """Stops after a token that the drafter itself held unlikely, as `confidence` does."""

    def more(self, signals: Signals) -> Tensor:
        return signals.q_F >= 0.5


class Foresight:
    """Stops where a path is estimated to be refused, as `specdecpp` does."""

    def more(self, signals: Signals) -> Tensor:
        if signals.reach_F is None:
            return torch.ones(len(signals.q_F), dtype=torch.bool)
        return signals.reach_F >= 0.4


Make = Callable[[World], Drafter[Any]]
"""A drafter that guesses by the draft distributions of a world."""


@dataclass(frozen=True)
class Growth:
    budget: Budget
    make: Make = TableDrafter

    def allowed(self, verifier: Verifier) -> bool:
        """Whether the engine would let this verifier judge it."""
        chain = self.budget.shape.parent_N is None and not self.budget.shape.beam
        return chain or not verifier.chains_only

    def recipe(self, verifier: Verifier) -> Recipe:
        """Its drafts, drawn as the verifier asks for it."""

        def grow(sapling: Sapling) -> None:
            world = sapling.world
            drafter = self.make(world)
            row = DraftRow(
                drafter.begin(Request(prompt=PROMPT, num_cached=len(PROMPT) - 1)),
                PROMPT,
                self.budget,
                sapling.coins,
                Warp(_NEUTRAL, (), frozenset(), world.vocab),
                verifier.draws,
                chain=verifier.chains_only,
            )
            sapling.plant(drafter.propose([row])[0])

        return grow


_HALVES = Shape(beam=1, siblings=(3, 1))
"""Three tokens where the drafter is less than half sure, else one."""


def _growths() -> dict[str, Growth]:
    shapes = {
        "chain": Budget(3, 3),
        "2x1": Budget(4, 2, shape=parse_shape("2x1")),
        "[-1,0,-1,1]": Budget(4, 3, shape=parse_shape("[-1,0,-1,1]")),
        "3x1, cut to 3": Budget(3, 2, shape=parse_shape("3x1")),
        "dynamic, 3": Budget(3, 2, shape=parse_shape("dynamic")),
        "dynamic:1, 3": Budget(3, 3, shape=parse_shape("dynamic:1")),
        "dynamic:2:0, 3": Budget(3, 2, shape=parse_shape("dynamic:2:0")),
        "cape, 3": Budget(3, 2, shape=parse_shape("cape")),
        "siblings by halves, 4": Budget(4, 2, shape=_HALVES),
    }
    out = {name: Growth(budget) for name, budget in shapes.items()}
    for name in ("chain", "2x1", "dynamic:2:0, 3", "siblings by halves, 4"):
        budget = shapes[name]
        stops = replace(budget, stop=Foresight(), estimate=True)
        out[f"{name}, foreseen"] = Growth(stops, Foreseeing)
        out[f"{name}, confidence"] = Growth(replace(budget, stop=Doubt()))
        out[f"{name}, estimate"] = Growth(replace(budget, stop=Foresight(), estimate=True))
    return out


_NEUTRAL = SamplingParams(temperature=1.0)
GROWTHS: Mapping[str, Growth] = _growths()
"""Name -> growth: chains, templates whole and cut, dynamic trees by width and threshold, and stop
rules by confidence and by estimates."""


# Known-wrong growths, each under the verifiers that must notice -------------------------------


class Spoiled(TableDrafter):
    """A drafter that changes its drafts after they were drawn."""

    def propose(self, rows: Sequence[DraftRow[None]]) -> list[Draft]:
        return [self.spoil(row, draft) for row, draft in zip(rows, super().propose(rows), strict=True)]

    def spoil(self, row: DraftRow[None], draft: Draft) -> Draft:
        raise NotImplementedError


class DrawsOnDemand(Spoiled):
    """Another sibling is drawn where the first turned out unlikely: their number knows the token."""

    def spoil(self, row: DraftRow[None], draft: Draft) -> Draft:
        law = self.world.q(())
        tokens = [row.coins.choose(law, ROOT, 0)]
        if law.prob(tokens[0]) < 0.5:
            tokens.append(row.coins.choose(law, ROOT, 1))
        nodes = tuple(dict.fromkeys(tokens))
        group = Group(ROOT, row.drawn, tuple(nodes.index(token) for token in tokens), 0)
        return Draft(nodes, (ROOT,) * len(nodes), (group,), (law,))


class UnsureOfTheDrawn(Spoiled):
    """Siblings by the probability of the token that was drawn, and not of the likeliest one."""

    def spoil(self, row: DraftRow[None], draft: Draft) -> Draft:
        law, table = self.world.q(()), row.budget.shape.siblings
        first = row.coins.choose(law, ROOT, 0)
        wanted = table[min(int(len(table) * law.prob(first)), len(table) - 1)]
        tokens = [first, *(row.coins.choose(law, ROOT, i) for i in range(1, wanted))]
        nodes = tuple(dict.fromkeys(tokens))
        group = Group(ROOT, row.drawn, tuple(nodes.index(token) for token in tokens), 0)
        return Draft(nodes, (ROOT,) * len(nodes), (group,), (law,))


class Prunes(Spoiled):
    """The last draw is dropped if it turned out unlikely."""

    def spoil(self, row: DraftRow[None], draft: Draft) -> Draft:
        last, group = len(draft) - 1, draft.groups[-1]
        if (
            group.law is None
            or last not in group.nodes
            or draft.laws[group.law].prob(draft.token_N[last]) > 0.4
        ):
            return draft
        nodes = tuple(node for node in group.nodes if node != last)
        groups = (*draft.groups[:-1], replace(group, nodes=nodes)) if nodes else draft.groups[:-1]
        return Draft(draft.token_N[:last], draft.parent_N[:last], groups, draft.laws)


class LooksAhead(Spoiled):
    """A stop rule that reads the token that it is asked about, and takes it back."""

    def spoil(self, row: DraftRow[None], draft: Draft) -> Draft:
        sizes = [
            node
            for node in range(len(draft))
            if draft.laws[draft.groups[node].law or 0].prob(draft.token_N[node]) < 0.4
        ]
        size = sizes[0] if sizes else len(draft)
        return Draft(draft.token_N[:size], draft.parent_N[:size], draft.groups[:size], draft.laws)


class WaitsForTheNext(Spoiled):
    """A draw is checked only where what may follow it is likely enough: DSpark's global search."""

    def spoil(self, row: DraftRow[None], draft: Draft) -> Draft:
        last = len(draft) - 1
        if self.world.q(draft.path_tokens(last), 6).prob(0) >= 0.4:
            return draft
        return Draft(draft.token_N[:last], draft.parent_N[:last], draft.groups[:last], draft.laws)


_TREES = ("tree", "traversal", "k_seq", "spechub")
WRONG_GROWTHS: tuple[tuple[str, tuple[str, ...], Growth], ...] = (
    ("siblings counted after a draw", ("k_seq",), Growth(Budget(2, 1), DrawsOnDemand)),
    ("siblings by the token drawn", ("k_seq",), Growth(Budget(3, 1, shape=_HALVES), UnsureOfTheDrawn)),
    ("draws pruned from a tree", _TREES, Growth(GROWTHS["dynamic:2:0, 3"].budget, Prunes)),
    (
        "a draw that waits for what follows",
        ("chain", "block", *_TREES),
        Growth(Budget(2, 2), WaitsForTheNext),
    ),
    ("stopped before an unlikely draw", ("chain", "block", *_TREES), Growth(Budget(2, 2), LooksAhead)),
)
"""Name, verifiers, growth."""
