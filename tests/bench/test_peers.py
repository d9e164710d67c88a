"""Peers: the same weights and law as ours, timed, in this process and in a child process.

Children run the real child script with stand-ins for the packages of their environment.
"""

import stat
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from outpace import Engine
from outpace.bench.peers import contenders as peers
from outpace.bench.peers import hf as hf_peer
from outpace.bench.peers.contenders import PEERS, count, make_peer
from outpace.bench.peers.files import expand_gguf, peer_model
from outpace.bench.peers.process import ChildPeer, PeerAbsentError
from outpace.bench.records import Case, Settings
from outpace.engine.results import Counters
from outpace.errors import ModelError, RequestError, UnknownNameError
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig, GenerationDefaults
from outpace.models.gguf.model import GGUFCheckpoint
from outpace.models.hf.compare import apart
from outpace.models.load import load_target
from outpace.models.memory import MemoryCheckpoint
from outpace.models.tiny import tiny
from tests.models.making import gguf_metadata, gguf_name, hf_config, save_hf, write_gguf

LONG = Settings(max_new_tokens=24)
IDS = (5, 6, 7, 8) * 6
OTHER = (9, 4, 30)


def case(ids=IDS, seed=0):
    return Case(id="a", group="g", ids=tuple(ids), seed=seed)


def plain(target, ids, **settings):
    engine = Engine(target, drafter="none")
    return engine.generate(list(ids), temperature=0, **settings).tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_hf(folder, "llama", initializer_range=0.5)
    return folder


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def hf(target):
    return make_peer("hf", target)


@pytest.fixture(scope="module")
def drafting(target, hf, tmp_path_factory):
    """Peers that draft; the assistant is the target's own model, loaded once more."""
    lookup = make_peer("hf-prompt-lookup", target, beside=[hf])
    return lookup, make_peer("hf-assisted", target, assistant=target.checkpoint.folder)


# Transformers on our weights


def test_a_peer_gives_the_text_of_plain_decoding(target, hf, drafting):
    wanted = plain(target, IDS, max_new_tokens=24, ignore_eos=True)
    for peer in (hf, *drafting):
        run = peer.run((case(),), LONG)
        assert run.tokens == (wanted,), peer.name
        assert 0 < run.prefill_seconds < run.seconds
        assert run.decode_tokens == 23


def test_ends_count_or_are_tokens_like_any_other(target, hf, drafting):
    end = plain(target, IDS, max_new_tokens=24, ignore_eos=True)[5]
    for peer in (hf, *drafting):
        before, peer._eos_ids = peer._eos_ids, frozenset({end})
        try:
            run = peer.run((case(),), replace(LONG, ignore_eos=False))
            assert run.tokens[0][-1] == end
            assert len(run.tokens[0]) <= 6
            assert len(peer.run((case(),), LONG).tokens[0]) == 24
        finally:
            peer._eos_ids = before


def test_a_batch_is_padded_on_the_left_and_gives_what_single_prompts_give(hf):
    alone = [hf.run((case(ids),), LONG).tokens[0] for ids in (IDS, OTHER)]
    assert list(hf.run((case(IDS), case(OTHER)), LONG).tokens) == alone


def test_peers_that_draft_refuse_batches_in_one_line(drafting):
    for peer in drafting:
        with pytest.raises(RequestError, match="one prompt at a time, got 2; use --batch 1"):
            peer.run((case(), case()), LONG)


def test_reproducible_sampling_is_refused(hf):
    hf.run((case(),), replace(LONG, reproducible=True, max_new_tokens=2))
    with pytest.raises(RequestError, match="reproducible=True cannot be served"):
        hf.run((case(),), replace(LONG, reproducible=True, temperature=0.8))


def test_sampling_follows_its_seed_and_leaves_the_generator_alone(hf, drafting):
    warm = replace(LONG, temperature=1.5)
    for peer in (hf, *drafting):
        before = torch.get_rng_state()
        texts = [peer.run((case(seed=seed),), warm).tokens for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2], peer.name
        assert torch.equal(torch.get_rng_state(), before)


