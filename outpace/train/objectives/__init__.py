"""Training objectives, one file per method; a new one is a file and a line here."""

from collections.abc import Mapping

OBJECTIVES: Mapping[str, str] = {
    "draft_model": "outpace.train.objectives.draft_model:DraftModelObjective",
    "eagle3": "outpace.train.objectives.eagle3:Eagle3",
}
"""Method -> ``module:Class``, imported when asked for."""
