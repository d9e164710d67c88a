"""What a pass returns is valid until the next pass: who reads it later reads poison here."""

from dataclasses import fields, replace

import pytest
import torch

from outpace import Engine
from outpace.models.base import Target
from outpace.models.decoder import Decoder
from outpace.types import Scored
from tests.conformance.specs import specs, write_files

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42, 43, 44, 40, 41, 42]]
SETTINGS = {"max_new_tokens": 10, "ignore_eos": True}
SAMPLED = {**SETTINGS, "temperature": 0.8, "seed": 5, "reproducible": False}
MORE = ["graph[draft=draft_model[model=tiny layers=1] agree=0 tree=3x2x2]"]


class Poisoner:
    """Hands out copies of what passes return, and fills them with NaN after the target's next pass."""

    def __init__(self):
        self.honest, self.before, self.count = Decoder.score, {}, 0

    def score(self, target: Target, *args, **more) -> Scored:
        found = self.honest(target, *args, **more)
        values = {field.name: getattr(found, field.name) for field in fields(Scored)}
        given = {name: value.clone() for name, value in values.items() if isinstance(value, torch.Tensor)}
        taps = {name: rows.clone() for name, rows in found.taps.items()}
        for stale in self.before.get(id(target), ()):
            stale.fill_(torch.nan)
            self.count += 1
        self.before[id(target)] = [*given.values(), *taps.values()]
        return replace(found, **given, taps=taps, lasting=False)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    made = Engine.load("tiny", drafter="none", dtype="bfloat16")
    folder = tmp_path_factory.mktemp("files")
    write_files(made.target, folder, PROMPTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield made


def ran(engine, spec, settings, counted):
    answers = engine.generate(PROMPTS, drafter=spec, **settings)
    return [(one.tokens, (one.counters.drafted, one.counters.accepted) if counted else ()) for one in answers]


@pytest.mark.parametrize("spec", [*specs(), *MORE])
def test_nothing_is_read_after_the_next_pass(engine, spec, monkeypatch):
    counted = engine.method(spec).deterministic  # who reads clocks drafts otherwise every time
    runs = [SETTINGS, SAMPLED] if counted else [SETTINGS]
    for settings in runs:
        engine._methods.clear()  # what a drafter remembers of earlier requests is no matter here
        clean = ran(engine, spec, settings, counted)
        engine._methods.clear()
        poisoner = Poisoner()
        with monkeypatch.context() as patch:
            patch.setattr(
                Decoder, "score", lambda self, *args, p=poisoner, **more: p.score(self, *args, **more)
            )
            assert ran(engine, spec, settings, counted) == clean, settings
        assert poisoner.count > 0
