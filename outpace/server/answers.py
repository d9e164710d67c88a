"""Answers as JSON: whole ones and pieces, of completions and of chats, with what they cost."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from outpace import registry
from outpace.engine.results import Result
from outpace.sampling import TokenLogprobs
from outpace.server.client_request import ClientRequest
from outpace.server.encoding import Json
from outpace.server.errors import ApiError
from outpace.server.figures import metrics
from outpace.server.tool_parser import CallReader, Found
from outpace.server.trace import Tracer
from outpace.serving.events import Tokens

_LOWEST = -9999.0  # JSON has no infinity; clients know this number


class Writer(ABC):
    """Writes the answer of one request.

    Args:
        tokenizer: the target's; None leaves texts of tokens empty.
    """

    prefix: ClassVar[str]
    """Ids of answers begin so."""
    whole: ClassVar[str]
    """``object`` of an answer in one piece."""
    part: ClassVar[str]
    """``object`` of a piece."""
    named: ClassVar[bool] = False
    """Whether events of a stream have the name that is their ``type``, and none says that it is over."""

    def __init__(self, wanted: ClientRequest, model: str, fingerprint: str, tokenizer: Any) -> None:
        self.wanted, self._tokenizer = wanted, tokenizer
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._about = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self.number: str | None = None
        """Of the request, in its headers and in the log."""
        self.lossless = True
        """Whether the answers have the distribution of the model; said in every answer and chunk."""
        self._written = [0] * wanted.answers
        each = [one for one in wanted.requests for _ in range(wanted.n)]
        self._tracer = Tracer(each, tokenizer) if wanted.traced else None

    @abstractmethod
    def _message(self, index: int, result: Result) -> Json:
        """The part of a whole choice that holds the text."""

    @abstractmethod
    def _delta(self, index: int, ids: Sequence[int], text: str) -> Json:
        """The part of a piece that holds new text; its values are empty if there is none."""

    def _rest(self, index: int, result: Result) -> Json:
        """The part of a piece that holds what was kept back until the end, as ``_delta``."""
        return self._delta(index, (), "")

    def _reason(self, index: int, result: Result) -> str | None:
        """Why an answer ended; called when all of it has been told."""
        return result.finish_reason

    @abstractmethod
    def _logprobs(self, index: int, found: Sequence[TokenLogprobs]) -> Json:
        """Log-probabilities in the form of this API."""

    @abstractmethod
    def opening(self, index: int) -> list[Json]:
        """Chunks before the first piece of an answer."""

    def answer(self, results: Sequence[Result], events: Sequence[Sequence[Tokens]]) -> Json:
        """All answers in one piece.

        Args:
            events: per answer its pieces, in order.
        """
        choices = []
        shown = [self._shown(result) for result in results]
        for index, result in enumerate(shown):
            choice: Json = {
                "index": index,
                **self._message(index, result),
                "logprobs": None if result.logprobs is None else self._all_logprobs(index, result),
                "finish_reason": self._reason(index, result),
            }
            if self.wanted.token_ids:
                choice["token_ids"] = list(result.tokens)
            if self.wanted.detailed:
                choice["speculation"] = [one for e in events[index] for one in self._authors(e)]
            choices.append(choice)
        return {
            "id": self._id,
            "object": self.whole,
            **self._about,
            "lossless": self.lossless,
            "choices": choices,
            "usage": self.usage(shown),
            "metrics": self._metrics(results),
        }

    def _shown(self, result: Result) -> Result:
        """A result without the token that nobody wanted."""
        if not self.wanted.silent:
            return result
        none = None if result.logprobs is None else ()
        return replace(result, text="", tokens=(), logprobs=none, finish_reason="length")

    def _all_logprobs(self, index: int, result: Result) -> Json:
        return self._logprobs(index, result.logprobs or ())

    def piece(self, event: Tokens) -> Json | None:
        """A chunk for new tokens; None if there is nothing to say of them."""
        wanted, index = self.wanted, event.index
        if wanted.silent:
            return None
        self._written[index] += len(event.ids)
        delta = self._delta(index, event.ids, event.text)
        told = any(delta.values()) or event.logprobs
        if not (told or wanted.token_ids or wanted.detailed or wanted.traced):
            return None
        choice: Json = {"index": index, **delta, "logprobs": None, "finish_reason": None}
        if event.logprobs:
            choice["logprobs"] = self._logprobs(index, event.logprobs)
        if wanted.token_ids:
            choice["token_ids"] = list(event.ids)
        if wanted.detailed:
            choice["speculation"] = self._authors(event)
        chunk = self._chunk([choice])
        if self._tracer is not None:
            chunk["outpace"] = self._tracer.of(event)
        return chunk

    def pieces(self, event: Tokens) -> list[Json]:
        """Chunks for new tokens."""
        piece = self.piece(event)
        return [] if piece is None else [piece]

    def fault(self, error: ApiError) -> Json:
        """The last chunk of a stream that broke."""
        return error.body()

    def ending(self, index: int, result: Result) -> list[Json]:
        result = self._shown(result)
        rest, out = self._rest(index, result), []
        common = {"index": index, "logprobs": None}
        if any(rest.values()):
            out.append(self._chunk([{**common, **rest, "finish_reason": None}]))
        last = {**self._delta(index, (), ""), "finish_reason": self._reason(index, result)}
        return [*out, self._chunk([{**common, **last}])]

    def closing(self, results: Sequence[Result]) -> Json:
        """The chunk behind all answers: usage and figures."""
        shown = [self._shown(result) for result in results]
        return {**self._chunk([]), "usage": self.usage(shown), "metrics": self._metrics(results)}

    def usage(self, results: Sequence[Result]) -> Json:
        """Tokens read and written. A prompt counts once, whatever its number of answers."""
        wanted = self.wanted
        read = sum(len(one.prompt) for one in wanted.requests)
        written = sum(len(result.tokens) for result in results)
        details = self._details()
        if wanted.predicted:
            followed = [
                counts
                for result in results
                for spec, counts in result.by_drafter.items()
                if registry.can("drafter", spec.partition("[")[0], registry.READS_REFERENCE)
            ]
            kept = sum(counts.accepted for counts in followed)
            details["accepted_prediction_tokens"] = kept
            details["rejected_prediction_tokens"] = sum(c.drafted for c in followed) - kept
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {
                "cached_tokens": sum(result.cached_tokens for result in results[:: wanted.n])
            },
            "completion_tokens_details": details,
        }

    def _details(self) -> Json:
        """What is told of the tokens written."""
        return {"reasoning_tokens": 0}

    def _metrics(self, results: Sequence[Result]) -> Json | None:
        """What the answers cost."""
        return metrics(results)

    def _chunk(self, choices: list[Json]) -> Json:
        chunk: Json = {"id": self._id, "object": self.part, **self._about, "lossless": self.lossless}
        chunk["choices"] = choices
        if self.wanted.running_usage:
            read, written = sum(len(r.prompt) for r in self.wanted.requests), sum(self._written)
            chunk["usage"] = {
                "prompt_tokens": read,
                "completion_tokens": written,
                "total_tokens": read + written,
            }
        elif self.wanted.include_usage:
            chunk["usage"] = None
        return chunk

    def _authors(self, event: Tokens) -> list[Json]:
        """Who wrote each token: a drafter guessed it, or the target added it."""
        special = frozenset() if self._tokenizer is None else self._tokenizer.special_ids
        return [
            {
                "id": token,
                "bytes": [] if token in special else list(self._bytes(token)),
                "accepted": place < event.accepted,
            }
            for place, token in enumerate(event.ids)
        ]

    def _bytes(self, token: int) -> bytes:
        return b"" if self._tokenizer is None else bytes(self._tokenizer.token_bytes(token))

    def _token_text(self, token: int) -> str:
        """A token's text; half a character is spelled in bytes, so that names stay distinct."""
        spelled = self._bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class CompletionWriter(Writer):
    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, wanted: ClientRequest, model: str, fingerprint: str, tokenizer: Any) -> None:
        super().__init__(wanted, model, fingerprint, tokenizer)
        self._offset = [0] * wanted.answers
        self._streams: dict[int, Any] = {}

    def opening(self, index: int) -> list[Json]:
        """The prompt, if it is to be echoed."""
        if self.wanted.echo is None:
            return []
        choice = {"index": index, "text": self._echo(index), "logprobs": None, "finish_reason": None}
        return [self._chunk([choice])]

    def _message(self, index: int, result: Result) -> Json:
        return {"text": self._echo(index) + result.text}

    def _all_logprobs(self, index: int, result: Result) -> Json:
        answer, found = result.logprobs or (), result.prompt_logprobs
        if not found:
            return self._logprobs(index, answer)
        ids, echo = self.wanted.requests[index // self.wanted.n].prompt, self._echo(index)
        first = (TokenLogprobs(ids[0], 0.0, ()), *(one for one in found if one is not None))
        start = self._columns(first, self._echoed(ids, echo))
        self._offset[index] = len(echo)  # the answer begins a character of its own
        rest = self._logprobs(index, answer)
        # Nothing comes before the first token that could tell its probability.
        start["token_logprobs"][0] = start["top_logprobs"][0] = None
        return {name: [*column, *rest[name]] for name, column in start.items()}

    def _echo(self, index: int) -> str:
        return "" if self.wanted.echo is None else self.wanted.echo[index // self.wanted.n]

    def _echoed(self, ids: Sequence[int], echo: str) -> list[int]:
        """Where tokens of a prompt begin in its text, which may spell special ones or leave them out."""
        offsets, place = [], 0
        stream = None if self._tokenizer is None else self._tokenizer.text_stream()
        for token in ids:
            offsets.append(place)
            if stream is None:
                continue
            if token not in self._tokenizer.special_ids:
                place += len(stream.push((token,)))
            elif (text := self._bytes(token).decode("utf-8", "replace")) and echo.startswith(text, place):
                place += len(text)
        return offsets

    def _delta(self, index: int, ids: Sequence[int], text: str) -> Json:
        return {"text": text}

    def _length(self, index: int, token: int) -> int:
        """Characters that a token adds to its text; the last part of one counts it whole."""
        if self._tokenizer is None:
            return 0
        if index not in self._streams:
            self._streams[index] = self._tokenizer.text_stream(continues=True)
        return len(self._streams[index].push((token,)))

    def _logprobs(self, index: int, found: Sequence[TokenLogprobs]) -> Json:
        offsets = []
        for one in found:
            offsets.append(self._offset[index])
            self._offset[index] += self._length(index, one.token)
        return self._columns(found, offsets)

    def _columns(self, found: Sequence[TokenLogprobs], offsets: list[int]) -> Json:
        return {
            "tokens": [self._token_text(one.token) for one in found],
            "token_logprobs": [_finite(one.logprob) for one in found],
            "top_logprobs": [
                {self._token_text(t): _finite(p) for t, p in (*one.top, (one.token, one.logprob))}
                for one in found
            ],
            "text_offset": offsets,
        }


class ChatWriter(Writer):
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, wanted: ClientRequest, model: str, fingerprint: str, tokenizer: Any) -> None:
        super().__init__(wanted, model, fingerprint, tokenizer)
        syntax = wanted.call_syntax
        self._readers = (
            []
            if syntax is None
            else [
                CallReader(syntax.form, syntax.names, tokenizer, syntax.alone) for _ in range(wanted.answers)
            ]
        )
        told, self._heard = wanted.reasoning, [0] * wanted.answers
        self._thoughts = [] if told is None else [told.reader(tokenizer) for _ in range(wanted.answers)]

    def opening(self, index: int) -> list[Json]:
        delta = {"role": "assistant", "content": None if self._readers else ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [self._chunk([choice])]

    def _message(self, index: int, result: Result) -> Json:
        thought, found = self._read(index, result.tokens, result.text, result)
        message: Json = {"role": "assistant", "content": found.text, "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = thought or None
        if found.calls:
            message |= {"content": found.text or None, "tool_calls": _joined(found.calls)}
        return {"message": message}

    def _delta(self, index: int, ids: Sequence[int], text: str) -> Json:
        return {"delta": _said(*self._read(index, ids, text))}

    def _rest(self, index: int, result: Result) -> Json:
        return {"delta": _said(*self._read(index, (), "", result))}

    def _read(
        self, index: int, ids: Sequence[int], text: str, ended: Result | None = None
    ) -> tuple[str, Found]:
        """New thinking, and new text and calls; with the result also what was kept back until the end."""
        read = self._in_order(index, ids, text, ended)
        parts = [part for _, found in read for part in found.parts]
        return "".join(thought for thought, _ in read), Found(parts)

    def _in_order(
        self, index: int, ids: Sequence[int], text: str, ended: Result | None = None
    ) -> list[tuple[str, Found]]:
        """As ``_read``, in pieces: what was found in one comes behind its thinking."""
        said, pieces = list(enumerate(ids, self._heard[index])), [(False, text)]
        self._heard[index] += len(ids)
        if self._thoughts:
            reader = self._thoughts[index]
            pieces = reader.push(ids, text) + (reader.close() if ended else [])
            said, reader.said = reader.said, []
        self._hear(said)
        if not self._readers:
            return [(text, Found()) if thinks else ("", Found([text])) for thinks, text in pieces]
        calls = self._readers[index]
        out = [("", calls.push([token for _, token in said], ""))]
        out += [(text, Found()) if thinks else ("", calls.push((), text)) for thinks, text in pieces]
        if ended is not None:
            out.append(("", calls.close(ended.finish_reason in ("length", "low_confidence"))))
        return [(thought, self._counted(found)) for thought, found in out]

    def _hear(self, said: Sequence[tuple[int, int]]) -> None:
        """Take places and ids of tokens that are no thinking, before the text that they make is told."""

    def _details(self) -> Json:
        return {"reasoning_tokens": sum(one.reasoning_tokens for one in self._thoughts)}

    def _metrics(self, results: Sequence[Result]) -> Json | None:
        found, told = super()._metrics(results), self.wanted.reasoning
        if found is not None and told is not None and told.section.budget is not None:
            found["thinking_budget_hit"] = self._thoughts[0].cut
        return found

    def _counted(self, found: Found) -> Found:
        """What was found, without the calls behind the first one where only one may be."""
        syntax = self.wanted.call_syntax
        if syntax is None or syntax.parallel:
            return found
        return Found([part for part in found.parts if isinstance(part, str) or part["index"] == 0])

    def _reason(self, index: int, result: Result) -> str | None:
        if self._readers and result.finish_reason == "stop":
            reader = self._readers[index]
            if reader.begun and reader.begun == reader.whole:
                return "tool_calls"
        return result.finish_reason

    def _logprobs(self, index: int, found: Sequence[TokenLogprobs]) -> Json:
        return {
            "content": [
                {
                    **self._entry(one.token, one.logprob),
                    "top_logprobs": [self._entry(token, logprob) for token, logprob in one.top],
                }
                for one in found
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> Json:
        return {
            "token": self._token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._bytes(token)),
        }


def _said(thought: str, found: Found) -> Json:
    delta: Json = {"reasoning_content": thought} if thought else {}
    delta |= {"content": found.text} if found.text else {}
    return {**delta, "tool_calls": found.calls} if found.calls else delta


def _joined(calls: Sequence[Json]) -> list[Json]:
    """Calls in one piece each, from the pieces in which they were told."""
    whole: dict[int, Json] = {}
    for call in calls:
        known = whole.setdefault(call["index"], call)
        if known is not call:
            known["function"]["arguments"] += call["function"]["arguments"]
    return [{k: v for k, v in call.items() if k != "index"} for call in whole.values()]


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
