"""Logits that are not finite reach the client as an error that says so, and other requests as nothing."""

import json

import pytest

from outpace import Engine
from outpace.server.app import create_app
from outpace.serving.service import Service
from tests.engine.test_undefined import BAD, BROKEN, Breaks
from tests.server.conftest import LIMITS, Client
from tests.server.test_answers import events

GOOD, WRONG = [0, 1, 0, 1, 0], [0, 1, BAD, 0, 1, 0]


@pytest.fixture(params=sorted(BROKEN), scope="module")
def broken(request):
    engine = Engine(Breaks(BROKEN[request.param]), drafter="none")
    with Service(engine, drafters=("suffix",), max_batch=4) as service:
        yield Client(create_app(service, name="table", limits=LIMITS))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_request_with_broken_logits_is_told_of_them(broken, drafter, temperature):
    asked = {"max_tokens": 4, "temperature": temperature, "speculation": {"drafter": drafter}, "seed": 1}
    before = broken.post("/v1/completions", {"prompt": GOOD, **asked})
    assert before.status_code == 200
    for several in (WRONG, [GOOD, WRONG]):
        answer = broken.post("/v1/completions", {"prompt": several, **asked})
        error = answer.json()["error"]
        assert answer.status_code == 500 and error["code"] == 500, answer.text
        assert "logits are not finite" in error["message"] and "\n" not in error["message"]
    after = broken.post("/v1/completions", {"prompt": GOOD, **asked})
    assert after.json()["usage"] == before.json()["usage"] and after.status_code == 200
    assert broken.get("/health").status_code == 200


def test_a_stream_with_broken_logits_ends_with_the_error(broken):
    answer = broken.post("/v1/completions", {"prompt": WRONG, "max_tokens": 4, "stream": True})
    parts = events(answer) if answer.status_code == 200 else [json.loads(answer.text)]
    assert "logits are not finite" in parts[-1]["error"]["message"]
