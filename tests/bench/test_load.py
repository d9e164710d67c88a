"""Load: who asks when, what of a stream is counted, and what the figures say."""

import asyncio
import json
import selectors
from types import SimpleNamespace

import httpx
import pytest

from outpace.bench import load, load_run
from outpace.bench.load import Arrival, Question, Reply, Settings, closed_loop, open_loop, poisson
from outpace.bench.load_report import Round, Session, build, first_difference, heading, markdown, table
from outpace.bench.load_run import Plan
from outpace.bench.load_terms import USUAL
from outpace.bench.tables import write
from outpace.errors import OutpaceError, RequestError

PROVENANCE = {
    "command": "outpace bench serve",
    "model": "m",
    "dtype": "float32",
    "device": "cpu",
    "cpu": "a machine",
    "threads": 1,
    "prompts": 2,
    "config": {"workload": "builtin", "max_new_tokens": 3, "temperature": 0.0},
}


class Skipping(selectors.DefaultSelector):
    """Makes an event loop whose clock jumps to whatever is due next: nobody waits."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


@pytest.fixture
def simulated(monkeypatch):
    """Runs a coroutine in a time of its own, which begins at 0."""
    clock = Skipping()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=loop.time))
    yield loop.run_until_complete
    loop.close()


def test_a_round_has_as_many_requests_as_the_help_says():
    assert USUAL == "twice the clients, 16 at least"
    plan = Plan(Session([]), [], [], Settings())
    loads = [Arrival(rate=2.0), *(Arrival(concurrency=clients) for clients in (1, 8, 9, 64))]
    assert [plan.count(one) for one in loads] == [16, 16, 16, 18, 128]
    plan.requests = 5
    assert {plan.count(one) for one in loads} == {5}


def test_a_closed_loop_keeps_so_many_under_way_and_answers_in_order():
    under_way, most = 0, []

    async def send(number):
        nonlocal under_way
        under_way += 1
        most.append(under_way)
        for _ in range(1 + number % 3):  # turns of the loop, not seconds
            await asyncio.sleep(0)
        under_way -= 1
        return Reply(str(number), 0.0)

    replies = asyncio.run(closed_loop(send, 20, 4))
    assert [reply.prompt for reply in replies] == [str(n) for n in range(20)]
    assert max(most) == 4 and most.count(4) > 10


def test_an_open_loop_waits_for_nobody(simulated):
    came = {}

    async def send(number):
        came[number] = load.time.perf_counter()
        await asyncio.sleep(50)
        return Reply(str(number), 0.0, ended=load.time.perf_counter())

    replies = simulated(open_loop(send, [20, 0, 10]))
    assert [reply.prompt for reply in replies] == ["0", "1", "2"]
    assert came == pytest.approx({1: 0, 2: 10, 0: 20})
    assert [reply.ended for reply in replies] == pytest.approx([70, 50, 60])


def test_a_round_begins_with_its_first_request(simulated, monkeypatch):
    """Nothing is served while nobody has come, so those seconds are not the server's."""
    monkeypatch.setattr(load_run, "time", load.time)
    monkeypatch.setattr(load_run, "poisson", lambda rate, count, seed: [40.0, 45.0])

    class Answers:
        async def ask(self, path, body, prompt):
            began = load.time.perf_counter()
            await asyncio.sleep(5)
            return Reply(prompt, began, ended=load.time.perf_counter())

    plan = Plan(Session(["none"]), [], [], Settings(), requests=2)
    question = Question(id="a", path="/v1/completions", body={"prompt": "a"})
    made = simulated(
        load_run.one_round(plan, Answers(), [question], Arrival(rate=0.2), 0, "none", lambda count: None)
    )
    assert made.seconds == pytest.approx(10.0)


def test_who_fails_ends_all_the_others(simulated):
    ended = []

    async def send(number):
        if number == 1:
            raise OutpaceError("no")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append((number, load.time.perf_counter()))

    with pytest.raises(OutpaceError):
        simulated(open_loop(send, [0, 10, 0]))
    assert sorted(ended) == [(0, pytest.approx(10)), (2, pytest.approx(10))]


def test_arrivals_are_seeded_and_have_their_rate():
    at = poisson(4.0, 4000, seed=3)
    assert at == poisson(4.0, 4000, seed=3) != poisson(4.0, 4000, seed=4)
    assert at == sorted(at) and at[-1] == pytest.approx(1000, rel=0.05)


