"""Known-wrong versions of block, k_seq, greedy_plus_one, spechub and traversal, for `planted`.

Each replaces one part of a right verifier.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from outpace.coins import Coins
from outpace.types import Draft, Group, Law
from outpace.verifiers.block import Block, Place
from outpace.verifiers.greedy_plus_one import GreedyPlusOne
from outpace.verifiers.k_seq import KSeq, discount
from outpace.verifiers.rules import excess, probs, residual
from outpace.verifiers.spechub import Plan, SpecHub
from outpace.verifiers.traversal import Traversal, Visit


class _KeptByWeight(Place):
    """The threshold is the weight itself, as if nothing could be made up for later."""

    def excess(self, weight: float) -> tuple[float, Law]:
        return weight, super().excess(weight)[1]


class _FullResidual(Place):
    """The extra token comes from norm([p - q]_+), without the weight."""

    def excess(self, weight: float) -> tuple[float, Law]:
        return super().excess(weight)[0], super().excess(1.0)[1]


class BlockByWeight(Block):
    """Block verification with another threshold."""

    place: ClassVar[type[Place]] = _KeptByWeight


class BlockFullResidual(Block):
    """Block verification with the residual of `chain`."""

    place: ClassVar[type[Place]] = _FullResidual


class Undiscounted(KSeq):
    """Every draw is tried against p itself."""

    @staticmethod
    def discount(p_S: Tensor, q_S: Tensor, k: int) -> tuple[float, float]:
        """No discount; what the draws take is then more than p has."""
        return 1.0, float(torch.minimum(p_S, q_S).sum())


class LastDiscount(KSeq):
    """The discount that is safe for fewer draws than there are."""

    @staticmethod
    def discount(p_S: Tensor, q_S: Tensor, k: int) -> tuple[float, float]:
        """Of one draw less."""
        return discount(p_S, q_S, max(1, k - 1))


class GreedyInLaw(GreedyPlusOne):
    """The random sibling is judged by all of q, though the greedy ones could not come."""

    def attempt(self, draft: Draft, coins: Coins, group: Group, q: Law, p: Law) -> tuple[int | None, Law]:
        child = group.nodes[-1]
        x = draft.token_N[child]
        if coins.flip(probs(p, (x,))[x] / probs(q, (x,))[x], group.parent, 0):
            return child, p
        return None, residual(p, q)


class HubUnserved(SpecHub):
    """A pair that was refused leaves nothing to the hub."""

    @staticmethod
    def plan(p: Law, q: Law, rest: Law, hub: int) -> Plan:
        """Nothing for the hub."""
        return replace(SpecHub.plan(p, q, rest, hub), spill=0.0, take=0.0)


class HubServedOnce(SpecHub):
    """The hub is kept only of pairs that it is first of."""

    @staticmethod
    def plan(p: Law, q: Law, rest: Law, hub: int) -> Plan:
        """Nothing spills."""
        return replace(SpecHub.plan(p, q, rest, hub), spill=0.0)


class HubResidual(SpecHub):
    """The extra token comes from what the first pairs leave of p, as if there were no others."""

    @staticmethod
    def plan(p: Law, q: Law, rest: Law, hub: int) -> Plan:
        """The residual of `chain`, without the hub."""
        left = residual(p, q)
        return replace(SpecHub.plan(p, q, rest, hub), rest=left.without((hub,)) or left)


class SecondForgets(SpecHub):
    """Behind the hub a token is judged by all of p, though it was first of other pairs."""

    @staticmethod
    def second(p_x: float, q_x: float, pair: float) -> float:
        """As if p(x) had not been served."""
        return p_x / pair


class _Unweighed(Visit):
    """A refusal leaves the weight as it was."""

    def _weigh(self, mass: float) -> None:
        return


class _EveryPathAlone(Visit):
    """A child's weight forgets that of its parent."""

    def share(self, token: int, q: Law | None) -> float:
        own, self.weight = self.weight, 1.0
        found = super().share(token, q)
        self.weight = own
        return found


class _LightResidual(Visit):
    """What is missing is taken from p, not from what the node still owes of p."""

    def refuse(self) -> None:
        if self.q is None:
            super().refuse()
            return
        assert self.rest is not None
        mass, _ = excess(self.rest.settled(), self.q, self.weight)
        _, law = excess(self.rest.settled(), self.q)
        self._weigh(mass)
        if law is not None:
            self.rest.become(law)


class Unweighed(Traversal):
    """Traversal whose nodes keep their first weight."""

    visit: ClassVar[type[Visit]] = _Unweighed


class EveryPathAlone(Traversal):
    """Traversal whose weights are ratios at one node."""

    visit: ClassVar[type[Visit]] = _EveryPathAlone


class LightResidual(Traversal):
    """Traversal with the residual of `tree`."""

    visit: ClassVar[type[Visit]] = _LightResidual


BLOCK_BY_WEIGHT = BlockByWeight()
BLOCK_FULL_RESIDUAL = BlockFullResidual()
UNDISCOUNTED = Undiscounted()
LAST_DISCOUNT = LastDiscount()
GREEDY_IN_LAW = GreedyInLaw()
HUB_UNSERVED = HubUnserved()
HUB_SERVED_ONCE = HubServedOnce()
HUB_RESIDUAL = HubResidual()
SECOND_FORGETS = SecondForgets()
UNWEIGHED = Unweighed()
EVERY_PATH_ALONE = EveryPathAlone()
LIGHT_RESIDUAL = LightResidual()
