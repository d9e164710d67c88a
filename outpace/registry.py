"""The one table of methods: name -> where its class is, in one line each.

Classes are imported on first use. A third party adds rows through the entry points
``outpace.drafters``, ``outpace.verifiers`` and ``outpace.policies``: each names a class with a
docstring, or a `Row`. They are imported when they are asked for by name, or listed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from outpace.errors import OutpaceError, UnknownNameError

Kind = Literal["drafter", "verifier", "policy"]


@dataclass(frozen=True, slots=True)
class Row:
    """One method."""

    name: str
    kind: Kind
    family: str
    """Drafters: none, lookup, lm, own, heads, compose. Others: their kind."""
    path: str
    """``module:Class``."""
    summary: str
    """One line for help and docs."""
    paper: str | None = None
    lossless: bool = True
    trained: bool = False
    """Whether it needs weights of its own."""
    auto: bool = False
    """Whether `auto` takes it as a member unasked; trained ones are, where they are found."""


_BUILTIN = (
    Row("none", "drafter", "none", "outpace.drafters.none:NoDrafter",
        "Plain decoding: the empty draft"),
    Row("prompt_lookup", "drafter", "lookup", "outpace.drafters.lookup.prompt_lookup:PromptLookup",
        "Repeats what followed the same words earlier; no weights",
        "Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding"),
    Row("max_gram", "drafter", "lookup", "outpace.drafters.lookup.max_gram:MaxGram",
        "Copies after the longest match; else pairs, from a table of `outpace build bigram`",
        "Chen et al. 2023 (CS-Drafting), arXiv:2312.11462"),
    Row("suffix", "drafter", "lookup", "outpace.drafters.lookup.suffix:Suffix",
        "Follows what came most often after the longest match, in past requests too if asked",
        "Oliaro et al. 2024 (SuffixDecoding), arXiv:2411.04975; SAM-Decoding, arXiv:2411.10666",
        auto=True),
    Row("adaptive_ngram", "drafter", "lookup",
        "outpace.drafters.lookup.adaptive_ngram:AdaptiveNgram",
        "Follows the commonest n-grams of the text; order and length adapt",
        "Ou et al. 2024 (ANPD), arXiv:2404.08698"),
    Row("reference", "drafter", "lookup", "outpace.drafters.lookup.reference:Reference",
        "Follows a given text, or the prompt, and finds its place again after edits",
        "Sun et al. 2021, arXiv:2106.04970; Yang et al. 2023 (LLMA), arXiv:2304.04487"),
    Row("retrieval", "drafter", "lookup", "outpace.drafters.lookup.retrieval:Retrieval",
        "Continues as a corpus did; reads a file made by `outpace build datastore`",
        "He et al. 2023 (REST), arXiv:2311.08252", trained=True),
    Row("recycling", "drafter", "lookup", "outpace.drafters.lookup.recycling:Recycling",
        "Repeats what the target itself ranked highest after each token; no weights",
        "Luo et al. 2024 (Token Recycling), arXiv:2408.08696", auto=True),
    Row("lookahead", "drafter", "lookup", "outpace.drafters.lookup.lookahead:Lookahead",
        "Guesses n-grams of its own future in rows that ride along; no weights",
        "Fu et al. 2024, arXiv:2402.02057"),
    Row("draft_model", "drafter", "lm", "outpace.drafters.lm.draft_model:DraftModel",
        "A smaller model with the same vocabulary guesses",
        "Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318",
        trained=True),
    Row("early_exit", "drafter", "own", "outpace.drafters.own.early_exit:EarlyExit",
        "The target's first layers guess, and verification goes on from there",
        "Elhoushi et al. 2024 (LayerSkip), arXiv:2404.16710; EESD, arXiv:2406.03853"),
    Row("layer_skip", "drafter", "own", "outpace.drafters.own.layer_skip:LayerSkip",
        "The target with some layers left out guesses; finds by itself which ones",
        "Xia et al. 2024 (SWIFT), arXiv:2410.06916; Draft on the Fly, arXiv:2410.01028"),
    Row("quantized_self", "drafter", "own", "outpace.drafters.own.quantized_self:QuantizedSelf",
        "The target with its weights rounded to int8 or int4 guesses",
        "Zhao et al. 2024 (QSpec), arXiv:2410.11305"),
    Row("eagle3", "drafter", "heads", "outpace.drafters.heads.eagle3:Eagle3",
        "One layer on features of the target guesses; trees, T > 0; reads EAGLE-1/2/3 heads",
        "Li et al. 2025 (EAGLE-3), arXiv:2503.01840; EAGLE-2, arXiv:2406.16858", trained=True),
    Row("kangaroo", "drafter", "heads", "outpace.drafters.heads.kangaroo:Kangaroo",
        "The target's first layers and an adapter guess, while sure; verification goes on there",
        "Liu et al. 2024, arXiv:2404.18911", trained=True),
    Row("medusa", "drafter", "heads", "outpace.drafters.heads.medusa:Medusa",
        "Heads on the target's last hidden state guess several tokens at once, as a static tree",
        "Cai et al. 2024 (Medusa), arXiv:2401.10774; Stern et al. 2018, arXiv:1811.03115",
        trained=True),
    Row("hydra", "drafter", "heads", "outpace.drafters.heads.hydra:Hydra",
        "Medusa's heads, each reading the guesses before its own; trees, T > 0",
        "Ankner et al. 2024 (Hydra), arXiv:2402.05109", trained=True),
    Row("ppd", "drafter", "heads", "outpace.drafters.heads.ppd:Ppd",
        "Trained prompt tokens ride in the target's pass and guess ahead; a few KB of weights",
        "Chen et al. 2024 (PPD), arXiv:2405.18628", trained=True),
    Row("dflash", "drafter", "heads", "outpace.drafters.heads.dflash:Dflash",
        "One pass over a block of rows guesses its tokens at once from the target's features",
        "DFlash, arXiv:2602.06036; PARD, arXiv:2504.18583", trained=True),
    Row("cascade", "drafter", "compose", "outpace.drafters.compose.cascade:Cascade",
        "A draft model sped up by cheaper drafters, which also write the tail",
        "Chen et al. 2023 (CS-Drafting), arXiv:2312.11462; Spector and Re 2023, arXiv:2308.04623",
        trained=True),
    Row("ouroboros", "drafter", "compose", "outpace.drafters.compose.ouroboros:Ouroboros",
        "A draft model; phrases of the text and of refused rows speed it up and go on from it",
        "Zhao et al. 2024 (Ouroboros), arXiv:2402.13720", trained=True),
    Row("graph", "drafter", "compose", "outpace.drafters.compose.graph:Graph",
        "A draft model whose hypotheses go on together where they meet again",
        "Gong et al. 2024 (GSD), arXiv:2407.16207", trained=True),
    Row("auto", "drafter", "compose", "outpace.engine.portfolio:Portfolio",
        "Picks among drafters, and none, by what pays best per sequence and step"),
    Row("select", "drafter", "compose", "outpace.drafters.compose.select:Select",
        "Several drafters at once; their likeliest guesses in one tree",
        "SAM-Decoding, arXiv:2411.10666; SpecInfer, arXiv:2305.09781"),
    Row("cross_vocabulary", "drafter", "compose",
        "outpace.drafters.compose.cross_vocabulary:CrossVocabulary",
        "A draft model with another tokenizer, by its text or by the tokens that both have",
        "Timor et al. 2025, arXiv:2502.05202", trained=True),
    Row("match", "verifier", "verifier", "outpace.verifiers.match:Match",
        "Draws the target's token and follows the branch that holds it",
        "SpecInfer's naive sampling, arXiv:2305.09781"),
    Row("chain", "verifier", "verifier", "outpace.verifiers.chain:Chain",
        "Rejection sampling along one sampled chain",
        "Leviathan et al. 2023, arXiv:2211.17192"),
    Row("tree", "verifier", "verifier", "outpace.verifiers.tree:Tree",
        "Recursive rejection over all groups of a token tree",
        "SpecInfer, arXiv:2305.09781; Sequoia, arXiv:2402.12374"),
    Row("block", "verifier", "verifier", "outpace.verifiers.block:Block",
        "Keeps a prefix of a chain, judged as a whole: at least as long as chain's on average",
        "Sun et al. 2024, arXiv:2403.10444"),
    Row("k_seq", "verifier", "verifier", "outpace.verifiers.k_seq:KSeq",
        "Tries independent siblings against one discounted law",
        "SpecTr, arXiv:2310.15141"),
    Row("greedy_plus_one", "verifier", "verifier",
        "outpace.verifiers.greedy_plus_one:GreedyPlusOne",
        "Optimal for the likeliest siblings and one random one",
        "Hu et al. 2025, arXiv:2502.18779"),
    Row("traversal", "verifier", "verifier", "outpace.verifiers.traversal:Traversal",
        "Judges the paths of a tree from its leaves",
        "Weng et al. 2025, arXiv:2505.12398"),
    Row("typical", "verifier", "verifier", "outpace.verifiers.typical:Typical",
        "Keeps what the target finds plausible; changes the law of the output",
        "Medusa, arXiv:2401.10774", lossless=False),
    Row("coupled", "verifier", "verifier", "outpace.verifiers.coupled:Coupled",
        "Draft and target share position-keyed noise: same seed, same text, any drafter",
        "Gumbel coupling, arXiv:2408.07978"),
    Row("fixed", "policy", "policy", "outpace.policies.fixed:Fixed",
        "The same number of guesses at every step"),
    Row("confidence", "policy", "policy", "outpace.policies.confidence:Confidence",
        "Stops a branch after a token that the drafter itself held unlikely",
        "transformers' assistant_confidence_threshold"),
    Row("specdecpp", "policy", "policy", "outpace.policies.specdecpp:SpecDecPlusPlus",
        "Ends a draft where a trained head foresees a refusal; for draft models",
        "Huang et al. 2024 (SpecDec++), arXiv:2405.19715", trained=True),
    Row("schedule", "policy", "policy", "outpace.policies.schedule:Schedule",
        "Two levels more after a draft that was kept whole, one fewer after any other",
        "transformers' heuristic num_assistant_tokens_schedule"),
    Row("bandit", "policy", "policy", "outpace.policies.bandit:Bandit",
        "Draws a plausible acceptance rate, and drafts as deep as would then pay best",
        "Thompson sampling as in EESD, arXiv:2406.03853"),
    Row("goodput", "policy", "policy", "outpace.policies.goodput:Goodput",
        "Drafts a level more where it raises the tokens per second at measured cost",
        "SmartSpec, arXiv:2406.14066"),
    Row("auto", "policy", "policy", "outpace.policies.auto:Auto",
        "Picks the drafter, or none, and its depth by expected tokens per second"),
)


_GROUPS: tuple[tuple[Kind, str], ...] = (
    ("drafter", "outpace.drafters"),
    ("verifier", "outpace.verifiers"),
    ("policy", "outpace.policies"),
)


@lru_cache(maxsize=1)
def _table() -> dict[tuple[str, str], Row | _PlugIn]:
    """Every method, ours first; read once, never changed. Imports nothing."""
    table: dict[tuple[str, str], Row | _PlugIn] = {(row.kind, row.name): row for row in _BUILTIN}
    for kind, group in _GROUPS:
        for point in entry_points(group=group):
            if (kind, point.name) in table:
                raise OutpaceError(
                    f"two {kind}s are called {point.name!r}; rename that of {_source(point)}"
                )
            table[kind, point.name] = _PlugIn(point, kind)
    return table


def _source(point: Any) -> str:
    """Who installed an entry point."""
    dist = getattr(point, "dist", None)
    return "a plug-in" if dist is None else f"the package {dist.name} {dist.version}"


class _PlugIn:
    """An entry point, imported when it is asked for.

    Its methods raise OutpaceError, naming who installed it, if it cannot be imported.
    """

    def __init__(self, point: Any, kind: Kind) -> None:
        self._point, self._kind = point, kind

    def row(self) -> Row:
        """Its row; a bare class is described by its docstring."""
        point = self._point
        with self._blamed():
            found = point.load()
            if isinstance(found, Row):
                return replace(found, name=point.name, kind=self._kind)
            if not isinstance(found, type):
                raise TypeError("it is no class and no Row")
            summary = (inspect.getdoc(found) or "").partition("\n")[0]
        return Row(point.name, self._kind, "plug-in", point.value, summary)

    def listed(self) -> Row:
        """Its row for a list: one that is broken says so in its summary."""
        try:
            return self.row()
        except OutpaceError as error:
            return Row(self._point.name, self._kind, "plug-in", self._point.value, str(error))

    def load(self) -> Any:
        """Its class."""
        row = self.row()
        with self._blamed():
            return _import(row.path)

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a stranger's module may raise
            raise OutpaceError(
                f"{self._kind} {self._point.name!r} of {_source(self._point)} cannot be loaded "
                f"from {self._point.value}: {type(error).__name__}: {error}; mend or uninstall it"
            ) from error


def rows(kind: Kind | None = None) -> list[Row]:
    """All methods, or those of one kind, in table order."""
    return [
        one if isinstance(one, Row) else one.listed()
        for (of_kind, _), one in _table().items() if kind is None or of_kind == kind
    ]


def row(kind: Kind, name: str) -> Row:
    """One method.

    Raises:
        UnknownNameError: with near names.
        OutpaceError: a plug-in that cannot be imported.
    """
    found = _find(kind, name)
    return found if isinstance(found, Row) else found.row()


def load(kind: Kind, name: str) -> Any:
    """The class of a method; imports its module on first use. Raises as ``row``."""
    found = _find(kind, name)
    return _import(found.path) if isinstance(found, Row) else found.load()


def _find(kind: Kind, name: str) -> Row | _PlugIn:
    found = _table().get((kind, name))
    if found is not None:
        return found
    if kind == "drafter" and (Path(name) / "config.json").is_file():
        raise OutpaceError(f"no drafter is called {name!r}; for the folder write ./{name}")
    raise UnknownNameError(kind, name, [n for of_kind, n in _table() if of_kind == kind])


def _import(path: str) -> Any:
    module, _, cls = path.partition(":")
    return getattr(importlib.import_module(module), cls)
