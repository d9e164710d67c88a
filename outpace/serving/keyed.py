"""Check that what is kept per key is not shared through one file."""

from __future__ import annotations

from collections.abc import Sequence

from outpace import registry
from outpace.config import MethodSpec, split_specs
from outpace.errors import RequestError


def check_stores(drafters: Sequence[str]) -> None:
    """Refuse drafters that would never use the store that they name, since every request has a key.

    Raises:
        SpecError: one that cannot be read.
        RequestError: one names a store of past answers.
    """
    for spec in drafters:
        if _stores(MethodSpec.parse(spec)):
            raise RequestError(
                f"drafter {spec}: with API keys past answers are kept apart, key by key, and "
                "nothing would be read from or written to store=; use shared=true in its place, "
                "or add --share-across-keys"
            )


def _stores(spec: MethodSpec) -> bool:
    """Whether it, or a part of it, names a store."""
    return any(
        (key == "store" and registry.can("drafter", spec.name, registry.KEEPS_STORE))
        or ("[" in value and any(_stores(MethodSpec.parse(part)) for part in split_specs(value, "+")))
        for key, value in spec.options
    )
