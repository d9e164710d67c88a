"""``generate`` of transformers with and without outpace, in turns: the same ids, and how much sooner.

    python tools/custom_generate.py FOLDER [--drafter prompt_lookup] [--tokens 96] [--limit 6]

FOLDER holds a model in the layout of Hugging Face; ``--gguf FILE`` in it reads a GGUF file instead.
Prints, by kind of built-in prompt, the ratio of times over plain ``generate``: its own prompt lookup, then
``custom_generate=outpace.hf.decode``. The first answers of each are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from functools import partial


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--gguf", default=None)
    parser.add_argument("--drafter", default="prompt_lookup")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--limit", type=int, default=6, help="prompts of each kind")
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import outpace
    from outpace.bench.workloads import builtin

    given = {} if args.gguf is None else {"gguf_file": args.gguf}
    tokenizer = AutoTokenizer.from_pretrained(args.folder, **given)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, **given).eval()
    greedy = partial(model.generate, do_sample=False, max_new_tokens=args.tokens)
    ways = {
        "generate": greedy,
        "its prompt lookup": partial(greedy, prompt_lookup_num_tokens=10),
        f"outpace {args.drafter}": partial(greedy, custom_generate=outpace.hf.decode, drafter=args.drafter),
        f"outpace {args.drafter}, own decoder": partial(
            greedy, custom_generate=outpace.hf.decode, drafter=args.drafter, backend="own"
        ),
    }
    kinds = defaultdict(list)
    for prompt in builtin():
        if len(kinds[prompt.category]) < args.limit:
            kinds[prompt.category].append(prompt.messages)
    ratios, different = defaultdict(lambda: defaultdict(list)), defaultdict(int)
    for kind, prompts in kinds.items():
        for messages in prompts:
            ids = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_tensors="pt"
            )
            ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
            plain, first = 0.0, None
            for name, way in ways.items():
                if not ratios["all"][name]:
                    way(ids)
                start = time.perf_counter()
                out = way(ids, attention_mask=torch.ones_like(ids))
                took = time.perf_counter() - start
                plain, first = plain or took, out if first is None else first
                different[name] += not torch.equal(out, first)
                for part in (kind, "all"):
                    ratios[part][name].append(plain / took)
    names = [name for name in ways if name != "generate"]
    print("| kind | n | " + " | ".join(names) + " |")
    print("|---|---:|" + "---:|" * len(names))
    for kind in (*kinds, "all"):
        cells = [f"{statistics.geometric_mean(ratios[kind][name]):.2f} x" for name in names]
        print(f"| {kind} | {len(ratios[kind][names[0]])} | " + " | ".join(cells) + " |")
    print("| other ids | | " + " | ".join(str(different[name]) for name in names) + " |")


if __name__ == "__main__":
    main()
