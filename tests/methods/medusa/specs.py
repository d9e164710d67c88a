"""What the conformance suite runs besides the general shapes."""

from outpace.methods.medusa.hydra_objective import Hydra, HydraTraining
from tests.conformance.specs import GROWN, write_head

SPECS = {
    "hydra": [
        *(f"hydra[{' '.join(filter(None, ('model=small.hydra', shape)))}]" for shape in GROWN),
        "hydra[model=small.prefix]",
        "hydra[model=small.prefix tree=3x2x1 verifier=traversal]",
        "hydra[model=small.prefix tree=dynamic:3 verifier=tree[replacement=true]]",
    ]
}


def make(target, folder, texts):
    write_head(target, folder / "small.prefix", Hydra, HydraTraining(prefix=True))


TRAINED = {"hydra": [{"prefix": True}]}
