"""Drafters, verifiers and policies from their specs, for drafters that are made of others."""

from __future__ import annotations

from typing import Any

from outpace import registry
from outpace.config import PLAN_KEYS, MethodSpec, build, split_specs
from outpace.drafters.base import Drafter
from outpace.errors import SpecError
from outpace.models.base import Target


def split_parts(text: str, who: str) -> list[MethodSpec]:
    """Read ``SPEC+SPEC+...``; plus signs inside brackets belong to the specs.

    Raises:
        SpecError: an empty part, or a spec that cannot be read. Also one that says how its drafts
            are to be grown or verified, which the whole decides.
    """
    specs = []
    for part in split_specs(text, "+", empty=True):
        if not part:
            raise SpecError(f"{who}: {text!r} has an empty part; write SPEC+SPEC+...")
        spec = MethodSpec.parse(part)
        _, plan = spec.split()
        if plan:
            raise SpecError(
                f"{who}: {spec} says {', '.join(plan)}, which the whole decides; "
                f"give {', '.join(PLAN_KEYS)} outside of the parts"
            )
        specs.append(spec)
    return specs


def load_part(spec: MethodSpec, target: Target) -> Drafter[Any]:
    """Load a part.

    Raises:
        UnknownNameError, SpecError, ModelError: as for a drafter that is named alone.
        SpecError: a portfolio of drafters, which is none itself.
    """
    who = f"drafter {spec.name!r}"
    cls: type[Drafter[Any]] = registry.load("drafter", spec.name)
    if not issubclass(cls, Drafter):
        raise SpecError(f"{spec.name} chooses among drafters, so it cannot be a part of one")
    target.require(cls.traits.needs, who)
    return cls.load(build(cls.Config, dict(spec.options), who), target)
