"""A decoder whose first layers guess well, made from a model and texts: ``outpace train target``.

OUT becomes a model folder in the layout of Hugging Face, which every ``--model`` takes. It has a
tokenizer of its own: the model's, cut to the texts (`target_start`), or one trained on them. Its
config.json names the exits, which are then the defaults of drafters. Training goes on from OUT/training
with ``--resume``. Texts are split at ``<|endoftext|>`` or else at paragraphs. Every 40th piece is kept
from training. The beginnings of such pieces are a workload to measure with (OUT/prompts.jsonl).
Beginnings of pieces that were learned are prompts to train drafters on (OUT/beginnings.jsonl).

Recipe and network are in `target_net`. Progress lines say how often the whole model's likeliest token is
the text's. After it they say, exit by exit, how often the exit's is the whole model's. All is held out.

Shape letters: B sequences.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from outpace.config import build, world
from outpace.errors import OutpaceError, SpecError
from outpace.files import replaced, write_whole
from outpace.models.fields import brief
from outpace.models.load import load_target
from outpace.models.lock import alone
from outpace.train import checkpoint
from outpace.train.batches import Batch
from outpace.train.loop import LoopConfig, Progress, train
from outpace.train.options import read_pairs
from outpace.train.pipeline import command
from outpace.train.plan import PLAN, check_plan, write_plan
from outpace.train.stopping import told
from outpace.train.target_net import ExitModel, Numbered, Recipe, end_of
from outpace.train.target_start import END, Start, start_from

APART = 40
"""Every so many-th piece of text is held out."""
BARE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template that leaves text as it is, so that drafters can be trained on answers."""
PIECE = 1500
"""Characters of a piece where a file has no marks."""
PROMPTS, LEARNED, BEGINNING = 24, 400, 24
"""Prompts to measure with and to train drafters on, at most, and words of each."""

_PARTS = ("config.json", "model.safetensors", "tokenizer.json")
"""Files of a model that are not overwritten."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Sequences cut from a long text at places that seed, epoch and number decide."""

    ids: Tensor
    recipe: Recipe

    @property
    def count(self) -> int:
        """Batches of an epoch."""
        return max(1, len(self.ids) // (self.recipe.length * self.recipe.batch))

    def batch(self, start_B: Tensor, number: int) -> Numbered:
        """The windows that begin there, with the token behind each."""
        length = self.recipe.length + 1
        token_BT = torch.stack([self.ids[start : start + length] for start in start_B.tolist()])
        return Numbered(
            token_BT=token_BT,
            length_B=torch.full((len(token_BT),), length),
            answer_BT=torch.ones(token_BT.shape, dtype=torch.bool),
            number=number,
        )

    def since(self, epoch: int = 0, index: int = 0) -> Iterator[tuple[int, int, Batch]]:
        """Batches from there on, without end."""
        last, size = len(self.ids) - self.recipe.length - 1, self.recipe.batch
        while True:
            coins = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + epoch)
            start = torch.randint(last, (self.count, size), generator=coins)
            for i in range(index, self.count):
                yield epoch, i, self.batch(start[i], epoch * self.count + i)
            epoch, index = epoch + 1, 0

    def all(self) -> list[Batch]:
        """The text once, without gaps."""
        last = max(0, len(self.ids) - self.recipe.length - 1)
        start = torch.arange(0, last, self.recipe.length)
        return [self.batch(some, 0) for some in torch.split(start, self.recipe.batch)]


@dataclass(slots=True)
class Texts:
    """Pieces of the user's files."""

    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, files: Sequence[Path]) -> Texts:
        """Those of files."""
        texts = cls()
        for file in files:
            texts.read(file)
        return texts

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.train, self.held_out]).encode()).hexdigest()[:16]

    def read(self, path: Path) -> None:
        """Add a file: its documents, or its paragraphs, a few together."""
        text = path.read_text(encoding="utf-8", errors="replace")
        if END in text:
            pieces = [one.strip() for one in text.split(END)]
        else:
            pieces = [""]
            for paragraph in text.split("\n\n"):
                if len(pieces[-1]) > PIECE:
                    pieces.append("")
                pieces[-1] += ("\n\n" if pieces[-1] else "") + paragraph.strip()
        pieces = [one for one in pieces if one]
        for number, piece in enumerate(pieces):
            (self.held_out if number % APART == APART - 1 else self.train).append(piece)


