"""``/openapi.json`` documents the answers that are sent, and no others."""

import re

import jsonschema_rs
import pytest

from outpace.server.bounds import below

HI = [{"role": "user", "content": "hi"}]
CALL = {"function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
STREAM = {"prompt": "a", "max_tokens": 1, "stream": True}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


def test_every_status_and_type_is_documented(client):
    made = client.get("/openapi.json").json()
    assert "HTTPValidationError" not in made["components"]["schemas"]
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], path
            assert ("400" in operation["responses"]) == (method == "post"), path
    assert list(made["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


@pytest.mark.parametrize(
    ("method", "path", "body", "documented", "status"),
    [
        ("GET", "/metrics", None, "/metrics", 200),
        ("GET", "/v1/models/other", None, "/v1/models/{model}", 404),
        ("POST", "/v1/completions", {"prompt": "a", "n": 0}, None, 400),
        ("POST", "/v1/completions", {"prompt": "a", "model": "other"}, None, 404),
        ("POST", "/v1/completions", {"prompt": "a" * 200_000}, None, 413),
        ("POST", "/v1/chat/completions", {}, None, 400),
        ("POST", "/tokenize", {"prompt": "a"}, None, 200),
        ("POST", "/detokenize", {"tokens": [1]}, None, 200),
        ("GET", "/health", None, None, 200),
    ],
)
def test_answers_are_as_they_are_described(client, method, path, body, documented, status):
    answer = client.request(method, path, **({} if body is None else {"json": body}))
    assert answer.status_code == status
    paths = client.get("/openapi.json").json()["paths"]
    responses = paths[documented or path][method.lower()]["responses"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in responses[str(status)]["content"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_reasons_why_answers_end_are_listed(client, path):
    asked = {"messages": HI} if "chat" in path else {"prompt": "a"}
    said = client.request("POST", path, json={**asked, "max_tokens": 2}).json()
    whole = client.get("/openapi.json").json()["paths"][path]["post"]["responses"]["200"]
    check = jsonschema_rs.validator_for(whole["content"]["application/json"]["schema"])
    assert check.is_valid(said)
    for reason, fine in (("low_confidence", True), (None, True), ("doubt", False)):
        said["choices"][0]["finish_reason"] = reason
        assert check.is_valid(said) == fine


def test_messages_with_calls_are_checked_too(client):
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    wrong = {"role": "assistant", "content": {"a": 1}, "tool_calls": [call]}
    answer = client.post("/tokenize", {"messages": [{"role": "user", "content": "a"}, wrong]})
    assert answer.status_code == 400 and "message 2" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "said", "allowed"),
    [
        ("/v1/completions", {"prompt": "a", "n": 2.0, "max_tokens": 1.0}, True),
        ("/v1/completions", {"prompt": [[1.0, 2], [3]], "max_tokens": 1}, True),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "skip_special_tokens": None}, True),
        ("/v1/completions", {**STREAM, "echo": None, "ignore_eos": None, "logprobs": 1}, True),
        ("/v1/completions", {**STREAM, "stream": False, "speculation": {"trace": None}}, True),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1.5}, False),
        ("/v1/completions", {"prompt": ""}, False),
        ("/v1/completions", {"prompt": []}, False),
        ("/v1/completions", {"prompt": [10**6]}, False),
        ("/v1/completions", {"prompt": [1.5]}, False),
        ("/v1/completions", {"prompt": ["a"] * 9}, False),
        ("/v1/completions", {"prompt": "a", "n": 9}, False),
        ("/v1/completions", {"prompt": "a", "max_tokens": 513}, False),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, False),
        ("/v1/completions", {"prompt": "a", "stop": ["a"] * 17}, False),
        ("/v1/completions", {"prompt": "a", "stop": ["a", ""]}, False),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": []}, False),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [10**6]}, False),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "logit_bias": {"7": 1}}, True),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"07": 1}}, False),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, False),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"7": 1e38}}, False),
        ("/v1/completions", {"prompt": "a", "presence_penalty": -1e308}, False),
        ("/v1/completions", {"prompt": "a", "repetition_penalty": 5e-324}, False),
        ("/v1/completions", {"prompt": "a", "speculation": {"drafter": "evil"}}, False),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, False),
        ("/v1/completions", {"prompt": "a", "stream_options": {}, "stream": True, "max_tokens": 1}, True),
        ("/v1/completions", {"prompt": "a", "speculation": {"trace": True}}, False),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, False),
        ("/v1/completions", {"prompt": "a", "response_format": SCHEMA, "ignore_eos": True}, False),
        ("/v1/completions", {"prompt": "a", "response_format": SCHEMA, "max_tokens": 1}, True),
        ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_schema"}}, False),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {}}, False),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}}, False),
        ("/v1/chat/completions", {"messages": []}, False),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "a"}]}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "mood": 1}]}, False),
        ("/v1/chat/completions", {"messages": HI, "top_logprobs": 1}, False),
        ("/v1/chat/completions", {"messages": HI, "tool_choice": "required"}, False),
        ("/v1/chat/completions", {"messages": HI, "tool_choice": "auto", "max_tokens": 1}, True),
        (
            "/v1/chat/completions",
            {"messages": HI, "tools": [TOOL], "tool_choice": "required", "min_tokens": 1},
            False,
        ),
        ("/v1/chat/completions", {"messages": HI, "chat_template_kwargs": {"self": 1}}, False),
        (
            "/v1/chat/completions",
            {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL]}], "max_tokens": 1},
            True,
        ),
        ("/v1/messages", {"messages": HI, "max_tokens": 1}, True),
        ("/v1/messages", {"messages": HI, "max_tokens": 1, "seed": 1 << 65}, True),
        ("/v1/messages", {"messages": HI, "max_tokens": 1, "tool_choice": {"type": "auto"}}, True),
        ("/v1/messages", {"messages": HI, "max_tokens": 1, "tool_choice": {"type": "any"}}, False),
        ("/v1/messages", {"messages": HI, "max_tokens": 1, "tool_choice": {"type": "tool"}}, False),
        (
            "/v1/messages",
            {"messages": HI, "max_tokens": 1, "tool_choice": {"type": "none", "name": "f"}},
            False,
        ),
        ("/v1/messages/count_tokens", {"messages": HI, "tool_choice": {"type": "any"}, "tools": []}, False),
        ("/v1/messages/count_tokens", {"messages": HI}, True),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}, True),
        ("/v1/responses", {"input": [{"type": None, **HI[0]}], "max_output_tokens": 1}, True),
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": None}, *HI]}, True),
        ("/v1/responses", {"input": "a", "tool_choice": "required"}, False),
        ("/v1/responses", {"input": "a", "tool_choice": {"type": "function", "name": "f"}}, False),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema"}}}, False),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "text", "schema": {}}}}, False),
        ("/tokenize", {}, False),
        ("/tokenize", {"prompt": "a", "messages": HI}, False),
        ("/tokenize", {"prompt": "", "messages": None}, True),
        ("/detokenize", {"tokens": [10**6]}, False),
        ("/detokenize", {"tokens": []}, True),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_description_allows_what_is_answered(client, path, said, allowed):
    made = client.get("/openapi.json").json()
    place = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = {**place, "components": made["components"]}
    assert jsonschema_rs.is_valid(schema, said) == allowed
    assert (client.post(path, said).status_code == 200) == allowed


@pytest.mark.parametrize("limit", [1, 2, 9, 10, 11, 99, 100, 101, 305, 1000])
def test_numbers_below_a_limit(limit):
    pattern = re.compile(f"^({below(limit)})$")
    assert [n for n in range(3 * limit + 20) if pattern.match(str(n))] == list(range(limit))
    assert not any(map(pattern.match, ("", "00", "01", "-1", "1.0", "+1")))
