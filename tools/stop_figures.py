"""Measures what ending texts at doubtful tokens saves and loses, by the classifier of `sec` or probability.

    python tools/stop_figures.py --texts a.py b.py --out docs/results/stops.md --plot docs/images

Files are cut at places drawn by a seed. The model completes what stands before; the file says what should
follow. A text is right as long as it is the file's, token by token. Every completion is written plainly, and
rules are then asked about each of its tokens. Those of one threshold are run with the drafter, and must end
where that says.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pages import publish, told, tool

from outpace import Engine
from outpace.bench.plots import COLOURS, MARKERS
from outpace.files import read_text
from outpace.methods.s2d.sec_drafter import unsure
from outpace.types import Feed

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
RULES = ("classifier", "probability")
LEAST, CONTEXT = 50, 256
"""Tokens of a file before a cut."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model wrote in one place."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    right: int
    """First tokens that are those of the file."""
    doubt: dict[str, list[float]]
    """Rule -> how doubtful each token is; the first one, which ends nothing, is not."""

    def shown(self, rule: str, threshold: float) -> tuple[int, int]:
        """Tokens generated, and of these the ones shown: the doubted one is not."""
        for i, one in enumerate(self.doubt[rule]):
            if one > threshold:
                return i + 1, i
        return len(self.tokens), len(self.tokens)


