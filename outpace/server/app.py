"""The application: which path does what."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import lru_cache, partial
from importlib import resources
from typing import TypeVar

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from outpace import __version__
from outpace.engine.results import Result
from outpace.models.measured import dtype_name
from outpace.server.answers import ChatWriter, CompletionWriter, Writer
from outpace.server.client_request import ClientRequest
from outpace.server.description import describe
from outpace.server.dialects import messages, responses
from outpace.server.dialects.messages import CountBody, MessagesBody
from outpace.server.dialects.messages_answers import PATH as MESSAGES
from outpace.server.dialects.messages_answers import MessagesWriter, refusal
from outpace.server.dialects.responses import ResponsesBody
from outpace.server.dialects.responses_answers import PATH as RESPONSES
from outpace.server.dialects.responses_answers import ResponsesWriter
from outpace.server.encoding import Json, JsonResponse, to_json
from outpace.server.errors import (
    MISTAKES,
    ApiError,
    from_defect,
    from_mistake,
    from_validation,
    renamed,
    stopping,
)
from outpace.server.grammar import open_grammars
from outpace.server.limits import Limits
from outpace.server.metrics import CONTENT_TYPE, Meters
from outpace.server.middleware import Counting, Defects, Guard, Stopping
from outpace.server.parsing import BodyParser
from outpace.server.request_handler import Mailbox, RequestHandler
from outpace.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from outpace.server.sse import EventStream, event, until_left
from outpace.server.wording import Names
from outpace.serving.events import Done, Tokens
from outpace.serving.keyed import check_stores
from outpace.serving.service import Service

T = TypeVar("T")

_OWN: Names = {}
_CHAT = {"prompt": "messages"}  # of mistakes that the engine finds in the prompt
_STATIC = {"chat.js": "text/javascript; charset=utf-8", "chat.css": "text/css; charset=utf-8"}
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Server:
    """What the paths of one application share."""

    def __init__(
        self, service: Service, name: str, limits: Limits, thinking_marks: Sequence[str] = ()
    ) -> None:
        target = service.engine.target
        self.service, self.name, self.limits = service, name, limits
        self.tokenizer = target.tokenizer
        self.fingerprint = f"outpace-{__version__}-{target.digest}"
        self.began = int(time.time())
        self._mail_of = lru_cache(maxsize=1)(Mailbox)
        self._under_way: Counter[str] = Counter()
        self.meters = Meters(
            name, service.stats, dict.fromkeys(service.drafters, True) | dict.fromkeys(service.lossy, False)
        )
        grammars = open_grammars(target.tokenizer, target.vocab_size, service.engine.eos_ids)
        self.parser = BodyParser(service, name, limits, grammars, thinking_marks)

    async def generate(
        self,
        request: Request,
        read: Callable[[], ClientRequest],
        writer: Callable[..., Writer],
        names: Names = _OWN,
    ) -> Response:
        began = time.perf_counter()
        wanted = await off_loop(read, names)
        mail = self._mail_of(asyncio.get_running_loop())
        handler = RequestHandler(self.service, wanted, self.meters, mail, began, self.limits.request_seconds)
        writes = writer(wanted, self.name, self.fingerprint, self.tokenizer)
        writes.number = request.scope.get("number")
        writes.lossless = all(self.service.lossless(one) for one in wanted.requests)
        end = self._start(handler, request.scope.get("caller", ""))
        if wanted.stream:
            return EventStream(chunks(handler, writes), self.limits.request_seconds, end, writes.named)
        try:
            answer = await until_left(whole(handler, writes), request.receive)
        finally:
            end()
        return Response(status_code=499) if answer is None else JsonResponse(answer)

    def _start(self, handler: RequestHandler, key: str) -> Callable[[], None]:
        """Queue a request; give what ends it, which may be called more than once.

        Raises:
            ApiError: as ``RequestHandler.start``; 429, its key has too many answers under way.
        """
        most, count = self.limits.per_key, handler.wanted.answers
        if most is not None and self._under_way[key] + count > most:
            raise ApiError(
                429,
                f"{self._under_way[key]} answers are under way for this key, and {count} more are too many "
                f"(at most {most}); wait for one to end",
                headers={"Retry-After": "1"},
            )
        handler.start(key)
        self._under_way[key] += count
        left = [count]

        def end() -> None:
            handler.cancel()
            self._under_way[key] -= left[0]
            if not self._under_way[key]:
                del self._under_way[key]
            left[0] = 0

        return end

    def about(self) -> Json:
        """The model, as ``/v1/models`` lists it."""
        target = self.service.engine.target
        return {
            "id": self.name,
            "object": "model",
            "created": self.began,
            "owned_by": "outpace",
            "root": target.name,
            "max_model_len": target.max_positions,
            "dtype": dtype_name(target.dtype),
            "device": str(target.device),
            "threads": torch.get_num_threads(),
            "drafters": list(self.service.drafters),
            "lossless": not self.service.lossy,
            "lossy_drafters": list(self.service.lossy),
        }


async def off_loop(work: Callable[[], T], names: Names = _OWN) -> T:
    """Do something slow on another thread; mistakes of the client become errors of the API.

    Args:
        names: of fields, where they are not those of completions and chats.
    """
    try:
        return await asyncio.to_thread(work)
    except MISTAKES as error:
        raise renamed(from_mistake(error), names) from error
    except ApiError as error:
        raise renamed(error, names) from error


async def whole(handler: RequestHandler, writer: Writer) -> Json:
    results: dict[int, Result] = {}
    events: list[list[Tokens]] = [[] for _ in range(handler.wanted.answers)]
    async with contextlib.aclosing(handler.events()) as found:
        async for event in found:
            if isinstance(event, Done):
                results[event.index] = event.result
            elif handler.wanted.detailed:
                events[event.index].append(event)
    return writer.answer([results[index] for index in range(handler.wanted.answers)], events)


async def chunks(handler: RequestHandler, writer: Writer) -> AsyncIterator[bytes]:
    """Give pieces of answers as they come, as JSON. What goes wrong on the way is the last one."""

    def told(piece: Json) -> bytes:
        return event(to_json(piece), piece["type"]) if writer.named else to_json(piece)

    try:
        async with contextlib.aclosing(_pieces(handler, writer)) as found:
            async for piece in found:
                yield told(piece)
    except ApiError as error:
        yield told(writer.fault(error))
    except Exception as error:
        yield told(writer.fault(from_defect(f"the stream of {writer.number}", error)))
    finally:
        handler.cancel()


async def _pieces(handler: RequestHandler, writer: Writer) -> AsyncGenerator[Json, None]:
    results: dict[int, Result] = {}
    opened = False
    async with contextlib.aclosing(handler.events()) as found:
        async for happened in found:
            # Nothing is told before there is something: who only waited may be asked again elsewhere.
            for index in range(0 if opened else handler.wanted.answers):
                for chunk in writer.opening(index):
                    yield chunk
            opened = True
            if isinstance(happened, Done):
                results[happened.index] = happened.result
                told = writer.ending(happened.index, happened.result)
            else:
                told = writer.pieces(happened)
            for chunk in told:
                yield chunk
    if handler.wanted.include_usage:
        yield writer.closing([results[index] for index in range(handler.wanted.answers)])


def create_app(
    service: Service,
    *,
    name: str,
    keys: Sequence[str] = (),
    hosts: frozenset[str] | None = None,
    origins: Sequence[str] = (),
    limits: Limits | None = None,
    thinking_marks: Sequence[str] = (),
) -> FastAPI:
    """Put a server in front of a service.

    Args:
        service: open; whoever made it closes it.
        keys: bearer keys; none lets everybody in.
        hosts: host names that the server answers to; None: any.
        origins: sites whose pages may call the API from a browser; ``*``: all.
        thinking_marks: as in `SamplingParams`; empty: the model's own, if it has some.

    Raises:
        RequestError: a drafter with a store that requests with keys would never use.
    """
    if keys and not service.share_across_keys:
        check_stores(service.drafters)
    limits = limits or Limits()
    server = Server(service, name, limits, thinking_marks)
    app = FastAPI(title="outpace", version=__version__, docs_url=None, redoc_url=None)
    app.state.server = server
    # The last one stands outermost: what the guard refuses is counted, and what fails is guarded.
    app.add_middleware(Defects)
    app.add_middleware(Guard, keys=keys, hosts=hosts, limits=limits)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # public clients tell much of themselves
            expose_headers=["Retry-After", "X-Request-Id", "Request-Id"],
        )
    app.add_middleware(Stopping)
    app.add_middleware(Counting, meters=server.meters, routes=app.routes)
    tell_errors(app)
    _api(app, server)
    _tools(app, server)
    _page(app)
    for route in [one for one in app.routes if isinstance(one, APIRoute) and one.methods == {"GET"}]:
        app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    app.openapi = lambda: describe(app, server.parser.bounds)  # type: ignore[method-assign]
    return app


def _api(app: FastAPI, server: Server) -> None:
    parser = server.parser

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [server.about()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        parser.check_model(model)
        return JsonResponse(server.about())

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await server.generate(request, lambda: parser.completion(body), CompletionWriter)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        newer = body.max_completion_tokens is not None and body.max_tokens is None
        names = _CHAT | ({"max_tokens": "max_completion_tokens"} if newer else {})
        return await server.generate(request, lambda: parser.chat(body), ChatWriter, names)

    @app.post(RESPONSES)
    async def respond(body: ResponsesBody, request: Request) -> Response:
        writer = partial(ResponsesWriter, body=body)
        return await server.generate(
            request, lambda: parser.chat(responses.as_chat(body)), writer, responses.NAMES
        )

    @app.post(MESSAGES)
    async def message(body: MessagesBody, request: Request) -> Response:
        thinks = bool(parser.marks)
        return await server.generate(
            request, lambda: parser.chat(messages.as_chat(body, thinks)), MessagesWriter, messages.NAMES
        )

    @app.post(f"{MESSAGES}/count_tokens")
    async def count(body: CountBody) -> Response:
        chat = messages.as_chat(body, bool(parser.marks))
        wanted = await off_loop(lambda: parser.chat(chat), messages.NAMES)
        return JsonResponse({"input_tokens": len(wanted.requests[0].prompt)})


def _tools(app: FastAPI, server: Server) -> None:
    parser, target = server.parser, server.service.engine.target

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        tokens = await off_loop(lambda: parser.tokenize(body))
        answer: Json = {"count": len(tokens), "max_model_len": target.max_positions, "tokens": tokens}
        if body.return_token_strs:
            spelled = [parser.tokenizer.token_bytes(token) for token in tokens]
            answer["token_strs"] = [text.decode("utf-8", "replace") for text in spelled]
        return JsonResponse(answer)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        return JsonResponse({"prompt": await off_loop(lambda: parser.detokenize(body))})

    @app.get("/health")
    async def health() -> Response:
        if server.service.closing:
            if server.service.broken is not None:
                raise ApiError(503, "the service has broken down; start the server anew")
            raise stopping()
        return JsonResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.meters.text(), media_type=CONTENT_TYPE)


def _page(app: FastAPI) -> None:
    folder = resources.files("outpace.server").joinpath("static")

    def file(name: str, kind: str) -> Response:
        headers = {"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache"}
        return Response(folder.joinpath(name).read_bytes(), media_type=kind, headers=headers)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return file("chat.html", "text/html; charset=utf-8")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        # A table, not a folder: no name that is asked for ever becomes a path.
        if name not in _STATIC:
            raise ApiError(404, f"there is no file {name!r} here")
        return file(name, _STATIC[name])


def tell_errors(app: FastAPI) -> None:
    """Let an application tell errors in the form of the API that was called."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> Response:
        return refusal(request.scope, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return refusal(request.scope, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        path, method = request.url.path, request.method
        message = {
            400: "the body is not JSON that can be read",
            404: f"there is no {path} here",
            405: f"{path} does not take {method}",
        }.get(error.status_code, str(error.detail))
        return refusal(request.scope, ApiError(error.status_code, message, headers=error.headers))
