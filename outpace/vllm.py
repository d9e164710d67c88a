"""Lookups inside vLLM: they guess, vLLM checks.

    vllm serve MODEL --speculative-config \
        '{"method": "custom_class", "model": "outpace.vllm.Auto", "num_speculative_tokens": 16}'

vLLM calls ``propose`` after every pass, with a matrix of tokens whose rows carry no names. Rows move as
requests come, finish and are preempted. So a request is known by its text: what a row held before the pass
is the key of its state. Requests of equal text may trade their states, which then hold the same.

vLLM judges the guesses, and the output keeps its distribution whatever is guessed. This module imports
nothing of vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import torch

from outpace import registry
from outpace.coins import KeyedCoins, Stream
from outpace.config import MethodSpec
from outpace.drafters.base import Request
from outpace.engine.method import Method, SingleMethod
from outpace.errors import ModelError, SpecError
from outpace.models.base import Target
from outpace.params import SamplingParams
from outpace.policies.base import Evidence, PolicyRow
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.types import Budget, Draft, Drawn, Load, Outcome, RowRecord, Scored, StepRecord, Verdict

PATIENCE = 8
"""Calls after which a request that has left the batch counts as finished."""
_NO_ROWS = Scored(torch.empty(0, 0), (0,))


class Vocabulary(Target):
    """What lookups may ask about the model that vLLM runs.

    Args:
        config: vLLM's ``ModelConfig``.
    """

    can = frozenset()
    hidden_size = num_layers = 0
    digest = ""
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, config: Any) -> None:
        self.name = str(config.model)
        self.vocab_size, self.max_positions = int(config.get_vocab_size()), int(config.max_model_len)
        self._place = str(config.tokenizer)

    @cached_property
    def tokenizer(self) -> Any:  # type: ignore[override]
        """Read when a drafter asks for it."""
        from outpace.models.hf.config import read_tokenizer

        return read_tokenizer(self._place)

    def new_cache(self, capacity: int = 0) -> NoReturn:
        raise ModelError(f"vLLM runs {self.name}, so no drafter can; take one that reads text alone")

    def score(self, *args: Any, **options: Any) -> NoReturn:
        self.new_cache()


@dataclass(slots=True, eq=False)
class _Text:
    """A request."""

    tokens: list[int]
    states: dict[str, Any]
    """By drafter."""
    policy: Any
    view: PolicyRow | None = None
    """What the policy saw in the last call."""
    made: dict[str, Draft] = field(default_factory=dict)
    """Drafter -> what it proposed before the policy planned."""
    drafter: str = "none"
    draft: Draft = field(default_factory=Draft)
    away: int = 0
    """Calls since it was in the batch."""


class Proposer:
    """A drafter for vLLM's method ``custom_class``; a class of one's own names its ``drafter``.

    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        SpecError: a drafter that reads more than text.
        ModelError: a file that the drafter names cannot be read.
    """

    drafter: ClassVar[str]
    """Method spec."""

    def __init__(self, vllm_config: Any) -> None:
        self._target = Vocabulary(vllm_config.model_config)
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        spec = MethodSpec.parse(self.drafter)
        cls = registry.load("drafter", spec.name)
        made: Method = (cls if issubclass(cls, Method) else SingleMethod)(spec, self._target)
        self._members = made.members
        for name, member in self._members.items():
            if not member.drafter.traits.previews or member.drafter.traits.for_rules:
                raise SpecError(f"{name} reads more than text, and vLLM shows no more; take a lookup")
        self._policy, self._watchers = made.policy, made.watchers
        self._warp = Warp(SamplingParams(temperature=0.0), (), frozenset(), self._target.vocab_size)
        self._texts: dict[bytes, list[_Text]] = {}
        """Tokens -> the requests that have said just these."""
        self._left, self._spent = time.perf_counter(), 0.0

    def load_model(self, *args: Any, **options: Any) -> None:
        """Do nothing: drafters are loaded by then."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Guess for every row of the batch.

        Args:
            sampled_token_ids: new tokens of every row; none while its prompt is read.
            num_tokens_no_spec: tokens of every row, the new ones included.
            token_ids_cpu: int32 tokens [rows, longest].

        Returns:
            A chain of guesses per row; empty where none pays.
        """
        passed = time.perf_counter() - self._left
        start = time.perf_counter()
        rows = {
            i: token_ids_cpu[i, : int(num_tokens_no_spec[i])]
            for i, new in enumerate(sampled_token_ids)
            if len(new)
        }
        known = self._match(rows, sampled_token_ids)
        outcomes = {i: _outcome(text, rows[i]) for i, text in known.items()}
        self._observe(known, outcomes)
        self._learn(known, outcomes)
        if 0 < len(known) == len(sampled_token_ids) and not any(one.forced for one in outcomes.values()):
            self._watch(known, outcomes, passed)
        texts = known | {
            i: self._begin(row, sampled_token_ids[i]) for i, row in rows.items() if i not in known
        }
        if texts:  # none while prompts are read in pieces
            self._draft(list(texts.values()))
        self._keep([(row.tobytes(), texts[i]) for i, row in rows.items()])
        self._left = time.perf_counter()
        self._spent = self._left - start
        return [list(texts[i].draft.token_N) if i in texts else [] for i in range(len(sampled_token_ids))]

    def _match(self, rows: Mapping[int, Any], sampled: Sequence[Sequence[int]]) -> dict[int, _Text]:
        """The request of every row that was here before."""
        found: dict[int, _Text] = {}
        for i, row in rows.items():
            text = self._take(row[: len(row) - len(sampled[i])].tobytes())
            if text is not None:
                found[i] = text
        for i, row in rows.items():  # steps of which nobody told, or the next turn of a conversation
            if i not in found and self._texts:
                said = row.tobytes()
                begun = [key for key in self._texts if said.startswith(key)]
                text = self._take(max(begun, key=len)) if begun else None
                if text is not None:
                    text.view, text.draft = None, Draft()
                    found[i] = text
        return found

    def _take(self, key: bytes) -> _Text | None:
        same = self._texts.get(key)
        if same is None:
            return None
        text = same.pop()
        if not same:
            del self._texts[key]
        return text

    def _begin(self, row: Any, new: Sequence[int]) -> _Text:
        tokens = row.tolist()
        prompt = tuple(tokens[: len(tokens) - len(new)])
        asked = Request(prompt=prompt, num_cached=len(prompt))
        states = {name: member.drafter.begin(asked) for name, member in self._members.items()}
        text = _Text(list(prompt), states, self._policy.begin())
        self._observe({0: text}, {0: _outcome(text, row)})
        return text

    def _observe(self, texts: Mapping[int, _Text], outcomes: Mapping[int, Outcome]) -> None:
        for name, member in self._members.items():
            member.drafter.observe([text.states[name] for text in texts.values()], [*outcomes.values()])

    def _learn(self, texts: Mapping[int, _Text], outcomes: Mapping[int, Outcome]) -> None:
        """Tell the policy what became of its plans."""
        seen = {i: view for i, text in texts.items() if (view := text.view) is not None}
        told = [
            Evidence(one.drafter, len(one.draft), len(one.draft), len(one.verdict.kept), one.verdict.censored)
            for one in (outcomes[i] for i in seen)
        ]
        self._policy.learn([*seen.values()], told)

    def _watch(self, texts: Mapping[int, _Text], outcomes: Mapping[int, Outcome], passed: float) -> None:
        """Tell what prices passes how long vLLM took for one, from call to call."""
        rows = []
        for i, one in outcomes.items():
            size, kept, verdict = len(one.draft), len(one.verdict.kept), one.verdict
            rows.append(RowRecord(i, one.drafter, size, kept, verdict.emitted, size, verdict.censored))
        record = StepRecord(
            0,
            tuple(rows),
            {"score": passed, "draft": self._spent},
            sum(1 + row.drafted for row in rows),
            context=max((len(text.tokens) for text in texts.values()), default=0),
        )
        for watch in self._watchers:
            watch(record)

    def _draft(self, texts: Sequence[_Text]) -> None:
        """Let the policy pick a drafter for every request, and ask it."""
        load = Load(len(texts), max((len(text.tokens) for text in texts), default=0))
        for text in texts:
            room = max(0, min(self._most, self._target.max_positions - len(text.tokens)))
            limit, wanted = Budget(room, room), self._policy.wants_previews(text.policy, load)
            text.made = {
                name: member.drafter.propose([self._row(text, name, limit)])[0]
                for name, member in self._members.items()
                if wanted
            }
            told = {
                name: self._members[name].drafter.promise(text.states[name], one)
                for name, one in text.made.items()
            }
            budgets = dict.fromkeys(self._members, Budget(self._most, self._most))
            text.view = PolicyRow(text.policy, budgets, limit, self._coins(text, Stream.POLICY), told)
        plans = self._policy.plan([text.view for text in texts if text.view is not None], load)
        for text, plan in zip(texts, plans, strict=True):
            text.drafter, text.draft = plan.drafter, Draft()
            if plan.budget.max_nodes > 0:
                drafter, made = self._members[plan.drafter].drafter, text.made.get(plan.drafter)
                asked = self._row(text, plan.drafter, plan.budget)
                cut = None if made is None else drafter.cut(asked.state, made, plan.budget)
                text.draft = drafter.propose([asked])[0] if cut is None else cut

    def _row(self, text: _Text, name: str, budget: Budget) -> DraftRow[Any]:
        coins = self._coins(text, Stream.DRAFT)
        return DraftRow(text.states[name], text.tokens, budget, coins, self._warp, Drawn.CHOSEN, chain=True)

    def _coins(self, text: _Text, stream: Stream) -> KeyedCoins:
        return KeyedCoins(0, len(text.tokens) - 1, stream)

    def _keep(self, present: Sequence[tuple[bytes, _Text]]) -> None:
        """Put requests back by what they have said now, and end those that stay away."""
        kept: dict[bytes, list[_Text]] = {}
        for key, text in [(key, text) for key, same in self._texts.items() for text in same]:
            text.away += 1
            if text.away <= PATIENCE:
                kept.setdefault(key, []).append(text)
                continue
            for name, member in self._members.items():
                member.drafter.end(text.states[name])
        for key, text in present:
            text.away = 0
            kept.setdefault(key, []).append(text)
        self._texts = kept


class Suffix(Proposer):
    """Follows what came most often after the longest match."""

    drafter = "suffix"


class Auto(Proposer):
    """Picks the lookup that pays best for a request, or none, by how long vLLM's passes take."""

    drafter = "auto[drafters=suffix+prompt_lookup+reference+max_gram]"


def _outcome(text: _Text, row: Any) -> Outcome:
    """What a row holds beyond the text of its request, which takes it in."""
    new = tuple(row[len(text.tokens) :].tolist())
    start = len(text.tokens)
    text.tokens.extend(new)
    kept = text.draft.path_of(new)
    verdict = Verdict(kept, new, censored=len(kept) == len(new))
    forced = text.view is None
    return Outcome(text.draft, _NO_ROWS, verdict, (), (), start, forced, "none" if forced else text.drafter)
