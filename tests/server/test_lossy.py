"""What changes the output is named in every answer, whatever its form: also a drafter that ends texts."""

import json

import pytest
import torch

from outpace import Engine
from outpace.cli.main import main
from outpace.methods.s2d.sec_objective import Sec, SecTraining
from outpace.server.app import create_app
from outpace.serving.service import Service
from tests.server.conftest import LIMITS, Client
from tests.server.test_answers import events

LOSSY = "prompt_lookup[verifier=typical]"


@pytest.fixture(scope="module")
def lossy():
    engine = Engine.load("tiny", dtype="float32", drafter="none", allow_lossy=True)
    with Service(engine, drafters=(LOSSY, "suffix"), max_batch=4) as service:
        yield Client(create_app(service, name="tiny", limits=LIMITS))


ASKED = {
    "one": {"prompt": "ab ab"},
    "several answers": {"prompt": "ab ab", "n": 2, "temperature": 1.0},
    "several prompts": {"prompt": ["ab ab", "cd"]},
    "stream": {"prompt": "ab ab", "stream": True},
    "stream with usage": {"prompt": "ab", "stream": True, "stream_options": {"include_usage": True}},
    "echo": {"prompt": "ab ab", "echo": True, "stream": True},
    "chat": {"messages": [{"role": "user", "content": "ab"}], "n": 2},
    "chat stream": {"messages": [{"role": "user", "content": "ab"}], "stream": True},
}


@pytest.mark.parametrize("drafter", [LOSSY, "suffix", "none"])
@pytest.mark.parametrize("asked", ASKED)
def test_every_answer_says_whether_it_is_lossless(lossy, asked, drafter):
    body = {"model": "tiny", "max_tokens": 4, "speculation": {"drafter": drafter}, **ASKED[asked]}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = lossy.request("POST", path, json=body)
    parts = events(response) if body.get("stream") else [json.loads(response.text)]
    assert parts and [part["lossless"] for part in parts] == [drafter != LOSSY] * len(parts)
    told = [part["metrics"]["lossless"] for part in parts if part.get("metrics")]
    assert set(told) <= {drafter != LOSSY}


def test_a_seed_is_judged_by_a_lossless_verifier_where_none_is_named(lossy):
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 3, "seed": 3, "temperature": 1.0}
    said = lossy.request("POST", "/v1/completions", json=body | {"speculation": {"drafter": "suffix"}})
    assert said.json()["lossless"] is True


def test_the_models_list_and_the_figures_say_it(lossy, client):
    (model,) = lossy.request("GET", "/v1/models").json()["data"]
    assert model["lossless"] is False and model["lossy_drafters"] == [LOSSY]
    assert lossy.request("GET", "/v1/models/tiny").json()["lossless"] is False
    figures = lossy.request("GET", "/metrics").text
    assert f'outpace:lossless{{drafter="{LOSSY}",model_name="tiny"}} 0.0' in figures
    assert 'outpace:lossless{drafter="suffix",model_name="tiny"} 1.0' in figures
    (honest,) = client.request("GET", "/v1/models").json()["data"]
    assert honest["lossless"] is True and honest["lossy_drafters"] == []


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    """A server whose drafter doubts every token behind the first one, and its method spec."""
    engine = Engine.load("tiny", dtype="float32", drafter="none", allow_lossy=True)
    made = Sec.build(SecTraining(), engine.target, None)
    with torch.no_grad():
        made.module.classes[-1, 0, -1] = 50.0
    made.save(folder := tmp_path_factory.mktemp("made") / "sec", {})
    spec = f"sec[model={folder} stop=0.5]"
    with Service(engine, drafters=(spec, "none"), max_batch=4) as service:
        yield Client(create_app(service, name="tiny", limits=LIMITS)), spec


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_ends_at_a_doubtful_token_says_so(ending, chat, stream):
    server, spec = ending
    asked = {"messages": [{"role": "user", "content": "ab"}]} if chat else {"prompt": "ab ab"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    texts, reasons = {}, {}
    for drafter in (spec, "none"):
        body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True, **asked}
        body |= {"stream": stream, "speculation": {"drafter": drafter}}
        response = server.request("POST", path, json=body)
        parts = events(response) if stream else [response.json()]
        choices = [choice for part in parts for choice in part["choices"]]
        shown = [
            one.get("text") or one.get("delta", one.get("message", {})).get("content") for one in choices
        ]
        texts[drafter] = "".join(filter(None, shown))
        reasons[drafter] = [one["finish_reason"] for one in choices if one["finish_reason"]]
    assert reasons == {spec: ["low_confidence"], "none": ["length"]}
    assert texts["none"].startswith(texts[spec]) and len(texts[spec]) < len(texts["none"])


def test_other_programs_answers_end_with_a_word_of_their_own(ending):
    server, spec = ending
    more = {"model": "tiny", "temperature": 0, "speculation": {"drafter": spec}}
    turn = [{"role": "user", "content": "ab"}]
    said = server.request("POST", "/v1/messages", json={"messages": turn, "max_tokens": 6, **more}).json()
    assert said["stop_reason"] == "end_turn" and said["lossless"] is False
    assert said["usage"]["output_tokens"] == 2
    said = server.request(
        "POST", "/v1/responses", json={"input": turn, "max_output_tokens": 16, **more}
    ).json()
    assert said["status"] == "completed" and said["usage"]["output_tokens"] == 2
    counted = server.request("GET", "/metrics").text
    assert 'finished_reason="low_confidence"' in counted


def test_the_command_says_it_too(ending, capsys):
    _, spec = ending
    asked = ["generate", "--model", "tiny", "ab ab", "-d", spec, "--json", "--max-new-tokens", "6"]
    assert main(asked) == 2 and "say --allow-lossy" in capsys.readouterr().err
    assert main([*asked, "--allow-lossy"]) == 0
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "low_confidence"
