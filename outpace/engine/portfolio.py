"""`auto`: several drafters for one sequence, of which a policy picks one, or none, at every step.

    auto                                          lookups, and the best trained for this target
    auto[add=draft_model[model=smollm2-135m]]     and a draft model, as by --draft-model
    auto[drafters=suffix+eagle3[tree=dynamic]]    exactly these

Members are loaded when the first request comes: an engine with `auto` is ready as soon as its target
is. With a draft model of the user's they are loaded with the engine. All of them follow the text from
its beginning, whoever drafts; a member that was not picked costs that much and no more.

Lookups that `auto` adds itself, and dynamic trees, have larger budgets than when they are named alone. The
policy knows what a row costs here: it can shorten a draft, not lengthen one. A lookup without previews has
to be tried like a trained drafter. It takes part only where all others preview.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from outpace import registry
from outpace.config import PLAN_KEYS, MethodSpec, build, split_specs
from outpace.drafters.base import Traits
from outpace.drafters.trained import CONFIG, candidates, home, read_measured, taught
from outpace.engine.method import Method, SingleMethod
from outpace.errors import OutpaceError, SpecError
from outpace.models.base import VIEWS, Target
from outpace.policies.base import Policy
from outpace.policies.costs import Costs
from outpace.tree.shapes import LEVELS
from outpace.types import Budget
from outpace.verifiers.base import Verifier

LONGEST = 48
"""Most guesses of a lookup that takes part unasked: a copy that goes on pays for so many."""

LARGEST = 11
"""Most guesses of a tree that grows by price; with the pending token they fill a tile of products.h. Where
5 were the most, the embedded model emitted 2.51 for 2.56."""

LONG = 4096
"""Positions of models whose texts may be so long that drafters for long texts take part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PortfolioConfig:
    """Settings of `auto`."""

    drafters: str | None = None
    """Method specs to pick from, joined by ``+``; none: lookups, and the best of what was
    trained for the target."""
    add: str | None = None
    """Method specs that take part besides those."""


