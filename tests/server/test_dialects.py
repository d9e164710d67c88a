"""The other forms of chats, by their official clients over a socket, and field by field."""

import json

import anthropic
import openai
import pytest

from outpace import Engine
from outpace.server.app import create_app
from outpace.server.dialects.text_tokens import TextTokens
from outpace.server.limits import Limits
from outpace.server.tool_parser import HERMES, CallReader
from outpace.serving.service import Service
from tests.server.conftest import Client
from tests.server.test_wire import listening

HI = [{"role": "user", "content": "ab ab"}]
GREEDY = {"temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
MARKS = ("\x01", "\x02")
MANY = [{"type": "tool_result", "tool_use_id": "", "content": ""}] * 6000


@pytest.fixture(scope="module")
def served(engine):
    with Service(Engine(engine.target, "none"), drafters=("grammar", "suffix"), max_batch=4) as service:
        yield service


@pytest.fixture(scope="module")
def app(served):
    return create_app(served, name="tiny", keys=["key"], limits=Limits(new_tokens=400))


@pytest.fixture(scope="module")
def inside(app):
    return Client(app, authorization="Bearer key")


@pytest.fixture(scope="module")
def thinker(served):
    return Client(create_app(served, name="tiny", limits=Limits(), thinking_marks=MARKS))


@pytest.fixture(scope="module")
def address(app):
    with listening(app, Limits()) as url:
        yield url


@pytest.fixture(scope="module")
def messenger(address):
    with anthropic.Anthropic(base_url=address, api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def official(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def plain(inside):
    """The answer of a chat in our own form."""
    return inside.chat("ab ab", max_tokens=12, **GREEDY)


# Messages


def test_a_message_is_the_chats_text(messenger, plain):
    answer = messenger.messages.create(model="tiny", max_tokens=12, messages=HI, extra_body=GREEDY)
    (block,) = answer.content
    assert block.type == "text" and block.text == plain["choices"][0]["message"]["content"]
    assert answer.stop_reason == "max_tokens" and answer.role == "assistant" and answer.type == "message"
    usage = answer.usage
    assert usage.output_tokens == plain["usage"]["completion_tokens"]
    assert usage.input_tokens + usage.cache_read_input_tokens == plain["usage"]["prompt_tokens"]
    counted = messenger.messages.count_tokens(model="tiny", messages=HI)
    assert counted.input_tokens == plain["usage"]["prompt_tokens"]


def test_a_message_as_a_stream(messenger, plain):
    with messenger.messages.stream(model="tiny", max_tokens=12, messages=HI, extra_body=GREEDY) as stream:
        kinds, text = [], ""
        for event in stream:
            kinds.append(event.type)
            text += event.text if event.type == "text" else ""
        final = stream.get_final_message()
    assert text == final.content[0].text == plain["choices"][0]["message"]["content"]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert {"content_block_start", "content_block_delta", "content_block_stop", "message_delta"} <= set(kinds)
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12


def test_systems_blocks_and_results_are_the_same_prompt(inside):
    own = inside.post(
        "/tokenize",
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "ab"},
                {
                    "role": "assistant",
                    "content": "so",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "two"},
                {"role": "user", "content": "and?"},
            ]
        },
    ).json()
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}
    gave = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "two"}]}
    body = {
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "so"}, use]},
            {"role": "user", "content": [gave, {"type": "text", "text": "and?"}]},
        ],
    }
    assert inside.post("/v1/messages/count_tokens", body).json()["input_tokens"] == own["count"]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "ab"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "two"},
        {"role": "user", "content": "and?"},
    ]
    answer = inside.post(
        "/v1/responses", {"instructions": "be brief", "input": items, "max_output_tokens": 1}
    )
    assert answer.json()["usage"]["input_tokens"] == own["count"]


TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}


def test_a_message_calls_a_tool(messenger):
    given = {"model": "tiny", "max_tokens": 120, "messages": HI, "tools": [TOOL], "extra_body": GREEDY}
    answer = messenger.messages.create(tool_choice={"type": "tool", "name": "weather"}, **given)
    (call,) = answer.content
    assert answer.stop_reason == "tool_use"
    assert call.type == "tool_use" and call.name == "weather" and call.input["city"] in ("Oslo", "Rome")
    with messenger.messages.stream(tool_choice={"type": "any"}, **given) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == call.input and final.stop_reason == "tool_use"
    # What came of it goes back.
    (made,) = final.content
    use = made.model_dump(include={"type", "id", "name", "input"})
    gave = {"type": "tool_result", "tool_use_id": made.id, "content": "rain"}
    again = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [gave]}]
    more = messenger.messages.create(**{**given, "messages": again, "max_tokens": 4})
    assert more.usage.output_tokens == 4


