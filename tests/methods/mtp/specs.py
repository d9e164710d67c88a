"""What the conformance suite runs besides the general shapes."""

from outpace.methods.mtp.objective import Mtp, MtpTraining
from tests.conformance.specs import write_head

SPECS = {
    "mtp": [
        "mtp[model=small.mtp]",
        "mtp[model=small.mtp tree=dynamic tree_size=8]",
        "mtp[model=small.chain tree=3x2x1 verifier=traversal]",
        "mtp[model=small.chain tree=dynamic:3 verifier=tree[replacement=true]]",
        "mtp[model=small.chain tree=2x2 policy=confidence]",
        "mtp[model=small.chain tree=chain verifier=block]",
        "mtp[model=small.beside tree=3x2x1 verifier=traversal]",
        "mtp[model=small.beside tree=dynamic:3 verifier=tree[replacement=true]]",
    ]
}


def make(target, folder, texts):
    write_head(target, folder / "small.chain", Mtp, MtpTraining(modules=2, steps=3, recycle="raw"))
    write_head(target, folder / "small.beside", Mtp, MtpTraining(kind="parallel", modules=3, base="raw"))


TRAINED = {
    "mtp": [
        {"modules": 2, "steps": 2},
        {"modules": 3, "steps": 5, "recycle": "raw", "base": "raw"},
        {"kind": "parallel", "modules": 3},
    ]
}
