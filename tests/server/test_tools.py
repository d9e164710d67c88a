"""Tools over the wire: models that call in four ways, read by the official client."""

import json

import openai
import pytest
import tokenizers
import torch

from outpace import Engine
from outpace.models.text import Tokenizer, byte_alphabet
from outpace.models.tiny import TableTarget
from outpace.server.app import create_app
from outpace.server.limits import Limits
from outpace.server.tools import Toolbox
from outpace.serving.service import Service
from tests.server.conftest import Client
from tests.server.test_wire import listening

BEGIN, END, GO = "<|begin|>", "<|end|>", "<|go|>"
MARKS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
CHAT = "/v1/chat/completions"

_TOOLS = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
_BODY = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% if m.tool_calls %}%CALLS%"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|go|>{% endif %}"
)
_EACH = "{% for c in m.tool_calls %}%ONE%{% endfor %}"


def template(one):
    return (_TOOLS + _BODY).replace("%CALLS%", _EACH).replace("%ONE%", one)


TEMPLATES = {
    "hermes": template(
        "<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n"
        "</tool_call>"
    ),
    "llama3": template(
        '{{ \'{"name": "\' + c.function.name + \'", "parameters": \' }}'
        "{{ c.function.arguments | tojson }}{{ '}' }}"
    ),
    "mistral": template(
        "[TOOL_CALLS][{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}]"
    ),
    # As that of SmolLM2-135M: no word of functions, and contents must be texts.
    "silent": "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|go|>{% endif %}",
}
CALL = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": "Oslo"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "silent": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
}
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": CITY},
}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
LATE = {"messages": [{"role": "user", "content": "late"}], "tools": TOOLS, "temperature": 0}


def tokenizer_of(kind):
    """Bytes, a few special tokens, and a template."""
    pieces = [BEGIN, END, GO, *MARKS, *byte_alphabet()]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([BEGIN, END, GO, *MARKS])
    return Tokenizer(
        backend, named={"bos_token": BEGIN, "eos_token": END}, templates={"default": TEMPLATES[kind]}
    )


def saying(kind):
    """A model that gives a known answer to the last user's word, and otherwise comes to an end."""
    tokenizer = tokenizer_of(kind)
    call = CALL[kind]
    answers = {
        "[user]call": call,
        "[user]plain": "It is \u2028 {warm}.",
        "[user]late": "no",
        "[user]odd": "<tool_call>no</tool_call>",
        "[user]amid": f"Well.\n{call}\nSo.",
        "[user]both": {
            "hermes": f"Well.\n{call}\n{call}",
            "silent": f"Well.\n{call}\n{call}",
            "llama3": f"{call};{call}",
            "mistral": "Well." + call[:-1] + ", " + call[13:],
        }[kind],
    }
    scripts = {key: (*tokenizer.encode(text, special=False), 1) for key, text in answers.items()}
    size = tokenizer.vocab_size
    brackets = tokenizer.encode("]}", special=False)

    def rule(context):
        law_V = torch.full((size,), 0.1 / size, dtype=torch.float64)
        go = max((i for i, token in enumerate(context) if token == 2), default=None)
        if go is None:
            law_V[1] += 0.9
            return law_V / law_V.sum()
        prompt, said = tokenizer.decode(context[:go]), context[go + 1 :]
        _, script = max((prompt.rfind(key), script) for key, script in scripts.items())
        right = said == script[: len(said)] and len(said) < len(script)
        law_V[script[len(said)] if right else 1] += 0.9
        law_V[brackets] += 0.05
        return law_V / law_V.sum()

    target = TableTarget(rule, size, name=kind, eos_ids=[1])
    target.tokenizer = tokenizer
    return target


@pytest.fixture(scope="module", params=[*TEMPLATES])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def app(kind):
    with Service(Engine(saying(kind), "none"), drafters=("prompt_lookup",)) as service:
        yield create_app(service, name="m", limits=Limits(new_tokens=300))


@pytest.fixture(scope="module")
def talk(app):
    client = Client(app)

    def ask(word, **fields):
        answer = client.chat(word, tools=TOOLS, temperature=0, **fields)
        (choice,) = answer["choices"]
        return choice

    return ask


def calls_of(message):
    return [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())
    ]


OSLO = ("weather", {"city": "Oslo"})


