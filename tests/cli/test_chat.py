import signal

import pytest

from outpace import Engine
from outpace.cli import show
from outpace.cli.chat import Talk
from outpace.models.tiny import TableTarget

CHAT = ("chat", "--model", "tiny", "--max-new-tokens", "6", "--ignore-eos")


def counts(stats):
    """Prompt tokens kept and read, as /stats tells them."""
    words = stats[: stats.index(" prompt tokens")].split()
    return int(words[-3]), int(words[-1])


def test_a_conversation_through_a_pipe_keeps_its_prefix(outpace):
    ran = outpace(*CHAT, stdin=b"hello there\n\n  \nand you?\n/stats\n")
    assert ran.code == 0
    stats = ran.err.splitlines()[-1]
    assert "2 turns, 12 tokens" in stats and "drafter auto" in stats
    kept, read = counts(stats)
    assert 0 < kept < read


def test_reset_begins_anew_and_quit_leaves(outpace):
    first = outpace(*CHAT, stdin=b"hello there\n").out
    ran = outpace(*CHAT, stdin=b"hello there\n/reset\nhello there\n/stats\n/quit\nnever read\n")
    assert ran.code == 0 and ran.out == first * 2
    assert "1 turn, 6 tokens" in ran.err and counts(ran.err.splitlines()[-1])[0] == 0
    nothing = outpace(*CHAT, stdin=b"/stats\n/help\n")
    assert nothing.out == "" and "nothing said yet" in nothing.err and "/reset" in nothing.err


def test_a_model_without_a_tokenizer_is_refused_before_the_first_message(outpace, monkeypatch):
    engine = Engine(TableTarget.random(seed=0), drafter="none")
    monkeypatch.setattr(Engine, "load", lambda *given, **settings: engine)
    ran = outpace(*CHAT)
    assert ran.code == 2 and "a chat needs a tokenizer, and " in ran.err and ran.err.count("\n") == 1


def test_a_line_that_is_no_text_is_refused(outpace):
    ran = outpace(*CHAT, stdin=b"caf\xe9\n")
    assert ran.code == 2 and ran.out == ""
    assert ran.err.splitlines()[-1] == (
        "outpace: error: the message is not UTF-8 text (byte 3); convert it first"
    )


def test_an_unknown_command_is_no_message(outpace):
    ran = outpace(*CHAT, stdin=b"/rest\n")
    assert ran.code == 2 and ran.out == ""
    assert "unknown command '/rest'; did you mean /reset?" in ran.err


@pytest.fixture
def talk():
    from outpace import Engine, SamplingParams

    engine = Engine.load("tiny")
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    one = Talk(engine, params, None, False)
    yield one
    one.close()


def test_ctrl_c_stops_an_answer_and_the_talk_goes_on(talk, monkeypatch, capsys):
    said = []

    def write(text):
        if not said:
            signal.raise_signal(signal.SIGINT)
        said.append(text)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(show, "write", write)
    talk.take("hello there")
    assert said[-1] == "\n" and len(said) < 20
    assert "stopped; this turn is not kept" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    talk.take("hello there")
    talk.take("/stats")
    assert "1 turn, 200 tokens" in capsys.readouterr().err


def test_ctrl_c_before_the_first_token_stops_no_more_than_the_answer(talk, monkeypatch, capsys):
    engine = talk._engine
    request = engine.request

    def interrupted(*args, **settings):
        signal.raise_signal(signal.SIGINT)
        return request(*args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "request", interrupted)
        talk.take("hello there")
    ran = capsys.readouterr()
    assert ran.out == "\n" and "stopped; this turn is not kept" in ran.err
    talk.take("hello there")
    talk.take("/stats")
    assert "1 turn, 200 tokens" in capsys.readouterr().err


def test_a_second_ctrl_c_is_not_held_back(talk, monkeypatch):
    def write(text):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(show, "write", write)
    with pytest.raises(KeyboardInterrupt):
        talk.take("hello there")
