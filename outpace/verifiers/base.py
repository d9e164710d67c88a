"""The contract of a verifier: a pure function of (draft, target distributions, coins)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import make_dataclass
from typing import Any, ClassVar, Protocol

from outpace.coins import Coins
from outpace.errors import SpecError
from outpace.types import ROOT, Draft, Drawn, Law, Verdict


class TargetLaws(Protocol):
    """Target distributions at the rows of one tree, already warped."""

    def law(self, node: int) -> Law:
        """The distribution of the token that follows ``node`` (ROOT: follows the pending token)."""
        ...

    def certain(self, node: int) -> int | None:
        """The only token that may follow, where that is known without the distribution; else None."""
        return None


class Verifier(ABC):
    """Decides which path of a draft is kept and which token the target adds."""

    Config: ClassVar[type] = make_dataclass("NoSettings", (), frozen=True)
    """Frozen keyword-only dataclass; its fields are the keys of ``verifier=NAME[...]``."""
    name: ClassVar[str]
    """As in the registry."""
    takes: ClassVar[frozenset[Drawn]]
    """Kinds of groups it can verify without changing the distribution of the output."""
    chains_only: ClassVar[bool] = False
    """Whether it refuses branches."""
    one_law: ClassVar[bool] = False
    """Whether it refuses two drawn groups below one parent; chosen ones may join."""
    draws: Drawn
    """How a drafter that has a distribution should draw for it when sampling."""
    reproduces: ClassVar[bool] = False
    """Whether the text is a function of prompt and seed alone, whoever drafts."""
    lossless: ClassVar[bool] = True

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    def check(self, draft: Draft) -> None:
        """Raise SpecError, naming a verifier that fits, if this draft is not for this one."""
        for group in draft.groups:
            if group.drawn not in self.takes:
                right = "coupled" if group.drawn is Drawn.COUPLED else "tree"
                raise SpecError(
                    f"verifier {self.name!r} cannot take a draft drawn {group.drawn.value!r}; "
                    f"use verifier={right}"
                )
        if self.chains_only:
            if draft.parent_N != tuple(range(ROOT, len(draft) - 1)):
                raise SpecError(f"verifier {self.name!r} takes chains only; use verifier=tree")
            most = max((len(group.nodes) for group in draft.groups), default=1)
            if len(draft.groups) > len(draft) or most != 1:
                raise SpecError(
                    f"verifier {self.name!r} takes one draw per position, got "
                    f"{len(draft.groups)} groups of up to {most} draws for {len(draft)} nodes; "
                    "use verifier=tree"
                )
        if self.one_law:
            for parent, groups in draft.groups_of.items():
                drawn = [group.drawn.value for group in groups if group.law is not None]
                if len(drawn) > 1:
                    raise SpecError(
                        f"verifier {self.name!r} takes one drawn group per parent, got "
                        f"{' and '.join(drawn)} under node {parent}; use verifier=tree"
                    )

    @abstractmethod
    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        """Keep a path of ``draft`` and add one token, so that what is emitted has the distribution p.

        Args:
            draft: may be empty; then one token is drawn from the distribution after the pending token.
            laws: the target's distributions, read only at visited nodes.
            coins: of this step, stream JUDGE.
            want_laws: whether the verdict shall carry the true distributions of the emitted tokens.

        Raises:
            SpecError: the draft holds groups that this verifier cannot verify.

        Cost: stated by each verifier. Mutates nothing.
        """
