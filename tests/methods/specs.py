"""What the conformance suite runs besides the general shapes."""

SPECS = {
    "auto": [
        "auto",
        "auto[drafters=suffix+draft_model[model=tiny]]",
        "auto[add=draft_model[model=tiny layers=1 tree=2x2x1]]",
    ],
    "quantized_self": [
        "quantized_self",
        "quantized_self[kind=int4 tree=2x2]",
        "quantized_self[kind=int4 tree=dynamic tree_size=8 verifier=traversal]",
        "quantized_self[shared=false tree=2x2]",
    ],
    "graph": [
        "graph[draft=draft_model[model=tiny layers=1]]",
        "graph[draft=draft_model[model=tiny] agree=0 tree=3x3x2x1 policy=confidence]",
        "graph[draft=draft_model[model=tiny layers=1] agree=0 verifier=tree[replacement=true]]",
        "graph[draft=draft_model[model=tiny layers=1] agree=0 tree=3x2x2 verifier=traversal]",
        "graph[draft=draft_model[model=tiny layers=1] agree=0 tree=3x2x2 verifier=greedy_plus_one]",
        "graph[draft=draft_model[model=tiny layers=1] agree=0 tree=2x2x2 verifier=spechub]",
        "graph[draft=eagle3[model=small.eagle3] agree=0 tree=3x3x2]",
        "graph[draft=quantized_self[shared=false] agree=0 tree=dynamic tree_size=10]",
    ],
}
