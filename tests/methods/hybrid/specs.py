"""What the conformance suite runs besides the general shapes."""

SPECS = {
    "hybrid": [
        "hybrid[lookup=prompt_lookup head=eagle3[model=small.eagle3]]",
        "hybrid[lookup=suffix head=dflash[model=small.dflash] tree_size=9]",
        "hybrid[lookup=suffix head=dspark[model=small.dspark] verifier=tree[replacement=true]]",
        "hybrid[lookup=prompt_lookup head=draft_model[model=tiny layers=1] verifier=traversal]",
        "hybrid[lookup=prompt_lookup head=eagle3[model=small.eagle3] verifier=block]",
    ]
}
