"""vLLM in a process of its own: reads requests from stdin and writes answers to stdout, a line of JSON each.

    ENV/bin/python tools/vllm_child.py FOLDER [SPECULATIVE_CONFIG]

A request is a list of prompts, each a list of token ids, which vLLM answers together at temperature 0.
"""

from __future__ import annotations

import json
import os
import sys
import time

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    lines, sys.stdout = os.fdopen(os.dup(1), "w", buffering=1), sys.stderr
    os.dup2(2, 1)  # what vLLM prints is no answer
    from vllm import LLM, SamplingParams

    config = json.loads(sys.argv[2]) if len(sys.argv) > 2 else None
    if config and config["method"] == "dspark":
        config["method"] = "dflash"
        drive_dspark()
    llm = LLM(
        sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=16,
        enable_prefix_caching=False,  # a second turn would find the prompts of the first
        disable_log_stats=False,
        speculative_config=config,
    )
    print(json.dumps({"ready": True}), file=lines)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=asked["ignore_eos"])
        before, start = counted(llm), time.perf_counter()
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        answers = llm.generate(prompts, params, use_tqdm=False)
        seconds, after = time.perf_counter() - start, counted(llm)
        told = {
            "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
            "seconds": seconds,
            **{name: after[name] - before[name] for name in ("drafts", "drafted", "accepted", "passes")},
            "by_depth": [b - a for a, b in zip(before["by_depth"], after["by_depth"], strict=True)],
        }
        print(json.dumps(told), file=lines)


def drive_dspark() -> None:
    """Let vLLM's runner of dflash drive its network of dspark: the one that it has for dspark needs Triton.

    Network, weights and attention are vLLM's. The order of sampling is written here: rows from the anchor on,
    each corrected by the token before it, at temperature 0.
    """
    import torch
    from vllm.v1.spec_decode.dflash import DFlashProposer

    begin = DFlashProposer.set_inputs_first_pass

    def from_anchor(self, *args, **options):
        self.above = options["next_token_ids"]
        count, rows, metadata = begin(self, *args, **options)
        return count, rows - 1, metadata

    def sample(self, hidden, metadata):
        above, guesses = self.above.long(), []
        logits = self.model.compute_draft_logits(hidden).view(len(above), self.num_speculative_tokens, -1)
        for row in logits.unbind(1):
            corrected = row + self.model.markov_bias(self.model.markov_embed(above))
            above = self.model.map_draft_to_target(corrected.argmax(-1))
            guesses.append(above)
        return torch.stack(guesses, 1).flatten(), None

    DFlashProposer.set_inputs_first_pass = from_anchor
    DFlashProposer._sample_draft_tokens = sample


def counted(llm) -> dict:
    """Totals of speculation since the engine began."""
    found = {"drafts": 0, "drafted": 0, "accepted": 0, "passes": 0, "by_depth": []}
    for metric in llm.get_metrics():
        if metric.name == "vllm:iteration_tokens_total":
            found["passes"] = metric.count
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name == "accepted_tokens_per_pos":
            found["by_depth"] = list(metric.values)
        elif name in ("drafts", "draft_tokens", "accepted_tokens"):
            found[{"draft_tokens": "drafted", "accepted_tokens": "accepted"}.get(name, name)] = metric.value
    return found


if __name__ == "__main__":
    main()
