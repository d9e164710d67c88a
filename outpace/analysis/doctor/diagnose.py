"""The examination: folder, text, first guesses, changes one by one, long contexts, costs, machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.analysis.cost import measure, measure_drafter
from outpace.analysis.doctor import folder as folders
from outpace.analysis.doctor import machine, template, trials
from outpace.analysis.doctor.findings import Diagnosis, Finding, Trial, apart, by_depth
from outpace.analysis.doctor.probe import Asked, Probe, answers, layer_taps
from outpace.config import MethodSpec
from outpace.drafters.base import Drafter
from outpace.engine.engine import Engine
from outpace.engine.method import SingleMethod
from outpace.errors import ModelError, RequestError, SpecError

DEPTH = 5
"""Levels of the chains that are drafted."""
_LONGER = 1.5
"""Length of the long texts, in lengths of training."""
_LONG_TEXTS = 4
_CURES: Mapping[str, tuple[str, str]] = {
    trials.LAYER_TAPS: (
        "the drafter reads features of the wrong layers",
        "write these layers into the drafter's config, or train it again",
    ),
    trials.ROW_OFFSET: (
        "the drafter is one position off",
        "feed it the feature of the token before the pending one, and the pending token's embedding",
    ),
    trials.QUANTIZED: ("rounding breaks the drafter's weights", "draft with quantize=none"),
    trials.NORM: (
        "a norm is applied wrongly",
        "check the offset of norm weights, and whether features are taken before or behind the last norm",
    ),
}
"""Kind of a change -> what it says where it helps, and what to do."""

Tick = Callable[[str, int], None]
STAGES = 7


def diagnose(
    engine: Engine,
    spec: str,
    prompts: Sequence[Sequence[int]],
    messages: Sequence[Mapping[str, str]],
    *,
    max_new_tokens: int = 24,
    drafter: Drafter[Any] | None = None,
    seen: machine.Facts | None = None,
    exact: Callable[[], Engine] | None = None,
    costs: bool = True,
    tick: Tick = lambda part, done: None,
) -> Diagnosis:
    """Find out what is wrong with a drafter on a target.

    Args:
        engine: of the target, loaded with ``drafter_anyway``.
        spec: of a single drafter.
        prompts: token ids.
        messages: a conversation, to look at the chat template with.
        max_new_tokens: of each answer.
        drafter: looked at in the place of the one that the spec loads.
        seen: of the machine; None watches it.
        exact: loads the target in float32; asked where nothing else explains few right guesses.
        costs: time passes and levels.
        tick: told of every stage.

    Raises:
        RequestError: not a single drafter, or none at all.
    """
    parsed = MethodSpec.parse(spec)
    to = Diagnosis(engine.target.name, str(parsed))
    tick("drafter", 0)
    method = _loaded(engine, spec, to)
    if method is None:
        return to
    drafter = drafter or method.drafter
    folder = folders.folder_of(parsed, engine.target)
    taps = frozenset(layer_taps(engine.target)) | drafter.traits.taps if drafter.traits.taps else frozenset()
    tick("answers of the target", 1)
    probe = Probe(engine.target, answers(engine, prompts, max_new_tokens, taps))
    template.check(engine.target.tokenizer, messages, to)
    if folder is not None:
        to.reached = folders.reached(folder)
        folders.check(folder, engine.target, probe.texts, to)
    tick("first guesses", 1)
    usual = probe.ask(drafter, depth=DEPTH)
    _first_guesses(usual, to)
    tick("changes", 1)
    _changes(engine, parsed, drafter, probe, folder, usual, to)
    tick("long contexts", 1)
    _contexts(engine, drafter, folder, prompts, max_new_tokens, usual, to)
    if to.low and not to.findings and exact is not None:
        _exactly(exact(), spec, prompts, max_new_tokens, usual, to)
    tick("machine", 1)
    machine.check(seen or machine.facts(engine.target), to)
    tick("costs", 1)
    if costs:
        _costs(engine, method, sum(one.levels > 0 for one in usual) / len(usual), to)
    if to.low and not to.findings:
        to.find(
            "low",
            "first guesses are right much less often than in training, and no change helps",
            f"{to.acceptance[0]:.0%} here, {to.reached[0]:.0%} on held-out text of training",
            "these prompts may differ from those of training: train further with prompts like them",
        )
    tick("costs", 1)
    return to


def _loaded(engine: Engine, spec: str, to: Diagnosis) -> SingleMethod | None:
    """The drafter to look at; None: it cannot be loaded, which is the finding."""
    try:
        method = engine.method(spec)
    except SpecError as error:
        raise RequestError(str(error)) from error
    except ModelError as error:
        to.find("cannot_load", "the drafter cannot be loaded", str(error), "mend what the evidence says")
        return None
    if not isinstance(method, SingleMethod) or MethodSpec.parse(spec).name == "none":
        raise RequestError(f"--drafter must name one drafter to look at, got {spec}")
    return method


def _changes(
    engine: Engine,
    spec: MethodSpec,
    drafter: Drafter[Any],
    probe: Probe,
    folder: Path | None,
    usual: Sequence[Asked],
    to: Diagnosis,
) -> None:
    """Change one thing at a time, and say which change helps."""
    with trials.work_folder() as work:
        changes = [
            *trials.of_features(drafter.traits.taps, engine.target.num_layers),
            *trials.of_settings(spec, probe, folder, Path(work)),
        ]
        to.trials = trials.run(changes, probe, drafter, usual)
        if to.low and not _cured(to):
            found = trials.search(probe, drafter)
            to.trials += trials.run([found] if found is not None else [], probe, drafter, usual)
    _tell_cure(to)


def _first_guesses(usual: Sequence[Asked], to: Diagnosis) -> None:
    to.acceptance, to.counted = by_depth([(one.levels, one.accepted) for one in usual])
    guessed = [one for one in usual if one.guess is not None]
    if broken := sum(one.broken for one in usual):
        to.find(
            "overflow",
            "the drafter computes numbers that are not finite",
            f"at {broken} of {len(usual)} positions",
            "look for huge weights or features; draft with --dtype float32, or train again",
        )
    if not guessed:
        to.notes.append("the drafter guessed nothing at any position")
        return
    told = {-1: [(one.guess, one.before) for one in guessed]}
    for offset in (0, 1, 2):
        told[offset] = [(one.guess, one.after[offset]) for one in guessed if len(one.after) > offset]
    to.guesses_at = {
        offset: sum(a == b for a, b in pairs) / len(pairs) for offset, pairs in told.items() if pairs
    }
    best = max(to.guesses_at, key=lambda offset: to.guesses_at[offset])
    if best != 0 and to.guesses_at[best] > max(0.2, 2 * to.guesses_at[0]):
        where = "the pending token itself" if best == -1 else f"the token {best} further on"
        to.find(
            "row_offset",
            "the drafter is one position off" if best == -1 else "the drafter guesses too far ahead",
            f"its first guess is {where} at {to.guesses_at[best]:.0%} of the positions, and the next "
            f"token at {to.guesses_at[0]:.0%}",
            "give its first row the pending token, at the position behind the committed text",
        )


def _cured(to: Diagnosis) -> list[Trial]:
    """Changes that help for sure, the best first."""
    count = len(to.trials)
    return sorted((one for one in to.trials if one.cures(count)), key=lambda one: -one.gain)


def _tell_cure(to: Diagnosis) -> None:
    """Tell the best change alone: others may help a little for the same reason."""
    for best in _cured(to)[:1]:
        what, do = _CURES[best.name]
        if best.name in to.names:
            return
        before = best.share - best.gain
        to.findings.append(
            Finding(
                name=best.name,
                what=what,
                evidence=f"with {best.change} the first guess is right at {best.share:.0%} of "
                f"{best.positions} positions, as it is at {before:.0%}",
                do=do,
            )
        )


def _contexts(
    engine: Engine,
    drafter: Drafter[Any],
    folder: Path | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    usual: Sequence[Asked],
    to: Diagnosis,
) -> None:
    """Compare with answers behind texts that are longer than those of training."""
    short = (sum(one.right for one in usual), len(usual))
    to.contexts = [(max(one.context for one in usual), *short)]
    trained = None if folder is None else folders.trained_length(folder)
    length = 0 if trained is None else round(_LONGER * trained)
    if not length or length + max_new_tokens > engine.target.max_positions or not short[0]:
        return
    if to.findings:
        to.notes.append("long texts were not tried, since something else is wrong")
        return
    said = [token for ids in prompts for token in ids]
    filler = (said * (1 + length // len(said)))[:length]
    some = [list(ids) for ids in prompts][:: max(1, len(prompts) // _LONG_TEXTS)][:_LONG_TEXTS]
    behind = [[*filler[: length - len(ids)], *ids] for ids in some if len(ids) < length]
    texts = answers(engine, behind, max_new_tokens, drafter.traits.taps)
    asked = Probe(engine.target, texts, 3).ask(drafter)
    long = (sum(one.right for one in asked), len(asked))
    to.contexts.append((length, *long))
    share, usually = long[0] / max(1, long[1]), short[0] / short[1]
    if share < 0.6 * usually and apart(long, short) < 0.01:
        to.find(
            "context",
            "the drafter fails behind long texts",
            f"its first guess is right at {share:.0%} behind {length} tokens and at {usually:.0%} behind "
            f"up to {to.contexts[0][0]}; its training had texts of up to {trained}",
            f"train with -s pipeline.max_length={length} or more, or keep it to shorter texts",
        )


def _exactly(
    engine: Engine,
    spec: str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    usual: Sequence[Asked],
    to: Diagnosis,
) -> None:
    """Ask once more in float32."""
    drafter = engine.method(spec).preferred.drafter
    asked = Probe(engine.target, answers(engine, prompts, max_new_tokens, drafter.traits.taps)).ask(drafter)
    exact, rounded = ((sum(one.right for one in some), len(some)) for some in (asked, usual))
    share, before = exact[0] / max(1, exact[1]), rounded[0] / max(1, rounded[1])
    to.notes.append(f"in float32 the first guess is right at {share:.0%} of the positions")
    if share > before + 0.05 and apart(exact, rounded) < 0.001:
        to.find(
            "dtype",
            "the dtype is too coarse for this drafter",
            f"its first guess is right at {share:.0%} in float32 and at {before:.0%} as it is",
            "--dtype float32, or train it in this dtype",
        )


def _costs(engine: Engine, method: SingleMethod, drafted: float, to: Diagnosis) -> None:
    """Hold the price of levels and rows against what is accepted."""
    chain = SingleMethod(MethodSpec.parse(method.spec).planned(tree="chain", tree_size=DEPTH), engine.target)
    context = min(192, engine.target.max_positions - 16)
    curve = measure(engine.target, rows=range(1, DEPTH + 2), contexts=(context,), batches=(1,), repeat=5)
    cost = measure_drafter(chain, engine.target, levels=DEPTH, repeat=5)
    if not cost.seconds_L or not to.acceptance:
        return
    one = curve.seconds(1, context)
    to.level_cost = cost.per_level / one
    best, reach, emitted = 0.0, drafted, 1.0
    for level, share in enumerate(to.acceptance[: len(cost.seconds_L)]):
        reach *= share
        emitted += reach
        step = curve.seconds(level + 2, context) + cost.seconds_L[level]
        best = max(best, emitted * one / step)
    to.predicted = best
    if best < 0.97 and "busy" in to.names:
        to.notes.append("costs are not judged, since something else used the machine while they were timed")
    elif best < 0.97:
        most = max(0.0, sum_of_gains(to.acceptance))
        to.find(
            "costs",
            "drafting costs more than it brings",
            f"a level costs {to.level_cost:.2f} of a pass and the best chain gives {best:.2f} x plain "
            f"decoding; at this acceptance a level may cost {most:.2f} of a pass at most",
            "take a smaller drafter, fewer guesses (tree_size=1), or the policy auto, which pauses it",
        )


def sum_of_gains(acceptance: Sequence[float]) -> float:
    """Most that a level may cost, in passes, if rows are free: what a guess adds on average."""
    reach, emitted, best = 1.0, 1.0, 0.0
    for level, share in enumerate(acceptance, 1):
        reach *= share
        emitted += reach
        best = max(best, (emitted - 1.0) / level)
    return best
