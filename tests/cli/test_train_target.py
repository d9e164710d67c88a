"""``outpace train target``: a model from texts, and what is refused."""

import pytest

SMALL = [
    "start=none",
    "layers=3",
    "width=64",
    "ffn=96",
    "vocab=300",
    "exits=1+2",
    "length=32",
    "loop.steps=2",
    "loop.bf16=false",
]


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "stories.txt"
    file.write_text("<|endoftext|>".join(f"Ann and Bob saw fox number {i}. " * 9 for i in range(100)))
    return file


def test_the_command_makes_a_model(outpace, texts, tmp_path):
    out, sizes = tmp_path / "made", [f"--set={pair}" for pair in SMALL]
    done = outpace("train", "target", "--texts", str(texts), "--out", str(out), *sizes)
    assert done.code == 0, done.err
    assert "wrote" in done.out and (out / "model.safetensors").is_file()
    done = outpace(
        "generate", "--model", str(out), "--drafter", "early_exit[layer=1]", "--max-new-tokens", "4", "Ann"
    )
    assert done.code == 0, done.err


def test_what_cannot_be_is_said(outpace, texts, tmp_path):
    for words, said in (
        (["--texts", str(texts)], "give --texts FILE and --out DIR"),
        (["--texts", str(tmp_path / "none.txt"), "--out", str(tmp_path / "out")], "there is no such file"),
        (["--texts", str(texts), "--out", str(tmp_path / "out"), "--set=lairs=3"], "lairs"),
    ):
        done = outpace("train", "target", *words)
        assert done.code in (1, 2) and said in done.err
