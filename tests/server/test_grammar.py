"""Answers with a form: what they look like, and that the drafter does not change their law."""

import json
import re

import pytest
import torch

from outpace import Engine, RequestError, SamplingParams
from outpace.models.tiny import tiny_tokenizer
from outpace.sampling import Warp
from outpace.server.grammar import open_grammars
from outpace.server.limits import Limits
from outpace.server.parsing import BodyParser
from outpace.server.schema import CompletionBody
from outpace.server.structured_output import StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "to": {"enum": ["there", "other"]}},
    "required": ["ok", "to"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars():
    tokenizer = tiny_tokenizer()
    return open_grammars(tokenizer, tokenizer.vocab_size + 3, tokenizer.eos_ids)


def spelled(mask_V):
    tokenizer = tiny_tokenizer()
    return {tokenizer.token_bytes(int(i)) for i in mask_V.nonzero()[:, 0]}


def test_a_mask_per_path(grammars):
    a, b, end = 66, 67, 1
    matcher = grammars.compile(StructuredOutput("regex", "ab+", "f")).begin()
    assert spelled(matcher.allowed(())) == {b"a"}
    assert spelled(matcher.allowed((a,))) == {b"b"}
    assert spelled(matcher.allowed((a, b))) == {b"b", b"<|end|>"}
    assert spelled(matcher.allowed(())) == {b"a"}  # paths leave no trace
    for unreachable in ((b,), (a, b, a), (a, b, end), (a, b, end, b)):
        assert matcher.allowed(unreachable).all(), unreachable
    assert spelled(matcher.allowed((a,))) == {b"b"}
    matcher.advance((a, b))
    assert spelled(matcher.allowed(())) == {b"b", b"<|end|>"}
    assert not matcher.allowed(())[-3:].any()  # rows that no token has
    matcher.advance((end,))
    assert matcher.allowed(()).all()  # the text has ended; nobody asks in earnest


def test_where_nothing_more_fits_only_the_end_is_left(grammars):
    matcher = grammars.compile(StructuredOutput("regex", "ab", "f")).begin()
    assert spelled(matcher.allowed((66, 67))) == {b"<|end|>"}
    assert spelled(matcher.allowed((66,))) == {b"b"}
    matcher.advance((66, 67))
    assert spelled(matcher.allowed(())) == {b"<|end|>"}


def test_matchers_share_nothing(grammars):
    grammar = grammars.compile(StructuredOutput("regex", "ab", "f"))
    first, second = grammar.begin(), grammar.begin()
    first.advance((66,))
    assert spelled(first.allowed(())) == {b"b"} and spelled(second.allowed(())) == {b"a"}


def test_the_law_is_the_models_own_on_what_is_allowed(grammars):
    size = grammars._vocab_size
    grammar = grammars.compile(StructuredOutput("regex", "a[bcd]", "f"))
    warp = Warp(SamplingParams(temperature=0.7, grammar=grammar), (1,), frozenset({1}), size)
    logits_V = torch.randn(size, generator=torch.Generator().manual_seed(0))
    law = warp.law(logits_V, (66,))
    wanted = (logits_V[67:70] / 0.7).softmax(0)
    full_V = torch.zeros(size)
    full_V[torch.arange(size) if law.ids is None else law.ids] = law.prob_S
    assert torch.allclose(full_V[67:70], wanted) and float(full_V.sum()) == pytest.approx(1)
    assert not warp.plain
    warp.advance((66, 67))
    assert warp.law(logits_V).prob(1) == 1.0 and warp.certain() == 1


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (StructuredOutput("schema", '{"type": "king"}', "response_format"), "king"),
        (StructuredOutput("schema", "{", "response_format"), "response_format cannot be used"),
        (StructuredOutput("schema", "[1]", "f"), "cannot be used"),
        (StructuredOutput("regex", "(", "f"), "cannot be used"),
        (StructuredOutput("choice", "[]", "f"), "choice is empty"),
        (StructuredOutput("grammar", "nonsense", "f"), "cannot be used"),
        (StructuredOutput("grammar", "start: start", "f"), r"no text satisfies it \(\w+\)$"),
        (StructuredOutput("schema", '{"$ref": "#"}', "f"), r"no text satisfies it \(\w+\)$"),
    ],
    ids=lambda value: getattr(value, "text", ""),
)
def test_forms_that_cannot_be_read(grammars, wish, says):
    with pytest.raises(RequestError, match=says):
        grammars.compile(wish)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_answers_obey_a_schema(client, temperature):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = client.chat("ab", response_format=form, temperature=temperature, seed=4, max_tokens=60)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    value = json.loads(choice["message"]["content"])
    assert value["ok"] in (True, False) and value["to"] in ("there", "other") and len(value) == 2


