"""The other side of a peer: run by the Python of its own environment, it answers token ids.

Needs nothing of this project, and no package but the peer's. It speaks one JSON object per line. The
first line on standard input says what to load, every further one is a request. Each is answered by
one line on standard output. The end of standard input ends it.

    {"engine": "openvino", "model": PATH, "dtype": "bfloat16", "threads": 2, "context": 8192,
     "prompt_lookup": false}
        -> {"ready": {...}} | {"absent": "..."} | {"error": "..."}
    {"id": 1, "rows": [[5, 6]], "max_new_tokens": 9, "temperature": 0.0, "seed": 0, "eos": [2]}
        -> {"id": 1, "tokens": [[7]], "seconds": 1.0, "prefill_seconds": 0.1, "peak": 123}
           | {"id": 1, "error": "..."}

``eos`` is empty where ends of sequence are tokens like any other. Seconds are taken here, so that
talking costs the peer nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]

OV_DRAFT, OV_NGRAM = 5, 3
"""Tokens drafted and longest match of OpenVINO's prompt lookup, as in its own example."""


class Absent(Exception):
    """The peer is not installed in this environment."""


def openvino(given: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Load a model with OpenVINO GenAI: a folder with its own export, or a GGUF file."""
    try:
        np, ov, genai = (importlib.import_module(name) for name in ("numpy", "openvino", "openvino_genai"))
    except ImportError as error:
        raise Absent(f"{error}; pip install openvino-genai") from error
    precision = {"bfloat16": "bf16", "float32": "f32"}[given["dtype"]]
    properties: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": given["threads"],
        "INFERENCE_PRECISION_HINT": precision,
        # Otherwise it quantizes keys and values, and the text is that of another model.
        "KV_CACHE_PRECISION": precision,
    }
    # As it schedules for latency, but it would keep the prompts that it answered before.
    schedule = genai.SchedulerConfig()
    schedule.enable_prefix_caching = False
    schedule.max_num_batched_tokens = 1 << 30
    properties["scheduler_config"] = schedule
    if given["prompt_lookup"]:
        properties["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(given["model"], "CPU", **properties)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        config = genai.GenerationConfig()
        config.max_new_tokens = asked["max_new_tokens"]
        config.ignore_eos = not asked["eos"]
        if asked["eos"]:
            config.eos_token_id = asked["eos"][0]
            config.stop_token_ids = set(asked["eos"])
        config.do_sample = asked["temperature"] > 0
        if config.do_sample:
            config.temperature = asked["temperature"]
            config.rng_seed = asked["seed"] % (1 << 63)
        if given["prompt_lookup"]:
            config.num_assistant_tokens = OV_DRAFT
            config.max_ngram_size = OV_NGRAM
        rows = asked["rows"]
        longest = max(len(row) for row in rows)
        ids = np.array([[0] * (longest - len(row)) + row for row in rows], dtype=np.int64)
        mask = np.array([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(mask.astype(np.int64)))
        began = time.perf_counter()
        result = pipeline.generate(inputs, config)
        seconds = time.perf_counter() - began
        first = result.perf_metrics.get_ttft().mean / 1000
        return {"tokens": result.tokens, "seconds": seconds, "prefill_seconds": first}

    about = {
        "versions": {"openvino-genai": genai.__version__, "openvino": ov.get_version()},
        "computed in": precision,
        "keys and values": precision,
        "prefix caching": False,
        "prefill ends": "at its own time to first token",
    }
    if given["prompt_lookup"]:
        about["settings"] = {"num_assistant_tokens": OV_DRAFT, "max_ngram_size": OV_NGRAM}
    return about, answer


def llamacpp(given: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    try:
        llama_cpp = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise Absent(f"{error}; pip install llama-cpp-python") from error
    model = llama_cpp.Llama(
        model_path=given["model"],
        n_ctx=given["context"],
        n_threads=given["threads"],
        n_threads_batch=given["threads"],
        verbose=False,
    )

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        (row,) = asked["rows"]
        tokens: list[int] = []
        model.reset()  # or it would keep the prompt that it answered last
        model.set_seed(asked["seed"] % (1 << 32))
        began = time.perf_counter()
        first = began
        for token in model.generate(
            row, temp=asked["temperature"], top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        ):
            tokens.append(int(token))
            if len(tokens) == 1:
                first = time.perf_counter()
            if len(tokens) == asked["max_new_tokens"] or token in asked["eos"]:
                break
        seconds = time.perf_counter() - began
        return {"tokens": [tokens], "seconds": seconds, "prefill_seconds": first - began}

    about = {
        "versions": {"llama-cpp-python": llama_cpp.__version__},
        "keys and values": "f16",
        "prefill ends": "at its first token",
    }
    return about, answer


ENGINES = {"openvino": openvino, "llamacpp": llamacpp}


def peak() -> int | None:
    """Highest resident memory of this process so far, bytes."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def brief(error: BaseException) -> str:
    """What another library's error says, on one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[-300:]}" if said else type(error).__name__


def main() -> None:
    # Libraries print to standard output; let them print to standard error.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    given = json.loads(sys.stdin.readline())
    try:
        about, answer = ENGINES[given["engine"]](given)
    except Absent as error:
        say({"absent": brief(error).partition(": ")[2]})
        return
    except Exception as error:
        say({"error": brief(error)})
        return
    say({"ready": about})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say({"id": asked["id"], **answer(asked), "peak": peak()})
        except Exception as error:
            say({"id": asked["id"], "error": brief(error)})


if __name__ == "__main__":
    main()
