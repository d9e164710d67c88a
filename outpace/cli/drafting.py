"""Options that say who drafts and how, and method specs checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outpace import registry
from outpace.cli.options import model_option
from outpace.config import DEFAULT_DRAFTER, MethodSpec, split_specs
from outpace.errors import RequestError, SpecError, UnknownNameError

_NAMED: tuple[registry.Kind, ...] = ("verifier", "policy")
"""Keys of a method spec that name another method."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    tree: str | None = model_option(
        None,
        "chain, dynamic, cape, children per level such as 4x2x1, or FILE.json.",
        metavar="SHAPE",
        shown="the drafter's",
    )
    tree_size: int | None = model_option(None, "Most guesses per pass.", shown="the drafter's")
    verifier: str | None = model_option(
        None, "Who decides what is kept; see outpace methods.", metavar="NAME", shown="tree"
    )
    allow_lossy: bool = model_option(
        False, "Permit verifiers that change the distribution of the output, such as typical."
    )

    def on(self, spec: str) -> str:
        """The method spec with these settings put in; `none` has nothing to grow or to verify.

        Raises:
            SpecError, UnknownNameError: as ``known``.
            SpecError: they are given to the default drafter, which picks among others.
        """
        parsed = MethodSpec.parse(spec)
        if parsed.name == "none":
            return known(spec)
        text = known(str(parsed.planned(**self._plan)))
        if self.tree is not None:
            from outpace.tree.shapes import parse_shape

            parse_shape(self.tree)  # a wrong shape is told before that nobody here takes one
        if parsed.name == DEFAULT_DRAFTER and self._plan:
            said = " ".join(f"--{key.replace('_', '-')} {v}" for key, v in self._plan.items())
            raise SpecError(
                f"{said} is for one drafter, and {DEFAULT_DRAFTER} picks among several; name one, "
                f"as in -d eagle3 {said}"
            )
        return text

    def check_names(self) -> None:
        """Refuse what nobody has, whoever is to draft. Raises as ``known``."""
        known(str(MethodSpec("none").planned(**self._plan)))

    @property
    def _plan(self) -> dict[str, str | int]:
        plan = {"tree": self.tree, "tree_size": self.tree_size, "verifier": self.verifier}
        return {key: value for key, value in plan.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterOptions(PlanOptions):
    """Who drafts, and how the drafts are grown and verified."""

    drafter: str | None = model_option(
        None,
        "Who guesses: NAME, NAME[key=value ...], or the folder of a trained drafter. "
        "See outpace methods, and outpace methods NAME for its settings.",
        "-d",
        metavar="SPEC",
        shown=DEFAULT_DRAFTER,
    )

    @property
    def spec(self) -> str | None:
        """The method spec that they make; None where nothing was said. Raises as ``on``."""
        if self.drafter is None and not self._plan:
            return None
        return self.on(DEFAULT_DRAFTER if self.drafter is None else self.drafter)


def known(text: str) -> str:
    """A method spec, normalised; checked so that a mistake is said before a model is loaded.

    Raises:
        SpecError: it cannot be read.
        UnknownNameError: drafter, verifier or policy that nobody has.
    """
    spec = MethodSpec.parse(text)
    try:
        registry.entry("drafter", spec.name)
    except UnknownNameError as error:
        if Path(text).is_dir():
            raise SpecError(f"no drafter is called {text!r}; for the folder, write ./{text}") from error
        raise
    options = dict(spec.options)
    for key in _NAMED:
        if key in options:
            registry.entry(key, MethodSpec.parse(options[key]).name)
    return str(spec)


def read_specs(name: str, text: str) -> list[str]:
    """Method specs with commas between them, each as ``known``.

    Raises:
        RequestError: there is none.
        SpecError, UnknownNameError: one that cannot be read, or names what nobody has.
    """
    specs = [known(one) for one in split_specs(text)]
    if not specs:
        raise RequestError(f"{name} {text!r} names no drafter; give method specs, with commas between them")
    return specs
