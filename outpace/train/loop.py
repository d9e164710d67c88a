"""The one training loop: every method, one process or many, stopped and gone on with.

A step is a batch: loss, gradients summed over processes, clipped, AdamW. Now and then held-out
acceptance is measured, the number that matters; whenever it is the best so far, the drafter folder
is written. What is there at the end, or when training is stopped, is the best drafter seen.
`outpace.train.pipeline` lets it be a folder of the training's own, and puts it in its place at the end.

With a schedule in steps, a run that was killed and resumed has the same bits as one that was not.
A schedule in minutes reads the clock, and no two runs are alike.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.drafters.trained import CONFIG
from outpace.errors import OutpaceError, shown
from outpace.models.load import fast_dtype
from outpace.train import checkpoint, curves, optimizers
from outpace.train.align import moved
from outpace.train.batches import Batch
from outpace.train.distributed import ProcessGroup
from outpace.train.generate import MOST
from outpace.train.memory import Holes, keep_freed_memory
from outpace.train.objective import Objective, Step
from outpace.train.progress import Say, clock_text
from outpace.train.stopping import Asked, asked

LOSS_SHARE = 4
"""One in so many of the held-out tokens is read for the loss, too."""

_ABOVE_0 = (
    *("steps", "batches", "minutes", "lr", "clip", "patience"),
    *("evaluate_every", "evaluate_tokens", "checkpoint_every", "report_every"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    steps: int | None = None
    """Steps in all."""
    batches: int | None = None
    """Batches of a step, shared by the processes; None: one of each. The weights depend on this number, and
    not on how many processes there are."""
    minutes: float | None = None
    """Minutes in all, those before a resume included. With both, what ends first."""
    lr: float = 5e-4
    """Highest learning rate."""
    warmup: float = 0.03
    """Share of the training in which the rate rises from 0."""
    last: float = 0.02
    """Share of the highest rate that is left at the end of the cosine decay."""
    clip: float = 1.0
    """Longest gradient."""
    optimizer: str = "adamw"
    """``adamw``, or ``muon`` for matrices between vectors and AdamW for the rest."""
    weight_decay: float = 0.0
    """Of AdamW, and of Muon."""
    beta1: float = 0.9
    """Of AdamW."""
    beta2: float = 0.95
    """Of AdamW."""
    evaluate_every: int = 200
    """Steps between measurements of held-out acceptance."""
    evaluate_tokens: int = 20_000
    """Held-out tokens after which a measurement ends, those of all processes together."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    report_every: int = 20
    """Steps between progress reports."""
    patience: int | None = None
    """Measurements without a better one after which training stops; None never does."""
    bf16: bool | None = None
    """Multiply in bfloat16; None: where the machine does so natively."""
    seed: int = 0
    """Of what is drawn while training."""

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("say how long to train: steps or minutes")
        if self.optimizer not in optimizers.KINDS:
            raise ValueError(f"optimizer must be {' or '.join(optimizers.KINDS)}, got {self.optimizer!r}")
        for name in _ABOVE_0:
            value = getattr(self, name)
            if value is not None and not 0 < value <= MOST:
                raise ValueError(f"{name} must be above 0 and at most {MOST}, got {shown(value)}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        for name in ("warmup", "last", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")

    def done(self, step: int, seconds: float) -> float:
        """Share of the training that is behind, 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def rate(self, done: float) -> float:
        """Learning rate when this share is behind."""
        if done < self.warmup:
            return self.lr * done / self.warmup
        left = (1 - done) / (1 - self.warmup)
        return self.lr * (self.last + (1 - self.last) * 0.5 * (1 - math.cos(math.pi * left)))


class Source(Protocol):
    """Where a process gets its batches; `outpace.train.batches.Batches` is one."""

    def since(self, epoch: int = 0, index: int = 0) -> Iterator[tuple[int, int, Batch]]:
        """(epoch, index, batch) from there on, without end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    step: int
    epoch: int
    loss: float
    """Mean since the last report."""
    rate: float
    tokens_per_second: float
    """Tokens learned from, in all processes."""
    seconds: float
    """Since the beginning, those before a resume included."""
    left: float
    """Seconds left, as far as one can tell."""
    acceptance: tuple[float, ...] = ()
    """Held-out acceptance by depth at temperature 0, given that all before was right; empty
    where it was not measured now."""
    overlap: tuple[float, ...] = ()
    """Held-out alpha = sum min(p, q), for the same rows."""
    emitted: float | None = None
    """Tokens that a pass would emit with chains so deep: 1 + sum of products of acceptance."""
    held_out_loss: float | None = None
    """Mean loss of held-out rows; once it rises while the loss falls, more steps only overfit."""

    def line(self) -> str:
        text = (
            f"step {self.step} epoch {self.epoch} loss {self.loss:.4f} rate {self.rate:.1e} "
            f"{self.tokens_per_second:.0f} tokens/s, {clock_text(self.left)} left"
        )
        if self.acceptance:
            depths = " ".join(f"{one:.3f}" for one in self.acceptance)
            text += f" | acceptance {depths}, emitted {self.emitted:.2f}"
        if self.overlap:
            text += f", alpha {self.overlap[0]:.3f}"
        if self.held_out_loss is not None:
            text += f", held-out loss {self.held_out_loss:.4f}"
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    steps: int
    best_step: int
    best: Progress | None
    """The measurement of the drafter that was kept; None if none was made."""
    history: tuple[dict[str, Any], ...]
    """All measurements, as plain data."""
    stopped_early: bool


