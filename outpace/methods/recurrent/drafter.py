"""ReDrafter, the LSTM and the MLP speculator: small cells that read the guesses one by one.

    root       h, emb(pending)                       state s_0, guesses depth 1
    a node     the state of its parent, its token    state s_t, guesses depth t + 1

Every node keeps the state that its own path made, so branches do not mix. Candidates that share a prefix
share its nodes, which are computed once. The beam search of the papers is a tree here. ``tree=dynamic:M:0``
expands the M likeliest candidates of every level, and what several beams have in common is one node.
Siblings are drawn below their node at T > 0, so sampling is exact too, which the papers' beams are not. A
level costs one pass of the cell over the open nodes, all sequences together, and of the head. Nothing of the
target is computed again, and there is no cache.

The cells, and how they differ: `outpace.methods.recurrent.cells`. Reads what ``outpace train`` made,
and the published folders of Apple, IBM and Snowflake.

Papers: Cheng et al. 2024, arXiv:2403.09919; Wertheimer et al. 2024, arXiv:2404.19124.

Shape letters: F nodes of a frontier, H hidden size, M inner width, S width of a state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from outpace.drafters.features import TrainedConfig
from outpace.drafters.last_state import LastState, LastStateDrafter, unit
from outpace.drafters.node_rows import NodeRows
from outpace.drafters.trained import rounding
from outpace.methods.recurrent.cells import LSTM, MLP, REDRAFTER, Cell
from outpace.methods.recurrent.files import CellFile, read_cell
from outpace.models.base import Target
from outpace.models.blocks import Form
from outpace.models.packed import Linear
from outpace.tree.growth import Branch
from outpace.types import ROOT


class Recurrent(LastStateDrafter):
    """Drafts with a cell; keeps one hidden state per sequence, and one state per node.

    Args:
        file: the cell as it was read.
        target: embeds and unembeds.
        quantize: how to round the weights, where compiled code multiplies them.
    """

    Config = TrainedConfig
    method: ClassVar[str]

    def __init__(self, file: CellFile, target: Target, quantize: str | None = None) -> None:
        super().__init__(file.shape.steps, file.tree)
        self.file, self.target = file, target
        form = Form(target.dtype, target.device, quantize=rounding(quantize, target))
        shape, tensors = file.shape, file.tensors
        tables = {shape.embed_name(stage) for stage in range(shape.stages)} if shape.own_rows else set()
        self._matrices: dict[str, Linear] = {
            name.removesuffix(".weight"): form.linear(one, tensors.get(name.removesuffix("weight") + "bias"))
            for name, one in tensors.items()
            if one.dim() == 2 and name not in tables
        }
        self._vectors = {
            name: one.to(target.device).float() for name, one in tensors.items() if one.dim() == 1
        }
        self._tables = {
            name: tensors[name].to(target.device, target.dtype) for name in tables & tensors.keys()
        }
        self.cell = Cell(shape, self._linear, self._vectors.__getitem__)
        self.id_D = None if file.vocab is None else file.vocab.to_target_D.to(target.device)
        self._hidden_BH = self._state_NS = torch.empty(0)
        self._rows: NodeRows[LastState] = NodeRows()

    @classmethod
    def load(cls, config: TrainedConfig, target: Target) -> Recurrent:
        """Read the cell and borrow the target's embedding and unembedding."""
        return cls(read_cell(cls.method, config.model, target), target, config.quantize)

    def expand(self, branches: Sequence[Branch[LastState]]) -> tuple[Tensor, Tensor | None]:
        """One pass of the cell over the nodes, each from the state of its parent."""
        if branches[0].nodes == (ROOT,):
            self._hidden_BH = self.hidden(branches)
            self._rows = NodeRows()
            self._state_NS = self._hidden_BH.new_empty(0, self.file.shape.state, dtype=torch.float32)
        row_F = [b.state.row for b in branches for _ in b.nodes]
        token_F = [b.tokens[-1] if n == ROOT else b.token_N[n] for b in branches for n in b.nodes]
        depth_F = [len(b.path(node)) for b in branches for node in b.nodes]
        parent_F = [
            -1 if node == ROOT else self._rows.of(b, b.parent_N[node]) for b in branches for node in b.nodes
        ]
        self._rows.add(branches)
        with self.clock, torch.no_grad():
            state_FS, logits_FD = self._pass(self._hidden_BH[row_F].float(), token_F, depth_F, parent_F)
        self._state_NS = torch.cat([self._state_NS, state_FS])
        return logits_FD, self.id_D

    def _pass(
        self, hidden_FH: Tensor, token_F: Sequence[int], depth_F: Sequence[int], parent_F: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """States [F, S] and logits [F, D], float32."""
        shape = self.file.shape
        state_FS = hidden_FH.new_empty(len(token_F), shape.state)
        logits: list[Tensor] = []
        order: list[int] = []
        # A grown tree opens one level at a time; whoever else asks may mix them.
        for depth in sorted(set(depth_F)):
            rows = [row for row, one in enumerate(depth_F) if one == depth]
            before = self._state_NS[[parent_F[row] for row in rows]] if depth else None
            embed = self._embed([token_F[row] for row in rows], depth)
            state_FS[rows], read_FM = self.cell.step(depth, hidden_FH[rows], embed, before)
            logits.append(self._head(read_FM, depth))
            order += rows
        logits_FD = logits[0] if len(logits) == 1 else torch.cat(logits)
        if order != list(range(len(order))):
            logits_FD = logits_FD[torch.tensor(order).argsort()]
        return state_FS, logits_FD

    def _embed(self, ids: Sequence[int], depth: int) -> Tensor:
        shape = self.file.shape
        if self._tables:
            return self._tables[shape.embed_name(0 if shape.tied else depth)][list(ids)].float()
        embed_FH = self.target.embed(ids)
        return embed_FH if shape.own_rows else unit(embed_FH)

    def _head(self, read_FM: Tensor, depth: int) -> Tensor:
        shape = self.file.shape
        out = self._linear(shape.head_name(0 if shape.tied else depth).removesuffix(".weight"), read_FM)
        return out if shape.own_rows else self.target.head(out, self.file.vocab)

    def _linear(self, name: str, x_FI: Tensor) -> Tensor:
        matrix = self._matrices[name]
        compiled = matrix.product is not None
        return matrix(x_FI.contiguous() if compiled else x_FI.to(self.target.dtype)).float()


class ReDrafter(Recurrent):
    """A recurrent state beside the target's, through residual blocks."""

    method = REDRAFTER


class Lstm(Recurrent):
    """An LSTM cell that starts from the target's state."""

    method = LSTM


class MlpSpeculator(Recurrent):
    """One small layer per depth, which starts from the target's state."""

    method = MLP
