"""``outpace demo``: one answer, written twice and played side by side."""

import json
import re

import pytest

from outpace.analysis.take import TARGET, Piece, Take, take
from outpace.cli.demo import _page, _picture
from outpace.engine.engine import Engine
from outpace.params import SamplingParams

PLAIN = Take("none", tuple(Piece(0.1 * i, f" w{i}", TARGET) for i in range(10)))
FAST = Take("auto", tuple(Piece(0.1 * (i // 3), f" w{i}", "suffix" if i % 3 else TARGET) for i in range(10)))


def test_a_take_has_every_token_once_with_its_author():
    engine = Engine.load("tiny", drafter="prompt_lookup")
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    ids = engine.encode("the cat sat on the mat and the cat sat")
    made = take(engine, "prompt_lookup", ids, params)
    result = engine.generate(list(ids), params)
    assert "".join(piece.text for piece in made.pieces) == result.text
    assert len(made.pieces) == len(result.tokens)
    by = [piece.by for piece in made.pieces]
    assert by.count("prompt_lookup") == result.counters.accepted > 0
    assert [piece.seconds for piece in made.pieces] == sorted(piece.seconds for piece in made.pieces)
    assert not engine.listeners


def test_a_moment_shows_what_was_there_in_stretches_of_one_author():
    assert FAST.at(0.05) == [(" w0", TARGET), (" w1 w2", "suffix")]
    assert FAST.authors == ("suffix",) and PLAIN.authors == ()
    assert PLAIN.rate == pytest.approx(10) and FAST.rate == pytest.approx(30)


def test_the_picture_stops_when_the_sooner_answer_is_whole():
    text = re.sub(r"<[^>]+>|&#160;", " ", _picture([PLAIN, FAST]))
    assert text.count("w9") == 1 and "w3" in text and "3.00 x" in text and "suffix" in text
    assert not re.search(r"@font-face|url\(.?http", _picture([PLAIN, FAST]))  # it loads nothing


def test_the_page_holds_both_and_escapes_what_it_is_given():
    page = _page([PLAIN, Take("auto", (Piece(0.0, "</script>", TARGET),))], "a < b")
    data = json.loads(re.search(r"const data = (.*), both", page).group(1))
    assert [one["title"] for one in data["takes"]] == ["plain", "auto"]
    assert data["takes"][1]["pieces"] == [[0.0, "</script>", TARGET]]
    assert "take.rate.toFixed(0)" in page  # as in the terminal
    assert page.count("</script>") == 1 and "a &lt; b" in page and "//" not in page.split("<script>")[0]


def test_the_command_writes_files_or_prints(outpace, tmp_path):
    given = ("demo", "the cat sat on the mat", "-m", "tiny", "-d", "prompt_lookup", "--max-new-tokens", "12")
    ran = outpace(*given, "--out", str(tmp_path / "a.svg"), "--out", str(tmp_path / "a.html"))
    assert ran.code == 0, ran.err
    assert (tmp_path / "a.svg").read_text().startswith("<svg") and "const data" in (
        tmp_path / "a.html"
    ).read_text()
    ran = outpace(*given)
    assert ran.code == 0 and "plain" in ran.out and "prompt_lookup" in ran.out
    ran = outpace(*given, "--out", "a.gif")
    assert ran.code == 2 and "a.gif; give a name that ends in .svg or .html" in ran.err
