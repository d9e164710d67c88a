"""Stop and exit: what each class does, that texts stay the same, and where a text may end."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from outpace import Engine, ModelError, SamplingParams, SpecError
from outpace.methods.s2d.files import SEC, read_exits
from outpace.methods.s2d.objective import S2d as Sorted
from outpace.methods.s2d.objective import S2dTraining
from outpace.methods.s2d.sec_drafter import CONTINUE, EXIT, STOP, Sec, SecConfig, scores, unsure
from outpace.methods.s2d.sec_objective import Sec as Training
from outpace.methods.s2d.sec_objective import SecTraining
from outpace.models.tiny import tiny
from outpace.train.batches import Batch
from outpace.tree.shapes import widths
from outpace.types import Budget, Drawn, Feed
from tests.conformance.test_drafters import proposal_rows
from tests.train.texts import losses_of

LONG = {"max_new_tokens": 24, "ignore_eos": True}
PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42], [77]]


@pytest.fixture(scope="module")
def target():
    return tiny(layers=6)


@pytest.fixture(scope="module")
def engine(target):
    return Engine(target, drafter="none", allow_lossy=True)


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sec")
    Training.build(SecTraining(exits="1+3+5"), target, None).save(folder, {})
    return folder


@pytest.fixture(scope="module")
def plain(engine):
    return [one.tokens for one in engine.generate(PROMPTS, drafter="none", **LONG)]


def taught(engine, folder, classes, settings=""):
    """A spec whose classifier says one class at every exit, for sure, or by a linear rule (None)."""
    spec = f"sec[model={folder}{settings}]"
    drafter = engine.method(spec).drafter
    class_S3I = torch.zeros_like(drafter.exits.class_S3I)
    for place, said in enumerate(classes):
        if said is None:
            class_S3I[place] = torch.randn(class_S3I[place].shape, generator=torch.Generator().manual_seed(3))
        else:
            class_S3I[place, said, -1] = 50.0
    drafter._class_S3I = class_S3I
    return spec, drafter


def watched(drafter):
    """Drafts that it makes from now on."""
    seen = []

    def propose(rows):
        seen.extend(drafts := Sec.propose(drafter, rows))
        return drafts

    drafter.propose = propose
    return seen


@pytest.mark.parametrize(
    ("classes", "layer", "drafts"),
    [
        ([EXIT, EXIT, EXIT, EXIT], 1, True),
        ([CONTINUE, EXIT, EXIT, EXIT], 3, True),
        ([CONTINUE, CONTINUE, EXIT, EXIT], 5, True),
        ([STOP, EXIT, EXIT, EXIT], 1, False),
        ([CONTINUE, STOP, EXIT, EXIT], 3, False),
    ],
)
def test_every_class_does_what_it_says(engine, folder, plain, classes, layer, drafts):
    spec, drafter = taught(engine, folder, classes)
    seen = watched(drafter)
    results = engine.generate(PROMPTS, drafter=spec, **LONG)
    assert [one.tokens for one in results] == plain
    assert {one.resume.layer for one in seen} == {layer}
    assert (sum(map(len, seen)) > 0) == drafts == (sum(one.counters.accepted for one in results) > 0)


@pytest.mark.parametrize(
    "settings", ["", " tree=3x2x1", " tree=dynamic:8:0 tree_size=6", " exit=0.4", " exit=1 threshold=0"]
)
def test_the_text_is_plain_text_whatever_the_classifier_says(engine, folder, plain, settings):
    spec, _ = taught(engine, folder, [None] * 4, settings)
    fast = engine.generate(PROMPTS, drafter=spec, **LONG)
    assert [one.tokens for one in fast] == plain
    more = {"temperature": 0.8, "seed": 5, "reproducible": True}
    slow = engine.generate(PROMPTS, drafter="none", **LONG, **more)
    assert [one.tokens for one in engine.generate(PROMPTS, drafter=spec, **LONG, **more)] == [
        one.tokens for one in slow
    ]


def test_the_head_is_paid_where_a_guess_is_made_alone(engine, folder, monkeypatch):
    """None at exits that go deeper, and none where a draft ends."""
    rows = []
    head = type(engine.target).head

    def counted(self, hidden, vocab=None):
        rows.append(len(hidden))
        return head(self, hidden, vocab)

    monkeypatch.setattr(type(engine.target), "head", counted)
    for classes, paid in (([CONTINUE, CONTINUE, EXIT, EXIT], True), ([CONTINUE, STOP, EXIT, EXIT], False)):
        spec, _ = taught(engine, folder, classes)
        rows.clear()
        results = engine.generate(PROMPTS, drafter=spec, **LONG)
        drafted = sum(one.counters.drafted for one in results)
        assert sum(rows) == drafted and (drafted > 0) == paid


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_law_recorded_is_that_of_the_exit_that_spoke(engine, target, folder, level):
    classes = [CONTINUE] * level + [EXIT] * (4 - level)
    _, drafter = taught(engine, folder, classes)
    ids = PROMPTS[0]
    asked = Budget(7, 3, shape=widths((2, 2, 1)))
    (row,) = proposal_rows(target, drafter, Drawn.DISTINCT, asked, 0.9, [ids])
    (draft,) = drafter.propose([row])
    assert len(draft) == 7
    for group in draft.groups:
        text, apart = [*ids, *draft.path_tokens(group.parent)], []
        for i, layers in enumerate(drafter.exits.layers):
            cache, tap = target.new_cache(), f"hidden.{layers}"
            feed = Feed.chain(cache.open(), text)
            scored = target.score([feed], cache, taps=frozenset({tap}), layers=layers)
            want_V = (drafter._logits(i, scored.taps[tap][-1:])[0] / 0.9).softmax(0)
            apart.append(float((draft.laws[group.law].prob_S - want_V).abs().max()))
        assert apart[level] < 1e-5 and min(apart[:level] + apart[level + 1 :]) > 1e-3


def test_a_threshold_of_one_never_leaves_early_and_never_ends_a_text(engine, folder, plain):
    spec, drafter = taught(engine, folder, [EXIT, CONTINUE, EXIT, STOP], " exit=1 stop=1 threshold=0")
    drafter._class_S3I[..., -1] /= 10  # not quite sure
    seen = watched(drafter)
    results = engine.generate(PROMPTS, drafter=spec, **LONG)
    assert [one.tokens for one in results] == plain
    assert {one.finish_reason for one in results} == {"length"}
    assert {one.resume.layer for one in seen} == {5}


ENDING = [EXIT, EXIT, EXIT, None]


def ends(engine, drafter, prompt, tokens, stop):
    """How many tokens stand up to the first doubted one, by the states of a pass over all of the text."""
    cache, target = engine.target.new_cache(), engine.target
    text = [*prompt, *tokens]
    feed = Feed.chain(cache.open(), text)
    scored = target.score([feed], cache, taps=frozenset({"hidden.-1"}))
    odds_T = scored.logits_TV.softmax(-1).amax(-1).logit().neg()
    wrong_T = drafter.classes(-1, scored.taps["hidden.-1"], odds_T)[:, STOP]
    # The first token comes from the prompt's own pass, which ends nothing.
    found = [i for i in range(1, len(tokens)) if wrong_T[len(prompt) + i - 1] > stop]
    return found[0] + 1 if found else len(tokens)


@pytest.mark.parametrize("settings", ["", " tree=3x2x1", " tree_size=1"])
@pytest.mark.parametrize("stop", [0.2, 0.5, 0.9])
def test_a_text_ends_at_the_first_doubtful_token_whatever_was_drafted(engine, folder, plain, settings, stop):
    spec, drafter = taught(engine, folder, ENDING, f" stop={stop} threshold=0{settings}")
    want = [ends(engine, drafter, *pair, stop) for pair in zip(PROMPTS, plain, strict=True)]
    batch = engine.generate(PROMPTS, drafter=spec, **LONG)
    single = [engine.generate([prompt], drafter=spec, **LONG)[0] for prompt in PROMPTS]
    for result, alone, whole, length in zip(batch, single, plain, want, strict=True):
        assert result.tokens == alone.tokens == whole[:length], "a prefix, and nothing else"
        assert result.finish_reason == ("low_confidence" if length < 24 else "length")
        assert not result.lossless
    if stop == 0.5:
        assert min(want) < 24, "else nothing was tried"


def test_the_first_token_ends_nothing_and_min_tokens_holds(engine, folder):
    spec, _ = taught(engine, folder, [EXIT, EXIT, EXIT, STOP], " stop=0.5")
    (whole,) = engine.generate([PROMPTS[0]], drafter="none", **LONG)
    (cut,) = engine.generate([PROMPTS[0]], drafter=spec, **LONG)
    assert cut.tokens == whole.tokens[:2] and cut.finish_reason == "low_confidence"
    if engine.target.tokenizer is not None:
        assert whole.text.startswith(cut.text) and cut.text == engine.target.tokenizer.decode(
            whole.tokens[:1]
        )
    (later,) = engine.generate(
        [PROMPTS[0]], SamplingParams(**LONG, temperature=0, min_tokens=7), drafter=spec
    )
    assert later.tokens == whole.tokens[:8]


def test_untrained_a_token_is_as_doubtful_as_the_model_says(target, folder):
    drafter = Sec.load(SecConfig(model=str(folder)), target)
    logits_FV = torch.randn(5, target.vocab_size, generator=torch.Generator().manual_seed(1)) * 4
    said_F3 = drafter.classes(-1, torch.randn(5, target.hidden_size), unsure(logits_FV))
    torch.testing.assert_close(said_F3[:, STOP], 1 - logits_FV.softmax(-1).amax(-1), atol=1e-4, rtol=0)


def test_ending_texts_has_to_be_allowed(target, folder):
    strict = Engine(target, drafter="none")
    with pytest.raises(SpecError, match=r"changes the distribution of the output; .* say --allow-lossy"):
        strict.method(f"sec[model={folder} stop=0.5]")
    assert strict.method(f"sec[model={folder}]").drafter.traits.lossless


def batch(target, answer=(8, 0)):
    """A text of the target's own, and one that somebody wrote."""
    texts, parts = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 41, 42, 43, 44, 1, 2, 3]], []
    taps = Training.taps(SecTraining(exits="1+3+5"), target)
    for text in texts:
        cache = target.new_cache()
        parts.append(target.score([Feed.chain(cache.open(), text)], cache, taps=frozenset(taps)).taps)
    answer_BT = torch.zeros(2, 8, dtype=torch.bool)
    for row, count in enumerate(answer):
        answer_BT[row, 8 - count :] = True
    return Batch(
        token_BT=torch.tensor(texts),
        length_B=torch.tensor([8, 7]),
        answer_BT=answer_BT,
        feature={name: torch.stack([one[name] for one in parts]) for name in taps},
    )


