"""What `medusa` and `hydra` share: residual heads on the target's last hidden state.

    text      x0  x1 ... x(n-1) | xn pending        draft: x(n+1) x(n+2) ...
    hidden    h, of the row that fed x(n-1), behind the final norm
    head k    guesses x(n+k): from h alone (medusa), or from h and xn ... x(n+k-1) (hydra)

    medusa    x = h                                 then x <- x + silu(A x + b), once or more
    hydra     x = M [h, emb xn ... emb x(n+k-1)]    logits = unembedding(x)

The unembedding is the target's, sliced to the draft vocabulary in memory: a drafter folder holds
M, A and b alone. Embeddings come in with length sqrt(H), whatever the scale of the target's.

A tree is static. With the weights are stored the accuracies a[k][i], how often the i-th likeliest
token of head k was the target's, given that the path before was; the tree takes the paths with
the largest products. It stands in for ``STOCK``, the tree of a drafter that nobody gave another.
Its first four nodes are checked where nobody says how many: on CPUs further rows cost what they
bring.

Shape letters: B sequences, F nodes of a frontier, K heads, H hidden size, I inputs of a head,
D draft vocabulary.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.drafters.base import ExpandingDrafter, Request, Traits
from outpace.drafters.trained import CONFIG, find, read_config, read_tensors, rounding, vocab_map
from outpace.errors import ModelError, SpecError
from outpace.law import VocabMap
from outpace.models.base import EMBEDDINGS, TAPS, Target
from outpace.models.blocks import Form
from outpace.models.plan import Plan
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import parse_shape, table
from outpace.types import NOTHING, Draft, Outcome, Shape

LAST = "hidden.-1"
"""The feature that heads read."""
STOCK = "[-1,0,1,2,3,-1,0,-1,5,1,0,-1,5,7,6]"
"""The tree where neither the user nor a calibration says better. Its chain comes first: whoever
cuts a budget to its first nodes, and to their depth, leaves a calibrated tree its depth too."""
_STOCK = parse_shape(STOCK)
_EPS = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsShape:
    """How many heads, and what they are made of."""

    heads: int
    """K: levels that can be drafted."""
    layers: int
    """Blocks of a head."""
    hidden_size: int
    conditioned: bool
    """Whether head k reads the embeddings of the k tokens before its guess (hydra)."""

    def inputs(self, head: int) -> int:
        """Width of what a head reads; heads count from 0."""
        return self.hidden_size * (head + 2 if self.conditioned else 1)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a drafter folder besides its vocabulary."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.heads):
            wide, name = self.inputs(head), f"heads.{head}."
            if self.conditioned:
                shapes[f"{name}mix.weight"] = (hidden, wide)
            for block in range(self.layers):
                shapes[f"{name}blocks.{block}.weight"] = (hidden, hidden)
                shapes[f"{name}blocks.{block}.bias"] = (hidden,)
        return shapes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Heads:
    """Heads as they were read."""

    shape: HeadsShape
    tensors: Mapping[str, Tensor]
    vocab: VocabMap | None
    """The draft vocabulary; None is the target's whole."""
    tree: Shape | None = None
    """The calibrated tree, likeliest nodes first; None: nothing was measured."""


def unit(embed: Tensor) -> Tensor:
    """Embeddings [..., H] as heads read them, float32."""
    return F.rms_norm(embed.float(), (embed.shape[-1],), eps=_EPS)


