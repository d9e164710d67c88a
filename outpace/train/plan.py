"""What a training began with, kept beside its checkpoints so that it does not go on with something else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.errors import OutpaceError, RequestError, shorten
from outpace.files import parse_json, write_whole

PLAN = "run.json"


def check_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Refuse to go on with another plan than a training began with; one that kept none goes on.

    Args:
        plan: plain values.

    Raises:
        RequestError: one of them is another; the first is named.
        OutpaceError: the file is damaged.
    """
    path = folder / PLAN
    try:
        began = parse_json(path.read_bytes())
        if not isinstance(began, dict):
            raise ValueError("it is no object")
    except FileNotFoundError:
        return
    except ValueError as error:
        why = shorten(str(error), 200)
        raise OutpaceError(
            f"{path} is corrupt ({why}); delete it to go on without comparing settings"
        ) from None
    for key, value in plan.items():
        if began.get(key) != json.loads(json.dumps(value)):
            raise RequestError(
                f"the training in {folder} began with {key} {began.get(key)}, not {value}; give the same, or "
                "delete the folder to begin anew"
            )


def write_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Keep a plan in place of any other."""
    write_whole(folder / PLAN, json.dumps(plan, indent=1))
