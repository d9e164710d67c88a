"""What the conformance suite runs besides the general shapes."""

SPECS = {
    "cascade": [
        "cascade[levels=draft_model[model=tiny layers=1]+max_gram]",
        "cascade[levels=draft_model[model=tiny layers=1]+max_gram k=4,4/6 lenience=3]",
        "cascade[levels=draft_model[model=tiny layers=1]+max_gram k=3,5/4 tree=3x1x1x1]",
        "cascade[levels=draft_model[model=tiny]+draft_model[model=tiny layers=1]+suffix k=3,2,4/2,4/4 verifier=chain]",
        "cascade[levels=draft_model[model=tiny layers=1]+recycling k=4/3 verifier=block]",
        "cascade[levels=draft_model[model=tiny layers=1] k=3 policy=confidence]",
    ]
}
