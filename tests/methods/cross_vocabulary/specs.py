"""What the conformance suite runs besides the general shapes."""

from tests.methods.cross_vocabulary.strangers import write_stranger

SPECS = {
    "cross_vocabulary": [
        "cross_vocabulary[model=small.other]",
        "cross_vocabulary[model=small.other by=text tree=3x2x1]",
        "cross_vocabulary[model=small.other by=tokens tree=3x2x1 policy=confidence]",
        "cross_vocabulary[model=small.other by=tokens verifier=block]",
        "cross_vocabulary[model=small.other by=tokens tree=dynamic tree_size=6 verifier=tree[replacement=true]]",
        "cross_vocabulary[model=small.other by=tokens drafter=cascade[levels=draft_model[model=small.other]+max_gram]]",
        "cross_vocabulary[model=small.other drafter=select[members=suffix+draft_model[model=small.other layers=1]]]",
    ]
}


def make(target, folder, texts):
    write_stranger(target, folder / "small.other")
