"""The trace of a stream: who wrote each token, and the tree of each pass."""

import json

import pytest
import torch

from outpace import Engine
from outpace.server.app import create_app
from outpace.serving import trace
from outpace.serving.service import Service
from outpace.serving.trace import described
from outpace.types import ROOT, Draft, Outcome, Scored, Verdict
from tests.server.conftest import LIMITS, Client

DEEP = "early_exit[layer=1 tree=3x2x1]"


@pytest.fixture(scope="module")
def client(engine):
    with Service(Engine(engine.target, "none"), drafters=(DEEP, "suffix")) as service:
        yield Client(create_app(service, name="tiny", limits=LIMITS))


def stream(client, **fields):
    """The chunks of a streamed chat."""
    speculation = {"trace": True, **fields.pop("speculation", {})}
    body = {
        "messages": [{"role": "user", "content": "ab ab ab"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 48,
        "ignore_eos": True,
        "temperature": 0,
        "speculation": speculation,
        **fields,
    }
    text = client.post("/v1/chat/completions", body).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def text_of(chunks):
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


@pytest.mark.parametrize("drafter", [DEEP, "suffix", "none"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8}, {"stop": ["se", "\x17zzz"]}],
    ids=["greedy", "seeded", "sampled", "stopped"],
)
def test_a_trace_tells_the_answer(client, drafter, fields):
    chunks = stream(client, speculation={"drafter": drafter}, **fields)
    traces = [chunk["outpace"] for chunk in chunks if "outpace" in chunk]
    tokens = [token for one in traces for token in one["tokens"]]
    usage, metrics = chunks[-1]["usage"], chunks[-1]["metrics"]
    assert "".join(token["text"] for token in tokens) == text_of(chunks)
    assert len(tokens) == usage["completion_tokens"] > 1
    by = [token["by"] for token in tokens]
    assert set(by) <= {drafter, "target"} - {"none"}
    counts = metrics["speculative_decoding"]
    assert by.count(drafter) == counts["num_accepted_draft_tokens"]
    drafts = [one["draft"] for one in traces]
    assert drafts[0] is None and len(drafts) - 1 == metrics["passes"]
    assert sum(draft["drafted"] for draft in drafts[1:]) == counts["num_draft_tokens"]
    for one, draft in zip(traces[1:], drafts[1:], strict=True):
        check(draft, one["tokens"])
    if drafter == DEEP:
        assert by.count(DEEP) > 0 and any(
            len(set(d["parents"])) < d["drafted"] for d in drafts[1:] if d["drafted"]
        )
        known = [q for draft in drafts[1:] for q in draft["q"]]
        assert {q is None for q in known} == {"temperature" not in fields}


def check(draft, tokens):
    """A tree, parents first, whose kept nodes are a path that the pass emitted."""
    size = len(draft["tokens"])
    assert size <= draft["drafted"]
    assert [len(draft[key]) for key in ("parents", "p", "q")] == [size] * 3
    assert all(-1 <= parent < node for node, parent in enumerate(draft["parents"]))
    above = -1
    for node in draft["kept"]:
        assert draft["parents"][node] == above
        above = node
    assert len(tokens) == len(draft["kept"]) + (draft["added"] is not None)
    added = [] if draft["added"] is None else [draft["added"]["p"]]
    for p in (*draft["p"], *added, *(q for q in draft["q"] if q is not None)):
        assert 0 <= p <= 1
    for parent in set(draft["parents"]):
        siblings = [p for p, up in zip(draft["p"], draft["parents"], strict=True) if up == parent]
        assert sum(siblings) < 1.001


def test_the_probabilities_are_those_of_logprobs(client):
    chunks = [c for c in stream(client, logprobs=True) if "outpace" in c][1:]
    for chunk in chunks:
        said = [one["logprob"] for one in chunk["choices"][0]["logprobs"]["content"]]
        draft = chunk["outpace"]["draft"]
        p = [draft["p"][node] for node in draft["kept"]]
        p += [] if draft["added"] is None else [draft["added"]["p"]]
        assert p == pytest.approx([2.718281828**one for one in said], abs=1e-4)


def test_without_the_field_the_wire_is_as_before(client):
    plain, told_ = stream(client, speculation={"trace": False}), stream(client)
    assert not any("outpace" in chunk for chunk in plain)
    strip = {"id", "created", "outpace", "metrics"}

    def shown(chunks):
        kept = [{k: v for k, v in chunk.items() if k not in strip} for chunk in chunks]
        return [
            c
            for c in kept
            if not c["choices"] or c["choices"][0]["delta"] or c["choices"][0]["finish_reason"]
        ]

    assert shown(plain) == shown(told_)


def test_answers_of_one_request_are_traced_apart(client):
    chunks = stream(client, n=2, temperature=0.9, seed=5)
    for index in (0, 1):
        own = [c for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        traced = "".join(t["text"] for c in own for t in c.get("outpace", {"tokens": ()})["tokens"])
        assert traced == text_of(own) != ""


def test_a_trace_needs_a_stream(client):
    error = client.refused("/v1/completions", {"prompt": "a", "speculation": {"trace": True}})
    assert "needs stream" in error["message"] and error["param"] == "speculation.trace"
    client.refused("/v1/completions", {"prompt": "a", "speculation": {"traced": True}})


def test_large_drafts_are_cut_and_stay_trees():
    """A root with 200 children; the last one is kept, and its only child."""
    draft = Draft.chosen([*range(200), 7], [*(ROOT,) * 200, 199])
    logits = torch.zeros(202, 256)
    logits[0, 199] = 100.0  # after the pending token
    logits[200, 7] = 100.0  # after node 199
    outcome = Outcome(
        draft,
        Scored(logits, (0, 202)),
        Verdict((199, 200), (199, 7, 5)),
        (3, 199, 7),
        (0, 200, 201),
        9,
        drafter="wide",
    )
    done = described(outcome)
    assert done.drafted == 201 and len(done.tokens) == trace.MOST
    assert done.pending == 3 and done.added == 5 and done.added_p == pytest.approx(1 / 256)
    assert [done.tokens[node] for node in done.kept] == [199, 7]
    assert [done.parents[node] for node in done.kept] == [ROOT, done.kept[0]]
    assert [done.p[node] for node in done.kept] == pytest.approx([1, 1])
    assert all(parent < node for node, parent in enumerate(done.parents))
