"""A machine without models: acceptance by known chances, seconds by known prices.

A policy plans, coins fall, the policy learns and its costs watch, as in a real step. What a step is
worth is counted as its expected tokens, so that regret has little noise; only what the policy
learns from is drawn.
"""

import random
from dataclasses import dataclass, field

from outpace.coins import KeyedCoins, Stream
from outpace.policies.base import Evidence, PolicyRow
from outpace.tree.shapes import budget
from outpace.types import Budget, CostCurve, Load, RowRecord, StepRecord

ROOMY = Budget(max_nodes=1 << 20, max_depth=1 << 20)
PASS = 0.015
CURVE = CostCurve(
    model="simulated",
    dtype="float32",
    threads=1,
    device="none",
    rows_R=(1, 4, 8, 16, 32, 64, 128, 256),
    context_C=(64,),
    seconds_CR=(tuple(PASS * (1 + 0.05 * max(0, r - 4)) for r in (1, 4, 8, 16, 32, 64, 128, 256)),),
)


@dataclass
class Fake:
    """A drafter: chance that a level is kept, given the ones before; in each part of the text."""

    parts: list
    """Chance per part, or a function (random, part) -> the chances of this step's draft: a lookup,
    which tells them as a preview."""
    level: float = 0.0
    """Seconds per level."""
    budget: Budget = field(default_factory=lambda: Budget(max_nodes=16, max_depth=16))

    def chances(self, coins, part):
        """Of the levels of one draft; and whether they are told beforehand."""
        chance = self.parts[min(part, len(self.parts) - 1)]
        if callable(chance):
            return chance(coins), True
        return [chance] * self.budget.max_depth, False

    def says(self, chances):
        """What a lookup tells of its draft: the truth."""
        return chances

    def made(self, chances, asked):
        """The draft that is made of them within a budget: chances of its levels, and its nodes."""
        levels = chances[: min(asked.max_depth, asked.max_nodes)]
        return levels, len(levels)


@dataclass
class Bush(Fake):
    """A drafter whose drafts are trees: more nodes are kept more often, and cost rows."""

    budget: Budget = field(default_factory=lambda: budget("dynamic", 8, 0))

    def made(self, chances, asked):
        """Siblings catch a part of what the first guess misses; unlikely ones are left out."""
        nodes = asked.max_nodes
        levels = [1 - (1 - c) ** nodes**0.25 for c in chances[: min(asked.max_depth, nodes)]]
        return levels, min(nodes, round(len(levels) * (1 + nodes) / 3))


@dataclass
class Taken:
    """One sequence's part in one simulated step."""

    drafter: str
    depth: int
    expected: float
    """Tokens."""
    emitted: int
    seconds: float
    """Of the whole step."""
    plan: object


class Simulator:
    """Sequences that a policy drafts for."""

    def __init__(self, policy, drafters, seed=0, curve=CURVE, know=True, trouble=0.0):
        """``trouble``: seconds for each sequence whose drafts are weighed."""
        self.policy, self.drafters, self.curve = policy, drafters, curve
        self.trouble = trouble
        self.random = random.Random(seed)
        self.states, self.last, self.steps, self.kept = {}, {}, 0, 0
        if know:
            policy.costs.start(curve)
            for name, fake in drafters.items():
                policy.costs.suppose(name, (fake.level / PASS,))

    def step(self, batch=1, part=0, context=64, censor=False):
        """One step of the first ``batch`` sequences. Returns what each took."""
        drawn = {
            (i, name): fake.chances(self.random, part)
            for i in range(batch)
            for name, fake in self.drafters.items()
        }
        rows = [
            PolicyRow(
                self.states.setdefault(i, self.policy.begin()),
                {name: fake.budget for name, fake in self.drafters.items()},
                ROOMY,
                KeyedCoins(i, self.steps, Stream.POLICY),
                {
                    n: reach(self.drafters[n].says(c))
                    for (j, n), (c, told) in drawn.items()
                    if j == i and told
                },
            )
            for i in range(batch)
        ]
        plans = self.policy.plan(rows, Load(batch, context))
        evidence, records, levels = [], [], {}
        expected_B, total = [], batch
        for i, plan in enumerate(plans):
            chances = [] if plan.drafter == "none" else drawn[i, plan.drafter][0]
            nodes = 0
            if chances:
                chances, nodes = self.drafters[plan.drafter].made(chances, plan.budget)
            kept = 0
            while kept < len(chances) and self.random.random() < chances[kept]:
                kept += 1
            total += nodes
            self.kept += kept
            levels[plan.drafter] = max(levels.get(plan.drafter, 0), len(chances))
            expected_B.append(1 + sum(reach(chances)))
            evidence.append(Evidence(plan.drafter, nodes, len(chances), kept, censor))
            records.append(
                RowRecord(i, plan.drafter, nodes, kept, (0,) * (kept + 1), len(chances), censor, plan.choice)
            )
        score = self.curve.seconds(total / batch, context, batch)
        draft = sum(self.drafters[n].level * d for n, d in levels.items() if n != "none")
        paid = sum(d for n, d in levels.items() if n != "none" and self.drafters[n].level)
        trouble = self.trouble * sum(not plan.choice or plan.choice.reason != "pause" for plan in plans)
        self.policy.learn(rows, evidence)
        self.policy.costs.watch(
            StepRecord(
                self.steps,
                tuple(records),
                {"plan": trouble, "draft": draft, "score": score, "judge": 1e-6 * batch},
                total,
                draft_levels=paid,
                context=context,
            )
        )
        self.steps += 1
        seconds = score + draft + trouble
        return [
            Taken(plan.drafter, seen.depth, expected, seen.accepted + 1, seconds, plan)
            for plan, seen, expected in zip(plans, evidence, expected_B, strict=True)
        ]

    def run(self, steps, **more):
        """That many steps of one sequence."""
        return [self.step(**more)[0] for _ in range(steps)]


def reach(chances):
    """Chance that each level is reached and kept."""
    out, whole = [], 1.0
    for chance in chances:
        whole *= chance
        out.append(whole)
    return out


def rate(steps):
    """Expected tokens per second."""
    return sum(s.expected for s in steps) / sum(s.seconds for s in steps)


def best_bush(fake, curve=CURVE, batch=1, context=64):
    """Tokens per second of the best tree, nothing included."""
    rates = [batch / curve.seconds(1, context, batch)]
    for nodes in range(1, fake.budget.max_nodes + 1):
        for depth in range(1, nodes + 1):
            levels, drafted = fake.made([fake.parts[0]] * 8, Budget(nodes, depth))
            seconds = curve.seconds(1 + drafted, context, batch) + fake.level * depth
            rates.append(batch * (1 + sum(reach(levels))) / seconds)
    return max(rates)


def best_fixed(chance, level, deepest=16, curve=CURVE, batch=1, context=64):
    """Tokens per second of the best depth, nothing included, for a constant acceptance."""
    rates = []
    for depth in range(deepest + 1):
        tokens = 1 + sum(reach([chance] * depth))
        seconds = curve.seconds(1 + depth, context, batch) + level * depth
        rates.append(batch * tokens / seconds)
    return max(rates), rates.index(max(rates))
