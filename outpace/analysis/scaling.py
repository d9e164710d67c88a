"""Over-training scaling laws: the loss of a model from its weights and the tokens that it has seen.

    L = E + A * N^-2h + B * D^-2h                          N weights, D tokens
      = E + (a * M^h + b * M^-h) * C^-h                    C = 6 N D, M = D / N
        a = A * 6^h,  b = B * 6^h

Both terms fall with the same exponent, so that all models of one M lie on one line in C. For a fixed
exponent the law is linear in E, A and B: these are solved for, without negative ones, and the exponent
is searched. Five points are the fewest, which leaves one degree of freedom; hence the intervals.

From loss to acceptance there is a bridge. With the KL divergence of target and drafter as the loss,
1 - acceptance is at most sqrt(KL / 2) (Pinsker). A power of KL is fitted here:

    acceptance = 1 - k * KL^v

Sources: Gadre et al. 2024, arXiv:2403.08540.

Shape letters: P points, B bootstrap samples, K coefficients (E, A, B).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.errors import RequestError, shown
from outpace.files import parse_json, read_text

Floats = NDArray[np.float64]
FEWEST = 5
"""Points: the law has four numbers."""
SAMPLES = 400
_LEAST, _MOST = 0.005, 3.0
"""Exponents 2h that are tried."""
_GRID, _STEPS = 48, 40
_FIELDS = {"weights": ("weights", "parameters", "params", "n"), "tokens": ("tokens", "d"), "loss": ("loss",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A model that was trained."""

    weights: float
    tokens: float
    loss: float
    acceptance: tuple[float, ...] = ()
    """By depth; empty: not measured."""
    shape: Mapping[str, Any] | None = None
    """Of a drafter, as config.json has it."""

    @property
    def per_weight(self) -> float:
        """M: tokens per weight."""
        return self.tokens / self.weights

    @property
    def flops(self) -> float:
        """C: of the training."""
        return 6 * self.weights * self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """E + A * N^-power + B * D^-power."""

    floor: float
    by_weights: float
    by_tokens: float
    power: float
    """2h."""

    def loss(self, weights: float, tokens: float) -> float:
        return float(
            self.floor + self.by_weights * weights**-self.power + self.by_tokens * tokens**-self.power
        )

    def to_json(self) -> dict[str, float]:
        """Its numbers, and those of the form in C and M."""
        h = self.power / 2
        six = 6**h
        return {**asdict(self), "h": h, "a": self.by_weights * six, "b": self.by_tokens * six}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """A law, and how sure it is."""

    law: Law
    points: tuple[Point, ...]
    left_out: tuple[float, ...]
    """Per point, the loss that a law fitted without it predicts."""
    samples: tuple[Law, ...]
    """Laws of the bootstrap: residuals drawn anew."""

    @property
    def error(self) -> float:
        """Mean relative distance of the points left out."""
        off = [abs(a / p.loss - 1) for a, p in zip(self.left_out, self.points, strict=True)]
        return sum(off) / len(off)

    def interval(self, of: Callable[[Law], float]) -> tuple[float, float]:
        """Between 2.5 and 97.5 % of the samples."""
        low, high = np.quantile([of(law) for law in self.samples], [0.025, 0.975])
        return float(low), float(high)

    def loss_interval(self, weights: float, tokens: float) -> tuple[float, float]:
        """Of the loss of a model of this size."""
        return self.interval(lambda law: law.loss(weights, tokens))

    def number_interval(self, name: str) -> tuple[float, float]:
        """Of a number of the law, by its name in ``Law.to_json``."""
        return self.interval(lambda law: law.to_json()[name])


def fit(points: Sequence[Point]) -> Law:
    """Least squares.

    Raises:
        RequestError: fewer than five points, or all of one size or of one number of tokens.
    """
    check(points)
    weights_P, tokens_P, loss_P = columns(points)
    return _fit(weights_P, tokens_P, loss_P)


def fitted(points: Sequence[Point], samples: int = SAMPLES) -> Fitted:
    """Fit, leave every point out once, and draw residuals anew."""
    law = fit(points)
    weights_P, tokens_P, loss_P = columns(points)
    left_out = []
    for i, point in enumerate(points):
        keep = np.arange(len(points)) != i
        left_out.append(_fit(weights_P[keep], tokens_P[keep], loss_P[keep]).loss(point.weights, point.tokens))
    draw = np.random.default_rng(0)
    guess_P = np.array([law.loss(p.weights, p.tokens) for p in points])
    # Residuals of a fit are smaller than the noise, by what its four numbers took up.
    rest_P = (loss_P - guess_P) * math.sqrt(len(points) / (len(points) - 4))
    drawn = [_fit(weights_P, tokens_P, guess_P + draw.choice(rest_P, len(points))) for _ in range(samples)]
    return Fitted(law=law, points=tuple(points), left_out=tuple(left_out), samples=tuple(drawn))


def columns(points: Sequence[Point]) -> tuple[Floats, Floats, Floats]:
    """Weights, tokens and losses [P]."""
    weights_P, tokens_P, loss_P = np.array([(p.weights, p.tokens, p.loss) for p in points]).T
    return weights_P, tokens_P, loss_P


def check(points: Sequence[Point]) -> None:
    """Refuse what determines no law."""
    if len(points) < FEWEST:
        raise RequestError(f"a law of four numbers needs {FEWEST} points or more, got {len(points)}")
    for what in ("weights", "tokens"):
        if len({getattr(point, what) for point in points}) < 2:
            raise RequestError(f"all points have the same {what}, so nothing tells how loss depends on it")


