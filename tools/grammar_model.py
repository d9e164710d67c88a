"""Train a small encoder-decoder that corrects grammar, and measure what it corrects.

    python tools/grammar_model.py OUT --texts FILE... [--minutes 50] [--resume]
    python tools/grammar_model.py OUT --only measure
    python tools/grammar_model.py OUT --only drafts

OUT becomes a model folder in the layout of Hugging Face, a T5, which every ``--model`` takes.
Training goes on from OUT/training with ``--resume`` and shows its progress: the share of held-out
sentences that come out whole. Texts are plain, or ``.jsonl`` files whose ``question`` or ``text``
is read. Every 40th sentence is kept from training; OUT/prompts.jsonl has such sentences with
errors, the clean ones beside them. Errors are drawn anew in every epoch (`grammar_errors`).

``--only drafts`` compares plain decoding of those sentences with drafts from their source
(`reference`, arXiv:2106.04970): tokens per pass, processor time in turns, answers that differ.

``--like FOLDER`` takes the tokenizer and the held-out sentences of another model made by this
script, so that a smaller one can draft for it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from grammar_errors import TYPES, Pair, common_words, corrupted, sentences, with_errors
from grammar_net import END, PAD, GrammarModel, Pairs, Recipe

from outpace.errors import OutpaceError
from outpace.files import read_text, write_whole
from outpace.train import checkpoint
from outpace.train.batches import Batch
from outpace.train.loop import LoopConfig, Progress, train

APART = 40
"""Every so many-th sentence is held out."""
EACH = 60
"""Held-out prompts per type of error, with one error each."""
WINDOW = 32
"""Batches' worth of pairs that are sorted by length together."""


def read(files: Sequence[Path]) -> list[str]:
    """The sentences of all files, each once."""
    found: dict[str, None] = {}
    for file in files:
        text = read_text(file)
        if file.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            text = "\n\n".join(row.get("question") or row["text"] for row in rows)
        found.update(dict.fromkeys(sentences(text)))
    return list(found)


def trained_tokenizer(texts: Sequence[str], size: int) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of the texts; a text ends with the mark of its end."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, END],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, backend.token_to_id(END))]
    )
    return backend


@dataclass(frozen=True, slots=True)
class Source:
    """Batches of pairs; epoch and index decide what is in them."""

    clean: Sequence[str]
    tokenizer: tokenizers.Tokenizer
    recipe: Recipe
    common: frozenset[str]
    """Words that are misspelled."""

    def _batch(self, pairs: Sequence[Pair]) -> Pairs:
        wrong = [one.ids for one in self.tokenizer.encode_batch([pair.wrong for pair in pairs])]
        clean = [one.ids for one in self.tokenizer.encode_batch([pair.clean for pair in pairs])]
        token_BT = _stacked(clean)
        return Pairs(
            token_BT=token_BT,
            length_B=torch.tensor([len(one) for one in clean]),
            answer_BT=token_BT != 0,
            source_BS=_stacked(wrong),
        )

    def _epoch(self, epoch: int) -> list[list[Pair]]:
        coin = random.Random(f"{self.recipe.seed} {epoch}")
        order = list(range(len(self.clean)))
        coin.shuffle(order)
        pairs = [corrupted(self.clean[i], self.common, coin) for i in order]
        size, batches = self.recipe.batch, []
        for lo in range(0, len(pairs), WINDOW * size):
            part = sorted(pairs[lo : lo + WINDOW * size], key=lambda pair: len(pair.wrong))
            batches += [part[i : i + size] for i in range(0, len(part), size)]
        coin.shuffle(batches)
        return batches

    def since(self, epoch: int = 0, index: int = 0) -> Iterator[tuple[int, int, Batch]]:
        """Batches from there on, without end."""
        while True:
            for i, pairs in enumerate(self._epoch(epoch)):
                if i >= index:
                    yield epoch, i, self._batch(pairs)
            epoch, index = epoch + 1, 0

    def all(self) -> list[Batch]:
        """Every sentence once, in batches of like length."""
        return [self._batch(pairs) for pairs in self._epoch(-1)]


