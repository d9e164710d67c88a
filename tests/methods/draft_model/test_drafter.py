"""The trained draft model: found, loaded with what it borrows, and lossless."""

import json

import pytest
import torch

from outpace import Engine, ModelError
from outpace.drafters import trained
from outpace.law import VocabMap
from outpace.methods.draft_model import drafter
from outpace.methods.draft_model.drafter import DraftModel, DraftModelConfig
from outpace.methods.draft_model.objective import DraftModelObjective, DraftModelTraining
from outpace.models.products import works
from outpace.models.tiny import TableTarget, tiny

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42, 43, 44], [77]]


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_DATA", str(tmp_path / "data"))


def half(target):
    """The end of sequence and every token with an even number."""
    to_target_D = torch.tensor([i for i in range(target.vocab_size) if i % 2 == 0 or i == 1])
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[to_target_D] = torch.arange(len(to_target_D))
    return VocabMap(to_target_D, feed_V)


def write(target, folder, **options):
    """A draft model before its first step."""
    vocab = half(target)
    DraftModelObjective.build(DraftModelTraining(**options), target, vocab).save(folder, {})
    return vocab


@pytest.mark.parametrize("fast,wanted", [(torch.float32, "auto"), (torch.bfloat16, torch.float32)])
def test_another_model_is_read_as_it_is_stored_where_that_fits(target, monkeypatch, fast, wanted):
    asked = []
    monkeypatch.setattr(drafter, "fast_dtype", lambda device: fast)
    monkeypatch.setattr(drafter, "load_beside", lambda target, name, dtype: asked.append(dtype) or target)
    drafter.load_model(DraftModelConfig(model="other.gguf"), target)
    drafter.load_model(DraftModelConfig(model="other.gguf", dtype="bfloat16"), target)
    assert asked == [wanted, "bfloat16"]


def test_levels_are_priced_by_the_weights_that_they_read(target):
    light = DraftModel.load(DraftModelConfig(model="tiny", layers=1), tiny(layers=40))
    assert light.traits.level_D == DraftModel.traits.level_D, "a light one takes longer than its weights say"
    engine = Engine(target, drafter="none")
    levels = {}
    for tree in ("dynamic", "dynamic:8:0"):
        spec = f"draft_model[model=tiny tree={tree}]"
        assert engine.method(spec).drafter.traits.level_D == (1.0,)
        results = engine.generate(PROMPTS, drafter=spec, max_new_tokens=12, ignore_eos=True)
        levels[tree] = {len(one.counters.drafted_at) for one in results}
    assert levels["dynamic"] == {1} and min(levels["dynamic:8:0"]) > 1, "a second level costs a pass"


def test_a_trained_model_is_rounded_and_runs_compiled(target, tmp_path):
    if not works():
        pytest.skip("C cannot be compiled for this machine")
    write(target, tmp_path / "d", layers=2)
    cut = DraftModel.load(DraftModelConfig(model=str(tmp_path / "d")), target).model
    whole = DraftModel.load(DraftModelConfig(model=str(tmp_path / "d"), quantize=None), target).model
    assert cut.weight_bytes < 0.6 * whole.weight_bytes and cut.digest == whole.digest
    assert cut._programs is not None and whole._programs is not None


SHAPES = [
    "",
    " tree=3x2x1",
    " verifier=chain",
    " tree=2x2 verifier=tree[replacement=true]",
    " tree=2x2 policy=confidence",
]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_is_plain_text(target, tmp_path, shape):
    write(target, tmp_path / "d", layers=2)
    engine = Engine(target, drafter="none")
    spec = f"draft_model[model={tmp_path / 'd'}{shape}]"
    for settings in ({}, {"temperature": 0.8, "seed": 5, "reproducible": True}):
        if settings and "verifier" in shape:
            continue
        settings |= {"max_new_tokens": 24, "ignore_eos": True}
        plain = engine.generate(PROMPTS, drafter="none", **settings)
        fast = engine.generate(PROMPTS, drafter=spec, **settings)
        assert [one.tokens for one in fast] == [one.tokens for one in plain]
        assert sum(one.counters.accepted for one in fast) > 3
        single = [engine.generate(one, drafter=spec, **settings).tokens for one in PROMPTS]
        assert single == [one.tokens for one in fast]


COMPOSED = {
    "cascade": "cascade[levels=draft_model[model={0}]+max_gram]",
    "two models": "cascade[levels=draft_model[model=tiny]+draft_model[model={0}]+max_gram]",
    "ouroboros": "ouroboros[draft=draft_model[model={0}]]",
    "graph": "graph[draft=draft_model[model={0}]]",
    "select": "select[members=draft_model[model={0}]+suffix]",
}


@pytest.mark.parametrize("kind", COMPOSED)
def test_drafters_that_stand_on_it_take_half_a_vocabulary(target, tmp_path, kind):
    """They also read texts with it, and want no logits then."""
    write(target, tmp_path / "d", layers=1)
    engine = Engine(target, "none")
    prompts = [[5, 9, 11, 5, 9, 11, 5], [40, 41, 42], [77]]
    spec = COMPOSED[kind].format(tmp_path / "d")
    for asked in ({}, {"temperature": 0.9, "seed": 2}):
        settings = {"max_new_tokens": 24, "ignore_eos": True, **asked}
        plain = engine.generate(prompts, drafter="none", **settings)
        drafted = engine.generate(prompts, drafter=spec, **settings)
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        assert sum(one.counters.drafted for one in drafted) > 0


