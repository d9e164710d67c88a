"""Compare an exported EAGLE-3 head with the speculators library, in an environment of its own.

    python tools/check_speculators.py --python ENV/bin/python

ENV is an environment with torch and `speculators` (checked with 0.9.0). This program makes a small
target and a head for it, exports the head, and lets the library load it there and compute the
logits of a text, three depths deep. It compares them with those of the drafter, row by row, then
reads the head that the library saved and compares again.

Exit code 0: all logits agree to 1e-4. 1: they do not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DEPTHS = 3
CLOSE = 1e-4
TEXT = [5, 9, 11, 40, 7, 150, 5, 9, 12, 77, 8, 31, 200, 4, 5, 9]


def main() -> int:
    """Make, export, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", help="interpreter of the environment with speculators")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        in_their_environment(options.child)
        return 0
    if options.python is None:
        parser.error("--python is needed: an interpreter that has speculators")
    with tempfile.TemporaryDirectory() as folder:
        return compare(Path(folder), options.python)


def compare(work: Path, python: str) -> int:
    """Everything on our side; 0 if all agrees."""
    import torch
    from safetensors.torch import load_file, save_file

    from outpace.models.tiny import tiny
    from outpace.train.export import export

    target = tiny(layers=8)
    verifier = write_verifier(target, work / "verifier")
    make_head(target, work / "head")
    export(work / "head", "speculators", work / "export", target, str(verifier))
    ours, taps = our_logits(target, work / "head")
    save_file({"taps": taps, "ids": torch.tensor(TEXT)}, work / "inputs.safetensors")
    subprocess.run([python, __file__, "--child", str(work)], check=True)
    theirs = load_file(work / "outputs.safetensors")
    again, _ = our_logits(target, work / "saved")
    worst = max(float((one - theirs[f"depth{depth}"][row]).abs().max()) for (row, depth), one in ours.items())
    back = max(float((one - again[key]).abs().max()) for key, one in ours.items())
    spread = float(torch.stack(list(ours.values())).std())
    sys.stdout.write(
        f"{len(ours)} rows, logits of spread {spread:.2f}; largest difference: their network "
        f"{worst:.1e}, their saved head read here {back:.1e}\n"
    )
    return 0 if max(worst, back) < CLOSE and spread > 0.1 else 1


def write_verifier(target: Any, folder: Path) -> Path:
    """The small target as a plain folder of transformers."""
    from safetensors.torch import save_file

    from outpace.train.llama import hf_config

    folder.mkdir()
    names = target.config.tensor_shapes()
    save_file({name: target.checkpoint.tensor(name) for name in names}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(target.config)))
    return folder


def make_head(target: Any, folder: Path) -> None:
    """An EAGLE-3 head over two thirds of the vocabulary, far from its regular start."""
    import torch

    from outpace.law import VocabMap
    from outpace.methods.eagle3.objective import Eagle3, Eagle3Config

    known = torch.tensor([i for i in range(target.vocab_size) if i % 3])
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[known] = torch.arange(len(known))
    objective = Eagle3.build(Eagle3Config(), target, VocabMap(known, feed_V))
    coins = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=coins))
    objective.save(folder, {})


def our_logits(target: Any, folder: Path) -> tuple[dict[tuple[int, int], Any], Any]:
    """(row, depth) -> logits of the drafter along TEXT, and the features of its rows."""
    import torch

    from outpace.drafters.base import Request
    from outpace.drafters.features import TrainedConfig
    from outpace.methods.eagle3.drafter import Eagle3
    from outpace.tree.growth import Branch
    from outpace.types import ROOT, Draft, Feed, Outcome, Verdict

    drafter = Eagle3.load(TrainedConfig(model=str(folder)), target)
    cache = target.new_cache()
    passed = target.score([Feed.chain(cache.open(), TEXT)], cache, taps=drafter.traits.taps).of(0)
    out = {}
    for row in range(len(TEXT) - DEPTHS):
        text, after = TEXT[: row + 2], TEXT[row + 2 : row + 1 + DEPTHS]
        state = drafter.begin(Request(prompt=tuple(text)))
        rows = tuple(range(row + 1))
        shown = Outcome(Draft(), passed, Verdict((), ()), tuple(text[:-1]), rows, 0, forced=True)
        drafter.observe([state], [shown])
        for depth in range(DEPTHS):
            nodes = (ROOT,) if depth == 0 else (depth - 1,)
            branch = Branch(state, text, nodes, after[:depth], list(range(-1, depth - 1)))
            out[row, depth] = drafter.expand([branch])[0][0].clone()
        drafter.end(state)
    features = [passed.taps[name].float() for name in drafter.net.shape.taps]
    return out, torch.cat(features, -1).contiguous()


def in_their_environment(work: Path) -> None:
    """Load the export with the library, write its logits, and save its model."""
    import torch
    from safetensors.torch import load_file, save_file
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(work / "export")
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(work / "export", config=config, dtype=torch.float32)
    # Under some versions of transformers an embedding that is not in the file is drawn at random.
    model._load_verifier_weights(overwrite_embed_tokens=True)
    model.eval()
    inputs = load_file(work / "inputs.safetensors")
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: logits.append(out[0]))
    count = len(inputs["ids"]) - 1
    with torch.no_grad():
        model(
            hidden_states=inputs["taps"][None, :count],
            input_ids=inputs["ids"][None, 1:],
            document_ids=torch.zeros(1, count, dtype=torch.long),
            ttt_steps=DEPTHS,
        )
    save_file(
        {f"depth{i}": one.float().contiguous() for i, one in enumerate(logits)}, work / "outputs.safetensors"
    )
    model.save_pretrained(work / "saved")


if __name__ == "__main__":
    sys.exit(main())
