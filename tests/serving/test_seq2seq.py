"""A service of an encoder-decoder: sources that share their beginning, and what is refused."""

from dataclasses import replace

import pytest

from outpace import Engine, RequestError
from outpace.models.load import load_target
from outpace.serving.service import Service
from tests.models.making import seq2seq
from tests.serving.test_service import ask

LONG = [(7 * i) % 40 + 3 for i in range(150)]
PAGES = [*LONG[:64], *LONG[:63]]
"""A source that fills two pages with the mark of its end."""
SOURCES = [LONG, LONG, [*LONG[:140], 60, 61], LONG[:70], LONG[:127], PAGES, PAGES]
"""They share whole pages of a prefix cache, and some are the same."""
SETTINGS = {"max_new_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True}


def test_sources_that_begin_alike_are_read_each_by_itself():
    target = load_target(seq2seq("t5"))
    engine = Engine(target, "none")
    alone = [engine.generate(source, **SETTINGS).tokens for source in SOURCES]
    assert len(set(alone)) >= 3, "answers depend on the source"
    with Service(Engine(target, "none"), drafters=("reference", "none")) as service:
        for source, tokens in zip(SOURCES, alone, strict=True):
            heard = ask(service, source, **SETTINGS).wait()
            assert heard.result.tokens == tokens
        assert heard.result.cached_tokens == 128, "pages of the same source were used"


def test_tokens_of_a_source_have_no_probabilities():
    with Service(Engine(load_target(seq2seq("t5")), "none"), drafters=("none",)) as service:
        request = replace(service.request([5, 6, 7]), prompt_logprobs=1)
        with pytest.raises(RequestError, match="have no probabilities"):
            service.submit(request, lambda event: None)
