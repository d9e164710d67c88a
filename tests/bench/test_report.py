"""Reports of runs whose figures are known by hand; what may be laid side by side."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from outpace.bench import report as module
from outpace.bench import runner, tables
from outpace.bench.provenance import commit, digest, provenance
from outpace.bench.records import Settings
from outpace.engine.results import Counters
from outpace.errors import RequestError
from outpace.models.tiny import tiny
from tests.bench.fakes import CASES, LONG, Fake, case, session

GLOSSARY = Path(__file__).parents[2] / "docs" / "json.md"
CONFIG = {"workload": "w", "max_new_tokens": 40, "temperature": 0.0, "batch": 1, "ignore_eos": True}


def built(*contenders, settings=(LONG,), end_ids=(), **more):
    origin = provenance(command="outpace bench", target=tiny(), config=CONFIG, cases=CASES)
    return module.build(session(*contenders, settings=settings, **more), origin, end_ids)


def looping_text(case):
    return [1] * 200 if case.id == "dd" else [(7 * i) % 199 for i in range(200)]


def uneven(case, turn):
    """Twice, 4 times, as fast, 10 times as fast as one second per token."""
    return {"a": 0.5, "bb": 0.25, "c": 1.0, "dd": 0.1}[case.id]


@pytest.fixture(scope="module")
def report():
    return built(
        Fake("none", text=looping_text),
        Fake("fast", uneven, text=looping_text, synthetic=True, note="about it"),
        Fake("other", text=lambda case: [2, *looping_text(case)[1:]]),
        Fake("lossy", text=looping_text, lossless=False),
        Fake("hf", kind="peer", text=looping_text),
    )


def row(report, name):
    return next(row for row in report["rows"] if row["method"] == name)


def test_speedups_are_means_of_ratios_of_decoding(report):
    fast = row(report, "fast")
    assert fast["speedup"] == pytest.approx((2 + 4 + 1 + 10) / 4)
    assert fast["groups"]["x"]["speedup"] == pytest.approx(3)
    assert fast["groups"]["y"]["speedup"] == pytest.approx(5.5)
    assert fast["speedup_median"] == pytest.approx(3)
    assert fast["speedup_interval"] is None, "four prompts are too few"
    assert fast["decode_tokens_per_second"] == pytest.approx(4 * 39 / (39 * 1.85))
    assert fast["tokens_per_second"] == pytest.approx(4 * 40 / (39 * 1.85 + 4))
    assert 1 < fast["end_to_end_speedup"] < fast["speedup"]
    assert fast["prefill_seconds"] == 1.0
    assert fast["repeat_interval"] is None and fast["repeat_speedups"] == [fast["speedup"]]
    plain = row(report, "none")
    assert plain["speedup"] == 1.0 and plain["speedup_interval"] is None
    assert report["noise_floor"]["speedup"] == 1.0


def test_full_batches_have_a_speedup_of_their_own(report):
    assert [row["full_batch_speedup"] for row in report["rows"]] == [None] * 5
    assert "batch full" not in tables.tables(report)[0].columns
    together = built(Fake("none"), Fake("fast", uneven), Fake("hf", kind="peer"), batch=2)
    assert [row["full_batch_speedup"] for row in together["rows"]] == [1.0, 1.5, None]
    main = tables.tables(together)[0]
    place = main.columns.index("batch full")
    assert [line[place] for line in main.rows] == ["1.00", "1.50", "-"]


def test_loops_are_left_out_on_the_side(report):
    fast = row(report, "fast")
    assert fast["without_loops"]["speedup"] == pytest.approx((2 + 4 + 1) / 3)
    assert fast["groups"]["y"]["without_loops"]["speedup"] == pytest.approx(1)
    assert fast["groups"]["y"]["without_loops"]["speedup_interval"] is None
    assert fast["looping"] == pytest.approx(37 / 160)
    assert any(line.startswith("1 of 4 plain texts loop") for line in report["notes"])
    assert row(report, "none")["groups"]["x"]["without_loops"]["looping"] == 0.0


def test_a_category_of_loops_has_no_figures_without_them():
    found = built(Fake("none", text=lambda case: [1] * 200), Fake("one"))
    assert row(found, "one")["without_loops"] is None
    assert "4 of 4 plain texts loop" in found["notes"][0]
    assert tables.markdown(found)


def test_the_interval_is_one_over_prompts_not_over_their_seeds_and_turns():
    def interval(cases, **more):
        origin = provenance(command="", target=tiny(), config=CONFIG, cases=cases)
        runs = session(Fake("none"), Fake("one", by_prompt), cases=cases, **more)
        return row(module.build(runs, origin), "one")["speedup_interval"]

    def by_prompt(case, turn):
        return {"a": 0.5, "b": 0.25, "c": 1.0, "d": 0.4}[case.id[0]]

    once = interval([case(name) for name in "abcd"])
    seeds = interval([case(name, seed=seed) for name in "abcd" for seed in range(4)])
    turns = interval([case(f"{name}{turn}") for name in "abcd" for turn in ("", "#2")])
    assert seeds == pytest.approx(once) and turns == pytest.approx(once)
    alone = interval([case(f"{name}{turn}") for name in "abcd" for turn in ("#1", "#2")])
    assert alone != pytest.approx(once), "an id that is no turn of another is a prompt"


def test_batches_that_share_a_prompt_are_one():
    a, b, c, d, e = (case(name) for name in ("a", "b", "c", "a#2", "e"))
    assert module.prompts_of([(a, b), (c,), (e,), (b, c)]) == [0, 0, 2, 0]
    assert module.prompts_of([(a,), (b,), (d,)]) == [0, 1, 0]


def test_equality_is_null_where_it_is_not_promised(report):
    assert row(report, "fast")["equal_to_none"] == row(report, "none")["equal_to_none"] == 1.0
    assert row(report, "other")["equal_to_none"] == 0.0
    assert row(report, "lossy")["equal_to_none"] is row(report, "hf")["equal_to_none"] is None
    free = Settings(max_new_tokens=40, temperature=0.8)
    keyed = Settings(max_new_tokens=40, temperature=0.8, reproducible=True)
    found = built(Fake("none"), Fake("one"), settings=(free, keyed))
    assert [(r["method"], r["reproducible"], r["equal_to_none"]) for r in found["rows"]] == [
        ("none", False, None),
        ("one", False, None),
        ("none", True, 1.0),
        ("one", True, 1.0),
    ]


def test_the_price_of_reproducible_text_stands_beside_independent_samples():
    def of(method, reproducible, accepted, mean_emitted):
        return {
            "method": method,
            "reproducible": reproducible,
            "drafted": 100 if accepted else 0,
            "acceptance_rate": accepted,
            "mean_emitted": mean_emitted,
            "speedup": 1.5,
        }

    rows = [
        of("none", False, 0.0, 1.0),
        of("a", False, 0.5, 3.0),
        of("b", False, 0.5, 3.0),
        of("none", True, 0.0, 1.0),
        of("a", True, 0.4, 2.4),
    ]
    table = tables._keyed(rows)
    assert table.rows == (("a", "50.0% / 40.0%", "3.00 / 2.40", "1.50 / 1.50", "0.800"),)
    assert not tables._keyed(rows[:3]).rows, "greedy answers have one kind of row"


def test_a_peer_does_not_tell_about_passes(report):
    hf = row(report, "hf")
    for key in (
        "mean_emitted",
        "acceptance_rate",
        "acceptance_by_depth",
        "passes",
        "verb_shares",
        "draft_levels",
    ):
        assert hf[key] is None
    assert hf["speedup"] == 1.0
    assert row(report, "fast")["verb_shares"]["score_pass"] == pytest.approx(0.5)
    assert row(report, "fast")["passes"] == sum(int(39 * pace) for pace in (0.5, 0.25, 1, 0.1))


def test_what_a_pass_emits_is_told_by_category(report):
    found = json.loads(json.dumps(report))
    fast = row(found, "fast")
    fast["drafted"] = 10
    fast["groups"]["x"] |= {"mean_emitted": 2.346, "drafted_share": 0.6}
    table = tables._drafts(found["rows"])
    assert dict(zip(table.columns, table.rows[0], strict=True))["x"] == "2.35 / 60%"
    assert [line[0] for line in table.rows] == [
        tables.label(one) for one in found["rows"] if one["drafted"]
    ], "none and peers do not draft"
    assert table.title in tables.markdown(found)


def test_rounds_are_shown_one_by_one():
    found = built(Fake("none"), Fake("one", lambda case, turn: [0.5, 0.25][turn % 2]), repeat=2)
    cell = row(found, "one")["groups"]["x"]
    assert cell["repeat_speedups"] == pytest.approx([2.0, 4.0])
    assert cell["speedup"] == pytest.approx(3.0) and cell["repeats"] == 2
    assert cell["units"] == cell["sequences"] == 2
    assert cell["repeat_interval"][0] < 3 < cell["repeat_interval"][1]
    assert "2.000 4.000" in tables.markdown(found)


def test_a_run_without_its_baseline_is_refused():
    found = session(Fake("none"), Fake("one"))
    del found.parts[0].runs["none"][3, 0]
    with pytest.raises(RequestError, match="only paired runs are compared"):
        module.build(found, {})


def keys_of(value):
    """Keys of a report; names of categories, packages, options and remarks are none."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key
        if key == "groups":
            for cell in inner.values():
                yield from keys_of(cell)
        elif key not in ("versions", "config", "about"):
            yield from keys_of(inner)
    for inner in value if isinstance(value, list) else ():
        yield from keys_of(inner)


