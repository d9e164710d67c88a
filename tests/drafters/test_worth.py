from dataclasses import replace

from outpace.drafters.lookup.worth import Trust, grow
from outpace.types import Budget, Outcome, Scored, Verdict


def refused(draft):
    """An outcome in which nothing of a draft was kept."""
    return Outcome(draft, Scored(None, (0,)), Verdict((), (5,)), (1,), (0,), 3)


def test_a_lookup_learns_from_its_own_drafts_alone():
    mine, other = Trust(), Trust()
    draft = grow(lambda n: [(n + 1, 0.9, n + 1)], 0, Budget(4, 4), mine.own)
    assert len(draft) > 0
    other.learn(refused(draft))
    assert other.doubt == 1.0
    mine.learn(refused(draft))
    assert mine.doubt > 1.0
    anybodys = replace(draft, memo=replace(draft.memo, owner=None))
    other.learn(refused(anybodys))
    assert other.doubt > 1.0
