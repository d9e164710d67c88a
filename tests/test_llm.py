"""The plug-in of ``llm``: prompts, conversations, schemas, tools and names, with the tool itself."""

import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("LLM_LOAD_PLUGINS", "")  # plug-ins of other packages may need what is not here
llm = pytest.importorskip("llm")
pytest.importorskip("llguidance")

import click  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from llm.plugins import pm  # noqa: E402

import outpace.llm as plugin  # noqa: E402
from outpace import Engine  # noqa: E402
from outpace.server.schema import ChatBody  # noqa: E402

ROOT = Path(__file__).parents[1]
PICTURE = llm.Attachment(type="image/png", content=b"1")
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    registered = pm.is_registered(plugin)
    if not registered:
        pm.register(plugin)
    yield tmp_path
    if not registered:
        pm.unregister(plugin)


@pytest.fixture(scope="module")
def model():
    return plugin.OutpaceModel("outpace/small", "smollm2-135m", "prompt_lookup")


def test_packages_find_the_plugin():
    table = f'[project.entry-points.llm]\noutpace = "{plugin.__name__}"\n'
    assert table in (ROOT / "pyproject.toml").read_text("utf-8")


def test_a_stream_is_the_answer_of_the_engine(model):
    response = model.prompt("Count to three.", temperature=0, max_tokens=12)
    pieces = list(response)
    asked = [{"role": "user", "content": "Count to three."}]
    plain = Engine.load("smollm2-135m", drafter="none").generate(asked, temperature=0, max_new_tokens=12)
    assert "".join(pieces) == plain.text
    assert len(pieces) > 1
    usage = response.usage()
    assert (usage.output, usage.details["lossless"]) == (12, True)


def test_a_conversation_holds_what_was_said(model):
    talk = model.conversation()
    first = talk.prompt("Say: blue stone.", system="Be brief.", temperature=0, max_tokens=6).text()
    second = talk.prompt("Again.", temperature=0, max_tokens=6)
    second.text()
    sent = plugin._body(second.prompt)["messages"]
    assert [one["role"] for one in sent] == ["system", "user", "assistant", "user"]
    assert sent[2]["content"] == first


def test_a_schema_binds_the_answer(model):
    response = model.prompt("Is water wet?", schema=SCHEMA, temperature=0, max_tokens=40)
    assert set(json.loads(response.text())) == {"sure"}


def test_calls_go_out_and_results_come_back():
    chunk = {
        "choices": [
            {
                "delta": {
                    "content": "So",
                    "tool_calls": [{"index": 0, "function": {"name": "add", "arguments": '{"a": 1}'}}],
                }
            }
        ]
    }
    told = [(event.type, event.chunk) for event in plugin._told([chunk])]
    assert told == [("text", "So"), ("tool_call_name", "add"), ("tool_call_args", '{"a": 1}')]
    call = plugin.ToolCallPart(name="add", arguments={"a": 1}, tool_call_id="c1")
    result = plugin.ToolResultPart(name="add", output="2", tool_call_id="c1")
    sent = [
        *plugin._messages(plugin.Message(role="assistant", parts=[call])),
        *plugin._messages(plugin.Message(role="tool", parts=[result])),
    ]
    assert sent[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert sent[1] == {"role": "tool", "tool_call_id": "c1", "content": "2"}


def test_a_tool_is_offered_to_the_model(model):
    def weather(city: str) -> str:
        """Weather of a city."""
        return city

    response = model.prompt("Weather in Rome?", tools=[weather], temperature=0, max_tokens=8)
    response.text()
    body = ChatBody.model_validate(plugin._body(response.prompt))
    (request,) = model._reader.chat(body).requests
    assert "Weather of a city." in model._reader.tokenizer.decode(request.prompt)


def test_a_model_that_is_not_there_is_one_line():
    lost = plugin.OutpaceModel("outpace/lost", "./no-such-folder", "auto")
    with pytest.raises(llm.ModelError, match="no-such-folder") as error:
        lost.prompt("Hi").text()
    assert "\n" not in str(error.value)


def add(number: int) -> int:
    """One more."""
    return number + 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(temperature=float("inf")), "temperature"),
        (dict(tools=[llm.Tool(name="a" * 200, implementation=add)]), "128 characters"),
        (dict(tools=[add, add]), "two functions of one name"),
        (dict(prompt="word " * 9000), "maximum context length"),
        (dict(messages=[llm.user("Hi", PICTURE)]), "attachment"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_one_line(model, given, says):
    with pytest.raises(llm.ModelError, match=says) as error:
        model.prompt(**{"prompt": "Hi", "max_tokens": 2} | given).text()
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("damaged", ["", "{", "[1]", '{"a": 3}', '{"a": {"model": 1}}', "[" * 10_000])
def test_a_damaged_list_of_names_does_not_stop_llm(folder, damaged):
    (folder / "outpace.json").write_text(damaged, encoding="utf-8")
    assert plugin._added() == {}


def test_names_are_added_and_removed(folder):
    cli, run = click.Group(), CliRunner().invoke
    plugin.register_commands(cli)
    assert run(cli, ["outpace", "add", "mine", "tiny", "--drafter", "suffix"]).exit_code == 0
    assert plugin._added() == {"mine": {"model": "tiny", "drafter": "suffix"}}
    assert "outpace/mine" in {one.model_id for one in llm.get_models()}
    refused = run(cli, ["outpace", "add", "a/b", "tiny"])
    assert refused.exit_code == 1 and "no slash" in refused.output
    assert run(cli, ["outpace", "remove", "mine"]).exit_code == 0
    again = run(cli, ["outpace", "remove", "mine"])
    assert again.exit_code == 1 and "known: none" in again.output
