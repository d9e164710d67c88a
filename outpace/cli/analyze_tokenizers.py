"""``outpace analyze tokenizers``: what is in vocabularies, and what two of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace import registry
from outpace.cli import show
from outpace.cli.options import AS_JSON, ModelOptions, WorkloadOptions, option, writes_folder
from outpace.errors import RequestError

if TYPE_CHECKING:
    from outpace.analysis.tokens.languages import Counted
    from outpace.analysis.tokens.vocabulary import Vocabulary

EXAMPLES = """
Examples:

  outpace analyze tokenizers smollm2-135m ./other-model

  outpace analyze tokenizers ./a ./b/tokenizer.json --texts french.txt --out report

  outpace analyze tokenizers ./big ./small --measure --limit 16
"""
_WEIGHED = 1 << 15  # characters of every text by which a pair is weighed
_SCRIPTS, _CONTROL = 12, 24  # rows, and names, that people may still read


def tokenizers(
    names: Annotated[
        list[str],
        typer.Argument(metavar="A [B ...]", help="Models, or tokenizer.json files. The first is the target."),
    ],
    *,
    texts: list[Path] | None = option(
        None,
        "Text to write with them: plain, one language per file, or JSONL with language and text. Repeatable.",
        metavar="FILE",
        shown="a sample in 27 languages",
    ),
    measure: bool = option(
        False,
        "Load the models: weigh what they share by answers of the first, predict how far guesses of the "
        "others are kept, and have them draft.",
    ),
    workload: WorkloadOptions,
    max_new_tokens: int = option(48, "With --measure: tokens per answer.", least=8),
    temperature: float = option(0.0, "With --measure: of the answers.", "-t", metavar="T"),
    nodes: int = option(4, "With --measure: guesses per draft.", least=1),
    dtype: str = option("auto", "With --measure: float32, bfloat16, or auto.", metavar="D"),
    threads: int | None = option(None, "CPU threads to compute with.", shown="all cores", least=1),
    as_json: bool = AS_JSON,
    out: Path | None = writes_folder(None, "Write tokenizers.json and plots here.", "-o"),
) -> None:
    """Show what is in vocabularies, and what the others share with the first.

    Needs tokenizers alone, unless --measure is given.
    """
    if len(set(names)) < len(names):
        raise RequestError(f"{' '.join(names)} names a tokenizer twice; give each once")
    if measure and len(names) < 2:
        raise RequestError("--measure compares a target with draft models; name two models or more")

    from outpace.analysis.tokens.languages import by_language, read_texts
    from outpace.analysis.tokens.vocabulary import look_into, read_tokenizer

    written = read_texts(texts or ())
    prompts = workload.read() if measure else []
    known = {name: read_tokenizer(name) for name in names}
    with show.busy("looking into vocabularies"):
        vocabularies = [look_into(name, one) for name, one in known.items()]
        rows = by_language(known, written)
    target = names[0]
    pairs = [
        {"target": target, "draft": other, **one.overlap(known[target], known[other], encoded).to_json()}
        for entry in registry.entries("pair")
        if (one := registry.load("pair", entry.name))
        for encoded in [[known[target].encode(text[:_WEIGHED], special=False) for text in written.values()]]
        for other in names[1:]
    ]
    report: dict[str, Any] = {
        "tokenizers": [one.to_json() for one in vocabularies],
        "languages": [row.to_json() for row in rows],
        "pairs": pairs,
    }
    if measure:
        model = ModelOptions(model=target, dtype=dtype, threads=threads)
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        found = _measured(model, names[1:], workload, prompts, nodes, settings)
        report |= {"measured": found, **settings, "nodes": nodes}

    def say() -> None:
        show_vocabularies(vocabularies)
        show_languages(rows, names)
        show_pairs(pairs, "the texts")
        if measure:
            show_measured(report["measured"], report)

    pictures = {
        "kinds": partial(_kinds_picture, vocabularies=vocabularies),
        "languages": partial(_languages_picture, rows=rows, names=names),
    }
    show.finish(report, as_json, say, out, "tokenizers", pictures)


def _measured(
    model: ModelOptions,
    others: Sequence[str],
    workload: WorkloadOptions,
    prompts: Any,
    nodes: int,
    settings: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """What every draft model shares with the target's own answers, and how far its guesses are kept."""
    found: list[dict[str, Any]] = []
    engine = model.load(drafter="none")
    from outpace.models.load import load_beside
    from outpace.params import NEUTRAL, SamplingParams

    asked = workload.pick(engine, prompts, settings["max_new_tokens"])
    params = SamplingParams(**{**NEUTRAL, **settings})
    entries = registry.entries("pair")
    parts = len(entries) * len(others) * 5 + 1
    with show.progress(parts, "parts") as tick:
        tick("answers of the target", 0)
        answers = [engine.generate([ids], params, drafter="none")[0].tokens for ids in asked]
        tick("answers of the target", 1)
        ends = engine.eos_ids
        told = [tuple(token for token in tokens if token not in ends) for tokens in answers]
        for entry in entries:
            pair = registry.load("pair", entry.name)
            kept = [
                pair.Answer(ids, tokens) for ids, tokens in zip(asked, told, strict=True) if len(tokens) > 1
            ]
            for other in others:
                tick(f"{other}: predicting", 0)
                draft = load_beside(engine.target, other)
                if engine.target.tokenizer is None or draft.tokenizer is None:
                    raise RequestError(f"--measure needs tokenizers, and {other} or the target has none")
                shared = pair.overlap(engine.target.tokenizer, draft.tokenizer, told)
                tick(f"{other}: predicting", 1)
                ways = {}
                for way in pair.WAYS:
                    expected = pair.predict(engine.target, draft, kept, params.temperature, way, nodes)
                    tick(f"{other}: drafting by {way}", 1)
                    spec = pair.spec_of(other, way).removesuffix("]") + f" tree_size={nodes}]"
                    real = pair.measure(engine, spec, asked, params)
                    tick(f"{other}: drafting by {way}", 1)
                    ways[way] = {"predicted": expected.to_json(), "drafted": real.to_json(), "spec": spec}
                found.append({"draft": other, "answers": len(kept), **shared.to_json(), "by": ways})
    return found


