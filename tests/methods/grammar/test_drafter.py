"""What a schema spells out: drafted for free, kept by every verifier, and never changing a text."""

import json

import pytest

from outpace import Engine, SamplingParams
from outpace.server.grammar import open_grammars
from outpace.server.structured_output import StructuredOutput

TEXT = {"type": "string", "maxLength": 4}
CLOSED = {"additionalProperties": False}
SCHEMAS = {
    "keys": {"first_name": TEXT, "family_name": {"enum": ["Berg", "Dahl"]}, "is_here": {"type": "boolean"}},
    "a shared prefix": {"orderId": {"type": "integer", "maximum": 9}, "orderName": {"const": "tea"}},
    "other letters": {"gr\u00f6\u00dfe": {"enum": ["gro\u00df"]}, "\u540d\u524d": {"type": "null"}},
    "a list": {
        "them": {"type": "array", "items": {"enum": ["there", "other"]}, "minItems": 2, "maxItems": 3}
    },
    "nested": {"at": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], **CLOSED}},
    "nothing": {},
}
DRAFTERS = ["grammar", "grammar[drafter=none]", "grammar[drafter=draft_model[model=tiny layers=1]]", "auto"]


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", dtype="float32", drafter="none")


@pytest.fixture(scope="module")
def grammars(engine):
    made = open_grammars(engine.target.tokenizer, engine.target.vocab_size, engine.eos_ids)

    def compile_(properties, required=None):
        schema = {
            "type": "object",
            "properties": properties,
            "required": list(properties) if required is None else required,
            **CLOSED,
        }
        return made.compile(StructuredOutput("schema", json.dumps(schema), "f"))

    return compile_


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_gives_the_same_text_in_fewer_passes(engine, grammars, name, drafter):
    grammar = grammars(SCHEMAS[name])
    settings = {"grammar": grammar, "max_new_tokens": 120}
    plain = engine.generate(["ab", "cd"], temperature=0, drafter="none", **settings)
    fast = engine.generate(["ab", "cd"], temperature=0, drafter=drafter, **settings)
    assert [one.tokens for one in fast] == [one.tokens for one in plain]
    for slow, one in zip(plain, fast, strict=True):
        assert one.finish_reason == "stop" and json.loads(one.text).keys() == SCHEMAS[name].keys()
        if drafter != "auto":  # which may find that passes of so small a model are cheaper
            assert 0 < one.counters.forced <= one.counters.accepted
            assert one.counters.passes < slow.counters.passes
    seeded = {"temperature": 1.3, "seed": 5, **settings}
    texts = [engine.generate("ab", drafter=spec, **seeded).text for spec in ("none", drafter)]
    assert texts[0] == texts[1]


def test_keys_that_may_be_left_out(engine, grammars):
    grammar = grammars({"alpha": TEXT, "alpine": TEXT}, required=[])
    for seed in range(4):
        settings = {"grammar": grammar, "seed": seed, "temperature": 1.5, "max_new_tokens": 90}
        plain = engine.generate("ab", drafter="none", **settings)
        assert engine.generate("ab", drafter="grammar", **settings).tokens == plain.tokens


def test_a_draft_ends_where_the_text_may(engine, grammars):
    settings = {"grammar": grammars(SCHEMAS["keys"]), "temperature": 0}
    plain = engine.generate("ab", drafter="none", **settings).tokens
    for length in (1, 2, 3, 9, 20):
        cut = engine.generate("ab", drafter="grammar", max_new_tokens=length, **settings)
        assert cut.tokens == plain[:length] and cut.finish_reason == "length"
    stop = engine.generate("ab", drafter="grammar", stop="name", **settings)
    assert stop.text == '{"first_' and stop.finish_reason == "stop"


def test_it_takes_part_in_requests_with_rules_alone(engine, grammars):
    method = engine.method("auto")
    named = [name for name in method.members if name.startswith("grammar")]
    assert named and not set(named) & method.serving(False).keys()
    assert set(named) <= method.serving(True).keys()
    assert engine.method("grammar").serving(False), "where it is alone, it stays"
    # Whether a draft pays on so small a model is for the clock to say; what it takes part in is not.
    request = engine.request("ab", SamplingParams(grammar=grammars(SCHEMAS["keys"])))
    row = engine.start_sequence(request, engine.cache.open(), method, method.verifier)
    assert set(named) <= row.all_members.keys()
    engine.release(row, method)
    without = engine.generate([5, 6, 5, 6, 5], drafter="auto", temperature=0, max_new_tokens=40)
    assert not any(name.startswith("grammar") for name in without.by_drafter)


def test_states_after_drafts_that_were_dropped(engine, grammars):
    """Masks after propose and after partial acceptance are those of a fresh matcher fed the text."""
    grammar = grammars(SCHEMAS["a list"])
    settings = {"temperature": 0.9, "seed": 3, "max_new_tokens": 60}
    result = engine.generate("ab", grammar=grammar, drafter="grammar", **settings)
    fresh, walked = grammar.begin(), grammar.begin()
    for i, token in enumerate(result.tokens[:-1]):
        assert (fresh.allowed(()) == walked.allowed(result.tokens[:i])).all()
        assert bool(fresh.allowed(())[token])
        fresh.expects(())
        fresh.allowed(result.tokens[i : i + 3])
        fresh.advance((token,))
