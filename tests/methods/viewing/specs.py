"""What the conformance suite runs: views that are narrow on short texts too."""

SMALL = "sinks=1 window=2"
SELECT = "budget=5 sinks=1 window=2 run=1"
FORCE = "budget=4 chunk=1 window=2"
SPECS = {
    "window_self": [
        f"window_self[{SMALL}]",
        f"window_self[{SMALL} tree=3x2x1 verifier=traversal]",
        f"window_self[{SMALL} tree=dynamic:3 verifier=tree[replacement=true]]",
        f"window_self[{SMALL} tree=2x2 policy=confidence]",
    ],
    "token_select": [
        f"token_select[{SELECT} read=4]",
        f"token_select[{SELECT} every=1 same=1.1 tree=3x2x1 verifier=traversal]",
        f"token_select[{SELECT} fall=0.9 tree=dynamic tree_size=6]",
        "token_select[budget=4 sinks=0 window=2 run=2 verifier=block]",
    ],
    "triforce": [
        f"triforce[{FORCE}]",
        f"triforce[{FORCE} draft=recycling policy=confidence]",
        f"triforce[{FORCE} draft=draft_model[model=tiny layers=1] verifier=block]",
        f"triforce[{FORCE} draft=eagle3[model=small.eagle3] guesses=2]",
        f"triforce[{FORCE} guesses=1 every=1 verifier=traversal]",
    ],
}
