"""Plug-in for the command line tool ``llm``: models of `outpace` under the names that a user gives them.

    llm install outpace
    llm -m outpace "Name a river."
    llm outpace add mine ./model --drafter auto

A prompt is read as the server reads a chat, and answered by the same code in this process: schemas, tools,
conversations, streams. A model is loaded with its first prompt.
"""

from __future__ import annotations

import atexit
import json
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import llm
from llm.parts import AttachmentPart, Message, StreamEvent, TextPart, ToolCallPart, ToolResultPart
from pydantic import Field, ValidationError

from outpace import files
from outpace.errors import OutpaceError, RequestError
from outpace.files import expanded

if TYPE_CHECKING:
    from outpace.server.parsing import BodyParser

Json = dict[str, Any]

OWN = "outpace"
"""Name of the model that is always there, and of the group of commands."""
DEFAULT: Json = {"model": "smollm2-135m", "drafter": "auto"}


@llm.hookimpl
def register_models(register: Any, model_aliases: Any = None) -> None:
    """Offer the default model, and those that were added."""
    for name, one in {OWN: DEFAULT, **_added()}.items():
        register(OutpaceModel(name if name == OWN else f"{OWN}/{name}", one["model"], one["drafter"]))


@llm.hookimpl
def register_commands(cli: click.Group) -> None:
    """``llm outpace add`` and ``llm outpace remove``."""

    @cli.group(name=OWN)
    def group() -> None:
        """Models that outpace runs."""

    @group.command()
    @click.argument("name")
    @click.argument("model")
    @click.option("--drafter", default=DEFAULT["drafter"], show_default=True, help="A method spec.")
    def add(name: str, model: str, drafter: str) -> None:
        """Call MODEL, a folder, a GGUF file or a hub id, outpace/NAME."""
        if not name or name == OWN or set(name) & set("/ "):
            raise click.ClickException(f"a name has no blank and no slash, got {name[:80]!r}")
        path = expanded(model)
        where = str(path.resolve()) if path.exists() else model
        _keep({**_added(), name: {"model": where, "drafter": drafter}})

    @group.command()
    @click.argument("name")
    def remove(name: str) -> None:
        """Forget outpace/NAME."""
        kept = _added()
        if kept.pop(name, None) is None:
            raise click.ClickException(
                f"there is no {name[:80]!r}; known: {', '.join(sorted(kept)) or 'none'}"
            )
        _keep(kept)


class OutpaceModel(llm.Model):
    """One model, loaded when it is first asked.

    Args:
        model: as ``Engine.load`` takes it.
        drafter: a method spec.
    """

    can_stream = True
    supports_schema = True
    supports_tools = True

    class Options(llm.Options):
        """What ``-o`` takes; what is not given is as the model's authors advise."""

        temperature: float | None = Field(default=None, ge=0, description="0 takes the likeliest token.")
        top_p: float | None = Field(default=None, gt=0, le=1, description="Least probability to draw from.")
        max_tokens: int | None = Field(default=None, ge=1, description="Tokens of an answer, at most.")
        seed: int | None = Field(default=None, description="Makes the text a function of prompt and seed.")

    def __init__(self, model_id: str, model: str, drafter: str) -> None:
        self.model_id, self._model, self._drafter = model_id, model, drafter
        self._reader: BodyParser | None = None

    def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any = None
    ) -> Iterator[StreamEvent]:
        """Answer; yields text, thinking and calls as they come.

        Raises:
            llm.ModelError: whatever is wrong with the prompt or the model, in one line.
        """
        from outpace.server.errors import ApiError, from_validation

        try:
            yield from self._answer(prompt, response)
        except OutpaceError as error:
            raise llm.ModelError(str(error)) from error
        except ApiError as error:
            raise llm.ModelError(error.message) from error
        except ValidationError as error:
            raise llm.ModelError(from_validation(error.errors()).message) from error

    def _answer(self, prompt: Any, response: Any) -> Iterator[StreamEvent]:
        from outpace.server.answers import ChatWriter
        from outpace.server.schema import ChatBody
        from outpace.serving.events import Done, Event, Failed

        reader = self._reader = self._reader or self._load()
        wanted = reader.chat(ChatBody.model_validate(_body(prompt)))
        writer = ChatWriter(wanted, self.model_id, "", reader.tokenizer)
        heard: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ticket = reader.service.submit(wanted.requests[0], heard.put)
        try:
            while not isinstance(event := heard.get(), Done):
                if isinstance(event, Failed):
                    raise event.error
                yield from _told(writer.pieces(event))
        finally:
            ticket.cancel()
        yield from _told(writer.ending(0, event.result))
        closing = writer.closing([event.result])
        usage = closing["usage"]
        response.set_usage(
            input=usage["prompt_tokens"], output=usage["completion_tokens"], details=closing["metrics"]
        )

    def _load(self) -> BodyParser:
        from outpace.engine.engine import Engine
        from outpace.server.grammar import open_grammars
        from outpace.server.limits import Limits
        from outpace.server.parsing import BodyParser
        from outpace.serving.service import Service

        engine = Engine.load(self._model)
        service = Service(engine, drafters=(self._drafter,), max_batch=1)
        atexit.register(service.close, drain=False)
        target = engine.target
        grammars = open_grammars(target.tokenizer, target.vocab_size, engine.eos_ids)
        return BodyParser(service, self.model_id, Limits(), grammars)


