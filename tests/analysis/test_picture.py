"""What pictures say of a pass, and what becomes of it on paper."""

import html.parser
import re
import xml.etree.ElementTree as ET

import pytest
import torch

from outpace import Engine, RequestError
from outpace.analysis.draw_page import html as page
from outpace.analysis.draw_tree import caption, columns, layout, lines, percent, svg, visible
from outpace.analysis.picture import Added, Fate, Guess, Picture, Trace, film
from outpace.analysis.siblings import MOST, Siblings, measure
from outpace.analysis.watch import watched
from outpace.models.tiny import TableTarget
from outpace.params import SamplingParams
from outpace.types import ROOT, Draft, Drawn, Group, Law, Outcome, Scored, Verdict

PROMPT = [5, 9, 11, 5, 9, 11, 5, 9]
ITSELF = "draft_model[model=tiny"


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


def params(temperature=0.0, **more):
    return SamplingParams(
        **{"temperature": temperature, "seed": 3, "max_new_tokens": 14, "ignore_eos": True, **more}
    )


def test_a_guess_that_leads_where_there_is_no_distribution_is_drawn(engine):
    def blind(seen, x_V):
        return torch.full_like(x_V, -torch.inf) if seen[-1] < 150 else x_V

    ends = {"stop_token_ids": set(range(150)), "processors": [blind], "max_new_tokens": 20}
    drawn = 0
    for seed in range(4):
        trace = film(engine, f"{ITSELF}]", [200, 201, 202], params(1.0, seed=seed, **ends))
        drawn += sum(guess.token < 150 for picture in trace.passes for guess in picture.guesses)
    assert drawn


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_p_is_the_targets_law_after_the_path(temperature):
    """By looking it up in the table, for every guess and for the target's own token."""
    target = TableTarget.random(7, vocab_size=4, order=2, sharpness=2.0)
    engine = Engine(target, "prompt_lookup")
    prompt = [0, 1, 2, 0, 1, 3, 0, 1]
    trace = film(engine, "prompt_lookup", prompt, params(temperature))
    written = [*prompt, int(trace.first.removeprefix("#"))]
    shown = temperature or 1.0
    seen = 0
    for picture in trace.passes:
        guesses = picture.guesses
        assert picture.pending == f"#{written[-1]}"
        for guess in guesses:
            path, up = [], guess.parent
            while up != ROOT:
                path, up = [guesses[up].token, *path], guesses[up].parent
            law_V = target.law_after([*written, *path]) ** (1 / shown)
            assert guess.p == pytest.approx(float(law_V[guess.token] / law_V.sum()), abs=1e-6)
            assert guess.q is None, "lookups have no law"
            seen += 1
        kept = [guesses[node].token for node in picture.kept]
        if picture.added is not None:
            law_V = target.law_after([*written, *kept]) ** (1 / shown)
            got = float(law_V[picture.added.token] / law_V.sum())
            assert picture.added.p == pytest.approx(got, abs=1e-6)
            kept.append(picture.added.token)
        written += kept
    assert seen > 3


@pytest.mark.parametrize(
    ("tree", "temperature"),
    [("3x2", 0.0), ("dynamic:8:0 tree_size=9", 0.0), ("3x2", 0.8), ("dynamic:8:0 tree_size=9", 0.8)],
)
def test_a_model_that_drafts_for_itself_has_q_equal_to_p(engine, tree, temperature):
    trace = film(engine, f"{ITSELF} tree={tree}]", PROMPT, params(temperature))
    pairs = [(guess.q, guess.p) for picture in trace.passes for guess in picture.guesses]
    assert len(pairs) >= 20
    assert [q for q, _ in pairs] == pytest.approx([p for _, p in pairs], abs=1e-4)
    other = film(engine, f"{ITSELF} layers=1 tree={tree}]", PROMPT, params(temperature))
    gaps = [abs(g.q - g.p) for picture in other.passes for g in picture.guesses]
    assert max(gaps) > 0.05, "and another model has not"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_shows_the_run_that_generate_makes(engine, temperature):
    spec = f"{ITSELF} layers=1 tree=3x2x1]"
    plain = engine.generate(PROMPT, params(temperature), drafter=spec, reproducible=False)
    trace = film(engine, spec, PROMPT, params(temperature))
    tokens = []
    for picture in trace.passes:
        tokens += [picture.guesses[node].token for node in picture.kept]
        tokens += [] if picture.added is None else [picture.added.token]
    assert tuple(tokens) == plain.tokens[1:]
    found = trace.to_json()
    assert found["drafted"] == plain.counters.drafted
    assert found["accepted"] == plain.counters.accepted > 0
    assert found["mean_emitted"] == pytest.approx(plain.counters.mean_emitted)
    for before, picture in zip(trace.passes, trace.passes[1:], strict=False):
        assert picture.pending == before.emitted[-1]


