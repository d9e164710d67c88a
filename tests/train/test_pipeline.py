import hashlib
import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from outpace import Engine, ModelError, OutpaceError, RequestError, SpecError, UnknownNameError
from outpace.drafters.trained import read_measured, read_tensors
from outpace.models.lock import Lock
from outpace.train import checkpoint
from outpace.train.corpus import CorpusPrompt
from outpace.train.estimate import estimate
from outpace.train.options import read_options
from outpace.train.pipeline import Pipeline, made_to_json, note_measured

PROMPTS = [CorpusPrompt(messages=({"role": "user", "content": f"tell {i}"},), source=0) for i in range(120)]
SETTINGS = [
    "layers=1",
    "pipeline.vocab=64",
    "pipeline.tokens_per_batch=256",
    "loop.steps=6",
    "loop.evaluate_every=3",
    "loop.checkpoint_every=2",
    "loop.bf16=false",
    "data.batch=32",
    "data.max_new_tokens=16",
]
OPTIONS = read_options("draft_model", SETTINGS, 1500)


def quiet(tick):
    pass


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


@pytest.fixture(scope="module")
def made(engine, tmp_path_factory):
    """A training that nothing disturbed."""
    work = tmp_path_factory.mktemp("work")
    pipeline = Pipeline(engine, OPTIONS, prompts=PROMPTS, work=work, out=work / "out", say=quiet)
    return pipeline, pipeline.run(report=quiet)


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_from_prompts_to_a_drafter_that_drafts(engine, made):
    pipeline, result = made
    assert result.trained.steps == 6 and pipeline.store.answer_tokens >= 1500
    assert pipeline.vocab is not None and len(pipeline.vocab.to_target_D) == 64
    spec = f"draft_model[model={result.folder}]"
    plain = engine.generate([5, 9, 11], drafter="none", max_new_tokens=12, ignore_eos=True)
    fast = engine.generate([5, 9, 11], drafter=spec, max_new_tokens=12, ignore_eos=True)
    assert fast.tokens == plain.tokens and fast.counters.drafted > 0


def test_the_provenance_tells_everything(made):
    pipeline, result = made
    told = json.loads((result.folder / "provenance.json").read_text())
    assert told["target"] == {"name": "tiny", "digest": pipeline.target.digest}
    assert told["data"]["digest"] == pipeline.store.digest
    assert told["data"]["answer_tokens"] == pipeline.store.answer_tokens
    assert told["data"]["plans"][0]["plan"]["prompts"] == 120
    assert told["vocab"]["size"] == 64 and 0.3 < told["vocab"]["held_out_coverage"] <= 1
    assert told["settings"]["options"]["layers"] == 1
    assert told["settings"]["loop"]["steps"] == "6"
    assert told["held_out"]["acceptance"] and told["versions"]["torch"]
    assert made_to_json(result)["held_out"]["step"] == result.trained.best_step
    assert json.dumps(made_to_json(result))


def test_a_chat_template_is_needed_for_prompts_alone(engine, made, monkeypatch):
    monkeypatch.setattr(engine.target.tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="tiny has no chat template"):
        Pipeline(engine, OPTIONS, prompts=PROMPTS, work=made[0].work)
    Pipeline(engine, OPTIONS, work=made[0].work)


def test_nothing_is_left_to_resume_after_the_end(engine, made):
    pipeline, _ = made
    assert checkpoint.latest(pipeline.folder) is None
    Pipeline(engine, OPTIONS, work=pipeline.work)  # answers are there, so no prompts are needed


def test_stopped_and_resumed_is_the_same_to_the_bit(engine, made, tmp_path):
    pipeline, result = made

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.step == 3:
            raise Stop

    def begin(options=OPTIONS, **more):
        return Pipeline(engine, options, work=pipeline.work, out=tmp_path / "out", say=quiet, **more)

    with pytest.raises(Stop):
        begin().run(report=stop)
    assert checkpoint.latest(pipeline.folder).name == "step-00000002.safetensors"
    with pytest.raises(RequestError, match=r"stopped at .*step-00000002.* --resume"):
        begin()
    other = read_options("draft_model", [*SETTINGS, "loop.lr=0.1"], 1500)
    with pytest.raises(RequestError, match=r"began with loop .* not .*'lr': '0.1'"):
        begin(other, resume=True).run(report=quiet)
    plan = pipeline.folder / "run.json"
    whole = plan.read_bytes()
    for harm in (whole[:-9], b"[]"):
        plan.write_bytes(harm)
        with pytest.raises(OutpaceError, match=r"run\.json is corrupt .*; delete it to go on"):
            begin(resume=True).run(report=quiet)
    plan.write_bytes(whole)
    again = begin(resume=True).run(report=quiet)
    assert again.trained.steps == 6
    assert weights(again.folder) == weights(result.folder)