def test_why_a_message_ends(inside):
    def asked(**fields):
        return inside.post("/v1/messages", {"messages": HI, "max_tokens": 12, **GREEDY, **fields}).json()

    whole = asked()["content"][0]["text"]
    stop = whole[3]
    cut = asked(stop_sequences=["never ever", stop])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert "".join(block["text"] for block in cut["content"]) == whole[: whole.index(stop)]
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    ended = asked(output_config=form, max_tokens=60)
    assert ended["stop_reason"] == "end_turn" and ended["stop_sequence"] is None
    assert json.loads(ended["content"][0]["text"])["city"] in ("Oslo", "Rome")
    assert ended["metrics"]["by_drafter"]["grammar"]["accepted"] > 0


def test_both_forms_tell_thinking_apart(thinker):
    """The prompt begins the thinking; what the template writes behind it counts."""
    given = {"messages": [{"role": "user", "content": f"ab{MARKS[0]}"}], "max_tokens": 60, **GREEDY}
    body = {**given, "thinking": {"type": "enabled", "budget_tokens": 25}}
    answer = thinker.post("/v1/messages", body).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["metrics"]["thinking_budget_hit"] is True
    off = thinker.post("/v1/messages", {**given, "thinking": {"type": "disabled"}}).json()
    assert [block["type"] for block in off["content"]] == ["text"]
    body_of_response = {"max_output_tokens": 60, "thinking_token_budget": 25, **GREEDY}
    reply = thinker.post("/v1/responses", {"input": f"ab{MARKS[0]}", **body_of_response}).json()
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message"]
    assert reply["output"][0]["content"][0]["text"] == answer["content"][0]["thinking"]
    assert reply["output"][1]["content"][0]["text"] == answer["content"][1]["text"]
    assert 0 < reply["usage"]["output_tokens_details"]["reasoning_tokens"] <= 25
    stream = thinker.post("/v1/messages", {**body, "stream": True}).text
    told = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    deltas = [one["delta"] for one in told if one["type"] == "content_block_delta"]
    assert "".join(one.get("thinking", "") for one in deltas) == answer["content"][0]["thinking"]
    assert "[DONE]" not in stream


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"frobnicate": 1}, "unknown field 'frobnicate'"),
        ({"messages": [{"role": "user", "content": "a", "name": "x"}]}, "unknown field 'messages.0.name'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "foo": 1}]}]},
            "unknown field 'messages.0.content.0.foo'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0.type: is none that is read here, got 'image'",
        ),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "answers are not continued"),
        ({"messages": []}, "messages: should have at least 1 item, got 0"),
        (
            {"messages": [{"role": "user", "content": MANY}, {"role": "user", "content": MANY}]},
            "messages: should have at most 10000 items, got 12000",
        ),
        ({"stop_sequences": ["a", ""]}, "stop_sequences must hold non-empty strings"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences holds 17 entries"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing; give it"),
        ({"tool_choice": {"type": "any", "name": "f"}}, "a name belongs to the type tool"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing; give it"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1}}, "budget_tokens belongs to the type enabled"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
            "messages.0.content.0.type: is none",
        ),
        ({"tools": [{"name": "f", "input_schema": {}, "type": "bash_20250124"}]}, "tools.0.type"),
        ({"container": "x"}, "unknown field 'container'"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_messages_that_are_refused(inside, body, says):
    answer = inside.post("/v1/messages", {"messages": HI, "max_tokens": 4, **body})
    told = answer.json()
    assert answer.status_code == 400 and told["type"] == "error", answer.text
    assert told["error"]["type"] == "invalid_request_error" and says in told["error"]["message"], told
    assert told["error"]["param"].partition(".")[0] in body, told


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": ""}]}, "messages"),
        ("messages", {"messages": [{"role": "user", "content": ""}], "max_tokens": 4}, "messages"),
        ("responses", {"input": ""}, "input"),
        ("responses", {"input": [{"role": "user", "content": []}]}, "input"),
        ("completions", {"prompt": ""}, "prompt"),
    ],
)
def test_nothing_is_no_request(inside, path, body, param):
    response = inside.post(f"/v1/{path}", body)
    assert response.status_code == 400 and response.json()["error"].get("param", param) == param


