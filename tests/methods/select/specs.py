"""What the conformance suite runs besides the general shapes."""

SPECS = {
    "select": [
        "select[members=suffix+recycling]",
        "select[members=max_gram+draft_model[model=tiny layers=1]]",
        "select[members=prompt_lookup+adaptive_ngram+recycling verifier=chain]",
        "select[members=suffix+recycling merge=false]",
        "select[members=eagle3[model=small.eagle3]+kangaroo[model=small.kangaroo threshold=0]]",
        "select[members=suffix+recycling+cascade[levels=draft_model[model=tiny layers=1]+max_gram] tree=3x2x1]",
    ]
}