def test_the_drafter_in_use_stays_until_the_new_one_is_measured(engine, made, tmp_path):
    """Ctrl-C, in training or in measuring, costs nothing: --resume goes on, and measures."""
    pipeline, result = made
    out, lines, seen = tmp_path / "out", [], []
    shutil.copytree(result.folder, out)
    (out / "model.safetensors").write_bytes(b"in use")

    def begin(**more):
        return Pipeline(engine, OPTIONS, work=pipeline.work, out=out, say=lines.append, **more)

    def stop(progress):
        if progress.step == 3:
            raise KeyboardInterrupt

    def measure(folder):
        seen.append((folder, weights(folder), weights(out)))
        if len(seen) == 1:
            raise KeyboardInterrupt
        return {"speedup": 1.5}

    with pytest.raises(KeyboardInterrupt):
        begin().run(report=stop)
    assert weights(out) == b"in use" and (pipeline.best / "config.json").is_file()
    with pytest.raises(KeyboardInterrupt):
        begin(resume=True).run(report=quiet, measure=measure)
    assert weights(out) == b"in use"
    assert checkpoint.latest(pipeline.folder).name == "step-00000006.safetensors"
    assert len(lines) == 2 and all(f"is in {pipeline.best}" in x and "--resume" in x for x in lines)
    trained_on = []
    again = begin(resume=True).run(report=trained_on.append, measure=measure)
    assert not trained_on, "its steps had ended"
    assert [one[0] for one in seen] == [pipeline.best] * 2 and seen[1][2] == b"in use"
    assert weights(out) == seen[1][1] == weights(result.folder)
    assert read_measured(out) == again.measured == {"speedup": 1.5}
    assert checkpoint.latest(pipeline.folder) is None and not pipeline.best.exists()
    assert [one.name for one in tmp_path.iterdir()] == ["out"], "nothing is left beside it"
    with pytest.raises(RequestError, match=r"holds no training that was stopped; leave --resume"):
        begin(resume=True)


def test_a_folder_with_more_than_a_drafter_is_not_replaced(engine, made, tmp_path):
    pipeline, _ = made
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match=r"holds notes\.txt, which would be lost.*--out"):
        Pipeline(engine, OPTIONS, work=pipeline.work, out=tmp_path, say=quiet)
    with pytest.raises(RequestError, match="it is a file"):
        Pipeline(engine, OPTIONS, work=pipeline.work, out=tmp_path / "notes.txt", say=quiet)
    for place in (pipeline.work / "draft_model", pipeline.best):
        with pytest.raises(RequestError, match="--out"):
            Pipeline(engine, OPTIONS, work=pipeline.work, out=place, say=quiet)


def test_the_home_of_the_user_may_be_a_tilde(engine, made, tmp_path, monkeypatch):
    pipeline, result = made
    monkeypatch.setenv("HOME", str(result.folder.parent))
    start = Path("~") / result.folder.name
    more = Pipeline(engine, OPTIONS, work=pipeline.work, out=tmp_path / "o", start=start, say=quiet)
    assert more.vocab is not None and more.provenance()["start"]["sha256"]


def test_training_begins_where_another_ended(engine, made, tmp_path):
    pipeline, result = made
    still = read_options("draft_model", [*SETTINGS, "loop.lr=1e-12", "pipeline.vocab=32"], 1500)
    more = Pipeline(engine, still, work=pipeline.work, out=tmp_path / "more", start=result.folder, say=quiet)
    made_more = more.run(report=quiet)
    old, new = read_tensors(result.folder), read_tensors(made_more.folder)
    assert all(torch.equal(old[name], new[name]) for name in old), "the vocabulary stays as well"
    told = made_more.provenance["start"]
    assert told["provenance"]["settings"] == json.loads(json.dumps(result.provenance["settings"]))
    assert told["sha256"] == hashlib.sha256(weights(result.folder)).hexdigest()
    other = read_options("draft_model", [*SETTINGS, "layers=2"], 1500)
    with pytest.raises(ModelError, match=r"layers\.1\.\S+ is missing, and"):
        Pipeline(engine, other, work=pipeline.work, out=tmp_path / "o", start=result.folder, say=quiet).run(
            report=quiet
        )
    with pytest.raises(ModelError, match="holds no config"):
        Pipeline(engine, still, work=pipeline.work, start=tmp_path, say=quiet)


