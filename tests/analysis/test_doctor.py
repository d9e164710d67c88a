"""Ten planted faults on the shipped pair, each of which must be found, and nothing on the sound one."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace import Engine
from outpace.analysis.doctor import diagnose as examination
from outpace.analysis.doctor import trials
from outpace.analysis.doctor.findings import Trial, apart, below, by_depth
from outpace.analysis.doctor.machine import Facts
from outpace.bench.cases import fitting
from outpace.bench.workloads import builtin
from outpace.drafters.trained import CONFIG, WEIGHTS, shipped_folder
from outpace.models import quantize
from outpace.models.prompts import evenly
from outpace.types import Outcome

QUIET = Facts(cores=2, threads=1, dtype="bfloat16", fast_dtype="bfloat16", code="compiled")
LLAMA_2 = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"


@pytest.fixture(scope="module")
def pair():
    engine = Engine.load("smollm2-135m", drafter="none")
    engine.target.drafter_anyway = True
    asked = evenly(fitting(engine, builtin(), 18), 5)
    answered = {}
    plain = examination.answers

    def once(engine, prompts, most, taps):
        key = json.dumps([list(map(list, prompts)), most, sorted(taps)])
        if key not in answered:
            answered[key] = plain(engine, prompts, most, taps)
        return answered[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "answers", once)
        yield engine, [ids for _, ids in asked], asked[0][0].messages


def look(pair, spec="eagle3", **more):
    engine, prompts, messages = pair
    given = {"seen": QUIET, "costs": False, "max_new_tokens": 18, **more}
    return examination.diagnose(engine, spec, prompts, messages, **given)


@pytest.fixture
def copy(tmp_path):
    """Write the shipped head with another config or other weights, and give its spec."""

    def write(config=lambda said: None, tensors=lambda found: None):
        source = next(shipped_folder().glob("*/eagle3"))
        said = json.loads((source / CONFIG).read_text())
        found = load_file(source / WEIGHTS)
        config(said)
        tensors(found)
        save_file({name: one.contiguous() for name, one in found.items()}, tmp_path / WEIGHTS)
        (tmp_path / CONFIG).write_text(json.dumps(said))
        (tmp_path / "provenance.json").write_text((source / "provenance.json").read_text())
        return f"eagle3[model={tmp_path}]"

    return write


class Planted:
    """A drafter whose observe or propose is damaged."""

    def __init__(self, inner, *, late=False, longest=None):
        self.inner, self.late, self.longest = inner, late, longest
        self.traits = inner.traits
        self.begin, self.end = inner.begin, inner.end

    def observe(self, states, outcomes):
        self.inner.observe(states, [self._late(one) if self.late else one for one in outcomes])

    def _late(self, one: Outcome) -> Outcome:
        taps = {name: torch.cat((row[:1], row[:-1])) for name, row in one.scored.taps.items()}
        return replace(one, scored=replace(one.scored, taps=taps))

    def propose(self, rows):
        if self.longest is None or len(rows[0].tokens) <= self.longest:
            return self.inner.propose(rows)
        drafts = self.inner.propose(rows)
        return [replace(d, token_N=tuple(t ^ 1 for t in d.token_N)) for d in drafts]


def head(pair):
    return pair[0].method("eagle3").drafter


@pytest.mark.slow
def test_nothing_is_wrong_with_the_shipped_pair(pair):
    found = look(pair)
    assert found.names == [] and found.notes == []
    assert found.acceptance[0] > 0.4 and found.coverage > 0.8 and len(found.trials) >= 12


@pytest.mark.slow
def test_1_wrong_layers(pair, copy):
    def other(said):
        said["taps"] = ["hidden.27", "hidden.15", "hidden.2"]

    found = look(pair, copy(other))
    assert found.names == ["layer_taps"] and "layer 27 for 2, 2 for 27" in found.findings[0].evidence


def test_2_one_position_off(pair):
    # Rounded ones are tried as trained, in a drafter of their own, which would not be damaged.
    late = Planted(head(pair), late=True)
    found = look(pair, "eagle3[quantize=none]", drafter=late, max_new_tokens=30)
    assert found.names == ["row_offset"]


@pytest.mark.slow
def test_3_another_chat_template(pair, monkeypatch):
    tokenizer = pair[0].target.tokenizer
    monkeypatch.setitem(tokenizer._templates, "default", LLAMA_2)
    monkeypatch.setattr(tokenizer, "chat_template", LLAMA_2)
    found = look(pair)
    assert found.names == ["template"] and "ChatML" in found.findings[0].evidence


@pytest.mark.slow
def test_4_trained_for_another_fine_tune(pair, copy):
    def other(said):
        data = said["target_likeness"]["sample"]
        said["target_digest"] = "0" * 16
        said["target_likeness"]["sample"] = data[400:] + data[:400]

    assert "other_target" in look(pair, copy(other)).names


@pytest.mark.slow
def test_5_rounding_that_breaks(pair, copy, monkeypatch):
    kinds = dict(quantize.KINDS)
    name, rounded = kinds["int8"]
    kinds["int8"] = (name, lambda blocks: rounded(blocks.roll(1, 0)))
    monkeypatch.setattr(quantize, "KINDS", kinds)
    assert look(pair, copy()).names == ["quantized"]


@pytest.mark.slow
def test_6_a_wrong_vocabulary_map(pair, copy):
    def other(found):
        token_D = found["d2t"] + torch.arange(len(found["d2t"]))
        found["d2t"] = token_D.roll(1) - torch.arange(len(token_D))

    assert "vocabulary_map" in look(pair, copy(tensors=other)).names


@pytest.mark.slow
def test_7_too_long_a_context(pair):
    found = look(pair, drafter=Planted(head(pair), longest=1100))
    assert found.names == ["context"] and "2048" in found.findings[0].evidence


@pytest.mark.parametrize(
    "seen", [replace(QUIET, quota=0.5), replace(QUIET, frequency=0.4), replace(QUIET, throttled=0.5)]
)
def test_8_a_throttled_machine(seen):
    from outpace.analysis.doctor import machine
    from outpace.analysis.doctor.findings import Diagnosis

    found = Diagnosis("m", "d")
    machine.check(seen, found)
    assert found.names == ["throttled"]


@pytest.mark.slow
def test_9_a_wrong_norm(pair, copy):
    def other(found):
        for name in ("norm.weight", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"):
            found[name] -= 1
        found["layers.0.post_attention_layernorm.weight"] -= 1

    assert look(pair, copy(tensors=other)).names == ["norm"]


@pytest.mark.slow
def test_10_numbers_that_overflow(pair, copy):
    def other(found):
        found["layers.0.mlp.down_proj.weight"] *= 1e30

    assert "overflow" in look(pair, copy(tensors=other)).names


def test_the_other_states_of_a_machine_are_told_apart():
    from outpace.analysis.doctor import machine
    from outpace.analysis.doctor.findings import Diagnosis

    for seen, name in (
        (replace(QUIET, threads=3), "threads"),
        (replace(QUIET, own=0.5), "busy"),
        (replace(QUIET, compiled=False), "not_compiled"),
        (replace(QUIET, dtype="float32"), "slow_dtype"),
    ):
        found = Diagnosis("m", "d")
        machine.check(seen, found)
        assert name in found.names


def test_chances_are_those_of_the_books():
    assert below(0, 3, 0.5) == pytest.approx(0.125) and below(3, 3, 0.5) == pytest.approx(1.0)
    one = Trial(name=trials.NORM, change="", kept=9, positions=20, won=5, lost=0)
    assert one.chance == pytest.approx(1 / 32) and not one.cures(10)
    assert apart((50, 100), (50, 100)) == pytest.approx(1.0) and apart((10, 100), (60, 100)) < 1e-6
    assert by_depth([(2, 0), (2, 1), (2, 2), (1, 1)]) == ((0.75, 0.5), (4, 2))
    assert by_depth([(3, 1)]) == ((1.0, 0.0), (1, 1)), "nothing is known of the third"
