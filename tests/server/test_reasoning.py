"""Thinking in chats: told apart from the answer, limited, and before a form."""

import json

import pytest

from outpace.server.app import create_app
from tests.server.conftest import LIMITS, Client
from tests.server.test_answers import events

MARKS = ("\x01", "\x02")
NEVER = {"logit_bias": {"1": -80}}
"""No end of the text by itself."""


@pytest.fixture(scope="module")
def thinker(service):
    return Client(create_app(service, name="tiny", limits=LIMITS, thinking_marks=MARKS))


def asked(**fields):
    """A chat whose prompt ends inside the thinking."""
    return {
        "messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "x\x01"}],
        "add_generation_prompt": False,
        "temperature": 0,
        "max_tokens": 30,
        **NEVER,
        **fields,
    }


def test_thinking_is_told_apart_and_ends_in_time(thinker):
    for budget in (0, 3, 7):
        body = asked(thinking_token_budget=budget, return_token_ids=True)
        answer = thinker.post("/v1/chat/completions", body).json()
        (choice,) = answer["choices"]
        message = choice["message"]
        assert MARKS[1] not in message["content"] and message["content"]
        assert bool(message["reasoning_content"]) == (budget > 0)
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] <= budget <= answer["usage"]["completion_tokens"]
        assert answer["metrics"]["thinking_budget_hit"] is True
        for drafter in ("none", "suffix", "prompt_lookup"):
            again = thinker.post("/v1/chat/completions", {**body, "speculation": {"drafter": drafter}}).json()
            assert again["choices"][0] == choice, drafter
        chunks = events(thinker.post("/v1/chat/completions", {**body, "stream": True}))
        parts = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(part.get("reasoning_content") or "" for part in parts) == (
            message["reasoning_content"] or ""
        )
        assert "".join(part.get("content") or "" for part in parts) == message["content"]


def test_without_a_budget_it_is_told_apart_all_the_same(thinker):
    answer = thinker.post("/v1/chat/completions", asked()).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] and "thinking_budget_hit" not in answer["metrics"]
    plain = thinker.chat("ab", temperature=0, max_tokens=9)
    assert plain["choices"][0]["message"]["reasoning_content"] is None
    assert plain["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_a_form_begins_behind_the_thinking(thinker):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"schema": {**schema, "additionalProperties": False}}}
    body = asked(response_format=form, thinking_token_budget=4)
    message = thinker.post("/v1/chat/completions", {**body, "logit_bias": {}}).json()["choices"][0]["message"]
    assert set(json.loads(message["content"])) == {"ok"} and message["reasoning_content"]
    (start,) = thinker.post("/tokenize", {"prompt": MARKS[0], "add_special_tokens": False}).json()["tokens"]
    never = {"logit_bias": {str(start): -80}}
    plain = thinker.chat("ab", response_format=form, temperature=0, **never)["choices"][0]["message"]
    assert set(json.loads(plain["content"])) == {"ok"}, "an answer that does not think has the form at once"


def test_a_budget_needs_marks(client):
    body = {"messages": [{"role": "user", "content": "a"}], "thinking_token_budget": 4}
    error = client.refused("/v1/chat/completions", body)
    assert "tiny has no marks of thinking" in error["message"]
    assert error["param"] == "thinking_token_budget"
    error = client.refused("/v1/chat/completions", {**body, "thinking_token_budget": -1})
    assert "thinking_token_budget" in error["message"]