def test_labels_are_agreement_with_the_whole_model(target):
    made, some = Training.build(SecTraining(exits="1+3+5"), target, None), batch(target)
    with torch.no_grad():
        made.module.linears[1].normal_(generator=torch.Generator().manual_seed(1))  # wrong above a right one
    states, unsure_R, label_SR, known_SR = made.labels(some)
    rows = [(0, t) for t in range(7)] + [(1, t) for t in range(6)]
    assert label_SR.shape == (4, len(rows)) and [len(one) for one in states] == [len(rows)] * 4
    earlier, kinds = 0, set()
    for r, (b, t) in enumerate(rows):
        p_V = target.head(some.feature["hidden.-1"][b, t][None])[0].softmax(0)
        truth = int(p_V.argmax())
        assert float(unsure_R[r].sigmoid()) == pytest.approx(1 - float(p_V.max()), abs=1e-4)
        right = []
        for i, layer in enumerate((1, 3, 5)):
            y_H = made.module(i, some.feature[f"hidden.{layer}"][b, t][None, None])[0, 0]
            right.append(int((made._head_DH @ y_H).argmax()) == truth)
        want = [EXIT if right[i] else CONTINUE if any(right[i:]) else STOP for i in range(3)]
        assert label_SR[:3, r].tolist() == want
        follows = int(some.token_BT[b, t + 1])
        assert int(label_SR[3, r]) == (EXIT if follows == truth else STOP)
        assert bool(known_SR[3, r]) == (b == 1), "what the target wrote itself is always right"
        earlier += any(right[:i] != [False] * i and not right[i] for i in range(3))
        kinds |= set(want)
    assert kinds == {STOP, EXIT, CONTINUE}
    assert earlier, "a layer that is wrong above one that is right: the paper's labels say EXIT there"


