"""Over-long and ill-made bodies: refused early, while streams beside them go on."""

import gc
import json
import threading
import time
from itertools import pairwise

import pytest
import tokenizers

from outpace import Engine
from outpace.errors import PromptTooLong
from outpace.models.text import Tokenizer
from outpace.server.app import create_app
from outpace.server.limits import Limits
from outpace.serving.service import Service
from tests.server.conftest import Client
from tests.support import until

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
PAUSE = 0.3
MEGABYTES = "Some words, and more of them. " * 130_000


@pytest.fixture(scope="module")
def streaming(engine):
    """A service with an answer under way, and the times at which its tokens came."""
    times, stop = [], threading.Event()
    with Service(Engine(engine.target, "none"), drafters=("none",), max_batch=4) as service:
        limits = Limits(body_bytes=4 << 20)
        client = Client(create_app(service, name="tiny", limits=limits))

        def again():
            while not stop.is_set():
                ended = threading.Event()

                def listen(event, ended=ended):
                    times.append(time.perf_counter())
                    if not hasattr(event, "ids"):
                        ended.set()

                service.submit(service.request("ab", max_new_tokens=900, ignore_eos=True), listen)
                ended.wait(20)

        thread = threading.Thread(target=again)
        thread.start()
        gc.collect()
        gc.freeze()  # as `serve` does
        try:
            until(lambda: len(times) > 9)
            yield client, times
        finally:
            gc.unfreeze()
            stop.set()
            thread.join(20)


def longest_pause(times, work):
    """The longest time without a token while something is done."""
    begin = time.perf_counter()
    work()
    time.sleep(0.02)
    end = time.perf_counter()
    inside = [begin, *(t for t in list(times) if begin < t < end), end]
    return max(b - a for a, b in pairwise(inside))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": MEGABYTES}),
        (COMPLETION, {"prompt": "a" * 3_900_000}),
        (CHAT, {"messages": [{"role": "user", "content": MEGABYTES}]}),
        ("/tokenize", {"prompt": MEGABYTES}),
        ("/tokenize", {"messages": [{"role": "user", "content": MEGABYTES}]}),
        (COMPLETION, {"prompt": "ab", "prediction": {"content": MEGABYTES}}),
        ("/detokenize", {"tokens": [1] * 300_000}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_streams_go_on_beside_a_long_prompt(streaming, path, body):
    client, times = streaming
    content = json.dumps(body).encode()

    def work():
        headers = {"Content-Type": "application/json"}
        answer = client.request("POST", path, content=content, headers=headers)
        assert answer.status_code == 400 and "tokens" in answer.json()["error"]["message"]

    assert longest_pause(times, work) < PAUSE


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": [-1] * 250_000}),
        (COMPLETION, {"prompt": [[]] * 100_000}),
        (COMPLETION, {"prompt": [["a"]] * 5_000}),
        (COMPLETION, {"prompt": "a", "stop": [1] * 250_000}),
        (COMPLETION, {"prompt": "a", "logit_bias": {f"x{i}": "a" for i in range(50_000)}}),
        (CHAT, {"messages": [1] * 250_000}),
        (CHAT, {"messages": [{}] * 200_000}),
        (CHAT, {"messages": [], "tools": [{}] * 200_000}),
        (CHAT, {"messages": [], **{f"x{i}": 1 for i in range(70_000)}}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_streams_go_on_beside_a_body_of_mistakes(streaming, path, body):
    client, times = streaming
    content = json.dumps(body).encode()
    assert len(content) < 1.1 * Limits().body_bytes

    def work():
        headers = {"Content-Type": "application/json"}
        answer = client.request("POST", path, content=content, headers=headers)
        assert answer.status_code == 400 and len(answer.json()["error"]["message"]) <= 400

    assert longest_pause(times, work) < PAUSE


def words():
    """A tokenizer that has a token per word, and one for every space."""
    vocab = {"[UNK]": 0, "a": 1, "b": 2, " ": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "isolated")
    return Tokenizer(backend)


def test_long_texts_have_the_same_tokens(monkeypatch):
    from outpace.models import text

    tokenizer, long = words(), "a b " * 30_000
    ids = tokenizer.encode(long)
    assert ids == [1, 3, 2, 3] * 30_000
    assert tokenizer.encode(long, most=120_000) == ids
    with pytest.raises(PromptTooLong, match="more than 50000 tokens"):
        tokenizer.encode(long, most=50_000)
    seen, encoded = [], text._encoded
    monkeypatch.setattr(text, "_encoded", lambda b, t, special: seen.append(len(t)) or encoded(b, t, special))
    with pytest.raises(PromptTooLong):
        tokenizer.encode("a b " * 1_000_000, most=50_000)
    assert sum(seen) < 200_000  # of 4 million characters