def _fit(weights_P: Floats, tokens_P: Floats, loss_P: Floats) -> Law:
    def at(power: float) -> tuple[float, Floats]:
        # In units of the middle point, or the columns differ by many orders of magnitude.
        columns_PK = np.stack(
            [np.ones_like(loss_P), (weights_P / weights_P[0]) ** -power, (tokens_P / tokens_P[0]) ** -power],
            1,
        )
        x_K = _positive(columns_PK, loss_P)
        return float(((columns_PK @ x_K - loss_P) ** 2).sum()), x_K

    powers = np.geomspace(_LEAST, _MOST, _GRID)
    best = int(np.argmin([at(float(power))[0] for power in powers]))
    low, high = (math.log(powers[i]) for i in (max(0, best - 1), min(_GRID - 1, best + 1)))
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(_STEPS):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if at(math.exp(left))[0] < at(math.exp(right))[0]:
            high = right
        else:
            low = left
    power = math.exp((low + high) / 2)
    floor, by_weights, by_tokens = (float(one) for one in at(power)[1])
    return Law(
        floor=floor,
        by_weights=by_weights * float(weights_P[0]) ** power,
        by_tokens=by_tokens * float(tokens_P[0]) ** power,
        power=power,
    )


def _positive(columns_PK: Floats, y_P: Floats) -> Floats:
    """Least squares without negative coefficients."""
    x_K: Floats = np.linalg.lstsq(columns_PK, y_P, rcond=None)[0].astype(np.float64)
    if (x_K >= 0).all():
        return x_K
    best, best_K = math.inf, np.zeros(columns_PK.shape[1])
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [1, 2]):
        some, *_ = np.linalg.lstsq(columns_PK[:, chosen], y_P, rcond=None)
        off = float(((columns_PK[:, chosen] @ some - y_P) ** 2).sum())
        if (some >= 0).all() and off < best:
            best, best_K = off, np.zeros(columns_PK.shape[1])
            best_K[chosen] = some
    return best_K


@dataclass(frozen=True, kw_only=True, slots=True)
class Bridge:
    """acceptance = 1 - k * loss^v, and the acceptance of deeper guesses over that of the first."""

    k: float
    v: float
    deeper: tuple[float, ...]
    """By depth, from 1: mean of the points' acceptance there over that at depth 1."""

    def acceptance(self, loss: float) -> tuple[float, ...]:
        first = min(1.0, max(0.0, 1 - self.k * max(loss, 0.0) ** self.v))
        return tuple(min(1.0, first * share) for share in self.deeper)


def bridge(points: Sequence[Point]) -> Bridge:
    """Fit acceptance to loss: a line through their logarithms.

    Raises:
        RequestError: fewer than three points with an acceptance between 0 and 1.
    """
    known = [p for p in points if p.acceptance and 0 < p.acceptance[0] < 1 and p.loss > 0]
    if len({p.loss for p in known}) < 3:
        raise RequestError(
            f"acceptance is fitted from three points or more that have one between 0 and 1, got {len(known)}"
        )
    v, log_k = np.polyfit(
        [math.log(p.loss) for p in known], [math.log(1 - p.acceptance[0]) for p in known], 1
    )
    depths = min(len(p.acceptance) for p in known)
    deeper = [sum(p.acceptance[d] / p.acceptance[0] for p in known) / len(known) for d in range(depths)]
    return Bridge(k=float(np.exp(log_k)), v=float(v), deeper=tuple(deeper))


def read_points(path: Path) -> list[Point]:
    """Points of a CSV file with a heading, or of a JSON file: a list of objects, or ``points`` of one.

    Raises:
        RequestError: a file that cannot be read, or a point without numbers above 0.
    """
    what = f"points file {path}"
    text = read_text(path, what)
    if path.suffix == ".csv":
        rows: Any = list(csv.DictReader(io.StringIO(text)))
    else:
        try:
            rows = parse_json(text.encode())
        except ValueError as error:
            raise RequestError(f"{what} is not JSON: {error}; a CSV file ends in .csv") from None
        rows = rows.get("points") if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not rows:
        raise RequestError(f"{what} holds no points; each needs weights, tokens and loss")
    return [_point(row, f"{what}, point {number}") for number, row in enumerate(rows, 1)]


def _point(row: Any, where: str) -> Point:
    if not isinstance(row, dict):
        raise RequestError(f"{where} is no object with weights, tokens and loss, but {shown(row)}")
    lower = {str(key).strip().lower(): value for key, value in row.items()}
    found: dict[str, Any] = {}
    for name, words in _FIELDS.items():
        given = next((lower[word] for word in words if word in lower), None)
        try:
            found[name] = float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            found[name] = math.nan
        if not 0 < found[name] < math.inf:
            raise RequestError(f"{where}: {name} must be a number above 0, got {shown(given)}")
    acceptance = lower.get("acceptance", ())
    given = acceptance if isinstance(acceptance, list | tuple) else [acceptance]
    try:
        found["acceptance"] = tuple(float(one) for one in given)
    except (TypeError, ValueError):
        raise RequestError(f"{where}: acceptance must be shares by depth, got {shown(acceptance)}") from None
    if not all(0 <= one <= 1 for one in found["acceptance"]):
        raise RequestError(f"{where}: acceptance must be shares by depth, got {shown(acceptance)}")
    shape = lower.get("shape")
    return Point(**found, shape=shape if isinstance(shape, dict) else None)