def test_every_key_is_in_the_glossary(report):
    known = set(re.findall(r"`([a-z_]+)`", GLOSSARY.read_text(encoding="utf-8")))
    assert not set(keys_of(report)) - known
    wanted = {
        "rows",
        "method",
        "kind",
        "disturbed",
        "drafted_share",
        "tokens_per_second",
        "decode_tokens_per_second",
        "speedup",
        "speedup_interval",
        "mean_emitted",
        "acceptance_rate",
        "acceptance_by_depth",
        "passes",
        "verb_shares",
        "draft_levels",
        "peak_memory_bytes",
        "equal_to_none",
        "looping",
        "end_to_end_speedup",
        "groups",
        "provenance",
        "command",
        "commit",
        "versions",
        "cpu",
        "threads",
        "dtype",
        "config_digest",
        "prompts_digest",
        "seeds",
    }
    assert wanted <= set(keys_of(report))
    fast = row(report, "fast")
    assert set(fast["groups"]["x"]) == set(fast) - {"groups", "about", "disturbed"}


def test_it_is_written_whole_and_read_back(report, tmp_path):
    folder = tmp_path / "deep" / "down"
    files = tables.write(report, tables.markdown(report), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "report.md"]
    assert sorted(files) == sorted(folder.iterdir())
    same = json.loads(json.dumps(report))
    assert module.read(folder) == module.read(folder / "report.json") == same
    page = (folder / "report.md").read_text(encoding="utf-8")
    for words in (
        "4.25",
        "[",
        "fast (synthetic)",
        "hf (peer)",
        "without loops",
        "outpace bench",
        "noise floor",
        report["provenance"]["prompts_digest"],
        "about it",
    ):
        assert words in page
    assert page.index("easy prey") < page.index("Speed-up over none")