def _stacked(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


def prompts(clean: Sequence[str], common: frozenset[str], seed: int) -> list[dict[str, str]]:
    """Held-out sentences with one error each, equally many of every type."""
    coin = random.Random(seed)
    rows: list[dict[str, str]] = []
    for kind in TYPES:
        made = (with_errors(one, [kind], common, coin) for one in coin.sample(list(clean), len(clean)))
        pairs = [pair for pair in made if pair.types][:EACH]
        rows += [
            {"id": f"{kind}-{i}", "category": kind, "prompt": pair.wrong, "clean": pair.clean}
            for i, pair in enumerate(pairs)
        ]
    return rows


def make(out: Path, recipe: Recipe, args: argparse.Namespace, loop: LoopConfig) -> None:
    """Tokenizer, training, model folder.

    Raises:
        OutpaceError: a training was stopped in OUT and ``resume`` is not given, or there are too
            few sentences.
    """
    work = out / "training"
    if checkpoint.latest(work) is not None and not args.resume:
        raise OutpaceError(f"a training was stopped in {work}; give --resume, or delete it")
    all_of_them = read(args.texts)
    held = all_of_them[APART - 1 :: APART]
    clean = [one for i, one in enumerate(all_of_them) if i % APART != APART - 1]
    if len(held) < EACH:
        raise OutpaceError(f"the texts have {len(all_of_them)} usable sentences; give more")
    common = common_words(clean)
    out.mkdir(parents=True, exist_ok=True)
    if args.like is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "prompts.jsonl"):
            shutil.copyfile(args.like / name, out / name)
    if (out / "tokenizer.json").is_file():
        tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    else:
        tokenizer = trained_tokenizer(clean, recipe.vocab)
        tokenizer.save(str(out / "tokenizer.json"))
        marks = {"eos_token": END, "pad_token": PAD, "model_max_length": 512}
        write_whole(out / "tokenizer_config.json", json.dumps(marks) + "\n")
    if not (out / "prompts.jsonl").is_file():
        rows = prompts(held, common, recipe.seed)
        write_whole(out / "prompts.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    model = GrammarModel(recipe, tokenizer)
    source = Source(clean, tokenizer, recipe, common)
    size = sum(one.numel() for one in model.module.parameters())
    print(f"{size / 1e6:.1f} million weights, {len(clean)} sentences, {len(held)} held out", flush=True)

    def report(now: Progress) -> None:
        text = now.line().partition(" | ")[0]
        print(f"{text} | whole {now.acceptance[0]:.3f}" if now.acceptance else text, flush=True)

    train(
        model,
        source,
        Source(held, tokenizer, recipe, common).all(),
        loop,
        out=out,
        work=work,
        resume=args.resume,
        report=report,
        provenance={"weights": size, "texts": [file.name for file in args.texts], "sentences": len(clean)},
    )
    for path in checkpoint.paths(work):
        path.unlink()


def measure(out: Path) -> None:
    """Print which share of the held-out errors plain decoding corrects, by type, and what it harms."""
    from outpace import Engine

    engine = Engine.load(str(out), drafter="none", dtype="float32")
    rows = [json.loads(line) for line in read_text(out / "prompts.jsonl").splitlines()]
    right, total = Counter[str](), Counter[str]()
    settings = {"max_new_tokens": 64, "temperature": 0.0}
    corrected = dict(engine.map([row["prompt"] for row in rows], **settings))
    kept = dict(engine.map([row["clean"] for row in rows], **settings))
    for i, row in enumerate(rows):
        right[row["category"]] += corrected[i].text.strip() == row["clean"]
        total[row["category"]] += 1
    for kind in TYPES:
        print(f"{kind:12} {right[kind]:3} of {total[kind]}")
    harmed = sum(kept[i].text.strip() != row["clean"] for i, row in enumerate(rows)) / len(rows)
    print(f"corrected {sum(right.values()) / len(rows):.3f}; clean sentences changed {harmed:.3f}")


def compare(out: Path) -> None:
    """Print what drafting from the source gains on the held-out sentences."""
    from outpace import Engine

    engine = Engine.load(str(out), drafter="none", dtype="float32")
    rows = [json.loads(line) for line in read_text(out / "prompts.jsonl").splitlines()]
    specs = ("none", "reference", f"reference[tree=2x{'x'.join('1' * 20)}]")
    seconds = dict.fromkeys(("prompt", *specs), 0.0)
    passes, tokens, differ = Counter[str](), Counter[str](), Counter[str]()
    for spec in specs:  # the first answers pay for what is set up on the way
        engine.generate(rows[0]["prompt"], drafter=spec, max_new_tokens=64, temperature=0.0)
    for row in rows:
        answers = {}
        for spec in seconds:
            most = 1 if spec == "prompt" else 64  # the first token comes with the prompt
            drafter = "none" if spec == "prompt" else spec
            start = time.process_time()
            answer = engine.generate(row["prompt"], drafter=drafter, max_new_tokens=most, temperature=0.0)
            seconds[spec] += time.process_time() - start
            passes[spec] += answer.counters.passes
            tokens[spec] += len(answer.tokens) - 1
            answers[spec] = answer.tokens
        differ.update(spec for spec in specs if answers[spec] != answers["none"])
    alone = seconds["prompt"]
    for spec in specs:
        print(
            f"{spec[:24]:24} {tokens[spec] / passes[spec]:.2f} tokens per pass, "
            f"{seconds['none'] / seconds[spec]:.2f} x in time, "
            f"{(seconds['none'] - alone) / (seconds[spec] - alone):.2f} x without the encoder's pass, "
            f"{differ[spec]} differ"
        )


def main() -> int:
    """Parse, make, measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+", default=[], help="files to learn")
    parser.add_argument("--like", type=Path, help="model folder whose tokenizer and prompts to take")
    parser.add_argument("--only", choices=("train", "measure", "drafts"), help="by default all three")
    parser.add_argument("--resume", action="store_true", help="go on with a stopped training")
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float, default=1e-3)
    names = ("encoder", "decoder", "width", "heads", "ffn", "vocab", "batch", "seed")
    for name in names:
        parser.add_argument(f"--{name}", type=int, default=getattr(Recipe(), name))
    args = parser.parse_args()
    try:
        recipe = Recipe(**{name: getattr(args, name) for name in names})
        if args.only in (None, "train"):
            loop = LoopConfig(
                minutes=args.minutes,
                steps=args.steps,
                lr=args.lr,
                weight_decay=0.01,
                evaluate_every=100,
                evaluate_tokens=6_000,
                checkpoint_every=100,
                report_every=20,
            )
            make(args.out, recipe, args, loop)
        if args.only in (None, "measure"):
            measure(args.out)
        if args.only in (None, "drafts"):
            compare(args.out)
        return 0
    except (OutpaceError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
