"""What is in vocabularies, what they make of text, and what two of them share."""

import json

import pytest

from outpace import Engine, RequestError
from outpace.analysis.tokens.languages import SAMPLE, by_language, read_texts
from outpace.analysis.tokens.vocabulary import (
    KINDS,
    Vocabulary,
    assigned,
    kind_of,
    look_into,
    read_tokenizer,
    script_of,
)
from outpace.cli.analyze_tokenizers import show_vocabularies
from outpace.methods.cross_vocabulary import pair
from outpace.methods.cross_vocabulary.pair import Answer, Kept, expected, overlap, predict
from outpace.models.load import load_target
from outpace.models.tiny import tiny, tiny_tokenizer
from outpace.models.zoo import open_checkpoint
from outpace.params import SamplingParams
from tests.methods.cross_vocabulary.strangers import write_stranger


@pytest.mark.parametrize(
    ("spelled", "kind", "script"),
    [
        (b"a", "letter", "LATIN"),
        ("\u0436".encode(), "letter", "CYRILLIC"),
        ("\u6c34".encode(), "letter", "CJK"),
        (b"7", "sign", ""),
        (b" ", "sign", ""),
        (b"\xe6", "byte", ""),
        (b"\xe6\xb0", "split", ""),
        (b" the", "word", "LATIN"),
        (b" ", "sign", ""),
        (b" 12", "spaced", ""),
        (b"  ", "spaced", ""),
        (b"ing", "part", "LATIN"),
        ("a\u0436".encode(), "other", ""),
        (b"());", "other", ""),
        (b"<|im_end|>", "control", ""),
        (b"<unused5>", "control", ""),
        (b"[MASK]", "control", ""),
        (b"", "control", ""),
        (b"<br>", "other", ""),
        (b"</table>", "other", ""),
        (b"[0]", "control", ""),
    ],
)
def test_every_token_has_one_kind(spelled, kind, script):
    assert kind_of(spelled) == (kind, script)


def test_marks_belong_to_their_letter():
    assert script_of("e\u0301t") == "LATIN", "a combining accent"
    assert script_of("\u0928\u093e\u0935") == "DEVANAGARI", "a vowel sign"
    assert script_of("a1") == "" == script_of("") == script_of("\u0301")


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m"])
def test_kinds_part_the_vocabulary(name):
    tokenizer = read_tokenizer(name)
    found = look_into(name, tokenizer)
    assert found.size == tokenizer.vocab_size == sum(found.kinds.values()) and set(found.kinds) == set(KINDS)
    assert sum(found.scripts.values()) == sum(found.kinds[kind] for kind in ("letter", "word", "part"))
    assert all(count <= assigned()[script] for script, count in found.letters.items())
    special = {tokenizer.token_bytes(token).decode() for token in tokenizer.special_ids}
    assert special <= set(found.control) and found.letters["LATIN"] >= 52


