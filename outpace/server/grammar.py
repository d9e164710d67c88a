"""Grammars and JSON schemas: which tokens may follow, by the library llguidance.

A compiled grammar is shared by all answers of a request; each has a matcher of its own, which is a
position in it. `outpace.sampling` asks the matcher about every path of a draft that it reads,
for target and draft alike. So drafting under a grammar stays lossless: p is the model's distribution on the
tokens that the grammar allows.

Shape letters: V vocabulary of the target.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.errors import RequestError
from outpace.server.structured_output import StructuredOutput

_BEFORE = 4
"""Tokens before a text that may be spelled together with it."""


def open_grammars(tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> Grammars | None:
    """What compiles grammars for a model; None without tokenizer, end, or llguidance."""
    if tokenizer is None or not eos_ids or importlib.util.find_spec("llguidance") is None:
        return None
    return Grammars(tokenizer, vocab_size, eos_ids)


class Grammars:
    """Compiles grammars for one vocabulary. Safe to use from several threads.

    Args:
        vocab_size: V; the tokenizer may know fewer tokens, and the others are never allowed.
        eos_ids: tokens that end a text, not empty.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        import llguidance

        self._library: Any = llguidance
        self._vocab_size, self._eos_ids = vocab_size, eos_ids
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, eos_ids))
        self._tokenizer = llguidance.LLTokenizer(wrapped, eos_token=sorted(eos_ids))

    def compile(self, form: StructuredOutput) -> Grammar:
        """Make a grammar of what a request wants.

        Raises:
            RequestError: it cannot be read, or is too complex.
        """
        try:
            text = self._text(form)
            fault = self._library.LLMatcher.validate_grammar(text, self._tokenizer)
        except (ValueError, TypeError) as error:
            fault = str(error)
        if fault and not fault.startswith("WARNING"):
            raise RequestError(f"{form.source} cannot be used: {_brief(fault)}")
        start = self._library.LLMatcher(self._tokenizer, text, log_level=0)
        if start.is_error():
            raise RequestError(f"{form.source} cannot be used: {_brief(start.get_error())}")
        first = start.deep_copy()
        first.compute_bitmask()  # which fails where nothing satisfies it
        if first.is_error():
            raise RequestError(
                f"{form.source} cannot be used: no text satisfies it ({_brief(first.get_error())})"
            )
        return Grammar(start, self._tokenizer, self._vocab_size, self._eos_ids)

    def _text(self, form: StructuredOutput) -> str:
        matcher = self._library.LLMatcher
        if form.kind == "schema":
            # No white space but one blank after colon and comma, or a model may write it for ever.
            plain = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
            made = matcher.grammar_from_json_schema(form.text, overrides=plain)
        elif form.kind == "regex":
            made = matcher.grammar_from_regex(form.text)
        elif form.kind == "choice":
            options = json.loads(form.text)
            if not options:
                raise ValueError("choice is empty; name an answer")
            made = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(option) for option in options))
        else:
            made = matcher.grammar_from_lark(form.text)
        return str(made)


class Grammar:
    """A compiled grammar; see `outpace.params.Grammar` for the contract."""

    def __init__(self, start: Any, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._start, self._tokenizer = start, tokenizer
        self._vocab_size, self._eos_ids = vocab_size, eos_ids

    def begin(self) -> Matcher:
        return Matcher(self._start.deep_copy(), self._tokenizer, self._vocab_size, self._eos_ids)


class Matcher:
    """A position in a grammar, that of the committed text."""

    def __init__(self, matcher: Any, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self._vocab_size, self._eos_ids = vocab_size, eos_ids
        self._over = False
        self._last: tuple[int, ...] = ()

    def allowed(self, path: Sequence[int]) -> Tensor:
        """What may follow the committed text and a path of guesses: bool [V].

        Everything, where the path itself is not allowed, or the text has ended. Such a node is
        never reached, so that any distribution is right for it.

        Raises:
            RequestError: the grammar became too complex for the library.
        """
        tokens = list(path)
        if self._over or not self._eos_ids.isdisjoint(tokens):
            return self._everything()
        # As many as fit: the matcher is left as it was, where consuming a wrong one would end it.
        taken = self._matcher.try_consume_tokens(tokens) if tokens else 0
        try:
            return self._mask() if taken == len(tokens) else self._everything()
        finally:
            if taken:
                self._matcher.rollback(taken)

    def expects(self, path: Sequence[int]) -> Sequence[int]:
        """The usual tokens of the text that must follow a path, but for those at its end that the
        text behind it may change. Where another spelling is allowed too, they are a guess.
        """
        tokens = list(path)
        if self._over or not self._eos_ids.isdisjoint(tokens):
            return ()
        taken = self._matcher.try_consume_tokens(tokens) if tokens else 0
        try:
            if taken < len(tokens) or self._matcher.is_stopped():
                return ()
            found = self._matcher.compute_ff_tokens()
            if not found and (text := self._matcher.compute_ff_bytes()):
                before = [*self._last, *tokens][-_BEFORE:]
                found, _ = self._tokenizer.tokenize_partial(text, recent_tokens=before)
            return tuple(found)
        finally:
            if taken:
                self._matcher.rollback(taken)

    def advance(self, tokens: Sequence[int]) -> None:
        self._last = (*self._last, *tokens)[-_BEFORE:]
        for token in tokens:
            self._over = self._over or token in self._eos_ids
            if not self._over:
                self._matcher.consume_token(token)

    def _everything(self) -> Tensor:
        return torch.ones(self._vocab_size, dtype=torch.bool)

    def _mask(self) -> Tensor:
        out_V = torch.zeros(self._vocab_size, dtype=torch.bool)
        if self._matcher.is_error():
            raise RequestError(f"the form cannot be followed: {_brief(self._matcher.get_error())}")
        if self._matcher.is_stopped():  # nothing can be added any more
            out_V[sorted(self._eos_ids)] = True
            return out_V
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits_V = ((words[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().bool()
        known = min(self._vocab_size, len(bits_V))
        out_V[:known] = bits_V[:known]
        if self._matcher.is_error():
            raise RequestError(f"the form cannot be followed: {_brief(self._matcher.get_error())}")
        return out_V


class _Vocabulary:
    """A tokenizer as llguidance wants to see one."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids | eos_ids)
        special = set(self.special_token_ids)
        # The library wants special tokens marked by a byte that no text holds.
        self.tokens = [
            (b"\xff" if i in special else b"") + tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)
        ]

    def __call__(self, text: Any) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        literal = self._tokenizer.literal
        if literal.finds(text):  # a special token that a form spells is text
            with contextlib.suppress(RequestError):
                found: list[int] = literal.encode(literal.hidden(text))
                return found
        ids: list[int] = self._tokenizer.encode(text, special=False)
        return ids


def _brief(fault: str) -> str:
    """A fault in one line, without the state of the library's parser."""
    return " ".join(fault.split("<state>")[0].split())[:300]
