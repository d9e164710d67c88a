"""What the conformance suite runs besides the general shapes."""

from outpace.methods.falcon.objective import Falcon, FalconTraining
from tests.conformance.specs import write_head

SPECS = {
    "falcon": [
        "falcon[model=small.falcon]",
        "falcon[model=small.falcon tree=3x2x1x1 verifier=traversal]",
        "falcon[model=small.falcon tree=dynamic tree_size=8]",
        "falcon[model=small.threes tree=dynamic:3 verifier=tree[replacement=true]]",
        "falcon[model=small.threes tree=2x1x1x2 policy=confidence]",
        "falcon[model=small.threes tree=chain verifier=block]",
    ]
}


def make(target, folder, texts):
    # Of the smallest model something is guessed right at the start.
    write_head(target, folder / "small.falcon", Falcon, FalconTraining(spread=0.2))
    write_head(target, folder / "small.threes", Falcon, FalconTraining(block=3, spread=0.2))


TRAINED = {"falcon": [{"block": 3, "passes": 2}, {"block": 1, "passes": 3}]}
