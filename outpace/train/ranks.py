"""At which rank of a drafter's distribution the target's token stands: what static trees are made of.

Shape letters: R rows, C rows of a chunk, S depths, N distributions, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.static_tree import LARGEST, RANKS, likeliest
from outpace.files import write_whole
from outpace.law import VocabMap
from outpace.train.align import EAGLE, Aligned
from outpace.train.batches import Batch
from outpace.train.losses import chunks
from outpace.train.objective import Chain, Objective, Step, Tally, draft_ids, laws_for, write_drafter
from outpace.train.temper import Tempering


@torch.no_grad()
def ranked(
    y_RH: Tensor, head_DH: Tensor, vocab: VocabMap | None, truth_R: Tensor, p_ND: Tensor, row_R: Tensor
) -> tuple[Tensor, Tensor]:
    """The rank of the target's token among a row's, and alpha; both [R].

    Args:
        truth_R: target ids of the right tokens.

    Returns:
        int64 ranks from 0, at most RANKS, which is also that of tokens that cannot be drafted; and
        float32 sums of min(p, q).
    """
    label_R, ranks, alphas = draft_ids(truth_R, vocab), [], []
    column_D = torch.arange(len(head_DH), device=y_RH.device)
    for some in chunks(y_RH):
        z_CD = (y_RH[some].to(head_DH.dtype) @ head_DH.T).float()
        label_C = label_R[some]
        own_C1 = z_CD.gather(1, label_C.clamp_min(0)[:, None])
        # Logits are often equal in bfloat16; the first of them is the one that is drafted.
        before_CD = (z_CD == own_C1) & (column_D < label_C[:, None])
        rank_C = ((z_CD > own_C1) | before_CD).sum(1).clamp_max(RANKS)
        ranks.append(rank_C.where(label_C >= 0, RANKS))
        p_CD = p_ND[row_R[some]]
        alphas.append(torch.minimum(z_CD.softmax(-1), p_CD).sum(-1))
    return torch.cat(ranks), torch.cat(alphas)


class Ranks(Tally):
    """Held-out rows by depth and rank, since the weights last changed."""

    def __init__(self, depths: int) -> None:
        self.count_SB = torch.zeros(depths, RANKS + 1, dtype=torch.float64)
        """The last column is for all further ranks."""

    def clear(self) -> None:
        self.count_SB.zero_()

    def add(self, depth: int, rank: Tensor) -> None:
        found = torch.bincount(rank, minlength=RANKS + 1)
        self.count_SB[depth] += found.to(self.count_SB.device)

    def gather(self, sum: Callable[[Tensor], Tensor]) -> None:
        self.count_SB = sum(self.count_SB.flatten()).view_as(self.count_SB)

    def acceptance(self) -> list[list[float]]:
        """By depth and rank, how often that token was the target's; empty if nothing counted."""
        total_S1 = self.count_SB.sum(1, keepdim=True)
        if not bool(total_S1.any()):
            return []
        rates: list[list[float]] = (self.count_SB / total_S1.clamp_min(1))[:, :RANKS].tolist()
        return rates


@torch.no_grad()
def judge_ranks(
    ranks: Ranks,
    states: Iterable[Tensor],
    batch: Batch,
    aligned: Aligned,
    objective: Objective,
    head_DH: Tensor,
    temper: Tempering | None = None,
    ahead: int = EAGLE,
) -> Step:
    """Held-out acceptance of guesses one deeper each, with their ranks.

    A rank counts where a tree could have got there: the tokens before it were the target's, and
    among the likeliest of their depths.

    Args:
        states: what the head reads at the learning rows of ``aligned``, [B, A, H] for every depth.
        temper: takes in the rows of chains.
        ahead: how many tokens ahead the first of them guesses.
    """
    vocab = objective.vocab
    p_ND, truth_N = laws_for(batch, aligned, objective.target, vocab)
    assert p_ND is not None and truth_N is not None, "it reads features"
    chain, reached_BA = Chain(aligned.real_BA), aligned.real_BA
    for place, x_BAH in enumerate(states, start=ahead):
        row_BA = aligned.law(place)
        truth_BA = truth_N[row_BA]
        if temper is not None:
            counted_BA = chain.alive & aligned.teaches(place)
            temper.add(place - ahead, x_BAH[counted_BA], head_DH, draft_ids(truth_BA[counted_BA], vocab))
        rank_R, alpha_R = ranked(
            x_BAH.flatten(0, 1), head_DH, vocab, truth_BA.flatten(), p_ND, row_BA.flatten()
        )
        known_BA, follows_BA = aligned.teaches(place), aligned.token(place) == truth_BA
        rank_BA = rank_R.view_as(known_BA)
        chain.add(known_BA, rank_BA == 0, follows_BA, alpha_R.view_as(known_BA))
        counted_BA = reached_BA & known_BA
        ranks.add(place - ahead, rank_BA[counted_BA])
        reached_BA = counted_BA & follows_BA & (rank_BA < RANKS)
    return chain.step(torch.zeros(()), int(aligned.real_BA.sum()), with_overlap=True)


def write_tree(
    folder: Path, config: Mapping[str, Any], objective: Objective, ranks: Ranks, provenance: Mapping[str, Any]
) -> None:
    """Write the drafter folder, and in it the calibrated tree alone, as ``tree.json``.

    ``tree=FOLDER/tree.json`` serves every ``tree_size``; the default ends at its 15th node.
    """
    rates = ranks.acceptance()
    parents = list(likeliest(rates, LARGEST))
    whole = {**config, "acceptance": rates, "tree": parents}
    write_drafter(folder, whole, objective.named(), objective.vocab, provenance)
    if parents:
        write_whole(folder / "tree.json", json.dumps({"parents": parents}) + "\n")
