import gc
import json

import pytest

RUN = ("generate", "--ignore-eos", "--model")
TINY = (*RUN, "tiny", "--dtype", "float32", "--raw", "--max-new-tokens", "24")
PROMPT = "one two three, one two three, one two three,"
KEYS = {
    "text",
    "tokens",
    "finish_reason",
    "new_tokens",
    "seconds",
    "prefill_seconds",
    "tokens_per_second",
    "drafter",
    "passes",
    "drafted",
    "accepted",
    "mean_emitted",
}


@pytest.fixture(autouse=True)
def _nothing_disturbs(monkeypatch):
    """Tests run beside each other; tests/cli/test_runs.py says what is made of that."""
    monkeypatch.setattr("outpace.bench.stats.stalled", lambda run: False)
    monkeypatch.setattr("outpace.bench.stats.disturbed", lambda run, plain: False)


def answer(ran):
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_searches_for_garbage_leave_out_what_was_loaded(outpace):
    gc.unfreeze()
    try:
        answer(outpace(*TINY, "--json", PROMPT))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_json_has_the_words_of_the_glossary(outpace):
    ran = outpace(*TINY, "--json", PROMPT)
    got = answer(ran)
    assert set(got) >= KEYS and ran.err == ""
    assert got["new_tokens"] == len(got["tokens"]) == 24 and got["finish_reason"] == "length"
    assert got["drafter"] == "auto" and got["model"] == "tiny"
    assert got["mean_emitted"] == pytest.approx(23 / got["passes"])
    assert 0 < got["prefill_seconds"] < got["seconds"]


def test_the_text_goes_to_stdout_and_the_rest_to_stderr(outpace):
    text = answer(outpace(*TINY, "--json", PROMPT))["text"]
    ran = outpace(*TINY, PROMPT)
    assert ran.code == 0 and ran.out == text + "\n"
    summary = ran.err.splitlines()[-1]
    for words in ("24 tokens", "tokens/s", "mean emitted", "drafter auto"):
        assert words in summary


def test_every_drafter_gives_the_plain_text(outpace):
    plain = answer(outpace(*TINY, "--json", "--drafter", "none", PROMPT))
    assert plain["drafted"] == 0 and plain["mean_emitted"] == 1.0
    for spec in ("prompt_lookup", "draft_model[model=tiny]", "draft_model[model=tiny tree=3x2]"):
        got = answer(outpace(*TINY, "--json", "--drafter", spec, PROMPT))
        assert got["tokens"] == plain["tokens"] and got["accepted"] <= got["drafted"]
    assert got["accepted"] > 0 and got["mean_emitted"] > 1


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ((), True),
        (("--temperature", "0.9"), None),
        (("--temperature", "0.9", "--reproducible"), True),
        (("--temperature", "0.9", "--seed", "3"), True),
        (("--temperature", "0.9", "--seed", "3", "--no-reproducible"), None),
    ],
)
def test_compare_times_both_and_says_whether_they_agree(outpace, settings, same):
    got = answer(outpace(*TINY, "--compare", "--json", *settings, PROMPT))
    base = got["baseline"]
    assert set(got) >= KEYS and set(base) >= KEYS
    assert base["drafter"] == "none" and got["drafter"] == "auto"
    assert got["speedup"] == pytest.approx(got["tokens_per_second"] / base["tokens_per_second"])
    assert got["same_tokens"] is same
    assert got["repeats"] == len(got["pair_speedups"]) == 3
    if same:
        assert got["tokens"] == base["tokens"]


def test_compare_streams_the_text_once_and_draws_a_table(outpace):
    text = answer(outpace(*TINY, "--json", PROMPT))["text"]
    ran = outpace(*TINY, "--compare", PROMPT)
    assert ran.code == 0 and ran.out == text + "\n"
    for words in (
        "plain",
        "speculative",
        "speed-up (decode)",
        "speed-up (end to end)",
        "mean emitted",
        "acceptance rate",
        "same tokens: yes",
        "median of 3 runs",
    ):
        assert words in ran.err