def test_the_other_forms(client):
    settings = {"temperature": 1.0, "max_tokens": 40}
    for seed in range(3):
        text = client.complete("ab", structured_outputs={"regex": "(ab|cd){2,4}!"}, seed=seed, **settings)[
            "choices"
        ][0]["text"]
        assert re.fullmatch("(ab|cd){2,4}!", text)
        text = client.complete(
            "ab", structured_outputs={"choice": ['the "one"', "other"]}, seed=seed, **settings
        )["choices"][0]["text"]
        assert text in ('the "one"', "other")
    text = client.complete("ab", structured_outputs={"grammar": 'start: "x" ("y" | "z") "x"'}, **settings)[
        "choices"
    ][0]["text"]
    assert text in ("xyx", "xzx")
    text = client.complete("ab", structured_outputs={"json": json.dumps(SCHEMA)}, **settings)
    assert json.loads(text["choices"][0]["text"])["ok"] in (True, False)
    whole = client.complete(
        "ab", response_format={"type": "json_object"}, temperature=0, max_tokens=20, logit_bias={"94": 20}
    )
    assert json.loads(whole["choices"][0]["text"]) == {}
    plain = {"temperature": 0, "max_tokens": 9}
    assert (
        client.complete("ab", response_format={"type": "text"}, **plain)["choices"]
        == (client.complete("ab", **plain)["choices"])
    )


def test_the_drafter_does_not_change_the_text(client):
    settings = {
        "temperature": 0,
        "max_tokens": 80,
        "structured_outputs": {"regex": "((the|other) (st|at), ){20}"},
    }
    answers = {
        drafter: client.complete("ab", speculation={"drafter": drafter}, **settings)
        for drafter in ("none", "prompt_lookup", "suffix")
    }
    assert len({answer["choices"][0]["text"] for answer in answers.values()}) == 1
    kept = {d: a["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for d, a in answers.items()}
    assert kept["none"] == 0 < kept["suffix"], kept
    seeded = {**settings, "temperature": 1.0, "seed": 2}
    assert (
        len(
            {
                client.complete("ab", speculation={"drafter": drafter, "reproducible": True}, **seeded)[
                    "choices"
                ][0]["text"]
                for drafter in answers
            }
        )
        == 1
    )


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing; give it"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format", "the type is text"),
        ({"structured_outputs": {"json": {"type": "odd"}}}, "structured_outputs", "cannot be used"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "got 'xml'"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens", "exclude"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "exclude"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "exclude each other",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "got 0"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "got 2"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs", "at most 65536"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "cannot be used"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_wishes(client, fields, param, says):
    error = client.refused("/v1/completions", {"prompt": "a", **fields})
    assert says in error["message"] and error["param"] == param


def test_without_the_library_it_says_what_to_install(service):
    parser = BodyParser(service, "tiny", Limits(), grammars=None)
    with pytest.raises(Exception, match=r"pip install 'outpace\[grammar\]'"):
        parser.completion(CompletionBody(prompt="a", response_format={"type": "json_object"}))


def test_the_engine_takes_grammars_too(grammars):
    engine = Engine.load("tiny", dtype="float32", drafter="suffix")
    made = open_grammars(engine.target.tokenizer, engine.target.vocab_size, engine.eos_ids)
    grammar = made.compile(StructuredOutput("regex", "(he|re){3}", "f"))
    texts = engine.generate(["ab", "cd"], grammar=grammar, temperature=1.0, n=2)
    assert all(re.fullmatch("(he|re){3}", result.text) for result in texts)


@pytest.mark.parametrize("drafter", ["none", "grammar"])
def test_special_tokens_that_a_form_spells_are_text(drafter):
    engine = Engine.load("tiny", dtype="float32", drafter=drafter)
    made = open_grammars(engine.target.tokenizer, engine.target.vocab_size, engine.eos_ids)
    for kind, form, wanted in (
        ("choice", ["<|end|>x"], "<|end|>x"),
        ("schema", {"const": "a<|end|>"}, '"a<|end|>"'),
    ):
        grammar = made.compile(StructuredOutput(kind, json.dumps(form), "f"))
        result = engine.generate("ab", grammar=grammar, temperature=0, max_new_tokens=40)
        assert (result.text, result.finish_reason) == (wanted, "stop")


class Careless:
    """The planted bug: a place that does not look at the guesses before a node."""

    def __init__(self, matcher):
        self._matcher = matcher
        self.advance = matcher.advance

    def allowed(self, path):
        return self._matcher.allowed(())


def test_a_mask_that_forgets_the_path_is_caught():
    class Forgetful:
        def __init__(self, grammar):
            self._grammar = grammar

        def begin(self):
            return Careless(self._grammar.begin())

    engine = Engine.load("tiny", dtype="float32", drafter="none")
    made = open_grammars(engine.target.tokenizer, engine.target.vocab_size, engine.eos_ids)
    grammar = made.compile(StructuredOutput("regex", "((the|other) (st|at), ){20}", "f"))
    settings = {"temperature": 0, "max_new_tokens": 80}
    plain = engine.generate("ab", grammar=grammar, **settings)
    right = engine.generate("ab", drafter="suffix", grammar=grammar, **settings)
    assert right.tokens == plain.tokens and right.counters.accepted > 0
    with pytest.raises(RequestError, match="doesn't satisfy the grammar"):
        engine.generate("ab", drafter="suffix", grammar=Forgetful(grammar), **settings)