@dataclass(slots=True)
class _State:
    step: int = 0
    epoch: int = 0
    index: int = 0
    """Next step of the epoch."""
    seconds: float = 0.0
    best: float = -1.0
    best_step: int = 0
    since_best: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    early: bool = False


def emitted(acceptance: Iterable[float]) -> float:
    """Mean emitted of a chain as deep as the numbers go."""
    total, reached = 1.0, 1.0
    for one in acceptance:
        reached *= one
        total += reached
    return total


def train(
    objective: Objective,
    source: Source,
    held_out: Iterable[Batch],
    config: LoopConfig,
    *,
    out: Path,
    work: Path,
    device: torch.device | str = "cpu",
    provenance: Mapping[str, Any] | None = None,
    resume: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
    say: Say = lambda line: None,
) -> Trained:
    """Train, and leave the best drafter seen in ``out``.

    Args:
        objective: its module is trained in place; afterwards it holds the last weights.
        source: batches; with several processes each gives its own share, and its steps end with epochs.
        held_out: batches to measure on, iterated anew every time; a share likewise.
        out: drafter folder; the files of one that is there are replaced one by one.
        work: folder of checkpoints, and of ``training.png`` where matplotlib is installed.
        provenance: written with the drafter, with the measurement of it added.
        resume: go on from the newest checkpoint, if there is one.
        say: told that Ctrl-C or SIGTERM was understood.

    Raises:
        KeyboardInterrupt: of these two; the last step has a checkpoint, unless Ctrl-C came twice.
        OutpaceError: the loss or the gradient is not finite (says step and last checkpoint), or a
            checkpoint is corrupt or of another network.
    """
    group = ProcessGroup(torch.device(device))
    keep_freed_memory()
    try:
        run = _Run(objective, config, group, out, work, torch.device(device), dict(provenance or {}))
        if resume and (path := checkpoint.latest(work)) is not None:
            run.resume(path)
        with asked(say if group.leads else lambda line: None) as stop:
            trained = run.go(source, held_out, report, stop)
            group.wait()
        return trained
    finally:
        group.close()


