"""What the conformance suite runs besides the general shapes."""

SPECS = {"layer_skip": ["layer_skip[skip=1]", "layer_skip[skip=a1 tree=2x2x1 policy=confidence]"]}
