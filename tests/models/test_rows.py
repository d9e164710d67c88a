"""Rows of a matrix that stays on disk are those of the whole matrix."""

import gguf
import numpy as np
import pytest
import torch

from outpace import Engine, ModelError
from outpace.models.gguf.file import read_rows, read_tensor
from outpace.models.load import load_target
from outpace.models.places import Place
from outpace.models.zoo import open_checkpoint

IDS = [3, 0, 7, 7, 15]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gguf_rows_are_those_of_the_tensor(tmp_path, kind, dtype):
    numbers = np.random.default_rng(0).standard_normal((16, 64), dtype=np.float32)
    content = gguf.quantize(numbers, gguf.GGMLQuantizationType[kind]).tobytes()
    path = tmp_path / "rows.bin"
    path.write_bytes(b"before" + content + b"behind")
    place = Place(path=path, start=6, size=len(content), shape=(16, 64), kind=kind)
    read = read_rows(place, dtype)
    path.unlink()  # the file stays open
    assert torch.equal(read(IDS), _from(tmp_path, place, b"before" + content, dtype)[IDS])
    assert read([5]).shape == (1, 64) and read([5]).dtype == dtype


def _from(folder, place, content, dtype):
    path = folder / "again.bin"
    path.write_bytes(content)
    whole = Place(path=path, start=6, size=place.size, shape=place.shape, kind=place.kind)
    return read_tensor(whole, dtype)


def test_a_file_that_shrank_is_an_error(tmp_path):
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(4 * 8 * 4))
    read = read_rows(Place(path=path, start=0, size=128, shape=(4, 8), kind="F32"), torch.float32)
    assert read([3]).shape == (1, 8)
    path.write_bytes(bytes(100))
    with pytest.raises(ModelError, match="truncated"):
        read([3])


def test_the_embedding_on_disk_equals_the_matrix():
    checkpoint = open_checkpoint("smollm2-135m")
    name = "model.embed_tokens.weight"
    read = checkpoint.rows(name, torch.bfloat16)
    ids = [0, 49151, 17, 17]
    assert torch.equal(read(ids), checkpoint.tensor(name, torch.bfloat16)[ids])
    with pytest.raises(ModelError, match="not stored in order"):
        checkpoint.rows("model.layers.0.self_attn.q_proj.weight", torch.bfloat16)


def test_a_target_gives_its_embeddings():
    target = load_target("tiny", dtype="float32")
    vectors_TH = target.embed([4, 9])
    assert vectors_TH.shape == (2, target.hidden_size) and vectors_TH.dtype == torch.float32
    assert torch.equal(vectors_TH[1], target.embed([9])[0])
    assert Engine(target).generate([4, 9], max_new_tokens=2).tokens
