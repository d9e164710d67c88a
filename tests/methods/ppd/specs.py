"""What the conformance suite runs besides the general shapes."""

from outpace.methods.ppd.objective import Ppd, PpdTraining
from tests.conformance.specs import write_head

SPECS = {
    "ppd": [
        "ppd[model=small.ppd]",
        "ppd[model=small.ppd rows=6 tree=chain verifier=block]",
        "ppd[model=small.ensemble tree=3x2x1 verifier=traversal]",
        "ppd[model=small.ppd tree=dynamic:3 verifier=tree[replacement=true] policy=confidence]",
    ]
}


def make(target, folder, texts):
    write_head(target, folder / "small.ensemble", Ppd, PpdTraining(riders=2, ensemble=2))