def test_only_tokens_of_its_vocabulary_are_drafted(target, tmp_path):
    vocab = write(target, tmp_path / "d", layers=2)
    engine = Engine(target, drafter="none")
    records = []
    method = engine.method(f"draft_model[model={tmp_path / 'd'}]").drafter
    real = method.propose
    method.propose = lambda rows: records.append(real(rows)) or records[-1]
    engine.generate(
        PROMPTS,
        drafter=f"draft_model[model={tmp_path / 'd'}]",
        max_new_tokens=30,
        temperature=1.0,
        seed=1,
        ignore_eos=True,
    )
    drafted = {token for drafts in records for draft in drafts for token in draft.token_N}
    assert len(drafted) > 10 and drafted <= set(vocab.to_target_D.tolist())
    laws = [law for drafts in records for draft in drafts for law in draft.laws]
    assert laws and all(law.id_S is not None for law in laws)


def test_all_layers_and_half_the_vocabulary_fail_only_outside_it(target, tmp_path):
    """The draft law is the target's own, given that the token is one that it knows."""
    vocab = write(target, tmp_path / "d", layers=2)
    model, id_D = (
        DraftModel.load(DraftModelConfig(model=str(tmp_path / "d")), target).model,
        vocab.to_target_D,
    )
    from outpace.types import Feed

    caches = [one.new_cache() for one in (model, target)]
    part, whole = (
        one.score([Feed.chain(cache.open(), PROMPTS[0])], cache).logits_TV
        for one, cache in zip((model, target), caches, strict=True)
    )
    assert part.shape == (8, len(id_D))
    torch.testing.assert_close(part, whole[:, id_D], atol=0.3, rtol=0.05)  # bfloat16 weights


def test_without_a_name_the_one_of_this_target_is_found(target, tmp_path):
    with pytest.raises(
        ModelError,
        match="no trained draft_model for tiny; make one with: outpace train draft_model --model tiny",
    ):
        DraftModel.load(DraftModelConfig(), target)
    home = trained.home("draft_model", target)
    assert home == tmp_path / "data" / "drafters" / target.digest / "draft_model"
    write(target, home, layers=1)
    assert trained.find("draft_model", target) == home
    assert DraftModel.load(DraftModelConfig(), target).model.num_layers == 1
    with pytest.raises(ModelError, match="no trained draft_model for tiny:1"):
        DraftModel.load(DraftModelConfig(), tiny(1))


def test_shipped_ones_are_found_by_digest(target, tmp_path, monkeypatch):
    monkeypatch.setattr(trained, "shipped_folder", lambda: tmp_path / "weights")
    write(target, tmp_path / "weights" / "some-name" / "draft_model", layers=1)
    write(tiny(1), tmp_path / "weights" / "another" / "draft_model", layers=2)
    assert trained.find("draft_model", target).parent.name == "some-name"
    assert trained.find("draft_model", tiny(1)).parent.name == "another"
    write(target, trained.home("draft_model", target), layers=1)
    found = trained.candidates("draft_model", target)
    assert found[0] == trained.home("draft_model", target) and len(found) == 2


def test_a_drafter_of_another_target_is_named(target, tmp_path):
    write(tiny(1), tmp_path / "d", layers=1)
    with pytest.raises(ModelError, match=r"trained for tiny:1 \(.*not for tiny \("):
        DraftModel.load(DraftModelConfig(model=str(tmp_path / "d")), target)


def broken(folder, file, change):
    path = folder / file
    if file.endswith("json"):
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
    else:
        path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("model.safetensors", lambda data: data[:-5], "truncated or corrupt"),
        ("config.json", lambda data: data.pop("hidden_size"), "lacks 'hidden_size'"),
        ("config.json", lambda data: data.update(method="eagle3"), "'eagle3', not 'draft_model'"),
        ("config.json", lambda data: data.update(vocab_size=7), "vocab_size 7, but tiny has"),
        ("config.json", lambda data: data["decoder"].pop("ropes"), "fields are not right"),
        ("config.json", lambda data: data["decoder"].update(ffn_size=8), "has shape"),
    ],
)
def test_damage_is_one_line(target, tmp_path, file, change, words):
    write(target, tmp_path / "d", layers=1)
    broken(tmp_path / "d", file, change)
    with pytest.raises(ModelError, match=words) as caught:
        DraftModel.load(DraftModelConfig(model=str(tmp_path / "d")), target)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_is_said(target, tmp_path):
    write(target, tmp_path / "d", layers=2)
    with pytest.raises(ModelError, match="has its dtype, float32; leave dtype=bfloat16 out"):
        DraftModel.load(DraftModelConfig(model=str(tmp_path / "d"), dtype="bfloat16"), target)
    assert (
        DraftModel.load(DraftModelConfig(model=str(tmp_path / "d"), layers=1), target).model.num_layers == 1
    )
    with pytest.raises(ModelError, match="layers=3"):
        DraftModel.load(DraftModelConfig(model=str(tmp_path / "d"), layers=3), target)
    with pytest.raises(ModelError, match="is a TableTarget; load it with backend='own'"):
        trained.lender(TableTarget.random(0), "draft_model")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        trained.find("eagle3", target, str(tmp_path / "nowhere"))
    offsets = {"d2t": torch.tensor([0, 0, -1])}
    with pytest.raises(ModelError, match="does not map 3 draft ids"):
        trained.vocab_map(offsets, 10)
    assert trained.vocab_map({}, 10) is None


def test_shapes_survive_the_file(target):
    data = json.loads(json.dumps(trained.decoder_to_json(target.config)))
    assert trained.decoder_from_json(data, trained.shipped_folder()) == target.config


def test_plain_models_are_not_taken_for_drafters(target, tmp_path):
    assert not trained.is_drafter(tmp_path) and not trained.is_drafter("tiny")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not trained.is_drafter(tmp_path)
    write(target, tmp_path, layers=1)
    assert trained.is_drafter(tmp_path)
