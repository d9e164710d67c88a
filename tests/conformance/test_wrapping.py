"""Contracts of drafters that stand before others: what they do not change is forwarded."""

from dataclasses import replace

import pytest
import torch

from outpace.drafters.base import Drafter, Traits
from outpace.drafters.wrapping import WrappingDrafter
from outpace.serving.learning import Watched
from outpace.types import Budget, Draft, Drawn, Feed, Outcome, Verdict
from tests.conformance.test_drafters import METHODS, PROMPTS, engine, files, plain, proposal_rows

__all__ = ["engine", "plain", "files"]


class Listener:
    """A learner that learns nothing."""

    def begin(self, key, prompt):
        return None


def inside(drafter):
    """Drafters that an object holds."""
    for value in vars(drafter).values():
        yield from (
            one for one in (value if isinstance(value, tuple | list) else [value]) if isinstance(one, Drafter)
        )


def faults(engine, wrapper):
    """What a wrapper does not forward."""
    out, text = [], PROMPTS[0]
    with torch.no_grad():
        (row,) = proposal_rows(engine.target, wrapper, Drawn.CHOSEN, Budget(3, 2), 0.0, [text])
        state = row.state
        pairs = list(wrapper.inner(state))
        patch = pytest.MonkeyPatch()

        def uncached(each):
            for number, (drafter, _) in enumerate(pairs, 1):
                patch.setattr(drafter, "num_uncached", lambda *_, n=number: each * n)
            return wrapper.num_uncached(state, text)

        want = sum(1000 * number for number in range(1, len(pairs) + 1))
        if uncached(1000) - uncached(0) != want:
            out.append("num_uncached")
        patch.undo()
        for drafter, _ in pairs:
            changed = replace(drafter.traits, taps=frozenset({"x"}), deterministic=False)
            patch.setattr(drafter, "traits", changed)
            if isinstance(drafter, WrappingDrafter):
                patch.setattr(drafter, "follow", lambda: None)
        feed = Feed.tree(row.lease.slot, text[-1], Draft())
        scored = engine.target.score([feed], row.lease.cache).of(0)
        wrapper.observe(
            [state], [Outcome(Draft(), scored, Verdict((), (7,)), (text[-1],), (0,), len(text) - 1)]
        )
        if pairs and (not wrapper.traits.taps >= {"x"} or wrapper.traits.deterministic):
            out.append("traits")
        patch.undo()
        wrapper.follow()
        if wrapper.traits.previews:
            asked, (drafter, own) = replace(row, tokens=[*text, 7]), pairs[0]
            (draft,) = wrapper.propose([asked])
            if list(wrapper.promise(state, draft)) != list(drafter.promise(own, draft)):
                out.append("promise")
        ended = []
        for drafter, _ in pairs:
            end = drafter.end
            patch.setattr(drafter, "end", lambda own, end=end: (ended.append(id(own)), end(own)))
        wrapper.end(state)
        if sorted(ended) != sorted(id(own) for _, own in pairs):
            out.append("end")
        patch.undo()
    return out


def wrappers(engine):
    """Every wrapper among the methods, and the one of a server that learns."""
    found = [one for spec in METHODS for one in members(engine, spec) if isinstance(one, WrappingDrafter)]
    learning = [engine.method(spec).preferred.drafter for spec in ("suffix", "draft_model[model=tiny]")]
    return [*found, *(Watched(one, Listener()) for one in learning)]


def members(engine, spec):
    return [one.drafter for one in engine.method(spec).members.values()]


def test_drafters_that_hold_others_are_wrappers(engine):
    holding = {type(one) for spec in METHODS for one in members(engine, spec) if any(inside(one))}
    assert len(holding) >= 4 and all(issubclass(kind, WrappingDrafter) for kind in holding)


def test_wrappers_forward_what_they_do_not_change(engine):
    for wrapper in wrappers(engine):
        assert faults(engine, wrapper) == [], type(wrapper).__name__


def test_a_wrapper_that_forgets_is_found(engine):
    """Planted: forwarding that was forgotten, one member at a time."""
    planted = {
        "num_uncached": lambda self, state, tokens: 0,
        "follow": lambda self: None,
        "promise": lambda self, state, draft: (0.5, 0.25, 0.125),
        "end": lambda self, state: None,
    }
    named = {"follow": "traits"}
    graph = engine.method("graph[draft=draft_model[model=tiny layers=1]]").drafter
    for wrapper in (graph, *wrappers(engine)[-2:]):
        for name, wrong in planted.items():
            if name == "promise" and not wrapper.traits.previews:
                continue
            whole = type(wrapper)
            wrapper.__class__ = type("Planted", (whole,), {name: wrong})
            assert faults(engine, wrapper) == [named.get(name, name)]
            wrapper.__class__ = whole
            wrapper.follow()


def test_drafters_that_sample_or_preview_say_so(engine):
    for spec in METHODS:
        for one in members(engine, spec):
            traits = one.traits
            assert isinstance(traits, Traits)
            assert traits.previews <= (type(one).promise is not Drafter.promise and not traits.samples)
