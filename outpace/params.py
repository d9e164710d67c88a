"""One request's sampling settings: checked once, so that nothing below checks again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from outpace.errors import RequestError, shown

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """What a model's authors recommend, as in `SamplingParams`; None where they did not say."""

    do_sample: bool | None = None
    """False asks for the likeliest token; then ``temperature`` is 0.0 whatever the file says."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Matcher(Protocol):
    """A place in a grammar, that of one sequence's committed text."""

    def allowed(self, path: Sequence[int], /) -> Tensor | None:
        """Which tokens may follow the text and a path of guesses: bool [vocabulary], one at least.
        None: all of them.

        A path that the grammar forbids is never kept, so anything is right for it. A matcher may have
        ``expects`` as well, with the same argument: the tokens that it holds likely next, in order.
        """

    def advance(self, tokens: Sequence[int], /) -> None:
        """Tokens were committed, those that end the text included."""


class Grammar(Protocol):
    """A form that texts must have; compiled, and shared by sequences."""

    def begin(self) -> Matcher:
        """Where a text begins."""


class Processor(Protocol):
    """Changes logits by a rule of the user's own."""

    def __call__(self, tokens: Sequence[int], logits_V: Tensor, /) -> Tensor:
        """New logits [V] for the token that follows ``tokens``: prompt, answer, and guesses.

        A pure function: it is called for guesses that are never kept, in any order, and more than
        once. ``logits_V`` is its own to change. Tokens that a drafter does not know have -inf.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """One request's settings. None means: the model's own default, else the neutral value.

    Lists, sets and other mappings are taken as well and stored as the types shown.

    Raises:
        RequestError: a value outside its range, or settings that exclude each other.
    """

    temperature: float | None = None
    """Divides the logits; 0 always takes the likeliest token. Neutral: 0."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 or -1: all."""
    top_p: float | None = None
    """Keep the smallest set of likeliest tokens with at least this probability; 1: all."""
    min_p: float | None = None
    """Keep tokens at least this probable, as a share of the likeliest one's; 0: all."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens in prompt or output, once each
    (CTRL, arXiv:1909.05858); 1: off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output, as defined by OpenAI."""
    frequency_penalty: float = 0.0
    """The same, times the number of occurrences in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token -> what is added to its logit."""
    allowed_tokens: frozenset[int] | None = None
    """If given, nothing else is generated."""
    banned_tokens: frozenset[int] = frozenset()
    """Never generated."""
    grammar: Grammar | None = None
    """If given, only what it allows is generated, token by token."""
    thinking_token_budget: int | None = None
    """Most tokens of thinking; then its end is written. None: no limit."""
    thinking_marks: tuple[str, ...] = ()
    """What begins and what ends thinking in the text; a third text is written before the end where the
    budget is used up. Empty: the model's own. A grammar begins behind the thinking."""
    processors: tuple[Processor, ...] = ()
    """Rules of your own for the logits, in turn; applied after all penalties, before the temperature."""
    max_new_tokens: int = 128
    """Longest output, in tokens."""
    min_tokens: int = 0
    """So many tokens are generated before any stop counts."""
    stop: tuple[str, ...] = ()
    """Strings that end the text where they begin."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the text besides the model's end-of-sequence tokens."""
    stop_when: Callable[[Sequence[int]], bool] | None = None
    """Asked after every new token, with the answer so far; true ends the text there."""
    ignore_eos: bool = False
    """Whether end-of-sequence tokens are tokens like any other."""
    include_stop: bool = False
    """Whether the stop string, or the text of the stop id, stays in the text."""
    seed: int | None = None
    """Names the coins; None: the engine picks one and reports it."""
    n: int = 1
    """Texts per prompt, at most 16384: more would be a slip of the keyboard."""
    logprobs: int | None = None
    """Report log-probabilities, with so many alternatives per token; 0: of the token alone."""

    def __post_init__(self) -> None:
        for name, (kind, what) in _KINDS.items():
            if (value := getattr(self, name)) is None and name == "allowed_tokens":
                continue
            try:
                object.__setattr__(self, name, kind(value))
            except (TypeError, ValueError):
                raise RequestError(f"{name} must be {what}, got {value!r}") from None
        for name, (whole, allowed, ok) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                _check(name, value, allowed, ok, whole)
        if self.thinking_marks and len(self.thinking_marks) not in (2, 3):
            raise RequestError(f"thinking_marks must be two texts, or three, got {self.thinking_marks!r}")
        for name in ("stop", "thinking_marks"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise RequestError(f"{name} must hold non-empty strings, got {text!r}")
        for rule in (*self.processors, *((self.stop_when,) if self.stop_when is not None else ())):
            if not callable(rule):
                raise RequestError(f"processors and stop_when must be functions, got {shown(rule)}")
        for name, ids in self._id_sets():
            for token in [one for one in ids if type(one) is not int or one < 0]:
                _check(f"{name} (a token id)", token, "at least 0", lambda t: t >= 0, True)
        for token, bias in self.logit_bias.items():
            _check(f"logit_bias of token {token}", bias, "a number within +-3e38", lambda b: abs(b) <= 3e38)
        if self.min_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_tokens must be at most max_new_tokens ({self.max_new_tokens}), got {self.min_tokens}"
            )
        for name in ("min_tokens", "ignore_eos", "allowed_tokens"):
            if self.grammar is not None and getattr(self, name):
                raise RequestError(f"{name} and grammar exclude each other; drop one of the two")
        if self.grammar is not None and not hasattr(self.grammar, "begin"):
            raise RequestError(f"grammar must be compiled, an object with begin(), got {shown(self.grammar)}")
        if self.allowed_tokens is not None and not self.allowed_tokens:
            raise RequestError("allowed_tokens is empty; name a token, or give None for all")
        if self.allowed_tokens is not None and self.allowed_tokens <= self.banned_tokens:
            raise RequestError(
                f"banned_tokens holds all {len(self.allowed_tokens)} allowed_tokens; allow another"
            )

    def _id_sets(self) -> Iterable[tuple[str, Iterable[int]]]:
        yield "logit_bias", self.logit_bias
        yield "allowed_tokens", self.allowed_tokens or ()
        yield "banned_tokens", self.banned_tokens
        yield "stop_token_ids", self.stop_token_ids

    def resolved(self, defaults: Defaults | None) -> SamplingParams:
        """Fill every None of the sampling settings: from the model's defaults, else neutrally.

        A model that does not sample by default (``do_sample`` false, or neither it nor a
        temperature given) has temperature 0. One that samples at no stated temperature has 1.

        Raises:
            RequestError: a default is outside its range.
        """
        fill: dict[str, Any] = {}
        for name, neutral in NEUTRAL.items():
            if getattr(self, name) is None:
                value = getattr(defaults, name, None)
                fill[name] = neutral if value is None else value
        if "temperature" in fill and defaults is not None:
            if defaults.do_sample is False:
                fill["temperature"] = 0.0
            elif defaults.do_sample and defaults.temperature is None:
                fill["temperature"] = 1.0
        try:
            return replace(self, **fill) if fill else self  # checking many ids anew takes long
        except RequestError as error:
            raise RequestError(f"{error} (a default of the model; give another value)") from None

    def taken(self, defaults: Defaults | None) -> dict[str, float]:
        """Name the values that ``resolved`` takes from the model and that change something."""
        full = self.resolved(defaults)
        taken = {
            name: getattr(full, name)
            for name, neutral in NEUTRAL.items()
            if getattr(self, name) is None and getattr(full, name) != neutral
        }
        if full.temperature == 0:  # truncation around the likeliest token changes nothing
            taken = {k: v for k, v in taken.items() if k == "repetition_penalty"}
        return taken

    def check_vocab(self, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """Raise RequestError if a setting names a token that does not exist, or if none is left."""
        for name, ids in self._id_sets():
            if (token := max(ids, default=0)) >= vocab_size:
                raise RequestError(f"{name} holds token {token}, but ids go from 0 to {vocab_size - 1}")
        ends = self.end_ids(eos_ids) if self.min_tokens else frozenset[int]()
        banned = self.banned_tokens | ends
        if all(token in banned for token in self.allowed_tokens or range(vocab_size)):
            raise RequestError(
                f"no token may be generated: allowed_tokens, banned_tokens "
                f"({len(self.banned_tokens)} ids) and min_tokens={self.min_tokens}, which bans "
                f"{len(ends)} end ids, exclude all of them; allow one more"
            )

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end a text."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | eos_ids


def _texts(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


_IDS = (frozenset, "a list of token ids")
_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "stop": (_texts, "a string or a list of strings"),
    "thinking_marks": (_texts, "a list of texts"),
    "processors": (tuple, "a list of functions"),
    "logit_bias": (dict, "a mapping of token ids to numbers"),
    "allowed_tokens": _IDS,
    "banned_tokens": _IDS,
    "stop_token_ids": _IDS,
}
NEUTRAL: dict[str, Any] = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
"""Settings that change nothing, given in place of those that a model recommends."""
_OPTIONAL = {*NEUTRAL, "seed", "logprobs", "thinking_token_budget"}
_RANGES: dict[str, tuple[bool, str, Callable[[Any], bool]]] = {
    "temperature": (False, "a finite number of at least 0", lambda x: x >= 0),
    "top_k": (True, "at least 1, or 0 or -1 for all", lambda x: x >= -1),
    "top_p": (False, "in (0, 1]", lambda x: 0 < x <= 1),
    "min_p": (False, "in [0, 1]", lambda x: 0 <= x <= 1),
    "repetition_penalty": (False, "a finite number above 0", lambda x: x > 0),
    "presence_penalty": (False, "a finite number", lambda x: True),
    "frequency_penalty": (False, "a finite number", lambda x: True),
    "max_new_tokens": (True, "at least 1", lambda x: x >= 1),
    "min_tokens": (True, "at least 0", lambda x: x >= 0),
    "seed": (True, "in [0, 2**64)", lambda x: 0 <= x < 1 << 64),
    "n": (True, "between 1 and 16384", lambda x: 1 <= x <= 16384),
    "logprobs": (True, "at least 0", lambda x: x >= 0),
    "thinking_token_budget": (True, "at least 0", lambda x: x >= 0),
}


def _check(name: str, value: Any, allowed: str, ok: Callable[[Any], bool], whole: bool = False) -> None:
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if isinstance(value, float) and not math.isfinite(value):
        number = False
    if not number or not ok(value):
        what = " a whole number," if whole else ""
        raise RequestError(f"{name} must be{what} {allowed}, got {value!r}")
