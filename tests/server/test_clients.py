"""Clients of other authors against a server that listens: the examples of docs/integrations.md, and more.

They need versions of packages that the tests do without: run this file in an environment that has them.
"""

import re
from pathlib import Path

import pytest

from outpace.server.app import create_app
from outpace.serving.service import Service
from tests.server.conftest import LIMITS
from tests.server.test_wire import listening

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
LONG = "word " * 4000


@pytest.fixture(scope="module")
def url(engine):
    with (
        Service(engine, drafters=("auto",), max_batch=4) as service,
        listening(create_app(service, name="smollm2-135m", limits=LIMITS), LIMITS) as address,
    ):
        yield f"{address}/v1"


def example(word):
    (code,) = [code for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if word in code]
    return code


def run(word, url):
    exec(compile(example(word).replace("http://127.0.0.1:8000/v1", url), "integrations.md", "exec"), {})


def langchain(url, **more):
    library = pytest.importorskip("langchain_openai")
    return library.ChatOpenAI(base_url=url, api_key="none", model="smollm2-135m", temperature=0, **more)


def test_langchain(url, capsys):
    chat = langchain(url, max_tokens=64)
    run("from langchain", url)
    assert len(capsys.readouterr().out) > 1
    whole = chat.invoke("ab")
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.content for part in chat.stream("ab")) == whole.content
    (call,) = chat.bind_tools([TOOL], tool_choice="weather").invoke("ab").tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo")
    schema = {**TOOL["function"]["parameters"], "title": "place"}
    assert chat.with_structured_output(schema, method="json_schema").invoke("ab").keys() == {"city"}
    with pytest.raises(Exception, match="maximum context length") as error:
        chat.invoke(LONG)
    assert type(error.value).__name__ == "OpenAIContextOverflowError"


def test_litellm(url, capsys, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    library = pytest.importorskip("litellm")
    run("import litellm", url)
    assert len(capsys.readouterr().out) > 1

    def ask(text="ab", **more):
        messages = [{"role": "user", "content": text}]
        whom = {"model": "openai/smollm2-135m", "api_base": url, "api_key": "none"}
        return library.completion(messages=messages, max_tokens=64, temperature=0, **whom, **more)

    whole = ask().choices[0].message.content
    assert "".join(part.choices[0].delta.content or "" for part in ask(stream=True)) == whole
    schema = {"name": "place", "schema": TOOL["function"]["parameters"]}
    text = ask(response_format={"type": "json_schema", "json_schema": schema}).choices[0].message.content
    assert re.fullmatch(r'\{"city": "(Rome|Oslo)"\}', text)
    for stream in (False, True):
        with pytest.raises(library.ContextWindowExceededError):
            ask(LONG, stream=stream)
