"""Where a text ends, however tokens and steps cut it."""

import codecs
import random

import pytest

from outpace.params import SamplingParams
from outpace.stops import StopChecker

EOS = 1000


class Pieces:
    """A stream over a table of texts; token i is the i-th of them."""

    def __init__(self, pieces):
        self.pieces = pieces

    def push(self, ids):
        return "".join(self.pieces[i] for i in ids)

    def flush(self):
        return ""


class Bytes:
    """A stream over bytes: token i is byte i, and half a character waits for the rest."""

    def __init__(self):
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids):
        return self.decoder.decode(bytes(ids))

    def flush(self):
        return self.decoder.decode(b"", final=True)


def run(checker, tokens, steps):
    """Feed tokens in steps of the given sizes: (tokens kept, what a reader saw after each)."""
    kept, seen, start = 0, [], 0
    for size in steps:
        length, reason = checker.cut(tokens[start : start + size])
        kept += length
        seen.append(checker.take())
        assert reason == checker.reason
        if reason:
            break
        assert length == len(tokens[start : start + size])
        start += size
    return kept, seen


def by_characters(pieces, stop, include, min_tokens):
    """One character at a time: (tokens kept, text), or None where nothing stops it."""
    text = ""
    for kept, piece in enumerate(pieces, 1):
        for char in piece:
            text += char
            done = [s for s in stop if text.endswith(s)]
            if done and kept > min_tokens:
                return kept, text if include else text[: -max(map(len, done))]
    return None


def split(text, rng, most):
    """Cut into pieces of 0 to ``most`` characters."""
    pieces = []
    while text:
        size = rng.randint(0, most)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def test_stop_strings_across_all_borders():
    """Random texts, stops, tokens and steps against a search by single characters."""
    found = spans = 0
    for seed in range(1500):
        rng = random.Random(seed)
        stop = tuple("".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3)))
        pieces = split("".join(rng.choices("abc", [4, 4, 1], k=24)), rng, 4)
        params = SamplingParams(stop=stop, include_stop=rng.random() < 0.3, min_tokens=rng.choice([0, 0, 5]))
        checker = StopChecker(params, frozenset(), Pieces(pieces))
        tokens = list(range(len(pieces)))
        kept, seen = run(checker, tokens, [rng.randint(1, 4) for _ in tokens])
        want = by_characters(pieces, stop, params.include_stop, params.min_tokens)
        if want is None:
            assert checker.reason is None and kept == len(tokens)
            checker.close()
            assert checker.reason == "length" and checker.text == "".join(pieces)
        else:
            assert checker.reason == "stop"
            assert (kept, checker.text) == want, (stop, pieces)
            found += 1
            spans += not any(s in piece for s in stop for piece in pieces)
        # A reader never has to take anything back.
        assert checker.text == "".join(seen) + checker.take()
    assert found > 500 and spans > 100  # looking into single tokens would miss these


@pytest.mark.parametrize("steps", [[6], [1] * 6, [2, 2, 2], [3, 3], [5, 1]])
def test_stop_string_may_begin_within_a_token(steps):
    pieces = ["Hel", "lo #", "#", "# bye", " and more"]
    checker = StopChecker(SamplingParams(stop=("###",)), frozenset(), Pieces(pieces))
    kept, seen = run(checker, [0, 1, 2, 3, 4, 4], steps)
    assert (kept, checker.text, checker.reason) == (4, "Hello ", "stop")
    assert "".join(seen) == "Hello "  # and never a "#"


def test_what_turns_out_harmless_is_released():
    checker = StopChecker(SamplingParams(stop=("END", "\n\n")), frozenset(), Pieces(["xE", "N", "x"]))
    shown = []
    for token in (0, 1, 2):
        checker.cut([token])
        shown.append(checker.take())
    assert shown == ["x", "", "ENx"]
    free = StopChecker(SamplingParams(), frozenset(), Pieces(["E"]))
    free.cut([0])
    assert free.take() == "E"  # without stop strings nothing is held back


def test_characters_of_several_tokens():
    data = "caf\u00e9 \u2713 end".encode()
    checker = StopChecker(SamplingParams(stop=("\u2713",)), frozenset(), Bytes())
    length, reason = checker.cut(list(data))
    assert (length, reason, checker.text) == (len("caf\u00e9 \u2713".encode()), "stop", "caf\u00e9 ")
    broken = StopChecker(SamplingParams(max_new_tokens=2), frozenset(), Bytes())
    assert broken.cut([65, 0xE2, 0x9C]) == (2, "length")
    assert broken.text == "A\ufffd"  # what waits in the stream is not lost
    late = StopChecker(SamplingParams(max_new_tokens=2, stop=("\ufffd",)), frozenset(), Bytes())
    assert late.cut([65, 0xE2]) == (2, "stop")
    assert late.text == "A"


@pytest.mark.parametrize(
    ("settings", "tokens", "length", "reason", "text"),
    [
        ({}, [0, EOS, 1], 2, "stop", "a"),
        ({"ignore_eos": True}, [0, EOS, 1], 3, None, "aeb"),
        ({"stop_token_ids": {1}}, [0, 1, 2], 2, "stop", "a"),
        ({"stop_token_ids": {1}, "include_stop": True}, [0, 1, 2], 2, "stop", "ab"),
        ({"include_stop": True}, [0, EOS], 2, "stop", "a"),
        ({"stop_token_ids": {1}, "ignore_eos": True}, [EOS, 1], 2, "stop", "e"),
        ({"max_new_tokens": 2}, [0, 1, 2], 2, "length", "ab"),
        ({"max_new_tokens": 2}, [0, EOS], 2, "stop", "a"),
        ({"max_new_tokens": 2, "stop": ("b",)}, [0, 1], 2, "stop", "a"),
        ({"max_new_tokens": 2, "stop": ("bc",)}, [0, 1, 2], 2, "length", "ab"),
        ({"stop": ("ab",)}, [0, EOS], 2, "stop", "a"),
        ({"min_tokens": 2, "stop": ("b",)}, [0, 1, 2, 1], 4, "stop", "abc"),
        ({"min_tokens": 2, "stop": ("bc",)}, [0, 1, 2, 1], 3, "stop", "a"),
        ({"stop_when": lambda answer: answer == [0, 1]}, [0, 1, 2], 2, "stop", "ab"),
        ({"stop_when": lambda answer: True, "min_tokens": 2}, [0, 1, 2, 1], 3, "stop", "abc"),
        ({"stop": ("c", "bc", "abcd")}, [0, 1, 2, 2], 3, "stop", "a"),
    ],
)
def test_reasons(settings, tokens, length, reason, text):
    pieces = {0: "a", 1: "b", 2: "c", EOS: "e"}
    for size in (1, len(tokens)):
        checker = StopChecker(SamplingParams(**settings), frozenset({EOS}), Pieces(pieces))
        kept, _ = run(checker, tokens, [size] * len(tokens))
        assert (kept, checker.reason) == (length, reason)
        assert checker.generated == length
        checker.close()
        assert checker.text == text


def test_without_a_tokenizer():
    checker = StopChecker(SamplingParams(max_new_tokens=5), frozenset({EOS}))
    assert checker.cut([1, 2]) == (2, None)
    assert checker.cut([3, EOS, 4]) == (2, "stop")
    assert checker.text == checker.take() == ""
    with pytest.raises(AssertionError, match="no text"):
        StopChecker(SamplingParams(stop=("x",)), frozenset())
