"""The distribution of whole generations: the real step, several times, on models that are tables.

A case is a request: prompt, sampling settings, drafter, budget, policy, verifier. It is run by
``prefill`` and ``step`` themselves until enough tokens are emitted, once for every way the coins
can fall. Drafter and policy read what was refused and change their behaviour, which is where a
coin that is used twice shows.

States are merged if they agree in tokens, drafter, policy and in what is known of coins that later
steps can meet. A coin named after an earlier pending position cannot be met again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.analysis.enumeration import Coin, EnumeratingCoins, Fate, Interval, fates
from outpace.analysis.growths import Doubt
from outpace.analysis.tables import Context, distance
from outpace.coins import Coins, Stream
from outpace.drafters.base import ExpandingDrafter, Request
from outpace.machine import Machine, Member
from outpace.models.base import Target
from outpace.models.tiny import TableTarget
from outpace.params import SamplingParams
from outpace.policies.base import Evidence, Policy, PolicyRow, within
from outpace.sampling import Warp
from outpace.step import prefill, step
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import CHAIN, parse_shape, widths
from outpace.types import (
    NOTHING,
    Budget,
    Draft,
    Drawn,
    Feed,
    Law,
    Load,
    Outcome,
    Plan,
    Shape,
    StopRule,
    Verdict,
)
from outpace.verifiers.base import Verifier

_PROMPT = (0, 1, 0, 0, 1)
_DRAWN = ("chain", "tree", "block", "k_seq", "traversal")
_ALL = ("match", *_DRAWN, "greedy_plus_one", "spechub", "coupled")
_FAR = 1 << 20
"""A position that no case reaches: coins named after it stay alive."""
_NEUTRAL = SamplingParams(temperature=1.0)


@dataclass
class Mood:
    """What the last draft did to the drafter."""

    refused: int = 0
    """1 + the last drafted token that was not kept; 0: all were."""


class MoodyDrafter(ExpandingDrafter[Mood]):
    """Guesses by another table, or not at all, depending on what was refused."""

    Config: ClassVar[type] = Mood

    def __init__(self, vocab: int, seed: int) -> None:
        self._tables = [TableTarget.random(seed + mood, vocab) for mood in range(vocab + 1)]

    @classmethod
    def load(cls, config: Any, target: Target) -> MoodyDrafter:
        return cls(target.vocab_size, 100)

    def begin(self, request: Request) -> Mood:
        return Mood()

    def expand(self, branches: Sequence[Branch[Mood]]) -> tuple[Tensor, None]:
        rows = []
        for branch in branches:
            for node in branch.nodes:
                path = []
                while node >= 0:
                    path.append(branch.token_N[node])
                    node = branch.parent_N[node]
                table = self._tables[branch.state.refused]
                rows.append(table.law_after([*branch.tokens, *path[::-1]]).log())
        return torch.stack(rows), None

    def propose(self, rows: Sequence[DraftRow[Mood]]) -> list[Draft]:
        return [
            Draft() if row.state.refused == 2 else super(MoodyDrafter, self).propose([row])[0] for row in rows
        ]

    def observe(self, states: Sequence[Mood], outcomes: Sequence[Outcome]) -> None:
        for state, outcome in zip(states, outcomes, strict=True):
            kept = outcome.verdict.kept
            gone = [t for n, t in enumerate(outcome.draft.token_N) if n not in kept]
            state.refused = gone[-1] + 1 if gone else 0


class WaryPolicy(Policy):
    """After a draft that was refused at once it asks for one level, otherwise for all."""

    def begin(self, key: str = "", greedy: bool = True, ruled: bool = False) -> list[int]:
        return [1]

    def plan(self, rows: Sequence[PolicyRow], load: Load) -> list[Plan]:
        plans = []
        for row in rows:
            ((name, budget),) = row.drafters.items()
            if row.state[0] == 0:
                budget = replace(budget, max_depth=1)
            plans.append(Plan(name, within(budget, row.limit)))
        return plans

    def learn(self, rows: Sequence[PolicyRow], evidence: Sequence[Evidence]) -> None:
        for row, seen in zip(rows, evidence, strict=True):
            row.state[0] = min(seen.accepted, 1) if seen.drafted else 1


@dataclass(frozen=True, kw_only=True)
class SequenceCase:
    """A request, and what it runs on."""

    shape: Shape = CHAIN
    params: SamplingParams = _NEUTRAL
    vocab: int = 2
    length: int = 4
    """Tokens to emit."""
    depth: int = 2
    nodes: int = 0
    """Most guesses of a dynamic tree."""
    stop: StopRule | None = None
    seed: int = 0
    drafter: type[MoodyDrafter] = MoodyDrafter
    warp: type[Warp] = Warp
    coins: type[EnumeratingCoins] = EnumeratingCoins

    def error(self, verifier: Verifier) -> float:
        """Largest error of the distribution of the emitted tokens."""
        output = _Teller(self, verifier).output()
        return distance(output, self.expected, self.vocab, self.length)

    @cached_property
    def target(self) -> TableTarget:
        return TableTarget.random(self.seed, self.vocab)

    def expected(self, context: Context) -> Law:
        """Target distribution after the prompt and some emitted tokens, without a tree."""
        warp = Warp(self.params, _PROMPT, frozenset(), self.vocab)
        warp.advance(context)
        return warp.law(self.target.law_after((*_PROMPT, *context)).log())


@dataclass
class _Running:
    """One sequence, as the step sees it."""

    case: SequenceCase
    members: Mapping[str, Member]
    verifier: Verifier
    policy_state: Any
    slot: int
    tokens: list[int]
    warp: Warp
    fate: Fate
    number: int = 0
    failed: bool = False
    read_prompt: Any = None

    @property
    def missing(self) -> int:
        return self.case.length + len(_PROMPT) - len(self.tokens)

    def coins(self, stream: Stream) -> Coins:
        return self.case.coins(self.fate, 0, len(self.tokens) - 1, stream)

    def room(self) -> Budget:
        # One more than an engine grants, so that verdicts are cut too.
        return Budget(1 << 20, self.missing) if self.missing > 0 else NOTHING

    def cut(self, verdict: Verdict) -> Verdict:
        return verdict.cut(self.missing)

    def fail(self, error: Exception) -> None:
        raise error

    def extend(self, outcome: Outcome) -> None:
        self.tokens.extend(outcome.verdict.emitted)
        self.warp.advance(outcome.verdict.emitted)


@dataclass(frozen=True)
class _State:
    emitted: Context
    refused: int
    trust: int
    live: frozenset[tuple[Coin, Interval]]


class _Teller:
    """Run a case in every way the coins can fall."""

    def __init__(self, case: SequenceCase, verifier: Verifier) -> None:
        self.case = case
        target = case.target
        self.machine = Machine(
            target, target.new_cache(), {"moody": case.drafter.load(None, target)}, WaryPolicy(None), chunk=2
        )
        self.verifier = verifier
        size = len(case.shape.parent_N or ()) or max(case.depth, case.nodes)
        self.budget = Budget(size, case.depth, shape=case.shape, stop=case.stop)
        self.slot = self.machine.cache.open()

    def output(self) -> dict[Context, float]:
        done: dict[Context, float] = defaultdict(float)
        open_: dict[_State, float] = {_State((), 0, 1, frozenset()): 1.0}
        while open_:
            state = min(open_, key=lambda s: len(s.emitted))
            weight = open_.pop(state)
            for fate, after in fates(partial(self._on, state), dict(state.live)):
                share = weight * fate.weight
                if len(after.emitted) == self.case.length:
                    done[after.emitted] += share
                else:
                    open_[after] = open_.get(after, 0.0) + share
        return dict(done)

    def _on(self, state: _State, fate: Fate) -> _State:
        """One step from a state, or the prefill."""
        machine, cache = self.machine, self.machine.cache
        mood, trust = Mood(state.refused), [state.trust]
        warp = self.case.warp(self.case.params, _PROMPT, frozenset(), self.case.vocab)
        warp.advance(state.emitted)
        row = _Running(
            self.case,
            {"moody": Member(mood, self.budget, self.verifier)},
            self.verifier,
            trust,
            self.slot,
            [*_PROMPT, *state.emitted],
            warp,
            fate,
        )
        if state.emitted:
            self._feed(row.tokens[:-1])
            step(machine, [row])
        else:
            cache.truncate(self.slot, 0)
            while len(row.tokens) == len(_PROMPT):
                prefill(machine, [row])
        assert cache.ids(self.slot) == row.tokens[:-1]
        pending = len(row.tokens) - 1
        live = frozenset((coin, at) for coin, at in fate.known.items() if coin[3] >= pending)
        return _State(tuple(row.tokens[len(_PROMPT) :]), mood.refused, trust[0], live)

    def _feed(self, tokens: list[int]) -> None:
        """Bring the cache in line with a text."""
        cache = self.machine.cache
        missing = tokens[cache.sync(self.slot, tokens) :]
        if missing:
            self.machine.target.score([Feed.chain(self.slot, missing, want=())], cache)
            cache.keep(self.slot, range(len(missing)))


_SETTINGS = SamplingParams(temperature=0.7, top_k=2, repetition_penalty=1.3, frequency_penalty=0.5)
_NUCLEUS = SamplingParams(temperature=1.3, top_p=0.8, presence_penalty=0.4, logit_bias={1: 0.5})
_TREE, _DYNAMIC = widths((2, 1)), parse_shape("dynamic")
CHAINS = (
    SequenceCase(),
    SequenceCase(depth=3, length=5, seed=1, stop=Doubt()),
    SequenceCase(vocab=3, length=3, params=_SETTINGS, seed=2),
    SequenceCase(vocab=3, length=3, params=_NUCLEUS, seed=3),
    SequenceCase(vocab=3, params=SamplingParams(temperature=0.0, repetition_penalty=1.5), seed=4),
)
"""Requests with drafts of width one."""
TREES = (
    SequenceCase(shape=_TREE),
    SequenceCase(shape=_TREE, vocab=3, length=3, seed=1),
    SequenceCase(shape=_TREE, vocab=3, length=3, params=_SETTINGS, seed=2, stop=Doubt()),
    SequenceCase(shape=_TREE, vocab=3, length=3, params=_NUCLEUS, seed=3),
    SequenceCase(shape=_DYNAMIC, nodes=3, length=3),
    SequenceCase(shape=_DYNAMIC, nodes=2, vocab=3, length=3, seed=1),
)
"""Requests whose drafts branch."""


class RawBonus(Warp):
    """The token after a whole draft is drawn before any setting is applied."""

    def law(self, logits_V: Tensor, path: Sequence[int] = (), id_V: Tensor | None = None) -> Law:
        if len(path) == 2:
            return Law(logits_V.softmax(0))
        return super().law(logits_V, path, id_V)


class Pathless(Warp):
    """Penalties do not see the drafted tokens before a node."""

    def law(self, logits_V: Tensor, path: Sequence[int] = (), id_V: Tensor | None = None) -> Law:
        return super().law(logits_V, (), id_V)


class SameEveryStep(EnumeratingCoins):
    """The keys leave out the position of the pending token."""

    def _named(self, *key: int) -> Coin:
        return (self.seed, int(self.stream), self.level, _FAR, *key)

    def race(self, law: Law, depth: int, count: int = 1) -> list[int]:
        always = EnumeratingCoins(self.fate, self.seed, _FAR, self.stream)
        return always.race(law, depth, count)


class DraftsByPosition(MoodyDrafter):
    """Draft coins are keyed by absolute position: drafted again, a token is the same again."""

    def propose(self, rows: Sequence[DraftRow[Mood]]) -> list[Draft]:
        coupled = super().propose([replace(row, drawn=Drawn.COUPLED) for row in rows])
        return [
            replace(draft, groups=tuple(replace(g, drawn=Drawn.IID) for g in draft.groups))
            for draft in coupled
        ]


PLANTED_CASES: tuple[tuple[str, tuple[str, ...], SequenceCase], ...] = (
    ("bonus token from raw logits", _ALL, SequenceCase(params=_NUCLEUS, warp=RawBonus)),
    ("penalty without the path", _ALL, SequenceCase(params=_SETTINGS, warp=Pathless)),
    ("same coins at every step", _ALL, SequenceCase(coins=SameEveryStep)),
    ("draft coins keyed by position alone", _DRAWN, SequenceCase(drafter=DraftsByPosition)),
)
"""Mistakes that show over several steps or under sampling settings: name, verifiers, case."""