def show_vocabularies(found: Sequence[Vocabulary]) -> None:
    """Print kinds, scripts and control tokens."""
    from outpace.analysis.tokens.vocabulary import KINDS, assigned, worded

    names = tuple(_short([one.name for one in found]))
    show.write("Kinds of tokens\n")
    rows = [
        (kind, *(f"{one.kinds[kind]} ({100 * one.kinds[kind] / one.size:.1f} %)" for one in found))
        for kind in KINDS
    ]
    rows += [
        ("all", *(str(one.size) for one in found)),
        ("bytes with a token", *(f"{one.bytes} of 256" for one in found)),
    ]
    show.table(("", *names), rows, numbers=names)
    show.write("Scripts: tokens of their letters alone; of their letters, those with a token of their own\n")
    order = list(dict.fromkeys(script for one in found for script in one.scripts))
    order.sort(key=lambda script: -max(one.scripts.get(script, 0) / one.size for one in found))
    table: list[tuple[str, ...]] = []
    for script in order[:_SCRIPTS]:
        every = assigned().get(script, 0)
        cells = []
        for one in found:
            count, share = one.scripts.get(script, 0), 100 * one.scripts.get(script, 0) / worded(one.kinds)
            cells.append(f"{count} ({share:.1f} %); {one.letters.get(script, 0)} of {every}")
        table.append((script if script == "CJK" else script.capitalize(), *cells))
    if len(order) > _SCRIPTS:
        table.append((f"({len(order) - _SCRIPTS} more; --json has all)", *[""] * len(found)))
    show.table(("", *names), table, numbers=names)
    for one in found:
        listed = " ".join(one.control[:_CONTROL])
        more = f" and {len(one.control) - _CONTROL} more" if len(one.control) > _CONTROL else ""
        show.write(f"Control tokens of {Path(one.name).name}: {listed}{more}\n")
    show.write("\n")


def _short(names: Sequence[str]) -> list[str]:
    """Names without folders, unless two would then be the same."""
    short = [Path(name).name for name in names]
    return short if len(set(short)) == len(short) else list(names)