@pytest.mark.parametrize(
    ("text", "says"), [(None, "cannot read"), ("{", "is not JSON"), ("[]", "is no report")]
)
def test_files_that_are_no_reports(tmp_path, text, says):
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RequestError, match=says):
        module.read(path)


def changed(report, **changes):
    other = json.loads(json.dumps(report))
    for path, value in changes.items():
        *parts, last = path.split("__")
        at = other
        for part in parts:
            at = at[part]
        at[last] = value
    return other


def test_only_equal_measurements_are_laid_side_by_side(report):
    other = changed(report, provenance__dtype="bfloat16")
    assert module.check_comparable(report, other) == ["dtype: float32 and bfloat16"]
    main, groups = tables.side_by_side(report, other)
    assert main.rows[1][:3] == ("fast (synthetic)", "2.2", "2.2")
    assert main.rows[1][3:5] == ("4.25", "4.25")
    assert groups.rows[0][1] == "3.00 | 3.00"
    for change, says in (
        ({"paired": False}, "the second report is not of paired runs"),
        ({"provenance__prompts_digest": "0"}, r"prompts \(4 and 4\)"),
        ({"provenance__config__batch": 8}, r"batch \(1 and 8\)"),
        ({"provenance__config__temperature": 0.8}, r"temperature \(0.0 and 0.8\)"),
        ({"provenance__seeds": [1]}, r"seeds \(\[0\] and \[1\]\)"),
    ):
        with pytest.raises(RequestError, match=says):
            module.check_comparable(report, changed(report, **change))


