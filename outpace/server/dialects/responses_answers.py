"""Answers of ``/v1/responses``: a list of items, told event by event."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from outpace.engine.results import Result
from outpace.sampling import TokenLogprobs
from outpace.server.dialects.blocks import Block, BlockWriter, Happened
from outpace.server.dialects.responses import ResponsesBody
from outpace.server.dialects.text_tokens import TextTokens
from outpace.server.encoding import Json
from outpace.server.errors import ApiError
from outpace.serving.events import Tokens

PATH = "/v1/responses"
_ITEMS = {"thinking": ("rs", "reasoning"), "text": ("msg", "message"), "call": ("fc", "function_call")}
_EVENTS = {
    "thinking": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


def fault(error: ApiError) -> Json:
    """The event that ends a stream that broke, without its number."""
    told = error.body()["error"]
    return {"type": "error", "code": str(told["code"]), "message": told["message"], "param": told["param"]}


class ResponsesWriter(BlockWriter):
    """Writes an answer as items: reasoning, messages, calls of functions.

    Args:
        body: comes back in every answer, as far as the API has it so.
    """

    prefix = "resp"

    def __init__(self, *args: Any, body: ResponsesBody) -> None:
        super().__init__(*args)
        self._body = body
        self._next = 0
        self._key = secrets.token_hex(12)
        self._scores: list[TokenLogprobs] = []
        marks = self._readers[0].marks if self._readers else {}
        scored = self.wanted.requests[0].params.logprobs is not None
        self._tokens = TextTokens(self._tokenizer, marks) if scored else None
        self._characters = 0

    def answer(self, results: Sequence[Result], events: Sequence[Sequence[Tokens]]) -> Json:
        self._scores += results[0].logprobs or ()
        return super().answer(results, events)

    def pieces(self, event: Tokens) -> list[Json]:
        self._scores += event.logprobs
        return super().pieces(event)

    def _hear(self, said: Sequence[tuple[int, int]]) -> None:
        if self._tokens is not None:
            self._tokens.push(said)

    def _scored(self, block: Block, new: str) -> list[Json]:
        """Log-probabilities of the tokens of new text; of none behind a call."""
        self._characters += len(new)
        if self._tokens is None:
            return []
        until = min([self._characters, *(reader.before for reader in self._readers)])
        found = [self._scores[place] for place in self._tokens.take(until)]
        told: list[Json] = self._logprobs(0, found)["content"]
        block.logprobs += told
        return told

    def opening(self, index: int) -> list[Json]:
        begun = self._response("in_progress", None)
        events = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
        return [self._numbered(event) for event in events]

    def told(self, what: Happened, block: Block, new: str) -> Iterator[Json]:
        place = {"item_id": self._item_id(block), "output_index": block.number}
        event = _EVENTS[block.kind]
        part = place if block.kind == "call" else {**place, "content_index": 0}
        logs: Json = {"logprobs": block.logprobs} if block.kind == "text" else {}
        if what == "opens":
            item = self._item(block, "in_progress")
            yield self._event("response.output_item.added", output_index=block.number, item=item)
            if block.kind != "call":
                yield self._event("response.content_part.added", **part, part=_part(block, empty=True))
        elif what == "grows":
            if logs:
                logs["logprobs"] = self._scored(block, new)
            yield self._event(f"{event}.delta", **part, delta=new, **logs)
        else:
            key = "arguments" if block.kind == "call" else "text"
            named = {"name": block.name} if block.kind == "call" else {}
            yield self._event(f"{event}.done", **part, **{key: block.text}, **named, **logs)
            if block.kind != "call":
                yield self._event("response.content_part.done", **part, part=_part(block))
            item = self._item(block, "incomplete" if self.cut else "completed")
            yield self._event("response.output_item.done", output_index=block.number, item=item)

    def last(self, result: Result) -> Iterator[Json]:
        whole = self.whole_answer(result)
        yield self._event(f"response.{whole['status']}", response=whole)

    def whole_answer(self, result: Result) -> Json:
        cut = self._reason(0, result) == "length"
        return self._response("incomplete" if cut else "completed", result)

    def fault(self, error: ApiError) -> Json:
        return self._numbered(fault(error))

    def _event(self, type: str, **fields: Any) -> Json:
        return self._numbered({"type": type, **fields})

    def _numbered(self, event: Json) -> Json:
        self._next += 1
        return {**event, "sequence_number": self._next - 1}

    def _item_id(self, block: Block) -> str:
        return f"{_ITEMS[block.kind][0]}_{self._key}{block.number}"

    def _item(self, block: Block, status: str) -> Json:
        begun = status == "in_progress"
        item: Json = {"id": self._item_id(block), "type": _ITEMS[block.kind][1], "status": status}
        if block.kind == "call":
            arguments = "" if begun else block.text
            return {**item, "call_id": block.id, "name": block.name, "arguments": arguments}
        content = [] if begun else [_part(block)]
        if block.kind == "thinking":
            return {**item, "summary": [], "content": content}
        return {**item, "role": "assistant", "content": content}

    def _response(self, status: str, result: Result | None) -> Json:
        body, params = self._body, self.wanted.requests[0].params
        cut = status == "incomplete"
        items = [self._item(block, "completed") for block in self.blocks.made] if result else []
        if cut and items:
            items[-1]["status"] = "incomplete"
        form = {"type": "text"}
        if body.text is not None and body.text.format is not None:
            form = body.text.format.model_dump(by_alias=True, exclude_none=True)
            form |= {"name": form.get("name", "answer")} if form["type"] == "json_schema" else {}
        tools = [{"strict": None, "parameters": None, **tool.model_dump()} for tool in body.tools or ()]
        choice = body.tool_choice or "auto"
        return {
            "id": self._id.replace("-", "_"),
            "object": "response",
            "created_at": self._about["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._about["model"],
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": form},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if result is None else self._usage(result),
            "user": body.user,
            "lossless": self.lossless,
            "metrics": None if result is None else self._metrics([result]),
        }

    def _usage(self, result: Result) -> Json:
        told = self.usage([result])
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": told["prompt_tokens_details"],
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": told["completion_tokens_details"]["reasoning_tokens"]
            },
            "total_tokens": told["total_tokens"],
        }


def _part(block: Block, empty: bool = False) -> Json:
    text = "" if empty else block.text
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": [] if empty else block.logprobs,
    }
