"""The rounded copy reads the target's own keys and values, and leaves nothing of its own behind."""

import pytest
import torch

from outpace import Engine
from outpace.errors import SpecError
from outpace.methods.quantized_self import Apart, QuantizedSelf
from outpace.models.tiny import tiny

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9, 40, 41], [7, 3, 1, 4, 1, 5]]
LONG = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny(), drafter="none")


def test_it_has_no_cache_and_reads_no_prompt(engine):
    drafter = engine.method("quantized_self").drafter
    assert isinstance(drafter, QuantizedSelf) and not hasattr(drafter, "cache")
    read, real = [], drafter.model.score
    drafter.model.score = lambda feeds, cache, **rest: (
        read.append([len(feed.token_J) for feed in feeds]) or real(feeds, cache, **rest)
    )
    try:
        fast = engine.generate(PROMPTS, drafter="quantized_self", **LONG)
    finally:
        del drafter.model.score
    assert read and all(rows == 1 for feeds in read for rows in feeds), "a chain reads a row a level"
    plain = engine.generate(PROMPTS, drafter="none", **LONG)
    assert [one.tokens for one in fast] == [one.tokens for one in plain]
    assert sum(one.counters.accepted for one in fast) > 0.8 * sum(one.counters.drafted for one in fast) > 0


def test_what_the_rounded_weights_wrote_does_not_stay(engine):
    """The keys and values of a text are those of plain decoding, bit by bit."""

    def kept(spec):
        held, real = [], engine.target.score

        def score(feeds, cache, **rest):
            slot = feeds[0].slot
            held[:] = [
                engine.target.read(cache, slot, n).row_CY.clone() for n in range(engine.target.num_layers)
            ]
            return real(feeds, cache, **rest)

        engine.target.score = score
        try:
            tokens = engine.generate(PROMPTS[0], drafter=spec, **LONG).tokens
        finally:
            del engine.target.score
        return tokens, held

    tokens, plain = kept("none")
    others, fast = kept("quantized_self[kind=int4 tree=2x2x1]")
    assert tokens == others
    for one, other in zip(plain, fast, strict=True):
        size = min(len(one), len(other))
        assert size > len(PROMPTS[0])
        torch.testing.assert_close(one[:size], other[:size])


def test_graph_wants_the_copy_with_a_cache_of_its_own(engine):
    assert isinstance(engine.method("quantized_self[shared=false]").drafter, Apart)
    with pytest.raises(SpecError, match="a cache of its own"):
        engine.method("graph[draft=quantized_self]")
    texts = [
        engine.generate(PROMPTS[0], drafter=spec, **LONG).tokens
        for spec in ("none", "graph[draft=quantized_self[shared=false] tree=dynamic tree_size=8]")
    ]
    assert texts[0] == texts[1]
