"""Requests that are refused: in one line, with the field that is wrong; nothing is left running."""

import asyncio
import contextlib
import json
import threading

import pytest

from outpace import Engine
from outpace.errors import ModelError, OutpaceError, RequestError, SpecError
from outpace.methods.lookup.prompt_lookup import PromptLookup
from outpace.models.tiny import TableTarget
from outpace.server import answers
from outpace.server.app import create_app
from outpace.server.limits import Limits
from outpace.server.middleware import Guard
from outpace.server.run import host_names, is_loopback
from outpace.server.sse import EventStream
from outpace.server.wording import of_engine
from outpace.serving.service import Service
from tests.server.conftest import LIMITS, Client
from tests.support import until

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
DEEP = json.loads('{"a": ' * 600 + "1" + "}" * 600)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "prompt is missing"),
        ({"prompt": 5}, "prompt", "should be a string or a list, got 5"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "no prompt"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", 1, None]}, "prompt", 'got ["a", 1, null]'),
        ({"prompt": [-1]}, "prompt", "greater than or equal to 0"),
        ({"prompt": [10**6]}, "prompt", "1000000 is outside the vocabulary"),
        ({"prompt": [10**30], "echo": True}, "prompt", "outside the vocabulary"),
        ({"prompt": "a" * 3000}, "prompt", "1977 more than fit"),
        ({"prompt": "a\ud800"}, None, "half a surrogate pair"),
        ({"prompt": "a", "frobnicate": 1}, "frobnicate", "unknown field 'frobnicate'"),
        ({"prompt": "a", "\ud800": 1}, None, "the body cannot be read"),
        ({"prompt": "a", "speculation": {"k": 1}}, "speculation.k", "speculation.k"),
        (
            {"prompt": "a", "speculation": {"drafter": "evil"}},
            "speculation.drafter",
            "'evil' was not started",
        ),
        (
            {"prompt": "a", "speculation": {"drafter": "/etc"}},
            "speculation.drafter",
            "'/etc' was not started",
        ),
        ({"prompt": "a", "speculation": {"drafter": "x["}}, "speculation.drafter", "cannot read"),
        (
            {"prompt": "a", "speculation": {"num_speculative_tokens": -1}},
            "speculation.num_speculative_tokens",
            "got -1",
        ),
        ({"prompt": "a", "model": "other"}, "model", "'other' is not served here; use 'tiny'"),
        ({"prompt": "a", "service_tier": "flex"}, "service_tier", "'auto' or 'default'"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "suffix: should be null, got 'b'"),
        ({"prompt": "a", "speculation": 5}, "speculation", "should be an object, got 5"),
        ({"prompt": "a", "body": 1}, "body", "unknown field 'body'"),
        ({"prompt": "a", "best_of": 3}, "best_of", "best_of must be 1, got 3"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "stream", "is no stream"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "or equal to 1e-30, got 0"),
        ({"prompt": "a", "presence_penalty": 1e31}, "presence_penalty", "or equal to 1e+30, got 1e+31"),
        ({"prompt": "a", "n": 0}, "n", "got 0"),
        ({"prompt": "a", "n": 9}, "n", "9 answers are asked for, and at most 8"),
        ({"prompt": ["a"] * 9}, "n", "9 answers"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "got -1"),
        ({"prompt": "a", "max_tokens": 513}, "max_tokens", "at most 512 tokens"),
        ({"prompt": "a", "temperature": "1"}, "temperature", "got '1'"),
        ({"prompt": "a", "temperature": True}, "temperature", "should be a number, got true"),
        ({"prompt": "a", "temperature": -0.1}, "temperature", "got -0.1"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature", "finite"),
        ({"prompt": "a", "top_p": 0}, "top_p", "got 0"),
        ({"prompt": "a", "min_p": 1.5}, "min_p", "got 1.5"),
        ({"prompt": "a", "seed": 1.5}, "seed", "seed: "),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "at most 20"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "no token id"),
        ({"prompt": "a", "logit_bias": {"9999": 1}}, "logit_bias", "holds token 9999"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop", "17 entries"),
        ({"prompt": "a", "stop": ""}, "stop", "non-empty"),
        ({"prompt": "a", "stop": ["a", ""]}, "stop", "non-empty"),
        ({"prompt": "a", "stop": ["a", 5]}, "stop.1", "should be a string, got 5"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "needs stream"),
        ({"prompt": "a", "min_tokens": 20}, "min_tokens", "must be at most max_tokens (16), got 20"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "empty; name a token, or give null"),
        ({"prompt": "a", "allowed_token_ids": [300]}, "allowed_token_ids", "holds token 300"),
        ({"prompt": "a", "prediction": {"type": "x", "content": "a"}}, "prediction.type", "'x'"),
        ({"prompt": "a", "skip_special_tokens": False}, "skip_special_tokens", "should be true, got false"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_completions(client, body, param, says):
    text = json.dumps(body).encode()
    answer = client.request("POST", COMPLETION, content=text, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    too_long = "maximum context length" in says or "more than fit" in says
    assert error["code"] == ("context_length_exceeded" if too_long else answer.status_code)
    assert says in error["message"] and "\n" not in error["message"]
    assert error["param"] == param and len(error["message"]) <= 400
    assert error["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role", "role 'king'"),
        ({"messages": [{"content": "a"}]}, "messages.0.role", "has role null"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "content of type null"),
        ({"messages": [*HI, {"role": "user", "content": [5]}]}, "messages.1.content", "part of type number"),
        ({"messages": [5]}, "messages.0", "should be an object, got 5"),
        ({"min_tokens": 5, "max_completion_tokens": 2}, "min_tokens", "at most max_completion_tokens (2)"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages.0.mood", "mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
            "'image_url'",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20 alternatives"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "give one of them"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"parallel_tool_calls": 0}, "parallel_tool_calls", "should be true or false, got 0"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "'self'; leave it out"),
        ({"chat_template_kwargs": DEEP}, "chat_template_kwargs", "at most 100 levels"),
        ({"messages": [{"role": "user", "content": "a", "name": DEEP}]}, "messages.0", "at most 100 levels"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}],
            },
            "tools.0.function.parameters",
            "at most 100 levels",
        ),
        ({"prompt": "a"}, "prompt", "unknown field 'prompt'"),
        ({"functions": []}, "functions", "unknown field"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_chats(client, fields, param, says):
    error = client.refused(CHAT, {"messages": HI, **fields})
    assert says in error["message"] and error["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETION, {"prompt": "a" * 1100}, "prompt"),
        (COMPLETION, {"prompt": "a" * 90_000}, "prompt"),
        (COMPLETION, {"prompt": [5] * 1100}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 1100}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 90_000}]}, "messages"),
        ("/tokenize", {"prompt": "a" * 1100}, "prompt"),
        ("/detokenize", {"tokens": [5] * 1100}, "tokens"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_prompt_beyond_the_context_has_the_code_that_clients_know(client, path, body, param):
    answer = client.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert "this model's maximum context length is 1024 tokens" in error["message"]


def test_every_whole_number_is_a_seed(client):
    def drawn(seed):
        found = client.complete("ab", max_tokens=12, temperature=0.9, seed=seed, ignore_eos=True)
        return found["choices"][0]["text"], found["metrics"]["seed"]

    text, seed = drawn(-1)
    assert drawn(-1) == (text, seed) == drawn(seed) == drawn((1 << 64) - 1) and drawn(-2)[0] != text
    assert drawn(1e30)[1] == int(1e30) % (1 << 64)


def test_fields_that_change_nothing_are_taken(client):
    unread = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "prompt_cache_retention": "24h",
        "reasoning_effort": "low",
        "verbosity": "high",
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
    }
    drawn = {"max_tokens": 12, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    plain = client.complete("ab", **drawn)["choices"]
    assert client.complete("ab", **drawn, **unread)["choices"] == plain
    nothing = dict.fromkeys(
        (
            "stop",
            "n",
            "logprobs",
            "seed",
            "stream",
            "logit_bias",
            "suffix",
            "best_of",
            "top_p",
            "stream_options",
            "response_format",
        )
    )
    best = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    plain = client.complete("ab", **best)["choices"]
    assert client.complete("ab", **best, **nothing)["choices"] == plain
    streamed = client.post(
        COMPLETION, {"prompt": "ab", "stream": True, "stream_options": {"include_obfuscation": True}, **best}
    )
    assert streamed.status_code == 200 and "obfuscation" not in streamed.text


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'"a"', "application/json", 400),
        (b"null", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "application/json", 400),
        (b"[" * 90_000, "application/json", 400),
        (b'{"prompt": "a"}', "text/plain", 400),
        (b'{"prompt": "' + b"a" * 100_000 + b'"}', "application/json", 413),
    ],
    ids=lambda value: repr(value[:16]) if isinstance(value, bytes) else "",
)
def test_bodies_that_are_no_object(client, content, kind, status):
    answer = client.request("POST", COMPLETION, content=content, headers={"Content-Type": kind})
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status


