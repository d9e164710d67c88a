"""The engine that users hold: load a model once, generate from it with any drafter."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, repeat
from threading import RLock
from typing import Any, Literal, overload

import torch

from outpace import registry
from outpace.coins import key_of
from outpace.config import DEFAULT_DRAFTER, MethodSpec
from outpace.engine.method import Method, SingleMethod
from outpace.engine.recall import recall, remember
from outpace.engine.requests import (
    GenerationRequest,
    Wanted,
    check,
    paired,
    params_of,
    references_of,
    rule_of,
)
from outpace.engine.results import Chunk, Result
from outpace.engine.scheduler import run
from outpace.engine.sequence import ActiveSequence, Setup
from outpace.errors import RequestError
from outpace.machine import Machine
from outpace.models.base import Target
from outpace.models.load import load_target
from outpace.models.prompts import Prompt, as_prompts, as_reference, encode
from outpace.params import SamplingParams
from outpace.policies.base import Policy
from outpace.policies.costs import Costs
from outpace.sampling import Warp
from outpace.stops import StopChecker
from outpace.types import StepRecord
from outpace.verifiers.base import Verifier


class Engine:
    """A target with its drafters. Answers are the target's own, whatever drafts. Threads that call it take
    turns, pass by pass.
    """

    def __init__(
        self,
        target: Target,
        drafter: str = DEFAULT_DRAFTER,
        *,
        allow_lossy: bool = False,
        draft_model: str | None = None,
    ) -> None:
        self.target = target
        self.draft_model = draft_model
        """A language model that methods which pick among drafters may draft with."""
        self.allow_lossy = allow_lossy
        self.drafter = str(MethodSpec.parse(drafter))
        self.lock = RLock()  # held while slots, drafters and policies are at work
        self.listeners: list[Callable[[StepRecord], None]] = []
        """Called after every step with its record."""
        self.costs = Costs()
        """What passes and drafts cost, for policies; ``costs.start`` takes a measured curve."""
        self._methods: dict[str, Method] = {}
        self._policies: dict[str, Policy] = {}  # of methods; they keep no engine alive
        self._begun: Mapping[str, Any] = {}  # what policies had learned before
        self.cache = target.new_cache()
        """Keys and values of running sequences and conversations, one slot each."""
        keyed = registry.able("verifier", registry.REPRODUCES)[0].name
        self._keyed: Verifier = registry.make("verifier", keyed)
        self._count = 0
        self.method(self.drafter)

    @classmethod
    def load(
        cls,
        model: Any,
        *,
        drafter: str = DEFAULT_DRAFTER,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        backend: str = "auto",
        tokenizer: Any = None,
        quantize: str | None = None,
        allow_lossy: bool = False,
        drafter_anyway: bool = False,
        draft_model: str | None = None,
    ) -> Engine:
        """Load a model and a drafter for it; what ``outpace tune`` measured is read when a policy asks.

        Args:
            model: a name (``smollm2-135m``), folder, GGUF file, hub id, or a transformers
                model that is already in memory.
            drafter: method spec of the drafter to use unless a call names another.
            dtype: ``float32``, ``bfloat16``, or ``auto``; see `load_target`.
            device: where to compute; None is the CPU, or where an in-memory model is.
            backend: ``own`` decoder, ``hf`` (transformers), or ``auto``. A model in memory stays with
                transformers unless ``own`` is asked for; see `load_target`.
            tokenizer: of an in-memory model; a transformers tokenizer.
            quantize: ``int8`` or ``int4``: round the weights; the target is then another model.
            allow_lossy: permit verifiers that change the distribution of the output.
            drafter_anyway: take drafters that were trained for another model, as long as their sizes
                fit. Nothing is lost but acceptance; the target's note says what was skipped.
            draft_model: name, folder or file of a smaller model with the same tokenizer, for `auto` to
                draft with where that pays.

        Raises:
            ModelError, UnknownNameError, SpecError: with one line that says what to do.
        """
        registry.entry("drafter", MethodSpec.parse(drafter).name)
        target = load_target(
            model, dtype=dtype, device=device, backend=backend, tokenizer=tokenizer, quantize=quantize
        )
        target.drafter_anyway = drafter_anyway
        engine = cls(target, drafter, allow_lossy=allow_lossy, draft_model=draft_model)
        engine.costs.later(partial(recall, target, engine.costs))
        if draft_model is not None:
            _ = engine.method().members  # so that what is wrong with it is said now
        return engine

    def remember(self) -> None:
        """Begin with what policies counted in earlier processes; keep their counts when this one ends."""
        self._begun = remember(self, self.target, self._policies)

    def method(self, spec: str | None = None) -> Method:
        """The drafter of a spec, loaded on first use and kept; None: the engine's own."""
        parsed = MethodSpec.parse(self.drafter if spec is None else spec)
        name = str(parsed)
        if name not in self._methods:
            picks = issubclass(cls := registry.load("drafter", parsed.name), Method)  # among drafters
            made = partial(cls, find=self.method, draft_model=self.draft_model) if picks else SingleMethod
            self._methods[name] = made(parsed, self.target, self.allow_lossy, self.costs)
            self._policies[name] = self._methods[name].policy
            self._policies[name].recall(self._begun.get(name))
        return self._methods[name]

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: None = None,
        *,
        drafter: str | None = None,
        reproducible: bool | None = None,
        chat: bool = False,
        reference: Any = None,
        n: Literal[1] = 1,
        **settings: Any,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: Wanted = None,
        *,
        drafter: str | None = None,
        reproducible: bool | None = None,
        chat: bool = False,
        reference: Any = None,
        **settings: Any,
    ) -> Any: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: Wanted = None,
        *,
        drafter: str | None = None,
        reproducible: bool | None = None,
        chat: bool = False,
        reference: Any = None,
        **settings: Any,
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: Wanted = None,
        *,
        drafter: str | None = None,
        reproducible: bool | None = None,
        chat: bool = False,
        reference: Any = None,
        **settings: Any,
    ) -> Any:
        """Answer one prompt, or a batch of prompts in one go.

        Args:
            prompt: text, token ids, chat messages, or a list of such prompts.
            params: sampling settings for all prompts, or one per prompt.
            drafter: method spec, in place of the engine's own.
            reproducible: whether the same seed gives the same text with any drafter and with none,
                in any batch. None means: where a seed is given, unless the spec names a verifier.
            chat: wrap text prompts in the model's chat template.
            reference: text or token ids that the answer is expected to resemble, one for all
                prompts or a list of one (or None) each. Drafters may read it; the distribution of the answer
                does not depend on it, nor does the text at temperature 0 or if ``reproducible``.
            **settings: fields of SamplingParams, in place of ``params``.

        Returns:
            A Result for a single prompt with ``n=1``; otherwise a list of them, prompt by
            prompt, ``n`` for each.

        Raises:
            RequestError: empty or overlong prompt, or settings out of range.
        """
        prompts, single = as_prompts(prompt)
        method = self.method(drafter)
        requests = list(self._requests(prompts, params, settings, chat, reference))
        done: dict[int, Result] = {}
        for part in self._run(self._open(requests, method, reproducible), method):
            done |= {row.index: row.result() for row in part if row.finished}
        results = [done[index] for index in range(len(requests))]
        return results[0] if single and len(results) == 1 else results

    def stream(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: Wanted = None,
        *,
        drafter: str | None = None,
        reproducible: bool | None = None,
        chat: bool = False,
        reference: Any = None,
        **settings: Any,
    ) -> Iterator[Chunk]:
        """Like ``generate``, piece by piece; the last chunk of each answer carries its Result.

        Bad input raises at once, not at the first chunk. Closing the iterator ends the request.
        """
        prompts, _ = as_prompts(prompt)
        method = self.method(drafter)
        requests = list(self._requests(prompts, params, settings, chat, reference))
        return self.chunks(self._open(requests, method, reproducible), method)

    def map(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        batch: int = 32,
        drafter: str | None = None,
        reproducible: bool | None = None,
        chat: bool = False,
        **settings: Any,
    ) -> Iterator[tuple[int, Result]]:
        """Answer any number of prompts, ``batch`` at a time.

        A prompt is taken and checked when an earlier answer makes room for it, so ``prompts``
        may be endless. The batch stays full until they run out. ``params`` holds for all prompts,
        or is taken one by one with them.

        Returns:
            (number of the prompt, its answer) as the answers are finished. With ``n`` above 1
            a prompt's number comes ``n`` times.

        Raises:
            RequestError: at the prompt that does not fit; answers under way are lost.
        """
        if batch < 1:
            raise RequestError(f"batch must be at least 1, got {batch}")
        method = self.method(drafter)
        requests = (
            one
            for number, (prompt, own) in enumerate(paired(prompts, params, settings))
            for one in self._requests([prompt], own, {}, chat, None, first=number)
        )
        for part in self._run(self._open(requests, method, reproducible), method, batch=batch):
            for row in part:
                row.chunks.clear()
                if row.finished:
                    yield row.index, row.result()

    def chunks(
        self, rows: Iterable[ActiveSequence], method: Method, keep_slots: bool = False
    ) -> Iterator[Chunk]:
        """Run sequences to their ends and hand out what becomes readable."""
        for part in self._run(rows, method, keep_slots=keep_slots):
            for row in part:
                yield from row.chunks
                row.chunks.clear()

    @contextmanager
    def listening(self, listener: Callable[[StepRecord], None]) -> Iterator[None]:
        """Call ``listener`` with the record of every step of the block."""
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)

    def encode(self, prompt: Prompt, *, chat: bool = False) -> tuple[int, ...]:
        """Token ids of a prompt, as ``generate`` would feed it."""
        return encode(prompt, self.target, chat=chat)

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: Wanted,
        settings: dict[str, Any],
        chat: bool,
        reference: Any,
        first: int | None = None,
    ) -> Iterator[GenerationRequest]:
        """Check prompts and settings; answers are counted from 0, or share the number ``first``."""
        numbers = count() if first is None else repeat(first)
        wanted, references = params_of(params, settings, len(prompts)), references_of(reference, len(prompts))
        for prompt, asked, own in zip(prompts, wanted, references, strict=True):
            for one in self.request(prompt, asked, chat=chat, reference=own).answers():
                yield replace(one, index=next(numbers))

    def request(
        self, prompt: Prompt, params: SamplingParams, *, chat: bool = False, reference: Any = None
    ) -> GenerationRequest:
        """Encode and check one prompt with its settings, ``params.n`` answers of it together.

        Raises:
            RequestError: as ``generate``.
        """
        ids = self.encode(prompt, chat=chat)
        resolved = params.resolved(self.target.defaults)
        check(ids, resolved, self.target, self.eos_ids)
        answers = chat if isinstance(prompt, str) else isinstance(prompt[0], Mapping)
        return GenerationRequest(
            prompt=ids,
            params=resolved,
            seed=secrets.randbits(48) if resolved.seed is None else resolved.seed,
            continues=not answers,
            reference=as_reference(reference, self.target),
            rule=rule_of(ids, resolved, self.target),
        )

    def _open(
        self, requests: Iterable[GenerationRequest], method: Method, reproducible: bool | None
    ) -> Iterator[ActiveSequence]:
        """Sequences in slots of their own, each opened when it is asked for."""
        self.verifier(method, reproducible)  # two wishes that contradict are said at once

        def opened(one: GenerationRequest) -> ActiveSequence:
            slot = self.cache.open()
            try:
                chosen = self.verifier(method, reproducible, one.params)
                return self.start_sequence(one, slot, method, chosen)
            except BaseException:
                self.cache.close(slot)
                raise

        return map(opened, requests)

    def start_sequence(
        self, request: GenerationRequest, slot: int, method: Method, verifier: Verifier
    ) -> ActiveSequence:
        """A sequence whose slot may hold a prefix of its prompt already."""
        self._count += 1
        request = replace(request, num_cached=self.cache.length(slot))
        ids, params = request.prompt, request.params
        tokenizer = self.target.tokenizer
        text = None if tokenizer is None else tokenizer.text_stream(continues=request.continues)
        judges = method.verifiers(verifier)
        # A draft that was read off an answer must not meet the coins that made that answer.
        seeded = (method.deterministic and request.reference is None) or all(
            one.reproduces for one in (verifier, *judges.values())
        )
        warp = Warp(params, ids, self.eos_ids, self.target.vocab_size, request.rule)
        return ActiveSequence(
            number=self._count,
            request=request,
            warp=warp,
            stops=StopChecker(params, self.eos_ids, text),
            coins=key_of(request.seed, ids) if seeded else secrets.randbits(64),
            slot=slot,
            setup=Setup(
                drafter=method.spec,
                verifier=verifier,
                policy_state=method.policy.begin(request.key, warp.greedy, warp.ruled),
                lossless=method.lossless(verifier),
                members=method.begin(request, warp.ruled, verifier),  # the last that may fail
            ),
            max_positions=self.target.longest(ids),
        )

    def verifier(
        self, method: Method, reproducible: bool | None, params: SamplingParams | None = None
    ) -> Verifier:
        """Who verifies this method's drafts for a request; see ``Method.keyed``."""
        seeded = params is not None and params.seed is not None
        return self._keyed if method.keyed(reproducible, seeded) else method.verifier

    def _run(
        self,
        rows: Iterable[ActiveSequence],
        method: Method,
        *,
        batch: int | None = None,
        keep_slots: bool = False,
    ) -> Iterator[list[ActiveSequence]]:
        """Run sequences; slots and drafter states are given back however it ends."""
        machine = Machine(
            self.target,
            self.cache,
            {name: one.drafter for name, one in method.members.items()},
            method.policy,
            listeners=(*self.listeners, *method.watchers),
        )
        living: set[ActiveSequence] = set()

        def joining() -> Iterator[ActiveSequence]:
            for row in rows:
                living.add(row)
                yield row

        parts = run(machine, joining(), batch)

        def advance() -> list[ActiveSequence] | None:
            with self.lock:
                part = next(parts, None)
                for row in part or ():
                    if row.finished:
                        living.discard(row)
                        self.release(row, method, keep_slots)
                return part

        try:
            yield from iter(advance, None)
        finally:
            with self.lock:
                for row in living:
                    self.release(row, method, keep_slots)

    def release(self, row: ActiveSequence, method: Method, keep_slot: bool = False) -> None:
        """Give back its slot and its drafters' states, all of them even if one raises."""
        with ExitStack() as held:
            for name, member in row.all_members.items():
                held.callback(method.members[name].drafter.end, member.state)
            if not keep_slot:
                held.callback(self.cache.close, row.slot)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a text: the tokenizer's and the generation config's."""
        told = [one.eos_ids for one in (self.target.tokenizer, self.target.defaults) if one is not None]
        return frozenset[int]().union(*told)