class _Run:
    def __init__(
        self,
        objective: Objective,
        config: LoopConfig,
        group: ProcessGroup,
        out: Path,
        work: Path,
        device: torch.device,
        provenance: dict[str, Any],
    ) -> None:
        self.objective, self.config, self.group = objective, config, group
        self.out, self.work, self.device, self.provenance = out, work, device, provenance
        self.parameters = [p for p in objective.module.parameters() if p.requires_grad]
        self.optimizer = optimizers.made(
            config.optimizer,
            objective.module,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=device.type in ("cpu", "cuda"),
        )
        native = fast_dtype(device) is torch.bfloat16
        self.bf16 = native if config.bf16 is None else config.bf16
        self.share = max(1, (config.batches or group.size) // group.size)
        self.state, self.holes = _State(), Holes()
        self.best: Progress | None = None

    def resume(self, path: Path) -> None:
        tensors, state = checkpoint.load(path)
        checkpoint.restore(self.objective.module, self.optimizer, tensors, path)
        self.state = _State(**state["run"])
        self.best = _progress(state["best"]) if state["best"] else None
        if self.best is not None and not (self.out / CONFIG).is_file():
            # Its drafter was taken away; the next measurement leaves one.
            self.best, self.state.best, self.state.best_step = None, -1.0, 0

    def keep(self) -> None:
        if self.group.leads:
            tensors = checkpoint.training_tensors(self.objective.module, self.optimizer)
            best = None if self.best is None else asdict(self.best)
            state = {"run": asdict(self.state), "best": best, "provenance": self.provenance}
            checkpoint.save(self.work, self.state.step, tensors, state)

    def go(
        self, source: Source, held_out: Iterable[Batch], report: Callable[[Progress], None], stop: Asked
    ) -> Trained:
        config, state = self.config, self.state
        begin = time.monotonic() - state.seconds
        self.group.agree(self.parameters)
        losses: list[float] = []
        tokens, since = 0, time.monotonic()
        if not state.early and config.done(state.step, state.seconds) < 1:
            batches = source.since(state.epoch, state.index * self.share)
            while parts := list(itertools.islice(batches, self.share)):
                epoch, index, _ = parts[-1]
                done = self.objective.done = config.done(state.step, state.seconds)
                loss, count = self.step([batch for _, _, batch in parts], config.rate(done))
                losses.append(loss)
                tokens += count
                state.step, state.epoch = state.step + 1, epoch
                state.index = (index + 1) // self.share
                state.seconds = self.group.same(time.monotonic() - begin)
                done = config.done(state.step, state.seconds)
                self.holes.close()
                ends = done >= 1
                measures = ends or state.step % config.evaluate_every == 0
                if measures or state.step % config.report_every == 0:
                    busy = max(time.monotonic() - since, 1e-9)
                    now = Progress(
                        step=state.step,
                        epoch=epoch,
                        loss=sum(losses) / len(losses),
                        rate=config.rate(done),
                        tokens_per_second=tokens / busy,
                        seconds=state.seconds,
                        left=state.seconds * (1 - done) / max(done, 1e-9),
                    )
                    now = self.measure(held_out, now) if measures else now
                    if self.group.leads:
                        report(now)
                    losses, tokens, since = [], 0, time.monotonic()
                stops = self.group.any(stop.number is not None)
                if ends or state.early or stops or state.step % config.checkpoint_every == 0:
                    self.keep()
                if stops:
                    self.group.wait()  # whoever leaves first must not take the writer along
                    stop.leave()
                if ends or state.early:
                    break
        if self.group.leads:
            if self.best is None:
                self.objective.save(self.out, {**self.provenance, "steps": state.step})
            curves.draw(state.history, self.work / "training.png")
        return Trained(
            steps=state.step,
            best_step=state.best_step,
            best=self.best,
            history=tuple(state.history),
            stopped_early=state.early,
        )

    def step(self, batches: Sequence[Batch], rate: float) -> tuple[float, int]:
        """One update; gives the mean loss and the tokens, of all processes together."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches):
            step = self.loss(moved(batch, self.device), self.group.rank + number * self.group.size)
            (step.loss * step.tokens).backward()  # type: ignore[no-untyped-call]
            sums += torch.stack([step.loss.detach().double() * step.tokens, sums.new_tensor(step.tokens)])
        loss, tokens = self.group.sum(sums).tolist()
        loss /= max(tokens, 1.0)
        if not math.isfinite(loss):
            raise self.broken("loss", loss)
        self.group.add_gradients(self.parameters)
        for one in self.parameters:
            if one.grad is not None:
                one.grad /= max(tokens, 1.0)
        length = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        if not bool(length.isfinite()):
            raise self.broken("gradient", float(length))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, int(tokens)

    def loss(self, batch: Batch, number: int) -> Step:
        """The loss of a batch; its coins are named by its number in the step."""
        coin = random.Random(f"{self.config.seed} {self.state.step} {number}")
        if coin.random() < self.objective.on_policy_share:
            batch = self.objective.on_policy(batch, coin.getrandbits(31))
        self.objective.module.train()
        with self.autocast():
            return self.objective.loss(batch)

    def broken(self, what: str, value: float) -> OutpaceError:
        last = checkpoint.latest(self.work)
        where = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
        return OutpaceError(
            f"the {what} is {value} at step {self.state.step + 1}; {where}; lower lr "
            f"({self.config.lr}) or clip ({self.config.clip}) and resume"
        )

    def measure(self, held_out: Iterable[Batch], now: Progress) -> Progress:
        """Measure held-out acceptance; if it is the best so far, write the drafter."""
        sums = [torch.zeros(0), torch.zeros(0), torch.zeros(0)]
        read = 0
        self.objective.module.eval()
        lost = self._held_out_loss(held_out)
        with torch.no_grad(), self.autocast():
            for batch in held_out:
                step = self.objective.evaluate(moved(batch, self.device))
                self.holes.close()
                sums = [_added(s, one) for s, one in zip(sums, _counts(step), strict=True)]
                read += batch.tokens
                if read >= self.config.evaluate_tokens:
                    break
        accepted, counted, overlap = (self.group.sum_long(one.double()) for one in sums)
        self.objective.gather(self.group.sum_long)
        state = self.state
        if not len(counted):
            return now
        rates = (accepted / counted.clamp_min(1)).tolist()
        alphas = (overlap / counted.clamp_min(1)).tolist() if len(overlap) else []
        value = emitted(rates)
        note = asdict(now) | {"acceptance": rates, "overlap": alphas, "emitted": value, "held_out_loss": lost}
        now = _progress(note)
        state.history.append(note)
        if value > state.best:
            state.best, state.best_step, state.since_best, self.best = value, state.step, 0, now
            if self.group.leads:
                self.objective.save(self.out, {**self.provenance, "steps": state.step, "held_out": note})
        else:
            state.since_best += 1
            patience = self.config.patience
            state.early = patience is not None and state.since_best >= patience
        return now

    def _held_out_loss(self, held_out: Iterable[Batch]) -> float:
        """Mean loss over a part of the held-out batches."""
        total, read = torch.zeros(2, dtype=torch.float64), 0
        with torch.no_grad(), self.autocast():
            for batch in held_out:
                step = self.objective.loss(moved(batch, self.device))
                self.holes.close()
                total += torch.tensor([float(step.loss) * step.tokens, step.tokens], dtype=torch.float64)
                read += batch.tokens
                if read >= self.config.evaluate_tokens / LOSS_SHARE / self.group.size:
                    break
        loss, tokens = self.group.sum(total).tolist()
        return float(loss / max(tokens, 1.0))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Products in bfloat16 if so decided; weights and sums stay float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


def _counts(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    return step.accepted_by_depth, step.counted_by_depth, step.overlap_by_depth


def _added(total: Tensor, one: Tensor) -> Tensor:
    return one.clone() if not len(total) else total + one


def _progress(data: Mapping[str, Any]) -> Progress:
    tuples = {name: tuple(data[name]) for name in ("acceptance", "overlap")}
    return Progress(**{**data, **tuples})