def test_a_lossy_verifier_is_allowed_and_marked(outpace):
    lossy = (*TINY, "-d", "suffix", "--verifier", "typical", "--allow-lossy", PROMPT)
    assert answer(outpace(*lossy, "--json"))["lossless"] is False
    assert outpace(*lossy).err.splitlines()[-1].endswith("lossy: not the model's own distribution")
    got = answer(outpace(*lossy, "--compare", "--json"))
    assert got["lossless"] is False and got["baseline"]["lossless"] and got["same_tokens"] is None
    assert "same tokens: not promised (lossy" in outpace(*lossy, "--compare").err


def test_prompts_come_from_arguments_files_and_stdin(outpace, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(PROMPT.encode() + b"\r\n")
    want = answer(outpace(*TINY, "--json", PROMPT))
    assert answer(outpace(*TINY, "--json", "-f", str(file)))["tokens"] == want["tokens"]
    piped = outpace(*TINY, "--json", "--prompt-file", "-", stdin=PROMPT.encode() + b"\n")
    assert answer(piped)["tokens"] == want["tokens"]


def test_several_answers_in_one_batch(outpace):
    settings = ("--n", "3", "-t", "1", "--seed", "5")
    got = answer(outpace(*TINY, "--json", *settings, PROMPT))
    texts = [choice["text"] for choice in got["choices"]]
    assert got["text"] == texts[0] and len(set(texts)) == 3
    ran = outpace(*TINY, *settings, PROMPT)
    assert ran.out == (f"{texts[0]}\n\n--- 2 of 3 ---\n{texts[1]}\n\n--- 3 of 3 ---\n{texts[2]}\n")
    assert "72 tokens" in ran.err


def test_settings_reach_the_sampler(outpace):
    plain = answer(outpace(*TINY, "--json", PROMPT))
    first, second = plain["tokens"][:2]
    banned = answer(outpace(*TINY, "--json", "--ban-token-id", str(first), PROMPT))
    assert first not in banned["tokens"]
    only = answer(
        outpace(*TINY, "--json", "--allow-token-id", str(first), "--allow-token-id", str(second), PROMPT)
    )
    assert set(only["tokens"]) <= {first, second}
    forced = answer(outpace(*TINY, "--json", "--logit-bias", "7=10000", PROMPT))
    assert set(forced["tokens"]) == {7}
    stopped = answer(outpace(*TINY, "--json", "--stop-token-id", str(second), PROMPT))
    assert stopped["finish_reason"] == "stop" and stopped["tokens"][-1] == second
    piece = plain["text"][3:6]
    cut = answer(outpace(*TINY, "--json", "--stop", piece, PROMPT))
    assert cut["text"] == plain["text"][: plain["text"].index(piece)]
    with_stop = answer(outpace(*TINY, "--json", "--stop", piece, "--include-stop", PROMPT))
    assert with_stop["text"] == cut["text"] + piece
    seeded = [
        answer(outpace(*TINY, "--json", "-t", "1", "--seed", seed, PROMPT))["tokens"]
        for seed in ("1", "1", "2")
    ]
    assert seeded[0] == seeded[1] != seeded[2]
    logprobs = answer(outpace(*TINY, "--json", "--logprobs", "2", PROMPT))["logprobs"]
    assert [lp["token"] for lp in logprobs] == plain["tokens"]
    assert all(len(lp["top"]) == 2 for lp in logprobs)


def test_chat_form_is_the_default_where_there_is_a_template(outpace):
    tiny = (*RUN, "tiny", "--max-new-tokens", "4", "--json")
    chat = answer(outpace(*tiny, "Say hello."))
    raw = answer(outpace(*tiny, "--raw", "Say hello."))
    told = answer(outpace(*tiny, "--system", "You are a pirate.", "Say hello."))
    assert raw["prompt_tokens"] < chat["prompt_tokens"] < told["prompt_tokens"]
    assert answer(outpace(*tiny, "--chat", "Say hello."))["tokens"] == chat["tokens"]


@pytest.mark.parametrize("drafter", ["auto", "prompt_lookup"])
def test_explain_tells_who_drafted_when_and_what_it_brought(outpace, drafter):
    ran = outpace(*TINY, "--explain", "--drafter", drafter, PROMPT)
    text = answer(outpace(*TINY, "--json", "--drafter", "none", PROMPT))["text"]
    assert ran.code == 0 and ran.out == text + "\n"
    for words in (
        "steps",
        "why",
        "drafted",
        "accepted",
        "emitted",
        "expected tok/s",
        "measured tok/s",
        "x plain",
        "gained s",
    ):
        assert words in ran.err
    got = answer(outpace(*TINY, "--explain", "--json", "--drafter", drafter, PROMPT))
    told = got["explain"]
    assert told["total"]["emitted"] == 23 and told["total"]["passes"] == got["passes"]
    assert sum(one["drafted"] for one in told["stretches"]) == got["drafted"]
    assert sum(one["accepted"] for one in told["by_drafter"]) == got["accepted"]
    assert bool(told["total"]["reasons"]) == (drafter == "auto")
    seen = told["hindsight"]
    assert seen["passages"][0]["first_token"] == 2 and seen["passages"][-1]["last_token"] == 24
    assert set(seen["regrets"]) == {"whole", "passages", "steps"} and seen["left_out"] == []
    assert seen["whole"][0]["best_seconds"] == min(one["best_seconds"] for one in seen["whole"])
    for words in ("In hindsight", "drafted by", "its ms", "regret", "one drafter for all"):
        assert words in ran.err


def test_explain_of_a_single_token_says_that_there_is_nothing(outpace):
    ran = outpace(*TINY, "--explain", "--max-new-tokens", "1", PROMPT)
    assert ran.code == 0 and "nothing to explain" in ran.err.splitlines()[-1]
    ran = outpace(*TINY, "--explain", "--max-new-tokens", "2", "--drafter", "none", PROMPT)
    assert ran.code == 0 and "\n 1 " in ran.err and "1-1" not in ran.err


def test_explain_writes_a_plot_and_its_figures(outpace, tmp_path, monkeypatch):
    def gone(value):
        raise BrokenPipeError

    with monkeypatch.context() as patched:
        patched.setattr("outpace.cli.show.write_json", gone)
        outpace(*TINY, "--explain", "--json", "--out", str(tmp_path / "unread"), PROMPT)
    assert (tmp_path / "unread" / "explain.json").is_file()
    ran = outpace(*TINY, "--explain", "--out", str(tmp_path / "out"), PROMPT)
    assert ran.code == 0, ran.err
    told = json.loads((tmp_path / "out" / "explain.json").read_text())
    assert told["hindsight"]["passages"] and (tmp_path / "out" / "explain.png").stat().st_size > 5000
    ran = outpace(*TINY, "--out", str(tmp_path), PROMPT)
    assert ran.code == 2 and "--explain" in ran.err


def test_a_seed_promises_the_text_unless_that_is_declined(outpace):
    sampled = (*TINY, "--json", "--temperature", "0.9", "--seed", "3")
    plain = answer(outpace(*sampled, "--drafter", "none", PROMPT))["tokens"]
    for spec in ("draft_model[model=tiny layers=1]", "auto"):
        assert answer(outpace(*sampled, "--drafter", spec, PROMPT))["tokens"] == plain
    free = answer(outpace(*sampled, "--no-reproducible", "--drafter", "none", PROMPT))["tokens"]
    assert free != plain


def test_what_a_model_was_made_into_is_said(outpace):
    ran = outpace(*RUN, "smollm2-135m", "--max-new-tokens", "3", "--dtype", "float32", "Say hello.")
    assert ran.code == 0 and ran.out.count("\n") == 1
    note = ran.err.splitlines()[0]
    assert note.startswith("outpace: ") and "float32" in note and "Q4_1" in note


def test_ids_that_there_are_not_are_said_before_what_the_model_is(outpace):
    for command in (("generate", "hi"), ("chat",)):
        ran = outpace(*command, "--ban-token-id", "9999999")
        assert ran.code == 2 and ran.err.startswith("outpace: error: banned_tokens holds token 9999999")


def test_logprobs_are_bounded_as_those_of_the_server(outpace):
    ran = outpace(*TINY, "--json", "--logprobs", "21", PROMPT)
    assert ran.code == 2 and ran.err == "outpace: error: --logprobs must be at most 20, got 21\n"


def test_a_wrong_tree_is_told_whoever_drafts(outpace):
    for drafter in ("auto", "suffix"):
        ran = outpace("generate", "a b", "--model", "tiny", "--drafter", drafter, "--tree", "4x")
        assert ran.code == 2 and "unknown tree '4x'" in ran.err
