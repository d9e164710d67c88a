"""What a training would take, before anything is started: tokens, disk, memory, time.

Speeds are measured, on a few passes and one training step with made-up data; lengths of answers
are guessed where there are none yet.

Shape letters: B sequences, T tokens, H hidden size.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from outpace.models.load import fast_dtype
from outpace.train.batches import Batch
from outpace.train.capture import passes, width_of
from outpace.train.pipeline import Pipeline
from outpace.train.speed import LIKELY, decode_seconds, row_seconds, seconds_of, typical_prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What is left to do; all numbers are rough."""

    answers: int
    """Sequences in all."""
    tokens: int
    """Of prompts and answers together."""
    answer_tokens: int
    disk_bytes: int
    """To be written, at most: features, tokens, checkpoints."""
    memory_bytes: int
    """At most in use at a time."""
    steps: int
    """Of training."""
    prompt_seconds: float
    """To write the target's own prompts."""
    generate_seconds: float
    feature_seconds: float
    train_seconds: float
    measure_seconds: float
    """Of the drafter, against plain decoding, when it is made."""

    @property
    def seconds(self) -> float:
        spent = self.prompt_seconds + self.generate_seconds + self.feature_seconds
        return spent + self.train_seconds + self.measure_seconds

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}


def estimate(pipeline: Pipeline, measured_tokens: int = 0, prompt_seconds: float = 0.0) -> Estimate:
    """Say what a training would take.

    Args:
        measured_tokens: answer tokens that a measurement of the drafter has, at one sequence.
        prompt_seconds: until the prompts are there, which the target writes itself.

    Cost: a few passes of the target, one of them over 1024 tokens, and one step of training.
    Effects: none on the disk.
    """
    data, target, options = pipeline.options.data, pipeline.target, pipeline.options
    store = pipeline.stored
    done = store.answer_tokens if store is not None else 0
    if store is not None and len(store) > 0:
        answer, prompt = done / len(store), float(store.prompt_S.mean())
    else:
        answer = LIKELY * data.max_new_tokens
        begun = round(data.tokens / (answer * data.answers))
        prompt = typical_prompt(pipeline.engine, pipeline.prompts[:begun], data.max_prompt)
    wanted = max(data.tokens, done) if pipeline.prompts else done
    answers = max(1, round(wanted / max(answer, 1.0)))
    tokens = round(wanted + answers * prompt)
    batch = min(data.batch, answers)
    decode, cache_bytes = decode_seconds(target, batch, round(prompt + answer / 2))
    alone, _ = decode_seconds(target, 1, round(prompt + answer / 2))
    per_row = row_seconds(target, passes(pipeline.taps))
    missing = (wanted - done) / max(answer, 1.0)  # answers still to be made
    step_seconds, parameters = _step(pipeline)
    batches = max(1, round(tokens / options.pipeline.tokens_per_batch))
    loop = options.loop_config(batches)
    steps = loop.steps or round((loop.minutes or 0.0) * 60 / step_seconds)
    train_seconds = steps * step_seconds
    if loop.minutes is not None:
        train_seconds = min(train_seconds, 60 * loop.minutes)
    per_token = 2 * sum(width_of(target, tap) for tap in pipeline.taps)
    there = 0 if pipeline.features is None else pipeline.features.nbytes
    room = min(round(options.pipeline.feature_gb * 1e9), tokens * per_token)
    read = steps * options.pipeline.tokens_per_batch  # tokens that training reads, again in each epoch
    computed = max(0, min(read, tokens) - there // max(per_token, 1))
    if read > tokens:  # later epochs find on disk what had room there
        computed += round((read - tokens) * (1 - room / max(tokens * per_token, 1)))
    rows = data.max_prompt + data.max_new_tokens if missing > 0 else 0
    return Estimate(
        answers=answers,
        tokens=tokens,
        answer_tokens=wanted,
        # Two checkpoints of weights and moments in float32, and a third on its way.
        disk_bytes=max(0, room - there) + 4 * tokens + 3 * 12 * parameters,
        memory_bytes=_peak_memory() + cache_bytes * rows * batch,
        steps=steps,
        prompt_seconds=prompt_seconds,
        generate_seconds=missing * (answer * decode / batch + prompt * per_row / data.answers),
        feature_seconds=computed * per_row if pipeline.taps else 0.0,
        train_seconds=train_seconds,
        # Both warm up, and a drafter that is not trained yet may be no faster.
        measure_seconds=2 * measured_tokens * alone,
    )


def _step(pipeline: Pipeline) -> tuple[float, int]:
    """Seconds of a training step on made-up data, and how many parameters are trained."""
    options, target = pipeline.options, pipeline.target
    objective = options.trial(target)
    length = max(4, min(256, options.pipeline.tokens_per_batch, target.max_positions))
    count = max(1, options.pipeline.tokens_per_batch // length)
    coins = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(256, target.vocab_size), (count, length), generator=coins)
    answer = torch.ones(count, length, dtype=torch.bool)
    answer[:, : length // 3] = False
    batch = Batch(
        token_BT=tokens.to(target.device),
        length_B=torch.full((count,), length, device=target.device),
        answer_BT=answer.to(target.device),
        feature={
            tap: torch.randn((count, length, width_of(target, tap)), generator=coins).to(
                target.device, torch.bfloat16
            )
            for tap in pipeline.taps
        },
    )
    asked = options.loop_config(1).bf16  # as the loop will decide
    bf16 = fast_dtype(target.device) is torch.bfloat16 if asked is None else asked

    def one() -> None:
        with torch.autocast(target.device.type, torch.bfloat16, enabled=bf16):
            loss = objective.loss(batch).loss
        loss.backward()  # type: ignore[no-untyped-call]

    learned = [p for p in objective.module.parameters() if p.requires_grad]
    return seconds_of(one), sum(p.numel() for p in learned)


def _peak_memory() -> int:
    """Most bytes that this process has held; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
