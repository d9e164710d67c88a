"""Change one thing of what a drafter reads or is, and see whether it guesses better.

Each trial asks at the same positions as the drafter as it is. A change is a cure if it gains enough
and the gain is too large for chance, given how many changes were tried.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace import registry
from outpace.analysis.doctor.findings import Trial
from outpace.analysis.doctor.folder import changed, read_json
from outpace.analysis.doctor.probe import AS_IS, Asked, Lens, Probe, layer_taps
from outpace.config import MethodSpec
from outpace.drafters.base import Drafter
from outpace.drafters.trained import CONFIG
from outpace.engine.method import SingleMethod
from outpace.errors import OutpaceError

LAYER_TAPS, ROW_OFFSET, QUANTIZED, NORM = "layer_taps", "row_offset", "quantized", "norm"
_STEPS = (-3, -2, -1, 1, 2, 3)
"""Layers by which all features are moved together."""
_STRIDE = 3
"""Layers between those that a search tries first."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that may be wrong."""

    name: str
    words: str
    lens: Lens = AS_IS
    drafter: Drafter[Any] | None = None
    """In the place of the one that is looked at."""


def trial(change: Change, asked: Sequence[Asked], usual: Sequence[Asked]) -> Trial:
    """Compare two answers to the same questions."""
    pairs = [(one.right, two.right) for one, two in zip(asked, usual, strict=True)]
    return Trial(
        name=change.name,
        change=change.words,
        kept=sum(one for one, _ in pairs),
        positions=len(pairs),
        won=sum(one and not two for one, two in pairs),
        lost=sum(two and not one for one, two in pairs),
    )


def run(
    changes: Sequence[Change], probe: Probe, drafter: Drafter[Any], usual: Sequence[Asked]
) -> list[Trial]:
    """Try changes one after the other."""
    return [trial(one, probe.ask(one.drafter or drafter, one.lens), usual) for one in changes]


def of_features(taps: frozenset[str], layers: int) -> Iterator[Change]:
    """Other layers, other rows, and features with and without a norm.

    Args:
        taps: those that the drafter reads.
        layers: of the target.
    """
    if not taps:
        return
    names = sorted(taps, key=lambda name: _layer(name, layers))
    yield Change(ROW_OFFSET, "features of the row after", Lens(shift=1))
    for order in itertools.islice(itertools.permutations(names), 1, 6):
        swapped = dict(zip(names, order, strict=True))
        exchanged = ", ".join(
            f"{_layer(new, layers)} for {_layer(old, layers)}" for old, new in swapped.items() if old != new
        )
        yield Change(LAYER_TAPS, f"layer {exchanged}", Lens(taps=swapped))
    for step in _STEPS:
        moved = {name: f"hidden.{_layer(name, layers) + step}" for name in names}
        if all(0 <= _layer(one, layers) <= layers for one in moved.values()):
            yield Change(LAYER_TAPS, f"layers {_listed(moved.values())}", Lens(taps=moved))
    ends = {"hidden.-1": f"hidden.{layers}", f"hidden.{layers}": "hidden.-1"}
    if swaps := {name: ends[name] for name in names if name in ends}:
        yield Change(NORM, f"{_listed(swaps.values())}, across the last norm", Lens(taps=swaps))
    yield Change(NORM, "features divided by their root mean square", Lens(change=_normed))


def _normed(x_TH: Tensor) -> Tensor:
    wide = x_TH.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x_TH.dtype)


def of_settings(spec: MethodSpec, probe: Probe, folder: Path | None, work: Path) -> Iterator[Change]:
    """Weights as trained, and the other kind of norm.

    Args:
        folder: of the drafter's weights.
        work: an empty folder for copies.
    """
    fields = {one.name: one.default for one in dataclasses.fields(_config(spec))}
    own = dict(spec.options)
    if "quantize" in fields and own.get("quantize", fields["quantize"]) not in (None, "none"):
        kept = MethodSpec(spec.name, tuple(sorted({**own, "quantize": "none"}.items())))
        yield from _loaded(Change(QUANTIZED, "weights as trained, not rounded"), kept, probe)
    if folder is None or "model" not in fields:
        return
    decoder = read_json(folder, CONFIG).get("decoder")
    if isinstance(decoder, dict) and "norm_offset" in decoder:
        other = 1.0 - float(decoder["norm_offset"])

        def turn(config: dict[str, Any]) -> None:
            config["decoder"]["norm_offset"] = other

        copy = changed(folder, work / "norm", turn)
        spec = MethodSpec(spec.name, tuple(sorted({**own, "model": str(copy)}.items())))
        words = f"{other:g} added to the weights of its norms"
        yield from _loaded(Change(NORM, words), spec, probe)


def _config(spec: MethodSpec) -> Any:
    return registry.load("drafter", spec.name).Config


def _loaded(change: Change, spec: MethodSpec, probe: Probe) -> Iterator[Change]:
    """The change with a drafter of another spec; nothing if that cannot be loaded."""
    try:
        drafter = SingleMethod(spec, probe.target).drafter
    except OutpaceError:
        return
    yield dataclasses.replace(change, drafter=drafter)


def search(probe: Probe, drafter: Drafter[Any], tick: Callable[[], None] = lambda: None) -> Change | None:
    """Find other layers with which it guesses best, feature by feature; None if there are none.

    Cost: asks at every third position, some twenty times per feature that the drafter reads.
    """
    layers = probe.target.num_layers
    names = sorted(drafter.traits.taps, key=lambda name: _layer(name, layers))
    known = set(layer_taps(probe.target))
    if not names or not known.issuperset(names):
        return None
    small = Probe(probe.target, probe.texts, 3 * probe.every)
    tried: dict[tuple[str, ...], int] = {}

    def right(chosen: Mapping[str, str]) -> int:
        key = tuple(chosen.values())
        if key not in tried:
            tried[key] = sum(one.right for one in small.ask(drafter, Lens(taps=chosen)))
            tick()
        return tried[key]

    best = {name: name for name in names}
    for _ in range(2):
        for name in names:
            coarse = [f"hidden.{layer}" for layer in range(0, layers + 1, _STRIDE)]
            best = max((best, *({**best, name: one} for one in coarse)), key=right)
            near = _layer(best[name], layers)
            fine = [f"hidden.{near + step}" for step in (-2, -1, 1, 2) if 0 <= near + step <= layers]
            best = max((best, *({**best, name: one} for one in fine)), key=right)
    if all(name == taken for name, taken in best.items()):
        return None
    return Change(LAYER_TAPS, f"layers {_listed(best.values())}", Lens(taps=best))


def _layer(name: str, layers: int) -> float:
    """The layer behind which a feature is; one half more behind the last norm."""
    number = name.rpartition(".")[2]
    if not name.startswith("hidden.") or not number.lstrip("-").isdecimal():
        return math.inf
    return int(number) if int(number) >= 0 else layers + 0.5


def _listed(names: Any) -> str:
    return ", ".join(name.rpartition(".")[2] for name in names)


def work_folder() -> tempfile.TemporaryDirectory[str]:
    """Where copies of drafter folders lie during a diagnosis."""
    return tempfile.TemporaryDirectory(prefix="outpace-doctor-")
