"""The picture at the end: loss and held-out acceptance over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.files import replaced


def draw(history: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw measurements into a PNG file.

    Returns:
        Whether there is a picture: not without matplotlib, nor below two measurements.
    """
    if len(history) < 2:
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = [one["step"] for one in history]
    left.plot(steps, [one["loss"] for one in history], color="black")
    lost = [one.get("held_out_loss") for one in history]
    if None not in lost:
        left.plot(steps, lost, color="black", linestyle="dashed", label="held out")
        left.legend()
    left.set(xlabel="step", ylabel="loss")
    for depth in range(len(history[-1]["acceptance"])):
        label = f"depth {depth + 1}"
        right.plot(steps, [one["acceptance"][depth] for one in history], label=label)
    right.set(xlabel="step", ylabel="held-out acceptance, temperature 0", ylim=(0, 1))
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as fresh:
        figure.savefig(fresh, format="png", dpi=120)
    return True