def trained_tokenizer(texts: Sequence[str], size: int) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of the texts."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def encoded(texts: Sequence[str], tokenizer: tokenizers.Tokenizer) -> Tensor:
    """Ids of all texts, each with the mark of its end."""
    end = end_of(tokenizer)
    ids = [[*one.ids, end] for one in tokenizer.encode_batch(list(texts))]
    return torch.tensor([id for one in ids for id in one])


def write_prompts(texts: Sequence[str], file: Path, most: int, seed: int) -> None:
    """Beginnings of pieces, as a workload."""
    words = [one.split() for one in texts]
    long = [one for one in words if len(one) > 2 * BEGINNING]
    picked = random.Random(seed).sample(long, min(most, len(long)))
    rows = [
        {"id": str(i), "category": "text", "prompt": " ".join(one[:BEGINNING])}
        for i, one in enumerate(picked)
    ]
    write_whole(file, "".join(json.dumps(row) + "\n" for row in rows))


LOOP = {
    "steps": "600",
    "lr": "0.0008",
    "evaluate_every": "150",
    "evaluate_tokens": "10000",
    "checkpoint_every": "50",
    "report_every": "20",
}
"""How it is trained unless told otherwise."""
FRESH = {"lr": "0.005", "optimizer": "muon", "weight_decay": "0.05"}
"""And from nothing: such a model learns at a higher rate."""


def read_settings(pairs: Sequence[str]) -> tuple[Recipe, LoopConfig]:
    """Options of the recipe, and those of the loop (``loop.KEY``), as ``key=value``.

    Raises:
        UnknownNameError, SpecError: as ``outpace train`` refuses settings.
    """
    given = read_pairs("a target", pairs, {"": Recipe, "loop": LoopConfig})
    if "minutes" in given["loop"]:
        given["loop"].setdefault("steps", "none")
    recipe = build(Recipe, given[""], "the recipe")
    if recipe.start != "none" and (wrong := {"layers", "width", "ffn", "grow"} & given[""].keys()):
        raise SpecError(f"{min(wrong)} is of a model from nothing; give start=none too")
    fresh = FRESH if recipe.start == "none" else {}
    if not hasattr(torch.optim, "Muon"):  # torch before 2.9
        fresh = {**fresh, "optimizer": "adamw"}
    return recipe, build(LoopConfig, {**LOOP, **fresh, **given["loop"]}, "the training loop")


def make(
    out: Path,
    recipe: Recipe,
    files: Sequence[Path],
    loop: LoopConfig,
    resume: bool,
    say: Callable[[Any], None],
) -> None:
    """Tokenizer, training, model folder.

    Raises:
        OutpaceError: a training was stopped in OUT and ``resume`` is not given, or the reverse. It began
            with something else, or goes on in another process. OUT holds a model, the texts are too short,
            or there are several processes.
        KeyboardInterrupt: after ``say`` was told what was kept and how to go on.
    """
    work = out / "training"
    with _only_one(out, work, resume), told(say, lambda: checkpoint.kept(work, None)):
        texts = Texts.of(files)
        plan = {**asdict(recipe), **{f"loop.{key}": one for key, one in asdict(loop).items()}}
        (check_plan if resume else write_plan)(work, {**plan, "texts": texts.digest})
        start = None
        if recipe.start != "none":
            start = start_from(load_target(recipe.start, dtype="float32"), texts.train, recipe.vocab)
        tokenizer = _tokenizer(out, recipe, texts, start, resume)
        own, held = _windows(texts, tokenizer, recipe)
        model = ExitModel(recipe, tokenizer, start)
        size = sum(one.numel() for one in model.module.parameters())
        say(
            f"{size / 1e6:.1f} million weights, {len(own.ids)} tokens to learn, {len(held.ids)} held "
            f"out, {own.count} steps an epoch"
        )
        provenance = {
            "command": command(),
            "weights": size,
            "texts": [file.name for file in files],
            "tokens": len(own.ids),
            "start": recipe.start,
            "exits": recipe.after,
        }
        train(
            model,
            own,
            held.all(),
            loop,
            out=out,
            work=work,
            resume=resume,
            report=partial(_tell, recipe, say),
            say=say,
            provenance=provenance,
        )
        for path in (work / PLAN, *checkpoint.paths(work)):
            path.unlink(missing_ok=True)


