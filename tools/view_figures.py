"""Measures views of long texts: cost of a pass, acceptance, speed-up, and what a lossy view loses.

    .venv/bin/python tools/view_figures.py --texts FOLDER --out figures.json

FOLDER holds texts (*.txt). Three tasks per context: going on with a text; a fact hidden in it; a question
about its passages. Each prompt is read once; every method then goes on from there, in turns, so that its
seconds (of the processor) compare with those of plain decoding. Lossy views are fed what the target itself
writes, and compared with it token by token: KL(target || view) in nats.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outpace import Engine
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.files import replaced
from outpace.params import SamplingParams
from outpace.policies.fixed import Fixed, FixedConfig
from outpace.sampling import Warp
from outpace.step import Machine, Member, step
from outpace.types import Budget, Feed, Outcome, StepRecord

METHODS = (
    "none",
    "recycling",
    "window_self[window=240 tree_size=2]",
    "window_self[tree_size=2]",
    "window_self[window=1008 tree_size=2]",
    "token_select[budget=256 tree_size=2]",
    "token_select[budget=512 tree_size=2]",
    "token_select[tree_size=2]",
    "token_select[copies=false tree_size=2]",
    "token_select[run=32 copies=false tree_size=2]",
    "triforce",
    "triforce[draft=recycling]",
)
LOSSY = (512, 1024, 2048)
FACT, ASKED = "The secret number of the lighthouse is 48213.", "What is the secret number of the lighthouse?"


@dataclass(eq=False)
class Row:
    """One sequence as a step sees it."""

    slot: int
    tokens: list[int]
    warp: Warp
    members: dict[str, Member]
    verifier: Any
    policy_state: Any
    longest: int
    number: int = 0
    failed: bool = False
    read_prompt: Any = None
    kept: list[int] = field(default_factory=list)

    def coins(self, stream: Stream) -> KeyedCoins:
        return KeyedCoins(0, len(self.tokens) - 1, stream)

    def room(self) -> Budget:
        return Budget(1 << 10, 1 << 10)

    def cut(self, verdict: Any) -> Any:
        return verdict

    def extend(self, outcome: Outcome) -> None:
        self.tokens.extend(outcome.verdict.emitted)
        self.warp.advance(outcome.verdict.emitted)
        self.kept.append(len(outcome.verdict.kept))

    def fail(self, error: Exception) -> None:
        raise error


class Bench:
    def __init__(self, engine: Engine, new: int) -> None:
        self.engine, self.target, self.new = engine, engine.target, new
        self.cache = self.target.new_cache(8192)
        self.slot = self.cache.open()

    def read(self, prompt: Sequence[int], folder: Path | None) -> None:
        """Read all of a prompt but its last token; go on where an earlier run stopped."""
        digest = hashlib.sha256(repr(list(prompt)).encode()).hexdigest()[:12]
        file = None if folder is None else folder / f"{self.target.digest}-{digest}.pt"
        self.cache.close(self.slot)
        self.slot = self.cache.open()
        if file is not None and file.exists():
            part = torch.load(file)
            self.cache.restore(self.slot, prompt[: part[1].shape[-2]], [part])
        for at in range(self.cache.length(self.slot), len(prompt) - 1, 256):
            fed = prompt[at : min(at + 256, len(prompt) - 1)]
            self.target.score([Feed.chain(self.slot, fed, want=())], self.cache)
            self.cache.keep(self.slot, range(len(fed)))
            length = self.cache.length(self.slot)
            if file is not None and (length % 1024 == 0 or length == len(prompt) - 1):
                with replaced(file) as fresh:
                    torch.save(self.cache.copy(self.slot, 0, length), fresh)

    def run(self, spec: str, prompt: Sequence[int]) -> dict[str, Any]:
        """Go on from a prompt that was read."""
        self.cache.truncate(self.slot, len(prompt) - 1)
        method = self.engine.method(spec).preferred
        drafter = method.drafter
        state = drafter.begin(Request(prompt=tuple(prompt), num_cached=len(prompt) - 1))
        warp = Warp(SamplingParams(temperature=0.0), tuple(prompt), frozenset(), self.target.vocab_size)
        member = Member(state, method.budget, method.verifier)
        row = Row(self.slot, list(prompt), warp, {spec: member}, method.verifier, None, self.new)
        records: list[StepRecord] = []
        machine = Machine(
            self.target, self.cache, {spec: drafter}, Fixed(FixedConfig()), listeners=[records.append]
        )
        began = time.process_time(), time.perf_counter()
        while len(row.tokens) < len(prompt) + self.new:
            step(machine, [row])
        seconds = time.process_time() - began[0], time.perf_counter() - began[1]
        drafter.end(state)
        new = len(row.tokens) - len(prompt)
        return {
            "tokens": row.tokens[len(prompt) :][: self.new],
            "cpu_ms": 1e3 * seconds[0] / new,
            "wall_ms": 1e3 * seconds[1] / new,
            "emitted": new / len(row.kept),
            "accepted": sum(row.kept) / max(1, sum(r.rows[0].drafted for r in records)),
        }

    def lossy(self, budget: int, run: int, prompt: Sequence[int], text: Sequence[int]) -> dict[str, float]:
        """KL of a lossy view along a text, and the seconds of its tokens against those of the target."""
        self.cache.truncate(self.slot, len(prompt) - 1)
        spec = f"token_select[budget={budget} run={run} lossy=true]"
        drafter = self.engine.method(spec).preferred.drafter
        other = self.cache.open()
        self.cache.restore(other, self.cache.ids(self.slot), [self.cache.copy(self.slot, 0, len(prompt) - 1)])
        looks = drafter.begin(Request(prompt=tuple(prompt))).seeing
        divergence, agree, spent = [], 0, [0.0, 0.0]
        for token in [prompt[-1], *text[:-1]]:
            logits = []
            for i, slot in enumerate((self.slot, other)):
                view = looks.look(self.cache.length(slot)) if i else None
                began = time.process_time()
                got = self.target.score([Feed(slot, (token,), (-1,), view=view)], self.cache).logits_TV[0]
                spent[i] += time.process_time() - began
                logits.append(got.double().log_softmax(0))
                self.cache.keep(slot, [0])
            full_V, part_V = logits
            divergence.append(float((full_V.exp() * (full_V - part_V)).sum()))
            agree += int(full_V.argmax() == part_V.argmax())
        self.cache.close(other)
        return {
            "kl": statistics.mean(divergence),
            "kl_median": statistics.median(divergence),
            "agree": agree / len(divergence),
            "speedup": spent[0] / spent[1],
        }


def prompts(engine: Engine, texts: Sequence[str], context: int, seed: int) -> dict[str, list[int]]:
    """A prompt of ``context`` tokens for every task."""
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(texts[seed % len(texts)][seed * 40_000 :][: 8 * context])

    def asked(body: Sequence[int], fact: str, question: str) -> list[int]:
        head = tokenizer.encode("<|im_start|>user\n")
        tail = tokenizer.encode(f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n")
        told = tokenizer.encode(f" {fact} ") if fact else []
        room = context - len(head) - len(tail) - len(told)
        return [*head, *body[: room // 2], *told, *body[room // 2 : room], *tail]

    return {
        "continue": ids[:context],
        "fact": asked(ids, FACT, ASKED),
        "question": asked(ids, "", "What do the passages above say? Answer in a few sentences."),
    }


def costs(bench: Bench, contexts: Sequence[int]) -> list[dict[str, Any]]:
    """Milliseconds of the processor for a pass: least of some, over text that is there already."""
    out = []
    for context in contexts:
        if bench.cache.length(bench.slot) < context:
            continue
        bench.cache.truncate(bench.slot, context)
        feeds = {f"full, {n} rows": (n, None) for n in (1, 2, 3, 4)}
        for budget in (256, 512, 1024):
            for run in (1, 32):
                spec = f"token_select[budget={budget} run={run}]"
                seeing = bench.engine.method(spec).preferred.drafter.begin(Request(prompt=())).seeing
                feeds[f"{budget} seen by {run}, choosing"] = 1, seeing.choice.view(context, choose=True)
                feeds[f"{budget} seen by {run}"] = 1, seeing.choice.view(context)
        least: dict[str, float] = {}
        for _ in range(6):
            for name, (rows, view) in feeds.items():
                feed = Feed(bench.slot, (5,) * rows, tuple(range(-1, rows - 1)), view=view)
                began = time.process_time()
                bench.target.score([feed], bench.cache)
                least[name] = min(least.get(name, 1e9), 1e3 * (time.process_time() - began))
                bench.cache.drop(bench.slot)
        out.append({"context": context, "cpu_ms": {name: round(ms, 2) for name, ms in least.items()}})
        print(json.dumps(out[-1]), flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--contexts", default="2048,4096,8000")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tasks", default="continue,fact,question")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kept", type=Path, help="folder for the keys and values of prompts")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = [file.read_text(encoding="utf-8") for file in sorted(args.texts.glob("*.txt"))]
    engine = Engine.load(args.model, drafter="none", allow_lossy=True)
    bench, runs = Bench(engine, args.tokens), list[dict[str, Any]]()
    contexts = [int(one) for one in args.contexts.split(",")]
    measured: list[dict[str, Any]] = []
    for context in sorted(contexts, reverse=True):
        for seed in range(args.repeats):
            for task, prompt in prompts(engine, texts, context, seed).items():
                if task not in args.tasks.split(","):
                    continue
                bench.read(prompt, args.kept)
                plain: list[int] = []
                for spec in args.methods.split(","):
                    base, got = bench.run("none", prompt), bench.run(spec, prompt)
                    plain = base.pop("tokens")
                    got["same"] = got.pop("tokens") == plain
                    got |= {"context": context, "task": task, "method": spec}
                    got["speedup"] = base["cpu_ms"] / got["cpu_ms"]
                    got["found"] = "48213" in engine.target.tokenizer.decode(plain)
                    runs.append(got)
                    print(json.dumps(got), flush=True)
                for budget in LOSSY:
                    for run in (1, 32):
                        if budget < context:
                            got = bench.lossy(budget, run, prompt, plain)
                            got |= {"context": context, "task": task, "lossy": budget, "run": run}
                            runs.append(got)
                            print(json.dumps(got), flush=True)
                if not measured:
                    measured = costs(bench, sorted(one - 1 for one in contexts))
                args.out.write_text(
                    json.dumps({"passes": measured, "runs": runs}, indent=1), encoding="utf-8"
                )


if __name__ == "__main__":
    main()
