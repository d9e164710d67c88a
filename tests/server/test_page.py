"""The page: whole, from one place, and allowed to do no more than it needs."""

import re
from importlib import resources

import pytest

FOLDER = resources.files("outpace.server").joinpath("static")
FILES = {name: FOLDER.joinpath(name).read_text(encoding="utf-8")
         for name in ("chat.html", "chat.js", "chat.css")}


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
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_elsewhere(name):
    text = FILES[name]
    assert "//" not in re.sub(r"(^|\s)// .*", "", text) and "@import" not in text
    assert "innerHTML" not in text and "eval(" not in text  # texts of models are no markup
    assert text.isascii()


def test_script_and_page_agree():
    ids = set(re.findall(r'id="(\w+)"', FILES["chat.html"]))
    used = set(re.findall(r'\bat\("(\w+)"\)', FILES["chat.js"]))
    assert used <= ids and len(used) > 10
    classes = set(re.findall(r"\.([a-z]+)[ ,.{:]", FILES["chat.css"]))
    assert {"accepted", "emitted", "coloured", "turn"} <= classes


def test_the_script_reads_what_the_server_writes(client):
    body = {"messages": [{"role": "user", "content": "ab"}], "stream": True,
            "max_tokens": 64, "ignore_eos": True,
            "stream_options": {"include_usage": True}, "temperature": 0,
            "speculation": {"drafter": "suffix", "detailed": True}}
    text = client.post("/v1/chat/completions", body).text
    for key in set(re.findall(r"(?:metrics|usage|token|choice|one)\.(\w+)", FILES["chat.js"])):
        assert f'"{key}":' in text, key