class Portfolio(Method):
    """Drafts with whatever pays best for the text, the batch and the machine, or not at all.

    Args:
        allow_lossy: whether members may name a verifier that changes the distribution of the output.
        costs: what passes and drafts cost, for the policy.
        find: gives the method of a spec, so that a member that is in use by itself is loaded once.
        draft_model: a language model of the user's that takes part; None: there is none.
    """

    Config = PortfolioConfig
    traits = Traits()
    """It asks nothing of a target; its members do."""

    def __init__(
        self,
        spec: MethodSpec,
        target: Target,
        allow_lossy: bool = False,
        costs: Costs | None = None,
        find: Callable[[str], Method] | None = None,
        draft_model: str | None = None,
    ) -> None:
        own, plan = spec.split()
        who = f"drafter {spec.name!r}"
        if refused := sorted({"tree", "tree_size", "verifier"} & plan.keys()):
            setting = f"{refused[0]}={plan[refused[0]]}"
            raise SpecError(
                f"{who}: {', '.join(refused)} belongs to its members; name one drafter, such as "
                f"eagle3[{setting}], or write {spec.name}[drafters=eagle3[{setting}]]"
            )
        self.spec = str(spec)
        self.config = build(PortfolioConfig, own, who, PLAN_KEYS)
        self.verifier: Verifier = registry.make("verifier", "tree")
        self.policy: Policy = registry.make("policy", plan.get("policy", spec.name))
        if self.policy.reads_estimates:
            raise SpecError(
                f"{who}: policy {plan['policy']} steers one drafter that estimates acceptance, and "
                f"{spec.name} picks among several; write draft_model[acceptance=HEAD "
                f"policy={plan['policy']}]"
            )
        self.left_out: dict[str, str] = {}
        """Drafters that take no part, and why: not trained for this target, or not the best."""
        self._costs = own_costs = self.policy.costs = costs or Costs()
        self._target = target
        self._find = find or (lambda one: SingleMethod(MethodSpec.parse(one), target, allow_lossy, own_costs))
        self._named = [*self._specs(self.config.drafters), *self._specs(self.config.add)]
        if draft_model is not None and not self.config.drafters:
            runs = registry.able("drafter", registry.RUNS_MODEL)[0].name
            self._named.append(MethodSpec(runs, (("model", draft_model),)))
        named = [p["verifier"] for one in self._named if "verifier" in (p := one.split()[1])]
        self.names_verifier = bool(named)
        self.verifier_spec = MethodSpec.parse(named[0] if named else "tree")
        keyed = [one for one in named if registry.load("verifier", MethodSpec.parse(one).name).reproduces]
        if keyed:
            raise SpecError(
                f"{who}: verifier={keyed[0]} judges all drafts of a text or none; drop it, and give "
                "the request a seed, or reproducible=True"
            )

    def _specs(self, text: str | None) -> list[MethodSpec]:
        """Read a list of members; mistakes in names show before anything is loaded."""
        specs = [MethodSpec.parse(part) for part in split_specs(text or "", "+")]
        for one in specs:
            if issubclass(registry.load("drafter", one.name), Method):
                raise SpecError(f"{self.spec}: {one.name} cannot be a member of itself")
        return specs

    @cached_property
    def members(self) -> Mapping[str, SingleMethod]:
        """Method spec -> member, preferred first. Loaded now, if this is the first look."""
        made = {str(spec): self._find(str(spec)).preferred for spec in self._named}
        if not self.config.drafters:
            named = {spec.name for spec in self._named}
            rows = [row for row in registry.entries("drafter") if row.name not in named]
            trained = self._loaded(
                MethodSpec(row.name) for row in rows if row.trained and row.family == "lookup"
            )
            trained |= self._best(
                [row.name for row in rows if row.trained and row.family not in ("lookup", "compose")]
            )
            stood_in = any(not one.drafter.traits.previews for one in (*made.values(), *trained.values()))
            made |= self._loaded(
                MethodSpec(row.name, (("tree_size", str(LONGEST)),) if previews else ())
                for row in rows
                if row.auto
                if (previews := _tells(row.name)) or not stood_in
            )
            made |= trained
            if self._target.max_positions >= LONG and VIEWS in self._target.can:
                able = registry.able("drafter", registry.LONG_TEXTS)
                made |= self._loaded(MethodSpec(row.name) for row in able if row.name not in named)
        for name, one in made.items():
            self._costs.suppose(name, level_D := supposed(one))
            if any(level_D) and not self._costs.kept(name)[0]:
                self._costs.know(taught(name, self._target, self._costs.tuning.text / 2))
        return made or self._loaded([MethodSpec("none")])

    def budget_of(self, member: SingleMethod) -> Budget:
        """As far as the policy may find worth its price."""
        return largest(member)

    def _loaded(self, specs: Iterable[MethodSpec]) -> dict[str, SingleMethod]:
        """Those of the members that can run here; of the others, why not is noted."""
        made: dict[str, SingleMethod] = {}
        for spec in specs:
            try:
                made[str(spec)] = self._find(str(spec)).preferred
            except OutpaceError as error:  # not trained for this target, or it cannot run it
                self.left_out[spec.name] = str(error)
        return made

    def _best(self, names: Sequence[str]) -> dict[str, SingleMethod]:
        """The trained model that emitted most per pass of those that can run here, and all of the user's own.

        Of those that come with the package one alone, because each that takes part follows the text.
        """
        emitted = {name: _measured_emitted(name, self._target) for name in names}
        made: dict[str, SingleMethod] = {}
        for name in sorted(names, key=lambda name: -emitted[name]):
            own = (home(name, self._target) / CONFIG).is_file()
            if made and emitted[name] >= 0.0 and not own:
                self.left_out[name] = (
                    f"{', '.join(made)} emits more per pass"
                    if emitted[name] > 0.0
                    else f"nobody measured it; name it with {self.spec}[add={name}]"
                )
            else:  # one without a folder of its own says itself what it lacks
                made |= self._loaded([MethodSpec(name)])
        return made


def supposed(one: SingleMethod) -> Sequence[float]:
    """What its levels cost in passes over one row, before one was timed; lookups cost next to nothing."""
    looks_up = registry.entry("drafter", MethodSpec.parse(one.spec).name).family == "lookup"
    return (0.0,) if looks_up else one.drafter.traits.level_D


def largest(one: SingleMethod) -> Budget:
    """How far a drafter may draft for a policy that prices rows, which can cut a draft and not extend it."""
    if one.names_tree or not one.budget.shape.beam:
        return one.budget
    return replace(one.budget, max_nodes=LARGEST, max_depth=LEVELS)


def _measured_emitted(method: str, target: Target) -> float:
    """Tokens per pass with a trained drafter when it was made; 0 if nobody measured it, -1 without one.
    Speed-ups do not compare: each is of a machine and of how fast passes were then.
    """
    for folder in candidates(method, target):
        emitted = (read_measured(folder) or {}).get("mean_emitted")
        return emitted if isinstance(emitted, int | float) and 0.0 < emitted < math.inf else 0.0
    return -1.0


def _tells(name: str) -> bool:
    """Whether a drafter tells what it would propose; not if it cannot be imported."""
    try:
        return bool(registry.load("drafter", name).traits.previews)
    except OutpaceError:
        return False
