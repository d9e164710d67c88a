"""What the conformance suite runs besides the general shapes."""

TRAINED = {"glide": [{"block": 3, "layer": 0}, {"labels": 0.0, "start": 1}]}
