"""Compare settings of a training at equal steps: a table of held-out acceptance, for docs.

    python tools/ablations.py eagle3 --work DIR --out DIR --steps 400 \
        --try steps=5 --try "steps=5 refused=2" --try noise=0.1 --try loop.optimizer=muon

Every row is one `outpace train` on the same tokens, with the same draft vocabulary, one process after
another; the first row has the method's own settings. A row that is there already is not trained again.
Settings that all rows share are given with ``--set``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("method", help="what to train")
    parser.add_argument("--work", type=Path, required=True, help="folder of the tokens, as of outpace train")
    parser.add_argument("--out", type=Path, required=True, help="folder for the rows' drafters")
    parser.add_argument("--steps", type=int, required=True, help="of every row")
    parser.add_argument("--try", dest="rows", action="append", default=[], help="settings of a row")
    parser.add_argument("--set", dest="shared", action="append", default=[], help="a setting of all rows")
    parser.add_argument("--model", default="smollm2-135m")
    asked = parser.parse_args(arguments)
    print(HEAD)
    for row in ["", *asked.rows]:
        print(line(row or "as it is", trained(asked, row)), flush=True)
    return 0


HEAD = (
    "| settings | acceptance by depth | emitted, chain of 5 | held-out loss | emitted in use | seconds |\n"
    "|---|---|---|---|---|---|"
)


def trained(asked: Any, row: str) -> dict[str, Any]:
    """The provenance of a row's drafter, trained if need be."""
    out = asked.out / (re.sub(r"[^\w.=-]+", "-", row) or "plain")
    if not (out / "provenance.json").is_file():
        settings = [f"loop.steps={asked.steps}", *asked.shared, *row.split()]
        command = [sys.executable, "-m", "outpace", "train", asked.method, "--model", asked.model]
        command += ["--work", str(asked.work), "--out", str(out)]
        for one in settings:
            command += ["--set", one]
        subprocess.run(command, check=True, stdout=sys.stderr)
    found: dict[str, Any] = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
    return found


def line(name: str, told: dict[str, Any]) -> str:
    held_out, measured = told.get("held_out") or {}, told.get("measured") or {}
    depths = " ".join(f"{one:.2f}" for one in held_out.get("acceptance", ()))
    figures = (held_out.get("emitted"), held_out.get("held_out_loss"), measured.get("mean_emitted"))
    cells = [name, depths, *("-" if one is None else f"{one:.2f}" for one in figures)]
    return "| " + " | ".join([*cells, f"{held_out.get('seconds', 0):.0f}"]) + " |"


if __name__ == "__main__":
    raise SystemExit(main())