@contextmanager
def _only_one(out: Path, work: Path, resume: bool) -> Iterator[None]:
    """Have both folders for this process; OutpaceError where another one works there, or a model is whole."""
    if world()[1] > 1:
        raise OutpaceError("a target is made by one process; start it without torchrun")
    _check_place(out, work, resume)
    with alone(work, f"another training works in {work}; wait for it, or give another --out"):
        _check_place(out, work, resume)  # again: another one may have ended meanwhile
        yield


def _check_place(out: Path, work: Path, resume: bool) -> None:
    """Refuse to overwrite a model that is whole, and to go on where nothing was stopped."""
    stopped = checkpoint.latest(work) is not None
    if stopped and not resume:
        raise OutpaceError(f"a training was stopped in {work}; give --resume, or delete it")
    if resume and not stopped:
        raise OutpaceError(f"{work} holds no training that was stopped; leave --resume out to begin one")
    held = next((name for name in _PARTS if (out / name).exists()), None)
    if held and not resume and not (work / PLAN).is_file():
        raise OutpaceError(f"--out {out} holds {held}, which would be lost; name another folder")


def _tokenizer(
    out: Path, recipe: Recipe, texts: Texts, start: Start | None, resume: bool
) -> tokenizers.Tokenizer:
    """The tokenizer that a resumed training wrote, or a new one, which is written with the prompts."""
    file = out / "tokenizer.json"
    if resume and file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library has no type of its own
            raise OutpaceError(f"{file} is corrupt: {brief(error)}; delete {out} to begin anew") from error
    tokenizer = trained_tokenizer(texts.train, recipe.vocab) if start is None else start.tokenizer
    with replaced(file) as fresh:
        tokenizer.save(str(fresh))
    said = {"eos_token": END, "chat_template": BARE}
    write_whole(out / "tokenizer_config.json", json.dumps(said) + "\n")
    write_prompts(texts.held_out, out / "prompts.jsonl", PROMPTS, recipe.seed)
    write_prompts(texts.train, out / "beginnings.jsonl", LEARNED, recipe.seed)
    return tokenizer


def _windows(texts: Texts, tokenizer: tokenizers.Tokenizer, recipe: Recipe) -> tuple[Windows, Windows]:
    """Texts to learn and held-out ones; OutpaceError if they are too short."""
    own, held = (Windows(encoded(part, tokenizer), recipe) for part in (texts.train, texts.held_out))
    if len(held.ids) < 2 * recipe.length or own.count < 2:
        raise OutpaceError(
            f"the texts have {len(own.ids) + len(held.ids)} tokens; give more, "
            f"{2 * APART * recipe.length} at least, or a smaller length than {recipe.length}"
        )
    return own, held


def _tell(recipe: Recipe, say: Callable[[Any], None], now: Progress) -> None:
    """Report with the exits by their names."""
    text = now.line().partition(" | ")[0]
    if now.acceptance:
        each = ", ".join(
            f"exit {layer} {one:.3f}" for layer, one in zip(recipe.after, now.overlap, strict=True)
        )
        text += f" | text {now.acceptance[0]:.3f}; {each}; loss {now.held_out_loss:.3f}"
    say(text)
