"""Tokens per pass and per second by turn of conversations (docs/how/trained-drafters.md).

    python tools/conversation_turns.py none eagle3 auto --dtype bfloat16
    python tools/conversation_turns.py eagle3 --dtype bfloat16 --without-store

A second includes the reading of what is new in a turn.
"""

import argparse
import time

from outpace import Engine
from outpace.bench.workloads import builtin
from outpace.drafters import feature_rows
from outpace.engine.conversation import Conversation
from outpace.params import SamplingParams

KINDS = ("chat", "summarise", "extract", "edit", "passages")
LATER = (
    "Now write it once more, a little longer and with other words.",
    "Give me the three most important points.",
)


def main() -> None:
    """Hold the conversations with every drafter, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, default=8, help="prompts of a kind")
    parser.add_argument("--without-store", action="store_true", help="keep no rows of prefixes for heads")
    given = parser.parse_args()
    if given.without_store:
        feature_rows._PIECES = 0
    prompts = []
    for kind in KINDS:
        own = [one.messages[0]["content"] for one in builtin() if one.category == kind]
        prompts += own[: given.limit]
    target = Engine.load("smollm2-135m", dtype=given.dtype, drafter="none").target
    for drafter in given.drafters:
        engine = Engine.load(target, drafter=drafter)
        tokens, passes, seconds = ([0.0] * (1 + len(LATER)) for _ in range(3))
        for prompt in prompts:
            with Conversation(engine, SamplingParams(max_new_tokens=64)) as talk:
                for turn, text in enumerate((prompt, *LATER)):
                    began = time.perf_counter()
                    result = list(talk.send(text))[-1].result
                    seconds[turn] += time.perf_counter() - began
                    tokens[turn] += result.counters.new_tokens - 1
                    passes[turn] += result.counters.passes
        turns = [f"{n / p:.2f} ({n / s:.0f})" for n, p, s in zip(tokens, passes, seconds, strict=True)]
        print(f"{drafter}: tokens per pass (per second) by turn: {', '.join(turns)}")


if __name__ == "__main__":
    main()
