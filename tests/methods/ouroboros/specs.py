"""What the conformance suite runs besides the general shapes."""

SPECS = {
    "ouroboros": [
        "ouroboros[draft=draft_model[model=tiny layers=1]]",
        "ouroboros[draft=draft_model[model=tiny layers=1] length=5 phrases=3 faster=true]",
        "ouroboros[draft=draft_model[model=tiny layers=1] length=2 faster=false tree=3x2x2x1x1]",
        "ouroboros[draft=draft_model[model=tiny] length=3 verifier=block]",
        "ouroboros[draft=draft_model[model=tiny layers=1] length=1 tokens=4 tree=3x1x1x1x1 policy=confidence]",
        "ouroboros[draft=early_exit length=2]",
        "ouroboros[draft=eagle3[model=small.eagle3] length=2 tree=dynamic tree_size=12 verifier=tree[replacement=true]]",
        "ouroboros[draft=graph[draft=draft_model[model=tiny layers=1]] length=2 tree=3x2x1 verifier=traversal]",
    ]
}
