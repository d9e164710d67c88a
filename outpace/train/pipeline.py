"""From prompts to a drafter: answers, features, vocabulary, training, one after another.

Everything is kept in a work folder. So each part is done once, whatever else is trained for the
same target, and goes on where it was:

    tokens/             answers of the target, with their manifest
    tokens/features/    what the target computed at every token of them
    METHOD/             settings and checkpoints of a training under way, its plot
    METHOD/best/        the best drafter of it so far

The drafter leaves the work folder when it was trained and measured, in one step. Until then the one
that was in use before is in use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from outpace import __version__
from outpace.config import data_folder, restarts, world
from outpace.drafters.trained import PROVENANCE, WEIGHTS, find, home, read_config, read_tensors, vocab_map
from outpace.engine.engine import Engine
from outpace.errors import RequestError
from outpace.files import expanded, parse_json, write_whole
from outpace.models.fields import read_json
from outpace.models.lock import alone, remove_parts
from outpace.models.prompts import evenly
from outpace.train import checkpoint
from outpace.train.batches import Batches, Features, Split
from outpace.train.corpus import CorpusPrompt, Source
from outpace.train.distributed import check_device
from outpace.train.features import FeatureStore
from outpace.train.generate import check_chat, generate_answers
from outpace.train.install import check_destination, install_folder
from outpace.train.loop import Progress, Trained, train
from outpace.train.options import Options
from outpace.train.plan import check_plan, write_plan
from outpace.train.progress import Say
from outpace.train.repeats import near_duplicates
from outpace.train.splits import check_splits
from outpace.train.starts import begin_from
from outpace.train.stopping import told
from outpace.train.text_net import TextNet
from outpace.train.tokens import TokenStore
from outpace.train.vocab import always_kept, count_tokens, coverage, reduced_vocab, size_for
from outpace.types import VocabMap


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Made:
    """A drafter that was trained, and stands in its place."""

    folder: Path
    trained: Trained
    provenance: Mapping[str, Any]
    measured: Mapping[str, Any] | None = None
    """What was measured of it, as noted in its folder; None if nothing was."""


Measure = Callable[[Path], Mapping[str, Any]]
"""Measures the drafter in a folder; gives plain values."""


def work_folder(engine: Engine) -> Path:
    """Where training for this target keeps its files unless told otherwise."""
    return data_folder() / "training" / engine.target.digest


class Pipeline:
    """One method's way from prompts to a drafter."""

    def __init__(
        self,
        engine: Engine,
        options: Options,
        *,
        prompts: Sequence[CorpusPrompt] = (),
        sources: Sequence[Source] = (),
        work: Path | None = None,
        out: Path | None = None,
        resume: bool = False,
        start: Path | None = None,
        mean_with: Sequence[Path] = (),
        say: Say = print,
    ) -> None:
        """Prepare; nothing is written yet.

        Args:
            prompts: what the target answers; none: the answers that are there already are used.
            sources: the files that prompts came from.
            work: folder of everything that is made on the way.
            out: drafter folder; None: where ``--drafter METHOD`` finds it.
            resume: go on with a training that was stopped.
            start: a drafter folder of this method and target, whose weights and vocabulary are
                where training begins.
            mean_with: more such folders of the same sizes: training begins with the mean of all weights.
                The mean of two trainings from one start guesses better than either (arXiv:2203.05482).
            say: receives progress of generating and capturing, and what is left where, if Ctrl-C
                stops it.

        Raises:
            ModelError: the target cannot serve this method.
            RequestError: neither prompts nor answers, or no chat template to ask prompts in; ``mean_with``
                without ``start``. A training that was stopped is there and ``resume`` is not given, or
                the reverse. In ``out`` is
                more than a drafter, or the work folder. A process of several has no GPU of its own.
        """
        self.engine, self.options, self.say = engine, options, say
        self.target = engine.target
        self.prompts, self.sources = prompts, sources
        self.work = work_folder(engine) if work is None else work
        self.out = home(options.method, self.target) if out is None else out
        # Whoever was started anew goes on where there is something to go on with.
        anew = restarts() > 0 and checkpoint.latest(self.folder) is not None
        self.resume, self.start = resume or anew, None if start is None else expanded(start)
        self.mean_with = tuple(map(expanded, mean_with))
        self.rank, self.world = world()
        self.taps = options.objective.taps(options.own, self.target)
        self._check()

    @property
    def folder(self) -> Path:
        return self.work / self.options.method

    @property
    def per_step(self) -> int:
        """Batches of a step, in all processes together."""
        return self.options.loop_config(1).batches or self.world

    @property
    def best(self) -> Path:
        return self.folder / "best"

    @property
    def out_is_home(self) -> bool:
        """Whether the method's name alone will find the drafter."""
        return self.out == home(self.options.method, self.target)

    @property
    def stored(self) -> TokenStore | None:
        """The answers that are there already, of whatever number."""
        if not (self.work / "tokens" / "manifest.json").is_file():
            return None
        store = TokenStore.open(self.work / "tokens")
        store.check(self.target.name, self.target.digest)
        return store

    def _check(self) -> None:
        check_device(self.target.device)
        check_destination(self.out)
        if self.best.resolve().is_relative_to(self.out.resolve()):
            raise RequestError(f"{self.out} holds the work folder {self.work}; name another one with --out")
        if self.mean_with and self.start is None:
            raise RequestError("a mean needs --start as well, which gives the vocabulary")
        method = self.options.method
        for folder in () if self.start is None else (self.start, *self.mean_with):
            read_config(find(method, self.target, str(folder)), self.target, method)
        if self.prompts:
            check_chat(self.target)
        elif self.stored is None:
            raise RequestError(
                f"no prompts, and {self.work / 'tokens'} holds no answers yet; give files with "
                "--prompts or --texts, or --self-prompts N"
            )
        last = checkpoint.latest(self.folder)
        if last is not None and not self.resume:
            raise RequestError(
                f"a training was stopped at {last}; go on with --resume, or delete {self.folder}"
            )
        if last is None and self.resume:
            raise RequestError(
                f"{self.folder} holds no training that was stopped; leave --resume out to begin "
                "one (answers and features that are there are used again)"
            )

    @cached_property
    def store(self) -> TokenStore:
        """The target's answers, generated if they are not there yet."""
        if not self.prompts or self.world > 1:
            store = self.stored
            if store is None:
                raise RequestError(
                    "several processes train on data that are there; make them "
                    "first, in one process, with --only-data"
                )
            return store
        about = {"command": command(), "sources": [one.to_json() for one in self.sources]}
        tokens = self.work / "tokens"
        with alone(self.work, f"another training makes answers in {tokens}", wait=self.say):
            remove_parts(tokens)
            return generate_answers(
                self.engine, self.prompts, tokens, self.options.data, about=about, say=self.say
            )

    @cached_property
    def features(self) -> FeatureStore | None:
        """Features of the answers; None if none are wanted. One process of several keeps none."""
        if not self.taps:
            return None
        room = 0 if self.world > 1 else round(self.options.pipeline.feature_gb * 1e9)
        return FeatureStore(self.target, self.work / "tokens", self.taps, room, TextNet.on_gpu(self.target))

    @cached_property
    def vocab(self) -> VocabMap | None:
        """The draft vocabulary; None: the target's whole. With a start it is that drafter's, unless so much
        coverage is asked for.
        """
        if self.start is not None and not self.options.pipeline.coverage:
            return vocab_map(read_tensors(self.start), self.target.vocab_size)
        size = self.options.pipeline.vocab
        if size is None or size >= self.target.vocab_size:
            return None
        counts, kept = count_tokens(self.store, self.target.vocab_size), always_kept(self.target)
        if wanted := self.options.pipeline.coverage:
            held = count_tokens(self.store, self.target.vocab_size, held_out=True)
            size = size_for(counts, held, size, wanted, kept)
        return reduced_vocab(counts, size, kept)

    def batches(self, split: Split) -> Batches:
        """Batches of this process, as training reads them."""
        pipeline = self.options.pipeline
        features: Features | None = self.features
        return Batches(
            self.store,
            pipeline.tokens_per_batch,
            int(dict(self.options.loop).get("seed", 0)),
            split=split,
            features=features,
            taps=self.taps,
            max_length=pipeline.max_length,
            rank=self.rank,
            world=self.world,
            per_step=self.per_step if split == "train" else None,
            most_tokens=None if split == "train" else self.options.loop_config(1).evaluate_tokens,
        )

    def check_prompts(self) -> None:
        """Refuse prompts of which none would be learned from, or none held out; RequestError."""
        if self.world == 1:
            longest = min(self.options.pipeline.max_length, self.options.pipeline.tokens_per_batch)
            check_splits(self.target, self.prompts, self.stored, self.options.data, longest, self.say)

    def data(self) -> None:
        """Make answers; what is there is not made again. Waits for another training that makes some.

        Raises:
            KeyboardInterrupt: as ``run``.
        """
        with self._told():
            self._data()

    def _told(self) -> contextlib.AbstractContextManager[None]:
        say: Say = self.say if self.rank == 0 else lambda line: None
        return told(say, lambda: checkpoint.kept(self.folder, self.best))

    def _data(self) -> None:
        _ = self.store
        self.engine.cache = self.target.new_cache()  # keys and values of generation are large

    def run(self, report: Callable[[Progress], None] = print, measure: Measure | None = None) -> Made:
        """Do all that is left to do. ``out`` is replaced at the very end, in one step.

        Args:
            measure: what it gives is noted in the drafter's provenance. The leading process calls
                it when the drafter is trained, with the folder where it still is.

        Raises:
            OutpaceError: in one line, whatever of it cannot be, or another training works in the same folder;
                what was done stays.
            KeyboardInterrupt: after ``say`` was told what was kept and how to go on.
        """
        with self._told():
            if self.prompts:
                self.options.trial(self.target)  # refuses what cannot be, before hours of answers
                self.check_prompts()
            busy = f"another training works in {self.folder}; wait for it, or give another --work"
            with alone(self.folder, busy) if self.rank == 0 else contextlib.nullcontext():
                return self._run(report, measure)

    def _run(self, report: Callable[[Progress], None], measure: Measure | None) -> Made:
        self._data()
        source, held_out = self.batches("train"), self.batches("held_out")
        loop = self.options.loop_config(source.count(0) // source.share)
        provenance = self.provenance()
        self._guard(provenance)
        objective = self.options.objective.build(self.options.own, self.target, self.vocab)
        if self.start is not None:
            begin_from(objective, self.start, *self.mean_with)
        if self.features is not None and (loop.steps or 0) >= source.count(0) // source.share:
            self.features.fill(source.texts, self.say)
        trained = train(
            objective,
            source,
            held_out,
            loop,
            out=self.best,
            work=self.folder,
            device=self.target.device,
            provenance=provenance,
            resume=self.resume,
            report=report,
            say=self.say,
        )
        if self.features is not None:
            self.features.flush()
        measured = None
        if self.rank == 0:
            if measure is not None:
                measured = measure(self.best)
                note_measured(self.best, measured)
            install_folder(self.best, self.out)
            for path in checkpoint.paths(self.folder):
                path.unlink()
            shutil.rmtree(self.best)
        return Made(folder=self.out, trained=trained, provenance=provenance, measured=measured)

    def provenance(self) -> dict[str, Any]:
        """What the drafter is made of, as plain values."""
        held = count_tokens(self.store, self.target.vocab_size, held_out=True)
        size = self.target.vocab_size if self.vocab is None else len(self.vocab.to_target_D)
        about = self.store.manifest["about"]
        return {
            "command": command(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {"outpace": __version__, "torch": str(torch.__version__)},
            "target": {"name": self.target.name, "digest": self.target.digest},
            "data": {
                "digest": self.store.digest,
                **self.store.manifest["counts"],
                "near_duplicates": int(near_duplicates(self.store).sum()),
                "plans": [
                    {key: one.get(key) for key in ("plan", "sources")} for one in about.get("plans", [])
                ],
            },
            "vocab": {
                "size": size,
                "held_out_coverage": 1.0 if self.vocab is None else coverage(held, self.vocab),
            },
            "settings": self.options.to_json(),
            **({} if self.start is None else {"start": self._start()}),
        }

    def _start(self) -> dict[str, Any]:
        """Where training began, and all that its own provenance tells."""
        assert self.start is not None
        first, *others = [
            {
                "sha256": hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest(),
                "provenance": read_json(folder / PROVENANCE),
            }
            for folder in (self.start, *self.mean_with)
        ]
        return {**first, "mean_with": others} if others else first

    def _guard(self, provenance: Mapping[str, Any]) -> None:
        """Refuse to go on with other settings or data than a training began with."""
        plan = {
            "target": provenance["target"]["digest"],
            "data": provenance["data"]["digest"],
            "batches of a step": self.per_step,
            **provenance["settings"],
            "start": provenance.get("start", {}).get("sha256"),
            "mean_with": [one["sha256"] for one in provenance.get("start", {}).get("mean_with", ())],
        }
        if self.resume:
            check_plan(self.folder, plan)
        elif self.rank == 0:
            if self.best.is_dir():
                shutil.rmtree(self.best)  # of a training that nothing is left of to go on with
            write_plan(self.folder, plan)

    def held_out_prompts(self, limit: int) -> list[tuple[int, ...]]:
        """Token ids of prompts that were kept from training, short and long ones."""
        found = {
            tuple(one.ids[: one.prompt].tolist()): None
            for one, held in zip(self.store, self.store.held_out_S, strict=True)
            if held and one.prompt
        }
        return evenly(sorted(found, key=lambda ids: (len(ids), ids)), limit)


def note_measured(folder: Path, measured: Mapping[str, Any]) -> None:
    """Add a measurement to the provenance of a drafter."""
    path = folder / PROVENANCE
    content = parse_json(path.read_bytes())
    content["measured"] = dict(measured)
    write_whole(path, json.dumps(content, indent=1) + "\n")


def command() -> str:
    return shlex.join(["outpace", *sys.argv[1:]])


def made_to_json(made: Made) -> dict[str, Any]:
    """Plain values for ``--json``."""
    best = None if made.trained.best is None else asdict(made.trained.best)
    return {
        "folder": str(made.folder),
        "steps": made.trained.steps,
        "best_step": made.trained.best_step,
        "stopped_early": made.trained.stopped_early,
        "held_out": best,
        "provenance": dict(made.provenance),
    }
