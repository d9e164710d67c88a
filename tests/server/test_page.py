"""The page: whole, from one place, allowed to do no more than it needs, and used as people do."""

import json
import re
from importlib import resources

import httpx
import pytest

from outpace import Engine
from outpace.server.app import create_app
from outpace.server.limits import Limits
from outpace.serving.service import Service
from tests.server.browser import FOUND, Browser
from tests.server.test_wire import listening

FOLDER = resources.files("outpace.server").joinpath("static")
FILES = {
    name: FOLDER.joinpath(name).read_text(encoding="utf-8") for name in ("chat.html", "chat.js", "chat.css")
}
DRAFTER = "early_exit[layer=1 tree=3x2x1]"
MARKUP = "<img src=x onerror=alert(1)><b>ab</b>"
needs_browser = pytest.mark.skipif(
    FOUND is None, reason="no browser: install Chromium or Chrome to run the page in one"
)


def test_it_comes_with_everything_it_names(client):
    page = client.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.text == FILES["chat.html"]
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    own = [name for name in named if not name.startswith("data:")]
    assert sorted(own) == ["static/chat.css", "static/chat.js"]
    for name in own:
        answer = client.get(f"/{name}")
        assert answer.text == FILES[name.removeprefix("static/")]
        assert answer.headers["x-content-type-options"] == "nosniff"
        kind = {"css": "text/css", "js": "text/javascript"}[name.rpartition(".")[2]]
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_elsewhere(name):
    text = FILES[name].replace("http://www.w3.org/2000/svg", "")  # a name, fetched by nobody
    assert "//" not in re.sub(r"(^|\s)// .*", "", text) and "@import" not in text
    for danger in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "localStorage",
        "document.cookie",
        " style=",
        " onclick=",
    ):
        assert danger not in text  # texts of models are no markup, and keys are not kept
    assert text.isascii()


def test_script_and_page_agree():
    ids = set(re.findall(r'id="(\w+)"', FILES["chat.html"]))
    used = set(re.findall(r'\bat\("(\w+)"\)', FILES["chat.js"]))
    assert used <= ids and len(used) > 20


def test_the_script_reads_what_the_server_writes(client):
    body = {
        "messages": [{"role": "user", "content": "ab"}],
        "stream": True,
        "max_tokens": 64,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "speculation": {"drafter": "suffix", "trace": True},
    }
    text = client.post("/v1/chat/completions", body).text
    read = set(re.findall(r"\b(?:metrics|usage|trace|draft|chunk)\.(\w+)", FILES["chat.js"]))
    assert len(read) > 15
    for key in read - {"error"}:
        assert f'"{key}":' in text, key
    figures = client.get("/metrics").text
    for name in re.findall(r'"(num_\w+|spec_decode_\w+)"', FILES["chat.js"]):
        assert re.search(rf"^outpace:(spec_decode_)?{name}(_total)?{{", figures, re.MULTILINE), name


@pytest.fixture(scope="module")
def address(engine):
    with Service(Engine(engine.target, "none"), drafters=(DRAFTER, "suffix")) as service:
        limits = Limits(grace_seconds=2)
        app = create_app(service, name="tiny", keys=["let me in"], limits=limits)
        with listening(app, limits) as url:
            yield f"{url}/"


@pytest.fixture(scope="module")
def browser(address, tmp_path_factory):
    """A page that was let in and has an answer; the tests go on where the one before stopped."""
    page = Browser(tmp_path_factory.mktemp("browser"))
    try:
        page.open(address)
        page.until("!document.querySelector('#entry').hidden")  # it asks for the key
        page.type("#key", "let me in")
        page.press("Enter", windowsVirtualKeyCode=13, text="\r")
        page.until("document.querySelector('#model').textContent === 'tiny'")
        (refused,) = page.complaints()  # the browser's own line about the request without a key
        assert "401" in refused
        page.events.clear()
        page.run("document.querySelector('#length').value = 40")
        page.type("#text", MARKUP)
        page.press("Enter", windowsVirtualKeyCode=13, text="\r")
        page.until("document.querySelector('.again:not([hidden])')")
        yield page
    finally:
        page.close()


