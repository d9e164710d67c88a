"""Rows in the shapes of a server: equal ones pass, and every kind of dependent row is caught."""

import dataclasses
import inspect
import json

import pytest
import torch

from outpace.analysis.shapes import Serving, check_shapes, parts_of
from outpace.cache.base import PAGE
from outpace.cli import check as command
from outpace.engine import scheduler
from outpace.models.tiny import TableTarget, tiny
from outpace.serving.service import Service

FEW = Serving(chunk=20, max_batch=5, chunks=3, page=16)


@pytest.fixture
def target():
    return tiny(dtype=torch.float32)


def changed(monkeypatch, target, when, what="logits", by=1e-4):
    """Let the last row of some passes depend on what is beside it."""
    score = target.score

    def dependent(feeds, cache, **settings):
        held = [cache.length(feed.slot) for feed in feeds]
        scored = score(feeds, cache, **settings)
        if not when(feeds, held):
            return scored
        if what == "logits":
            logits_TV = scored.logits_TV.clone()
            logits_TV[-1:] += by
            return dataclasses.replace(scored, logits_TV=logits_TV)
        taps = {name: rows.clone() for name, rows in scored.taps.items()}
        for rows_TH in taps.values():
            rows_TH[-1] += by
        return dataclasses.replace(scored, taps=taps)

    monkeypatch.setattr(target, "score", dependent)


def rows_of(feeds):
    return sum(len(feed.token_J) for feed in feeds)


def test_a_table_is_independent_and_everything_is_looked_at():
    target, ticks = TableTarget.random(0, vocab_size=30), []
    report = check_shapes(target, FEW, tick=lambda part, done: ticks.append((part, done)))
    assert report.broken == [] and report.steps.first is None
    assert sum(done for _, done in ticks) == parts_of(target, FEW)
    assert {part for part, _ in ticks} == {"steps", "prompts"}
    # 1 to 5 sequences in three patterns; 1 to 65 rows at seven edges of two texts.
    assert report.steps.passes == 5 * 3 + 17 * 14 and report.steps.rows > 4000
    assert report.prompts.rows >= 3 * 7 * FEW.chunk * FEW.chunks
    assert json.loads(json.dumps(report.to_json()))["prompts"]["different"] == 0


def test_the_shapes_are_those_of_the_server():
    own = Serving(chunk=128, max_batch=32)
    assert (own.chunks, own.page) == (scheduler._MOST_CHUNKS, PAGE)
    settings = inspect.signature(Service).parameters
    assert settings["max_batch"].default == command._BATCH


def test_the_tiny_decoder_is_what_it_promises(target):
    report = check_shapes(target, FEW)
    assert report.broken == [], report.broken
    assert report.steps.rows > 4000 and report.prompts.rows > 1000


@pytest.mark.parametrize(
    ("when", "what", "part", "shape"),
    [
        (lambda feeds, held: rows_of(feeds) == 31 and len(feeds) == 1, "logits", "steps", "31 rows"),
        (lambda feeds, held: len(feeds) == 5, "logits", "steps", "5 sequences, plain"),
        (
            lambda feeds, held: len(feeds) > 1 and any(feed.parent_J.count(0) > 1 for feed in feeds),
            "hidden",
            "steps",
            "trees",
        ),
        (lambda feeds, held: held == [33] and rows_of(feeds) == 32, "logits", "steps", "32 rows"),
        (
            lambda feeds, held: held == [0] and rows_of(feeds) == 60,
            "hidden",
            "prompts",
            "chunks of 60, alone",
        ),
        (
            lambda feeds, held: len(feeds) == 2 and max(map(lambda feed: len(feed.token_J), feeds)) == 19,
            "hidden",
            "prompts",
            "chunks of 19, beside another",
        ),
        (
            lambda feeds, held: held == [16] and rows_of(feeds) == 20,
            "hidden",
            "prompts",
            "chunks of 20, behind a copied page",
        ),
    ],
    ids=["rows", "batch", "tree", "page", "chunks", "beside", "copied"],
)
def test_a_planted_dependent_row_is_caught(monkeypatch, target, when, what, part, shape):
    changed(monkeypatch, target, when, what)
    report = check_shapes(target, FEW)
    tally = getattr(report, part)
    assert 0 < tally.different < tally.rows
    assert shape in tally.first.shape and tally.first.gap == pytest.approx(1e-4, rel=0.1)
    (line,) = report.broken
    assert line.startswith(f"shapes: {tally.different} of {tally.rows} rows of {part} are not")


def test_a_row_of_nan_is_a_difference(monkeypatch, target):
    changed(monkeypatch, target, lambda feeds, held: len(feeds) == 4, by=float("nan"))
    report = check_shapes(target, FEW)
    assert report.steps.different and report.steps.first.gap != report.steps.first.gap
