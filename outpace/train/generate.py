"""Answers of the target itself to many prompts, stored as they come.

A drafter is trained on what the target says, for that is what it will have to guess (on-policy
data, arXiv:2310.08461). Part of the answers is greedy and part sampled, as in use.

Every answer has a number, and the number alone says prompt, temperature and coins. So work that
was stopped, even killed, goes on where its store ends, and makes the same answers. On a GPU an
answer depends on those beside it, so there it makes others. A store can hold several works: other
prompts, or other settings, later.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outpace.engine.engine import Engine
from outpace.errors import RequestError, shown
from outpace.models.base import Target
from outpace.models.graphs import CudaRecorder
from outpace.models.prompts import encode_within
from outpace.params import NEUTRAL, SamplingParams
from outpace.train.corpus import CorpusPrompt, digest_of
from outpace.train.crowd import Wanted, answer_each
from outpace.train.fixed_batches import answer_all
from outpace.train.progress import Reporter, Say, Tick
from outpace.train.speed import LIKELY, decode_seconds, row_seconds, typical_prompt
from outpace.train.text_net import TextNet
from outpace.train.tokens import TokenSequence, TokenStore
from outpace.types import StepRecord

MOST = 10**12
"""No count is larger."""
PLAN = 1 << 40
"""Numbers of the second work in a store begin here, those of the third at twice that."""
LOOP_TOKENS, LOOP_PERIOD = 64, 32
"""An answer loops if its last so many tokens repeat a period of at most so many."""
_LOOK_EVERY = 16  # tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    tokens: int = 1_000_000
    """Answer tokens wanted. No more answers are begun than it takes, by the mean length so far."""
    greedy: float = 0.5
    """Share of greedy answers, in [0, 1]; a prompt gets one at most, so less in long work."""
    coolest: float = 0.7
    """Lowest temperature of sampled answers."""
    hottest: float = 1.0
    """Highest; each answer draws its own between the two."""
    max_new_tokens: int = 300
    """Longest answer."""
    max_prompt: int = 3072
    """Longer prompts are left out, tokens."""
    answers: int = 4
    """Answers to a prompt one after another: it is read once for all of them."""
    batch: int = 64
    """Answers under way at a time; on a GPU those that have, with their prompts, up to 512 tokens."""
    seed: int = 0
    """Of everything drawn."""
    shard_tokens: int = 60_000
    """A shard is written after so many tokens ..."""
    shard_seconds: float = 120.0
    """... or so many seconds: what a killed process loses at most."""

    def __post_init__(self) -> None:
        for name in ("tokens", "max_new_tokens", "max_prompt", "answers", "batch", "shard_tokens"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ValueError(f"{name} must be in [1, {MOST}], got {shown(getattr(self, name))}")
        if not self.shard_seconds >= 0:
            raise ValueError(f"shard_seconds must be at least 0, got {self.shard_seconds}")
        if not 0 <= self.greedy <= 1:
            raise ValueError(f"greedy must be in [0, 1], got {self.greedy}")
        if not 0 < self.coolest <= self.hottest:
            raise ValueError(f"need 0 < coolest <= hottest, got {self.coolest} and {self.hottest}")

    def to_json(self) -> dict[str, Any]:
        """What decides about the answers, for the manifest."""
        return {
            name: getattr(self, name)
            for name in ("answers", "greedy", "coolest", "hottest", "max_new_tokens", "max_prompt", "seed")
        }


def check_chat(target: Target) -> None:
    """Raise RequestError if the target has no chat template, in which prompts are asked."""
    if target.tokenizer is not None and target.tokenizer.chat_template is None:
        raise RequestError(
            f"{target.name} has no chat template, in which prompts are asked; "
            "put one into its folder as chat_template.jinja"
        )


@dataclass(frozen=True, slots=True)
class Ask:
    number: int
    prompt: int
    """Index of the prompt."""
    temperature: float
    seed: int


def ask_of(number: int, prompts: int, config: GenerateConfig) -> Ask:
    """What a number stands for: prompts go round, a few answers each, and each answer has other coins.

    Of a prompt's first ``1 / greedy`` answers one is greedy, and none of the later ones.
    """
    group, turn = divmod(number, config.answers)
    turn += group // prompts * config.answers
    prompt = group % prompts
    of_prompt = _uniform(config.seed, "greedy", prompt)
    if turn * config.greedy <= of_prompt < (turn + 1) * config.greedy:
        return Ask(number, prompt, 0.0, 0)
    heat = _uniform(config.seed, "heat", number)
    temperature = config.coolest + heat * (config.hottest - config.coolest)
    return Ask(number, prompt, round(temperature, 3), int(_uniform(config.seed, "coins", number) * 2**48))


def loops(tokens: Sequence[int]) -> bool:
    """Whether an answer has begun to repeat itself; looked at every few tokens, for that takes time."""
    return len(tokens) % _LOOK_EVERY == 0 and without_loop(tokens) < len(tokens)


def without_loop(tokens: Sequence[int]) -> int:
    """How many tokens of an answer to keep: all, or up to where it only repeats itself.

    The last LOOP_TOKENS tokens may repeat a period of at most LOOP_PERIOD. Then what is kept ends
    with the first round of the shortest such period.
    """
    if len(tokens) < LOOP_TOKENS:
        return len(tokens)
    for period in range(1, LOOP_PERIOD + 1):
        same = 0
        for i in range(len(tokens) - 1, period - 1, -1):
            if tokens[i] != tokens[i - period]:
                break
            same += 1
        if same + period >= LOOP_TOKENS:
            return len(tokens) - same
    return len(tokens)


def generate_answers(
    engine: Engine,
    prompts: Sequence[CorpusPrompt],
    folder: Path,
    config: GenerateConfig,
    *,
    about: Mapping[str, Any] | None = None,
    say: Say = print,
) -> TokenStore:
    """Answer prompts until the store holds the tokens that are wanted.

    Args:
        engine: of the target; its drafter is not used.
        prompts: in the order in which they are taken; again and again with other coins.
        folder: of the store. One that holds a part of the same work is gone on with. To one that
            holds answers to other prompts, or by other settings, these are added.
        about: more to tell of this work in the manifest: command, sources.

    Returns:
        The store, with at least ``config.tokens`` answer tokens in all.

    Raises:
        RequestError: no prompts, or none short enough.
        ModelError: the folder holds answers of another target.

    Effects: writes a shard every few minutes. A process that is killed loses only what came after
    the last one.
    """
    if not prompts:
        raise RequestError("there are no prompts; give files with --prompts or --texts")
    target = engine.target
    plan = {**config.to_json(), "prompts": len(prompts), "prompts_digest": digest_of(prompts)}
    store = TokenStore.create(
        folder, target=target.name, digest=target.digest, vocab_size=target.vocab_size, about={}
    )
    plans = store.manifest["about"].get("plans", [])
    which = next((i for i, one in enumerate(plans) if one["plan"] == plan), len(plans))
    if which == len(plans):
        if plans and store.answer_tokens >= config.tokens:
            say(
                f"{folder} holds {store.answer_tokens} answer tokens by other prompts or settings; to add to "
                "them give more --tokens, to begin anew another --work"
            )
            return store
        store.note(plans=[*plans, {**(about or {}), "plan": plan}])
    work = _Work(engine, prompts, store, config, say, which * PLAN)
    try:
        with engine.listening(work.count):
            work.run()
    finally:
        work.flush()
    return store


class _Work:
    """Answers on their way into a store."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[CorpusPrompt],
        store: TokenStore,
        config: GenerateConfig,
        say: Say,
        first: int,
    ) -> None:
        self.engine, self.prompts, self.store, self.config = engine, prompts, store, config
        self.first = first  # of this work's numbers
        self.say: Callable[[Tick], Any] = say
        self.kept = store.answer_tokens
        self.emitted = self.finished = 0  # tokens of this process: made, and made in done answers
        self.waiting: list[TokenSequence] = []
        self.unwritten = 0  # tokens of these
        self.cut = {"looped_answers": 0, "loop_tokens_cut": 0}
        self.asked: list[tuple[Ask, tuple[int, ...]]] = []  # in the order of their beginning
        self.answers, self.number, self.skipped = len(store), 0, 0
        self.done = set(store.number_S.tolist())
        self.flushed = time.perf_counter()
        self.net = TextNet.on_gpu(engine.target)
        self.reporter = Reporter("generating", "tokens", say, self.kept)

    def run(self) -> None:
        if self.kept < self.config.tokens and self.net is None:
            self.say(Tick("generating", self.kept, self.config.tokens, "tokens", self._likely_rate()))
        while self.kept < self.config.tokens:  # again where answers were shorter than those before
            self._round()
        self.reporter.now(self._done, self.config.tokens)

    def _round(self) -> None:
        first = len(self.asked)
        for index, tokens in self._answered(self._wanted(first)):
            ask, ids = self.asked[index]
            self.answers += 1
            length = without_loop(tokens)
            self.finished += len(tokens)
            self.kept += length
            if length < len(tokens):
                self.cut["looped_answers"] += 1
                self.cut["loop_tokens_cut"] += len(tokens) - length
            self.waiting.append(
                TokenSequence(
                    number=self.first + ask.number,
                    ids=np.array([*ids, *tokens[:length]], np.int32),
                    prompt=len(ids),
                    temperature=ask.temperature,
                )
            )
            self.unwritten += len(ids) + length
            late = time.perf_counter() - self.flushed > self.config.shard_seconds
            if late or self.unwritten >= self.config.shard_tokens:
                self.flush()

    def _answered(self, wanted: Iterator[Wanted]) -> Iterator[tuple[int, Sequence[int]]]:
        """Number and tokens of each answer, in the order in which they end."""
        config, engine = self.config, self.engine
        if self.net is None:
            for index, result in answer_each(engine, wanted, config.batch):
                yield index, result.tokens
            return
        loop, record = (LOOP_TOKENS, LOOP_PERIOD), CudaRecorder(self.net.device)
        seed = int(_uniform(config.seed, "answers", len(self.store)) * 2**48)
        for one in answer_all(self.net, wanted, config.batch, engine.eos_ids, record, seed, loop):
            self.emitted += len(one.tokens)
            self.reporter.late(self._done, config.tokens)
            yield one.number, one.tokens

    def flush(self) -> None:
        waiting, self.waiting, self.unwritten = self.waiting, [], 0
        cut, self.cut = self.cut, dict.fromkeys(self.cut, 0)
        self.store.append(waiting, cut)
        self.flushed = time.perf_counter()

    def count(self, record: StepRecord) -> None:
        """Count what a step emitted, and tell how far the work is now and then."""
        self.emitted += sum(len(row.emitted) for row in record.rows)
        self.reporter.late(self._done, self.config.tokens)

    @property
    def _done(self) -> int:
        """Tokens that are kept, or under way."""
        return self.kept + self.emitted - self.finished

    def _likely_rate(self) -> float:
        """Tokens a second to count on, from a few passes and the lengths of the prompts that come."""
        config, target = self.config, self.engine.target
        answer = max(1.0, self.kept / self.answers) if self.answers else LIKELY * config.max_new_tokens
        missing = round((config.tokens - self.kept) / (answer * config.answers))
        first = self.answers // config.answers % len(self.prompts)
        coming = [*self.prompts[first:], *self.prompts[:first]][: missing + 1]
        prompt = typical_prompt(self.engine, coming, config.max_prompt)
        batch = max(1, min(config.batch, missing * config.answers))
        decode, _ = decode_seconds(target, batch, round(prompt + answer / 2))
        read = prompt * row_seconds(target, frozenset()) / config.answers
        return answer / (answer * decode / batch + read)

    def _expected(self, begun: int) -> float:
        """Tokens that there will be when the answers are finished that were begun."""
        # The first that are finished are the short ones, so a few long ones are put to them.
        usual = (self.kept + 4 * self.config.max_new_tokens) / (self.answers + 4)
        return self.kept + max(begun * usual, self.emitted - self.finished)

    def _wanted(self, first: int) -> Iterator[Wanted]:
        """Prompts with the answers wanted of each, until enough were begun; one at least."""
        before = self.answers
        while True:
            begun = len(self.asked)
            ids: tuple[int, ...] = ()
            params: list[SamplingParams] = []
            while (
                (not params or self.number % self.config.answers)
                and self.kept < self.config.tokens
                and self._expected(len(self.asked) - first - (self.answers - before)) < self.config.tokens
            ):
                ask = ask_of(self.number, len(self.prompts), self.config)
                self.number += 1
                if self.first + ask.number in self.done:
                    continue
                found = ids or encode_within(
                    self.prompts[ask.prompt].messages, self.engine.target, self.config.max_prompt
                )
                if found is None:
                    self._skip(ask)
                    continue
                ids = found
                self.asked.append((ask, ids))
                params.append(self._params(ask))
            if not params:
                return
            self.skipped = 0
            yield Wanted(ids, params, begun)

    def _skip(self, ask: Ask) -> None:
        """Leave out all answers to a prompt that is too long."""
        self.number = (ask.number // self.config.answers + 1) * self.config.answers
        self.skipped += 1
        if self.skipped > len(self.prompts):
            raise RequestError(f"no prompt has at most {self.config.max_prompt} tokens; raise max_prompt")

    def _params(self, ask: Ask) -> SamplingParams:
        """Settings of an answer. Neutral where a model has its own wishes."""
        return SamplingParams(
            **NEUTRAL | {"temperature": ask.temperature},
            max_new_tokens=self.config.max_new_tokens,
            stop_when=loops,
            seed=ask.seed,
        )


def _uniform(seed: int, what: str, number: int) -> float:
    """A number in [0, 1), the same whenever it is asked for."""
    digest = hashlib.sha256(f"{seed} {what} {number}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
