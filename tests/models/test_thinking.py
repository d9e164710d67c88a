"""Where thinking begins and ends, and how long it is: every short text, counted from scratch as well."""

from itertools import product

import pytest
import torch

from outpace.models.thinking import CLOSING, INSIDE, OUTSIDE, Place, Reader, Section, Thinking, make_section
from outpace.models.tiny import tiny_tokenizer
from tests.methods.grammar.toy import Words

SECTIONS = {
    "one token": Section((0,), (1,), (1,), 2),
    "of two": Section((0, 2), (1, 3), (1, 3), 3),
    "that overlaps": Section((0,), (1, 1, 2), (1, 1, 2), 2),
    "with a message": Section((0,), (1, 2), (3, 1, 2), 2),
    "none": Section((0,), (1,), (1,), 0),
}


def written(section, choices, begun=None):
    """The text that the rules leave of some choices."""
    place, out = begun or Place(INSIDE, 0), []
    place = section._settled(place)
    for token in choices:
        token = section.closing[place.match] if place.phase == CLOSING else token
        out.append(token)
        place = section.step(place, token)
    return tuple(out), place


def contents(section, text):
    """Tokens of thinking in a text that begins inside, found by looking for ends in all of it."""
    count, inside, i, since = 0, True, 0, []
    while i < len(text):
        mark = section.end if inside else section.start
        since.append(text[i])
        if tuple(since[-len(mark) :]) == mark:
            count += len(since) - len(mark) if inside else 0
            inside, since = not inside, []
        i += 1
    return count + (len(since) if inside else 0), inside


@pytest.mark.parametrize("name", [name for name in SECTIONS if name != "with a message"])
def test_no_text_thinks_longer_than_it_may(name):
    section, cut = SECTIONS[name], 0
    for choices in product(range(4), repeat=7):
        text, place = written(section, choices)
        count, inside = contents(section, text)
        # What has begun of an end is gone on with, so that it is no content.
        assert count - (place.match if inside else 0) <= section.budget, text
        assert (place.phase != OUTSIDE) == inside
        cut += text != choices
    assert cut > 0


@pytest.mark.parametrize("name", SECTIONS)
def test_steps_are_the_place_of_the_whole_path(name):
    section = SECTIONS[name]
    for text in product(range(4), repeat=6):
        place = section.begun((0, 3))
        assert section.walk(section.walk(place, text[:3]), text[3:]) == section.walk(place, text)


def test_what_is_written_where_the_budget_ends():
    assert written(SECTIONS["one token"], (3, 3, 3, 3))[0] == (3, 3, 1, 3)
    assert written(SECTIONS["of two"], (3, 3, 1, 0, 0))[0] == (3, 3, 1, 3, 0), "a begun end is gone on with"
    assert written(SECTIONS["of two"], (3, 1, 3, 2, 2))[0] == (3, 1, 3, 2, 2), "it ended by itself in time"
    assert written(SECTIONS["with a message"], (3, 1, 0, 0, 0, 0))[0] == (3, 1, 3, 1, 2, 0)
    assert written(SECTIONS["none"], (3, 3))[0] == (1, 3)
    assert written(SECTIONS["one token"], (3, 1, 0, 3, 3, 3))[0] == (3, 1, 0, 3, 1, 3), "over all sections"
    assert written(SECTIONS["none"], (1, 0, 3, 3))[0] == (1, 0, 1, 3), "one that begins again ends at once"
    assert written(SECTIONS["that overlaps"], (1, 1, 1, 2, 0))[0] == (1, 1, 2, 2, 0)


def test_where_an_answer_begins():
    section = SECTIONS["one token"]
    assert section.begun((3, 3)) == Place(OUTSIDE)
    assert section.begun((0, 3, 1, 3, 0)) == Place(INSIDE, 0)
    assert section.begun((3, 0, 3)) == Place(INSIDE, 1)
    assert section.begun((0, 3, 3, 3)) == Place(CLOSING, 3, 0), "what the template put there counts"
    assert section.begun((0, 3, 3, 3, 1)) == Place(OUTSIDE), "what the prompt ended is not the answer's"