def show_languages(rows: Sequence[Counted], names: Sequence[str]) -> None:
    """Print tokens per character."""
    from outpace.analysis.tokens.languages import BASE, CODE

    show.write("Tokens per character; a star: the text does not come back as it was\n")
    base = next((row for row in rows if row.language == BASE), None)
    short = _short(names)
    over = [f"{name}, x {BASE}" for name in short] if base is not None else []
    table = [
        (
            row.language,
            str(row.characters),
            *(f"{row.per_character(name):.3f}{'' if row.exact[name] else ' *'}" for name in names),
            *(
                [
                    "" if row.language == CODE else f"{row.tokens[name] / base.tokens[name]:.2f}"
                    for name in names
                ]
                if base is not None
                else []
            ),
        )
        for row in rows
    ]
    columns = ["characters", *short, *over]
    show.table(("", *columns), table, numbers=columns)


def show_pairs(pairs: Sequence[Mapping[str, Any]], where: str) -> None:
    """Print what draft models share with the target."""
    if not pairs:
        return
    show.write(f"Shared with the first, in {where}\n")
    columns = {
        "": "{1}",
        "tokens": "{0[draft_tokens]}",
        "shared": "{0[shared_tokens]} of {0[target_tokens]}",
        "of tokens used": "{0[shared_mass]:.1%}",
        "of borders": "{0[shared_borders]:.1%}",
        "its tokens per token": "{0[draft_tokens_per_target_token]:.2f}",
    }
    show.listed([(one, Path(one["draft"]).name) for one in pairs], columns, texts=("",))


def show_measured(found: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> None:
    """Print predicted and measured acceptance."""
    show_pairs(found, "answers of the first")
    show.write(
        f"Drafts of at most {report['nodes']} tokens, temperature {report['temperature']:g}: predicted, "
        "then measured\n"
    )
    columns = {
        "draft model": "{0}",
        "by": "{1}",
        "first guess": "{2[first_guess]:.3f}",
        "measured": "{3[first_guess]:.3f}",
        "acceptance": "{2[acceptance_rate]:.3f}",
        "measured ": "{3[acceptance_rate]:.3f}",
        "mean emitted": "{2[mean_emitted]:.2f}",
        " measured": "{3[mean_emitted]:.2f}",
    }
    rows = [
        (Path(one["draft"]).name, way, both["predicted"], both["drafted"])
        for one in found
        for way, both in one["by"].items()
    ]
    show.listed(rows, columns, texts=("draft model", "by"))


def _kinds_picture(figure: Any, vocabularies: Sequence[Vocabulary]) -> bool:
    """Draw a bar per vocabulary, cut into kinds."""
    from outpace.analysis.tokens.vocabulary import KINDS
    from outpace.bench.plots import COLOURS

    figure.set_size_inches(9, 1.6 + 0.5 * len(vocabularies))
    axes = figure.subplots()
    left = [0.0] * len(vocabularies)
    for index, kind in enumerate(KINDS):
        part = [100 * one.kinds[kind] / one.size for one in vocabularies]
        colour = (*COLOURS, "#BBBBBB")[index % (len(COLOURS) + 1)]
        axes.barh(range(len(part)), part, 0.66, left, color=colour, label=kind, edgecolor="white")
        left = [a + b for a, b in zip(left, part, strict=True)]
    axes.set_yticks(range(len(vocabularies)), [f"{Path(one.name).name}\n{one.size}" for one in vocabularies])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the vocabulary")
    figure.legend(loc="outside lower center", ncols=len(KINDS))
    return True


def _languages_picture(figure: Any, rows: Sequence[Counted], names: Sequence[str]) -> bool:
    """Draw tokens per character, a row per language."""
    from outpace.bench.plots import COLOURS, MARKERS

    order = sorted(rows, key=lambda row: row.per_character(names[0]))
    figure.set_size_inches(8, 1.6 + 0.25 * len(order))
    axes = figure.subplots()
    for index, name in enumerate(names):
        axes.plot(
            [row.per_character(name) for row in order],
            range(len(order)),
            MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            label=Path(name).name,
            mfc="none",
        )
    axes.set_yticks(range(len(order)), [row.language for row in order], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens per character")
    figure.legend(loc="outside lower center", ncols=min(4, len(names)))
    return True
