"""Judge policies: regret against the best choice in hindsight, and replay against reality.

rows = judge(texts, named(["auto", "goodput"]))    every policy in every scenario
found = reality(engine, prompts, texts, "auto")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from outpace import registry
from outpace.analysis.recording import Text
from outpace.analysis.replay import Device, Replay, best_choice, whole
from outpace.analysis.scenarios import Scenario, scenarios
from outpace.engine.engine import Engine
from outpace.params import NEUTRAL, SamplingParams
from outpace.policies.base import Policy
from outpace.types import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Policies in one scenario."""

    scenario: str
    best: str
    """The rule that is best in hindsight."""
    best_rate: float
    """Its tokens per second."""
    plain_rate: float
    """Those of plain decoding."""
    rates: Mapping[str, float]
    """Policy -> tokens per second."""

    def regret(self, policy: str) -> float:
        """Share of the best rate that is missed; below 0 where the policy beats every fixed rule."""
        return 1.0 - self.rates[policy] / self.best_rate

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "scenario": self.scenario,
            "best": self.best,
            "best_tokens_per_second": self.best_rate,
            "plain_tokens_per_second": self.plain_rate,
            "tokens_per_second": dict(self.rates),
            "regret": {policy: self.regret(policy) for policy in self.rates},
        }


def named(specs: Sequence[str]) -> dict[str, Callable[[], Policy]]:
    """Spec -> a fresh policy of it; such as ``goodput[weight=0.1]``."""
    return {spec: partial(registry.make, "policy", spec) for spec in specs}


def told(policy: Policy, text: Text) -> Policy:
    """The policy, which knows of a text's drafters now what an engine would tell it."""
    for name, one in text.drafters.items():
        policy.costs.suppose(name, one.level_D)
        if one.known is not None:
            policy.costs.know({name: one.known})
    return policy


def chosen(texts: Sequence[Text], only: str = "") -> list[Scenario]:
    """The scenarios of recorded texts whose names hold ``only``."""
    return [one for one in scenarios(texts) if only in one.name]


def judge(
    texts: Sequence[Text],
    policies: Mapping[str, Callable[[], Policy]],
    where: Sequence[Scenario] | None = None,
    orders: int = 1,
    tick: Callable[[str, int], None] = lambda part, done: None,
) -> list[Judged]:
    """Replay policies in scenarios.

    Args:
        texts: recorded, of several kinds.
        policies: name -> makes one that knows nothing yet.
        where: scenarios of these texts; all unless given.
        orders: of the requests that come before and at once; rates are their mean. One order is noisy:
            what a policy tries first decides what it learns.
        tick: told of every scenario.

    Cost: seconds per scenario, most of them for the fixed rules.
    """
    found = []
    others = [{one.name: one for one in scenarios(texts, order)} for order in range(1, orders)]
    for first in chosen(texts) if where is None else where:
        tick(first.name, 0)
        rule, best, plain = best_choice(first.device, first.walks, first.batch, first.until)
        rates = {}
        for name, fresh in policies.items():
            each = []
            for order, one in enumerate([first, *(some.get(first.name, first) for some in others)]):
                runs = Replay(told(fresh(), texts[0]), one.device, 1 + order)
                if one.before:
                    runs.run(one.before, lambda moment: 1)
                each.append(runs.run(one.walks, one.batch, one.until).rate)
            rates[name] = mean(each)
        found.append(
            Judged(scenario=first.name, best=str(rule), best_rate=best, plain_rate=plain, rates=rates)
        )
        tick(first.name, 1)
    return found


def reality(
    engine: Engine, asked: Sequence[tuple[int, ...]], texts: Sequence[Text], spec: str
) -> dict[str, float]:
    """Answer the recorded prompts with a policy, and predict the same by replay.

    Costs are those of other runs of the same prompts, in turns: plain ones, and each drafter by itself.

    Args:
        engine: of the target.
        asked: prompts of the texts, which were recorded greedily.
        texts: recorded.
        spec: of the policy.

    Returns:
        Tokens per second: ``predicted`` and ``measured``.
    """
    names = list(texts[0].drafters)
    method = f"auto[drafters={'+'.join(names)} policy={spec}]"
    steps: dict[str, list[StepRecord]] = {name: [] for name in ("none", *names, method)}
    for ids, text in zip(asked, texts, strict=True):
        params = SamplingParams(**NEUTRAL, max_new_tokens=text.positions + 1, ignore_eos=True)
        for name, own in steps.items():

            def listen(record: StepRecord, own: list[StepRecord] = own) -> None:
                if not record.prompt:
                    own.append(record)

            with engine.listening(listen):
                engine.generate(list(ids), params, drafter=name)
    spent = steps.pop(method)
    tokens = sum(len(step.rows[0].emitted) for step in spent)
    predicted = Replay(told(named([spec])[spec](), texts[0]), measured(steps, spent)).run(
        [whole(text) for text in texts], lambda moment: 1
    )
    return {
        "predicted": predicted.rate,
        "measured": tokens / sum(sum(step.seconds.values()) for step in spent),
    }


def measured(steps: Mapping[str, Sequence[StepRecord]], policy: Sequence[StepRecord]) -> Device:
    """A device that costs what steps took.

    Args:
        steps: drafter -> steps of one sequence, by which passes and drafts are priced.
        policy: steps of the policy, by which planning is.
    """
    plain = steps["none"]
    by_rows: dict[int, list[float]] = {}
    for one in (step for some in steps.values() for step in some):
        by_rows.setdefault(one.passed_rows, []).append(1e3 * one.seconds["score"])
    rows = sorted(by_rows)
    levels: dict[str, tuple[float, float]] = {}
    for name, some in steps.items():
        drafted = [step for step in some if step.draft_levels]
        if drafted:
            kind = Device.kind(name)
            level = mean(1e3 * step.seconds["draft"] / step.draft_levels for step in drafted)
            levels[kind] = (level, 0.0)
    return Device(
        name="measured",
        rows_R=tuple(rows) if len(rows) > 1 else (*rows, rows[0] + 1),
        pass_R=tuple(mean(by_rows[n]) for n in rows) * (1 if len(rows) > 1 else 2),
        levels=levels,
        look=mean(1e3 * step.seconds["plan"] for step in policy),
        step=mean(1e3 * (step.seconds["judge"] + step.seconds["commit"]) for step in plain),
    )
