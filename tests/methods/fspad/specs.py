"""What the conformance suite runs besides the general shapes."""

TRAINED = {
    "fspad": [
        {"sampling": 0.0, "partial": False},
        {"sampling": 1.0, "partial": False},
        {"sampling": 0.0, "partial": True, "steps": 4},
    ]
}