def test_sampling_is_from_the_whole_law_at_that_temperature(target, hf):
    """Shares of the first token, against the law; 50 tokens kept, the library's default, show."""
    settings = Settings(max_new_tokens=1, temperature=3.0)
    unit = tuple(case() for _ in range(400))
    drawn = torch.tensor([t[0] for t in hf.run(unit, settings).tokens])
    logits = hf.model(torch.tensor([IDS])).logits[0, -1].float()
    law = (logits / 3.0).softmax(0)
    shares = torch.bincount(drawn, minlength=len(law)) / len(drawn)
    assert float((shares - law).abs().sum() / 2) < 0.2
    rare = law.argsort()[:-50]
    assert float(law[rare].sum()) > 0.03
    assert float(shares[rare].sum()) > 0.01


def test_counters_tell_what_was_drafted(drafting):
    lookup, assisted = (peer.run((case(),), LONG) for peer in drafting)
    (counted,) = assisted.counters
    # The assistant is the model itself, so all it drafts is accepted.
    assert counted.drafted == counted.accepted > 0
    assert counted.passes + counted.accepted == 24
    assert counted.drafted_at == counted.accepted_at
    (counted,) = lookup.counters
    assert counted.drafted > counted.accepted >= 0
    assert sum(counted.drafted_at) == counted.drafted
    assert sum(counted.accepted_at) == counted.accepted


def test_counters_of_a_peer_that_drafts_nothing_are_those_of_plain_decoding(hf):
    assert hf.run((case(),), LONG).counters == (Counters(new_tokens=24, passes=23),)


def test_the_prompts_own_pass_counts_if_it_drafted():
    counted = count(6, emitted=(3, 1, 2), drafted=(2, 0, 4))
    assert counted == Counters(
        new_tokens=6, passes=3, drafted=6, accepted=3, drafted_at=(2, 2, 1, 1), accepted_at=(2, 1)
    )
    assert count(3, emitted=(1, 2), drafted=(0, 1)).passes == 1


def test_a_model_in_memory_is_used_as_it_is_and_left_as_it_was():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf_config("qwen3")).train()
    model.generation_config.top_k, model.generation_config.num_beams = 3, 2
    before = model.generation_config.to_dict()
    target = load_target(model)
    peer = make_peer("hf", target)
    run = peer.run((case(),), replace(LONG, max_new_tokens=8))
    assert peer.model is model
    assert run.tokens[0] == plain(target, IDS, max_new_tokens=8, ignore_eos=True)
    assert model.generation_config.to_dict() == before
    assert all(module.training for module in model.modules())
    assert not model._forward_hooks


def test_peers_made_beside_each_other_share_the_model(target, hf, drafting):
    assert drafting[0].model is hf.model
    assert drafting[1].model is not hf.model


# The twin


def own(family, **changes):
    """A model of transformers, and our decoder on its weights in memory."""
    torch.manual_seed(0)
    config = hf_config(family, initializer_range=0.5, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return load_target(model, backend="own")


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more}}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", rope("linear")),
        ("llama", rope("dynamic")),
        ("llama", rope("yarn", original_max_position_embeddings=128)),
        (
            "llama",
            rope("llama3", original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        ("mistral", {"sliding_window": 5}),
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
        ("qwen3", {}),
        ("gemma3", {"sliding_window": 5, "sliding_window_pattern": 2}),
        ("mixtral", {"sliding_window": 5}),
        ("qwen3_moe", {"norm_topk_prob": True}),
    ],
)
def test_every_family_has_a_twin(family, changes):
    target = own(family, **changes)
    twin = hf_peer.transformers_twin(target)
    assert apart(twin, target)[0] < 1e-4
    assert twin.generation_config.eos_token_id is None


def test_gemma_norms_as_gguf_files_store_them():
    whole = own("gemma3", sliding_window=5)
    config = replace(whole.config, norm_offset=0.0)
    tensors = {
        name: whole.checkpoint.tensor(name) + (1.0 if "norm" in name else 0.0)
        for name in config.tensor_shapes()
    }
    target = Decoder.load(MemoryCheckpoint(config, tensors, name="g"), dtype=torch.float32)
    assert apart(hf_peer.transformers_twin(target), target)[0] < 1e-4


def test_divisors_of_gguf_files_reach_the_twin():
    whole = own("llama")
    turned = replace(whole.config.ropes[0], kind="divided", divisors=(1.0, 2.0, 4.0, 8.0))
    config = replace(whole.config, ropes=(turned,))
    tensors = {name: whole.checkpoint.tensor(name) for name in config.tensor_shapes()}
    target = Decoder.load(MemoryCheckpoint(config, tensors, name="d"), dtype=torch.float32)
    assert apart(hf_peer.transformers_twin(target), target)[0] < 1e-4


