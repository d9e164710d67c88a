"""Which method specs the suite runs, and the files that they name.

Nothing is listed here by name. Every registered drafter is run as it is and, if it grows trees, in
several shapes under several verifiers. One with a training objective drafts with the weights it
has before training, in ``small.NAME``. A room may add specs and files of its own: ``SPECS`` and
``make(target, folder, texts)`` in ``tests/methods/ROOM/specs.py``.
"""

import importlib
from pathlib import Path

import torch

from outpace import registry
from outpace.drafters.base import ExpandingDrafter
from outpace.types import VocabMap

ROOMS = sorted(Path(__file__).parents[1].glob("methods/**/specs.py"))
GROWN = (
    "",
    "tree=3x2x1 verifier=traversal",
    "tree=dynamic tree_size=8",
    "tree=cape:3 tree_size=9",
    "tree=dynamic:3 verifier=tree[replacement=true]",
    "tree=2x2 policy=confidence",
    "tree=chain verifier=block",
)
"""How drafts of a drafter that expands nodes are grown, verified and planned."""


def rooms():
    """The modules of all rooms that add something."""
    root = Path(__file__).parents[2]
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in ROOMS]
    return [importlib.import_module(name) for name in names]


def specs():
    """Every method spec that the suite runs."""
    own = {name: list(some) for room in rooms() for name, some in getattr(room, "SPECS", {}).items()}
    return [spec for row in registry.entries("drafter") for spec in own.get(row.name) or general(row)]


def general(row):
    """The specs of a drafter about which nothing is known but its class."""
    model = f"model=small.{row.name}" if row.name in objectives() else ""
    grows = issubclass(registry.load("drafter", row.name), ExpandingDrafter)
    # What grows in one room grows by the same code: its first method is tried in every shape.
    room = [
        one.name for one in registry.entries("drafter") if one.path.split(".")[:3] == row.path.split(".")[:3]
    ]
    shapes = GROWN[:: 1 if row.name == room[0] else 2] if grows else ("",)
    settings = [" ".join(filter(None, (model, shape))) for shape in shapes]
    return [f"{row.name}[{one}]" if one else row.name for one in settings]


def objectives():
    """Names of drafters that can be trained."""
    drafters = {row.name for row in registry.entries("drafter")}
    return [row.name for row in registry.entries("objective") if row.name in drafters]


def write_files(target, folder, texts):
    """Make all files that the specs name.

    Args:
        target: the model.
        folder: where.
        texts: token ids of some texts of the model.
    """
    for name in objectives():
        kind = registry.load("objective", name)
        write_head(target, folder / f"small.{name}", kind, kind.Config())
    for room in rooms():
        if hasattr(room, "make"):
            room.make(target, folder, texts)


def write_head(target, folder, kind, config):
    """A trained part as it is before training, over most of the target's tokens."""
    known = torch.tensor([i for i in range(target.vocab_size) if i % 5])
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[known] = torch.arange(len(known))
    kind.build(config, target, VocabMap(known, feed_V)).save(folder, {})