def test_fates(engine):
    trace = film(engine, f"{ITSELF} layers=1 tree=3x2x1]", PROMPT, params(0.8))
    for picture in trace.passes:
        alive = {ROOT, *picture.kept}
        if picture.added is None:
            alive -= {picture.kept[-1]}
        for node, guess in enumerate(picture.guesses):
            if node in picture.kept:
                assert guess.fate is Fate.ACCEPTED and guess.parent in alive
            else:
                want = Fate.REFUSED if guess.parent in alive else Fate.NOT_REACHED
                assert guess.fate is want
    fates = {guess.fate for picture in trace.passes for guess in picture.guesses}
    assert fates == set(Fate)


def test_a_stop_inside_a_draft_ends_the_picture(engine):
    spec = f"{ITSELF} tree=chain tree_size=4]"
    whole = engine.generate(PROMPT, params(), drafter=spec)
    end = whole.tokens[2]  # the first pass keeps four guesses, and this is its second
    trace = film(engine, spec, PROMPT, params(stop_token_ids=frozenset({end})))
    last = trace.passes[-1]
    assert last.added is None and last.emitted == tuple(last.guesses[node].text for node in last.kept)
    assert last.guesses[last.kept[-1]].token == end
    assert {guess.fate for guess in last.guesses[len(last.kept) :]} == {Fate.NOT_REACHED}


def test_the_drafter_is_left_as_it_was(engine):
    spec = f"{ITSELF} layers=1 tree=3x2x1]"
    drafter = engine.method(spec).drafter
    before = set(vars(drafter))
    film(engine, spec, PROMPT, params(), passes=2)
    assert set(vars(drafter)) >= before and not {"observe", "expand"} & set(vars(drafter))
    with pytest.raises(ZeroDivisionError), watched(engine.method(spec), lambda outcome: 1 / 0):
        engine.generate(PROMPT, params(), drafter=spec)
    assert not {"observe", "expand"} & set(vars(drafter))


def test_as_many_passes_as_asked_for(engine):
    spec = f"{ITSELF} layers=1 tree=3x2x1]"
    whole = film(engine, spec, PROMPT, params())
    assert film(engine, spec, PROMPT, params(), passes=2).passes == whole.passes[:2]
    with pytest.raises(RequestError, match="at least one pass"):
        film(engine, spec, PROMPT, params(), passes=0)
    assert film(engine, spec, PROMPT, params(max_new_tokens=1)).passes == ()


def a_picture():
    """One guess kept, one sibling refused with a child nobody asked for, the target's own."""

    def guess(text, parent, q, p, fate):
        return Guess(token=1, text=text, parent=parent, q=q, p=p, fate=fate)

    return Picture(
        before="the ",
        pending="cat",
        kept=(1,),
        guesses=(
            guess('<&">', ROOT, 0.5, 0.25, Fate.REFUSED),
            guess(" sat", ROOT, 0.25, 0.625, Fate.ACCEPTED),
            guess("\n", 0, None, 0.001, Fate.NOT_REACHED),
            guess("\u6f22\x00", 1, 1.0, 0.0, Fate.REFUSED),
        ),
        added=Added(token=2, text=" on", p=0.996),
    )


def a_trace():
    return Trace(
        model="m<1>",
        drafter="d[a=1]",
        temperature=0.0,
        prompt="<script>",
        first="cat",
        passes=(a_picture(), a_picture()),
    )


def test_a_tree_in_ascii():
    drawn = lines(a_picture(), plain=True)
    assert ["".join(text for text, _ in pieces).rstrip() for pieces in drawn] == [
        "                       q     p",
        "'cat'                           pending",
        "|- ' sat'            25%   62%  accepted",
        "|  |- ' on'               100%  the target's own",
        "|  `- '\\u6f22\\x00'  100%    0%  refused",
        "`- '<&\">'            50%   25%  refused",
        "   `- '\\n'                 <1%  not reached",
    ]


def test_a_tree_in_unicode_keeps_its_columns():
    drawn = ["".join(text for text, _ in pieces) for pieces in lines(a_picture())]
    assert drawn[2].startswith("\u251c\u2500 \u00b7sat")
    assert drawn[6].startswith("   \u2514\u2500 \u21b5")
    ends = {columns(line[: line.index("%") + 1]) for line in drawn if "%" in line}
    assert ends <= {columns(drawn[0]) - 6, columns(drawn[0])}, "under q, or under p where q is none"
    roles = [next((role for _, role in pieces if role), None) for pieces in lines(a_picture())]
    assert roles == [None, "pending", "accepted", "added", "refused", "refused", "unreached"]