def test_a_body_without_a_length_is_counted_as_it_comes(client):
    async def endless():
        for _ in range(200):
            yield b" " * 1000

    answer = client.request(
        "POST", COMPLETION, content=endless(), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 413 and "100000 bytes" in answer.json()["error"]["message"]


def test_a_body_that_never_comes():
    limits = Limits(read_seconds=0.05)
    sent = []

    async def application(scope, receive, send):
        await receive()

    async def silent():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    guard = Guard(application, keys=(), hosts=None, limits=limits)
    scope = {"type": "http", "path": COMPLETION, "headers": []}
    with pytest.raises(Exception, match="too slowly") as caught:
        asyncio.run(guard(scope, silent, send))
    assert caught.value.status_code == 408


def test_an_application_that_waits_for_ever_is_left():
    limits = Limits(read_seconds=0.05, request_seconds=0.05)
    ended = []

    async def application(scope, receive, send):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def nothing(*_):
        return {"type": "http.request"}

    guard = Guard(application, keys=(), hosts=None, limits=limits)
    asyncio.run(guard({"type": "http", "path": "/", "headers": []}, nothing, nothing))
    assert ended == [True]


def test_a_stream_that_nobody_reads_is_ended():
    ended = []

    async def chunks():
        while True:
            yield b"{}"

    async def never(*_):
        await asyncio.Event().wait()

    async def gone():
        return {"type": "http.disconnect"}

    for receive, seconds in ((gone, 60.0), (never, -4.9)):
        stream = EventStream(chunks(), seconds, lambda: ended.append(True))
        asyncio.run(stream({"type": "http"}, receive, never))
    assert ended == [True, True]


def test_paths_and_methods_that_do_not_exist(client):
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", COMPLETION, 405),
        ("POST", "/health", 405),
        ("GET", "/static/..%2fapp.py", 404),
        ("GET", "/static/chat.html", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/docs", 404),
        ("HEAD", COMPLETION, 405),
    ):
        answer = client.request(method, path)
        assert answer.status_code == status, path
        assert method == "HEAD" or answer.json()["error"]["code"] == status
    for path in ("/", "/health", "/version", "/metrics", "/v1/models", "/v1/models/tiny", "/openapi.json"):
        assert client.request("HEAD", path).status_code == client.get(path).status_code == 200, path


def test_keys(service):
    app = create_app(service, name="tiny", keys=["first", "second"], limits=LIMITS)
    body = {"prompt": "ab", "max_tokens": 1}
    for given, status in (
        (None, 401),
        ("Bearer third", 401),
        ("Bearer ", 401),
        ("first", 401),
        ("Basic first", 401),
        ("Bearer first", 200),
        ("bearer second", 200),
        ("Bearer firs", 401),
        ("Bearer fir\xdft", 401),
    ):
        headers = {} if given is None else {"Authorization": given.encode("latin-1")}
        answer = Client(app, **headers).post(COMPLETION, body)
        assert answer.status_code == status, given
        assert ("WWW-Authenticate" in answer.headers) == (status == 401)
    for path, status in (
        ("/", 200),
        ("/health", 200),
        ("/metrics", 401),
        ("/v1/models", 401),
        ("/openapi.json", 401),
        ("/static/chat.js", 200),
    ):
        assert Client(app).get(path).status_code == status, path


def test_host_names(service):
    app = create_app(service, name="tiny", hosts=host_names("127.0.0.1", ()), limits=LIMITS)
    for host, status in (
        ("127.0.0.1:80", 200),
        ("localhost", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("", 403),
    ):
        assert Client(app, Host=host).get("/v1/models").status_code == status, host
    assert host_names("127.0.0.1", ["key"]) is None and host_names("0.0.0.0", ()) is None
    assert all(is_loopback(host) for host in ("::1", "127.8.8.8", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "example.org"))


@contextlib.contextmanager
def busy(engine, drafters=("none",), **settings):
    """A service whose only slot is taken, and what frees it."""
    go, held = threading.Event(), threading.Event()

    def hold(event):
        held.set()
        go.wait(20)

    with Service(Engine(engine.target, "none"), drafters=drafters, max_batch=1, **settings) as made:
        try:
            made.submit(made.request("ab", max_new_tokens=2), hold)
            assert held.wait(20)
            yield made, go
        finally:
            go.set()


def idle(service):
    """Wait until everything is answered."""
    until(lambda: not service.stats().running and not service.stats().waiting)


def test_a_full_queue_says_when_to_come_back(engine):
    with busy(engine, max_queue=2) as (service, go):
        client = Client(create_app(service, name="tiny", limits=LIMITS))
        service.submit(service.request("ab", max_new_tokens=2), lambda event: None)
        answer = client.post(COMPLETION, {"prompt": ["ab", "cd"], "max_tokens": 2})
        assert answer.status_code == 429, answer.text
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
        error = client.refused(COMPLETION, {"prompt": ["ab"] * 3})
        assert "at most 2 per request" in error["message"]  # to wait would be of no use
        go.set()
        idle(service)
        assert client.complete("ab", max_tokens=2)["usage"]["completion_tokens"] <= 2
        # Of the list that did not fit, the prompt that did is not left behind.
        assert service.stats().finished.get("cancelled", 0) == 1


def test_a_request_that_takes_too_long_is_ended(engine):
    with busy(engine) as (service, go):
        client = Client(create_app(service, name="tiny", limits=Limits(request_seconds=0.2)))
        error = client.refused(COMPLETION, {"prompt": "ab"}, 504)
        assert "longer than 0.2 seconds" in error["message"]
        answer = client.post(COMPLETION, {"prompt": "ab", "stream": True})
        first, last, nothing = answer.text.split("\n\n")
        assert json.loads(first.removeprefix("data: "))["error"]["code"] == 504
        assert (last, nothing) == ("data: [DONE]", "")
        go.set()
        idle(service)
        assert service.stats().finished["cancelled"] == 2


def test_an_answer_that_fails_by_a_defect_tells_nothing_of_it(service, monkeypatch, caplog):
    client = Client(create_app(service, name="tiny", limits=LIMITS))

    def broken(*_, **__):
        raise RuntimeError("a secret of the machine")

    monkeypatch.setattr(service.engine, "start_sequence", broken)
    error = client.refused(COMPLETION, {"prompt": "ab"}, 500)
    assert "secret" not in json.dumps(error)
    assert "a secret of the machine" in caplog.text
    monkeypatch.undo()
    client.complete("ab", max_tokens=2)


@pytest.mark.parametrize(
    ("kind", "status"), [(RequestError, 400), (OutpaceError, 500), (ModelError, 500), (SpecError, 500)]
)
def test_the_client_is_told_what_it_can_mend(service, monkeypatch, caplog, kind, status):
    """A drafter that breaks its contract is no mistake of the client, and the log has it."""
    client = Client(create_app(service, name="tiny", limits=LIMITS))

    def propose(self, rows):
        raise kind("broke its contract")

    monkeypatch.setattr(PromptLookup, "propose", propose)
    error = client.refused(COMPLETION, {"prompt": "ab ab", "max_tokens": 4}, status)
    assert ("broke its contract" in error["message"]) == (status == 400)
    assert ("broke its contract" in caplog.text) == (status == 500)


def test_a_stream_that_cannot_be_written_ends_as_streams_do(client, monkeypatch, caplog):
    monkeypatch.setattr(answers, "_finite", lambda logprob: float("nan"))
    body = {"prompt": "ab", "max_tokens": 4, "logprobs": 0, "stream": True, "ignore_eos": True}
    answer = client.post(COMPLETION, body)
    *_, last, done, nothing = answer.text.split("\n\n")
    assert (answer.status_code, done, nothing) == (200, "data: [DONE]", "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500
    assert f"the stream of {answer.headers['request-id']} failed" in caplog.text and "JSON" in caplog.text
    assert client.refused(COMPLETION, {**body, "stream": False}, 500)["type"] == "server_error"


def test_values_of_a_template_may_have_any_name(client, service, monkeypatch):
    tokenizer = service.engine.target.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ template }}{{ documents[0].text }}")
    given = {"template": "of ", "documents": [{"text": "a page"}]}
    found = client.post("/tokenize", {"messages": HI, "chat_template_kwargs": given}).json()
    assert tokenizer.decode(found["tokens"]) == "of a page"


def test_calls_of_a_conversation_may_be_nonsense(client):
    """Arguments that nobody can read go back to the model as the text that it wrote."""
    for nonsense in ("[" * 500, json.dumps(DEEP)[:700], "{"):
        call = {"type": "function", "function": {"name": "f", "arguments": nonsense}}
        body = {"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]}
        assert client.post("/tokenize", body).status_code == 200, nonsense[:9]


def test_a_chat_without_a_length_gets_what_memory_can_hold(engine):
    forced = {"temperature": 0, "ignore_eos": True}
    with Service(Engine(engine.target, "none"), drafters=("none",), pages=3) as service:
        assert service.longest == 3 * 64 - 65 < engine.target.max_positions
        client = Client(create_app(service, name="tiny"))
        answer = client.chat("ab", **forced)
        assert answer["usage"]["total_tokens"] == service.longest
        assert answer["choices"][0]["finish_reason"] == "length"
        answer = client.complete("a" * (service.longest - 3), **forced)
        assert answer["usage"]["total_tokens"] == service.longest
        error = client.refused(CHAT, {"messages": HI, "max_tokens": 200})
        assert "pages of memory, and there are 3" in error["message"]
        error = client.refused(COMPLETION, {"prompt": "a" * 200})
        assert "pages of memory, and there are 3" in error["message"]


def test_a_body_that_drips_has_a_limit():
    limits = Limits(read_seconds=0.05)

    async def application(scope, receive, send):
        while (await receive()).get("more_body"):
            pass

    async def drip():
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"a", "more_body": True}

    async def send(message):
        pass

    guard = Guard(application, keys=(), hosts=None, limits=limits)
    with pytest.raises(Exception, match="too slowly") as caught:
        asyncio.run(guard({"type": "http", "path": COMPLETION, "headers": []}, drip, send))
    assert caught.value.status_code == 408


def test_further_hosts_and_origins(service):
    hosts = host_names("127.0.0.1", (), ["Proxy.example"])
    app = create_app(service, name="tiny", hosts=hosts, origins=["https://a.example"], limits=LIMITS)
    for host, status in (("proxy.example:80", 200), ("localhost", 200), ("evil.example", 403)):
        assert Client(app, Host=host).get("/v1/models").status_code == status, host
    assert host_names("0.0.0.0", (), ["a"]) >= {"a", "0.0.0.0"}
    for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = Client(app).request("OPTIONS", CHAT, headers=asked)
        assert (answer.headers.get("Access-Control-Allow-Origin") == origin) == allowed
    public = {
        **asked,
        "Origin": "https://a.example",
        "Access-Control-Request-Headers": "x-stainless-os,x-api-key",
    }
    assert Client(app).request("OPTIONS", CHAT, headers=public).status_code == 200
    plain = create_app(service, name="tiny", limits=LIMITS)
    assert (
        "Access-Control-Allow-Origin" not in Client(plain, Origin="https://a.example").get("/health").headers
    )


def test_a_key_has_so_many_answers_at_a_time(engine):
    with busy(engine) as (service, go):
        limits = Limits(per_key=2, request_seconds=20)
        app = create_app(service, name="tiny", keys=["one", "two"], limits=limits)
        body, done = {"prompt": "ab", "max_tokens": 2, "n": 2}, []
        waiting = threading.Thread(
            target=lambda: done.append(Client(app, Authorization="Bearer one").post(COMPLETION, body))
        )
        waiting.start()
        until(lambda: service.stats().waiting == 2)
        refused = Client(app, Authorization="Bearer one").post(COMPLETION, {**body, "n": 1})
        assert refused.status_code == 429 and "Retry-After" in refused.headers
        assert "at most 2" in refused.json()["error"]["message"]
        go.set()
        waiting.join(20)
        assert done[0].status_code == 200
        for key in ("one", "two"):
            assert Client(app, Authorization=f"Bearer {key}").post(COMPLETION, body).status_code == 200


def test_null_counts_as_not_given(client):
    for body in (
        {"prompt": "ab", "echo": None, "return_token_ids": None, "ignore_eos": None},
        {"prompt": "ab", "stream": True, "stream_options": {"include_usage": None}},
        {"prompt": "ab", "speculation": {"detailed": None, "trace": None}},
    ):
        assert client.post(COMPLETION, {"model": "tiny", "max_tokens": 2, **body}).status_code == 200, body
    client.refused(COMPLETION, {"model": "tiny", "prompt": None})


@pytest.mark.parametrize("field", ["detailed", "trace"])
def test_other_forms_of_chats_refuse_what_they_do_not_tell(client, field):
    more = {"model": "tiny", "stream": True, "speculation": {field: True}}
    said = [{"role": "user", "content": "ab"}]
    client.refused("/v1/messages", {"messages": said, "max_tokens": 2, **more})
    client.refused("/v1/responses", {"input": said, **more})


def test_prompts_that_are_too_long_are_no_shorter_as_tokens(service):
    app = create_app(service, name="tiny", limits=Limits(prompt_tokens=4, request_seconds=20))
    client = Client(app)
    for path, body in (
        ("/tokenize", {"prompt": "a b c d e f g h"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a b c d e f g h"}]}),
        ("/detokenize", {"tokens": [1, 2, 3, 4, 5]}),
    ):
        answer = client.post(path, {"model": "tiny", **body})
        assert answer.status_code == 400 and "at most 4" in answer.json()["error"]["message"], body


def test_every_response_has_a_number(service, client):
    numbers = set()
    for answer in (client.get("/health"), client.get("/nowhere"), client.post(CHAT, {})):
        assert answer.headers["x-request-id"] == answer.headers["request-id"]
        numbers.add(answer.headers["x-request-id"])
    assert len(numbers) == 3


def test_errors_about_messages_name_their_request(service, client, monkeypatch):
    said = {"model": "tiny", "messages": [{"role": "user", "content": "ab ab"}], "max_tokens": 8}
    locked = Client(create_app(service, name="tiny", keys=["one"], limits=LIMITS))
    for answer in (client.post("/v1/messages", {}), locked.post("/v1/messages", said)):
        assert answer.json()["request_id"] == answer.headers["request-id"]
    monkeypatch.setattr(PromptLookup, "propose", lambda self, rows: 1 / 0)
    stream = client.post("/v1/messages", {**said, "stream": True})
    *_, last, _ = stream.text.split("\n\n")
    assert json.loads(last.partition("data: ")[2])["request_id"] == stream.headers["request-id"]


def test_a_wrong_key_is_not_called_a_missing_one(service):
    app = create_app(service, name="tiny", keys=["one"], limits=LIMITS)
    assert "needs a key" in Client(app).get("/v1/models").text
    for headers in ({"Authorization": "Bearer two"}, {"X-Api-Key": "two"}):
        assert "does not know this key" in Client(app, **headers).get("/v1/models").text


def test_a_client_is_not_told_what_python_takes():
    engine = Engine(TableTarget.random(seed=0), drafter="none")
    with pytest.raises(RequestError) as found:
        engine.encode(HI)
    said, field = of_engine(str(found.value))
    assert said.endswith("put its tokenizer.json into the model's folder") and field == "messages"
