"""Answers that a draft model writes itself, with the target's features of them (DistillSpec).

A draft model learns best on the texts on which it will be asked, which are its own. The prompts of
a batch are kept; each answer is drawn anew from the draft model, as long as it was; then the target
reads the texts once and gives the distributions to learn from. No gradient goes through the sampling.

Shape letters: B sequences, T tokens, V vocabulary, W width of the draft model, D draft vocabulary,
H hidden size of the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.law import VocabMap
from outpace.methods.draft_model.training_net import DraftNet
from outpace.models.base import Target
from outpace.train.align import places
from outpace.train.batches import Batch
from outpace.types import Feed


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

    Cost: every token is one pass of the draft model over the whole text, since training keeps no
        keys: about T / 2 times a training step's forward pass, and one pass of the target.
    """
    token_BT = batch.token_BT.clone()
    device = token_BT.device
    coins = torch.Generator(device=device).manual_seed(seed)
    inside_BT = places(batch) < batch.length_B[:, None]
    drawn_BT = batch.answer_BT & inside_BT
    for at in range(1, token_BT.shape[1]):
        rows_B = drawn_BT[:, at].nonzero().squeeze(1)
        if not len(rows_B):
            continue
        text_BT = token_BT[rows_B, :at]
        hidden_BTW = net(embed_VW[text_BT], places(batch)[:, :at], None)
        z_BD = (hidden_BTW[:, -1] @ head_DW.T).float() / temperature
        picked_B = torch.multinomial(z_BD.softmax(-1), 1, generator=coins).squeeze(1)
        token_BT[rows_B, at] = picked_B if vocab is None else vocab.to_target_D.to(device)[picked_B]
    lengths = batch.length_B.tolist()
    return Batch(
        token_BT=token_BT,
        length_B=batch.length_B,
        answer_BT=batch.answer_BT,
        feature=features(target, token_BT, lengths, tuple(batch.feature)),
    )


def features(
    target: Target, token_BT: Tensor, lengths: list[int], taps: tuple[str, ...]
) -> dict[str, Tensor]:
    """One pass of the target over the texts; taps as batches carry them, bfloat16 [B, T, H]."""
    out: dict[str, Tensor] = {}
    if not taps:
        return out
    cache = target.new_cache()
    for number, (tokens, length) in enumerate(zip(token_BT.tolist(), lengths, strict=True)):
        slot = cache.open()
        scored = target.score([Feed.chain(slot, tokens[:length], want=())], cache, taps=frozenset(taps))
        for tap in taps:
            rows_TH = scored.taps[tap]
            if tap not in out:
                size = (*token_BT.shape, rows_TH.shape[1])
                out[tap] = torch.zeros(size, dtype=torch.bfloat16, device=token_BT.device)
            out[tap][number, :length] = rows_TH.to(torch.bfloat16)
        cache.drop(slot)
        cache.close(slot)
    return out
