"""What a trained drafter is worth, beside what its training graph says of the same texts.

Held-out: the training graph reads greedy answers of the target, and guesses at every token of them. In use:
the drafter itself drafts a chain at every token of the same answers, leaves out no guess, and nothing of it
is kept, so that both count the same guesses. Then the drafter answers the prompts for good, as a chain and as
it comes, in turns with plain decoding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outpace.bench import report as reports
from outpace.bench.ours import Ours
from outpace.bench.provenance import here
from outpace.bench.records import Case, Settings
from outpace.bench.runner import Runner
from outpace.cli.train import drafter_spec
from outpace.coins import Coins
from outpace.config import MethodSpec
from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.registry import load
from outpace.train.batches import Batch, padded
from outpace.train.capture import compute
from outpace.train.objective import DEPTHS
from outpace.train.pipeline import Pipeline
from outpace.train.starts import begin_from
from outpace.types import ROOT, Draft, Drawn, Verdict
from outpace.verifiers.base import TargetLaws, Verifier

TRIES = 5
"""Of a measurement of which nothing is left, since other programs disturbed all of it."""


class Onlooker(Verifier):
    """Keeps nothing, so the text is the plain one; notes the chains that were drafted."""

    name = "onlooker"
    takes = frozenset(Drawn)
    draws = Drawn.CHOSEN

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def judge(self, draft: Draft, laws: TargetLaws, coins: Coins, *, want_laws: bool = False) -> Verdict:
        """Note the chain and go on with the target's own token."""
        node, chain = ROOT, list[int]()
        while node in draft.parent_N:
            node = draft.parent_N.index(node)
            chain.append(draft.token_N[node])
        self.seen.append(tuple(chain))
        p = laws.law(ROOT)
        return Verdict((), (coins.choose(p, ROOT, -1),), (p,) if want_laws else None)


def measured(pipeline: Pipeline, limit: int, new: int) -> dict[str, Any]:
    """All figures of a drafter in ``pipeline.out``.

    Args:
        limit: held-out prompts.
        new: tokens of an answer.
    """
    engine = pipeline.engine
    prompts = [
        ids for ids in pipeline.held_out_prompts(limit) if len(ids) + new <= engine.target.max_positions
    ]
    with tempfile.TemporaryDirectory() as place:
        link = Path(place) / "drafter"
        link.symlink_to(pipeline.out.resolve(), target_is_directory=True)
        options = pipeline.options
        spec = options.objective.spec(options.own, link) or drafter_spec(options.method, link, False)
        chain = f"{spec[:-1]} tree=chain tree_size={DEPTHS}]"
        drafter = load("drafter", MethodSpec.parse(chain).name)
        every = f"{chain[:-1]} prune=0]" if "prune" in drafter.Config.__dataclass_fields__ else chain
        told = watched(pipeline, every, prompts, new)
        cases = [Case(id=str(number), group="all", ids=ids) for number, ids in enumerate(prompts)]
        report = timed(pipeline, ("none", chain, spec), cases, Settings(max_new_tokens=new))
        plain, *rows = report["rows"]
        names = [str(engine.method(one).spec) for one in (chain, spec)]
        by_name = {row["method"]: row for row in rows}
        return {
            **told,
            "prompts": len(prompts),
            "max_new_tokens": new,
            "chain": figures(by_name[names[0]], plain),
            "default": figures(by_name[names[1]], plain),
            "noise": report["noise_floor"]["largest_deviation"],
            "machine": here("")["cpu"],
        }


def timed(
    pipeline: Pipeline, specs: Sequence[str], cases: Sequence[Case], settings: Settings
) -> dict[str, Any]:
    """A report of drafters in turns.

    Raises:
        OutpaceError: the machine did something else whenever it was tried.
    """
    engine = pipeline.engine
    for _ in range(TRIES):
        runner = Runner([Ours(engine, engine.method(one)) for one in specs], {})
        report = reports.build(runner.run(cases, [settings]), here(""))
        if all(row["passes"] for row in report["rows"]):
            return report
    raise OutpaceError(f"{specs[-1]} was disturbed {TRIES} times; run it again")


def figures(row: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """One way to draft: what it gave, and what it took, in plain passes."""
    shares, passes = row["verb_shares"], row["passes"]
    seconds = row["mean_emitted"] * passes / row["decode_tokens_per_second"]
    of_pass = seconds / passes * plain["decode_tokens_per_second"]
    drafting = of_pass * (shares["draft_host"] + shares["draft_pass"])
    levels = row["draft_levels"] / passes
    return {
        "emitted": row["mean_emitted"],
        "acceptance_by_depth": row["acceptance_by_depth"],
        "speedup": row["speedup"],
        "speedup_interval": row["speedup_interval"],
        "equal_to_none": row["equal_to_none"],
        "passes": row["passes"],
        "drafting": drafting,
        "levels": levels,
        "level": drafting / levels if levels else None,
        "pass": of_pass * (shares["score_host"] + shares["score_pass"]),
    }


def watched(pipeline: Pipeline, chain: str, prompts: Sequence[Sequence[int]], new: int) -> dict[str, Any]:
    """Conditional acceptance by depth of both graphs, at every token of the same greedy answers."""
    engine, onlooker = pipeline.engine, Onlooker()
    method = engine.method(chain)
    usual, method.verifier = method.verifier, onlooker
    params = SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True, seed=0)
    texts, counted, kept = [], [0] * DEPTHS, [0] * DEPTHS
    try:
        for prompt in prompts:
            onlooker.seen.clear()
            answer = engine.generate(list(prompt), params, drafter=chain, reproducible=False).tokens
            texts.append((tuple(prompt), tuple(answer)))
            # The prompt's own pass comes first: it has no draft, and gives the first token.
            for at, guesses in enumerate(onlooker.seen):
                for depth, (guess, truth) in enumerate(zip(guesses, answer[at:], strict=False)):
                    counted[depth] += 1
                    if guess != truth:
                        break
                    kept[depth] += 1
    finally:
        method.verifier = usual
    wanted, given = held_out(pipeline, texts)
    return {
        "in_use": _rates(kept, counted),
        "in_use_counted": counted,
        "held_out": _rates(wanted, given),
        "held_out_counted": given,
    }


@torch.no_grad()
def held_out(
    pipeline: Pipeline, texts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[list[int], list[int]]:
    """Guesses of the training graph that were right, and all whose forerunners were."""
    options, target = pipeline.options, pipeline.target
    objective = options.objective.build(options.own, target, pipeline.vocab)
    begin_from(objective, pipeline.out)
    objective.module.eval()
    right, counted = torch.zeros(DEPTHS), torch.zeros(DEPTHS)
    for prompt, answer in texts:
        ids = [*prompt, *answer]
        found = list(compute(target, [ids], pipeline.taps)) if pipeline.taps else [{}]
        batch = Batch(
            token_BT=torch.tensor([ids]),
            length_B=torch.tensor([len(ids)]),
            answer_BT=torch.arange(len(ids))[None] >= len(prompt),
            feature=padded(found, pipeline.taps, len(ids)),
        )
        step = objective.evaluate(batch)
        depths = min(DEPTHS, len(step.counted_by_depth))
        right[:depths] += step.accepted_by_depth[:depths]
        counted[:depths] += step.counted_by_depth[:depths]
    return [int(one) for one in right], [int(one) for one in counted]


def _rates(kept: Sequence[int], counted: Sequence[int]) -> list[float]:
    return [k / n for k, n in zip(kept, counted, strict=True) if n]
