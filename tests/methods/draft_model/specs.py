"""What the conformance suite runs besides the general shapes."""

from outpace.methods.draft_model.acceptance_objective import Acceptance, AcceptanceTraining
from tests.conformance.specs import write_head

SPECS = {
    "draft_model": [
        "draft_model[model=tiny layers=1]",
        "draft_model[model=tiny]",
        "draft_model[model=tiny layers=1 tree=3x2x1]",
        "draft_model[model=tiny tree=2x2x2 policy=confidence]",
        "draft_model[model=tiny layers=1 tree=2x2 verifier=tree[replacement=true]]",
        "draft_model[model=tiny layers=1 verifier=chain]",
        "draft_model[model=tiny layers=1 tree=dynamic tree_size=6]",
        "draft_model[model=tiny layers=1 tree=dynamic:3 verifier=tree[replacement=true]]",
        "draft_model[model=tiny layers=1 verifier=block]",
        "draft_model[model=tiny layers=1 tree=3x2 verifier=k_seq]",
        "draft_model[model=tiny layers=1 tree=3x2 verifier=greedy_plus_one]",
        "draft_model[model=tiny layers=1 tree=3x2 verifier=spechub]",
        "draft_model[model=tiny layers=1 tree=3x2x1 verifier=traversal]",
        "draft_model[model=tiny layers=1 policy=schedule]",
        "draft_model[model=tiny layers=1 policy=bandit]",
        "draft_model[model=tiny layers=1 acceptance=small.acceptance tree=2x2x1x1x1 policy=specdecpp]",
        "draft_model[model=tiny policy=goodput]",
        "draft_model[model=tiny layers=1 tree=dynamic tree_size=6 policy=goodput]",
    ]
}


def make(target, folder, texts):
    judged = AcceptanceTraining(draft="tiny", draft_layers=1)
    write_head(target, folder / "small.acceptance", Acceptance, judged)
