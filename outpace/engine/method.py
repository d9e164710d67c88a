"""From a method spec to a drafter that is ready to run, with budget, verifier and policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from outpace import registry
from outpace.config import PLAN_KEYS, MethodSpec, build
from outpace.drafters.base import Drafter, Request
from outpace.errors import SpecError
from outpace.machine import Member
from outpace.models.base import TREE, Target
from outpace.policies.base import Policy
from outpace.policies.costs import Costs
from outpace.tree.mask import is_chain
from outpace.tree.shapes import budget
from outpace.types import Budget, StepRecord
from outpace.verifiers.base import Verifier


class Method(ABC):
    """How a request is drafted for: by one drafter, or by several of which a policy picks."""

    spec: str
    """Normalised."""
    policy: Policy
    verifier: Verifier
    verifier_spec: MethodSpec
    names_verifier: bool
    """Whether the spec names the verifier."""

    @property
    @abstractmethod
    def members(self) -> Mapping[str, SingleMethod]:
        """Method spec -> method, of the drafters that the policy may pick, preferred first."""

    @property
    def preferred(self) -> SingleMethod:
        return next(iter(self.members.values()))

    def budget_of(self, member: SingleMethod) -> Budget:
        """How far a member may draft here."""
        return member.budget

    def serving(self, ruled: bool) -> Mapping[str, SingleMethod]:
        """The members that take part in a request: those that are made for rules only if it has some."""
        found = {name: m for name, m in self.members.items() if ruled or not m.drafter.traits.for_rules}
        return found or self.members

    def begin(self, request: Request, ruled: bool, chosen: Verifier) -> dict[str, Member]:
        """Drafter -> its state of a new sequence, and who judges it. If one cannot begin, the others end."""
        judges, members = self.verifiers(chosen), dict[str, Member]()
        with ExitStack() as undo:
            for name, one in self.serving(ruled).items():
                members[name] = Member(one.drafter.begin(request), self.budget_of(one), judges[name])
                undo.callback(one.drafter.end, members[name].state)
            undo.pop_all()
        return members

    def verifiers(self, chosen: Verifier) -> dict[str, Verifier]:
        """Drafter -> who judges its drafts: each member's own, unless a request chose another.

        Args:
            chosen: this method's own verifier, or the one that a request needs in its place.
        """
        own = chosen is self.verifier
        return {name: one.verifier if own else chosen for name, one in self.members.items()}

    def lossless(self, chosen: Verifier) -> bool:
        """Whether all who judge keep the target's distribution."""
        judges = all(one.lossless for one in self.verifiers(chosen).values())
        return chosen.lossless and judges and all(m.drafter.traits.lossless for m in self.members.values())

    def keyed(self, reproducible: bool | None, seeded: bool) -> bool:
        """Whether the text is to be a function of prompt and seed alone, whoever drafts.

        Args:
            reproducible: what the request says; None says nothing.
            seeded: whether it names a seed, which is a wish of its own unless the method spec
                names a verifier.

        Raises:
            SpecError: the request says so, and the method spec names another verifier.
        """
        if reproducible is None:
            return seeded and not self.names_verifier
        if reproducible and self.names_verifier and not self.verifier.reproduces:
            right = registry.able("verifier", registry.REPRODUCES)[0].name
            raise SpecError(
                f"reproducible text needs verifier={right}, not {self.verifier_spec}; drop one of the two"
            )
        return reproducible

    @property
    def deterministic(self) -> bool:
        """Whether plans and drafts follow from the sequence alone, not from what others said."""
        return self.policy.deterministic and all(
            one.drafter.traits.deterministic for one in self.members.values()
        )

    @property
    def watchers(self) -> tuple[Callable[[StepRecord], None], ...]:
        """Listeners that keep the policy's costs up to date, if it reads them."""
        return () if self.policy.deterministic else (self.policy.costs.watch,)


class SingleMethod(Method):
    """A drafter that is ready to run, with its budget, verifier and policy.

    Args:
        allow_lossy: whether a verifier that changes the distribution of the output may be named.
        costs: what passes and drafts cost, for the policy; None lets it start from a guess.
    """

    def __init__(
        self, spec: MethodSpec, target: Target, allow_lossy: bool = False, costs: Costs | None = None
    ) -> None:
        own, plan = spec.split()
        who = f"drafter {spec.name!r}"
        cls: type[Drafter[Any]] = registry.load("drafter", spec.name)
        target.require(cls.traits.needs, who)
        self.spec = str(spec)
        size = read_size(plan.get("tree_size"), who)
        self.verifier_spec = MethodSpec.parse(plan.get("verifier", "tree"))
        self.names_verifier = "verifier" in plan
        self.names_tree = bool({"tree", "tree_size"} & plan.keys())
        self.verifier: Verifier = registry.make("verifier", str(self.verifier_spec))
        # A drafter's own tree gives way where chains alone are taken; the user's does not.
        chain = self.verifier.chains_only or TREE not in target.can
        tree = plan.get("tree", None if chain else cls.traits.default_tree)
        if size is None and "tree" not in plan:
            size = cls.traits.default_nodes  # its own tree is cut to its own size
        self.budget: Budget = budget(tree, size, cls.traits.default_nodes)
        self.policy: Policy = registry.make("policy", plan.get("policy", "fixed"))
        if costs is not None:
            self.policy.costs = costs
            costs.known_as(self.spec, str(spec.without("policy")))
        if not self.verifier.lossless and not allow_lossy:
            raise _lossy(f"verifier {self.verifier_spec}")
        template = self.budget.shape.parent_N
        branches = self.budget.shape.beam > 0 or (template and not is_chain(template))
        if self.verifier.chains_only and branches:
            raise SpecError(
                f"{who}: verifier {self.verifier_spec} takes chains only, not tree={tree}; "
                "use verifier=tree, or tree=chain"
            )
        if chain and branches:
            raise SpecError(f"{who}: {target.name} checks chains only, not tree={tree}; use tree=chain")
        self.drafter = cls.load(build(cls.Config, own, who, PLAN_KEYS), target)
        traits = self.drafter.traits
        if not traits.lossless and not allow_lossy:
            raise _lossy(f"{who}: {spec}")
        if self.policy.reads_estimates and not (traits.estimates or traits.foresees):
            raise SpecError(
                f"{who}: policy {plan['policy']} needs estimates of acceptance, which this drafter does not "
                "make, nor any that is made of others; name one that does by itself, or train a head for a "
                f"draft model: outpace train acceptance --model {target.name}"
            )

    @property
    def members(self) -> Mapping[str, SingleMethod]:
        """Itself alone."""
        return {self.spec: self}


def _lossy(what: str) -> SpecError:
    return SpecError(
        f"{what} changes the distribution of the output; if that is what you want, say --allow-lossy, "
        "or Engine.load(..., allow_lossy=True)"
    )


def read_size(text: str | None, who: str) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        raise SpecError(f"{who}: tree_size={text!r} is not a whole number") from None
