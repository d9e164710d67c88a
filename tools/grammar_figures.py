"""Measure what drafts of a grammar bring: requests for JSON with a schema, in turns with plain decoding.

    python tools/grammar_figures.py --model smollm2-135m --repeats 5

Every request is made by every drafter in turn, in an order that changes from round to round. A ratio is the
seconds of plain decoding after the prompt, over those of the drafter. Texts at temperature 0 must be equal;
where one is not, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from typing import Any

import torch

from outpace import Engine
from outpace.engine.results import Result
from outpace.server.grammar import open_grammars
from outpace.server.structured_output import StructuredOutput


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a record": (
        "Write this person as JSON: Ann Berg, born on 1980-02-03, lives in Norway, earns 50000 euros.",
        {
            "first_name": _text(16),
            "last_name": _text(16),
            "date_of_birth": {"type": "string", "pattern": "[0-9]{4}-[0-9]{2}-[0-9]{2}"},
            "country_of_residence": {"enum": ["Norway", "Sweden", "Finland", "Denmark"]},
            "is_employed": {"type": "boolean"},
            "salary_in_euros": {"type": "integer"},
        },
    ),
    "a call of a tool": (
        "Which call of a tool answers: what is the weather in Oslo tomorrow, in celsius?",
        {
            "name": {"const": "get_weather_forecast"},
            "arguments": {
                "type": "object",
                "properties": {
                    "location_name": _text(24),
                    "number_of_days": {"type": "integer", "maximum": 14},
                    "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["location_name", "number_of_days", "temperature_unit"],
                "additionalProperties": False,
            },
        },
    ),
    "a review": (
        "Rate this review as JSON: The food was cold and the waiter rude, but the view is lovely.",
        {
            "overall_sentiment": {"enum": ["positive", "negative", "mixed"]},
            "food_rating": {"type": "integer", "minimum": 1, "maximum": 5},
            "service_rating": {"type": "integer", "minimum": 1, "maximum": 5},
            "atmosphere_rating": {"type": "integer", "minimum": 1, "maximum": 5},
            "would_recommend": {"type": "boolean"},
            "short_summary": _text(60),
        },
    ),
    "free text": ("Write one sentence about lighthouses, as JSON.", {"sentence": _text(200)}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafters", default="grammar,auto", help="method specs, by commas")
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count, after one that does not")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    engine = Engine.load(args.model, drafter="none")
    made = open_grammars(engine.target.tokenizer, engine.target.vocab_size, engine.eos_ids)
    if made is None:
        raise SystemExit("llguidance is not installed: pip install 'outpace[grammar]'")
    specs = ["none", *args.drafters.split(",")]
    rows = []
    for name, (prompt, properties) in REQUESTS.items():
        schema = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
        grammar = made.compile(StructuredOutput("schema", json.dumps(schema), name))

        def ask(spec: str, prompt: str = prompt, grammar: Any = grammar) -> Result:
            result: Result = engine.generate(
                prompt, chat=True, temperature=0.0, grammar=grammar, max_new_tokens=160, drafter=spec
            )
            return result

        seen: dict[str, list[Result]] = {spec: [] for spec in specs}
        for turn in range(args.repeats + 1):
            for spec in specs[turn % len(specs) :] + specs[: turn % len(specs)]:
                result = ask(spec)
                if turn:
                    seen[spec].append(result)
        rows += [_row(name, spec, seen) for spec in specs]
    return _report(rows, specs, args.json)


def _row(name: str, spec: str, seen: dict[str, list[Result]]) -> dict[str, Any]:
    plain, own = seen["none"], seen[spec]
    ratios = [_seconds(a) / _seconds(b) for a, b in zip(plain, own, strict=True)]
    first = own[0]
    return {
        "request": name,
        "drafter": spec,
        "tokens": len(first.tokens),
        "passes": first.counters.passes,
        "drafted": first.counters.drafted,
        "accepted": first.counters.accepted,
        "forced": first.counters.forced,
        "speedup": statistics.median(ratios),
        "equal": all(one.tokens == plain[0].tokens for one in own),
        "text": first.text,
    }


def _seconds(result: Result) -> float:
    return result.seconds - result.prefill_seconds


def _report(rows: list[dict[str, Any]], specs: list[str], as_json: bool) -> int:
    mean = {
        spec: math.exp(statistics.mean(math.log(row["speedup"]) for row in rows if row["drafter"] == spec))
        for spec in specs
    }
    if as_json:
        print(json.dumps({"rows": rows, "speedup": mean}, indent=2))
    else:
        print(f"{'request':18}{'drafter':24}{'tokens':>7}{'passes':>7}{'forced':>7}{'speed-up':>9}  equal")
        for row in rows:
            print(
                f"{row['request']:18}{row['drafter']:24}{row['tokens']:7}{row['passes']:7}{row['forced']:7}"
                f"{row['speedup']:8.2f}x  {row['equal']}"
            )
        for spec in specs:
            print(f"{'all':18}{spec:24}{mean[spec]:30.2f}x")
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