def served(lines, status=200):
    """What is made of a stream of these lines."""

    async def go():
        async with load.connected("http://x", key="k", seconds=5) as server:
            await server._client.aclose()
            server._client = httpx.AsyncClient(
                base_url="http://x",
                transport=httpx.MockTransport(
                    lambda request: httpx.Response(status, content="".join(f"{line}\n\n" for line in lines))
                ),
            )
            try:
                return await server.ask("/v1/completions", {}, "p")
            finally:
                await server._client.aclose()

    return asyncio.run(go())


def chunk(ids=(), text="", **more):
    choices = [{"token_ids": list(ids), "text": text}] if ids or text else []
    body = {"choices": choices, "system_fingerprint": "f", **more}
    return "data: " + json.dumps(body, ensure_ascii=False)


def test_a_stream_is_taken_apart():
    last = chunk(usage={"prompt_tokens": 7}, metrics={"drafter": "none"})
    reply = served(
        [
            ": a remark",
            chunk([1, 2], "ab"),
            chunk(),
            chunk([3], "c"),
            chunk([4, 5], "d\u2028\x85e"),
            last,
            "data: [DONE]",
        ]
    )
    assert reply.error is None and reply.tokens == [1, 2, 3, 4, 5]
    assert reply.text == "abcd\u2028\x85e"  # characters that some take for the end of a line
    assert [count for _, count in reply.portions] == [2, 1, 2] and len(reply.gaps) == 2
    assert reply.usage == {"prompt_tokens": 7} and reply.metrics == {"drafter": "none"}
    assert reply.per_token == pytest.approx(sum(reply.gaps) / 3) and reply.first_seconds >= 0


