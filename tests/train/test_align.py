"""The shifts, against loops that say them in words."""

import torch

from outpace.train.align import DRAFT_MODEL, EAGLE, Aligned, moved, next_tokens, places
from outpace.train.batches import Batch


def batch():
    """Token t of sequence b is 100 b + t; the second has two answers, the third is short."""
    length_B = torch.tensor([9, 12, 4])
    token_BT = 100 * torch.arange(3)[:, None] + torch.arange(12)
    inside_BT = torch.arange(12) < length_B[:, None]
    answer_BT = torch.zeros(3, 12, dtype=torch.bool)
    answer_BT[0, 4:] = True  # runs on into the padding, as careless masks do
    answer_BT[1, 3:6] = answer_BT[1, 9:] = True
    answer_BT[2, 1:4] = True
    row_BT1 = token_BT[..., None].to(torch.bfloat16)
    return Batch(
        token_BT=token_BT * inside_BT, length_B=length_B, answer_BT=answer_BT, feature={"hidden.-1": row_BT1}
    )


def wanted(one, ahead):
    """(sequence, row) of every token that teaches and is so far ahead."""
    out = []
    for b, length in enumerate(one.length_B.tolist()):
        for t in range(12):
            if t + ahead < length and one.answer_BT[b, t + ahead]:
                out.append((b, t))
    return out


def pairs(aligned, mask_BA):
    rows = mask_BA.nonzero().tolist()
    return [(b, int(aligned.place_BA[b, a])) for b, a in rows]


def test_rows_learn_what_stands_ahead_of_them():
    one = batch()
    for first in (DRAFT_MODEL, EAGLE):
        aligned = Aligned(one, first)
        assert pairs(aligned, aligned.real_BA) == wanted(one, first)
        for ahead in range(1, 7):
            known = set(wanted(one, ahead)) & set(wanted(one, first))
            assert pairs(aligned, aligned.teaches(ahead)) == sorted(known)
            token_BA = aligned.token(ahead)
            for (b, t), token in zip(
                pairs(aligned, aligned.real_BA), token_BA[aligned.real_BA].tolist(), strict=True
            ):
                inside = t + ahead < int(one.length_B[b])
                assert token == (100 * b + t + ahead if inside else 0)


def test_the_law_of_a_token_is_of_the_row_before_it():
    one = batch()
    for first in (DRAFT_MODEL, EAGLE):
        aligned = Aligned(one, first)
        law_N1 = aligned.laws_of(one.feature["hidden.-1"]).long()
        assert len(law_N1) == len(wanted(one, 1))
        for ahead in (first, first + 1, first + 3):
            mask_BA = aligned.teaches(ahead)
            row = law_N1[aligned.law(ahead)].squeeze(-1)[mask_BA]
            off = (aligned.token(ahead)[mask_BA] - row).tolist()
            assert set(off) == {1}, "planted: reading a row too far gives 0"


def test_features_of_the_rows_themselves():
    one = batch()
    aligned = Aligned(one, EAGLE)
    row_BA = aligned.rows(one.feature["hidden.-1"]).long().squeeze(-1)
    known = 100 * torch.arange(3)[:, None] + aligned.place_BA
    assert (row_BA == known)[aligned.real_BA].all()


def test_neighbours_are_neighbours_only_within_an_answer():
    one = batch()
    aligned = Aligned(one, DRAFT_MODEL)
    assert aligned.place_BA[1].tolist() == [2, 3, 4, 8, 9, 10]
    assert aligned.follows(1)[1].tolist() == [True, True, False, True, True]
    assert aligned.follows(2)[1].tolist() == [True, False, False, True]
    assert aligned.follows(0)[2].tolist() == [True, True, True, False, False, False][:6]
    assert aligned.follows(9).shape == (3, 0)


def test_next_tokens_and_places():
    one = batch()
    assert next_tokens(one)[1].tolist() == [*range(101, 112), 0]
    assert places(one).tolist() == [list(range(12))]
    assert moved(one, torch.device("cpu")) is one
    assert moved(one, torch.device("meta")).feature["hidden.-1"].is_meta


def test_a_batch_from_which_nothing_is_learned():
    one = batch()
    empty = Batch(
        token_BT=one.token_BT,
        length_B=one.length_B,
        answer_BT=torch.zeros_like(one.answer_BT),
        feature=one.feature,
    )
    aligned = Aligned(empty, EAGLE)
    assert not aligned.real_BA.any() and not len(aligned.law_N)
