import pytest

from outpace import Engine, RequestError
from outpace.train.corpus import CorpusPrompt
from outpace.train.estimate import estimate
from outpace.train.options import read_options
from outpace.train.pipeline import Pipeline
from outpace.train.tokens import TokenStore, held_out

SETTINGS = ["layers=1", "pipeline.vocab=64", "pipeline.tokens_per_batch=256", "data.max_new_tokens=16"]


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


def prompts(engine, held, count):
    """So many prompts that are all held out, or all not."""
    said = (({"role": "user", "content": f"tell {i}"},) for i in range(2000))
    found = (one for one in said if held_out(engine.encode(list(one))) == held)
    return [CorpusPrompt(messages=one, source=0) for _, one in zip(range(count), found, strict=False)]


def begin(engine, prompts, work, say=lambda tick: None, tokens=400, *settings):
    options = read_options("draft_model", [*SETTINGS, *settings], tokens)
    return Pipeline(engine, options, prompts=prompts, work=work, out=work / "out", say=say)


@pytest.mark.parametrize(("held", "which"), [(False, "none"), (True, "all")])
def test_too_few_prompts_are_refused_before_they_are_answered(engine, tmp_path, held, which):
    few = prompts(engine, held, 5)
    with pytest.raises(RequestError, match=f"of 5 prompts shorter than 256 tokens {which} would be held"):
        begin(engine, few, tmp_path).run()
    assert not any(tmp_path.iterdir()), "nothing was answered"
    begin(engine, [*few, *prompts(engine, not held, 1)], tmp_path).check_prompts()


def test_prompts_that_are_too_long_to_learn_from_do_not_count(engine, tmp_path):
    long = [CorpusPrompt(messages=({"role": "user", "content": "tell " * 99},), source=0)]
    some = [*long, *prompts(engine, True, 1)]
    with pytest.raises(RequestError, match="of 1 prompts shorter than 64 tokens all would"):
        begin(engine, some, tmp_path, print, 400, "pipeline.max_length=64").run()


def test_prompts_that_are_all_too_long_are_refused_before_anything_is_written(engine, tmp_path):
    some = prompts(engine, False, 3)
    for pair, said in (
        ("data.max_prompt=1", "at most 1 tokens; raise data.max_prompt"),
        ("pipeline.max_length=2", "shorter than 2 tokens, and training reads no more"),
        ("pipeline.vocab=1", "vocabulary of 1 has no room beside"),
    ):
        with pytest.raises(RequestError, match=said):
            begin(engine, some, tmp_path, print, 400, pair).run()
    assert not any(tmp_path.iterdir())


def test_a_batch_that_no_answers_fill_takes_no_more_memory(engine, tmp_path):
    both = [*prompts(engine, True, 1), *prompts(engine, False, 4)]
    pipeline = begin(engine, both, tmp_path, lambda tick: None, 100, "data.batch=1000000000")
    assert estimate(pipeline).memory_bytes < 1 << 36
    pipeline.data()
    assert pipeline.store.answer_tokens >= 100


def test_prompts_added_to_answers_that_are_enough_may_be_few(engine, tmp_path):
    both = [*prompts(engine, True, 1), *prompts(engine, False, 4)]
    begin(engine, both, tmp_path).data()
    begin(engine, prompts(engine, False, 2), tmp_path, tokens=500).check_prompts()
    assert {*TokenStore.open(tmp_path / "tokens").held_out_S.tolist()} == {True, False}


def test_tokens_that_may_end_before_a_held_out_prompt_are_told_of(engine, tmp_path):
    lines = []
    late = [*prompts(engine, False, 40), *prompts(engine, True, 1)]
    begin(engine, late, tmp_path, lines.append).check_prompts()
    (line,) = lines
    assert line.startswith("400 tokens are about 11 answered prompts") and "takes 41 " in line
    begin(engine, late, tmp_path, lines.append, tokens=4000).check_prompts()
    assert len(lines) == 1
