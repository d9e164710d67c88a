"""What `medusa` and `hydra` share: residual heads on the target's last hidden state.

    text      x0  x1 ... x(n-1) | xn pending        draft: x(n+1) x(n+2) ...
    hidden    h, of the row that fed x(n-1), behind the final norm
    head k    guesses x(n+k): from h alone (medusa), or from h and xn ... x(n+k-1) (hydra)

    medusa    x = h                                 then x <- x + silu(A x + b), once or more
    hydra     x = M [h, emb xn ... emb x(n+k-1)]    logits = unembedding(x)

The unembedding is the target's, sliced to the draft vocabulary in memory: a drafter folder holds
M, A and b alone. Embeddings come in with length sqrt(H), whatever the scale of the target's.

Shape letters: F nodes of a frontier, K heads, H hidden size, I inputs of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.drafters.last_state import LastStateDrafter
from outpace.drafters.one_layer import layer_shapes
from outpace.drafters.trained import CONFIG, decoder_from_json, find, read_config, rounding
from outpace.drafters.trained_file import TrainedFile, read_file
from outpace.errors import ModelError
from outpace.models.base import Target
from outpace.models.blocks import Form
from outpace.models.families import DecoderConfig
from outpace.models.plan import Plan

PREFIX = "prefix."
"""What names of the prefix layer's tensors begin with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsShape:
    """How many heads, and what they are made of."""

    heads: int
    """K: levels that can be drafted."""
    layers: int
    """Blocks of a head."""
    hidden_size: int
    conditioned: bool
    """Whether head k reads the embeddings of the k tokens before its guess (hydra)."""
    prefix: DecoderConfig | None = None
    """Of the layer along the text whose output the heads read instead of h (Hydra++)."""

    def inputs(self, head: int) -> int:
        """Width of what a head reads; heads count from 0."""
        return self.hidden_size * (head + 2 if self.conditioned else 1)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a drafter folder besides its vocabulary."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.heads):
            wide, name = self.inputs(head), f"heads.{head}."
            if self.conditioned:
                shapes[f"{name}mix.weight"] = (hidden, wide)
            for block in range(self.layers):
                shapes[f"{name}blocks.{block}.weight"] = (hidden, hidden)
                shapes[f"{name}blocks.{block}.bias"] = (hidden,)
        if self.prefix is not None:
            shapes |= layer_shapes(self.prefix, PREFIX)
        return shapes


Heads = TrainedFile[HeadsShape]


def read_heads(method: str, path: str | None, target: Target, conditioned: bool) -> Heads:
    """Read a drafter folder.

    Args:
        method: ``medusa`` or ``hydra``.
        path: the folder; None: the one trained for the target.
        target: whom it has to fit.
        conditioned: see ``HeadsShape``.

    Raises:
        ModelError: no folder, files that are corrupt or of another target or method, or tensors
            that are not those of the config.
    """
    folder = find(method, target, path)
    said = read_config(folder, target, method)
    counts = [said.get("heads"), said.get("layers")]
    if not all(isinstance(one, int) and one > 0 for one in counts):
        raise ModelError(f"{folder / CONFIG}: heads and layers must be above 0, got {counts}")
    prefix = None
    if said.get("prefix"):
        prefix = decoder_from_json(said["prefix"], folder / CONFIG)
        if not conditioned or prefix.num_layers != 1 or prefix.hidden_size != target.hidden_size:
            raise ModelError(f"{folder / CONFIG}: prefix must be one layer of hydra, as wide as the target")
    shape = HeadsShape(
        heads=said["heads"],
        layers=said["layers"],
        hidden_size=target.hidden_size,
        conditioned=conditioned,
        prefix=prefix,
    )
    return read_file(folder, said, shape, target)


class HeadNet:
    """Heads that read the same rows, ready to run.

    Args:
        heads: what was read.
        numbers: which of them, from 0; conditioned ones run alone, since each reads more.
        target: gives dtype and device.
        form: of the weights.
    """

    def __init__(self, heads: Heads, numbers: Sequence[int], target: Target, form: Form) -> None:
        self._dtype, self._hidden = target.dtype, heads.shape.hidden_size

        def read(name: str) -> list[Tensor]:
            return [heads.tensors[f"heads.{number}.{name}"] for number in numbers]

        assert len(numbers) == 1 or not heads.shape.conditioned
        self._mix = form.linear(read("mix.weight")[0]) if heads.shape.conditioned else None
        # One product for the first blocks, which all read the same.
        self._first = form.linear(torch.cat(read("blocks.0.weight")), torch.cat(read("blocks.0.bias")))
        self._later = [
            [form.linear(w, b) for w, b in zip(read(f"{at}.weight"), read(f"{at}.bias"), strict=True)]
            for at in (f"blocks.{i}" for i in range(1, heads.shape.layers))
        ]
        self._plan = self._listed(heads.shape.inputs(numbers[0]), heads.shape.hidden_size, len(numbers))

    def _listed(self, inputs: int, hidden: int, heads: int) -> Plan:
        """The same as a list of operations."""
        plan = Plan()
        x = plan.lent(inputs)
        if self._mix is not None:
            x = plan.product(self._mix, x)
        out = plan.fresh(heads * hidden)
        each = [plan.columns(out, head * hidden, hidden) for head in range(heads)]
        for own in each:
            plan.copy(x, own)
        plan.bend(plan.product(self._first, x), out)
        for blocks in self._later:
            for block, own in zip(blocks, each, strict=True):
                plan.bend(plan.product(block, own), own)
        plan.give(out)
        return plan

    def __call__(self, u_FI: Tensor) -> Tensor:
        """What the unembedding reads, float32 [F, heads, H]."""
        if self._plan.ready:
            (x_FY,) = self._plan.run((len(u_FI),), (u_FI,))
            return x_FY.view(len(u_FI), -1, self._hidden)
        u_FI = u_FI.to(self._dtype)
        x_FH = (u_FI if self._mix is None else self._mix(u_FI)).float()
        first_FKH = self._first(x_FH.to(self._dtype)).view(len(x_FH), -1, x_FH.shape[1])
        x_FKH = x_FH[:, None] + F.silu(first_FKH.float())
        for blocks in self._later:
            read = x_FKH.to(self._dtype).unbind(1)
            more = [block(one.contiguous()) for block, one in zip(blocks, read, strict=True)]
            x_FKH = x_FKH + F.silu(torch.stack(more, 1).float())
        return x_FKH


class ResidualDrafter(LastStateDrafter):
    """Drafts with residual heads.

    Args:
        heads: of the kind that the method reads.
        target: unembeds, and embeds for heads that ask for it.
        quantize: how to round the weights, where compiled code multiplies them.
    """

    def __init__(self, heads: Heads, target: Target, quantize: str | None = None) -> None:
        super().__init__(heads.shape.heads, heads.tree)
        self.heads, self.target = heads, target
        numbers = range(heads.shape.heads)
        form = Form(target.dtype, target.device, quantize=rounding(quantize, target))
        groups = [[number] for number in numbers] if heads.shape.conditioned else [list(numbers)]
        self.nets = [HeadNet(heads, group, target, form) for group in groups]
        """One per head (hydra), or one of all heads (medusa)."""
        self.id_D = None if heads.vocab is None else heads.vocab.to_target_D.to(target.device)