def test_a_grammar_begins_behind_the_thinking():
    section = Section((3, 3), (1,), (1,), 2, again=False)
    for begun, before in ((Place(), (3, 3, 0, 1)), (Place(), ()), (Place(INSIDE), (2, 1))):
        fresh = Words().begin()
        matcher = Thinking(section, begun, 4, Words()).begin()
        for i, token in enumerate((*before, 2, 3, 0, 1)):
            at = i - len(before)
            if at >= 0:
                allowed = matcher.allowed(())
                wanted = fresh.allowed(())
                extra = {3} if begun.phase == OUTSIDE and not before and at == 0 else set()
                assert set(allowed.nonzero()[:, 0].tolist()) == set(wanted.nonzero()[:, 0].tolist()) | extra
                assert at == 0 or tuple(matcher.expects(())) == fresh.expects(())
                fresh.advance((token,))
            matcher.advance((token,))
    inside = Thinking(section, Place(INSIDE), 4, Words()).begin()
    assert inside.allowed(()) is None and inside.allowed((0,)) is None
    assert inside.allowed((0, 0)).tolist() == [False, True, False, False]
    assert torch.equal(inside.allowed((0, 0, 1)), Words().begin().allowed(())), "in the same draft"
    assert inside.expects((0, 0)) == (1,)
    assert inside.allowed(()) is None, "paths leave no trace"
    begun = Thinking(section, Place(), 4, Words()).begin()
    assert begun.allowed((3,)).nonzero()[:, 0].tolist() == [3], "a start that no word begins with"


def parted(section, begun, tokenizer, ids, pushes):
    """What a reader gives for a text in portions: the thinking, and what is said."""
    reader, stream, out = Reader(section, begun, tokenizer), tokenizer.text_stream(), {True: "", False: ""}
    for lo in range(0, len(ids), pushes):
        part = ids[lo : lo + pushes]
        for thought, text in reader.push(part, stream.push(part)):
            out[thought] += text
    for thought, text in reader.push((), stream.flush()) + reader.close():
        out[thought] += text
    return out[True], out[False], reader


class Named:
    name, tokenizer, vocab_size = "tiny", tiny_tokenizer(), tiny_tokenizer().vocab_size


@pytest.mark.parametrize("pushes", [1, 2, 3, 50])
def test_a_text_is_parted(pushes):
    tokenizer = tiny_tokenizer()

    def part(text, budget=None, marks=("<t>", "</t>"), prompt=""):
        section = make_section(Named, marks, budget)
        ids = [t for piece in text for t in tokenizer.encode(piece, special=False)]
        begun = section.begun(tokenizer.encode(prompt, special=False))
        return parted(section, begun, tokenizer, ids, pushes)

    thought, said, reader = part(["a ", "<t>", "hm \u00e4", "</t>", " b"])
    assert (thought, said) == ("hm \u00e4", "a  b") and not reader.cut
    assert reader.reasoning_tokens == len(tokenizer.encode("hm \u00e4", special=False))
    thought, said, _ = part(["x</", "t", "y", "</t>", "z"], prompt="<t>")
    assert (thought, said) == ("x</ty", "z"), "an end that broke off"
    assert part(["no", " marks"])[:2] == ("", "no marks")
    assert part(["<t>", "cut</"])[:2] == ("cut</", "")
    thought, said, reader = part(["xyz", "</t>", "w"], budget=3, prompt="<t>")
    assert (thought, said, reader.cut, reader.reasoning_tokens) == ("xyz", "w", True, 3)
    message = ("<t>", "</t>", "so:")
    thought, said, reader = part(["xyz", "so:", "</t>", "w"], budget=3, prompt="<t>", marks=message)
    assert (thought, said, reader.reasoning_tokens) == ("xyzso:", "w", 3)
