"""The one door: what comes out for a name, a folder, a model in memory, and for nonsense."""

import json
import subprocess
import sys

import pytest
import torch
import transformers

from outpace.engine.engine import Engine
from outpace.errors import ModelError, OutpaceError, UnknownNameError
from outpace.models.base import TREE
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.models.hf.target import HFTarget
from outpace.models.load import fast_dtype, load_target
from outpace.models.memory import MemoryCheckpoint
from outpace.models.tiny import TableTarget
from outpace.types import Draft, Feed
from tests.models.making import save_hf, save_tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_hf(folder, "llama", vocab_size=300)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=0
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def tree_logits(target):
    cache = target.new_cache()
    slot = cache.open()
    target.score([Feed.chain(slot, range(20, 60))], cache)
    cache.keep(slot, range(40))
    draft = Draft.chosen([4, 5, 6], [-1, -1, 1])
    return target.score([Feed.tree(slot, 3, draft)], cache).logits_TV


def test_own_and_transformers_agree_on_a_folder(llama):
    own = load_target(llama, dtype="float32")
    general = load_target(str(llama), dtype="float32", backend="hf")
    assert (type(own), type(general)) == (Decoder, HFTarget)
    assert (own.name, own.note) == (general.name, general.note) == (llama.name, None)
    want_TV = tree_logits(general)
    # Both sum in float32, in different orders.
    assert float((tree_logits(own) - want_TV).abs().max()) < 1e-4 * float(want_TV.std())
    assert own.tokenizer.encode("hello w") == general.tokenizer.encode("hello w")
    assert own.tokenizer.eos_ids == general.tokenizer.eos_ids
    assert own.defaults.eos_ids == general.defaults.eos_ids == (2,)
    assert own.defaults == general.defaults
    for one in (own, general):
        assert (one.vocab_size, one.dtype, one.device.type) == (300, torch.float32, "cpu")
        assert one.max_positions == 256 and TREE in one.can


def test_a_model_in_memory_keeps_its_own_dtype_and_may_become_ours(llama):
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    fast = transformers.AutoTokenizer.from_pretrained(llama)
    target = load_target(model, tokenizer=fast)
    assert isinstance(target, HFTarget) and target.model is model
    assert load_target(target) is target
    own = load_target(model, backend="own", tokenizer=fast)
    assert isinstance(own, Decoder)
    assert own.name == target.name == llama.name
    want_TV = tree_logits(target)
    assert float((tree_logits(own) - want_TV).abs().max()) < 1e-4 * float(want_TV.std())
    assert own.tokenizer.encode("hell") == fast("hell")["input_ids"]
    assert load_target(model, backend="own", dtype="bfloat16").dtype is torch.bfloat16
    assert model.dtype is torch.float32
    for wrong in (model, target):
        with pytest.raises(ModelError, match=r"in memory as torch\.float32, not torch\.bfloat16"):
            load_target(wrong, dtype="bfloat16")
        with pytest.raises(ModelError, match="is on cpu, not on meta"):
            load_target(wrong, device="meta")
    with pytest.raises(ModelError, match="brings its own tokenizer"):
        load_target(target, tokenizer=fast)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_memory_that_does_more_than_its_weights_say_does_not_become_ours(llama, dtype):
    """Also where rounding hides it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=dtype)
    model.model.layers[0].mlp.train()
    weights = list(model.parameters())
    steered = model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: 1.01 * out)
    with pytest.raises(ModelError, match="hooks or modules of its own, which backend='own' does not run"):
        load_target(model, backend="own")
    steered.remove()
    assert isinstance(load_target(model, backend="own"), Decoder)
    assert model.model.layers[0].mlp.training and not model.training
    assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_is_no_tensor_among_the_weights_is_not_read(llama):
    """As in modules that are rounded by torch, which have a dtype there."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    given = {**model.state_dict(), "lm_head.dtype": torch.qint8}
    checkpoint = MemoryCheckpoint(DecoderConfig.from_hf(model.config.to_dict()), given, name="m")
    assert checkpoint.digest and "lm_head.dtype" not in checkpoint.places


def test_families_we_lack_go_to_transformers_with_a_note(gpt2):
    target = load_target(gpt2, dtype="float32")
    assert isinstance(target, HFTarget)
    assert target.note.startswith("served by transformers, not the own decoder: architecture 'GPT2")
    assert "no tokenizer" in target.note and target.tokenizer is None
    with pytest.raises(ModelError, match="architecture 'GPT2LMHeadModel' is not supported"):
        load_target(gpt2, backend="own")
    with pytest.raises(ModelError, match="architecture 'GPT2LMHeadModel' is not supported"):
        load_target(target.model, backend="own")


