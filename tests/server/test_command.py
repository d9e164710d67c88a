"""``outpace serve``: what it refuses, in one line, before anything is loaded."""

import socket

import pytest

from outpace.cli.keys import read_keys
from outpace.cli.main import main
from outpace.cli.serve import check_origins, with_reference
from outpace.errors import RequestError
from outpace.serving.keyed import check_stores


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "70000"], "--port must be in 0 to 65535, got 70000"),
        (["--max-batch", "0"], "--max-batch must be at least 1, got 0"),
        (["--pages", "1"], "--pages must be at least 2, got 1"),
        (["--stored-pages", "-1"], "--stored-pages must be at least 0, got -1"),
        (["--timeout", "0"], "--timeout must be at least 1"),
        (["--drafter", "prompt_lokup"], "did you mean prompt_lookup"),
        (["--drafter", "x["], "cannot read method spec"),
        (["--api-key", ""], "--api-key must be printable"),
        (["--api-key-file", "nowhere.txt"], "cannot read --api-key-file nowhere.txt"),
        (["--host", "no such host"], "cannot listen on no such host port 0"),
        (["--drafter", "suffix[store=past]", "--api-key", "k"], "or add --share-across-keys"),
        (["--thinking-mark", "a"], "--thinking-mark is given two or three times, got 1"),
        (["--thinking-mark", "a", "--thinking-mark", ""], "thinking_marks must hold non-empty strings"),
        (["--thinking-mark", "a"] * 4, "--thinking-mark is given two or three times, got 4"),
        (["--drafter", "suffix[verifier=nope]"], "unknown verifier 'nope'"),
        *(
            (["--allowed-origin", origin], f"--allowed-origin {origin!r} is no origin; give scheme://host")
            for origin in (
                "foo",
                "https://a.org/",
                "https://A.org",
                "https://u@a.org",
                "http://a:b",
                "",
                "http://",
            )
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(capsys, arguments, says):
    code = main(["serve", "--model", "./nowhere", "--port", "0", *arguments])
    error = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and error.startswith("outpace: error: ") and says in error


def test_a_port_that_is_taken(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", "./nowhere", "--port", port, "-d", "none"]) == 2
    said = f"cannot listen on 127.0.0.1 port {port}: Address already in use; name another --port or --host"
    assert said in capsys.readouterr().err


def test_a_lossy_verifier_is_served_if_that_is_allowed(capsys, monkeypatch):
    served = []
    monkeypatch.setattr(
        "outpace.server.run.serve", lambda service, **_: served.append(service) or service.close()
    )
    lossy = ["serve", "--model", "tiny", "--port", "0", "-d", "prompt_lookup[verifier=typical]"]
    assert main(lossy) == 2 and "say --allow-lossy" in capsys.readouterr().err
    assert not served
    assert main([*lossy, "--allow-lossy"]) == 0 and len(served) == 1


def test_origins_that_browsers_send():
    check_origins(["*", "https://example.org", "http://localhost:3000", "http://[::1]:80", "app://a-b"])


def test_the_drafters_that_are_started():
    assert with_reference(["auto"]) == ["auto", "reference"]
    named = ["reference[source=request]", "none"]
    assert with_reference(named) == named


@pytest.mark.parametrize(
    ("spec", "refused"),
    [
        ("suffix[store=past]", True),
        ("suffix[policy=goodput store=past]", True),
        ("auto[drafters=prompt_lookup+suffix[min_match=2 store=past]]", True),
        ("cascade[levels=draft_model[model=tiny]+suffix[store=past]]", True),
        ("suffix[shared=true]", False),
        ("retrieval[store=texts]", False),
        ("auto[drafters=prompt_lookup+suffix]", False),
    ],
)
def test_a_store_that_no_key_would_use_is_refused(spec, refused):
    if not refused:
        check_stores([spec])
        return
    with pytest.raises(RequestError, match="nothing would be read from or written to store="):
        check_stores(["none", spec])


def test_keys_from_a_file(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text("first\nsecond\n")
    assert read_keys(["own"], file) == ["own", "first", "second"]
    file.write_bytes(b"\xef\xbb\xbffirst\r\n")
    assert read_keys([], file) == ["first"] and read_keys(["own"], None) == ["own"]


COMMANDS = (("serve", "--model", "./nowhere"), ("bench", "serve", "--url", "http://127.0.0.1:1"))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words[:2]))
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read --api-key-file {file}: No such file or directory"),
        ("a folder", "cannot read --api-key-file {file}: Is a directory"),
        (b"caf\xe9", "--api-key-file {file} is not UTF-8 text (byte 3); convert it first"),
        (b" \n\n", "--api-key-file {file} holds no key; write one per line"),
        (
            "good\ns\u00e9cret\n".encode(),
            "--api-key-file {file}: key 2 must be printable ASCII characters, one at least",
        ),
    ],
    ids=("missing", "folder", "latin", "empty", "letters"),
)
def test_wrong_key_files_are_one_line_in_both_commands(capsys, tmp_path, command, content, says):
    """Before a model is loaded or a server asked; and no key is shown."""
    file = tmp_path / "keys"
    if content == "a folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    assert main([*command, "--api-key-file", str(file)]) == 2
    error = capsys.readouterr().err
    assert error == f"outpace: error: {says.format(file=file)}\n"
