"""Figures for Prometheus: the names that dashboards know, and values that add up."""

from prometheus_client.parser import text_string_to_metric_families

from outpace import Engine
from outpace.server.app import create_app
from outpace.server.metrics import Meters
from outpace.serving.events import ServiceStats
from outpace.serving.service import Service
from tests.server.conftest import LIMITS, Client


def samples(client):
    """(name, labels that vary) -> value."""
    text = client.get("/metrics").text
    return {
        (
            sample.name,
            tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_are_those_of_the_answers(engine):
    with Service(Engine(engine.target, "none"), drafters=("prompt_lookup", "suffix")) as service:
        client = Client(create_app(service, name="tiny", limits=LIMITS))
        settings = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
        answers = [
            client.complete("ab ab", **settings),
            client.complete("ab ab", speculation={"drafter": "suffix"}, **settings),
            client.complete("ab ab", speculation={"drafter": "none"}, stop="\x14", **settings),
        ]
        assert client.post("/v1/completions", {}).status_code == 400
        found = samples(client)
    for name, answer in (("prompt_lookup", answers[0]), ("suffix", answers[1])):
        spec = answer["metrics"]["speculative_decoding"]
        label = (("drafter", name),)
        assert found["outpace:spec_decode_num_drafts_total", label] == spec["num_spec_steps"] > 0
        assert found["outpace:spec_decode_num_draft_tokens_total", label] == (spec["num_draft_tokens"])
        accepted = found["outpace:spec_decode_num_accepted_tokens_total", label]
        assert accepted == spec["num_accepted_draft_tokens"] > 0
        places = [
            v
            for (n, labels), v in found.items()
            if n == "outpace:spec_decode_num_accepted_tokens_per_pos_total"
            and dict(labels)["drafter"] == name
        ]
        assert sum(places) == accepted and places == sorted(places, reverse=True)
    new = sum(answer["usage"]["completion_tokens"] for answer in answers)
    read = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert found["outpace:generation_tokens_total", ()] == new
    assert found["outpace:prompt_tokens_total", ()] == read
    assert found["outpace:num_requests_running", ()] == 0
    assert found["outpace:num_requests_waiting", ()] == 0
    assert found["outpace:request_success_total", (("finished_reason", "length"),)] == 2
    assert found["outpace:request_success_total", (("finished_reason", "stop"),)] == 1
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "time_per_output_token_seconds",
    ):
        assert found[f"outpace:{name}_count", ()] == 3
    for name in ("prompt_lookup", "suffix", "none"):
        label = (("drafter", name),)
        assert found["outpace:request_time_per_output_token_seconds_count", label] == 1
    portions = found["outpace:inter_token_latency_seconds_count", ()]
    assert portions == sum(answer["metrics"]["passes"] for answer in answers)
    path = ("path", "/v1/completions")
    assert found["outpace:http_responses_total", (path, ("status", "200"))] == 3
    assert found["outpace:http_responses_total", (path, ("status", "400"))] == 1


def test_unknown_paths_make_no_labels(client):
    client.get("/some/path/of/a/stranger")
    assert "stranger" not in client.get("/metrics").text


def test_refusals_and_defects_are_counted(engine, monkeypatch):
    """What one is called at night for; each with the headers that every response has."""
    with Service(Engine(engine.target, "none"), drafters=("none",)) as service:
        app = create_app(service, name="tiny", keys=["k"], limits=LIMITS)
        client, path = Client(app, Authorization="Bearer k"), "/v1/completions"

        def broken(*_):
            raise RuntimeError("a secret")

        monkeypatch.setattr(app.state.server.parser, "completion", broken)
        long = "a" * (LIMITS.body_bytes + 1)
        found = [
            Client(app).post(path, {}),
            client.post(path, {"prompt": long}),
            client.post(path, {"prompt": "a"}),
            Client(app).get("/some/path"),
        ]
        assert [answer.status_code for answer in found] == [401, 413, 500, 401]
        assert all(answer.headers["x-content-type-options"] == "nosniff" for answer in found)
        assert "secret" not in found[2].text
        text, counted = client.get("/metrics").text, samples(client)
    for status in ("401", "413", "500"):
        labels = ("path", path), ("status", status)
        assert counted["outpace:http_responses_total", labels] == 1
    assert counted["outpace:http_responses_total", (("path", "other"), ("status", "401"))] == 1
    figures = [line for line in text.splitlines() if line.startswith("outpace:")]
    assert figures and all('model_name="tiny"' in line for line in figures)


def test_how_long_to_wait():
    meters = Meters("tiny", ServiceStats)
    assert meters.wait(ServiceStats(waiting=0, slots=4)) == 1
    assert meters.wait(ServiceStats(waiting=40, slots=4)) == 10
    assert meters.wait(ServiceStats(waiting=4000, slots=4)) == 60