def test_training_may_begin_with_a_mean(engine, made, tmp_path):
    pipeline, result = made
    still = read_options("draft_model", [*SETTINGS, "loop.lr=1e-12", "pipeline.vocab=32"], 1500)
    other = tmp_path / "other"
    shutil.copytree(result.folder, other)
    old = read_tensors(other)
    tripled = {name: 3 * one if one.is_floating_point() else one for name, one in old.items()}
    save_file(tripled, other / "model.safetensors")
    settings = {"work": pipeline.work, "out": tmp_path / "mean", "say": quiet}
    more = Pipeline(engine, still, start=result.folder, mean_with=[other], **settings)
    made_more = more.run(report=quiet)
    new = read_tensors(made_more.folder)
    for name, one in old.items():
        assert torch.allclose(
            new[name].float(), (2 if one.is_floating_point() else 1) * one.float(), rtol=1e-2
        )
    (told,) = made_more.provenance["start"]["mean_with"]
    assert told["sha256"] == hashlib.sha256(weights(other)).hexdigest()
    with pytest.raises(RequestError, match="--start as well"):
        Pipeline(engine, still, mean_with=[other], **settings)


def test_data_are_made_once(engine, made, monkeypatch, tmp_path):
    pipeline, _ = made
    monkeypatch.setattr(engine.target, "score", lambda *a, **k: pytest.fail("a pass was run"))
    again = Pipeline(engine, OPTIONS, prompts=PROMPTS, work=pipeline.work, out=tmp_path, say=quiet)
    again.data()
    assert again.store.digest == pipeline.store.digest
    assert again.features.nbytes > 0.3 * pipeline.store.length_S.sum() * 64 * 2


def test_held_out_prompts_were_not_learned_from(made):
    pipeline, _ = made
    prompts = pipeline.held_out_prompts(5)
    learned = {
        tuple(one.ids[: one.prompt].tolist())
        for one, held in zip(pipeline.store, pipeline.store.held_out_S, strict=True)
        if not held
    }
    assert prompts and not learned & set(prompts)


@pytest.mark.parametrize("limit", [1, 12, 16, 30, 99])
def test_held_out_prompts_are_short_and_long(limit):
    class Store(list):
        held_out_S = [True] * 31

    store = Store(SimpleNamespace(ids=torch.arange(length), prompt=length) for length in range(1, 32))
    lengths = [len(one) for one in Pipeline.held_out_prompts(SimpleNamespace(store=store), limit)]
    assert lengths == sorted(set(lengths)) and len(lengths) == min(limit, 31)
    assert lengths[0] == 1 and (limit == 1 or lengths[-1] > 28)


def test_without_prompts_and_answers_there_is_nothing_to_do(engine, tmp_path):
    with pytest.raises(RequestError, match="no prompts"):
        Pipeline(engine, OPTIONS, work=tmp_path)


def test_several_processes_need_data_that_are_there(engine, made, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RequestError, match="--only-data"):
        assert Pipeline(engine, OPTIONS, prompts=PROMPTS, work=tmp_path).store
    pipeline, _ = made
    shared = Pipeline(engine, OPTIONS, prompts=PROMPTS, work=pipeline.work)
    assert len(shared.features) == len(pipeline.features) and shared.features.room == 0
    batches = shared.batches("train")
    assert (batches.rank, batches.world) == (1, 2)


def test_an_estimate_writes_nothing_and_is_near_the_truth(engine, made, tmp_path):
    pipeline, _ = made
    work = tmp_path / "w"
    found = estimate(Pipeline(engine, OPTIONS, prompts=PROMPTS, work=work, say=quiet))
    assert not work.exists()
    assert found.answer_tokens == 1500 and found.steps == 6
    assert found.disk_bytes > found.tokens * 64 * 2
    assert 0 < found.seconds < 60 and found.memory_bytes > 10**6
    left = estimate(pipeline)
    assert left.generate_seconds == 0
    assert left.tokens == pytest.approx(pipeline.store.length_S.sum(), rel=0.01)
    assert left.seconds == pytest.approx(left.train_seconds + left.feature_seconds)


def test_a_measurement_is_added_to_the_provenance(made):
    _, result = made
    before = json.loads((result.folder / "provenance.json").read_text())
    assert read_measured(result.folder) is None
    note_measured(result.folder, {"speedup": 1.5})
    assert read_measured(result.folder) == {"speedup": 1.5}
    after = json.loads((result.folder / "provenance.json").read_text())
    assert after == {**before, "measured": {"speedup": 1.5}}
    assert read_measured(result.folder / "nothing") is None