def places(
    engine: Engine, files: Sequence[Path], each: int, tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    """What stands before some places of each file, and what follows."""
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    for file in files:
        ids = tokenizer.encode(read_text(file))
        coins = random.Random(file.name)
        for at in sorted(coins.sample(range(LEAST, len(ids) - tokens), each)):
            yield ids[max(0, at - CONTEXT) : at], ids[at : at + tokens]


def completions(
    engine: Engine, spec: str, pairs: Sequence[tuple[list[int], list[int]]], tokens: int
) -> list[Completion]:
    """Plain completions, and how doubtful their tokens are."""
    drafter: Any = engine.method(spec).preferred.drafter
    prompts = [prompt for prompt, _ in pairs]
    texts = engine.generate(prompts, drafter="none", temperature=0, max_new_tokens=tokens)
    found = []
    for (prompt, truth), result in zip(pairs, texts, strict=True):
        right = next(
            (i for i, pair in enumerate(zip(result.tokens, truth, strict=False)) if pair[0] != pair[1]),
            len(result.tokens),
        )
        cache, first = engine.target.new_cache(), len(prompt) - 1
        feed = Feed.chain(cache.open(), [*prompt, *result.tokens[:-1]])
        n_TH = engine.target.score([feed], cache, taps=frozenset({"hidden.-1"})).taps["hidden.-1"][first:]
        odds_T = unsure(engine.target.head(n_TH))
        wrong = drafter.classes(-1, n_TH, odds_T)[:, 0].tolist()
        doubt = {RULES[0]: [0.0, *wrong[1:]], RULES[1]: [0.0, *odds_T.sigmoid().tolist()[1:]]}
        found.append(Completion(tuple(prompt), result.tokens, right, doubt))
    return found


def figures(found: Sequence[Completion], rule: str, threshold: float) -> dict[str, float]:
    """Shares, over all completions."""
    cuts = [one.shown(rule, threshold) for one in found]
    right = sum(min(shown, one.right) for one, (_, shown) in zip(found, cuts, strict=True))
    return {
        "saved": 1 - sum(made for made, _ in cuts) / sum(len(one.tokens) for one in found),
        "kept": right / max(1, sum(one.right for one in found)),
        "right": right / max(1, sum(shown for _, shown in cuts)),
        "ended": sum(
            made < len(one.tokens) or shown < made for one, (made, shown) in zip(found, cuts, strict=True)
        )
        / len(found),
    }


def rerun(
    engine: Engine, spec: str, found: Sequence[Completion], threshold: float, tokens: int
) -> tuple[int, Any]:
    """How many completions end where they should if the drafter runs, and its counts."""
    own = spec.partition("[")[2].removesuffix("]")
    spec = f"sec[{own} stop={threshold}]"
    prompts = [list(one.prompt) for one in found]
    results = engine.generate(prompts, drafter=spec, temperature=0, max_new_tokens=tokens)
    wanted = [one.tokens[: one.shown(RULES[0], threshold)[0]] for one in found]
    same = sum(result.tokens == want for result, want in zip(results, wanted, strict=True))
    passes = sum(one.counters.passes for one in results)
    return same, sum(one.counters.new_tokens - 1 for one in results) / max(1, passes)


def page(args: argparse.Namespace, engine: Engine, found: Sequence[Completion]) -> Iterator[str]:
    """The lines of the report."""
    files = " ".join(file.name for file in args.texts)
    yield "# Ending completions of code at doubtful tokens\n"
    yield told(
        f"{engine.target.name}, temperature 0, {len(found)} completions of at most {args.tokens} tokens, at "
        "drawn places of files that the drafter was not trained on."
    )
    yield f"```text\npython tools/stop_figures.py --texts {files} --each {args.each}\n```\n"
    whole, right = sum(len(one.tokens) for one in found), sum(one.right for one in found)
    yield told(
        f"The model writes {whole} tokens, of which {right} come before its first difference from the file. "
        "*Saved* are tokens not written. *Kept* is the share of right tokens that are still shown, *right* "
        "the share of shown tokens that are right. The rule on the right-hand side doubts a token by 1 minus "
        "the probability that the model gives it, and needs no training."
    )
    yield "![Tokens saved against right text kept](../images/stops.svg)\n"
    yield "| threshold | classifier: saved | kept | right | probability: saved | kept | right |"
    yield "|---|---|---|---|---|---|---|"
    for threshold in THRESHOLDS:
        cells = []
        for rule in RULES:
            one = figures(found, rule, threshold)
            cells += [f"{100 * one[key]:.0f} %" for key in ("saved", "kept", "right")]
        yield f"| {threshold:g} | " + " | ".join(cells) + " |"
    yield ""
    some, emitted = rerun(engine, args.drafter, found, args.stop, args.tokens)
    whole_run, more = rerun(engine, args.drafter, found, 1.0, args.tokens)
    yield told(
        f"Run with the drafter at {args.stop:g}, {some} of {len(found)} completions end where the table says "
        f"({emitted:.2f} tokens per pass). At 1, {whole_run} of {len(found)} are the plain completions, "
        f"token by token ({more:.2f} tokens per pass)."
    ).rstrip()


def picture(figure: Any, found: Sequence[Completion]) -> bool:
    """Tokens saved by right text kept, one line per rule."""
    figure.set_size_inches(6, 4)
    axes = figure.add_subplot()
    for i, rule in enumerate(RULES):
        line = [figures(found, rule, 0.02 * step) for step in range(51)]
        x, y = [100 * one["kept"] for one in line], [100 * one["saved"] for one in line]
        axes.plot(x, y, color=COLOURS[i], lw=1.6, marker=MARKERS[i], ms=3, label=rule)
    axes.set_xlabel("right text kept, %")
    axes.set_ylabel("tokens saved, %")
    axes.legend()
    return True


@tool
def main() -> None:
    """Complete, count, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="sec", help="sec, with settings other than stop")
    parser.add_argument(
        "--texts", type=Path, nargs="+", required=True, help="code that it was not trained on"
    )
    parser.add_argument("--each", type=int, default=24, help="places of each file")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--stop", type=float, default=0.8, help="threshold that is run with the drafter too")
    parser.add_argument("--plot", type=Path, help="folder for the picture")
    parser.add_argument("--out", type=Path, help="write the page, besides printing it")
    args = parser.parse_args()
    engine = Engine.load(args.model, drafter="none", allow_lossy=True)
    found = completions(
        engine, args.drafter, list(places(engine, args.texts, args.each, args.tokens)), args.tokens
    )
    publish(page(args, engine, found), args.out, {"stops": partial(picture, found=found)}, args.plot)


if __name__ == "__main__":
    sys.exit(main())
