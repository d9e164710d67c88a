"""The comparison of trained drafters, on the smallest model: trained, measured, a page, and nothing twice."""

import itertools
import json

import pytest

from outpace import Engine
from outpace.methods import ENTRIES
from outpace.train.corpus import CorpusPrompt
from outpace.train.options import read_options
from outpace.train.pipeline import Pipeline
from tests.test_tools import tool  # noqa: F401

PROMPTS = [CorpusPrompt(messages=({"role": "user", "content": f"tell {i}"},), source=0) for i in range(120)]
SHARED = ("pipeline.vocab=64", "pipeline.tokens_per_batch=256", "loop.lr=0.01", "loop.bf16=false")
ROWS = ("draft_model layers=1", "hydra heads=2", "streaming layers=1 streams=2")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    place = tmp_path_factory.mktemp("work")
    settings = ["data.batch=32", "data.max_new_tokens=16", "data.answers=1"]
    options = read_options("draft_model", settings, 1500)
    engine = Engine.load("tiny", drafter="none")
    Pipeline(engine, options, prompts=PROMPTS, work=place, out=place / "out", say=lambda tick: None).data()
    return place


def test_rows_are_trained_measured_and_shown(tool, work, tmp_path, monkeypatch, capsys):  # noqa: F811
    table = tool("trained_table")
    done = []

    def alone(stage, *given):
        done.append((*given[1:], stage.__name__))
        stage(*given)

    monkeypatch.setattr(table, "alone", alone)
    monkeypatch.setattr(table.signal, "signal", lambda *_: None)
    ticks = itertools.count()
    monkeypatch.setattr(table.time, "process_time", lambda: next(ticks) / 100)  # a step takes 10 ms
    monkeypatch.setattr(table, "TRIAL", 0.1)
    page = tmp_path / "docs" / "results" / "trained.md"
    asked = ["--work", str(work), "--out", str(tmp_path / "out"), "--minutes", "0.02", "--model", "tiny"]
    asked += ["--prompts", "8", "--max-new-tokens", "48", "--set", *SHARED, "--page", str(page), "--rows"]
    assert table.main([*asked, *ROWS]) == 0
    stages = [(row, stage) for row in ROWS for stage in ("plan", "trained", "use")]
    assert done == [("features",), *stages]
    figures = {row["row"]: row for row in json.loads(page.with_suffix(".json").read_text())}
    assert set(figures) == set(ROWS)
    for row in figures.values():
        use, trained = row["use"], row["trained"]
        assert use["held_out_counted"][0] == 192 and use["in_use_counted"][0] >= 180, row["row"]
        assert abs(use["in_use"][0] - use["held_out"][0]) < 0.05, (use["in_use"], use["held_out"])
        assert use["default"]["equal_to_none"] == 1.0 and use["chain"]["emitted"] >= 1
        assert trained["steps"] == row["plan"]["steps"] and trained["weights_bytes"] > 1000
        assert not trained["losses"]
    text = page.read_text()
    assert all(f"| `{row}` |" in text for row in ROWS) and "--rows" in text and str(tmp_path) not in text
    assert (tmp_path / "docs" / "images" / "trained.svg").stat().st_size > 1000
    monkeypatch.setattr(table, "alone", lambda *given: pytest.fail("nothing is done twice"))
    assert table.main([*asked, *ROWS]) == 0
    assert table.main([*asked, *ROWS, "medusa", "--page-only"]) == 0
    assert "Not run: `medusa`" in page.read_text()
    elsewhere = [*asked, ROWS[0], "--page-only", "--out", str(tmp_path / "elsewhere")]
    assert table.main(elsewhere) == 0
    assert all(f"| `{row}` |" in page.read_text() for row in ROWS), "rows that were made elsewhere stay"
    other = figures[ROWS[0]]["trained"]
    other = {**other, "data": {**other["data"], "digest": "other", "answer_tokens": 7}}
    page.with_suffix(".json").write_text(json.dumps([{**figures[ROWS[0]], "trained": other}]))
    assert table.main([*asked, *ROWS, "--page-only"]) == 0
    text = page.read_text()
    assert "2 sets of answer tokens" in text and "7 (A) and" in text
    assert f"| `{ROWS[0]}` | A |" in text and all(f"| `{row}` | B |" in text for row in ROWS)
    kept = [{**figures[ROWS[0]], "plan": {**figures[ROWS[0]]["plan"], "minutes": 3.0}}, figures[ROWS[1]]]
    page.with_suffix(".json").write_text(json.dumps(kept))
    assert table.main(elsewhere) == 2
    assert "rows of other minutes" in capsys.readouterr().err


def test_every_trained_drafter_has_a_row_and_a_paper(tool):  # noqa: F811
    rows = set(tool("trained_table").ROWS)
    trained = {entry.name for entry in ENTRIES if entry.kind == "objective"} - {"acceptance"}
    assert rows == trained == set(tool("trained_papers").PAPERS)


def test_chains_are_noted_and_nothing_of_them_is_kept(tool):  # noqa: F811
    onlooker = tool("trained_use").Onlooker()
    engine = Engine.load("tiny", drafter="none")
    spec = "draft_model[model=tiny tree=chain tree_size=3]"  # the target itself: every guess is right
    method = engine.method(spec)
    usual, method.verifier = method.verifier, onlooker
    given = {"max_new_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    try:
        watched = engine.generate([5, 9, 11, 5], drafter=spec, reproducible=False, **given)
    finally:
        method.verifier = usual
    assert watched.tokens == engine.generate([5, 9, 11, 5], drafter="none", **given).tokens
    assert watched.counters.accepted == 0 and len(onlooker.seen) == len(watched.tokens)
    assert onlooker.seen[0] == (), "the prompt's own pass"
    for at, chain in enumerate(onlooker.seen[1:-3], start=1):
        assert chain == tuple(watched.tokens[at : at + 3])