@pytest.mark.parametrize(
    "wrong", [{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rms_norm_eps": 0.5}]
)
def test_a_twin_that_computes_something_else_is_refused(monkeypatch, wrong):
    target = own("llama")
    right = hf_peer._settings
    monkeypatch.setattr(hf_peer, "_settings", lambda config: right(config) | wrong)
    with pytest.raises(ModelError, match="computes something else"):
        hf_peer.transformers_twin(target)


def test_the_twin_of_a_quantized_target_has_the_weights_before_rounding():
    whole = own("llama", hidden_size=64, head_dim=16)
    target = whole.quantized("int8")
    peer = make_peer("hf", target, note=pytest.fail)
    assert peer.about["weights"] == "not rounded to int8, as ours are"
    assert apart(peer.model, whole)[0] < 1e-4 < apart(peer.model, target)[0]


def test_the_twin_has_the_dtype_asked_for():
    target = tiny(dtype=torch.float32)
    assert hf_peer.transformers_twin(target, torch.bfloat16).dtype is torch.bfloat16
    with pytest.raises(ModelError, match="is in memory as"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config("llama"))
        hf_peer.transformers_twin(load_target(model), torch.bfloat16)


# Who takes part


def test_unknown_names_are_refused_and_absent_peers_left_out_in_one_line(target, tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean hf"):
        make_peer("hff", target)
    other = tmp_path / "other"
    save_hf(other, "llama", vocab_size=64)
    for name, given, told in (
        ("hf-assisted", {}, "needs an assistant model"),
        ("hf-assisted", {"assistant": other}, "has 64 tokens"),
        ("openvino", {}, "name its Python (--peer-python)"),
        ("llamacpp", {"peer_python": "/no/where"}, "no Python at /no/where"),
        ("openvino", {"peer_python": sys.executable}, "optimum-cli export openvino"),
        ("hf", {"dtype": "int3"}, "dtype 'int3' is not one of"),
    ):
        lines = []
        assert make_peer(name, target, note=lines.append, **given) is None
        (line,) = lines
        assert line.startswith(f"{name} is left out: ")
        assert told in line
        assert "\n" not in line


def test_notes_go_to_standard_error(target, capsys):
    assert make_peer("llamacpp", target) is None
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("llamacpp is left out")


# Files for other programs


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A small quantized GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    config = DecoderConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 261,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    )
    coins = torch.Generator().manual_seed(0)
    shapes = config.tensor_shapes().items()
    tensors = {gguf_name(n, "llama"): torch.randn(s, generator=coins).numpy() for n, s in shapes}
    kinds = {"blk.0.attn_q.weight": "Q4_1", "blk.0.ffn_up.weight": "Q8_0"}
    metadata = gguf_metadata(config, "llama") | {"general.file_type": 3}
    write_gguf(path, tensors, metadata, arch="llama", kinds=kinds)
    return path


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "F16"), (torch.float32, "F32")])
def test_an_expanded_file_holds_the_same_model(gguf_file, tmp_path, dtype, kind):
    path = tmp_path / "new" / "wide.gguf"
    expand_gguf(gguf_file, path, dtype)
    before, after = GGUFCheckpoint(gguf_file), GGUFCheckpoint(path)
    assert after.config == before.config
    skipped = ("general.file_type", "general.quantization_version")
    assert {k: v for k, v in after.metadata.items() if k not in skipped} == {
        k: v for k, v in before.metadata.items() if k not in skipped
    }
    for name in before.names():
        wide, told = after.tensor(name, torch.float32), before.tensor(name, torch.float32)
        assert after.places[name].kind == ("F32" if told.ndim == 1 else kind)
        assert torch.equal(wide, told if after.places[name].kind == "F32" else told.half().float())
    assert [file.name for file in path.parent.iterdir()] == ["wide.gguf"]


