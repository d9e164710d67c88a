"""Dflash: one pass of a small network on the target's features guesses a whole block.

    text        x0 ... x(n-1) | xn pending      block: one row per guess, all rows at once
    features    f0 ... f(n-1)                   keys and values of every layer of the network

Given the features and the pending token, the guesses of a block are independent. So a tree is made
of the product of the rows' laws, and all nodes of a depth have the same children. At T > 0 the law
recorded for a group is its row's own, the one drawn from. The network runs once per draft, however
deep the tree; what the target computed since the last draft goes through it in that pass.

A tree is static unless told otherwise. The accuracies of the rows are stored with the weights, and
the tree takes the likeliest paths. It stands in for ``STOCK``, the tree of a drafter that nobody
gave another.

A head may tell how likely a draw at depth k is kept if its parent is: c_k = sigmoid(w h_k), h_k of the
block's row. It knows nothing of the draw, so a policy may close a branch before it (``foresee``).

The network and its arithmetic: `outpace.methods.dflash.net`. Reads what ``outpace train`` made, folders
of the speculators library, and the checkpoints of the method's authors. Pays wherever it is trained
for the target; a network for another target is refused.

Paper: DFlash, arXiv:2602.06036; block drafters: PARD, arXiv:2504.18583.

Shape letters: B sequences, F nodes of a frontier, S rows of a block, Y = B * S, A guesses of a block,
H hidden size, I its width with a Markov head's, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from outpace.cache.dense import DenseCache
from outpace.drafters.base import ONE_PASS, Traits
from outpace.drafters.blocks import BlockDrafter
from outpace.drafters.features import FeatureDrafter, Followed, TrainedConfig
from outpace.drafters.last_state import fitted_budget
from outpace.drafters.trained import find, rounding
from outpace.methods.dflash.files import BlockFile, read_block_drafter
from outpace.methods.dflash.net import CONFIDENCE, BlockNet, Part
from outpace.models.base import HEAD, TAPS, Target
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import ROOT

STOCK = "[-1,0,1,-1,0]"
"""The tree where neither the user nor a calibration says better; its first nodes are deep, so that
a smaller one may be."""
_STOCK = parse_shape(STOCK)
_WAITING = 32
"""Most rows that wait for the next draft: more, such as a prompt, are read at once."""


class Dflash(BlockDrafter[Followed], FeatureDrafter[Followed]):
    """Drafts a block at a time.

    Args:
        file: the network as it was read.
        target: embeds and unembeds.
        quantize: how to round its weights, where compiled code multiplies them.
    """

    method: ClassVar[str] = "dflash"
    cache: DenseCache
    most_waiting = _WAITING
    traits = Traits(
        default_nodes=4, default_tree=STOCK, needs=frozenset({TAPS, HEAD}), samples=True, level_D=ONE_PASS
    )

    def __init__(self, file: BlockFile, target: Target, quantize: str | None = None) -> None:
        self.file, self.target = file, target
        rounded = rounding(quantize, target)
        self.net = BlockNet(file.shape, file.tensors, target, quantize=rounded, embed=file.embed(target))
        self.cache = self.net.new_cache()
        self.traits = replace(
            self.traits,
            taps=frozenset(file.shape.taps),
            temper_D=file.temper_D,
            foresees=file.shape.confident,
        )
        if file.shape.confident:
            self._sure_I = file.tensors[f"{CONFIDENCE}.weight"][0].to(target.device).float()
            self._sure = float(file.tensors[f"{CONFIDENCE}.bias"])
        self.id_D = None if file.vocab is None else file.vocab.to_target_D.to(target.device)
        self._head = file.head(target)
        self.block = file.shape.guesses
        self._hidden_BAH = torch.empty(0)

    @classmethod
    def load(cls, config: TrainedConfig, target: Target) -> Dflash:
        """Read the network; embedding and unembedding are the target's, unless a file has others."""
        file = read_block_drafter(find(cls.method, target, config.model), target, cls.method)
        return cls(file, target, config.quantize)

    def opened(self, slot: int) -> Followed:
        return Followed(slot)

    def feature(self, taps: Mapping[str, Tensor]) -> Tensor:
        return self.net.feature(taps)

    def fitted(self, row: DraftRow[Followed]) -> DraftRow[Followed]:
        guesses, tree = self.file.shape.guesses, self.file.tree
        return replace(row, budget=fitted_budget(row.budget, guesses, tree, _STOCK))

    def blocks(self, branches: Sequence[Branch[Followed]]) -> Tensor:
        """What every guessing row of every block says, float32 [B, A, D].

        Effects: the context rows that waited are in the tails of their slots.
        """
        slots, parts = self.file.shape.slots, []
        for branch in branches:
            state = branch.state
            state.lead = len(state.ids)
            parts.append(self._part(state, state.ids, branch.tokens[-1]))
            self.cache.scratch(state.slot, slots)
        with self.clock, torch.no_grad():
            y_BSH = self.net.run(parts, self.cache).view(len(branches), slots, -1)
            self._hidden_BAH = y_BSH[:, slots - self.file.shape.guesses :]
            return self._head(self._hidden_BAH.flatten(0, 1)).view(*self._hidden_BAH.shape[:2], -1)

    def foresee(self, branches: Sequence[Branch[Followed]]) -> Tensor:
        """C of the draws below the nodes that were just expanded."""
        joint_FI = self.known(branches).float()
        # Row by row, whatever rows are beside: a product would round by their number.
        return (joint_FI * self._sure_I).sum(-1).add_(self._sure).sigmoid_().cpu()

    def known(self, branches: Sequence[Branch[Followed]]) -> Tensor:
        """What is known of the draws below the nodes that were just expanded, [F, I]."""
        return self._hidden_BAH[self.places(branches)]

    def places(self, branches: Sequence[Branch[Followed]]) -> tuple[list[int], list[int]]:
        """Block and guessing row of every node that was expanded."""
        row_F = [self.rows.of(b, ROOT) for b in branches for _ in b.nodes]
        return row_F, [len(b.path(node)) for b in branches for node in b.nodes]

    def _part(self, state: Followed, ids: Sequence[int], pending: int | None = None) -> Part:
        """Rows for the tokens given, which are the first of those that wait."""
        self.settle(state)
        feature_TF = torch.cat(state.waiting)[: len(ids)]
        stored = self.cache.append(state.slot, ids, range(-1, len(ids) - 1))
        return Part(
            slot=state.slot,
            first=stored.start,
            offset=state.start or 0,
            feature_TF=feature_TF,
            pending=pending,
        )

    def read(self, states: Sequence[Followed]) -> None:
        """Store keys and values of all that waits but the last row, from which a block starts."""
        parts = [self._part(state, state.ids[:-1]) for state in states]
        with self.clock:
            self.net.run(parts, self.cache)
        for state in states:
            self.cache.keep(state.slot, range(len(state.ids) - 1))
            state.waiting, state.ids = [state.waiting[-1][-1:].clone()], state.ids[-1:]
