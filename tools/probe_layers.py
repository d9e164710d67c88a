"""Probe which layers of a target tell a draft head most, for `two_stage` of eagle3 (exploratory).

    python tools/probe_layers.py --work DIR --out probe.safetensors --rows 6000
    python tools/ablations.py two_stage --work DIR --out DIR

The first command prints a table of all layers, and writes the layers and the mix that a linear head found
best. The second one does so, too, and trains heads with equal steps: as they are, with these layers, and with
layers and mix frozen.
``--plot FILE.png`` draws the table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from outpace import Engine
from outpace.methods.eagle3.probe import Found, probe, read_rows, write
from outpace.train.tokens import TokenStore
from outpace.train.vocab import always_kept, count_tokens, reduced_vocab


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the tokens, as of outpace train")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=6000, help="to learn from; a quarter as many judge")
    parser.add_argument("--layers", type=int, default=3, help="to choose")
    parser.add_argument("--vocab", type=int, default=8192, help="draft vocabulary")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="picture to draw")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    target = Engine.load(asked.model, drafter="none").target
    store = TokenStore.open(asked.work / "tokens")
    texts = list(zip(store, store.held_out_S, strict=True))
    vocab = None
    if asked.vocab < target.vocab_size:
        vocab = reduced_vocab(count_tokens(store, target.vocab_size), asked.vocab, always_kept(target))
    learn = read_rows(target, [one for one, held in texts if not held], asked.rows)
    judge = read_rows(target, [one for one, held in texts if held], asked.rows // 4)
    say = (lambda line: None) if asked.json else print
    found = probe(target, learn, judge, asked.layers, vocab, say)
    write(found, asked.out, target)
    if asked.json:
        told = {"alone": found.alone_L, "layers": found.layers, "agreement": found.agreement}
        print(json.dumps({**told, "rows": [len(learn.embed_RH), len(judge.embed_RH)]}))
    else:
        print(table(found))
    if asked.plot:
        draw(found, asked.plot)
    return 0


def table(found: Found) -> str:
    lines = ["| layers below | agreement alone |", "|---|---|"]
    lines += [f"| {layer} | {agreement:.3f} |" for layer, agreement in enumerate(found.alone_L)]
    return "\n".join([*lines, f"| {', '.join(map(str, found.layers))} together | {found.agreement:.3f} |"])


def draw(found: Found, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(len(found.alone_L)), found.alone_L, marker="o", label="one layer")
    axes.axhline(
        found.agreement,
        linestyle="--",
        color="tab:orange",
        label=f"chosen: {', '.join(map(str, found.layers))}",
    )
    axes.set_xlabel("layers below the feature")
    axes.set_ylabel("target's token guessed, two ahead")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
