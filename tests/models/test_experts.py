"""Mixtures of experts: read from all that holds them, chosen row by row, refused by name."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outpace import Engine, registry
from outpace.errors import ModelError
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.models.gguf.model import GGUFCheckpoint
from outpace.models.hf.compare import ROUNDING, apart, off
from outpace.models.load import load_target
from outpace.models.mixtures import Mixture
from outpace.models.mlp import dense_weight
from outpace.models.products import CODED, works
from outpace.models.tiny import tiny
from outpace.models.weights import SafetensorsCheckpoint
from outpace.train.rider_net import RiderNet
from outpace.types import Feed
from tests.conformance.specs import write_head
from tests.models.making import (
    GGUF_TOKENS,
    gguf_metadata,
    gguf_name,
    hf_config,
    permuted,
    save_hf,
    stacked,
    write_gguf,
)
from tests.models.test_products import blocks

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "initializer_range": 0.2}
MODELS = {
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "not normed": ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    "mixtral": ("mixtral", {}),
}
ARCHITECTURES = {"llama": "mixtral", "qwen3moe": "qwen3_moe"}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
"""Sizes of which all types of weights are made."""


def made_gguf(path, arch, kind="F32", extra=None, apart_=False, **changes):
    """Write a random model whose experts are of one type; its config, and tensors by Hugging Face name."""
    family = ARCHITECTURES[arch]
    if family == "qwen3_moe":
        changes = {"moe_intermediate_size": 256, "norm_topk_prob": True, **changes}
    config = DecoderConfig.from_hf(
        hf_config(family, **(WIDE | {"vocab_size": len(GGUF_TOKENS), **changes})).to_dict()
    )
    rng = np.random.default_rng(1)
    tensors = {
        name: (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        for name, shape in config.tensor_shapes().items()
    }
    dense = {name: one for name, one in tensors.items() if "experts" not in name}
    stored = {gguf_name(name, arch): one for name, one in dense.items()}
    if arch == "llama":
        for name in stored:
            if "attn_q" in name or "attn_k" in name:
                heads = config.num_heads if "attn_q" in name else config.num_kv_heads
                stored[name] = permuted(stored[name], heads)
    if apart_:
        for name, one in tensors.items():
            if "experts" in name:
                _, _, layer, _, _, number, part, _ = name.split(".")
                stored[f"blk.{layer}.ffn_{part.removesuffix('_proj')}.{number}.weight"] = one
    else:
        stored |= stacked(tensors)
    raw = {}
    if kind in CODED:  # gguf cannot make all types, so they are random bytes
        for seed, name in enumerate([name for name in stored if "_exps" in name]):
            count, rows, inputs = stored.pop(name).shape
            raw[name] = blocks(kind, count * rows, inputs, seed)[0].view(count, rows, -1).numpy()
    metadata = gguf_metadata(config, arch) | (extra or {})
    write_gguf(path, stored, metadata, arch=arch, raw={name: (kind, one) for name, one in raw.items()})
    return config, tensors


def logits(decoder, ids=range(3, 40), cache=None):
    cache = cache or decoder.new_cache()
    return decoder.score([Feed.chain(cache.open(), list(ids))], cache).logits_TV.clone()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, tmp_path):
    """From a folder, from one that has all experts in one tensor, and in memory."""
    family, changes = MODELS[name]
    model = save_hf(tmp_path, family, **{**SIZES, **changes})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.config.mixture.normed == (name != "not normed")
    assert set(checkpoint.names()) == set(checkpoint.config.tensor_shapes())
    packed, plain = (Decoder.load(checkpoint, dtype=torch.float32, packed=one) for one in (True, False))
    for decoder in (packed, plain):
        difference, _ = apart(model, decoder)
        assert difference < ROUNDING[4] / 10
    want = logits(packed)
    in_memory = load_target(model, backend="own")
    assert torch.equal(logits(in_memory), want)
    (tmp_path / "model.safetensors").unlink()
    fused = {at: one.detach().contiguous() for at, one in model.named_parameters()}
    assert any(one.dim() == 3 for one in fused.values())
    save_file(fused, tmp_path / "model.safetensors")
    assert torch.equal(logits(Decoder.load(SafetensorsCheckpoint(tmp_path), dtype=torch.float32)), want)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_gguf_file_is_the_model_that_was_converted(arch, tmp_path):
    config, tensors = made_gguf(tmp_path / "m.gguf", arch)
    opened = GGUFCheckpoint(tmp_path / "m.gguf")
    assert opened.config.mixture == config.mixture and opened.config.family == config.family
    assert set(opened.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert np.array_equal(opened.tensor(name).numpy(), tensor), name
    if arch == "llama":  # as the first files of Mixtral were
        made_gguf(tmp_path / "old.gguf", arch, apart_=True)
        old = GGUFCheckpoint(tmp_path / "old.gguf")
        assert all(np.array_equal(old.tensor(name).numpy(), one) for name, one in tensors.items())


@pytest.mark.skipif(not works(), reason="code cannot be compiled here")
@pytest.mark.parametrize("kind", sorted(CODED))
def test_experts_stay_as_they_are_stored(kind, tmp_path):
    made_gguf(tmp_path / "m.gguf", "qwen3moe", kind)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    stored = Decoder.load(checkpoint, dtype=torch.float32, stored=True)
    assert stored._programs is not None
    experts = stored._blocks[0].mlp
    assert {part.kind for one in experts.gate_up for part in one.product.parts} == {kind}
    plain = Decoder.load(checkpoint, dtype=torch.float32, packed=False)
    scores = [decoder._blocks[0].mlp.route(torch.eye(256)[:40])[0] for decoder in (stored, plain)]
    assert torch.equal(*scores)
    # Rows are rounded to 12 or 16 bits: a bit of a percent. Rows that choose otherwise would be far off.
    assert off(logits(stored), logits(plain)) < 0.02


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_experts_are_rounded_as_matrices_are(quantize, tmp_path):
    family, changes = MODELS["qwen3_moe"]
    save_hf(tmp_path, family, **{**SIZES, **changes})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    rounded = Decoder.load(checkpoint, dtype=torch.float32, quantize=quantize)
    exact = Decoder.load(checkpoint, dtype=torch.float32)
    most = {"int8": 0.3, "int4": 0.2}[quantize]
    assert rounded.weight_bytes < (most + 0.1) * exact.weight_bytes
    router = rounded._blocks[0].mlp.router.dense()
    assert torch.equal(router, checkpoint.tensor("model.layers.0.mlp.gate.weight")), "routers stay"


@pytest.mark.parametrize("by_torch", [False, True])
def test_equal_scores_are_resolved_by_the_lowest_number(by_torch):
    """All experts score alike, and the model says what one with these three alone says."""
    target = tiny(layers=2, experts=8)
    tensors = {name: target.checkpoint.tensor(name).clone() for name in target.config.tensor_shapes()}
    tensors["model.layers.1.mlp.gate.weight"].zero_()
    for number in range(3, 8):  # nobody may go there
        tensors[f"model.layers.1.mlp.experts.{number}.up_proj.weight"].fill_(torch.nan)
    checkpoint = type(target.checkpoint)(target.config, tensors, name="ties")
    tied = Decoder.load(checkpoint, dtype=torch.float32, packed=not by_torch)
    got = logits(tied)
    assert torch.isfinite(got).all()
    rows = torch.randn(5, 64)
    ids, shares = tied._blocks[1].mlp.route(rows)
    assert ids.tolist() == [[0, 1, 2]] * 5 and torch.allclose(shares, torch.full((5, 3), 1 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_bits_in_any_company_and_on_any_threads(dtype, monkeypatch):
    target = tiny(layers=3, experts=8, dtype=dtype)
    cache = target.new_cache()
    slot, ids = cache.open(), [(7 * i) % 200 for i in range(70)]
    whole = target.score([Feed.chain(slot, ids)], cache).logits_TV.clone()
    cache.drop(slot)
    for size in (1, 2, 9):
        parts = []
        for start in range(0, 70, size):
            parts.append(target.score([Feed.chain(slot, ids[start : start + size])], cache).logits_TV.clone())
            cache.keep(slot, range(len(ids[start : start + size])))
        assert torch.equal(torch.cat(parts), whole), size
        cache.close(slot)
        slot = cache.open()
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert torch.equal(logits(target, ids), whole), threads


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One with drafters that borrow from layers with experts, as they are before training."""
    target = tiny(layers=3, experts=6)
    folder = tmp_path_factory.mktemp("heads")
    for name in ("eagle3", "kangaroo", "ppd", "streaming"):
        kind = registry.load("objective", name)
        write_head(target, folder / f"small.{name}", kind, kind.Config())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield Engine.load(target, drafter="none")


