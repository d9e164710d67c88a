"""Rotary position tables: every kind of frequency scaling, in one record.

Sources:

- RoPE (Su et al. 2021, arXiv:2104.09864)
- linear interpolation (Chen et al. 2023, arXiv:2306.15595)
- YaRN (Peng et al. 2023, arXiv:2309.00071)
- "llama3": the smoothed bands of Llama 3.1
- "dynamic": an NTK-aware base that grows once a text is longer than the model's own context. There the
  context ends, so "dynamic" is the plain table (see ``ENDS``).
- "longrope" (Ding et al. 2024, arXiv:2402.13753): a divisor per frequency, and other divisors once a text is
  longer. There the context ends too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.errors import ModelError, shown
from outpace.models.fields import MOST, Fields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "divided")
_ENDS_DYNAMIC = (
    "dynamic rotary scaling turns all keys anew for every longer text, so what a longer text means "
    "depends on how it was cut into passes"
)
_ENDS_LONGROPE = (
    "longrope scaling turns all keys anew once a text passes the original length, so what a longer "
    "text means depends on how it was cut into passes"
)
ENDS = {"dynamic": _ENDS_DYNAMIC, "longrope": _ENDS_LONGROPE}
"""Kind -> why the context of a model with such scaling ends at its original length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """One rotary table; two layers share a table exactly when their records are equal."""

    kind: str
    """One of ``KINDS``. ``divided`` is llama 3 scaling as GGUF stores it: a list of divisors."""
    theta: float
    """Base of the wavelengths."""
    dim: int
    """Dimensions of a head."""
    factor: float = 1.0
    """How many times the context was stretched."""
    original_max_positions: int = 0
    """Context length before stretching."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / this are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / this stay as they are."""
    beta_fast: float = 32.0
    """yarn: dimensions with more rotations than this stay as they are."""
    beta_slow: float = 1.0
    """yarn: dimensions with fewer rotations than this are stretched in full."""
    attention_factor: float | None = None
    """yarn, longrope: factor on cos and sin; None derives it from ``factor``, and from the two mscales."""
    mscale: float | None = None
    """yarn: numerator of the derived attention factor."""
    mscale_all_dim: float | None = None
    """yarn: denominator of the derived attention factor."""
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions."""
    divisors: tuple[float, ...] = ()
    """divided, longrope: one divisor per frequency."""
    still: int = field(default=0, repr=False)
    """How many of the dimensions do not rotate; half of them end each half of the head."""

    def __post_init__(self) -> None:
        numbers = (self.theta, self.factor, self.low_freq_factor, self.high_freq_factor, self.beta_fast)
        maybe = (self.attention_factor, self.mscale, self.mscale_all_dim)
        all_numbers = (*numbers, self.beta_slow, *self.divisors, *(x for x in maybe if x is not None))
        right = all(type(x) in (int, float) and math.isfinite(x) for x in all_numbers)
        right &= all(type(x) is int and 0 <= x <= MOST for x in (self.dim, self.original_max_positions))
        right &= type(self.still) is int and 0 <= self.still <= self.dim and self.still % 2 == 0
        right &= not self.divisors or len(self.divisors) == (self.dim - self.still) // 2
        if not right or self.kind not in KINDS or self.theta <= 0 or self.factor <= 0:
            raise ModelError(f"the rotary table {shown(asdict(self))} cannot be built")

    @classmethod
    def none(cls, dim: int) -> "Rope":
        """A table that rotates nothing."""
        return cls(kind="default", theta=1.0, dim=dim, still=dim)

    def frequencies(self) -> tuple[Tensor, float]:
        """Give the inverse frequencies, and the factor that multiplies cos and sin.

        Returns:
            float32 of shape ``[dim / 2]`` on the CPU, those that stand still left out, and the factor
            (1.0 unless yarn or longrope).
        """
        size = self.dim - self.still
        wave = self.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / max(size, 1))
        if self.kind == "linear":
            return 1.0 / wave / self.factor, 1.0
        if self.kind == "llama3":
            return self._llama3(1.0 / wave), 1.0
        if self.kind == "yarn":
            return self._yarn(wave), self._yarn_attention()
        if self.kind == "longrope":
            return 1.0 / (torch.tensor(self.divisors, dtype=torch.float32) * wave), self._long_attention()
        if self.kind == "divided":
            return 1.0 / wave / torch.tensor(self.divisors, dtype=torch.float32), 1.0
        return 1.0 / wave, 1.0

    def _llama3(self, inverse: Tensor) -> Tensor:
        turns = self.original_max_positions * inverse / (2 * math.pi)
        band = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = band.clamp(0, 1)
        return (1 - keep) * inverse / self.factor + keep * inverse

    def _yarn(self, wave: Tensor) -> Tensor:
        low, high = (self._yarn_bound(turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = (torch.arange(self.dim // 2, dtype=torch.float32) - low) / (high - low)
        keep = 1 - ramp.clamp(0, 1)
        return (1 - keep) / (self.factor * wave) + keep / wave

    def _yarn_bound(self, turns: float) -> float:
        """Give the dimension that makes ``turns`` rotations over the original context."""
        wavelength = self.original_max_positions / (turns * 2 * math.pi)
        return self.dim * math.log(wavelength) / (2 * math.log(self.theta))

    def _yarn_attention(self) -> float:
        def scale(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)

    def _long_attention(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        stretched = math.log(max(self.factor, 1.0)) / math.log(self.original_max_positions)
        return math.sqrt(1 + stretched)

    @classmethod
    def from_hf(
        cls,
        parameters: Mapping[str, Any],
        *,
        theta: float,
        dim: int,
        max_positions: int,
        partial: bool = False,
    ) -> "Rope":
        """Read ``rope_scaling`` or one entry of ``rope_parameters`` of a config.json.

        Args:
            parameters: the mapping; its own ``rope_theta`` wins over ``theta``.
            theta: base to use when the mapping names none.
            partial: whether some of the dimensions may stand still.

        Raises:
            ModelError: an unknown kind, a partial rotation, a missing or impossible value.
        """
        said = Fields("rope scaling", {}, parameters)
        kind = said.text("rope_type", said.text("type", "default"))
        if said.get("mrope_section"):
            kind = "mrope"
        if kind not in KINDS[:-1]:
            known = ", ".join(KINDS[:-1])
            raise ModelError(f"rope scaling {shown(kind)} is not supported; supported: {known}")
        part = said.number("partial_rotary_factor", 1.0)
        still = dim - int(dim * part)
        if part != 1.0 and (not partial or still < 0 or still % 2):
            raise ModelError(f"partial_rotary_factor {part} is not supported, only 1.0")
        original = said.count("original_max_position_embeddings", max_positions)
        factor = 1.0
        if kind in ("yarn", "longrope"):
            factor = said.number("factor", max_positions / original)
        elif kind != "default":
            factor = said.number("factor")
        # The published rule for "dynamic" stretches beyond the model's own context.
        start = {"default": 0, "linear": 0, "dynamic": max_positions}.get(kind, original)
        llama3 = kind == "llama3"
        return cls(
            kind=kind,
            theta=said.number("rope_theta", theta),
            dim=dim,
            factor=factor,
            original_max_positions=start,
            low_freq_factor=said.number("low_freq_factor", None if llama3 else 1.0),
            high_freq_factor=said.number("high_freq_factor", None if llama3 else 4.0),
            beta_fast=said.number("beta_fast", 32.0),
            beta_slow=said.number("beta_slow", 1.0),
            attention_factor=said.maybe("attention_factor"),
            mscale=said.maybe("mscale", zero=True),
            mscale_all_dim=said.maybe("mscale_all_dim", zero=True),
            truncate=bool(said.get("truncate", True)),
            divisors=_divisors(said, dim - still) if kind == "longrope" else (),
            still=still,
        )


def _divisors(said: Fields, size: int) -> tuple[float, ...]:
    """Those of texts within the original context."""
    found = said.get("short_factor")
    if not isinstance(found, list) or len(found) != size // 2:
        raise ModelError(
            f"rope scaling 'longrope' needs {size // 2} numbers as short_factor, got {shown(found)}"
        )
    return tuple(found)


class Rotation:
    """One rotary table, by position, as long as needed so far."""

    def __init__(self, rope: Rope, device: torch.device) -> None:
        self._rope = rope
        self._table_PE = torch.empty(0, rope.dim // 2, dtype=torch.complex64, device=device)
        self._lying = self._table_PE, 0
        self._length = 0

    def at(self, positions: Sequence[int]) -> Tensor:
        """Give complex [T, 1, E], the factors of the rows at ``positions``."""
        table_PE = self.table(max(positions) + 1)
        index = torch.tensor(positions, device=table_PE.device)
        return table_PE.index_select(0, index).unsqueeze(1)

    def table(self, length: int) -> Tensor:
        """Give complex [P, E], the factors of the positions below ``length``, and of more."""
        return self.lying(length)[0]

    def lying(self, length: int) -> tuple[Tensor, int]:
        """The table and its address; the same object until it grows."""
        if length > self._length:
            self._grow(max(length, 512, self._length * 3 // 2))
        return self._lying

    def _grow(self, length: int) -> None:
        done = len(self._table_PE)
        position_P1 = torch.arange(done, length, dtype=torch.float32)[:, None]
        frequency, factor = self._rope.frequencies()
        still = (0, self._rope.still // 2)
        with torch.inference_mode(False):
            angle_PE = position_P1 * frequency
            cos_PE, sin_PE = angle_PE.cos() * factor, angle_PE.sin() * factor
            table_PE = torch.complex(F.pad(cos_PE, still, value=1.0), F.pad(sin_PE, still))
            self._table_PE = torch.cat([self._table_PE, table_PE.to(self._table_PE.device)])
        self._lying = self._table_PE, self._table_PE.data_ptr()
        self._length = len(self._table_PE)