def test_errors_reach_the_client_in_its_form(messenger, address):
    with pytest.raises(anthropic.NotFoundError, match="not served here") as caught:
        messenger.messages.create(model="other", max_tokens=2, messages=HI)
    assert caught.value.body["error"]["type"] == "not_found_error"
    with (
        anthropic.Anthropic(base_url=address, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError, match="does not know this key"),
    ):
        stranger.messages.create(model="tiny", max_tokens=2, messages=HI)


# Responses


def test_a_response_is_the_chats_text(official, plain):
    answer = official.responses.create(model="tiny", input="ab ab", max_output_tokens=12, **GREEDY)
    assert answer.output_text == plain["choices"][0]["message"]["content"]
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 12 and answer.usage.input_tokens == plain["usage"]["prompt_tokens"]
    assert answer.store is False and answer.error is None


def test_a_response_as_a_stream(official, plain):
    with official.responses.stream(model="tiny", input=HI, max_output_tokens=12, **GREEDY) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.incomplete"
    (ended,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert ended.status == events[-1].response.output[0].status == "incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == plain["choices"][0]["message"]["content"] == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_response_calls_a_function(official):
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    given = {"model": "tiny", "input": "ab", "tools": [tool], "tool_choice": "required", **GREEDY}
    given["parallel_tool_calls"] = False
    answer = official.responses.create(**given)
    (call,) = answer.output
    assert answer.status == "completed" and call.type == "function_call" and call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    with official.responses.stream(**given) as stream:
        pieces = [event for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(piece.delta for piece in pieces) == final.output[0].arguments == call.arguments
    gave = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = [{"role": "user", "content": "ab"}, call.model_dump(exclude_none=True), gave]
    more = official.responses.create(model="tiny", input=again, max_output_tokens=3)
    assert more.usage.output_tokens == 3


def test_a_response_has_a_form(official):
    form = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    answer = official.responses.create(model="tiny", input="ab", text=form, **GREEDY)
    assert answer.status == "completed" and json.loads(answer.output_text)["city"] in ("Oslo", "Rome")


def test_a_response_has_log_probabilities(official, inside):
    """They are the chat's, whole and in a stream."""
    given = {"input": "ab ab", "max_output_tokens": 12, "top_logprobs": 2, **GREEDY}
    asked = {**given, "include": ["message.output_text.logprobs"]}
    own = inside.chat("ab ab", max_tokens=12, logprobs=True, top_logprobs=2, **GREEDY)["choices"][0]
    answer = official.responses.create(model="tiny", **asked)
    (part,) = answer.output[0].content
    want = own["logprobs"]["content"]
    assert [one.model_dump() for one in part.logprobs] == want and answer.top_logprobs == 2
    with official.responses.stream(model="tiny", **asked) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    told = [one.model_dump() for event in deltas for one in event.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert told == want == [one.model_dump() for one in done.logprobs]
    assert all(event.logprobs for event in deltas)
    bare = official.responses.create(model="tiny", **{**asked, "top_logprobs": None})
    assert [one.top_logprobs for one in bare.output[0].content[0].logprobs] == [[]] * 12
    none = official.responses.create(model="tiny", **{**given, "top_logprobs": 0})
    assert none.output[0].content[0].logprobs == []
    # An answer goes back as it came.
    again = [answer.output[0].model_dump(exclude_none=True), {"role": "user", "content": "b"}]
    assert official.responses.create(model="tiny", input=again, max_output_tokens=1).output


def test_log_probabilities_leave_thinking_out(thinker):
    given = {"input": f"ab{MARKS[0]}", "max_output_tokens": 60, "thinking_token_budget": 25, **GREEDY}
    answer = thinker.post("/v1/responses", {**given, "top_logprobs": 1}).json()
    (part,) = answer["output"][1]["content"]
    spelled = b"".join(bytes(one["bytes"]) for one in part["logprobs"])
    assert spelled.decode("utf-8", "replace") == part["text"]


def test_tokens_of_a_text_by_its_characters():
    class Stream:
        def push(self, ids):
            return "".join("" if token == 9 else "ab"[: token + 1] for token in ids)

    class Tokenizer:
        special_ids = frozenset({7, 8})

        def text_stream(self):
            return Stream()

    tokens = TextTokens(Tokenizer(), {8: "<call>"})
    tokens.push([(0, 0), (3, 7), (4, 9), (5, 9), (6, 1), (7, 8), (8, 0)])
    assert tokens.take(1) == [0]
    assert tokens.take(2) == [4, 5, 6]  # two parts of a character belong to it
    assert tokens.take(3) == []
    assert tokens.take(9) == [7]
    assert tokens.take(10) == [8]


def test_log_probabilities_end_where_a_call_begins():
    text = 'ab <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> more'
    reader = CallReader(HERMES, ["f"])
    found = reader.push((), text)
    assert found.text + reader.close().text == "ab more" and reader.before == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"frobnicate": 1}, "unknown field 'frobnicate'"),
        ({"top_logprobs": 21}, "at most 20 alternatives"),
        ({"include": ["file_search_call.results"]}, "include.0: should be"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input.0.type: is none that is read here, got 'item_reference'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "image"}]}]},
            "input.0.content.0.type: should be 'in",
        ),
        ({"input": [{"role": "user", "content": "a", "foo": 1}]}, "unknown field 'input.0.foo'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: should be 'function'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is missing; give it"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "a schema belongs to the type json_schema"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}},
            "text.format cannot be used",
        ),
        ({"input": [{"type": 5}]}, "input.0.type: is none that is read here, got 5"),
        ({"input": [5]}, "input.0: should be an object, got 5"),
        ({"input": []}, "input: should have at least 1 item, got 0"),
        ({"input": 5}, "input: should be a string or a list, got 5"),
        ({"input": [{"type": "reasoning"}]}, "input is empty"),
        ({"max_output_tokens": 401}, "got max_output_tokens=401"),
        ({"max_tokens": 4}, "unknown field 'max_tokens'"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_responses_that_are_refused(inside, body, says):
    answer = inside.post("/v1/responses", {"input": "ab", **body})
    assert answer.status_code == 400, answer.text
    told = answer.json()["error"]
    assert says in told["message"] and told["param"].partition(".")[0] in body, told


TREE = {"type": "function", "name": "f", "parameters": {"type": "odd"}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": [{"type": "odd"}]}, "input.0.type"),
        ("/v1/responses", {"input": "a", "speculation": {"detailed": True}}, "speculation.detailed"),
        ("/v1/responses", {"input": "a", "speculation": {"trace": True}}, "speculation.trace"),
        (
            "/v1/responses",
            {"input": "a", "speculation": {"trace": True}, "stream": True},
            "speculation.trace",
        ),
        ("/v1/responses", {"input": "a", "tools": [TREE], "tool_choice": "required"}, "tools"),
        ("/v1/messages", {"messages": [{"role": "odd", "content": "a"}]}, "messages.0.role"),
        ("/v1/messages", {"messages": [{"content": "a"}]}, "messages.0.role"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{}]}]}, "messages.0.content.0.type"),
        ("/v1/messages", {"messages": ["a"]}, "messages.0"),
    ],
)
def test_errors_name_the_field_itself(inside, path, body, param):
    answer = inside.post(path, {**({"max_tokens": 1} if path == "/v1/messages" else {}), **body})
    told = answer.json()["error"]
    assert (answer.status_code, told["param"]) == (400, param), told


def test_what_comes_back_is_json(inside):
    """Numbers that JSON has not are refused; half a surrogate pair, which it has, is told as it came."""
    url, typed = "/v1/responses", {"Content-Type": "application/json"}
    for field in ('"metadata": {"a": NaN}', '"tools": [{"type": "function", "name": "f", "parameters": %s}]'):
        body = '{"input": "a", "max_output_tokens": 1, ' + field.replace("%s", '{"default": 1e999}') + "}"
        answer = inside.request("POST", url, content=body, headers=typed)
        assert answer.status_code == 400 and "finite numbers alone" in answer.json()["error"]["message"]
    body = r'{"input": "a", "max_output_tokens": 1, "metadata": {"\ud800": "\udfff"}}'
    answer = inside.request("POST", url, content=body, headers=typed)
    assert answer.status_code == 200 and r'"metadata":{"\ud800":"\udfff"}' in answer.text


def test_both_are_described(inside):
    made = inside.get("/openapi.json").json()
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses"):
        assert {"200", "400", "401", "413"} <= made["paths"][path]["post"]["responses"].keys()
    streams = made["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"]
    assert "text/event-stream" in streams
    assert "previous_response_id" in made["components"]["schemas"]["ResponsesBody"]["properties"]
