"""docs/serve.md names every field, figure and limit that there is."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from outpace.cli.serve import serve, with_reference
from outpace.server import schema

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([a-z_]+)`", PAGE))


@pytest.mark.parametrize(
    "body",
    [
        schema.CompletionBody,
        schema.ChatBody,
        schema.Speculation,
        schema.StreamOptions,
        schema.StructuredOutputs,
    ],
    ids=lambda body: body.__name__,
)
def test_every_field_is_there(body):
    fields = {field.alias or name for name, field in body.model_fields.items()}
    assert fields <= NAMED, fields - NAMED


def test_fields_that_are_not_read_are_listed():
    (line,) = [part for part in PAGE.split("\n\n") if part.startswith("These are taken and not")]
    assert set(re.findall(r"`([a-z_]+)`", line)) - {"auto", "default"} == schema.Generation.UNREAD


def test_every_figure_is_there(client):
    text = client.complete("ab", max_tokens=2)
    keys = {*text["metrics"], *text["metrics"]["speculative_decoding"]}
    assert keys <= NAMED, keys - NAMED
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("# TYPE outpace:") and not line.split()[2].endswith("_created"):
            name = line.split()[2].removeprefix("outpace:").removeprefix("spec_decode_")
            assert f"{name}`" in PAGE, name


def test_every_limit_is_there():
    given = {f"--{name.replace('_', '-')}" for name in serve.__annotations__}
    for flag in sorted(f for f in given if f.startswith("--max-") or f in ("--grace", "--timeout")):
        assert flag == "--max-batch" or f"`{flag}`" in PAGE, flag


OTHERS = "import litellm|from langchain"
"""Clients that `test_clients.py` runs, in an environment of their own."""


@pytest.fixture
def here(client, monkeypatch):
    """The client libraries that pages name, into an application in this process."""

    def transport(library):
        class Here(library.BaseTransport):
            def handle_request(self, request):
                body = json.loads(request.read())
                longest = "max_output_tokens" if request.url.path.endswith("responses") else "max_tokens"
                answer = client.post(request.url.path, {**body, "model": "tiny", longest: 4})
                return library.Response(answer.status_code, json=answer.json())

        return library.Client(transport=Here())

    its = sys.modules.get("httpx2", httpx)  # what it stands on, by its version
    for library, name, http in ((openai, "OpenAI", httpx), (anthropic, "Anthropic", its)):
        made = partial(getattr(library, name), http_client=transport(http), max_retries=0)
        monkeypatch.setattr(library, name, made)


def python_of(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["serve", "integrations"])
def test_pages_name_drafters_that_a_server_has_unasked(name):
    page = (Path(__file__).parents[2] / "docs" / f"{name}.md").read_text(encoding="utf-8")
    named = re.findall(r'"drafter": "(\w+)"', "".join(python_of(page)))
    assert named and set(named) <= {"none", *with_reference(["auto"])}


def test_the_python_of_the_page_runs(here):
    (code,) = python_of(PAGE)
    names: dict[str, object] = {}
    exec(compile(code, "serve.md", "exec"), names)
    assert names["answer"].choices[0].message.content is not None


def test_clients_of_the_other_forms_run(here, capsys):
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    codes = [code for code in python_of(page) if "127.0.0.1" in code and not re.search(OTHERS, code)]
    for code in codes:
        exec(compile(code, "integrations.md", "exec"), {})
    assert len(codes) == 2 and len(capsys.readouterr().out) > 4