def test_the_top_row_is_what_was_emitted():
    spots = layout(a_picture())
    assert [spot.text for spot in spots if spot.row == 0] == ["cat", " sat", " on"]
    assert len({(spot.row, spot.level) for spot in spots}) == len(spots) == 6, "no two in one place"
    for spot in spots[1:]:
        assert spots[spot.parent].level == spot.level - 1 and spots[spot.parent].row <= spot.row


def test_texts_for_people():
    assert visible(" a\tb\n") == "\u00b7a\u21e5b\u21b5"
    assert visible("\u00e4", plain=True) == "'\\xe4'"
    assert columns(visible("x" * 50)) < 20 and visible("x" * 50, plain=True).endswith("..'")
    assert [percent(value) for value in (None, 0.0, 0.001, 0.344, 1.0)] == ["", "0%", "<1%", "34%", "100%"]
    assert caption(a_picture()) == "1 of 4 guesses accepted, 2 tokens emitted"
    empty = Picture(before="", pending="a", guesses=(), kept=(), added=Added(token=1, text="b", p=1.0))
    assert caption(empty) == "nothing was guessed, 1 token emitted"


def test_the_svg_is_one_document_that_needs_nothing_else():
    text = svg(a_trace())
    root = ET.fromstring(text)
    assert not re.findall(
        r"(?:src|href|url|import|http)\b", text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    )
    name = "{http://www.w3.org/2000/svg}"
    boxes = [node.get("class") for node in root.iter(f"{name}g") if node.get("class")]
    for role, count in (("pending", 1), ("accepted", 1), ("added", 1), ("refused", 2), ("unreached", 1)):
        assert boxes.count(f"node {role}") == 1 + 2 * count, "in the legend, and twice"
    words = [node.text for node in root.iter(f"{name}text")]
    assert '<&">' in words and "\u00b7sat" in words and "q 25%" in words and "p 100%" in words
    assert "prefers-color-scheme:dark" in text
    width = float(root.get("width"))
    for node in root.iter(f"{name}rect"):
        if node.get("class") == "box":
            assert float(node.get("x")) + float(node.get("width")) < width


class Tags(html.parser.HTMLParser):
    """Tags that were opened and not closed, and all text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.seen = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_holds_every_pass_and_needs_nothing_else():
    text = page(a_trace())
    read = Tags(text)
    assert read.open == []
    assert [tag for tag, _ in read.seen].count("section") == 2
    assert [tag for tag, _ in read.seen].count("script") == 1, "the prompt's own is only text"
    assert "<script>" in read.words and '<&">' in read.words
    for tag, attributes in read.seen:
        assert tag not in ("link", "img", "iframe") and "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
    targets = {attributes["id"] for tag, attributes in read.seen if tag == "section"}
    links = {a["href"][1:] for tag, a in read.seen if tag == "a"}
    assert links == targets == {"pass1", "pass2"}


def outcome(kept, drawn=(0, 1, 0, 2), censored=False):
    """Three siblings, the first drawn twice."""
    law = Law.one_hot(0)
    draft = Draft((7, 8, 9), (ROOT, ROOT, ROOT), (Group(ROOT, Drawn.IID, drawn, 0),), (law,))
    emitted = tuple(draft.token_N[node] for node in kept)
    verdict = Verdict(kept, emitted if censored else (*emitted, 1), censored=censored)
    return Outcome(draft, Scored(law.prob_S[None], (0, 1)), verdict, (0,), (0,), 3)


def test_siblings_are_ranked_by_their_first_draw():
    found = Siblings("spec")
    for kept, censored in [((2,), False), ((0,), False), ((), False), ((1,), True), ((), True)]:
        found.add(outcome(kept, censored=censored))
    assert found.positions == 4, "a cut before the first guess tells nothing"
    assert found.acceptance == [0.25, 0.25, 0.25, *[0.0] * (MOST - 3)]
    found.add(outcome((0,), drawn=(2, 1, 0)))
    assert found.count_B[:3] == [1, 1, 2] and found.widest == 3


def test_siblings_of_a_real_run(engine):
    found = measure(engine, f"{ITSELF} tree=dynamic]", [PROMPT], params())
    assert found.acceptance == [1.0, *[0.0] * (MOST - 1)], "it always guesses itself right"
    assert found.spec == "draft_model[model=tiny tree=8 tree_size=8]"
    half = measure(engine, f"{ITSELF} layers=1]", [PROMPT], params(0.8, max_new_tokens=60))
    assert sum(half.acceptance[1:]) > 0 and sum(half.acceptance) < 1
    with pytest.raises(RequestError, match="no two siblings"):
        measure(engine, "prompt_lookup", [PROMPT], params())