def test_settings_are_read_by_group():
    options = read_options(
        "draft_model",
        ["layers=3", "loop.lr=0.01", "data.greedy=0.25", "pipeline.epochs=2", "pipeline.vocab=none"],
        77,
    )
    assert options.own.layers == 3 and options.data.greedy == 0.25 and options.data.tokens == 77
    assert options.pipeline.vocab is None
    loop = options.loop_config(50)
    assert loop.lr == 0.01 and loop.steps == 100
    assert read_options("draft_model", ["loop.minutes=5"]).loop_config(50).steps is None


@pytest.mark.parametrize(
    ("method", "pair", "error", "message"),
    [
        ("draft_modle", "layers=1", UnknownNameError, "did you mean draft_model"),
        ("draft_model", "layers", SpecError, "is not key=value"),
        ("draft_model", "layer=1", UnknownNameError, "did you mean layers"),
        ("draft_model", "loop.lrr=1", UnknownNameError, "did you mean loop.lr"),
        ("draft_model", "lr=1", UnknownNameError, "unknown setting 'lr' of draft_model"),
        ("draft_model", "other.x=1", UnknownNameError, "unknown setting"),
        ("draft_model", ".layers=1", UnknownNameError, "unknown setting"),
        ("draft_model", "layers=x", SpecError, "whole number"),
        ("draft_model", "data.greedy=7", SpecError, "greedy must be in"),
        ("draft_model", "pipeline.vocab=0", SpecError, r"vocab must be in \[1, 10+\], or none for all"),
        ("draft_model", f"pipeline.vocab={10**99}", SpecError, "vocab must be in .*, got 10+.*"),
        ("draft_model", f"pipeline.tokens_per_batch={10**400}", SpecError, "tokens_per_batch must be in"),
        ("draft_model", "pipeline.epochs=1e308", SpecError, "epochs must be at most"),
        ("draft_model", "pipeline.feature_gb=1e300", SpecError, "feature_gb must be at most"),
        ("draft_model", f"data.answers={10**400}", SpecError, "answers must be in"),
        ("draft_model", "data.shard_seconds=-1", SpecError, "shard_seconds must be at least 0, got -1"),
        ("draft_model", f"loop.evaluate_tokens={10**400}", SpecError, "evaluate_tokens must be above 0 and"),
        ("draft_model", "loop.weight_decay=-1", SpecError, "weight_decay must be at least 0, got -1"),
        ("draft_model", "pipeline.epochs=0", SpecError, "epochs must be above 0"),
        ("draft_model", "loop.steps=0", SpecError, "steps must be above 0"),
        ("draft_model", "loop.report_every=0", SpecError, "report_every must be above 0"),
        ("draft_model", "loop.warmup=1", SpecError, "warmup must be at least 0 and below 1"),
        ("draft_model", "temperature=0", SpecError, "temperature must be above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(method, pair, error, message):
    with pytest.raises(error, match=message) as caught:
        read_options(method, [pair])
    assert isinstance(caught.value, OutpaceError) and "\n" not in str(caught.value)


def test_one_training_of_a_method_at_a_time_works_in_a_folder(engine, tmp_path):
    """A second one is refused and changes nothing. What one that was killed was writing is removed."""
    pipeline = Pipeline(engine, OPTIONS, prompts=PROMPTS, work=tmp_path, out=tmp_path / "out", say=quiet)
    lock = Lock(pipeline.folder, "")
    left = pipeline.folder / ".training.png.7-ab.part"
    left.write_bytes(bytes(9))
    with pytest.raises(OutpaceError, match="another training works in"):
        pipeline.run(report=quiet)
    assert left.exists() and pipeline.stored is None
    lock.release()
    Lock(pipeline.folder, "").release()
    assert not left.exists()


def test_who_wants_answers_waits_for_another_that_makes_them(engine, tmp_path):
    said = []
    pipeline = Pipeline(
        engine, OPTIONS, prompts=PROMPTS, work=tmp_path, out=tmp_path / "out", say=said.append
    )
    lock = Lock(tmp_path, "")
    made = threading.Thread(target=pipeline.data)
    made.start()
    while not said:
        time.sleep(0.001)
    assert said == [f"another training makes answers in {tmp_path / 'tokens'}: waiting for it"]
    lock.release()
    made.join()
    assert pipeline.stored is not None