@pytest.mark.parametrize(
    "spec",
    [
        "recycling",
        "early_exit",
        "layer_skip",
        "quantized_self",
        "eagle3[model=small.eagle3 tree=3x2x1 verifier=traversal]",
        "kangaroo[model=small.kangaroo]",
        "ppd[model=small.ppd]",
        "streaming[model=small.streaming]",
    ],
)
def test_drafts_leave_texts_as_they_are(engine, spec):
    prompts = [[5, 9, 11, 5, 9, 11, 5, 9], [77], [40, 41, 42, 43, 44, 40, 41, 42]]
    asked = {"max_new_tokens": 16, "ignore_eos": True, "seed": 3}
    for more in ({"temperature": 0}, {"temperature": 0.8, "reproducible": True}):
        if "reproducible" in more and "verifier" in spec:
            continue
        plain, drafted = (engine.generate(prompts, drafter=one, **asked, **more) for one in ("none", spec))
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        assert sum(one.counters.drafted for one in drafted) > 0


def test_what_is_trained_is_what_runs():
    target = tiny(layers=2, experts=6)
    net = RiderNet(target, [1])
    x_TH = torch.randn(9, 64)
    assert torch.allclose(net.layers[1].mlp(x_TH), target._blocks[1].mlp(x_TH, "silu"), atol=1e-5)


