"""A verifier that changes the distribution is named in every answer, whatever its form."""

import json

import pytest

from outpace import Engine
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