def read_heads(method: str, path: str | None, target: Target, conditioned: bool) -> Heads:
    """Read a drafter folder.

    Args:
        method: ``medusa`` or ``hydra``.
        path: the folder; None: the one trained for the target.
        target: whom it has to fit.
        conditioned: see ``HeadsShape``.

    Raises:
        ModelError: no folder, files that are corrupt or of another target or method, or tensors
            that are not those of the config.
    """
    folder = find(method, target, path)
    said = read_config(folder, target, method)
    counts = [said.get("heads"), said.get("layers")]
    if not all(isinstance(one, int) and one > 0 for one in counts):
        raise ModelError(f"{folder / CONFIG}: heads and layers must be above 0, got {counts}")
    shape = HeadsShape(
        heads=said["heads"], layers=said["layers"], hidden_size=target.hidden_size, conditioned=conditioned
    )
    tensors = read_tensors(folder)
    wanted = shape.tensor_shapes()
    for name in sorted(wanted.keys() | tensors.keys() - {"d2t", "t2d"}):
        got, need = (tuple(tensors[name].shape) if name in tensors else None), wanted.get(name)
        if got != need:
            raise ModelError(f"{folder}: {name!r} has shape {got}, its config needs {need}")
    vocab = vocab_map(tensors, target.vocab_size)
    columns = target.vocab_size if vocab is None else len(vocab.to_target_D)
    if said.get("draft_vocab_size") != columns:
        raise ModelError(
            f"{folder / CONFIG}: draft_vocab_size is {said.get('draft_vocab_size')}, but the "
            f"weights have {columns} draft tokens"
        )
    kept = {name: tensors[name] for name in wanted}
    return Heads(shape=shape, tensors=kept, vocab=vocab, tree=_tree(said, folder))


def _tree(said: Mapping[str, Any], folder: Path) -> Shape | None:
    parents = said.get("tree")
    if not parents:
        return None
    try:
        return table(parents)
    except (SpecError, TypeError) as error:
        raise ModelError(f"{folder / CONFIG}: {error}") from error


class HeadNet:
    """Heads that read the same rows, ready to run.

    Args:
        heads: what was read.
        numbers: which of them, from 0; conditioned ones run alone, since each reads more.
        target: gives dtype and device.
        form: of the weights.
    """

    def __init__(self, heads: Heads, numbers: Sequence[int], target: Target, form: Form) -> None:
        self._dtype, self._hidden = target.dtype, heads.shape.hidden_size

        def read(name: str) -> list[Tensor]:
            return [heads.tensors[f"heads.{number}.{name}"] for number in numbers]

        assert len(numbers) == 1 or not heads.shape.conditioned
        self._mix = form.linear(read("mix.weight")[0]) if heads.shape.conditioned else None
        # One product for the first blocks, which all read the same.
        self._first = form.linear(torch.cat(read("blocks.0.weight")), torch.cat(read("blocks.0.bias")))
        self._later = [
            [form.linear(w, b) for w, b in zip(read(f"{at}.weight"), read(f"{at}.bias"), strict=True)]
            for at in (f"blocks.{i}" for i in range(1, heads.shape.layers))
        ]
        self._plan = self._listed(heads.shape.inputs(numbers[0]), heads.shape.hidden_size, len(numbers))

    def _listed(self, inputs: int, hidden: int, heads: int) -> Plan:
        """The same as a list of operations."""
        plan = Plan()
        x = plan.lent(inputs)
        if self._mix is not None:
            x = plan.product(self._mix, x)
        out = plan.fresh(heads * hidden)
        each = [plan.columns(out, head * hidden, hidden) for head in range(heads)]
        for own in each:
            plan.copy(x, own)
        plan.bend(plan.product(self._first, x), out)
        for blocks in self._later:
            for block, own in zip(blocks, each, strict=True):
                plan.bend(plan.product(block, own), own)
        plan.give(out)
        return plan

    def __call__(self, u_FI: Tensor) -> Tensor:
        """What the unembedding reads, float32 [F, heads, H]."""
        if self._plan.ready:
            (x_FY,) = self._plan.run((len(u_FI),), (u_FI,))
            return x_FY.view(len(u_FI), -1, self._hidden)
        u_FI = u_FI.to(self._dtype)
        x_FH = (u_FI if self._mix is None else self._mix(u_FI)).float()
        first_FKH = self._first(x_FH.to(self._dtype)).view(len(x_FH), -1, x_FH.shape[1])
        x_FKH = x_FH[:, None] + F.silu(first_FKH.float())
        for blocks in self._later:
            read = x_FKH.to(self._dtype).unbind(1)
            more = [block(one.contiguous()) for block, one in zip(blocks, read, strict=True)]
            x_FKH = x_FKH + F.silu(torch.stack(more, 1).float())
        return x_FKH


