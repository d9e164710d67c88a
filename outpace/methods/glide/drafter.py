"""GliDe: a layer that glimpses at the target's keys and values guesses; nothing of them is copied.

    target's slot    x0 x1 ... x(n-1) | pending            keys and values of one layer: committed rows alone
                     ^  ^  ...  ^
    drafter's slot   x0 x1 ... x(n-1) xn  a  b             rows of its own, made of tokens

It drafts as a draft model does (`outpace.drafters.model_rows`): its own cache follows the text by ids, and
guesses that were accepted keep their rows. The target's slot is lent and only read: where none is lent, it
drafts nothing. All rows of a draft see the same committed text, however deep they are.

Needs a target that gives its keys and values (KV_READ), and a layer that ``outpace train glide`` made for it.
A level costs about one layer of the target, and the keys and values of one. ``tree=cape`` is the paper's
other half: siblings where the drafter is unsure.

Paper: Du et al. 2024 (GliDe with a CaPE), arXiv:2402.02082.

Shape letters: D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outpace.cache.base import Lease
from outpace.drafters.base import Request, Traits
from outpace.drafters.features import TrainedConfig
from outpace.drafters.model_rows import ModelDrafter, ModelState
from outpace.drafters.trained import (
    CONFIG,
    decoder_from_json,
    find,
    lender,
    read_config,
    read_temper,
    read_tensors,
    rounding,
)
from outpace.drafters.trained_file import fit_tensors, read_vocab
from outpace.errors import ModelError, shown
from outpace.law import VocabMap
from outpace.methods.glide.net import GlideNet, tensor_shapes
from outpace.models.base import HEAD, KV_READ, Target
from outpace.models.decoder import Decoder
from outpace.models.fields import Fields
from outpace.models.views import KeyValues
from outpace.tree.growth import Branch, DraftRow
from outpace.types import NOTHING, Draft

METHOD = "glide"


@dataclass(slots=True, eq=False)
class GlideState(ModelState):
    """One sequence."""

    lease: Lease | None = None
    """The target's slot, while a draft grows."""


class Glide(ModelDrafter):
    """Drafts with one layer of its own.

    Args:
        target: whose cache is read.
        net: the layer.
        reads: which layer of the target it glimpses at.
        vocab: the draft vocabulary; None is the target's whole.
        temper_D: as in ``Traits``.
    """

    Config = TrainedConfig
    net: GlideNet
    traits = Traits(
        default_nodes=5,
        default_tree="dynamic",
        needs=frozenset({HEAD, KV_READ}),
        samples=True,
        uses_target_cache=True,
    )

    def __init__(
        self,
        target: Decoder,
        net: GlideNet,
        reads: int,
        vocab: VocabMap | None = None,
        temper_D: tuple[float, ...] = (),
    ) -> None:
        id_D = None if vocab is None else vocab.to_target_D.to(target.device)
        super().__init__(net, target.vocab_size, id_D)  # type: ignore[arg-type]
        self.target, self.net, self.reads = target, net, reads
        self.traits = replace(self.traits, temper_D=temper_D)

    @classmethod
    def load(cls, config: TrainedConfig, target: Target) -> Glide:
        """Read the layer; embedding and unembedding are the target's."""
        folder, lent = find(METHOD, target, config.model), lender(target, METHOD)
        said = read_config(folder, target, METHOD)
        read = Fields(str(folder / CONFIG), {}, said)
        decoder, theirs = decoder_from_json(read.mapping("decoder"), folder / CONFIG), lent.config
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim"):
            mine, other = getattr(decoder, name), getattr(theirs, name)
            if mine != other:
                raise ModelError(f"{read.source}: {name} is {mine}, but that of {target.name} is {other}")
        reads = said.get("layer")
        if type(reads) is not int or not 0 <= reads < target.num_layers:
            raise ModelError(f"{read.source}: layer is {shown(reads)}, need 0 to {target.num_layers - 1}")
        tensors = read_tensors(folder)
        vocab = read_vocab(tensors, said, target.vocab_size, folder)
        kept = fit_tensors(tensors, tensor_shapes(decoder), folder)
        net = GlideNet(decoder, kept, target, vocab, quantize=rounding(config.quantize, target))
        return cls(lent, net, reads, vocab, read_temper(said, folder / CONFIG))

    @property
    def language_model(self) -> None:
        """None: a text alone does not say what it guesses."""
        return

    def begin(self, request: Request) -> GlideState:
        state = super().begin(request)
        return GlideState(state.slot, state.prompt)

    def propose(self, rows: Sequence[DraftRow[ModelState]]) -> list[Draft]:
        """Grow drafts; a row without a lease gets an empty one."""
        for row in rows:
            _own(row.state).lease = row.lease
        lent = [row if row.lease is not None else replace(row, budget=NOTHING) for row in rows]
        try:
            return super().propose(lent)
        finally:  # a lease ends here
            self.net.glimpses = {}
            for row in rows:
                _own(row.state).lease = None

    def expand(self, branches: Sequence[Branch[ModelState]]) -> tuple[Tensor, Tensor | None]:
        """One pass of the layer over what it has not seen, then over the new nodes."""
        self.net.glimpses = {branch.state.slot: self._seen(_own(branch.state)) for branch in branches}
        return super().expand(branches)

    def _seen(self, state: GlideState) -> KeyValues:
        assert state.lease is not None
        return self.target.read(state.lease.cache, state.lease.slot, self.reads)


def _own(state: ModelState) -> GlideState:
    assert isinstance(state, GlideState)
    return state