def test_exits_and_classifier_learn_together(target, tmp_path):
    made, some = Training.build(SecTraining(exits="1+3+5"), target, None), batch(target)
    before = made.class_loss(some).item()
    losses = losses_of(made, some, 60)
    assert losses[-1] < 0.6 * losses[0] and made.class_loss(some).item() < 0.5 * before
    made.evaluate(some)
    made.save(tmp_path, {})
    found = read_exits(str(tmp_path), target, SEC)
    drafter = Sec(found, target)
    states, unsure_R, _, _ = made.labels(some)
    for place, n_RH in enumerate(states):  # what drafts is what was trained
        last = unsure_R if place == 3 else None
        want_R3 = scores(made.module.classes[place], n_RH, last).softmax(-1)
        torch.testing.assert_close(drafter.classes(place, n_RH, last), want_R3, atol=0.05, rtol=0.05)


def test_no_gradient_of_the_classifier_reaches_the_exits(target):
    made = Training.build(SecTraining(exits="1+3+5"), target, None)
    made.class_loss(batch(target)).backward()
    assert made.module.classes.grad.abs().sum() > 0
    assert made.module.norms.grad is None and made.module.linears.grad is None


def test_what_does_not_fit_is_said_in_one_line(target, folder, tmp_path):
    Sorted.build(S2dTraining(exits="1+3+5"), target, None).save(tmp_path / "sorted", {})
    with pytest.raises(ModelError, match=r"holds a drafter of method 's2d', not 'sec'"):
        Sec.load(SecConfig(model=str(tmp_path / "sorted")), target)
    shutil.copytree(tmp_path / "sorted", tmp_path / "named")
    config = json.loads((tmp_path / "named" / "config.json").read_text())
    (tmp_path / "named" / "config.json").write_text(json.dumps({**config, "method": "sec"}))
    with pytest.raises(ModelError, match="'classes' has shape None") as said:
        Sec.load(SecConfig(model=str(tmp_path / "named")), target)
    assert "\n" not in str(said.value)
    other = replace(read_exits(str(folder), target, SEC))
    assert other.class_S3I.shape == (4, 3, target.hidden_size + 2)
    for wrong in ({"exit": 1.5}, {"stop": -0.1}, {"threshold": 2.0}):
        with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
            SecConfig(**wrong)
