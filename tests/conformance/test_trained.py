"""What drafts is what was trained: logits of a drafter along a text are those of its objective.

Runs every registered objective that guesses several depths at every row, as it is by default and in
the variants that a room adds: ``TRAINED`` in ``tests/methods/ROOM/specs.py``.
"""

import sys
from dataclasses import replace

import pytest
import torch

from outpace import Engine, registry
from outpace.drafters import prefix_layer
from outpace.train.ahead import AheadObjective
from outpace.train.align import EAGLE, Aligned
from outpace.train.capture import passes, rows_of, width_of
from outpace.types import Budget, Drawn, Feed
from tests.conformance.specs import rooms
from tests.conformance.test_drafters import proposal_rows
from tests.conformance.test_growth import told
from tests.train.texts import written

ROWS = 5


def variants():
    """(name, options) of every training to be compared."""
    for row in registry.entries("objective"):
        if issubclass(registry.load("objective", row.name), AheadObjective):
            yield row.name, {}
    for room in rooms():
        for name, some in getattr(room, "TRAINED", {}).items():
            yield from ((name, options) for options in some)


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


def exact(batch, target, taps):
    """The batch with features as the drafter sees them, not rounded."""
    found = {tap: [] for tap in taps}
    for ids, length in zip(batch.token_BT.tolist(), batch.length_B.tolist(), strict=True):
        cache = target.new_cache()
        scored = target.score([Feed.chain(slot := cache.open(), ids[:length])], cache, taps=passes(taps))
        cache.keep(slot, range(length))
        for tap in taps:
            padded = torch.zeros(len(ids), width_of(target, tap))
            padded[:length] = rows_of(target, cache, slot, range(length), scored.taps, tap)
            found[tap].append(padded)
    return replace(batch, feature={tap: torch.stack(parts) for tap, parts in found.items()})


@pytest.mark.parametrize("waiting", [None, 3], ids=["", "read early"])
@pytest.mark.parametrize(("name", "options"), list(variants()))
@torch.no_grad()
def test_a_drafter_says_what_its_objective_learned(engine, tmp_path, monkeypatch, name, options, waiting):
    """Also where more rows of a prompt wait than a drafter leaves for its next draft."""
    target, kind = engine.target, registry.load("objective", name)
    objective = kind.build(kind.Config(**options), target, None)
    coins = torch.Generator().manual_seed(1)
    for parameter in objective.named().values():  # away from the start, and rounded as files are
        moved = parameter + 0.05 * torch.randn(parameter.shape, generator=coins)
        parameter.copy_(moved.to(torch.bfloat16))
    objective.save(tmp_path / "made", {})
    made = registry.load("drafter", name)
    for module in (sys.modules[made.__module__], prefix_layer) if waiting else ():
        if hasattr(module, "_WAITING"):
            monkeypatch.setattr(module, "_WAITING", waiting)
    if waiting and hasattr(made, "most_waiting"):
        monkeypatch.setattr(made, "most_waiting", waiting)
    drafter = made.load(made.Config(model=str(tmp_path / "made"), quantize=None), target)
    taps = kind.taps(objective.config, target)
    batch = exact(written(target, 3, seed=4, new=20, prompt=3), target, taps)
    aligned = Aligned(batch, EAGLE)
    states = objective.states(batch, aligned)
    checked, off = [0] * len(states), 0.0
    for b, text in enumerate(batch.token_BT.tolist()):
        length = int(batch.length_B[b])
        for a in range(0, int(aligned.real_BA[b].sum()), 20 // ROWS):
            end = int(aligned.place_BA[b, a]) + 2  # the pending token is the last of these
            ahead = text[end:length]
            depth = min(len(states), len(ahead) + 1)
            budget = Budget(depth, depth)
            (row,) = proposal_rows(target, drafter, Drawn.CHOSEN, budget, 0.0, [text[:end]])
            _, said = told(drafter, [row], [ahead])
            if not said:
                continue  # too short a text for this drafter
            for at in range(min(depth, len(ahead) + 1)):
                path = tuple(ahead[:at])
                if end + at >= length:
                    continue
                wanted = target.head(states[at][b, a][None])[0]
                torch.testing.assert_close(said[0, path], wanted, atol=2e-3, rtol=2e-3)
                checked[at] += 1
                if a:
                    off = max(off, float((target.head(states[at][b, a - 1][None])[0] - wanted).abs().max()))
            drafter.end(row.state)
    assert min(checked) >= 5 and off > 0.1, "planted: the row before says something else"