@pytest.mark.parametrize(
    ("lines", "status", "says"),
    [
        ([chunk([1])], 200, "the stream ended before the answer did"),
        (["data: [DONE]"], 200, "the stream ended before the answer did"),
        (
            [chunk([1]), 'data: {"error": {"message": "too\\nlate"}}', "data: [DONE]"],
            200,
            "in the stream: too late",
        ),
        (["data: {", "data: [DONE]"], 200, "in the stream: no reason given"),
        (['{"error": {"message": "full"}}'], 429, "429: full"),
        (["gone"], 502, "502: no reason given"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(lines, status, says):
    assert served(lines, status).error == says


def test_a_server_that_is_not_there_is_one_line():
    async def go(url):
        async with load.connected(url, key=None, seconds=5) as server:
            await server.get("/v1/models")

    with pytest.raises(OutpaceError, match=r"no answer from http://127.0.0.1:1/v1/models: "):
        asyncio.run(go("http://127.0.0.1:1"))
    with pytest.raises(RequestError, match="--url 'x' is no address"):
        asyncio.run(go("x"))


def test_bodies_differ_by_drafter_alone():
    question = Question(id="p", path="/v1/completions", body={"prompt": "a"})
    greedy = Settings(max_new_tokens=5).body(question, "none", 3)
    assert greedy["speculation"] == {"drafter": "none"} and "seed" not in greedy
    assert greedy["ignore_eos"] and greedy["stream"] and greedy["return_token_ids"]
    warm = Settings(temperature=0.5, seed=10)
    one, other = warm.body(question, "auto", 3), warm.body(question, "none", 3)
    assert one["seed"] == other["seed"] == 13
    assert one.pop("speculation") == {"drafter": "auto", "reproducible": False}
    other.pop("speculation")
    assert one == other


def reply(prompt, began, *portions, error=None, drafted=0, accepted=0):
    out = Reply(prompt, began, error=error)
    for at, ids in portions:
        out.portions.append((at, len(ids)))
        out.tokens += ids
    out.usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
    out.metrics = {
        "speculative_decoding": {
            "num_spec_steps": 2,
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
        }
    }
    return out


def session():
    four = Arrival(concurrency=4)
    fast = [
        reply("a", 0.0, (0.1, [1]), (0.3, [2, 3]), drafted=4, accepted=1),
        reply("b", 0.0, (0.3, [1]), (0.4, [9]), (0.8, [3]), drafted=6, accepted=4),
    ]
    plain = [reply("a", 0.0, (0.2, [1]), (0.4, [2, 3])), reply("b", 0.0, error="429: full")]
    return Session(
        ["fast", "none"],
        [
            Round("fast", four, 0, 1.0, fast),
            Round("none", four, 0, 2.0, plain),
            Round("fast", four, 1, 2.0, fast),
            Round("none", four, 1, 2.0, plain),
        ],
        alone={"a": (1, 2, 3), "b": (1, 2, 3)},
        gaps={("b", 1): 0.25},
    )


def test_figures_of_known_replies():
    report = build(session(), PROVENANCE)
    fast, plain = report["loads"]
    assert (fast["rounds"], fast["requests"], fast["new_tokens"]) == (2, 4, 12)
    assert fast["tokens_per_second"] == 4.0 and plain["tokens_per_second"] == 1.5
    assert fast["round_speedups"] == [4.0, 2.0] and fast["speedup"] == 3.0
    assert plain["speedup"] == 1.0
    assert fast["first_token_seconds_p50"] == pytest.approx(0.2)
    assert fast["first_token_seconds_p95"] == pytest.approx(0.3)
    assert fast["inter_token_seconds_p50"] == pytest.approx(0.2)
    assert fast["seconds_per_token_p50"] == pytest.approx((0.1 + 0.25) / 2)
    assert fast["acceptance_rate"] == 0.5 and fast["mean_acceptance_length"] == 1 + 10 / 8
    assert plain["acceptance_rate"] is None
    assert plain["errors"] == 2 and plain["error_kinds"] == {"429: full": 2}
    assert fast["texts"] == {
        "compared": 4,
        "different": 2,
        "share": 0.5,
        "differences": [{"prompt": "b", "index": 1, "logit_gap": 0.25}] * 2,
    }
    assert plain["texts"]["share"] == 0.0 and not report["partial"]
    assert "2 requests failed" in report["notes"][1] and "40% of the prompt" in report["notes"][0]


def test_rates_over_that_of_one_client():
    rounds = [
        Round("none", Arrival(concurrency=count), 0, 1.0, [reply("a", 0.0, (0.1, [1] * count))])
        for count in (1, 8)
    ]
    report = build(Session(["none"], rounds), PROVENANCE)
    assert [row["over_one_stream"] for row in report["loads"]] == [1.0, 8.0]
    assert table(report).columns[3] == "x one" and table(report).rows[1][3] == "8.00"


def test_answers_of_different_lengths():
    found = [Settings(max_new_tokens=64).shorter(number).max_new_tokens for number in range(16)]
    assert found[:8] == found[8:] and sorted(found[:8]) == [16, 16, 24, 32, 40, 48, 56, 64]
    assert Settings(max_new_tokens=1).shorter(3).max_new_tokens == 1


def test_rounds_that_not_all_have_ended_are_left_out():
    one = session()
    one.rounds.pop()
    one.interrupted = True
    report = build(one, PROVENANCE)
    assert report["partial"] and [row["rounds"] for row in report["loads"]] == [1, 1]
    assert report["loads"][0]["round_speedups"] == [4.0]
    assert report["notes"][0].startswith("interrupted")
    one.rounds = one.rounds[:1]
    assert build(one, PROVENANCE)["loads"] == []


def test_tables_and_files(tmp_path):
    report = build(session(), PROVENANCE)
    made = table(report)
    assert made.rows[0] == (
        "fast",
        "4",
        "4.0",
        "3.00",
        "200.0 / 300.0",
        "200.0 / 400.0",
        "175.0 / 250.0",
        "50.0%",
        "0",
        "50.0%, from 1, gap 0.25",
    )
    assert made.rows[1][7:] == ("-", "2", "0 of 2")
    assert heading(report).startswith("m, float32, cpu, 1 thread: 2 prompts of builtin, 3 new")
    json_file, page = write(report, markdown(report), tmp_path / "new")
    assert json.loads(json_file.read_text()) == report
    text = page.read_text()
    assert "| fast | 4 | 4.0 | 3.00 |" in text and "    outpace bench serve\n" in text
    assert Arrival(rate=0.5).label == "0.5/s"


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (), None), ((), (1,), 0)],
)
def test_where_texts_first_differ(a, b, at):
    assert first_difference(a, b) == at