def test_a_partial_report_says_so(report):
    found = session(Fake("none"), Fake("one"))
    found.interrupted = True
    partial = module.build(found, report["provenance"])
    assert partial["partial"] and "interrupted" in partial["notes"][0]
    assert not report["partial"]


def test_digests_are_of_content():
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1})
    origins = [
        provenance(command="", target=tiny(), config=CONFIG, cases=cases) for cases in (CASES, CASES[1:])
    ]
    assert origins[0]["prompts_digest"] != origins[1]["prompts_digest"]
    assert origins[0]["config_digest"] == origins[1]["config_digest"]
    assert origins[0]["versions"]["torch"] and origins[0]["cpu"]


SHA = "0123456789abcdef" * 2 + "01234567"


def test_the_commit_of_a_checkout(tmp_path):
    git = tmp_path / ".git"
    assert commit(tmp_path) is None
    git.mkdir()
    (git / "HEAD").write_text(SHA + "\n")
    assert commit(tmp_path) == SHA
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit(tmp_path) is None
    (git / "packed-refs").write_text(f"# packed\n{'f' * 40} refs/heads/a\n{SHA} refs/heads/main\n")
    assert commit(tmp_path) == SHA
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text("a" * 40 + "\n")
    assert commit(tmp_path) == "a" * 40
    tree, inner = tmp_path / "tree", git / "worktrees" / "tree"
    tree.mkdir()
    inner.mkdir(parents=True)
    (tree / ".git").write_text(f"gitdir: {inner}\n")
    (inner / "HEAD").write_text("ref: refs/heads/main\n")
    (inner / "commondir").write_text("../..\n")
    assert commit(tree) == "a" * 40


class Boastful(Fake):
    """Says that every pass emitted one token, however fast it is."""

    def run(self, unit, settings):
        done = super().run(unit, settings)
        counters = [Counters(new_tokens=len(t), passes=len(t) - 1) for t in done.tokens]
        return replace(done, counters=tuple(counters))


def test_no_speedup_above_mean_emitted_is_a_result(monkeypatch):
    found = built(Fake("none"), Boastful("one", lambda case, turn: 0.5))
    assert found["left_out"] == 4 and not found["rows"][1]["units"]
    monkeypatch.setattr(runner.stats, "disturbed", lambda run, plain: False)
    found = built(Fake("none"), Boastful("one", lambda case, turn: 0.5))
    boast = row(found, "one")
    assert boast["impossible_speedup"] == pytest.approx(2.0)
    assert [boast[key] for key in ("speedup", "end_to_end_speedup", "speedup_interval")] == [None] * 3
    assert any("2.00 at 1.00 tokens per pass is impossible" in line for line in found["notes"])
    assert "2.00" not in str(tables.tables(found)[0].rows[1])
