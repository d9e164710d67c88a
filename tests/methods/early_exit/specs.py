"""What the conformance suite runs besides the general shapes."""

SPECS = {
    "early_exit": [
        "early_exit",
        "early_exit[layer=1 tree=3x2x1]",
        "early_exit[tree=[-1,-1,0,0,2,2,5] policy=confidence]",
        "early_exit[tree=dynamic:8:0 tree_size=6]",
        "early_exit[tree=dynamic:3 verifier=tree[replacement=true]]",
        "early_exit[tree=3x2x1 verifier=traversal]",
        "early_exit[verifier=block]",
        "early_exit[model=small.early_exit]",
        "early_exit[model=small.early_exit tree=3x2x1 verifier=traversal]",
        "early_exit[model=small.early_exit tree=dynamic:3 verifier=tree[replacement=true]]",
        "early_exit[model=small.early_exit policy=confidence verifier=block]",
    ],
    "kangaroo": [
        "kangaroo[model=small.kangaroo]",
        "kangaroo[model=small.kangaroo threshold=0]",
        "kangaroo[model=small.kangaroo threshold=0 tree=3x2x1 verifier=traversal]",
        "kangaroo[model=small.kangaroo threshold=0.01 tree=dynamic:8:0 tree_size=6]",
        "kangaroo[model=small.kangaroo threshold=0 tree=dynamic:3 verifier=tree[replacement=true]]",
        "kangaroo[model=small.kangaroo tree=2x2 policy=confidence]",
    ],
}
