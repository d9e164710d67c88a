"""What the API answers: the engine's own text, in the forms that clients expect."""

import json
import threading

import pytest

import outpace
from outpace import SamplingParams
from outpace.models.text import Tokenizer
from outpace.models.tiny import tiny_tokenizer
from outpace.server.limits import Limits
from outpace.server.parsing import BodyParser
from outpace.server.schema import ChatBody
from outpace.serving.events import Done, Failed

SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 12}


def events(response):
    """Objects of a stream, which must end as streams do."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, last, nothing = response.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def text_of(chunks, index=0):
    """Text of one answer of a stream."""
    own = [c for e in chunks for c in e["choices"] if c["index"] == index]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in own)


def answered(service, prompt, **settings):
    """The answer of the service itself."""
    done, over = [], threading.Event()

    def listen(event):
        if isinstance(event, Done | Failed):
            done.append(event)
            over.set()

    service.submit(service.request(prompt, SamplingParams(**settings)), listen)
    assert over.wait(20)
    return done[0].result


def test_a_completion_is_the_services_text(client, service):
    answer = client.complete("ab ab ab", temperature=0, max_tokens=12)
    result = answered(service, "ab ab ab", temperature=0, max_new_tokens=12)
    choice = answer["choices"][0]
    assert choice["text"] == result.text and choice["finish_reason"] == result.finish_reason
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["usage"]["prompt_tokens"] == result.prompt_tokens
    assert answer["usage"]["completion_tokens"] == len(result.tokens)
    assert answer["usage"]["total_tokens"] == result.prompt_tokens + len(result.tokens)


FEW = {"temperature": 0, "allowed_token_ids": [66, 67, 68, 69]}
HOT = {"temperature": 2.0, "seed": 3}
OURS = {"allowed_token_ids": "allowed_tokens", "include_stop_str_in_output": "include_stop"}


@pytest.mark.parametrize(
    ("base", "field"),
    [
        ({"temperature": 0}, {"logit_bias": {"70": 50}}),
        ({"temperature": 0}, {"allowed_token_ids": [66, 67]}),
        ({"temperature": 0}, {"stop_token_ids": [94]}),
        (FEW, {"repetition_penalty": 3.0}),
        (FEW, {"presence_penalty": 2.0}),
        (FEW, {"frequency_penalty": 2.0}),
        ({"temperature": 0, "logit_bias": {"1": 50}}, {"ignore_eos": True}),
        ({"temperature": 0, "logit_bias": {"1": 50}}, {"min_tokens": 4}),
        ({"temperature": 2.0}, {"seed": 3}),
        ({"temperature": 0, "seed": 3}, {"temperature": 2.0}),
        (HOT, {"top_k": 2}),
        (HOT, {"top_p": 0.1}),
        (HOT, {"min_p": 0.9}),
    ],
    ids=lambda value: " ".join(value),
)
def test_every_sampling_field_reaches_the_sampler(client, service, base, field):
    fields = {**base, **field}
    settings = {OURS.get(key, key): value for key, value in fields.items()}
    if "logit_bias" in settings:
        settings["logit_bias"] = {int(k): v for k, v in settings["logit_bias"].items()}
    ids = {"max_tokens": 32, "return_token_ids": True}
    asked = client.complete("ab ab ab", **ids, **fields)["choices"][0]["token_ids"]
    assert asked == list(answered(service, "ab ab ab", max_new_tokens=32, **settings).tokens)
    # Without the field it is another text, or the comparison shows nothing.
    assert asked != client.complete("ab ab ab", **ids, **base)["choices"][0]["token_ids"]


def test_the_temperature_is_1_where_nobody_says(client):
    said = client.complete("ab", max_tokens=16, seed=5, temperature=1)
    unsaid = client.complete("ab", max_tokens=16, seed=5)
    greedy = client.complete("ab", max_tokens=16, temperature=0)
    texts = [answer["choices"][0]["text"] for answer in (said, unsaid, greedy)]
    assert texts[0] == texts[1] != texts[2]
    assert client.complete("ab")["usage"]["completion_tokens"] <= 16


def test_a_stream_gives_the_text_of_the_whole_answer(client):
    body = {"prompt": ["ab ab", "cd cd"], "n": 2, **SAMPLED}
    whole = client.post("/v1/completions", body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post("/v1/completions", {**body, **options}))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    for choice in whole["choices"]:
        assert text_of(chunks, choice["index"]) == choice["text"]
    assert len({choice["text"] for choice in whole["choices"]}) == 4
    ends = [c for e in chunks for c in e["choices"] if c["finish_reason"]]
    assert sorted(c["index"] for c in ends) == [0, 1, 2, 3]
    last = chunks[-1]
    assert last["choices"] == [] and last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert last["metrics"] is None and whole["metrics"] is None  # of four answers there is no rate


def test_a_chat_and_its_stream(client):
    whole = client.chat("ab ab", **SAMPLED)
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant" and whole["object"] == "chat.completion"
    body = {"messages": [{"role": "user", "content": "ab ab"}], "stream": True, **SAMPLED}
    chunks = events(client.post("/v1/chat/completions", body))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == message["content"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert "usage" not in chunks[0]
    running = {"stream_options": {"continuous_usage_stats": True}}
    chunks = events(client.post("/v1/chat/completions", {**body, **running}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == whole["usage"]["completion_tokens"]


def test_a_chat_is_its_template_and_has_no_length_of_its_own(client, engine):
    ids = client.post("/tokenize", {"messages": [{"role": "user", "content": "ab"}]}).json()
    assert ids["tokens"] == engine.target.tokenizer.chat([{"role": "user", "content": "ab"}])
    forced = {"temperature": 0, "logit_bias": {"66": 100}, "ignore_eos": True}
    answer = client.chat("ab", **forced)
    assert answer["usage"]["completion_tokens"] == 512  # the limit of this server
    answer = client.chat("ab", max_completion_tokens=3, **forced)
    assert answer["choices"][0]["message"]["content"] == "aaa"
    echoed = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None}
    body = {
        "messages": [
            {"role": "user", "content": "ab"},
            echoed,
            {"role": "user", "content": [{"type": "text", "text": "more"}]},
        ]
    }
    assert client.post("/v1/chat/completions", {**body, "max_tokens": 2}).status_code == 200


def test_log_probabilities(client, service):
    settings = {"temperature": 0, "max_tokens": 6}
    result = answered(service, "ab ab", temperature=0, max_new_tokens=6, logprobs=2)
    found = client.complete("ab ab", logprobs=2, **settings)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [one.logprob for one in result.logprobs]
    assert [len(top) for top in found["top_logprobs"]] == [2] * 6
    assert found["text_offset"][0] == 0
    assert found["text_offset"] == sorted(found["text_offset"])
    content = client.chat("ab", logprobs=True, top_logprobs=1, **settings)["choices"][0]["logprobs"]
    for one in content["content"]:
        assert one["top_logprobs"][0]["logprob"] == one["logprob"]
    streamed = events(
        client.post("/v1/completions", {"prompt": "ab ab", "logprobs": 2, "stream": True, **settings})
    )
    parts = [c["logprobs"] for e in streamed for c in e["choices"] if c["logprobs"]]
    for key, whole in found.items():
        assert [x for part in parts for x in part[key]] == whole
    none = client.complete("ab ab", logprobs=0, **settings)["choices"][0]["logprobs"]
    assert [len(top) for top in none["top_logprobs"]] == [1] * 6


def test_stop_echo_and_token_ids(client, engine):
    plain = client.complete("ab ab", temperature=0, max_tokens=12, return_token_ids=True)
    choice = plain["choices"][0]
    assert engine.target.tokenizer.decode(choice["token_ids"], continues=True) == choice["text"]
    stop = choice["text"][1]
    cut = client.complete("ab ab", temperature=0, max_tokens=12, stop=stop)["choices"][0]
    assert cut["text"] == choice["text"][:1] and cut["finish_reason"] == "stop"
    kept = client.complete(
        "ab ab", temperature=0, max_tokens=12, stop=[stop], include_stop_str_in_output=True
    )["choices"][0]
    assert kept["text"] == choice["text"][:2]
    echoed = client.complete("ab ab", temperature=0, max_tokens=12, echo=True)["choices"][0]
    assert echoed["text"] == "ab ab" + choice["text"]
    chunks = events(
        client.post(
            "/v1/completions",
            {"prompt": "ab ab", "temperature": 0, "max_tokens": 12, "echo": True, "stream": True},
        )
    )
    assert text_of(chunks) == echoed["text"]


def test_the_drafter_changes_figures_and_not_the_text(client):
    settings = {"temperature": 0, "max_tokens": 64, "ignore_eos": True}
    seen = {}
    for drafter in ("prompt_lookup", "suffix", "none"):
        answer = client.complete("ab ab", speculation={"drafter": drafter}, **settings)
        seen[drafter] = answer["choices"][0]["text"], answer["metrics"]
    assert len({text for text, _ in seen.values()}) == 1
    spec = seen["prompt_lookup"][1]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] > 0
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    assert (
        sum(n * count for n, count in enumerate(spec["acceptance_histogram"]))
        == (spec["num_accepted_draft_tokens"])
    )
    assert len(spec["acceptance_histogram"]) == spec["num_spec_tokens"] + 1
    assert spec["mean_acceptance_length"] == (1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"])
    plain = seen["none"][1]
    assert plain["passes"] == 63 and plain["by_drafter"] == {}
    assert plain["speculative_decoding"]["mean_acceptance_length"] is None
    for count in (0, 1):
        few = client.complete("ab ab", **settings, speculation={"num_speculative_tokens": count})
        assert few["choices"][0]["text"] == seen["none"][0]
        assert few["metrics"]["speculative_decoding"]["num_spec_tokens"] == count


def test_a_seed_gives_the_same_text_with_any_drafter(client):
    settings = {**SAMPLED, "max_tokens": 40, "temperature": 1.0}
    texts = {
        client.complete("ab ab", speculation={"drafter": drafter, "reproducible": True}, **settings)[
            "choices"
        ][0]["text"]
        for drafter in ("prompt_lookup", "suffix", "none")
    }
    assert len(texts) == 1


def test_who_wrote_which_token(client):
    settings = {
        "temperature": 0,
        "max_tokens": 64,
        "ignore_eos": True,
        "return_token_ids": True,
        "speculation": {"detailed": True},
    }
    answer = client.complete("ab ab", **settings)
    authors = answer["choices"][0]["speculation"]
    assert [one["id"] for one in authors] == answer["choices"][0]["token_ids"]
    accepted = sum(one["accepted"] for one in authors)
    assert accepted == answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    spelled = bytes(byte for one in authors for byte in one["bytes"])
    assert spelled.decode("utf-8", "replace") == answer["choices"][0]["text"]
    chunks = events(client.post("/v1/completions", {"prompt": "ab ab", "stream": True, **settings}))
    assert [one for e in chunks for c in e["choices"] for one in c.get("speculation", [])] == (authors)


def test_a_prediction_is_drafted_from(client):
    settings = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    text = client.complete("ab ab", allowed_token_ids=[66, 67, 68], **settings)
    expected = text["choices"][0]["text"]
    answer = client.complete(
        "ab ab",
        allowed_token_ids=[66, 67, 68],
        **settings,
        prediction={"type": "content", "content": expected},
    )
    assert answer["choices"][0]["text"] == expected
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 25
    assert answer["metrics"]["drafter"] == "reference"
    assert answer["metrics"]["passes"] < text["metrics"]["passes"]
    parts = {"type": "content", "content": [{"type": "text", "text": expected}]}
    again = client.complete("ab ab", allowed_token_ids=[66, 67, 68], **settings, prediction=parts)
    assert again["usage"] == answer["usage"]


def test_small_paths(client, engine):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and listed["data"][0]["id"] == "tiny"
    assert listed["data"][0]["max_model_len"] == 1024
    assert listed["data"][0]["drafters"] == ["prompt_lookup", "suffix", "reference", "none"]
    assert client.get("/v1/models/tiny").json()["object"] == "model"
    assert client.get("/v1/models/x/y").status_code == 404
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/version").json() == {"version": outpace.__version__}
    tokens = client.post("/tokenize", {"prompt": "ab then", "return_token_strs": True}).json()
    assert tokens["tokens"] == list(engine.encode("ab then")) and tokens["count"] == 5
    assert "".join(tokens["token_strs"]) == "ab then"
    assert client.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "ab then"}
    assert client.refused("/detokenize", {"tokens": [10**6]})["param"] == "tokens"


def test_tools_reach_the_template(service):
    plain = tiny_tokenizer()
    template = "{{ tools | tojson }} {{ mood }} {% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(plain._backend, templates={"default": template})
    parser = BodyParser(service, "tiny", Limits())
    parser.__class__ = type("Told", (BodyParser,), {"tokenizer": tokenizer})
    tool = {"type": "function", "function": {"name": "f"}}
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
        "chat_template_kwargs": {"mood": "calm"},
    }
    ids = parser.chat(ChatBody(**body)).requests[0].prompt
    assert tokenizer.decode(ids) == f"{json.dumps([tool])} calm hi"
    ids = parser.chat(ChatBody(**body, tool_choice="none")).requests[0].prompt
    assert tokenizer.decode(ids) == "null calm hi"


def test_special_tokens_in_messages_are_text(client, service):
    tokenizer = service.engine.target.tokenizer
    special = tokenizer.decode(sorted(tokenizer.special_ids)[:1], skip_special=False)
    said = {"messages": [{"role": "user", "content": f"ab{special}cd"}]}
    plain = client.post("/tokenize", {"messages": [{"role": "user", "content": "ab"}]}).json()["tokens"]
    new = client.post("/tokenize", said).json()["tokens"]
    old = client.post("/tokenize", {**said, "special_tokens_in_messages": True}).json()["tokens"]
    count = [sum(token in tokenizer.special_ids for token in ids) for ids in (plain, new, old)]
    assert count[1] == count[0] and count[2] == count[0] + 1
    usage = client.chat(said["messages"][0]["content"], max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == len(new)
