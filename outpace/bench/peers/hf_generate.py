"""``generate`` of transformers, timed, for benchmarks.

Shape letters: B rows of a batch, J positions.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

PROMPT_LOOKUP = 10
"""Tokens that prompt lookup of transformers drafts: the number that its documentation uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """What ``generate`` returns."""

    tokens: tuple[tuple[int, ...], ...]
    """New tokens of every row."""
    seconds: float
    prefill_seconds: float
    """To the first call of a logits processor."""
    emitted: tuple[int, ...]
    """Tokens by forward of the model, the prompt's own first; empty where nothing was drafted."""
    drafted: tuple[int, ...]
    """Drafted tokens that each of them checked."""


def generate(
    model: Any,
    rows: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    temperature: float = 0.0,
    seed: int = 0,
    prompt_lookup: int | None = None,
    assistant: Any = None,
) -> Generated:
    """Run ``model.generate``, timed. Sampling settings not named here are neutral.

    Args:
        model: of transformers; its own generation settings are put aside.
        rows: prompts; shorter ones are padded on the left. One only if anything drafts.
        eos_ids: tokens that end an answer; empty ignores them. (``min_new_tokens`` would forbid
            them instead, and the text would be another.)
        temperature: 0 takes the likeliest token.
        seed: of torch's generator, which is put back afterwards.
        prompt_lookup: how many tokens to draft from the text so far; None drafts none.
    """
    from transformers import GenerationConfig, LogitsProcessorList

    sampled: dict[str, Any] = {}
    if temperature > 0:
        sampled = {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=sorted(eos_ids) or None,
        # With a padding id, an assistant takes every such token of a text for padding.
        pad_token_id=0 if len(rows) > 1 else None,
        repetition_penalty=1.0,
        prompt_lookup_num_tokens=prompt_lookup,
        **sampled,
    )
    longest = max(len(row) for row in rows)
    padding = [longest - len(row) for row in rows]
    ids_BJ = torch.tensor([[0] * pad + [*row] for pad, row in zip(padding, rows, strict=True)])
    mask_BJ = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    devices = [model.device] if model.device.type == "cuda" else []
    watch = _Watch()
    helper = {} if assistant is None else {"assistant_model": assistant}
    with (
        quiet(),
        _borrowed(model, GenerationConfig()),
        watch.over(model, assistant),
        torch.random.fork_rng(devices=devices),
        torch.no_grad(),
    ):
        torch.manual_seed(seed)
        began = time.perf_counter()
        out_BJ = model.generate(
            ids_BJ.to(model.device),
            attention_mask=mask_BJ.to(model.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([watch]),
            **helper,
        ).tolist()
        ended = time.perf_counter()
    tokens = tuple(_cut(row[longest:], eos_ids) for row in out_BJ)
    drafting = prompt_lookup is not None or assistant is not None
    borders = [*watch.starts, len(out_BJ[0])]
    emitted = tuple(after - at for at, after in pairwise(borders))
    return Generated(
        tokens=tokens,
        seconds=ended - began,
        prefill_seconds=watch.first - began,
        emitted=emitted if drafting else (),
        drafted=tuple(watch.drafted) if drafting else (),
    )


@dataclass(slots=True)
class _Watch:
    """A logits processor that changes nothing and notes when forwards were read, and where.

    An assistant calls the same processors, for its own forwards; those are not noted.
    """

    first: float = 0.0
    starts: list[int] = field(default_factory=list)
    """Length of the text at each forward of the model."""
    drafted: list[int] = field(default_factory=list)
    _fresh: bool = False
    _ours: bool = False

    @contextlib.contextmanager
    def over(self, model: Any, assistant: Any) -> Iterator[None]:
        """Hear of the forwards of both models."""
        hooks = [model.register_forward_hook(lambda *_: self._forward(True))]
        if assistant is not None:
            hooks.append(assistant.register_forward_hook(lambda *_: self._forward(False)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _forward(self, ours: bool) -> None:
        self._fresh = self._ours = ours

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.starts and self._ours:
            if scores.is_cuda:
                torch.cuda.synchronize(scores.device)
            self.first = time.perf_counter()
        if self._fresh:
            self.starts.append(input_ids.shape[1])
            self.drafted.append(0)
        elif self._ours:  # one more row of the same forward
            self.drafted[-1] += 1
        self._fresh = False
        return scores


def _cut(tokens: Sequence[int], eos_ids: frozenset[int]) -> tuple[int, ...]:
    """Drop what follows the first end, which is padding."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos_ids), len(tokens))
    return tuple(tokens[:end])


@contextlib.contextmanager
def _borrowed(model: Any, settings: Any) -> Iterator[None]:
    """Run a model with other generation settings, not training; then as it was."""
    training = [module for module in model.modules() if module.training]
    before, model.generation_config = model.generation_config, settings
    for module in training:
        module.training = False
    try:
        yield
    finally:
        model.generation_config = before
        for module in training:
            module.training = True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let transformers show no progress bars, and nothing but errors."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