@dataclass(slots=True, eq=False)
class HeadState:
    """What is known of one sequence. Its tensor is never changed, only replaced."""

    hidden_H: Tensor | None = None
    """Of the newest row that a pass showed."""
    end: int = -1
    """The position after that row's."""
    row: int = 0
    """The sequence's place in the drafts under way."""


class ResidualDrafter(ExpandingDrafter[HeadState]):
    """Drafts with residual heads; keeps one hidden state per sequence, and no cache.

    Args:
        heads: of the kind that the method reads.
        target: unembeds, and embeds for heads that ask for it.
        quantize: how to round the weights, where compiled code multiplies them.
    """

    traits = Traits(
        default_nodes=4,
        default_tree=STOCK,
        needs=frozenset({TAPS, EMBEDDINGS}),
        taps=frozenset({LAST}),
        samples=True,
    )

    def __init__(self, heads: Heads, target: Target, quantize: str | None = None) -> None:
        self.heads, self.target = heads, target
        numbers = range(heads.shape.heads)
        form = Form(target.dtype, target.device, quantize=rounding(quantize, target))
        groups = [[number] for number in numbers] if heads.shape.conditioned else [list(numbers)]
        self.nets = [HeadNet(heads, group, target, form) for group in groups]
        """One per head (hydra), or one of all heads (medusa)."""
        self.id_D = None if heads.vocab is None else heads.vocab.to_target_D.to(target.device)

    @abstractmethod
    def expand(self, branches: Sequence[Branch[HeadState]]) -> tuple[Tensor, Tensor | None]:
        """Logits of the nodes' children; see the contract."""

    def begin(self, request: Request) -> HeadState:
        """Nothing is known until the first pass."""
        return HeadState()

    def propose(self, rows: Sequence[DraftRow[HeadState]]) -> list[Draft]:
        """Grow drafts; a sequence whose last features were not shown gets an empty one."""
        return super().propose([self._fitted(row) for row in rows])

    def _fitted(self, row: DraftRow[HeadState]) -> DraftRow[HeadState]:
        if row.state.hidden_H is None or row.state.end != len(row.tokens) - 1:
            return replace(row, budget=NOTHING)
        budget = row.budget
        shape = budget.shape
        if shape.parent_N == _STOCK.parent_N:
            parents = (self.heads.tree or _STOCK).parent_N
            assert parents is not None
            shape = Shape(parents[: budget.max_nodes])  # the likeliest, not the first levels
        depth = min(budget.max_depth, self.heads.shape.heads)
        return replace(row, budget=replace(budget, max_depth=depth, shape=shape))

    def hidden(self, branches: Sequence[Branch[HeadState]]) -> Tensor:
        """The hidden states of the sequences, [B, H]; numbers them."""
        parts = []
        for number, branch in enumerate(branches):
            branch.state.row = number
            assert branch.state.hidden_H is not None
            parts.append(branch.state.hidden_H)
        return torch.stack(parts)

    def observe(self, states: Sequence[HeadState], outcomes: Sequence[Outcome]) -> None:
        """Keep the hidden state of the last row that was committed."""
        for state, outcome in zip(states, outcomes, strict=True):
            taps = outcome.scored.taps
            if LAST in taps and outcome.fed:
                state.hidden_H = taps[LAST][outcome.row_F[-1]].clone()
                state.end = outcome.start + len(outcome.fed)

    def mark(self, state: HeadState) -> HeadState:
        """A copy that shares the tensor."""
        return copy.copy(state)
