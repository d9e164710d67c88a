"""Measures views of long texts: cost of a pass, acceptance, speed-up, and what a lossy view loses.

    python tools/view_figures.py --texts a.txt b.jsonl --keep rows.jsonl --kept FOLDER --minutes 3
    python tools/view_figures.py --keep rows.jsonl --out docs/results/views.md --plot docs/images

Texts are files (*.txt), or rows with ``text``, or rows with ``query`` and ``docs``. Three tasks per text and
context: going on with it; a fact hidden near its beginning; a question, that of the first passages where
rows have one. A text is read once; shorter contexts are its beginning. Every method goes on from there, in
turns with plain decoding, so that its seconds of the processor compare. Lossy views are fed what the target
itself writes, and compared with it token by token: KL(target || view) in nats.

Rows that ``--keep`` holds are not measured again, so a run may end after ``--minutes`` and go on later.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from view_report import page, paint_views

from outpace import Engine
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.files import parse_json, read_text, replaced, write_whole
from outpace.machine import Machine, Member
from outpace.models.views import Choice
from outpace.params import SamplingParams
from outpace.policies.fixed import Fixed, FixedConfig
from outpace.sampling import Warp
from outpace.step import step
from outpace.types import Budget, Feed, Outcome, StepRecord

METHODS = (
    "none",
    "window_self[tree_size=2]",
    "token_select[budget=256 tree_size=2]",
    "token_select[tree_size=2]",
    "token_select[budget=1024 tree_size=2]",
    "triforce[draft=recycling]",
)
LOSSY = (512, 1024, 2048)
RULES = (
    "read=8",
    "read=16",
    "",
    "read=32",
    "read=0",
    "run=64",
    "run=16",
    "run=8",
    "run=1 read=0",
    "every=2",
    "every=8",
)
"""Other settings of a lossy view of 1024 tokens, on the files' own text at the longest context."""
FACT, ASKED, NUMBER = (
    " The secret number of the lighthouse is 48213. ",
    "What is the secret number of the lighthouse?",
    "48213",
)
SAID = "The secret number of the lighthouse is "
"""How an answer to it begins."""
HIDDEN, TAIL = 300, 64
"""Tokens of the text before the fact, and room for a question behind it."""


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

    def read(self, tokens: Sequence[int]) -> None:
        """Have the slot hold these tokens; it keeps what it holds of them."""
        held = list(self.cache.ids(self.slot))
        same = next(
            (i for i, pair in enumerate(zip(held, tokens, strict=False)) if pair[0] != pair[1]), len(held)
        )
        self.cache.truncate(self.slot, min(same, len(tokens)))
        for at in range(self.cache.length(self.slot), len(tokens), 256):
            fed = tokens[at : min(at + 256, len(tokens))]
            self.target.score([Feed.chain(self.slot, fed, want=())], self.cache)
            self.cache.keep(self.slot, range(len(fed)))

    def begin(self, tokens: Sequence[int], folder: Path | None) -> None:
        """Read a text, or take what an earlier run kept of it."""
        digest = hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:12]
        file = None if folder is None else folder / f"{self.target.digest}-{digest}.pt"
        self.cache.close(self.slot)
        self.slot = self.cache.open()
        if file is not None and file.exists():
            self.cache.restore(self.slot, list(tokens), [torch.load(file)])
            return
        self.read(tokens)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replaced(file) as fresh:
                torch.save(self.cache.copy(self.slot, 0, len(tokens)), fresh)

    def run(self, spec: str, prompt: Sequence[int]) -> dict[str, Any]:
        """Go on from a prompt that was read."""
        self.cache.truncate(self.slot, len(prompt) - 1)
        method = self.engine.method(spec).preferred
        drafter = method.drafter
        drafter.traits = replace(drafter.traits, least_context=0)  # also where it would propose nothing
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

    def lossy(
        self, settings: str, prompt: Sequence[int], text: Sequence[int], judged: int | None = None
    ) -> dict[str, float]:
        """KL of a lossy view along a text, and the seconds of its tokens against those of the target.

        Args:
            settings: of the view.
            judged: so many last tokens of the text are to be told; what both lose on each, in nats.
        """
        self.cache.truncate(self.slot, len(prompt) - 1)
        spec = f"token_select[{settings} lossy=true]"
        drafter = self.engine.method(spec).preferred.drafter
        other = self.cache.open()
        self.cache.restore(other, self.cache.ids(self.slot), [self.cache.copy(self.slot, 0, len(prompt) - 1)])
        looks = drafter.begin(Request(prompt=tuple(prompt))).seeing
        divergence, agree, spent = [], 0, [0.0, 0.0]
        told: list[tuple[float, float]] = []
        for token, following in zip([prompt[-1], *text[:-1]], text, strict=True):
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
            told.append((-float(full_V[following]), -float(part_V[following])))
        self.cache.close(other)
        full, part = zip(*told[-(judged or len(told)) :], strict=True)
        return {
            "truth": statistics.fmean(full),
            "truth_seen": statistics.fmean(part),
            "kl": statistics.mean(divergence),
            "kl_median": statistics.median(divergence),
            "agree": agree / len(divergence),
            "speedup": spent[0] / spent[1],
        }