def traced(address):
    """The trace of the answer that the page got."""
    body = {
        "messages": [{"role": "user", "content": MARKUP}],
        "max_tokens": 40,
        "temperature": 0,
        "stream": True,
        "speculation": {"drafter": DRAFTER, "trace": True},
    }
    answer = httpx.post(
        f"{address}v1/chat/completions", json=body, headers={"Authorization": "Bearer let me in"}
    )
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    return [chunk["outpace"] for chunk in chunks if "outpace" in chunk]


@needs_browser
def test_tokens_are_marked_by_who_wrote_them(browser, address):
    traces = traced(address)
    shown = browser.run(
        "[...document.querySelectorAll('.pass')].map((pass) => "
        "[...pass.children].map((one) => [one.textContent, one.dataset.by]))"
    )
    assert shown == [[[t["text"], t["by"]] for t in one["tokens"]] for one in traces]
    looks = browser.run(
        "[...document.querySelectorAll('.token[data-by]')].map((one) => {"
        "const s = getComputedStyle(one); return [one.dataset.by, "
        "s.backgroundColor, s.textDecorationStyle]; })"
    )
    by = {
        name: {(colour, line) for who, colour, line in looks if who == name} for name in (DRAFTER, "target")
    }
    ((accepted, solid),), ((emitted, dotted),) = by.values()
    assert accepted != emitted and (solid, dotted) == ("solid", "dotted")
    assert browser.run("[...document.querySelectorAll('#legend li')].map((one) => one.title)") == [
        DRAFTER,
        "",
    ]
    # What was said is text, whatever it looks like.
    assert browser.run("document.querySelector('.turn.user').textContent") == MARKUP
    browser.run(
        "(() => { const a = new Answer({ speculation: { drafter: '<i>' } }); a.take({"
        "choices: [{ delta: { content: '<b>' } }], outpace: { tokens: [{ text: '<b>', "
        "by: '<i>' }], draft: { by: '<i>', drafted: 1, pending: '<u>', tokens: ['<b>'], "
        "parents: [-1], kept: [0], q: [1], p: [0.5], added: null } } });"
        "show(a.words.firstChild); hide(true); a.box.remove(); writers.delete('<i>'); })()"
    )
    assert browser.run("document.querySelectorAll('img, #talk b, #legend i, #tree b').length") == 0


@needs_browser
def test_the_tree_of_a_pass_appears_on_hover_and_on_focus(browser, address, tmp_path):
    traces = traced(address)
    number = max(range(1, len(traces)), key=lambda n: len(traces[n]["draft"]["kept"]))
    draft = traces[number]["draft"]
    assert draft["kept"] and len(draft["tokens"]) > len(draft["kept"])
    element = f"document.querySelectorAll('.pass')[{number}]"
    hidden = "document.querySelector('#tree').hidden"
    assert browser.run(hidden)
    browser.point(*browser.at(f"[...{element}.children].find((one) => one.textContent)"))
    browser.until(f"!{hidden}")
    for role, wanted in (
        ("accepted", len(draft["kept"])),
        ("added", draft["added"] is not None),
        ("pending", 1),
        ("node", len(draft["tokens"]) + 2),
    ):
        assert browser.run(f"document.querySelectorAll('#tree svg .{role}:is(g)').length") == wanted
    said = browser.run("document.querySelector('#what').textContent")
    assert f"{len(draft['kept'])} of {draft['drafted']} guesses accepted" in said
    browser.shoot(tmp_path / "tree.png")
    assert (tmp_path / "tree.png").stat().st_size > 10_000
    inside = browser.run(
        "(({ left, top, right, bottom }) => [left, top, right, bottom])("
        "document.querySelector('#tree').getBoundingClientRect())"
    )
    assert min(inside) >= 0 and inside[2] <= 1200 and inside[3] <= 800
    browser.point(5, 5)
    browser.until(hidden)
    # The same with keys alone: one stop for Tab, arrows within, Enter pins, Escape closes.
    assert browser.run("document.querySelectorAll('.pass[tabindex=\"0\"]').length") == 1
    browser.run("document.querySelector('.pass[tabindex=\"0\"]').focus()")
    browser.press("ArrowRight")
    assert browser.run("document.activeElement === document.querySelectorAll('.pass')[1]")
    assert not browser.run(hidden)
    browser.press("Enter", windowsVirtualKeyCode=13)
    browser.point(5, 5)
    assert browser.run("!document.querySelector('#tree').hidden && tree.pinned")
    browser.press("Escape")
    assert browser.run(hidden)


