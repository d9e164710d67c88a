"""Who takes part in ``outpace bench``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from outpace import registry
from outpace.cli import show
from outpace.cli.drafting import PlanOptions
from outpace.config import MethodSpec, split_specs
from outpace.errors import OutpaceError, UnknownNameError

if TYPE_CHECKING:
    from outpace.bench.records import Contender
    from outpace.bench.synthetic import Texts
    from outpace.engine.engine import Engine


@contextlib.contextmanager
def taking_part(
    engine: Engine,
    specs: list[str] | None,
    plan: PlanOptions,
    notes: list[str],
    *,
    rates: tuple[float, ...] | None,
    texts: Texts,
    peers: list[str],
    python: Path | None,
    fresh: bool = False,
) -> Iterator[list[Contender]]:
    """Give all contenders, `none` first, and close them.

    Args:
        rates: of acceptance, for a synthetic drafter; None: there is none.
    """
    contenders = gather(engine, specs, notes, plan, fresh)
    try:
        if rates is not None:
            from outpace.bench.synthetic import Synthetic

            contenders.append(Synthetic(engine, rates, texts))
        if peers:
            contenders += start_peers(engine, peers, python, specs or [], notes)
        yield contenders
    finally:
        for contender in contenders:
            contender.close()


def gather(
    engine: Engine, specs: list[str] | None, notes: list[str], plan: PlanOptions, fresh: bool = False
) -> list[Contender]:
    """Drafters as contenders, `none` first.

    Args:
        specs: normalised method specs; None takes every registered drafter that this model can
            run without settings, and notes why others stay out.
        plan: how the drafts of all registered drafters are grown and verified.
        fresh: whether they forget what other units taught.

    Raises:
        OutpaceError: a drafter that was named cannot be built.
    """
    from outpace.bench.ours import Ours
    from outpace.drafters.trained import NotTrainedError

    named = [row.name for row in registry.entries("drafter")] if specs is None else specs
    contenders: list[Contender] = []
    untrained: list[str] = []
    for spec in dict.fromkeys(["none", *named]):
        try:
            wanted = plan.on(spec) if specs is None else spec
            contenders.append(Ours(engine, engine.method(wanted), fresh=fresh))
        except OutpaceError as error:
            if specs is not None:
                raise
            if isinstance(error, NotTrainedError):
                untrained.append(spec)
            else:
                notes.append(f"{spec} takes no part: {error}")
    if untrained:
        notes.append(f"not trained for {engine.target.name}, take no part: {', '.join(untrained)}")
    return contenders


def check_peers(text: str) -> list[str]:
    """Read names of peers.

    Raises:
        UnknownNameError: one that nobody has.
    """
    if not text:
        return []
    from outpace.bench.peers.contenders import PEERS

    names = list(dict.fromkeys(split_specs(text)))
    for name in names:
        if name not in PEERS:
            raise UnknownNameError("peer", name, PEERS)
    return names


def start_peers(
    engine: Engine, names: list[str], python: Path | None, specs: list[str], notes: list[str]
) -> list[Contender]:
    """Peers as contenders; why one stays out is noted.

    Args:
        python: of the environment of those outside this process.
        specs: of the drafters; the first that is a whole draft model assists ``hf-assisted``.
    """
    from outpace.bench.peers.contenders import make_peer

    parsed = [MethodSpec.parse(spec) for spec in specs]
    options = [dict(s.options) for s in parsed if registry.can("drafter", s.name, registry.RUNS_MODEL)]
    assistant = next((o["model"] for o in options if "model" in o and "layers" not in o), None)
    found: list[Contender] = []
    for name in names:
        with show.busy(f"starting {name}"):
            peer = make_peer(
                name, engine.target, peer_python=python, assistant=assistant, note=notes.append, beside=found
            )
        if peer is not None:
            found.append(peer)
    return found
