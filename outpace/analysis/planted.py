"""Known-wrong rules. The distribution test must catch each of them, or it proves nothing.

Most are mistakes that shipped somewhere: the wrong q, siblings touched after they were drawn, a
residual that forgets something, a coin used twice.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.analysis import planted_rules as rules
from outpace.analysis.enumeration import Coin, EnumeratingCoins
from outpace.analysis.tables import RIGHT, Recipe, Sapling, World, best, chain, fan, step_error
from outpace.coins import Coins
from outpace.types import ROOT, Draft, Drawn, Group, Law, Verdict
from outpace.verifiers.base import TargetLaws, Verifier
from outpace.verifiers.tree import Tree


@dataclass(frozen=True)
class Planted:
    """A known-wrong rule: right parts, with one of them replaced."""

    name: str
    verifiers: tuple[str, ...]
    """Those that it can be planted under."""
    recipe: Recipe
    wrong: Callable[[Verifier], Verifier] = lambda verifier: verifier
    instead: Verifier | None = None
    """Judges in place of the right verifier."""
    coins: type[Any] = EnumeratingCoins
    worlds: tuple[World, ...] = ()
    """Where it shows; empty: in ordinary ones."""

    def error(self, verifier: str, world: World) -> float:
        """Largest error of the distribution of the output."""
        return step_error(self.wrong(self.instead or RIGHT[verifier]), self.recipe, world, self.coins)


# Drafts that are not what they say -----------------------------------------------------------


def argmax_with_softmax(s: Sapling) -> None:
    """The favourite, reported as a draw from q."""
    q = s.world.q(())
    s.hang(ROOT, Drawn.IID, q.top(1), q)


def other_temperature(s: Sapling) -> None:
    """Drawn from q, reported as drawn at half the temperature."""
    q = s.world.q(())
    sharp_V = q.prob_S**2
    s.hang(ROOT, Drawn.IID, s.draws(q, Drawn.IID, 1, ROOT, 1), Law(sharp_V / sharp_V.sum()))


def dropped_if_unlikely(s: Sapling) -> None:
    """A drawn token is thrown away because its own q is low."""
    q = s.world.q(())
    tokens = [t for t in s.draws(q, Drawn.IID, 1, ROOT, 1) if q.prob(t) > 0.3]
    s.hang(ROOT, Drawn.IID, tokens, q)


def ranked_after_drawing(s: Sapling) -> None:
    """Siblings are sorted by q after they were drawn."""
    q = s.world.q(())
    tokens = s.draws(q, Drawn.DISTINCT, 2, ROOT, 1)
    s.hang(ROOT, Drawn.DISTINCT, sorted(tokens, key=q.prob, reverse=True), q)


def best_of_two_draws(s: Sapling) -> None:
    """Two are drawn, the likelier one is kept."""
    q = s.world.q(())
    tokens = s.draws(q, Drawn.DISTINCT, 2, ROOT, 1)
    s.hang(ROOT, Drawn.IID, [max(tokens, key=q.prob)], q)


def ranked_pair(s: Sapling) -> None:
    """The hub is put first, whichever was drawn first."""
    q = s.world.q(())
    tokens = s.draws(q, Drawn.HUB, 2, ROOT, 1)
    s.hang(ROOT, Drawn.HUB, sorted(tokens, key=q.prob, reverse=True), q)


def distinct_called_hub(s: Sapling) -> None:
    """Two draws without replacement, verified as if only pairs with the hub could come."""
    q = s.world.q(())
    s.hang(ROOT, Drawn.HUB, s.draws(q, Drawn.DISTINCT, 2, ROOT, 1), q)


def paired_if_unlikely(s: Sapling) -> None:
    """The second of a pair is left out where the first is likely."""
    q = s.world.q(())
    tokens = s.draws(q, Drawn.HUB, 2, ROOT, 1)
    s.hang(ROOT, Drawn.HUB, tokens[:1] if q.prob(tokens[0]) > 0.4 else tokens, q)


def merged_repeats(s: Sapling) -> None:
    """A token that was drawn twice is tried once."""
    q = s.world.q(())
    s.hang(ROOT, Drawn.IID, list(dict.fromkeys(s.draws(q, Drawn.IID, 2, ROOT, 1))), q)


def distinct_called_iid(s: Sapling) -> None:
    """Drawn without replacement, verified with q as it was for the first draw."""
    q = s.world.q(())
    s.hang(ROOT, Drawn.IID, s.draws(q, Drawn.DISTINCT, 2, ROOT, 1), q)


def groups_share_a_coin(s: Sapling) -> None:
    """Two drafters draw with the same coin."""
    for drafter in (1, 2):
        q = s.world.q((), drafter)
        s.hang(ROOT, Drawn.IID, s.draws(q, Drawn.IID, 1, ROOT, 1), q)


def tail_tried_first(s: Sapling) -> None:
    """A chosen token that depends on a draw is tried before that draw."""
    q = s.world.q(())
    (x,) = s.draws(q, Drawn.IID, 1, ROOT, 1)
    s.hang(ROOT, Drawn.CHOSEN, [(x + 1) % s.world.vocab])
    s.hang(ROOT, Drawn.IID, [x], q)


def chain_as_grown(s: Sapling) -> None:
    """A chain whose coins are keyed by the node alone, as those of real drafters are. Right."""
    node = ROOT
    for depth in (1, 2):
        law = s.world.q(s.path(node))
        (node,) = s.hang(node, Drawn.IID, s.draws(law, Drawn.IID, 1, node, depth), law)


# Coins that are used twice -------------------------------------------------------------------


class OneStream(EnumeratingCoins):
    """Drafter and judge draw from the same stream."""

    def _named(self, *key: int) -> Coin:
        return (self.seed, 0, self.level, self.position, *key)


class OneCoinPerNode(EnumeratingCoins):
    """The key leaves out which draw at the node it is."""

    def _named(self, *key: int) -> Coin:
        return (self.seed, int(self.stream), self.level, self.position, key[0])


class OneCoinPerStep(EnumeratingCoins):
    """The key leaves out the node."""

    def _named(self, *key: int) -> Coin:
        return (self.seed, int(self.stream), self.level, self.position, key[-1])


class OneRacePerStep(EnumeratingCoins):
    """Races are keyed by the pending position alone."""

    def race(self, law: Law, depth: int, count: int = 1) -> list[int]:
        return super().race(law, 1, count)


class TurnedOver(EnumeratingCoins):
    """Keeps with probability q / p."""

    def flip(self, prob: float, *key: int) -> bool:
        return super().flip(1 / prob if prob > 0 else 0.0, *key)


# Verifiers that forget -----------------------------------------------------------------------


class Wrapped(Verifier):
    """A verifier whose answer is spoiled."""

    name = "wrapped"
    takes = frozenset(Drawn)
    draws = Drawn.CHOSEN

    def __init__(self, right: Verifier) -> None:
        self.right = right

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        return self.right.judge(draft, laws, coins, want_laws=want_laws)


class ForgetsQ(Wrapped):
    """After a refusal the extra token is drawn from p."""

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        verdict = super().judge(draft, laws, coins, want_laws=want_laws)
        node = verdict.kept[-1] if verdict.kept else ROOT
        extra = coins.choose(laws.law(node), node, -2)
        return replace(verdict, emitted=(*verdict.emitted[:-1], extra))


class DrawsAgain(Wrapped):
    """A token of the target that no child carries is drawn once more."""

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        verdict = super().judge(draft, laws, coins, want_laws=want_laws)
        node = verdict.kept[-1] if verdict.kept else ROOT
        if node not in draft.groups_of:
            return verdict
        extra = coins.choose(laws.law(node), node, -2)
        return replace(verdict, emitted=(*verdict.emitted[:-1], extra))


class StartsOver(Tree):
    """Every sibling is tried against p, as if none had been refused before it."""

    def _pick(self, draft: Draft, groups: Sequence[Group], p: Law, coins: Coins) -> tuple[int | None, Law]:
        assert isinstance(coins, EnumeratingCoins)
        rest = p
        for group in groups:
            for node in group.nodes:
                alone = replace(group, nodes=(node,))
                fresh = replace(coins, level=1 + node)
                child, rest = super()._pick(draft, (alone,), p, fresh)
                if child is not None:
                    return child, p
        return None, rest


_CHAIN = ("chain", "tree", "block", "k_seq", "traversal")
_TREE, _SIBLINGS, _REPEATS = ("tree",), ("tree", "traversal"), ("tree", "k_seq", "traversal")
_PICKERS = ("match", "coupled", "k_seq", "greedy_plus_one", "spechub", "traversal")
_GREEDY, _BLOCK, _K_SEQ, _TRAVERSAL = ("greedy_plus_one",), ("block",), ("k_seq",), ("traversal",)
_GREEDY_FAN = fan(Drawn.GREEDY_PLUS_ONE, 2, 0)
_HUB, _PAIR = ("spechub",), fan(Drawn.HUB, 2, 0)

PLANTED = (
    Planted("argmax draft, softmax q", _CHAIN, argmax_with_softmax),
    Planted("q of another temperature", _CHAIN, other_temperature),
    Planted("unlikely draws dropped", _CHAIN, dropped_if_unlikely),
    Planted("best of two draws", _CHAIN, best_of_two_draws),
    Planted("siblings ranked after drawing", _SIBLINGS, ranked_after_drawing),
    Planted("repeated draws merged", _REPEATS, merged_repeats),
    Planted("distinct verified as iid", _REPEATS, distinct_called_iid),
    Planted("groups share a draft coin", _SIBLINGS, groups_share_a_coin),
    Planted("tail tried before its draw", _SIBLINGS, tail_tried_first),
    Planted("residual forgets q", _CHAIN, chain(Drawn.IID), wrong=ForgetsQ),
    Planted("residual forgets q", _GREEDY, _GREEDY_FAN, wrong=ForgetsQ, worlds=(World(3, vocab=4),)),
    Planted("kept with q / p", _CHAIN, chain(Drawn.IID), coins=TurnedOver),
    Planted("kept with q / p", _GREEDY, _GREEDY_FAN, coins=TurnedOver),
    Planted("draft and judge share coins", ("chain", "tree", "k_seq"), chain(Drawn.IID), coins=OneStream),
    Planted(
        "draft and judge share coins",
        (*_BLOCK, *_TRAVERSAL),
        chain_as_grown,
        coins=OneStream,
        worlds=(World(12),),
    ),
    Planted("draft and judge share coins", _GREEDY, chain(Drawn.GREEDY_PLUS_ONE), coins=OneStream),
    Planted("one coin per node", _CHAIN, chain(Drawn.IID), coins=OneCoinPerNode),
    Planted("one coin per node", _GREEDY, _GREEDY_FAN, coins=OneCoinPerNode, worlds=(World(3, vocab=4),)),
    Planted("one coin per step", ("match", *_CHAIN, *_GREEDY, "spechub"), best([1, 1]), coins=OneCoinPerStep),
    Planted("one race per step", ("coupled",), best([1, 1]), coins=OneRacePerStep),
    Planted("drawn again where no child fits", _PICKERS, best([2, 1]), wrong=DrawsAgain),
    Planted("chosen siblings not struck", _TREE, best([2]), instead=StartsOver()),
    Planted("residual not carried on", _TREE, fan(Drawn.IID, 2, 0), instead=StartsOver()),
    Planted("kept with the weight of its path", _BLOCK, chain(Drawn.IID), instead=rules.BLOCK_BY_WEIGHT),
    Planted(
        "residual without the weight",
        _BLOCK,
        chain(Drawn.IID),
        instead=rules.BLOCK_FULL_RESIDUAL,
        worlds=(World(12),),
    ),
    Planted("no discount", _K_SEQ, fan(Drawn.IID, 2, 0), instead=rules.UNDISCOUNTED),
    Planted("discount for one draw less", _K_SEQ, fan(Drawn.IID, 3, 0), instead=rules.LAST_DISCOUNT),
    Planted("greedy siblings left in q", _GREEDY, _GREEDY_FAN, instead=rules.GREEDY_IN_LAW),
    Planted("hub put first after drawing", _HUB, ranked_pair),
    Planted("distinct verified as a pair", _HUB, distinct_called_hub),
    Planted("second left out for a likely first", _HUB, paired_if_unlikely),
    Planted("residual forgets q", _HUB, _PAIR, wrong=ForgetsQ, worlds=(World(12),)),
    Planted("kept with q / p", _HUB, _PAIR, coins=TurnedOver),
    Planted("draft and judge share coins", _HUB, chain(Drawn.HUB), coins=OneStream),
    Planted("one coin per node", _HUB, _PAIR, coins=OneCoinPerNode, worlds=(World(12),)),
    Planted("hub not served", _HUB, _PAIR, instead=rules.HUB_UNSERVED),
    Planted("hub served by its own pairs alone", _HUB, _PAIR, instead=rules.HUB_SERVED_ONCE),
    Planted(
        "residual forgets the second pairs", _HUB, _PAIR, instead=rules.HUB_RESIDUAL, worlds=(World(12),)
    ),
    Planted("second judged by all of p", _HUB, _PAIR, instead=rules.SECOND_FORGETS),
    Planted("weight unchanged by refusals", _TRAVERSAL, fan(Drawn.DISTINCT, 2), instead=rules.UNWEIGHED),
    Planted("weight not handed down", _TRAVERSAL, chain(Drawn.IID), instead=rules.EVERY_PATH_ALONE),
    Planted(
        "residual without the weight",
        _TRAVERSAL,
        chain(Drawn.IID),
        instead=rules.LIGHT_RESIDUAL,
        worlds=(World(12),),
    ),
)
"""Wrong drafts, coins and verifiers of a single step."""
