"""Score a task with lm-evaluation-harness twice: against the server, and with transformers.

    python tools/check_lm_eval.py --python ENV/bin/python

ENV is an environment with torch, transformers and `lm-eval[api]` (checked with 0.4.12). This program makes a
small model, serves it, and lets the harness ask `/v1/completions` for log-probabilities of prompts
(``echo``, ``logprobs``), as it does for any multiple-choice task. Then the harness loads the model itself.
The log-likelihood of every choice of every question is compared.

Exit code 0: all agree to 1e-3. 1: they do not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLOSE = 1e-3
QUESTIONS = 12
WORDS = ("river", "road", "sea", "town", "hill", "house")
TASK = """
task: rivers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


def main() -> int:
    """Make a model and a task, score both ways, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", required=True, help="interpreter of the environment with lm-eval")
    python = parser.parse_args().python
    from outpace.cli.options import ModelOptions
    from outpace.cli.started import started

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = write_model(work / "model")
        write_task(work)
        options = ModelOptions(model=str(model), dtype="float32", threads=1)
        with started(None, options, ["prompt_lookup"], clients=2, seconds=60) as address:
            served = score(
                python,
                work,
                "local-completions",
                f"model=model,base_url={address}/v1/completions,tokenizer={model},num_concurrent=1",
            )
        loaded = score(python, work, "hf", f"pretrained={model},dtype=float32")
    off = [
        abs(one - other)
        for mine, theirs in zip(served, loaded, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    ]
    flat = [one for row in loaded for one in row]
    sys.stdout.write(
        f"{len(served)} questions, {len(off)} choices; "
        f"log-likelihoods from {min(flat):.2f} to {max(flat):.2f}; largest difference {max(off):.1e}\n"
    )
    return 0 if len(served) == QUESTIONS and max(off) < CLOSE and max(flat) - min(flat) > 1 else 1


def write_model(folder: Path) -> Path:
    """A random Llama with a byte-level tokenizer, as transformers reads it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(["<|end|>", *letters])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_task(work: Path) -> None:
    """Questions with three choices of different lengths."""
    rows = [
        {
            "question": f"Number {i}: where does the {WORDS[i % 6]} go? It goes to the",
            "choices": [f"{WORDS[(i + j) % 6]}{' and back' * j}." for j in (1, 2, 3)],
            "answer": i % 3,
        }
        for i in range(QUESTIONS)
    ]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "tasks").mkdir()
    (work / "tasks" / "rivers.yaml").write_text(TASK.format(file=work / "rows.jsonl"))


def score(python: str, work: Path, kind: str, arguments: str) -> list[list[float]]:
    """Log-likelihoods of the choices, question by question."""
    out = work / kind
    command = [python, "-m", "lm_eval", "--model", kind, "--model_args", arguments, "--tasks", "rivers"]
    command += ["--include_path", str(work / "tasks"), "--output_path", str(out), "--log_samples"]
    done = subprocess.run([*command, "--batch_size", "1", "--device", "cpu"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    (file,) = out.rglob("samples_*.jsonl")
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    rows.sort(key=lambda row: int(row["doc_id"]))
    return [[float(answer[0]) for answer in row["filtered_resps"]] for row in rows]


if __name__ == "__main__":
    sys.exit(main())