def test_answers_hold_calls(talk, kind):
    choice = talk("call")
    message = choice["message"]
    assert message["content"] is None and calls_of(message) == [OSLO]
    assert choice["finish_reason"] == "tool_calls"
    assert message["tool_calls"][0]["type"] == "function" and message["tool_calls"][0]["id"]
    both = talk("both")["message"]
    assert calls_of(both) == [OSLO, OSLO] and both["content"] in ("Well.", None)
    assert len({call["id"] for call in both["tool_calls"]}) == 2


def test_text_behind_a_call_stays_behind_it(app, kind):
    """As items of a response and as blocks of a message, whole and in a stream."""
    if not CALL[kind].startswith("<"):
        return  # forms of which text behind a call is no part
    client, tool = Client(app), {"type": "function", **WEATHER["function"]}
    body = {"input": "amid", "tools": [tool], "temperature": 0, "top_logprobs": 1}
    items = client.post("/v1/responses", body).json()["output"]
    assert [item["type"] for item in items] == ["message", "function_call", "message"]
    before, behind = (item["content"][0] for item in items[::2])
    assert (before["text"], behind["text"]) == ("Well.", "\nSo.")
    assert "".join(one["token"] for one in before["logprobs"]) == "Well." and behind["logprobs"] == []
    told = client.post("/v1/responses", {**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: ")]
    streamed = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert [item["type"] for item in streamed] == [item["type"] for item in items]
    assert [streamed[n]["content"] for n in (0, 2)] == [[before], [behind]]
    block = {"name": "weather", "input_schema": CITY}
    body = {"messages": [{"role": "user", "content": "amid"}], "tools": [block], "max_tokens": 200}
    blocks = client.post("/v1/messages", {**body, "temperature": 0}).json()["content"]
    assert [block["type"] for block in blocks] == ["text", "tool_use", "text"]


def test_text_stays_text(talk):
    plain = talk("plain")
    assert plain["message"]["content"] == "It is \u2028 {warm}."
    assert "tool_calls" not in plain["message"]
    assert plain["finish_reason"] == "stop"
    odd = talk("odd")
    assert odd["message"]["content"] == "<tool_call>no</tool_call>"
    none = talk("call", tool_choice="none")
    assert "tool_calls" not in none["message"] and "Oslo" in none["message"]["content"]


def test_a_call_that_is_cut_is_no_reason_to_call(talk):
    choice = talk("call", max_tokens=45)
    assert choice["finish_reason"] == "length"
    early = talk("call", max_tokens=12)["message"]  # before the name
    assert "tool_calls" not in early and "<" not in (early["content"] or "")
    choice = talk("call", stop=["Os"])
    assert choice["finish_reason"] == "stop"
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["weather"]


def test_a_call_may_be_asked_for(app, talk, kind):
    """The model would rather say no; the form makes it call, as its schema says."""
    assert talk("late")["message"]["content"] == "no"
    must = talk("late", tool_choice="required", max_tokens=200)
    assert must["finish_reason"] == "tool_calls"
    named = talk("late", tool_choice={"type": "function", "function": {"name": "weather"}})
    assert named["finish_reason"] == "tool_calls"
    ((name, arguments),) = calls_of(named["message"])
    assert name == "weather" and arguments["city"] in ("Rome", "Oslo")
    one = talk("both", tool_choice="required", parallel_tool_calls=False)
    assert len(one["message"]["tool_calls"]) == 1
    free = talk("both", parallel_tool_calls=False)
    assert calls_of(free["message"]) == [OSLO] and free["finish_reason"] == "tool_calls"
    if kind in ("hermes", "silent"):
        assert talk("call", tool_choice="required")["message"]["tool_calls"]


def test_strict_functions_get_what_their_schema_says(app, kind):
    """The model is free to call; a call that breaks the schema cannot be written."""
    bad = json.loads(json.dumps(WEATHER).replace("Oslo", "Nice"))
    bad["function"]["strict"] = True
    body = {"tools": [bad], "temperature": 0, "max_tokens": 120}
    client = Client(app)
    (choice,) = client.chat("call", **body)["choices"]
    assert calls_of(choice["message"]) and all(
        arguments["city"] in ("Rome", "Nice") for _, arguments in calls_of(choice["message"])
    )
    (choice,) = client.chat("plain", **body)["choices"]
    assert choice["message"]["content"] == "It is \u2028 {warm}."


def test_the_official_client_reads_calls(app, kind):
    with (
        listening(app, Limits(grace_seconds=1)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        asked = {"model": "m", "tools": TOOLS, "temperature": 0}
        talk = [{"role": "user", "content": "both"}]
        whole = client.chat.completions.create(messages=talk, **asked)
        calls = whole.choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["weather"] * 2
        assert whole.choices[0].finish_reason == "tool_calls"
        told, reason, text = {}, None, ""
        for chunk in client.chat.completions.create(messages=talk, stream=True, **asked):
            (choice,) = chunk.choices
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                one = told.setdefault(call.index, {"id": call.id, "name": "", "arguments": ""})
                one["name"] += call.function.name or ""
                one["arguments"] += call.function.arguments or ""
        assert reason == "tool_calls" and (text or None) == whole.choices[0].message.content
        assert [one["name"] for one in told.values()] == ["weather"] * 2
        assert [one["arguments"] for one in told.values()] == [c.function.arguments for c in calls]
        for one in told.values():
            assert len(one["id"]) == 9 if kind == "mistral" else one["id"].startswith("call_")
        # The helper that reads streams by itself takes strict functions alone.
        strict = json.loads(json.dumps(WEATHER))
        strict["function"]["strict"] = True
        with client.chat.completions.stream(
            messages=[{"role": "user", "content": "call"}], model="m", tools=[strict], temperature=0
        ) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls" and final.message.content is None
        assert final.message.tool_calls[0].function.parsed_arguments == {"city": "Oslo"}
        # What it said, and what came of it, goes back as it came.
        back = [
            *talk,
            whole.choices[0].message.model_dump(exclude_none=True),
            *({"role": "tool", "tool_call_id": call.id, "content": "cold"} for call in calls),
            {"role": "user", "content": "plain"},
        ]
        again = client.chat.completions.create(messages=back, **asked)
        assert again.choices[0].message.content == "It is \u2028 {warm}."


def prompt_of(app, messages, tools=None):
    client = Client(app)
    found = client.post("/tokenize", {"messages": messages, "tools": tools})
    assert found.status_code == 200, found.text
    return client.post("/detokenize", {"tokens": found.json()["tokens"]}).json()["prompt"]


def test_what_the_model_reads(app, kind):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "call"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "cold"},
    ]
    text = prompt_of(app, messages, TOOLS)
    assert CALL[kind] in text and '"description": "Of a city."' in text and "strict" not in text
    assert text.count("Be brief.") == 1 and text.endswith(GO)
    if kind == "silent":
        assert text.startswith("[system]Be brief.\n\nYou can call these functions")
        assert "[user]<tool_response>\ncold\n</tool_response>\n" in text
        assert prompt_of(app, messages[1:2], TOOLS).startswith("[system]You can call")
        twice = [*messages, {**messages[3], "content": "dry"}]
        assert "cold\n</tool_response>\n<tool_response>\ndry\n" in prompt_of(app, twice, TOOLS)
    else:
        assert "[tool]cold" in text and "You can call" not in text
    assert "weather" in prompt_of(app, messages) and "Of a city" not in prompt_of(app, messages)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tool_choice": "must"}, "tool_choice", "or an object, got 'must'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
        ({"tools": [TIME, TIME]}, "tools", "two functions of one name"),
        ({"tools": [{"type": "browser"}]}, "tools.0.type", "should be 'function', got 'browser'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "missing"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "mood": 1}}]},
            "tools.0.function.mood",
            "unknown field",
        ),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "exclude each other",
        ),
        ({"tool_choice": "required", "min_tokens": 3}, "min_tokens", "tool_choice exclude"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "a"}]}]},
            "messages.0.tool_calls",
            "must hold objects",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": "a"}]}, "messages.0.tool_calls", "must be a list"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_bad_wishes(fields, param, says):
    with Service(Engine(saying("hermes"), "none"), drafters=("none",)) as service:
        client = Client(create_app(service, name="m"))
        error = client.refused(CHAT, {**LATE, **fields})
    assert says in error["message"] and error["param"] == param


def test_a_form_that_nobody_knows_stays_text():
    tokenizer = tokenizer_of("hermes")
    tokenizer.chat_template = template("(call {{ c.function.name }})")
    box = Toolbox(tokenizer)
    assert box.form is None and box.call_syntax([]) is None


def test_separators_of_lines_do_not_cut_events(app):
    """A client that takes every separator of Unicode for the end of a line reads whole events."""
    body = {**LATE, "messages": [{"role": "user", "content": "plain"}], "stream": True}
    answer = Client(app).post(CHAT, body)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    text = "".join(json.loads(one)["choices"][0]["delta"].get("content") or "" for one in events)
    assert text == "It is \u2028 {warm}." and "\u2028" not in answer.text