@needs_browser
def test_a_plain_run_is_compared_and_figures_are_shown(browser):
    assert "predicted" in browser.run("document.querySelector('#plain').textContent")
    browser.click("document.querySelector('.again')")
    browser.until("document.querySelector('.compared .same, .compared .differ')")
    said = browser.run("document.querySelector('.compared').textContent")
    assert "the texts are equal (40 tokens)" in said and said.count("tokens/s") == 2
    assert "measured" in browser.run("document.querySelector('#plain').textContent")
    rows = "[...document.querySelector('{}').tBodies[0].rows].map((row) => row.cells[0].firstChild.title)"
    assert browser.run(rows.format("#mine")) == [DRAFTER, "none"]
    browser.until(f"{rows.format('#all')}.length")
    assert browser.run(rows.format("#all")) == [DRAFTER]
    # A text that is not equal is called so.
    assert browser.run("difference('abc', 'abd')") == "from character 3 on"
    # Sixteen depths beside ordinary counts fit into the table.
    browser.run(
        "rows('all', [[named('prompt_lookup'), 2500, share(1830, 4443), '0.73', columns(Array(16).fill(1))]])"
    )
    assert browser.run("document.querySelector('#all').offsetWidth") <= browser.run(
        "document.querySelector('#all').parentNode.clientWidth"
    )


@needs_browser
def test_it_fits_narrow_screens_and_both_schemes(browser):
    seen = set()
    for width, dark in ((390, False), (390, True), (1200, True)):
        browser.size(width, 800)
        browser.dark(dark)
        assert browser.run("document.documentElement.scrollWidth") <= width
        seen.add(browser.run("getComputedStyle(document.body).backgroundColor"))
        if width == 390:
            browser.click("document.querySelector('#more')")
            assert browser.run("document.querySelector('#side').offsetWidth") == width
            browser.click("document.querySelector('#more')")
            assert browser.run("document.querySelector('#side').offsetWidth") == 0
    browser.size(1200, 800)
    browser.dark(False)
    assert len(seen) == 2


MARKDOWN = """# A heading

Some *words*, **strong ones**, `code` and [a link](https://example.org/a?b=c), but no <b>markup</b>.

- one
- two
  - deeper
1. first

> said

```python
def f(x):
    return "**x**"
```
The end. [bad](javascript:alert(1))"""


@needs_browser
def test_markdown_is_shown_as_it_is_meant(browser, tmp_path):
    said = json.dumps(MARKDOWN)
    browser.run(f"(() => {{ window.shown = new Answer(null); shown.recall({said}); }})()")
    inside = "[...shown.page.querySelectorAll({})].map((one) => one.textContent)"
    for where, texts in (
        ("h3", ["A heading"]),
        ("strong", ["strong ones"]),
        ("em", ["words"]),
        ("p code", ["code"]),
        ("a", ["a link"]),
        ("li li", ["deeper"]),
        ("ol > li", ["first"]),
        ("blockquote", ["said"]),
        ("pre", ['def f(x):\n    return "**x**"']),
        (".codehead span", ["python"]),
    ):
        assert browser.run(inside.format(json.dumps(where))) == texts, where
    assert browser.run("shown.page.querySelector('a').href") == "https://example.org/a?b=c"
    assert browser.run("shown.page.querySelectorAll('b, script, img').length") == 0
    assert "<b>markup</b>" in browser.run("shown.page.textContent")
    browser.shoot(tmp_path / "markdown.png")
    browser.click("shown.page.querySelector('.copy')")
    browser.until("['Copied', 'Not copied'].includes(shown.page.querySelector('.copy').textContent)")
    browser.run("shown.box.remove(); mayRepeat()")


TABLE = r"""Before | it:
| name | price | |
|:--|---:|:-:|
| `a\|b` | **3** | x |
| only |
| <b>c</b> | 4 | y | too many |
After it.

not | a table
--- | --- | ---

a | b
- | -
1 | 2"""


