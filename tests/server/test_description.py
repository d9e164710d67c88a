"""``/openapi.json`` documents the answers that are sent, and no others."""

import pytest


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


def test_messages_with_calls_are_checked_too(client):
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    wrong = {"role": "assistant", "content": {"a": 1}, "tool_calls": [call]}
    answer = client.post("/tokenize", {"messages": [{"role": "user", "content": "a"}, wrong]})
    assert answer.status_code == 400 and "message 2" in answer.json()["error"]["message"]