def _body(prompt: Any) -> Json:
    """A prompt of ``llm`` as the body of a chat."""
    body: Json = {key: value for key, value in dict(prompt.options).items() if value is not None}
    body["messages"] = [one for message in prompt.messages for one in _messages(message)]
    if prompt.schema:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": prompt.schema},
        }
    if prompt.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema or {"type": "object", "properties": {}},
                },
            }
            for tool in prompt.tools
        ]
    return body


def _messages(message: Message) -> list[Json]:
    if any(isinstance(part, AttachmentPart) for part in message.parts):
        raise RequestError("a message has an attachment, and outpace reads text; leave it out")
    text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
    results = [
        {"role": "tool", "tool_call_id": part.tool_call_id, "content": part.output}
        for part in message.parts
        if isinstance(part, ToolResultPart)
    ]
    calls = [
        {
            "id": part.tool_call_id,
            "type": "function",
            "function": {"name": part.name, "arguments": json.dumps(part.arguments)},
        }
        for part in message.parts
        if isinstance(part, ToolCallPart)
    ]
    if not text and not calls:
        return results
    return [*results, {"role": message.role, "content": text, **({"tool_calls": calls} if calls else {})}]


def _told(chunks: Sequence[Json]) -> Iterator[StreamEvent]:
    """What chunks of a chat bring."""
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        for key, kind in (("reasoning_content", "reasoning"), ("content", "text")):
            if delta.get(key):
                yield StreamEvent(type=kind, chunk=delta[key])
        for call in delta.get("tool_calls") or ():
            number = f"call_{call['index']}"
            if call["function"].get("name"):
                yield StreamEvent(type="tool_call_name", chunk=call["function"]["name"], tool_call_id=number)
            if call["function"].get("arguments"):
                yield StreamEvent(
                    type="tool_call_args", chunk=call["function"]["arguments"], tool_call_id=number
                )


def _file() -> Path:
    return Path(llm.user_dir()) / "outpace.json"


def _added() -> dict[str, Json]:
    """Models that were added, by name; none where the file is damaged, so that ``llm`` still starts."""
    try:
        read = json.loads(_file().read_text("utf-8"))
        return {
            str(name): {"model": str(one["model"]), "drafter": str(one["drafter"])}
            for name, one in read.items()
        }
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return {}


def _keep(models: dict[str, Json]) -> None:
    try:
        files.write_whole(_file(), json.dumps(models, indent=1))
    except OSError as error:
        raise click.ClickException(f"cannot write {_file()}: {error.strerror}") from error
