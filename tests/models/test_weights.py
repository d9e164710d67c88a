"""Checkpoints: what was saved is what is read, and a broken file is one clear line."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outpace.errors import ModelError
from outpace.models.families import DecoderConfig
from outpace.models.gguf.blocks import GRAIN, expand
from outpace.models.gguf.file import QUANTIZED, read_header, read_tensor
from outpace.models.gguf.model import GGUFCheckpoint
from outpace.models.places import Place
from outpace.models.weights import SafetensorsCheckpoint
from tests.models.making import (
    GGUF_TOKENS,
    HF_SIZES,
    gguf_metadata,
    gguf_name,
    hf_config,
    permuted,
    save_hf,
    write_gguf,
)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("gemma3", {}),
    ],
)
@pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
def test_folders_of_transformers(
    family: str, changes: dict[str, Any], shard_size: str, tmp_path: Path
) -> None:
    model = save_hf(tmp_path, family, shard_size=shard_size, **changes)
    opened = SafetensorsCheckpoint(tmp_path)
    assert (len(opened.files) > 1) == (shard_size == "10KB")
    want = dict(model.named_parameters())
    assert set(opened.names()) == set(opened.config.tensor_shapes()) == set(want)
    for name in opened.names():
        assert torch.equal(opened.tensor(name), want[name]), name
    half = opened.tensor("model.norm.weight", torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert opened.note(torch.float32) is None
    first = opened.tensor("model.norm.weight")
    first.zero_()
    assert opened.tensor("model.norm.weight").any()
    assert "model.nothing" not in opened
    with pytest.raises(ModelError, match=r"has no tensor 'model.nothing'"):
        opened.tensor("model.nothing")


def test_digest_follows_config_and_content(tmp_path: Path) -> None:
    model = save_hf(tmp_path / "a", "llama")
    model.save_pretrained(tmp_path / "b")
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(tmp_path / "c")
    digests = [SafetensorsCheckpoint(tmp_path / one).digest for one in "abc"]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 16


def test_multimodal_names_and_dtypes(tmp_path: Path) -> None:
    config = hf_config("gemma3").to_dict() | {"model_type": "gemma3_text", "architectures": None}
    whole = {"model_type": "gemma3", "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    shapes = DecoderConfig.from_hf(whole).tensor_shapes()
    for start in ("model.language_model.", "language_model.model."):
        tensors = {
            start + name.removeprefix("model."): torch.randn(shape).to(torch.bfloat16)
            for name, shape in shapes.items()
        }
        save_file(tensors | {"vision_tower.x": torch.ones(2)}, tmp_path / "model.safetensors")
        opened = SafetensorsCheckpoint(tmp_path, "pictures")
        got = opened.tensor("model.norm.weight")
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, tensors[start + "norm.weight"])
    tensors[start + "norm.weight"] = torch.ones(32).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model.norm.weight' is stored as F8_E4M3"):
        SafetensorsCheckpoint(tmp_path)


def test_broken_folders_are_one_line(tmp_path: Path) -> None:
    def refused(*words: str) -> None:
        with pytest.raises(ModelError) as caught:
            SafetensorsCheckpoint(tmp_path)
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert "\n" not in message

    refused(str(tmp_path), "no config.json")
    save_hf(tmp_path, "llama", shard_size="10KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    content = shards[1].read_bytes()
    for size in (0, 5, 40, len(content) // 2, len(content) - 1):
        shards[1].write_bytes(content[:size])
        refused(shards[1].name, "truncated")
    shards[1].write_bytes(content[:8] + b"?" + content[9:])
    refused(shards[1].name, "corrupt header")
    shards[1].unlink()
    refused(shards[1].name, "lacks", "model.safetensors.index.json")
    shards[1].write_bytes(content)
    SafetensorsCheckpoint(tmp_path)

    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"intermediate_size": 50}))
    refused("mlp.gate_proj.weight", "[48, 32]", "needs [50, 32]", ".safetensors")
    (tmp_path / "config.json").write_text(json.dumps(said | {"num_hidden_layers": 5}))
    refused("no tensor", "model.layers.4")
    (tmp_path / "config.json").write_text("{")
    refused("cannot read", "config.json")
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in said.items() if key != "num_attention_heads"})
    )
    refused(f"{tmp_path / 'config.json'} lacks 'num_attention_heads'")
    (tmp_path / "config.json").write_text(json.dumps(said))
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused("no safetensors files", "pytorch_model.bin")


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    save_hf(tmp_path, "llama")
    opened = SafetensorsCheckpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    last = max(opened.names(), key=lambda name: opened.places[name].start)
    with pytest.raises(ModelError, match="truncated: it lacks byte"):
        opened.tensor(last)
    path.unlink()
    with pytest.raises(ModelError, match="cannot read"):
        opened.tensor(last)


def test_every_block_type_equals_the_reference() -> None:
    rng = np.random.default_rng(0)
    for kind in QUANTIZED:
        member = gguf.GGMLQuantizationType[kind]
        _, size = gguf.GGML_QUANT_SIZES[member]
        # Random bytes below 0x78 keep float16 scales finite wherever they lie in the block.
        packed = rng.integers(0, 0x78, (64, size), dtype=np.uint8)
        want = gguf.dequantize(packed, member).reshape(-1)
        got = expand(torch.from_numpy(packed).view(-1), kind)
        assert np.array_equal(got.numpy(), want), kind


def test_big_tensors_are_read_in_portions(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    rng = np.random.default_rng(0)
    tensor = rng.standard_normal((300, 256)).astype(np.float32)
    assert tensor.size > 2 * GRAIN
    kind = gguf.GGMLQuantizationType.Q5_0
    packed = gguf.quantize(tensor, kind)
    path.write_bytes(b"before" + packed.tobytes() + b"after")
    place = Place(path=path, start=6, size=packed.nbytes, shape=(300, 256), kind="Q5_0")
    assert np.array_equal(read_tensor(place).numpy(), gguf.dequantize(packed, kind))
    path.write_bytes(b"before" + packed.tobytes()[:-1])
    with pytest.raises(ModelError, match=f"truncated: it lacks byte {6 + packed.nbytes - 1}"):
        read_tensor(place)


KINDS = {
    "blk.0.attn_q.weight": "Q8_0",
    "blk.0.attn_k.weight": "Q4_1",
    "blk.0.ffn_up.weight": "Q4_0",
    "blk.1.attn_q.weight": "F16",
    "blk.1.ffn_up.weight": "BF16",
    "blk.1.ffn_gate.weight": "Q5_1",
    "token_embd.weight": "Q4_1",
}
SIZES = HF_SIZES | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": len(GGUF_TOKENS),
}


def make_gguf(
    path: Path, arch: str, extra: dict[str, Any] | None = None, **changes: Any
) -> tuple[DecoderConfig, dict[str, np.ndarray]]:
    """Write a random model; give its config and its tensors by Hugging Face name."""
    config = DecoderConfig.from_hf(hf_config(arch, **(SIZES | changes)).to_dict())
    rng = np.random.default_rng(1)
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in config.tensor_shapes().items()
    }
    stored = {}
    for name, tensor in tensors.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            tensor = permuted(tensor, heads)
        stored[gguf_name(name, arch)] = tensor
    metadata = gguf_metadata(config, arch) | (extra or {})
    if divisors := metadata.pop("divisors", None):
        stored["rope_freqs.weight"] = np.array(divisors, dtype=np.float32)
    write_gguf(path, stored, metadata, arch=arch, kinds=KINDS)
    return config, tensors


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_gguf_models(arch: str, tmp_path: Path) -> None:
    window = {"gemma3.attention.sliding_window": 16, "gemma3.rope.freq_base": 1e6}
    config, tensors = make_gguf(
        tmp_path / "m.gguf", arch, window if arch == "gemma3" else {}, sliding_window=16
    )
    opened = GGUFCheckpoint(tmp_path / "m.gguf")
    got = opened.config
    # Files hold Gemma's norm weights with the one already added, and eps as float32.
    assert got.norm_offset == 0.0
    assert got.norm_eps == pytest.approx(config.norm_eps, rel=1e-6)
    assert got.attention_scale == (0.25 if arch == "gemma3" else config.attention_scale)
    for field in ("family", "windows", "ropes", "rope_of_layer", "tied_head", "max_positions"):
        assert getattr(got, field) == getattr(config, field), field
    for field in ("qkv_bias", "out_bias", "qk_norm", "sandwich_norms", "embed_scale", "head_dim"):
        assert getattr(got, field) == getattr(config, field), field
    assert set(opened.names()) == set(tensors)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[KINDS.get(gguf_name(name, arch), "F32")]
        # Quantizing works on rows, so the order of rows does not matter to it.
        want = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor, kind), kind))
        read = opened.tensor(name)
        kept = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind.name, torch.float32)
        assert read.dtype == kept and read.is_contiguous()
        assert torch.equal(read.float(), want), name
        assert torch.equal(opened.tensor(name, torch.bfloat16), want.to(torch.bfloat16)), name
    note = opened.note(torch.bfloat16)
    assert note is not None
    assert note.startswith(("Q4_1 and Q8_0 and", "Q4_1 and Q5_1 and")), note
    assert "expanded to bfloat16: 0 MB" in note
    assert opened.defaults.eos_ids == (0, 2)
    assert opened.tokenizer().decode(opened.tokenizer().encode("hello 12")) == "hello 12"


def test_gguf_rope_scaling_and_sampling(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    extra = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
        "general.sampling.temp": 0.5,
        "general.sampling.mirostat": 2,
        "tokenizer.ggml.eot_token_id": 7,
    }
    make_gguf(path, "llama", extra)
    opened = GGUFCheckpoint(path)
    rope = opened.config.ropes[0]
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 64)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 1.0)
    assert opened.defaults.temperature == 0.5
    assert opened.defaults.unsupported == ("mirostat=2",)
    assert opened.defaults.eos_ids == (0, 2, 7)
    make_gguf(path, "llama", {"divisors": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]})
    rope = GGUFCheckpoint(path).config.ropes[0]
    assert (rope.kind, rope.divisors) == ("divided", (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0))


def refusal(path: Path) -> str:
    """Open a file that must be refused, give the message."""
    with pytest.raises(ModelError) as caught:
        GGUFCheckpoint(path).tokenizer()
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith((str(path), f"{path.stem} has no tensor"))
    return message


def test_gguf_features_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for extra, words in (
        ({"llama.expert_count": 4}, "lacks 'expert_used_count'"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"llama.block_count": 3}, "no tensor 'model.layers.2"),
        ({"split.count": 2}, "one part of a set"),
        ({"llama.embedding_length": "wide"}, "GGUF metadata: 'embedding_length' must be a positive whole"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5' is not supported"),
        ({"tokenizer.ggml.pre": "grok-2"}, "pre-tokenizer 'grok-2' is not supported"),
        ({"tokenizer.ggml.merges": ["h q q"]}, "tokenizer in the GGUF metadata is corrupt"),
        ({"tokenizer.ggml.token_type": [1]}, "261 tokens"),
    ):
        make_gguf(path, "llama", extra)
        assert words in refusal(path), words
    write_gguf(path, {"x": np.ones(4)}, {}, arch="mamba")
    assert "'mamba' is not supported; supported: llama" in refusal(path)
    write_gguf(path, {"blk.0.ssm_a.weight": np.ones(4)}, {}, arch="llama")
    assert "'blk.0.ssm_a.weight' has no place" in refusal(path)


def test_gguf_tensor_types_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_gguf(path, "llama")
    content = path.read_bytes()
    at = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    assert struct.unpack_from("<I", content, at) == (0,)
    for kind, label in ((24, "I8"), (99, "number 99")):
        path.write_bytes(content[:at] + struct.pack("<I", kind) + content[at + 4 :])
        message = refusal(path)
        assert f"'output_norm.weight' is stored as {label}, which is not supported" in message


def test_broken_gguf_files_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_gguf(path, "llama")
    whole = path.read_bytes()
    at = whole.index(b"general.architecture") + len(b"general.architecture")
    path.write_bytes(whole[:at] + struct.pack("<I", 65536) + whole[at + 4 :])
    said = f"{path} has a corrupt header: unknown value type 65536; download the file again"
    assert refusal(path) == said
    path.write_bytes(whole)
    header = read_header(path)
    data = min(place.start for place in header.places.values())
    cuts = [0, 3, 10, 30, 200, 2000, data - 40, data, data + 100, len(whole) - 1000]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        message = refusal(path)
        assert str(path) in message
        assert "truncated" in message or "not a GGUF file" in message
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        broken = bytearray(whole)
        broken[rng.randrange(4, data)] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        try:
            opened = GGUFCheckpoint(path)
            opened.tokenizer()
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
    # A flipped bit in the text of a token or in padding does no harm.
    assert 50 < refused < 290


def test_gguf_reader_agrees_with_the_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_gguf(path, "qwen2", {"general.alignment": 64})
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == value, key
    assert set(ours.places) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        place = ours.places[tensor.name]
        assert place.start == tensor.data_offset
        assert place.size == tensor.n_bytes
        assert place.shape == tuple(int(n) for n in reversed(tensor.shape))
        want = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(read_tensor(place).float().numpy(), want)


def test_a_file_that_cannot_be_opened_is_named_once(tmp_path):
    with pytest.raises(ModelError) as found:
        read_header(tmp_path)
    assert str(found.value) == f"cannot read {tmp_path}: Is a directory"
