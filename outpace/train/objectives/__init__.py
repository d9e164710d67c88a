"""Training objectives, one file per method; a new one is a file and a line here."""

from collections.abc import Mapping

OBJECTIVES: Mapping[str, str] = {
    "acceptance": "outpace.methods.draft_model.acceptance_objective:Acceptance",
    "draft_model": "outpace.methods.draft_model.objective:DraftModelObjective",
    "eagle3": "outpace.methods.eagle3.objective:Eagle3",
    "kangaroo": "outpace.methods.early_exit.kangaroo_objective:KangarooObjective",
    "early_exit": "outpace.methods.early_exit.objective:EarlyExitObjective",
    "medusa": "outpace.methods.medusa.objective:Medusa",
    "hydra": "outpace.methods.medusa.hydra_objective:Hydra",
    "ppd": "outpace.methods.ppd.objective:Ppd",
    "dflash": "outpace.methods.dflash.objective:DflashObjective",
}
"""Method -> ``module:Class``, imported when asked for."""
