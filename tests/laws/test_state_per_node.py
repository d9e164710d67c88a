"""Laws of drafters that keep state per node, by enumeration: what is emitted is the target's, exactly.

The target is a table, so its distributions are known; the drafter is a network on made-up features of
the text. Planted: a draft that says, for every group, the distribution of another node.
"""

from dataclasses import replace

import pytest
import torch

from outpace.analysis.sequence_law import MoodyDrafter, SequenceCase
from outpace.analysis.tables import RIGHT
from outpace.drafters.base import Request
from outpace.methods.falcon.drafter import Falcon
from outpace.methods.falcon.files import FalconFile
from outpace.methods.falcon.net import FalconShape
from outpace.methods.fspad.drafter import Fspad
from outpace.methods.fspad.net import FspadNet, FspadShape
from outpace.methods.mtp.drafter import Mtp
from outpace.methods.mtp.files import MtpFile
from outpace.methods.mtp.net import MtpShape
from outpace.methods.recurrent.cells import CellShape
from outpace.methods.recurrent.drafter import Lstm, MlpSpeculator, ReDrafter
from outpace.methods.recurrent.files import CellFile
from outpace.models.tiny import tiny
from outpace.train.networks import plain_shape
from outpace.tree.shapes import widths
from outpace.types import Draft, Outcome, Scored, Verdict

VOCAB = 2
MODEL = tiny()
HIDDEN, LAYER = MODEL.hidden_size, plain_shape(MODEL.config, 1, -1)


class Lender:
    """What a drafter borrows of a target, over a few tokens."""

    dtype, device, vocab_size = torch.float32, torch.device("cpu"), VOCAB

    def __init__(self):
        coins = torch.Generator().manual_seed(2)
        self._embed_VH = torch.randn(VOCAB, HIDDEN, generator=coins)
        self._head_VH = torch.randn(VOCAB, HIDDEN, generator=coins) * HIDDEN**-0.5

    def embed(self, ids):
        return self._embed_VH[list(ids)]

    def head(self, x_TH, vocab=None):
        return x_TH.float() @ self._head_VH.T


def drawn(shape):
    coins = torch.Generator().manual_seed(3)
    sizes = shape.tensor_shapes()
    return {name: torch.randn(size, generator=coins) * size[-1] ** -0.5 for name, size in sizes.items()}


def recurrent(kind):
    shape = CellShape(kind=kind.method, hidden_size=HIDDEN, inner=32, steps=3)
    return kind(CellFile(shape=shape, tensors=drawn(shape)), Lender())


def mtp(**fields):
    shape = MtpShape(decoder=LAYER, base="hidden.-1", **fields)
    return Mtp(MtpFile(shape=shape, tensors=drawn(shape)), Lender())


def falcon():
    shape = FalconShape(decoder=LAYER, block=2, passes=2)
    return Falcon(FalconFile(shape=shape, tensors=drawn(shape)), Lender())


def fspad():
    shape = FspadShape(decoder=LAYER, sampling=32, partial=True)
    return Fspad(FspadNet(shape, drawn(shape), Lender()), None)


MADE = {
    "redrafter": lambda: recurrent(ReDrafter),
    "lstm": lambda: recurrent(Lstm),
    "mlp_speculator": lambda: recurrent(MlpSpeculator),
    "mtp chained": lambda: mtp(kind="chained", modules=2, steps=3),
    "mtp parallel": lambda: mtp(kind="parallel", modules=3, steps=3),
    "falcon": falcon,
    "fspad": fspad,
}


class Told(MoodyDrafter):
    """A drafter that has seen the text so far, with features that the text decides."""

    make = staticmethod(lambda: None)
    wrong = False

    @classmethod
    def load(cls, config, target):
        told = super().load(config, target)
        told.inner, told.known = cls.make(), {}
        return told

    def propose(self, rows):
        drafts = []
        for row in rows:
            state = self.inner.begin(Request(prompt=tuple(row.tokens)))
            fed = tuple(row.tokens[:-1])
            scored = Scored(torch.empty(0), (0,), {"hidden.-1": self._features(fed)})
            told = Outcome(Draft(), scored, Verdict((), ()), fed, tuple(range(len(fed))), 0, forced=True)
            self.inner.observe([state], [told])
            (draft,) = self.inner.propose([replace(row, state=state)])
            self.inner.end(state)
            assert len(draft) or not row.budget.max_nodes
            if self.wrong and len(draft.laws) > 1:
                draft = replace(draft, laws=(*draft.laws[1:], draft.laws[0]))
            drafts.append(draft)
        return drafts

    def _features(self, fed):
        for end in range(1, len(fed) + 1):
            if fed[:end] not in self.known:
                seed = sum((token + 1) * 7**i for i, token in enumerate(fed[:end])) % 100_003
                coins = torch.Generator().manual_seed(seed)
                self.known[fed[:end]] = torch.randn(HIDDEN, generator=coins)
        return torch.stack([self.known[fed[:end]] for end in range(1, len(fed) + 1)])


def told(made, planted=False):
    return type("Made", (Told,), {"make": staticmethod(made), "wrong": planted})


CASE = {"shape": widths((2, 1, 1)), "depth": 3, "length": 3, "vocab": VOCAB}


@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_what_is_emitted_has_the_targets_law(name):
    # The drafter's distributions are of float32, and add up to 1 that far.
    assert SequenceCase(drafter=told(MADE[name]), **CASE).error(RIGHT["tree"]) < 1e-6


@torch.no_grad()
def test_a_law_of_another_node_is_caught():
    wrong = told(MADE["redrafter"], planted=True)
    assert SequenceCase(drafter=wrong, **CASE).error(RIGHT["tree"]) > 1e-3
