"""Every registered drafter in a service: prompts in pieces, too little memory, and its own text."""

import pytest

from outpace import Engine
from outpace.serving.service import Service
from tests.conformance.test_drafters import METHODS, engine, files, plain
from tests.serving.test_service import LONG, ask_at_once

__all__ = ["engine", "files", "plain"]  # fixtures

ONE_EACH = list({spec.partition("[")[0]: spec for spec in reversed(METHODS)}.values())
TEXTS = [LONG[: 61 + i] for i in range(2)]
SETTINGS = {"max_new_tokens": 70, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(engine):
    return [engine.generate(text, drafter="none", **SETTINGS).tokens for text in TEXTS]


@pytest.mark.parametrize("spec", ONE_EACH)
def test_texts_are_those_of_single_requests(engine, expected, spec):
    """Two that have room for one and a half: one loses its memory, and reads its text anew."""
    own = Engine(engine.target, "none")
    with Service(own, drafters=(spec,), pages=7, stored_pages=0, chunk=24) as service:
        heard = ask_at_once(service, TEXTS, draft_tokens=3, **SETTINGS)
        assert [one.result.tokens for one in heard] == expected
        stats = service.stats()
        assert stats.preempted > 0 and service.broken is None
    own.cache.check_integrity()
    assert not own.cache._slots