@dataclass(frozen=True)
class Text:
    name: str
    ids: list[int]
    """The beginning of a user's turn, with the fact in it."""
    question: str


def sources(engine: Engine, files: Sequence[Path], longest: int) -> Iterator[Text]:
    """Texts that are long enough; a file of passages, or of many short texts, gives one."""
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    head, fact = tokenizer.encode("<|im_start|>user\n"), tokenizer.encode(FACT)
    for file in files:
        question, text = "What do the passages above say? Answer in a few sentences.", read_text(file)
        if file.suffix == ".jsonl":
            rows = [parse_json(line) for line in text.splitlines() if line.strip()]
            if "docs" in rows[0]:
                question = f"Use the passages above to answer: {rows[0]['query']}"
            text = "\n\n".join(part for row in rows[:100] for part in row.get("docs") or [row["text"]])
        body = tokenizer.encode(text[: 8 * longest])
        ids = [*head, *body[:HIDDEN], *fact, *body[HIDDEN:]][: longest - TAIL]
        if len(ids) < longest - TAIL:
            sys.exit(f"{file} has {len(body)} tokens; give texts of {longest}")
        yield Text(file.name, ids, question)


def prompts(engine: Engine, text: Text, context: int) -> dict[str, list[int]]:
    """A prompt of about ``context`` tokens for every task."""
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    whole = text.ids[: context - TAIL]

    def asked(question: str) -> list[int]:
        return [*whole, *tokenizer.encode(f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n")]

    return {"continue": whole, "fact": asked(ASKED), "question": asked(text.question)}


def true(engine: Engine, prompt: list[int], task: str, most: int) -> tuple[list[int], list[int], int]:
    """A prompt, what is true behind it, and how many last tokens of that are to be told."""
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    if task == "continue":
        return prompt[:-most], prompt[-most:], most
    said, number = tokenizer.encode(SAID), tokenizer.encode(NUMBER)
    return prompt, [*said, *number], len(number)


def costs(bench: Bench, context: int) -> dict[str, float]:
    """Milliseconds of the processor for a pass: least of some, over text that is there already."""
    feeds: dict[str, tuple[int, Choice | None, bool]] = {
        f"full, {n} rows": (n, None, False) for n in (1, 2, 3, 4)
    }
    for budget in (256, 512, 1024):
        if budget < context:
            spec = f"token_select[budget={budget}]"
            seeing = bench.engine.method(spec).preferred.drafter.begin(Request(prompt=())).seeing
            feeds[f"{budget} seen, choosing"] = 1, seeing.choice, True
            feeds[f"{budget} seen"] = 1, seeing.choice, False
    least: dict[str, float] = {}
    for _ in range(6):
        for name, (rows, choice, anew) in feeds.items():
            if choice is not None and anew:
                choice.forget()  # the same token would keep it
            view = None if choice is None else choice.view(context)
            feed = Feed(bench.slot, (5,) * rows, tuple(range(-1, rows - 1)), view=view)
            began = time.process_time()
            bench.target.score([feed], bench.cache)
            least[name] = min(least.get(name, 1e9), 1e3 * (time.process_time() - began))
            bench.cache.drop(bench.slot)
    return least


class Rows:
    """What was measured, a line each, in a file that later runs add to."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = read_text(file).splitlines() if file.exists() else []
        self.all: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, **key: Any) -> bool:
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.all)

    def add(self, row: dict[str, Any]) -> None:
        self.all.append(row)
        write_whole(self.file, "".join(json.dumps(one) + "\n" for one in self.all))
        print(json.dumps(row), flush=True)


def measure(engine: Engine, args: argparse.Namespace, rows: Rows) -> None:
    """Add rows until all are there, or the time is over."""
    began, bench = time.monotonic(), Bench(engine, args.tokens)
    got: dict[str, Any]
    contexts = sorted(args.contexts, reverse=True)
    for text in sources(engine, args.texts, contexts[0]):
        wanted = [
            (context, task, spec)
            for context in contexts
            for task in ("continue", "fact", "question")
            for spec in (
                *args.methods,
                *(f"lossy {budget}" for budget in LOSSY if max(4096, 3 * budget) <= context),
                *(f"score {budget}" for budget in LOSSY if max(4096, 3 * budget) <= context),
                *(
                    f"rule {one}"
                    for one in RULES
                    if (context, task) == (contexts[0], "continue") and context > 4096
                ),
            )
            if not (spec.startswith("score") and task == "question")
        ]
        wanted = [
            (context, task, spec)
            for context, task, spec in wanted
            if not rows.has(text=text.name, context=context, task=task, method=spec)
        ]
        if not wanted and not args.only_read:
            continue
        bench.begin(text.ids, args.kept)
        if args.only_read:
            continue
        for context, task, spec in wanted:
            if time.monotonic() - began > 60 * args.minutes:
                return
            if not rows.has(pass_at=context):
                bench.read(text.ids[: context - TAIL])
                rows.add({"pass_at": context, "cpu_ms": costs(bench, context - TAIL)})
            prompt = prompts(engine, text, context)[task]
            kind, _, settings = spec.partition(" ")
            settings = f"budget=1024 {settings}" if kind == "rule" else f"budget={settings}"
            if kind in ("score", "rule"):
                prompt, following, judged = true(engine, prompt, task, args.tokens)
                bench.read(prompt[:-1])
                got = bench.lossy(settings, prompt, following, judged)
                rows.add({"text": text.name, "context": context, "task": task, "method": spec, **got})
                continue
            bench.read(prompt[:-1])
            base = bench.run("none", prompt)
            if kind == "lossy":
                got = bench.lossy(settings, prompt, base["tokens"])
            else:
                got = bench.run(spec, prompt)
                got["same"] = got.pop("tokens") == base["tokens"]
                got["speedup"] = base["cpu_ms"] / got["cpu_ms"]
            got["found"] = NUMBER in engine.target.tokenizer.decode(base["tokens"])  # type: ignore[union-attr]
            rows.add({"text": text.name, "context": context, "task": task, "method": spec, **got})


def main() -> None:
    """Measure, then write what there is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=Path, nargs="+", default=[])
    parser.add_argument(
        "--contexts", type=lambda one: [int(part) for part in one.split(",")], default="1024,2048,4096,8000"
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--kept", type=Path, help="folder for the keys and values of texts")
    parser.add_argument("--only-read", action="store_true", help="read the texts into --kept, and leave")
    parser.add_argument("--keep", type=Path, required=True, help="file of measured rows, added to")
    parser.add_argument("--plot", type=Path, help="folder for the picture")
    parser.add_argument("--out", type=Path, help="write the page")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = Rows(args.keep)
    if args.texts:
        measure(Engine.load(args.model, drafter="none", allow_lossy=True), args, rows)
    if args.out is not None:
        write_whole(args.out, "\n".join(page(rows.all)) + "\n")
    if args.plot is not None:
        paint_views(rows.all, args.plot)


if __name__ == "__main__":
    main()
