"""What the conformance suite runs besides the general shapes, and networks that guess a little.

Rows that are masks start as next to nothing, so before training hardly anything of them is kept.
"""

import torch

from outpace import registry
from outpace.train.align import moved
from outpace.types import VocabMap
from tests.train.texts import written

SPECS = {
    "dspark": [
        "dspark[model=small.dspark]",
        "dspark[model=small.dspark tree=3x2x1 verifier=traversal]",
        "dspark[model=small.dspark tree=dynamic tree_size=8 policy=specdecpp]",
        "dspark[model=small.dspark tree=chain verifier=block policy=specdecpp[threshold=0.9]]",
    ],
    "jetspec": [
        "jetspec[model=small.jetspec]",
        "jetspec[model=small.jetspec tree=dynamic:3 verifier=tree[replacement=true]]",
        "jetspec[model=small.jetspec tree=chain verifier=block]",
    ],
}


def make(target, folder, texts):
    known = torch.tensor([i for i in range(target.vocab_size) if i % 5])
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[known] = torch.arange(len(known))
    for name in ("dflash", "dspark", "jetspec"):
        kind = registry.load("objective", name)
        config = kind.Config(layers=1, slots=4, anchors=1.0)
        objective = kind.build(config, target, VocabMap(known, feed_V))
        batch = moved(written(target, 16, seed=0, new=24, taps=kind.taps(config, target)), target.device)
        optimizer = torch.optim.Adam(objective.module.parameters(), lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            objective.loss(batch).loss.backward()
            optimizer.step()
        objective.evaluate(batch)
        objective.save(folder / f"small.{name}", {})
