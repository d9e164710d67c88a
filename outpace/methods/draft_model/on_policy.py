"""Answers that a draft model writes itself, with the target's features of them (DistillSpec).

A draft model learns best on the texts on which it will be asked, which are its own. The prompts of a
batch are kept. Each answer is drawn anew from the draft model, as long as it was. Then the target
reads the texts once and gives the distributions to learn from. No gradient goes through the sampling.

Shape letters: B sequences, T tokens, V vocabulary, W width of the draft model, D draft vocabulary,
H hidden size of the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.law import VocabMap
from outpace.methods.draft_model.training_net import DraftNet
from outpace.models.base import Target
from outpace.train.align import places
from outpace.train.batches import Batch, padded
from outpace.train.capture import compute
from outpace.train.networks import KeyValue


@torch.no_grad()
def student_answers(
    net: DraftNet,
    embed_VW: Tensor,
    head_DW: Tensor,
    vocab: VocabMap | None,
    target: Target,
    batch: Batch,
    *,
    temperature: float,
    seed: int,
) -> Batch:
    """Write the answers of a batch anew.

    Args:
        vocab: its vocabulary; None is the whole.
        target: reads the texts; taps are those that the batch has.
        batch: every token that teaches is drawn again, left to right.

    Returns:
        A batch of the same shape with other answers and their features.

    Cost: every token is one row of the draft model, in one pass for all texts, and one pass of the target.
    """
    token_BT, place_BT = batch.token_BT.clone(), places(batch)
    device, held = token_BT.device, list[KeyValue]()
    coins = torch.Generator(device=device).manual_seed(seed)
    drawn_BT = batch.answer_BT & (place_BT < batch.length_B[:, None])
    drawn_BT[:, 0] = False  # nothing foretells the first
    columns = drawn_BT.any(0).nonzero().squeeze(1).tolist()
    read = 0
    for at in range(columns[0], columns[-1] + 1) if columns else ():
        hidden_BTW = net(embed_VW[token_BT[:, read:at]], place_BT[:, read:at], None, held)
        read, rows_B = at, drawn_BT[:, at].nonzero().squeeze(1)
        z_BD = (hidden_BTW[rows_B, -1] @ head_DW.T).float() / temperature
        picked_B = torch.multinomial(z_BD.softmax(-1), 1, generator=coins).squeeze(1)
        token_BT[rows_B, at] = picked_B if vocab is None else vocab.to_target_D.to(device)[picked_B]
    return Batch(
        token_BT=token_BT,
        length_B=batch.length_B,
        answer_BT=batch.answer_BT,
        feature=features(target, token_BT, batch.length_B.tolist(), tuple(batch.feature)),
    )


def features(
    target: Target, token_BT: Tensor, lengths: Sequence[int], taps: Sequence[str]
) -> dict[str, Tensor]:
    """Features of texts of so many tokens as batches carry them, bfloat16 [B, T, H]."""
    if not taps:
        return {}
    texts = [tokens[:length] for tokens, length in zip(token_BT.tolist(), lengths, strict=True)]
    found = padded(list(compute(target, texts, taps)), taps, token_BT.shape[1])
    return {tap: feature.to(token_BT.device) for tap, feature in found.items()}
