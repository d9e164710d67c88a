import json

import numpy as np
import pytest

from outpace import Engine
from outpace.config import data_folder
from outpace.methods.lookup import bigram as module
from outpace.methods.lookup.bigram import BigramTable
from outpace.methods.lookup.files import vocabulary_digest
from outpace.models.load import load_target
from outpace.train.tokens import TokenSequence, TokenStore

TEXT = "the cat sat on the mat.\nthe dog sat on the log.\n" * 30


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.txt").write_text("caf\u00e9 au lait", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    return tmp_path


def test_a_bigram_table_is_made_and_used(outpace, folder):
    ran = outpace("build", "bigram", "a.txt", "b.txt", "--model", "tiny", "--out", "t.bigram")
    assert ran.code == 0, ran.err
    tokenizer = load_target("tiny").tokenizer
    pieces = [TEXT, "caf\u00e9 au lait"]
    count = sum(len(tokenizer.encode(piece, special=False)) for piece in pieces)
    size = (folder / "t.bigram").stat().st_size
    assert ran.out == f"t.bigram: {size:,} bytes, made from {count} tokens\n"
    assert "bytes: a.txt" in ran.err
    table = BigramTable.load(folder / "t.bigram", vocabulary_digest(tokenizer, tokenizer.vocab_size))
    (s,) = tokenizer.encode("s", special=False)
    a = tokenizer.encode("sat", special=False)[1]
    assert table.after(s)[0][0] == a and table.after(s)[0][1] > 0.9
    answer = ("generate", "--model", "tiny", "--max-new-tokens", "8", "--raw", "--ignore-eos", "ab")
    plain = outpace(*answer, "--drafter", "none")
    ran = outpace(*answer, "--drafter", "max_gram[table=t.bigram]")
    assert ran.code == 0 and ran.out == plain.out


def test_without_a_name_it_goes_where_the_drafter_looks(outpace, folder):
    ran = outpace("build", "bigram", "a.txt", "-m", "tiny")
    assert ran.code == 0, ran.err
    (made,) = (data_folder() / "bigram").iterdir()
    assert ran.out.startswith(f"{made}: ") and made.suffix == ".bigram"


@pytest.mark.parametrize("files", ["a.txt", "answers"])
def test_where_it_goes_is_tried_before_anything_is_read(outpace, folder, monkeypatch, files):
    TokenStore.create(folder / "answers", target="tiny", digest="d", vocab_size=512, about={})
    monkeypatch.setenv("OUTPACE_DATA", str(folder / "a.txt"))
    monkeypatch.setattr(BigramTable, "count", None)
    ran = outpace("build", "bigram", files, "-m", "tiny")
    assert ran.code == 2 and "Not a directory" in ran.err and ran.err.count("\n") == 1


def test_a_table_of_the_targets_own_answers(outpace, folder):
    target = load_target("tiny")
    store = TokenStore.create(
        folder / "tokens",
        target=target.name,
        digest=target.digest,
        vocab_size=target.vocab_size,
        about={"plans": [{"command": "secret", "plan": {"seed": 0}, "sources": []}]},
    )
    answers = [
        TokenSequence(
            number=i, ids=np.array([40, 41 + i % 50, 50, 51, 50, 51, 50], np.int32), prompt=2, temperature=0.0
        )
        for i in range(60)
    ]
    store.append(answers, {})
    ran = outpace("build", "bigram", "tokens", "-m", "tiny")
    assert ran.code == 0, ran.err
    drafter = Engine(target, "max_gram").method().drafter
    assert drafter.table.after(50)[0][0] == 51 and drafter.table.after(40) == []
    (place,) = (data_folder() / "drafters").glob("*/max_gram")
    told = json.loads((place / "provenance.json").read_text())
    assert told["data"]["counted_tokens"] == 6 * int((~store.held_out_S).sum())
    assert told["data"]["plans"] == [{"plan": {"seed": 0}, "sources": []}]


def test_pieces_of_a_file_are_counted_as_one_text(folder, monkeypatch):
    tokenizer = load_target("tiny").tokenizer
    told = []

    def build(name):
        return module.build_bigram(
            [folder / "a.txt"], tokenizer, folder / name, progress=lambda part, step: told.append(step)
        )

    whole, tokens = build("whole")
    assert sum(told) == len(TEXT)
    monkeypatch.setattr(module, "_PIECE", 100)
    parts, again = build("parts")
    assert tokens == again and len(told) > 3
    digest = vocabulary_digest(tokenizer, 0)
    one, other = (BigramTable.load(path, digest) for path in (whole, parts))
    (s,) = tokenizer.encode("s", special=False)
    assert one.after(s)[0][0] == other.after(s)[0][0]


def test_a_datastore_is_made_and_json_names_what_is_written(outpace, folder):
    ran = outpace("build", "datastore", "a.txt", "-m", "tiny", "--out", "t.store")
    assert ran.code == 0, ran.err
    size = (folder / "t.store").stat().st_size
    assert ran.out.startswith(f"t.store: {size} bytes, made from ")
    ran = outpace("build", "datastore", "a.txt", "-m", "tiny", "--out", "t.store", "--json")
    assert json.loads(ran.out)["written"] == {"t.store": size}
    ran = outpace("build", "bigram", "a.txt", "-m", "tiny", "--out", "t.bigram", "--json")
    made = json.loads(ran.out)
    assert made["written"] == {"t.bigram": (folder / "t.bigram").stat().st_size}
    assert made["tokens"] > 100


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "missing command; see outpace build --help"),
        (["bigrams"], "did you mean"),
        (["bigram"], "missing argument"),
        (["bigram", "nowhere.txt", "-m", "tiny"], "nowhere.txt"),
        (["bigram", ".", "-m", "tiny"], "holds no manifest.json"),
        (["bigram", "latin.txt", "-m", "tiny"], "latin.txt is not utf-8 text (byte 3)"),
        (["bigram", "empty.txt", "-m", "tiny"], "no text in empty.txt"),
        (["bigram", "a.txt", "-m", "smollm2-135n"], "did you mean smollm2-135m"),
        (["bigram", "a.txt", "-m", "./nowhere"], "no model at ./nowhere"),
        (["datastore", "a.txt", "-m", "tiny"], "--out"),
        (["datastore", "a.txt", "-m", "tiny", "--out", "a.txt"], "a.txt is one of the files to read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(outpace, folder, arguments, says):
    ran = outpace("build", *arguments)
    assert ran.code == 2 and ran.out == ""
    error = ran.err.splitlines()[-1]
    assert error.startswith("outpace: error: ") and says in error.lower()


def test_a_table_of_another_vocabulary_is_refused(outpace, folder):
    outpace("build", "bigram", "a.txt", "-m", "smollm2-135m", "--out", "big.bigram")
    ran = outpace(
        "generate", "--model", "tiny", "--max-new-tokens", "2", "--drafter", "max_gram[table=big.bigram]", "a"
    )
    assert ran.code == 2 and "another vocabulary" in ran.err and ran.err.count("\n") == 1


@pytest.mark.parametrize("command", ["bigram", "datastore"])
def test_help_has_examples(outpace, command):
    ran = outpace("build", command, "--help")
    assert ran.code == 0 and f"outpace build {command}" in ran.out
    assert all(flag in ran.out for flag in ("--model", "-m", "--out", "-o"))