def test_the_sample_says_the_same_in_many_languages():
    texts = read_texts([])
    assert len(texts) == 28 and all(40 < len(text) < 300 for text in texts.values())
    assert len(SAMPLE.read_text(encoding="utf-8").splitlines()) == 28
    scripts = {script_of("".join(c for c in text if c.isalpha())) for text in texts.values()}
    assert {"LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "THAI", "HANGUL", "DEVANAGARI"} <= scripts


def test_tokens_are_counted_by_language():
    made = {"tiny": tiny_tokenizer(), "smol": read_tokenizer("smollm2-135m")}
    rows = by_language(made, read_texts([]))
    assert all(row.exact["tiny"] and row.exact["smol"] for row in rows)
    by_name = {row.language: row for row in rows}
    thai = by_name["Thai"]
    assert thai.tokens["tiny"] == thai.bytes, "bytes alone"
    assert by_name["English"].per_character("smol") < 0.3 < by_name["Thai"].per_character("smol")


def test_texts_come_from_files(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.jsonl").write_text(
        '{"language": "x", "text": "one"}\n\n{"language": "x", "text": "two"}\n'
    )
    assert read_texts([tmp_path / "a.txt", tmp_path / "b.jsonl"]) == {"a": "some text", "x": "onetwo"}
    for content, words in (
        ("{", "line 1"),
        ("[1]", "line 1"),
        ('{"text": 3}', "must be strings"),
        ('{"text": ""}', "is empty"),
        ("", "no text"),
    ):
        (tmp_path / "c.jsonl").write_text(content)
        with pytest.raises(RequestError, match=words):
            read_texts([tmp_path / "c.jsonl"])


def test_a_vocabulary_shares_all_with_itself():
    own = tiny_tokenizer()
    text = own.encode("the other one, and then another", special=False)
    found = overlap(own, own, [text])
    assert found.target == found.draft == found.shared
    assert found.mass == found.borders == found.draft_per_target == 1.0


def test_what_is_shared_is_weighed_by_use():
    smol, small = read_tokenizer("smollm2-135m"), tiny_tokenizer()
    text = smol.encode("the sea", special=False)  # three bytes and four, in two tokens
    found = overlap(smol, small, [[*text, 2, *text]])
    pieces = len(small.encode("the", special=False)) + len(small.encode(" sea", special=False))
    assert found.borders == 1.0 and found.mass < 1.0
    assert found.draft_per_target == pytest.approx(pieces / 2)
    assert overlap(small, smol, [small.encode("the sea", special=False)]).borders < 1.0


def test_passes_follow_from_how_far_guesses_are_kept():
    always = expected([[[1.0, 1.0]] * 6], 2)
    assert always == Kept(first=1.0, acceptance=1.0, emitted=3.0)
    assert expected([[[0.0, 0.0]] * 6], 2) == Kept(first=0.0, acceptance=0.0, emitted=1.0)
    half = expected([[[0.5]] * 400], 1)
    assert half.first == pytest.approx(0.5, abs=0.01) and half.emitted == pytest.approx(1.5, abs=0.01)
    walked = expected([[[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]], 2)
    assert walked.emitted == pytest.approx(6 / 3), "passes at 0, 2 and 3"
    assert walked.acceptance == pytest.approx(3 / 6)
    assert expected([[]], 2).emitted == 1.0


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


@pytest.fixture
def stranger(tmp_path):
    write_stranger(tiny(), tmp_path / "stranger")
    return tmp_path / "stranger"


def asked(engine):
    return [
        engine.encode(text) for text in ("the sea and the river", "a hill, another hill", "one two one two")
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", pair.WAYS)
def test_a_twin_is_predicted_to_be_kept_as_it_is(engine, way, temperature):
    """The target drafts for itself: by tokens everything is kept, by text at temperature 0."""
    params = SamplingParams(temperature=temperature, max_new_tokens=24, ignore_eos=True, seed=1)
    answers = [Answer(ids, engine.generate([ids], params, drafter="none")[0].tokens) for ids in asked(engine)]
    said = predict(engine.target, engine.target, answers, temperature, way, 3)
    if way == "tokens":
        assert min(said.first, said.acceptance) == pytest.approx(1.0, abs=1e-4)
    elif temperature == 0:
        assert said.first > 0.6, "text that is written in other tokens cannot be followed"


@pytest.mark.parametrize("way", pair.WAYS)
def test_predicted_is_measured_for_a_stranger(engine, way, stranger):
    folder = str(stranger)
    draft = load_target(folder, dtype="float32")
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    prompts = asked(engine)
    answers = [Answer(ids, engine.generate([ids], params, drafter="none")[0].tokens) for ids in prompts]
    said = predict(engine.target, draft, answers, 0.0, way, 3)
    real = pair.measure(
        engine, pair.spec_of(folder, way).removesuffix("]") + " tree_size=3]", prompts, params
    )
    assert said.emitted == pytest.approx(real.emitted, rel=0.1)
    assert said.first == pytest.approx(real.first, abs=0.1)


def test_an_abbreviation_keeps_its_capitals(capsys):
    kinds, scripts = dict.fromkeys(KINDS, 1), {"LATIN": 2, "CJK": 1}
    one = Vocabulary(name="a", size=3, kinds=kinds, scripts=scripts, letters={}, bytes=0, control=())
    show_vocabularies([one])
    told = capsys.readouterr().out
    assert "CJK" in told and "Latin" in told


def test_the_command_prints_draws_and_measures(tmp_path, capsys, stranger):
    from outpace.cli.main import main

    folder = str(stranger)
    out = tmp_path / "out"
    words = ["analyze", "tokenizers", "tiny", folder, "--measure", "--limit", "2", "--max-new-tokens", "12"]
    assert main([*words, "--dtype", "float32", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for word in (
        "Kinds of tokens",
        "Scripts",
        "Control tokens",
        "Tokens per character",
        "Shared with the first",
    ):
        assert word in printed
    report = json.loads((out / "tokenizers.json").read_text())
    assert [one["tokenizer"] for one in report["tokenizers"]] == ["tiny", folder]
    assert set(report["measured"][0]["by"]) == {"text", "tokens"}
    assert (out / "kinds.png").is_file() and (out / "languages.png").is_file()
    assert main(["analyze", "tokenizers", "tiny", "tiny"]) == 2 and "twice" in capsys.readouterr().err
    assert main(["analyze", "tokenizers", "tiny", "--measure"]) == 2
    assert main(["analyze", "tokenizers", "no-such-model"]) == 2


def test_a_tokenizer_is_read_without_weights(stranger):
    folder = stranger
    for file in folder.glob("*.safetensors"):
        file.unlink()
    size = read_tokenizer(str(folder)).vocab_size
    assert read_tokenizer(str(folder / "tokenizer.json")).vocab_size == size
    assert open_checkpoint("smollm2-135m").tokenizer().vocab_size == read_tokenizer("smollm2-135m").vocab_size