def test_experts_of_several_types_are_left_to_torch(tmp_path):
    """Compiled code lists the matrices of all experts alike."""
    made_gguf(tmp_path / "m.gguf", "llama", apart_=True)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    whole = Decoder.load(checkpoint, dtype=torch.float32)
    mlp = whole._blocks[0].mlp
    odd = replace(mlp, down=(Decoder.load(checkpoint)._blocks[0].mlp.down[0], *mlp.down[1:]))
    assert odd.in_one_call != works() and mlp.in_one_call


def test_a_dense_layer_begins_as_the_first_experts_side_by_side():
    target = tiny(layers=2, experts=6)
    at = "model.layers.1.mlp."
    down_HF = dense_weight(target.checkpoint, f"{at}down_proj.weight")
    gate_FH = dense_weight(target.checkpoint, f"{at}gate_proj.weight")
    assert down_HF.shape == (64, 128) and gate_FH.shape == (128, 64)
    second = target.checkpoint.tensor(f"{at}experts.1.down_proj.weight")
    assert torch.equal(down_HF[:, 32:64], second / 4)
    assert torch.equal(gate_FH[96:], target.checkpoint.tensor(f"{at}experts.3.gate_proj.weight"))
    dense = target.checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(dense_weight(target.checkpoint, "model.layers.0.mlp.up_proj.weight"), dense)


def test_expected_experts_of_rows():
    mixture = Mixture(experts=8, chosen=2, width=16, normed=True, sparse=(True,))
    assert mixture.touched(1) == pytest.approx(2) and mixture.touched(2) == pytest.approx(3.5)
    assert mixture.touched(1000) == pytest.approx(8)


SPARSE = {"model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
SPARSE |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}


def test_configs_say_which_layers_are_sparse():
    def sparse(**said):
        return DecoderConfig.from_hf(SPARSE | said).mixture.sparse

    assert sparse() == (True,) * 4
    assert sparse(decoder_sparse_step=2) == (False, True, False, True)
    assert sparse(mlp_only_layers=[0, 3]) == (False, True, True, False)
    config = DecoderConfig.from_hf(SPARSE | {"mlp_only_layers": [1]})
    assert config.of_layers([1, 2]).mixture.sparse == (False, True)
    old = {key: value for key, value in SPARSE.items() if key != "num_experts"} | {"num_local_experts": 4}
    assert DecoderConfig.from_hf(old).mixture.experts == 4


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"num_experts_per_tok": 5}, "chosen of a mixture must be from 1 to 4, got 5"),
        ({"num_experts": 0}, "'num_local_experts' must be a positive whole number, got 0"),
        ({"num_experts": 4000, "num_hidden_layers": 4000}, "16000000 experts in all layers are more than"),
        ({"mlp_only_layers": "all"}, "'mlp_only_layers' must be a list of layers, got 'all'"),
        ({"moe_intermediate_size": -1}, "'moe_intermediate_size' must be a positive whole number"),
        ({"model_type": "qwen2_moe"}, "architecture 'qwen2_moe' is not supported"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(said, words):
    with pytest.raises(ModelError) as caught:
        DecoderConfig.from_hf(SPARSE | said)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"qwen3moe.expert_gating_func": 2}, "experts with expert_gating_func 2 are not supported"),
        ({"qwen3moe.expert_shared_count": 1}, "expert_shared_count 1"),
        ({"qwen3moe.expert_weights_scale": 2.5}, "expert_weights_scale 2.5"),
        ({"qwen3moe.expert_used_count": 7}, "chosen of a mixture must be from 1 to 6, got 7"),
        ({"qwen3moe.expert_count": 7}, "mlp.gate.weight' has shape [6, 256], its config needs [7, 256]"),
        ({"qwen3moe.expert_feed_forward_length": 128}, "its config needs [128, 256]"),
    ],
)
def test_gguf_files_are_refused_by_name(extra, words, tmp_path):
    made_gguf(tmp_path / "m.gguf", "qwen3moe", extra=extra)
    with pytest.raises(ModelError) as caught:
        GGUFCheckpoint(tmp_path / "m.gguf")
    assert words in str(caught.value) and "\n" not in str(caught.value)
