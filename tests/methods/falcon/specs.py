"""What the conformance suite runs besides the general shapes."""

from outpace.methods.falcon.objective import Falcon, FalconTraining
from outpace.train.networks import take_layer
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


class Copied(Falcon):
    """Its layer is the target's last one: of the smallest model something is guessed right at the start."""

    @classmethod
    def build(cls, config, target, vocab):
        made = super().build(config, target, vocab)
        take_layer(made.module.layer, target, target.num_layers - 1)
        return made


def make(target, folder, texts):
    write_head(target, folder / "small.falcon", Copied, FalconTraining())
    write_head(target, folder / "small.threes", Copied, FalconTraining(block=3))


TRAINED = {"falcon": [{"block": 3, "passes": 2}, {"block": 1, "passes": 3}]}