def test_peers_read_as_wide_as_we_multiply_and_reports_say_so(gguf_file, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    target = load_target(str(gguf_file), dtype="float32")
    for engine, dtype, width in (
        ("llamacpp", torch.bfloat16, "float16"),
        ("llamacpp", torch.float32, "float32"),
        ("openvino", torch.float32, "float16"),
    ):
        path, about = peer_model(engine, target, dtype)
        assert path.name.endswith(f"-{width}.gguf")
        assert about["weights"] == f"{width}, expanded from Q4_1 and Q8_0"
    export = next((tmp_path / "peers").iterdir()).name.rpartition("-")[0] + "-openvino"
    (tmp_path / "peers" / export).mkdir()
    (tmp_path / "peers" / export / "openvino_model.xml").touch()
    path, about = peer_model("openvino", target, torch.bfloat16)
    assert path.name == export
    assert about["weights"].startswith("as exported in")


def test_an_expanded_file_that_is_damaged_is_made_again(gguf_file, tmp_path, monkeypatch):
    """Whoever maps a file that is too short is killed by the system."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    target = load_target(str(gguf_file), dtype="float32")
    path, _ = peer_model("llamacpp", target, torch.float32)
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1]):
        path.write_bytes(damaged)
        assert peer_model("llamacpp", target, torch.float32)[0] == path
        assert path.read_bytes() == whole


# Child processes

FAKES = {
    "openvino.py": """
        def get_version(): return "1"
        class Tensor:
            def __init__(self, array): self.array = array
    """,
    "openvino_genai.py": """
        import os, sys, time
        from types import SimpleNamespace as N
        __version__ = "2"
        print("hello on standard output")
        class GenerationConfig: pass
        class SchedulerConfig: pass
        class TokenizedInputs:
            def __init__(self, ids, mask): self.ids, self.mask = ids.array, mask.array
        class LLMPipeline:
            def __init__(self, model, device, **properties):
                if "broken" in model: raise RuntimeError("no such\\n  quantization")
                self.properties = properties
            def generate(self, inputs, config):
                print("noise")
                rows = [[t for t, m in zip(*r) if m] for r in zip(inputs.ids, inputs.mask)]
                if rows[0][0] == 13: raise RuntimeError("bad\\nluck")
                if rows[0][0] == 66: print("out of order", file=sys.stderr); os._exit(7)
                if rows[0][0] == 99: time.sleep(60)
                if rows[0][0] == 55: return N(tokens=[[str(sorted(vars(config).items()))],
                    [str(sorted(self.properties.items(), key=str))]], perf_metrics=T)
                time.sleep(0.02)
                tokens = [[int(sum(r)) + i for i in range(config.max_new_tokens)] for r in rows]
                return N(tokens=tokens, perf_metrics=T)
        T = N(get_ttft=lambda: N(mean=5.0))
    """,
    "llama_cpp.py": """
        __version__ = "3"
        class Llama:
            def __init__(self, **given): self.given, self.kept = given, None
            def reset(self): self.kept = []
            def set_seed(self, seed): self.seed = seed
            def generate(self, row, **settings):
                assert self.kept == [], "the prompt before is still there"
                self.kept = list(row)
                yield from range(100, 400)
    """,
}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment with both packages."""
    folder = tmp_path_factory.mktemp("env")
    for name, source in FAKES.items():
        (folder / name).write_text(textwrap.dedent(source), encoding="utf-8")
    return environment(folder / "python", f"PYTHONPATH={folder} ")


def environment(path, variables=""):
    path.write_text(f'#!/bin/sh\n{variables}exec "{sys.executable}" "$@"\n', encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def child(python, engine="openvino", **changes):
    given = {
        "engine": engine,
        "model": "m",
        "dtype": "bfloat16",
        "threads": 3,
        "context": 64,
        "prompt_lookup": False,
        **changes.pop("given", {}),
    }
    settings = {"about": {"dtype": "bfloat16"}, "eos_ids": frozenset({7}), "one_row": False}
    return ChildPeer(engine, python, given, **settings | changes)


@pytest.fixture(scope="module")
def openvino(python):
    peer = child(python)
    yield peer
    peer.close()


def test_a_child_answers_in_turn_whatever_its_library_prints(openvino):
    settings = Settings(max_new_tokens=3)
    for unit, tokens in (
        ((case((1, 2)),), ((3, 4, 5),)),
        ((case((1, 2)), case((10,))), ((3, 4, 5), (10, 11, 12))),
    ):
        run = openvino.run(unit, settings)
        assert run.tokens == tokens
        assert run.prefill_seconds == 0.005 < 0.02 <= run.seconds < 1
        assert run.peak_memory_bytes > 1 << 20
        assert run.counters == ()
    assert openvino.about["dtype"] == "bfloat16"
    assert openvino.about["versions"] == {"openvino-genai": "2", "openvino": "1"}
    assert openvino.about["computed in"] == "bf16"


def test_settings_reach_openvino(openvino):
    config, properties = openvino.run((case((55,)),), Settings(max_new_tokens=4)).tokens
    assert config == ("[('do_sample', False), ('ignore_eos', True), ('max_new_tokens', 4)]",)
    assert "('INFERENCE_NUM_THREADS', 3)" in properties[0]
    settings = Settings(max_new_tokens=4, temperature=0.5, ignore_eos=False)
    (config, _) = openvino.run((case((55,), seed=11),), settings).tokens
    assert config == (
        "[('do_sample', True), ('eos_token_id', 7), ('ignore_eos', False), ('max_new_tokens', 4), "
        "('rng_seed', 11), ('stop_token_ids', {7}), ('temperature', 0.5)]",
    )


def test_an_error_is_told_and_the_child_goes_on(openvino):
    with pytest.raises(RequestError, match="openvino cannot answer: RuntimeError: bad luck"):
        openvino.run((case((13,)),), LONG)
    assert len(openvino.run((case(),), LONG).tokens[0]) == 24


def test_llamacpp_starts_every_prompt_anew_and_stops_at_an_end(python):
    peer = child(python, "llamacpp", eos_ids=frozenset({102}), one_row=True)
    try:
        for ignore, tokens in ((True, tuple(range(100, 124))), (False, (100, 101, 102))):
            assert peer.run((case(),), replace(LONG, ignore_eos=ignore)).tokens == (tokens,)
        with pytest.raises(RequestError, match="one prompt at a time"):
            peer.run((case(), case()), LONG)
    finally:
        peer.close()
    assert peer._process.poll() == 0


def test_a_child_that_dies_says_why(python):
    peer = child(python)
    with pytest.raises(ModelError, match="openvino ended with status 7: out of order"):
        peer.run((case((66,)),), LONG)
    with pytest.raises(ModelError, match="ended with status 7"):
        peer.run((case(),), LONG)
    peer.close()


def test_a_child_that_hangs_is_ended(python, monkeypatch):
    from outpace.bench.peers import process as peer_process

    monkeypatch.setattr(peer_process, "_PARTING", 0.1)
    peer = child(python, answer_seconds=0.3, token_seconds=0.0)
    began = time.perf_counter()
    with pytest.raises(ModelError, match=r"did not answer within 0\.3 s and was ended"):
        peer.run((case((99,)),), LONG)
    assert peer._process.poll() is not None
    assert time.perf_counter() - began < 10
    peer.close()


def test_what_is_absent_or_cannot_be_loaded(python, tmp_path):
    empty = environment(tmp_path / "python", f"PYTHONPATH={tmp_path} ")
    with pytest.raises(PeerAbsentError, match="No module named 'llama_cpp'; pip install llama-cpp"):
        child(empty, "llamacpp")
    with pytest.raises(ModelError, match="cannot load broken: RuntimeError: no such quantization"):
        child(python, given={"model": "broken"})
    with pytest.raises(PeerAbsentError, match="cannot run"):
        child(tmp_path)
    (tmp_path / "false").write_text("#!/bin/sh\necho sorry >&2; exit 3\n", encoding="utf-8")
    (tmp_path / "false").chmod(0o755)
    with pytest.raises(ModelError, match="ended with status 3: sorry"):
        child(tmp_path / "false")


def test_a_child_is_made_from_a_target(python, gguf_file, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    target = load_target(str(gguf_file), dtype="float32")
    target.defaults = GenerationDefaults(eos_ids=(102,))
    peer = make_peer("llamacpp", target, threads=2, peer_python=python)
    try:
        assert (peer.name, peer.kind) == ("llamacpp", "peer")
        assert peer.about["threads"] == 2
        assert peer.about["weights"] == "float32, expanded from Q4_1 and Q8_0"
        run = peer.run((case(),), replace(LONG, ignore_eos=False))
        assert 102 in peers.end_ids(target)
        assert run.tokens == ((100, 101, 102),)
    finally:
        peer.close()


def test_the_child_needs_nothing_of_this_package():
    source = Path(peers.__file__).with_name("child.py").read_text(encoding="utf-8")
    assert "from outpace" not in source
    assert "import outpace" not in source
    assert set(PEERS) == {
        "hf",
        "hf-prompt-lookup",
        "hf-assisted",
        "openvino",
        "openvino-prompt-lookup",
        "llamacpp",
    }
