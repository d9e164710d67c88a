"""Measure the figures of the README on this machine, each beside its baseline in the same run.

    python tools/figures.py speed  [--prompts 8] [--tokens 128]  against transformers, interleaved
    python tools/figures.py passes                                cost of a pass by rows
    python tools/figures.py memory [--dtype bfloat16]             peak memory, loading and running

Ratios are per prompt, then their mean; every prompt is run by each method in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from pathlib import Path

MODEL = "smollm2-135m"


def transformers_model(dtype):
    """The embedded model in transformers: the same expanded weights, in the same dtype.

    transformers' own GGUF loader keeps the weights quantized and computes in float32, which is
    slower in bfloat16; it would not be a fair baseline.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from outpace.models.zoo import open_checkpoint

    checkpoint = open_checkpoint(MODEL)
    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.ffn_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.max_positions, tie_word_embeddings=c.tied_head,
        rope_parameters={"rope_type": "default", "rope_theta": c.ropes[0].theta}, dtype=dtype,
    )
    torch.set_grad_enabled(False)
    model = LlamaForCausalLM(config).to(dtype)
    weights = {name: checkpoint.tensor(name, dtype) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def timed_generate(model, ids, count, lookup):
    """Time transformers' generate: tokens, decode tokens per second (after the first logits)."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    class FirstCall(LogitsProcessor):
        """Its first call marks the end of prefill."""

        at = None

        def __call__(self, input_ids, scores):
            self.at = self.at or time.perf_counter()
            return scores

    mark = FirstCall()
    extra = {"prompt_lookup_num_tokens": 10} if lookup else {}
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count, min_new_tokens=count, do_sample=False,
        logits_processor=LogitsProcessorList([mark]), pad_token_id=0, **extra,
    )
    end = time.perf_counter()
    new = out[0, len(ids):].tolist()
    return new, (len(new) - 1) / (end - mark.at)


def speed(args) -> None:
    """Own decoder against transformers: plain, and with prompt lookup."""
    import torch

    from outpace import Engine
    from outpace.bench.workloads import builtin

    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    engine = Engine.load(MODEL, dtype=dtype)
    peer = transformers_model(dtype)
    rows = [row for row in builtin() if row.category in args.categories.split(",")]
    rows = rows[:: max(1, len(rows) // args.prompts)][: args.prompts]

    def own(drafter):
        def run(ids):
            result = engine.generate(
                list(ids), drafter=drafter, max_new_tokens=args.tokens, ignore_eos=True
            )
            return result.tokens, result.tokens_per_second
        return run

    methods = {
        "none": own("none"),
        "prompt_lookup": own("prompt_lookup"),
        "hf": lambda ids: timed_generate(peer, list(ids), args.tokens, False),
        "hf-prompt-lookup": lambda ids: timed_generate(peer, list(ids), args.tokens, True),
    }
    ids = [engine.encode(row.messages) for row in rows]
    for run in methods.values():
        run(ids[0])
    rates = {name: [] for name in methods}
    same = 0
    for row, prompt in zip(rows, ids, strict=True):
        texts = {}
        for name, run in methods.items():
            texts[name], rate = run(prompt)
            rates[name].append(rate)
        same += tuple(texts["none"]) == tuple(texts["prompt_lookup"])
        print(f"{row.id:14}", *(f"{name} {rates[name][-1]:6.1f}" for name in methods), flush=True)
    print(f"\n{len(rows)} prompts x {args.tokens} tokens, {args.dtype}, {args.threads} threads;"
          f" prompt_lookup equal to none on {same}")
    for name in methods:
        print(f"{name:18} {statistics.mean(rates[name]):7.1f} tokens/s")
    for one, other in (("none", "hf"), ("prompt_lookup", "none"),
                       ("prompt_lookup", "hf-prompt-lookup"), ("prompt_lookup", "hf")):
        ratios = [a / b for a, b in zip(rates[one], rates[other], strict=True)]
        print(f"{one} / {other}: mean {statistics.mean(ratios):.2f}, "
              f"median {statistics.median(ratios):.2f}, least {min(ratios):.2f}")


def passes(args) -> None:
    """Median cost of one pass by rows, interleaved."""
    import torch

    from outpace.models.load import load_target
    from outpace.types import Feed

    torch.set_num_threads(args.threads)
    target = load_target(MODEL, dtype=args.dtype)
    cache = target.new_cache()
    slot = cache.open()
    with torch.inference_mode():
        target.score([Feed.chain(slot, [7] * args.context, want=())], cache)
        cache.keep(slot, range(args.context))
        counts = (1, 2, 4, 8, 16, 32, 64)
        times = {rows: [] for rows in counts}
        for _ in range(args.repeat):
            for rows in counts:
                start = time.perf_counter()
                target.score([Feed.chain(slot, [9] * rows)], cache)
                times[rows].append(time.perf_counter() - start)
                cache.drop(slot)
    one = statistics.median(times[1])
    print(f"{args.dtype}, {args.threads} threads, context {args.context}, "
          f"{target.weight_bytes / 1e6:.0f} MB of weights per pass")
    for rows in counts:
        cost = statistics.median(times[rows])
        print(f"{rows:3} rows {cost * 1e3:7.2f} ms   {cost / one:5.2f} x one row")


def peak() -> int:
    """Highest resident set since the mark, bytes (Linux)."""
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )


def memory(args) -> None:
    """Peak resident memory from loading to 512 tokens, less what the imports hold."""
    import torch

    from outpace import Engine, SamplingParams  # noqa: F401  (imports are what is subtracted)
    from outpace.models import decoder, load, zoo  # noqa: F401

    torch.set_num_threads(args.threads)
    torch.ones(64, 64) @ torch.ones(64, 64)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    engine = Engine.load(MODEL, drafter="none", dtype=args.dtype)
    loaded = peak()
    engine.generate(list(range(100, 110)), max_new_tokens=502, ignore_eos=True)
    after = peak()
    weights, cache = engine.target.weight_bytes, engine.cache.nbytes
    print(f"weights {weights / 1e6:.0f} MB in {args.dtype}, cache {cache / 1e6:.0f} MB")
    print(f"peak after loading {(loaded - before) / 1e6:.0f} MB, "
          f"after 512 tokens {(after - before) / 1e6:.0f} MB, imports {before / 1e6:.0f} MB")
    print(f"ratio {(after - before) / (weights + cache):.2f}")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["speed", "passes", "memory"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--categories",
                        default="chat,code,math,summarise,translate,extract,edit,passages")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=40)
    args = parser.parse_args()
    {"speed": speed, "passes": passes, "memory": memory}[args.what](args)


if __name__ == "__main__":
    main()
