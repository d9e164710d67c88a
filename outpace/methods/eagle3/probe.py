"""A weak head that chooses features of the target, and their mix, before a real head is trained.

A head that learns together with its input can make up for a poor one. So stage 1 learns the input with a head
too weak for that: a linear map, solved in closed form. Stage 2 freezes what it found and trains EAGLE's head.

    probe of layers S    [norm(hidden.s[t]) for s in S], embedding of token t + 1  ->  hidden.-1[t + 1]
    judged by            how often the likeliest token of what it says is that of the target
    kept                 the layers, one after another while each helps most, and the map's part on features

``train eagle3 --set two_stage=FILE`` reads the file. Exploratory: the idea is that of "Complexity Matters",
arXiv:2307.08283 (an encoder learned with a weak decoder, then frozen), moved from images to draft heads.

Shape letters: R rows, H hidden size, F inputs of a probe, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from outpace.errors import ModelError
from outpace.files import replaced
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.models.fields import brief
from outpace.train.capture import compute
from outpace.train.tokens import TokenSequence

RIDGE = 1e-2
"""Weight of the penalty, in mean squares of the inputs."""
_NAME = "fc.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows to learn from, or to judge by."""

    state_LRH: Tensor
    """Streams behind 0 .. L - 1 layers, bfloat16."""
    embed_RH: Tensor
    """Of the token after each row."""
    wanted_RH: Tensor
    """The target's last state of that token's row."""

    def inputs(self, layers: Sequence[int]) -> Tensor:
        """Normed streams, the embedding, and 1; float32 [R, F]."""
        parts = [unit(self.state_LRH[layer].float()) for layer in layers]
        return torch.cat([*parts, unit(self.embed_RH), self.embed_RH.new_ones(len(self.embed_RH), 1)], 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Found:
    """What a probe of a target found."""

    alone_L: tuple[float, ...]
    """By layer, how often a probe of it alone guesses the target's token."""
    layers: tuple[int, ...]
    """Those chosen, ascending."""
    agreement: float
    """Of the probe of them all."""
    fc_HF: Tensor
    """Mixes their normed streams into one feature."""


def unit(x_RH: Tensor) -> Tensor:
    """Rows of mean square 1."""
    return F.rms_norm(x_RH, x_RH.shape[-1:])


@torch.no_grad()
def read_rows(target: Target, texts: Sequence[TokenSequence], most: int) -> Rows:
    """Rows of answers; what a row guesses is two tokens ahead of it.

    Cost: a pass of the target per 1024 tokens.
    """
    taps = [*(f"hidden.{layer}" for layer in range(target.num_layers + 1)), "hidden.-1"]
    states, embeds, wanted, count = [], [], [], 0
    for one in texts:
        ids = one.ids.tolist()
        rows = range(max(one.prompt - 2, 0), len(ids) - 1)
        if count >= most or not rows:
            continue
        (found,) = compute(target, [ids], taps)
        part = slice(rows.start, rows.stop)
        states.append(torch.stack([found[tap][part] for tap in taps[:-1]]))
        embeds.append(target.embed([ids[row + 1] for row in rows]).float())
        wanted.append(found["hidden.-1"][rows.start + 1 : rows.stop + 1].float())
        count += len(rows)
    if not states:
        raise ModelError(f"no answers to probe {target.name} on; make some with: outpace train --only-data")
    return Rows(torch.cat(states, 1)[:, :most], torch.cat(embeds)[:most], torch.cat(wanted)[:most])


@torch.no_grad()
def probe(
    target: Target,
    learn: Rows,
    judge: Rows,
    count: int,
    vocab: VocabMap | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Found:
    """Try every layer alone; then add the one that helps most, until there are ``count``."""
    truth_R = target.head(judge.wanted_RH, vocab).argmax(-1)

    def tried(layers: Sequence[int]) -> tuple[float, Tensor]:
        map_FH = solved(learn.inputs(layers), learn.wanted_RH)
        guess_R = target.head(judge.inputs(layers) @ map_FH, vocab).argmax(-1)
        return float((guess_R == truth_R).float().mean()), map_FH

    chosen: list[int] = []
    alone: tuple[float, ...] = ()
    best, map_FH = -1.0, torch.empty(0)
    for _ in range(count):
        found = {
            layer: tried(sorted([*chosen, layer]))
            for layer in range(len(learn.state_LRH))
            if layer not in chosen
        }
        layer = max(found, key=lambda one: found[one][0])
        alone = alone or tuple(agreement for agreement, _ in found.values())
        if chosen and found[layer][0] <= best:
            break
        best, map_FH = found[layer]
        chosen.append(layer)
        say(f"{'+'.join(map(str, sorted(chosen)))}: {best:.3f}")
    layers, wide = tuple(sorted(chosen)), len(chosen) * target.hidden_size
    mixed_RH = learn.inputs(layers)[:, :wide] @ map_FH[:wide]
    # As long as the target's own stream, to which the head's layer is used.
    scale = learn.state_LRH[-1].float().square().mean().sqrt() / mixed_RH.square().mean().sqrt()
    fc_HF = (scale * map_FH[:wide]).T.contiguous()
    return Found(alone_L=alone, layers=layers, agreement=best, fc_HF=fc_HF)


def solved(x_RF: Tensor, y_RH: Tensor) -> Tensor:
    """The map [F, H] with the least squares, and a small penalty on its size."""
    gram_FF = (x_RF.T @ x_RF).double()
    gram_FF.diagonal().add_(RIDGE * float(gram_FF.diagonal().mean()))
    map_FH: Tensor = torch.linalg.solve(gram_FF, (x_RF.T @ y_RH).double()).float()
    return map_FH


def write(found: Found, file: Path, target: Target) -> None:
    """Write what stage 2 reads; the file is whole or not there."""
    about = {
        "target_digest": target.digest,
        "layers": ",".join(map(str, found.layers)),
        "agreement": f"{found.agreement:.4f}",
        "alone": ",".join(f"{one:.4f}" for one in found.alone_L),
    }
    with replaced(file) as fresh:
        save_file({_NAME: found.fc_HF}, fresh, metadata=about)


def read(file: Path, target: Target) -> tuple[tuple[int, ...], Tensor]:
    """Layers, and the mix of their normed streams, of a file that ``write`` wrote.

    Raises:
        ModelError: no such file, a damaged one, or one of another target.
    """
    try:
        with safe_open(file, "pt") as held:
            about: Mapping[str, str] = held.metadata() or {}
            fc_HF: Tensor = held.get_tensor(_NAME)
        layers = tuple(int(one) for one in about["layers"].split(","))
    except FileNotFoundError:
        raise ModelError(f"two_stage: there is no {file}; write it with tools/probe_layers.py") from None
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ModelError(f"two_stage: {file} is no probe: {brief(error)}") from None
    fits = fc_HF.shape == (target.hidden_size, len(layers) * target.hidden_size)
    if about.get("target_digest") != target.digest or not fits:
        raise ModelError(f"two_stage: {file} was not made for {target.name}; probe that one")
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= target.num_layers:
        raise ModelError(f"two_stage: {file} names layers {about['layers']} of {target.num_layers}")
    return layers, fc_HF
