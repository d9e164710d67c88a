"""Log-probabilities of prompts: those of the model, however the prompt is read, as lm-eval asks."""

import threading

import pytest
import torch

from outpace import Engine
from outpace.cache.base import PAGE
from outpace.engine.results import Result
from outpace.server.app import create_app
from outpace.serving.service import Service
from outpace.types import Feed
from tests.server.conftest import Client

LONG = "ab cd ef gh " * 40
ASKED = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}


def oracle(target, ids):
    """The log-probability of every token but the first, from one pass over all of them."""
    cache = target.new_cache()
    with torch.inference_mode():
        scored = target.score([Feed.chain(cache.open(), ids)], cache)
    log_p = scored.logits_TV.float().log_softmax(-1)
    return [log_p[i, token].item() for i, token in enumerate(ids[1:])], log_p.argmax(-1).tolist()


@pytest.fixture(scope="module")
def service(engine):
    own = Engine(engine.target, "none")
    with Service(own, drafters=("prompt_lookup",), max_batch=3, chunk=16, pages=40) as made:
        yield made


@pytest.fixture(scope="module")
def client(service):
    return Client(create_app(service, name="tiny"))


@pytest.mark.parametrize("prompt", ["ab", LONG, [5, 6, 7, 5, 6, 7, 9]], ids=["short", "long", "ids"])
def test_they_are_the_models_own(client, engine, prompt):
    tokenizer = engine.target.tokenizer
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    want, best = oracle(engine.target, ids)
    for _ in range(2):  # the second time the prompt is stored, and read all the same
        answer = client.complete(prompt, **ASKED)
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == pytest.approx(want, abs=1e-5)
        assert len(found["tokens"]) == len(found["text_offset"]) == len(ids) + 1
        for i, top in enumerate(found["top_logprobs"][1:-1]):
            token = found["tokens"][i + 1]
            assert (max(top, key=top.get) == token) == (best[i] == ids[i + 1])
        assert answer["usage"]["completion_tokens"] == 1
    plain = client.complete(prompt, **{**ASKED, "echo": False})["choices"][0]
    assert plain["logprobs"]["token_logprobs"] == found["token_logprobs"][-1:]
    assert choice["text"].endswith(plain["text"])


def test_offsets_of_a_prompt_that_ends_inside_a_character(client, engine):
    """Its text ends with a replacement; the answer begins a text of its own."""
    _, *euro = ids = engine.target.tokenizer.encode("a\u20ac")
    asked = {**ASKED, "max_tokens": 2, "allowed_token_ids": euro[-1:]}
    answer = client.complete([*ids, *euro[:2]], **asked)
    (choice,) = answer["choices"]
    assert choice["text"] == "a\u20ac" + "\ufffd" * 3
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize(("prompt", "want"), [("<|begin|>ab", [0, 9, 10, 11]), ([0, 66, 67], [0, 0, 1, 2])])
def test_offsets_of_a_prompt_with_a_special_token(client, prompt, want):
    """A text spells it, and ids leave it out of the text."""
    (choice,) = client.complete(prompt, **ASKED)["choices"]
    assert choice["logprobs"]["text_offset"] == want


def test_no_answer_may_be_wanted(client, engine):
    answer = client.complete(LONG, max_tokens=0, logprobs=2, echo=True)
    (choice,) = answer["choices"]
    ids = engine.target.tokenizer.encode(LONG)
    assert choice["text"] == LONG and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids)
    assert answer["usage"] | {} == answer["usage"] and answer["usage"]["completion_tokens"] == 0
    assert client.complete("ab", max_tokens=0)["choices"][0]["text"] == ""
    body = {"prompt": "ab", "max_tokens": 0, "stream": True, "echo": True}
    text = client.post("/v1/completions", body).text
    assert '"text":"ab"' in text and text.count('"finish_reason":"length"') == 1


def test_several_prompts_beside_others_have_their_own(client, engine):
    prompts = [LONG[: 7 * n] for n in range(1, 9)]
    together = [None] * len(prompts)

    def ask(number):
        together[number] = client.complete(prompts[number], **ASKED)["choices"][0]["logprobs"]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(prompts))]
    for one in threads:
        one.start()
    beside = client.complete(LONG, max_tokens=20, temperature=0, ignore_eos=True)["choices"][0]["text"]
    for one in threads:
        one.join(20)
    for prompt, found in zip(prompts, together, strict=True):
        want, _ = oracle(engine.target, engine.target.tokenizer.encode(prompt))
        assert found["token_logprobs"][1:-1] == pytest.approx(want, abs=1e-5)
    assert (
        client.complete(LONG, max_tokens=20, temperature=0, ignore_eos=True)["choices"][0]["text"] == beside
    )


def test_a_prompt_that_loses_its_memory_is_still_told_whole(engine):
    """Two long texts do not fit together, so one is read again."""
    own, found = Engine(engine.target, "none"), {}
    ids = tuple(own.encode(LONG))
    pages = 2 * (len(ids) // PAGE) + 3
    with Service(own, drafters=("none",), max_batch=2, chunk=16, pages=pages) as service:
        from dataclasses import replace

        ended = [threading.Event() for _ in range(3)]

        def listen(number):
            def hear(event):
                if isinstance(getattr(event, "result", None), Result):
                    found[number] = event.result
                    ended[number].set()

            return hear

        for number in range(3):
            asked = service.request(list(ids), max_new_tokens=60, temperature=0, ignore_eos=True)
            service.submit(replace(asked, prompt_logprobs=0), listen(number))
        assert all(one.wait(20) for one in ended)
    want, _ = oracle(engine.target, ids)
    for result in found.values():
        assert [one.logprob for one in result.prompt_logprobs[1:]] == pytest.approx(want, abs=1e-5)