@needs_browser
def test_tables_are_shown_as_tables(browser, tmp_path):
    browser.run(f"(() => {{ window.shown = new Answer(null); shown.recall({json.dumps(TABLE)}); }})()")
    rows = (
        "[...shown.page.querySelectorAll('table')].map((one) => [...one.rows].map((row) => "
        "[...row.cells].map((cell) => [cell.tagName, cell.className, cell.textContent].join(' '))))"
    )
    first, second = browser.run(rows)
    assert first == [
        ["TH  name", "TH right price", "TH middle "],
        ["TD  a|b", "TD right 3", "TD middle x"],
        ["TD  only", "TD right ", "TD middle "],
        ["TD  <b>c</b>", "TD right 4", "TD middle y"],
        ["TD  After it.", "TD right ", "TD middle "],
    ]
    assert second == [["TH  a", "TH  b"], ["TD  1", "TD  2"]]
    assert browser.run("shown.page.querySelectorAll('td code, td strong').length") == 2
    assert "not | a table" in browser.run("shown.page.textContent")
    assert browser.run("getComputedStyle(shown.page.querySelector('td.right')).textAlign") == "right"
    browser.shoot(tmp_path / "table.png")
    browser.run("shown.box.remove(); mayRepeat()")


@needs_browser
def test_a_click_beside_a_tree_is_not_swallowed(browser):
    """The tree that appears on hover lets clicks through to what is below it."""
    browser.point(*browser.at("document.querySelectorAll('.pass')[1]"))
    browser.until("!document.querySelector('#tree').hidden")
    box = "document.querySelector('#tree').getBoundingClientRect()"
    under = f"document.elementFromPoint({box}.x + {box}.width / 2, {box}.y + {box}.height / 2)"
    assert browser.run(f"!{under}?.closest('#tree')")
    browser.click("document.querySelectorAll('.pass')[1]")
    assert browser.run("tree.pinned") and browser.run(f"Boolean({under}?.closest('#tree'))")
    browser.press("Escape")
    browser.point(5, 5)


@needs_browser
def test_an_answer_is_made_anew_and_all_survives_a_reload(browser, address):
    turns = "[...document.querySelectorAll('.turn')].map((one) => one.className)"
    before = browser.run("document.querySelector('.turn.assistant .words').textContent")
    browser.run("document.querySelector('#temperature').value = 2")
    browser.click("[...document.querySelectorAll('.repeat')].at(-1)")
    browser.until("!running && document.querySelector('.repeat:not([hidden]):not([disabled])')")
    after = browser.run("document.querySelector('.turn.assistant .words').textContent")
    assert browser.run(turns) == ["turn user", "turn assistant"] and after != before
    kept = browser.run("JSON.stringify(messages)")
    browser.call("Page.reload")
    browser.until("document.readyState === 'complete' && document.querySelectorAll('.turn').length === 2")
    assert browser.run("JSON.stringify(messages)") == kept
    assert browser.run("document.querySelector('.turn.user').textContent") == MARKUP
    browser.until("!document.querySelector('#entry').hidden")  # the key was not kept
    browser.type("#key", "let me in")
    browser.press("Enter", windowsVirtualKeyCode=13, text="\r")
    browser.until("document.querySelector('#model').textContent === 'tiny'")
    browser.events[:] = [one for one in browser.events if "401" not in json.dumps(one)]
    browser.click("document.querySelector('.repeat')")  # and the conversation goes on
    browser.until("!running && document.querySelector('.again:not([hidden])')")
    assert browser.run(turns) == ["turn user", "turn assistant"]


@needs_browser
def test_it_complains_of_nothing_and_asks_nobody_else(browser, address):
    browser.run("0")  # what was told before has been read
    assert browser.complaints() == []
    assert len(browser.requests()) >= 2
    assert all(url.startswith(address) for url in browser.requests())
    assert browser.run("localStorage.length + document.cookie.length") == 0
    kept = browser.run("JSON.stringify(sessionStorage)")  # the conversation, in this tab alone
    assert "let me in" not in kept and browser.run("sessionStorage.length") == 1