def test_short_names():
    tiny = load_target("tiny", dtype="float32")
    assert (tiny.name, tiny.dtype) == ("tiny", torch.float32)
    assert load_target("tiny:3").name == "tiny:3"
    assert load_target("tiny:3").dtype is fast_dtype(torch.device("cpu"))
    assert load_target("tiny", device="auto", dtype=torch.bfloat16).dtype is torch.bfloat16
    table = TableTarget.random(0)
    assert load_target(table) is table


def broken(folder, kind):
    """Spoil a copy of a model folder."""
    if kind == "json":
        (folder / "config.json").write_text("{not json")
    elif kind == "truncated":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
    elif kind == "missing":
        (folder / "model.safetensors").unlink()
    elif kind == "empty":
        (folder / "config.json").unlink()
    elif kind == "unknown family":
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt9"}))


@pytest.mark.parametrize("backend", ["auto", "hf"])
@pytest.mark.parametrize("kind", ["json", "truncated", "missing", "empty", "unknown family"])
def test_a_broken_folder_is_one_clear_line(kind, backend, tmp_path):
    save_hf(tmp_path, "llama")
    broken(tmp_path, kind)
    with pytest.raises(ModelError) as caught:
        load_target(tmp_path, backend=backend)
    said = str(caught.value)
    assert "\n" not in said and len(said) < 600
    assert str(tmp_path) in said


@pytest.mark.parametrize(
    ("model", "given", "fault"),
    [
        ("smollm2-135n", {}, "unknown model 'smollm2-135n'; did you mean smollm2-135m"),
        ("tinny", {}, "did you mean tiny"),
        ("tiny:x", {}, "'tiny:x'"),
        ("tiny", {"backend": "hf"}, "our own decoder only"),
        ("tiny", {"backend": "ours"}, "unknown backend 'ours'"),
        ("tiny", {"dtype": "bfloat"}, "unknown dtype 'bfloat'; did you mean bfloat16"),
        ("tiny", {"dtype": torch.float64}, "unknown dtype 'float64'"),
        ("tiny", {"device": "gpu"}, "device 'gpu' cannot be used; give cpu, cuda"),
        ("tiny", {"device": "meta"}, "device 'meta' computes nothing"),
        ("./nowhere", {}, "no such file or folder"),
        ("nobody/nothing", {}, "cannot get model 'nobody/nothing'"),
        ("nobody/nothing", {"backend": "hf"}, "cannot get model 'nobody/nothing'"),
        ("smollm2-135m", {"backend": "hf"}, "only the own decoder reads"),
        ("", {}, "unknown model ''; known: smollm2-135m, tiny; or give a folder"),
        (7, {}, "int is no language model"),
        (torch.nn.Linear(1, 1), {}, "Linear is no language model"),
        (torch.nn.Linear(1, 1), {"backend": "own"}, "Linear is no language model"),
    ],
)
def test_bad_wishes_are_one_clear_line(model, given, fault):
    with pytest.raises(OutpaceError) as caught:
        load_target(model, **given)
    assert fault in str(caught.value) and "\n" not in str(caught.value)
    if fault.startswith("unknown"):
        assert isinstance(caught.value, UnknownNameError)


def test_our_own_path_leaves_transformers_alone():
    code = (
        "import sys; from outpace.models.load import load_target; load_target('tiny'); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_decoder_of_a_model_in_memory_shares_its_weights_where_it_can(llama):
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    own = Engine.load(model, backend="own", drafter="none").target
    assert isinstance(own, Decoder)
    layer, embedding = model.model.layers[0], model.get_input_embeddings().weight
    assert own.embedding.matrix_VH.data_ptr() == embedding.data_ptr()
    # Where matrices are not laid out anew, those that are not merged are shared as well.
    plain = Decoder.load(own.checkpoint, dtype=torch.float32, packed=False)
    shared = {plain._blocks[0].out._weight.data_ptr(), plain._blocks[0].dense.down._weight.data_ptr()}
    assert shared == {layer.self_attn.o_proj.weight.data_ptr(), layer.mlp.down_proj.weight.data_ptr()}
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    Engine(plain, "none").generate([5, 9, 11], max_new_tokens=4)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
