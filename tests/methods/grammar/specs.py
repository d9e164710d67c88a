"""What the conformance suite runs besides the general shapes."""

SPECS = {
    "grammar": [
        "grammar",
        "grammar[drafter=draft_model[model=tiny layers=1] tree=2x2]",
        "grammar[drafter=eagle3[model=small.eagle3] verifier=traversal]",
    ]
}
