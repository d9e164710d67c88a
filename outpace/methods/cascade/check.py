"""The levels of a cascade by their names and kinds, before a model is loaded."""

from __future__ import annotations

from outpace import registry
from outpace.config import MethodSpec, build
from outpace.drafters.base import Drafter, ExpandingDrafter
from outpace.drafters.parts import split_parts
from outpace.errors import SpecError
from outpace.methods.cascade.drafter import Cascade, no_model


def check_levels(spec: str) -> None:
    """Refuse a cascade with levels that cannot be any.

    Raises:
        SpecError, UnknownNameError: what cannot be read, names and settings that nobody has, a
            level of the wrong kind. What only a loaded level shows is left to the drafter.
    """
    who = "drafter 'cascade'"
    config = build(Cascade.Config, dict(MethodSpec.parse(spec).options), who)
    *strong, last = split_parts(config.levels, who)
    for part in (*strong, last):
        cls = registry.load("drafter", part.name)
        if not issubclass(cls, Drafter):
            raise SpecError(f"{who}: {part} picks among drafters; name one of them as a level")
        build(cls.Config, dict(part.options), f"drafter {part.name!r}")
        if cls.language_model is not Drafter.language_model:
            continue
        if part is not last or not strong:
            raise no_model(part)
        if issubclass(cls, ExpandingDrafter):  # it samples, whatever it is told
            raise SpecError(
                f"{who}: {part} samples and is no language model; the last level must be a "
                "language model or a lookup, such as max_gram"
            )
