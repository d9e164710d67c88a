"""Learning from verified passes: what is kept, what is learned, what survives, who judges."""

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from outpace import Engine, ModelError, files
from outpace.drafters.trained import read_tensors
from outpace.methods.draft_model.objective import DraftModelObjective, DraftModelTraining
from outpace.methods.draft_model.online import inbox as online_inbox
from outpace.methods.draft_model.online.data import (
    Buffer,
    Marks,
    OnlineConfig,
    Piece,
    accepted,
    top_kl,
    top_laws,
)
from outpace.methods.draft_model.online.learner import OnlineLearner
from outpace.methods.draft_model.online.topics import ENOUGH, Router, read_topics, write_topics
from outpace.models.tiny import tiny
from outpace.serving.learning import Watched
from outpace.train import losses
from outpace.train.versions import BASE, Versions
from outpace.types import Draft, Outcome, Scored, Verdict
from tests.support import until

QUICK = OnlineConfig(
    held_out=0.25,
    least_held=64,
    held_rows=160,
    round_rows=384,
    unit_tokens=512,
    update_units=1,
    lr=5e-3,
    piece=24,
    context=8,
    top=16,
    repeats=6.0,
    seed=3,
)
OLD, NEW = range(2, 120), range(160, 280)
"""Token ids of the prompts of two subjects."""


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def base(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "drafter"
    options = DraftModelTraining(layers=1, take="1")
    DraftModelObjective.build(options, target, None).save(folder, {})
    return folder


def prompts(ids, count, seed):
    coins = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(ids), (count, 7), generator=coins)
    return [[ids[i] for i in row] for row in picked.tolist()]


def places(pieces):
    """Judged tokens with their text and their law."""
    return {(bytes(p.ids[: i + 1]), bytes(p.id_RK[r])) for p in pieces for r, i in enumerate(p.place_R)}


class Stream:
    """Requests to an engine whose draft model learns."""

    def __init__(self, target, base, folder, config=QUICK, kind=OnlineLearner):
        self.spec = f"draft_model[model={base} quantize=none tree_size=2]"
        self.learner = kind(target, base, folder, config, spec=self.spec)
        self.engine = Engine(target, drafter="none")
        method = self.engine.method(self.spec)
        self.watched = method.drafter = Watched(method.drafter, self.learner)
        self.versions, self.learned = [], set()
        real = self.learner.desk.learn
        self.learner.desk.learn = lambda pieces: self.learned.update(places(pieces)) or real(pieces)

    def ask(self, prompts, drafter=None, **settings):
        settings = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0.0, **settings}
        return self.engine.generate(prompts, drafter=drafter or self.spec, **settings)

    def learn(self, budget=60.0):
        while self.learner.busy:
            version = self.learner.step(budget)
            if version is not None:
                assert self.watched.adopt(version)
                self.versions.append(version)
        assert self.watched.broken is None

    @property
    def branch(self):
        (branch,) = self.learner._branches.values()
        return branch


def acceptance(results):
    done = [one.counters for one in results]
    return sum(c.accepted for c in done) / sum(c.drafted for c in done)


@pytest.fixture(scope="module")
def story(target, base, tmp_path_factory):
    """A stream that changes its subject once, to what is asked again and again."""
    stream = Stream(target, base, tmp_path_factory.mktemp("story") / "learned")
    stream.asked = prompts(NEW, 16, 10)
    for asked in (prompts(OLD, 8, 0), stream.asked, stream.asked):
        stream.ask(asked)
        stream.learn()
    yield stream
    stream.learner.close()


@pytest.fixture
def small(target, base, tmp_path):
    config = replace(QUICK, held_out=0.5, least_held=48, round_rows=64, unit_tokens=256)
    made = Stream(target, base, tmp_path / "learned", config)
    yield made
    made.learner.close()


def test_acceptance_rises_after_a_shift_and_the_text_stays(target, base, story):
    settings = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0.0}
    answers = story.ask(asked := story.asked)
    other = Engine(target, drafter="none")
    plain = other.generate(asked, drafter="none", **settings)
    twin = other.generate(asked, drafter=story.spec, **settings)
    assert [one.tokens for one in answers] == [one.tokens for one in plain]
    assert acceptance(answers) > acceptance(twin) + 0.1
    assert len(story.versions) >= 2
    for version in story.versions:
        assert version.acceptance > version.before


def test_sampled_answers_teach_too_and_the_text_is_that_of_the_seed(small):
    settings = {"temperature": 0.9, "seed": 5, "reproducible": True, "max_new_tokens": 12}
    for seed in range(2):
        asked = prompts(NEW, 10, seed)
        results = small.ask(asked, **settings)
        small.learn()
    plain = small.ask(asked, drafter="none", **settings)
    assert [one.tokens for one in results] == [one.tokens for one in plain]
    assert not any(piece.greedy for piece in small.branch.train.pieces)
    assert small.learner.tally.updates > 0


def outcome_of(target, base, folder, budget, seed=3):
    config = replace(QUICK, seed=seed, held_out=0.5, least_held=48, round_rows=64, repeats=2.0)
    stream = Stream(target, base, folder, config)
    stream.ask(prompts(NEW, 12, 1))
    stream.learn(budget)
    stream.learner.close()
    weights = {name: one.sum().item() for name, one in stream.learner.desk.stored().items()}
    return stream.learner.tally.updates, len(stream.versions), weights


def test_the_clock_changes_nothing_and_the_seed_does(target, base, tmp_path):
    slow = outcome_of(target, base, tmp_path / "a", 60.0)
    fast = outcome_of(target, base, tmp_path / "b", 0.0)
    other = outcome_of(target, base, tmp_path / "c", 60.0, seed=4)
    assert slow == fast and slow != other and slow[0] > 0


# What is kept.


def passed(learner, text, drafted, kept, added, vocab=258):
    """A pass that drafted a chain, kept so many, and added a token; gives its laws' argmaxes."""
    logits = torch.randn(len(drafted) + 1, vocab, generator=torch.Generator().manual_seed(added))
    draft = Draft.chosen(drafted)
    verdict = Verdict(tuple(range(kept)), (*drafted[:kept], added))
    rows = tuple(range(kept + 1))
    outcome = Outcome(
        draft, Scored(logits, (0, len(logits))), verdict, (0,) * (kept + 1), rows, 0, drafter=learner.spec
    )
    learner.observe([text], [outcome])
    return logits.argmax(-1).tolist()


def seen(pieces):
    """(token, likeliest token) of everything that is kept."""
    return [
        (int(piece.ids[place]), int(ids[0]))
        for piece in pieces
        for place, ids in zip(piece.place_R, piece.id_RK, strict=True)
    ]


def text_of(learner, held):
    """A text that is, or is not, held out."""
    return next(text for text in (learner.begin("", [5, n]) for n in range(2, 100)) if text.held is held)


def read_all(learner):
    """What waits, as idle time would have it read."""
    while learner._inbox:
        learner._inbox.read()


def passes(learner, held):
    """What a text of 41 passes leaves behind, and what it should."""
    text = text_of(learner, held)
    refused, judged = [], []
    for n in range(41):
        kept = n % 4
        best = passed(learner, text, [10, 11, 12], kept, 20 + n)
        own = list(zip([*[10, 11, 12][:kept], 20 + n], best, strict=False))
        judged += own[: kept + (kept < 3)]
        refused += own[kept:] if kept < 3 else []
    learner.end(text)
    read_all(learner)
    return seen((text.source.held if held else text.source.train).pieces), refused, judged


def loses(learner):
    found, refused, _ = passes(learner, held=False)
    return len(refused) - sum(one in found for one in refused)


class Forgetful(OnlineLearner):
    def end(self, text):  # what was not a whole piece yet
        pass


class Shifted(OnlineLearner):
    def _wanted(self, text, outcome):  # the token after the refused one has no law in this pass
        return [max(0, i - 1) for i in super()._wanted(text, outcome)]


def test_every_refused_token_is_kept_the_last_ones_too(target, base, tmp_path):
    config = replace(QUICK, anchor=0.0, rows=1000)
    learner = OnlineLearner(target, base, tmp_path / "a", config)
    found, refused, _ = passes(learner, held=False)
    assert found == refused and len(refused) == 31
    assert learner.tally.rows == 31 and learner.tally.held_rows == 0
    assert loses(Forgetful(target, base, tmp_path / "b", config)) > 0
    assert loses(Shifted(target, base, tmp_path / "c", config)) > 0
    held, _, judged = passes(learner, held=True)
    assert held == judged, "held-out requests are kept whole"


def test_what_was_shown_waits_as_a_copy_and_not_without_end(target, base, tmp_path, monkeypatch):
    learner = OnlineLearner(target, base, tmp_path, replace(QUICK, rows=1000))
    draft, logits = Draft.chosen([9]), torch.zeros(2, 258)
    texts = [text_of(learner, held=False) for _ in range(2)]

    def show(text, token):
        logits.zero_()[0, token] = 9.0  # the memory of the next pass is that of the last one
        scored = Scored(logits, (0, 2))
        learner.observe(
            [text], [Outcome(draft, scored, Verdict((), (token,)), (0,), (0,), 0, drafter=learner.spec)]
        )

    monkeypatch.setattr(online_inbox, "MOST", 6)
    monkeypatch.setattr(online_inbox, "READ", 2)
    for token in range(20, 30):
        show(texts[token % 2], token)
        assert learner.busy and learner._inbox._rows <= 6
    learner.end(texts[0])
    read_all(learner)
    assert not learner.busy and learner._inbox._rows == 0
    pieces = texts[0].source.train.pieces
    assert [id_K[0] for piece in pieces for id_K in piece.id_RK] == list(range(20, 30, 2))
    assert len(texts[1].marks._rows) == 5, "it goes on"
    for _ in range(20):
        learner.end(texts[1])
        assert len(learner._inbox._shown) <= 6, "where others draft, only ends come"


def test_anchors_are_a_share_of_the_accepted(target, base, tmp_path):
    learner = OnlineLearner(target, base, tmp_path, replace(QUICK, anchor=0.5))
    found, refused, judged = passes(learner, held=False)
    assert set(refused) <= set(found) <= set(judged)
    assert len(refused) + 10 < len(found) < len(judged) - 10


def test_others_drafts_teach_nothing_but_their_text_counts(target, base, tmp_path):
    learner = OnlineLearner(target, base, tmp_path, QUICK)
    text = text_of(learner, held=False)
    draft, logits = Draft.chosen([9]), torch.zeros(2, 258)
    verdict = Verdict((), (7,))
    outcome = Outcome(draft, Scored(logits, (0, 2)), verdict, (0,), (0,), 0, drafter="suffix")
    learner.observe([text], [outcome])
    learner.observe([text], [replace(outcome, draft=Draft(), drafter="none")])
    learner.end(text)
    read_all(learner)
    assert text.marks.ids[-2:] == [7, 7] and not text.source.train.rows


class Cheat(OnlineLearner):
    def _collect(self, text, end=False):
        piece = text.marks.piece(self.config.piece, self.config.context, end)
        if piece is not None:
            (text.source.held if text.held else text.source.train).add(piece)
            text.source.train.add(piece)
            text.source.credit += piece.rows


def test_what_judges_is_never_learned(target, base, story, tmp_path):
    held = places(story.branch.held.pieces)
    assert len(story.learned) > 100 and len(held) > 30 and not story.learned & held
    config = replace(QUICK, held_out=0.5, least_held=16, round_rows=16)
    cheat = Stream(target, base, tmp_path, config, kind=Cheat)
    cheat.ask(prompts(NEW, 6, 0))
    cheat.learn()
    assert cheat.learned & places(cheat.branch.held.pieces), "the check can fail"
    cheat.learner.close()


def test_a_buffer_is_bounded_and_every_new_piece_has_its_turn():
    def piece(n, rows):
        return Piece(
            np.full(10, n, np.int32),
            np.arange(1, rows + 1, dtype=np.int32),
            np.zeros((rows, 2), np.int32),
            np.zeros((rows, 2), np.float32),
            True,
        )

    buffer = Buffer(20)
    for n in range(9):
        buffer.add(piece(n, 1 + n % 5))
        assert buffer.rows == sum(one.rows for one in buffer.pieces) <= 20
    assert buffer.added == sum(1 + n % 5 for n in range(9))
    assert [int(one.ids[0]) for one in buffer.pieces][-1] == 8, "the oldest go, not the newest"
    coins = np.random.default_rng(0)
    order = []
    while any(not one.used for one in buffer.pieces):
        order += [int(one.ids[0]) for one in buffer.pick(25, coins, replay=0.0)]
    assert order == [int(one.ids[0]) for one in buffer.pieces], "in order, the last one too"
    assert buffer.pick(25, coins, replay=0.0), "then old ones again"
    late = buffer.added
    buffer.add(piece(9, 2))
    assert [int(one.ids[0]) for one in buffer.since(late)] == [9]
    assert buffer.since(0) == buffer.pieces


def test_pieces_hold_context_and_places():
    marks = Marks([1, 2, 3, 4, 5])
    law = (np.array([7], np.int32), np.array([1.0], np.float32))
    marks.ids += [6, 7, 8]
    marks.add(6, *law)
    assert marks.piece(4, context=2) is None
    marks.ids += [9, 10]
    marks.add(8, *law)
    piece = marks.piece(4, context=2)
    assert piece.ids.tolist() == [5, 6, 7, 8, 9] and piece.place_R.tolist() == [2, 4]
    assert marks.piece(4, context=2, end=True) is None


# What is learned from.


def test_laws_are_the_models_own(target):
    logits = torch.randn(3, 40)
    ids, p = top_laws(logits, 5)
    whole = logits.softmax(-1)
    for row in range(3):
        assert ids[row].tolist() == whole[row].topk(5).indices.tolist()
        assert np.allclose(p[row], whole[row].topk(5).values, atol=1e-6)


def test_the_loss_is_kl_where_nothing_is_left_out():
    z, p = torch.randn(4, 12), torch.randn(4, 12).softmax(-1)
    ids, top = (torch.from_numpy(one) for one in top_laws(p.log(), 12))
    torch.testing.assert_close(top_kl(z, ids.long(), top), losses.kl(z, p), atol=1e-5, rtol=1e-4)
    few, some = ids[:, :3].long(), top[:, :3]
    grouped = top_kl(z, few, some)
    q = z.softmax(-1)
    named = (some * (some.log() - q.gather(1, few).log())).sum(-1)
    rest, theirs = 1 - some.sum(-1), 1 - q.gather(1, few).sum(-1)
    expected = named + rest * (rest.log() - theirs.log())
    torch.testing.assert_close(grouped, expected, atol=1e-5, rtol=1e-4)
    assert (grouped <= losses.kl(z, p) + 1e-5).all(), "from below"
    at = p.log().clone().requires_grad_()
    top_kl(at, few, some).sum().backward()
    assert at.grad.abs().max() < 1e-6, "no slope at q = p"
    # A token that the draft vocabulary lacks is left out of p.
    lacking = torch.cat([few, torch.full((4, 1), -1)], 1)
    more = torch.cat([some * 0.5, torch.full((4, 1), 0.5)], 1)
    weight = some * 0.5 / (0.5 * some.sum(-1, keepdim=True) + (0.5 - 0.5 * some.sum(-1))[:, None])
    torch.testing.assert_close(top_kl(z, lacking, more), top_kl(z, few, weight), atol=1e-4, rtol=1e-4)


def test_acceptance_is_that_of_the_verifier():
    z, p = torch.randn(4, 12), torch.randn(4, 12).softmax(-1)
    ids, top = (torch.from_numpy(one) for one in top_laws(p.log(), 12))
    sampled = accepted(z, ids.long(), top, torch.zeros(4, dtype=torch.bool))
    torch.testing.assert_close(sampled, losses.acceptance(z, p), atol=1e-5, rtol=1e-4)
    chosen = accepted(z, ids.long(), top, torch.ones(4, dtype=torch.bool))
    assert chosen.tolist() == (z.argmax(-1) == p.argmax(-1)).float().tolist()


# What stays.


def test_a_worse_version_goes_back_by_itself(small):
    small.learner.begin("", [5])
    branch, desk = small.branch, small.learner.desk
    asked = prompts(NEW, 4, 1)
    good = acceptance(small.ask(asked))
    desk.put({name: torch.randn_like(one) for name, one in desk.stored().items()})
    number = branch.versions.add(lambda folder: desk.objective.save(folder, {}), {})
    small.learner._change(branch)
    assert acceptance(small.ask(asked)) < good / 2, "new texts have it at once"
    while not small.learner._to_review(branch):
        small.ask(prompts(NEW, 6, branch.held.added))
    back = small.learner.step(60.0)
    assert back.back and back.number == BASE and back.drafter is None
    assert back.before < back.acceptance
    assert branch.versions.entries[number]["rolled_back"] and branch.versions.current == BASE
    assert acceptance(small.ask(asked)) == good
    assert small.learner.tally.rolled_back == 1


def test_a_restart_goes_on_with_what_was_learned(target, base, story):
    last = story.versions[-1]
    folder = story.branch.versions.path(last.number)
    with pytest.raises(ModelError, match="another server learns in"):
        OnlineLearner(target, base, story.learner.folder, QUICK)
    story.learner.close()
    again = OnlineLearner(target, base, story.learner.folder, QUICK)
    text = again.begin("", [5, 9])
    assert text.source.versions.current == last.number and text.drafter is not None
    mine = read_tensors(folder)["model.norm.weight"].float()
    loaded = text.drafter.model.checkpoint.tensor("model.norm.weight", torch.float32)
    assert torch.equal(mine, loaded)
    assert again.begin("another key", [5, 9]).drafter is None
    again.close()


def little(folder, number=0):
    """As much of a drafter folder as versions care for."""
    folder.mkdir(parents=True)
    files.write_whole(folder / "model.safetensors", bytes([number % 256]) * 200_000)
    files.write_whole(folder / "config.json", "{}")


def whole(folder, about):
    """Open what a process left, and say which version drafts."""
    versions = Versions(folder, about)
    if versions.current != BASE:
        assert versions._intact(versions.current)
    for path in folder.glob("*"):
        assert path.name == "manifest.json" or int(path.name[1:]) in versions.entries
    return versions.current


def test_whenever_it_dies_the_state_loads(tmp_path, monkeypatch):
    about, folder, left = {"target_digest": "x"}, tmp_path / "b", []
    real = os.replace

    def replace_(*paths):
        for moment in range(2):
            left.append(tmp_path / f"left{len(left)}")
            shutil.copytree(folder, left[-1])
            if moment == 0:
                real(*paths)

    versions = Versions(folder, about, kept=2)
    monkeypatch.setattr(files.os, "replace", replace_)
    for number in range(5):
        versions.add(lambda path, n=number: little(path, n), {"acceptance": 0.5})
        if number == 2:
            versions.back()
    monkeypatch.undo()
    found = [whole(one, about) for one in left]
    assert set(found) == {0, 1, 2, 3, 4, 5} and len(left) > 30
    assert whole(folder, about) == 5 and len(Versions(folder, about).entries) <= 4


def test_kill_9(tmp_path):
    about, folder = {"target_digest": "x"}, tmp_path / "b"
    # A process of its own, in which no thread runs, so that it may fork: a writer per line.
    code = f"""
import os, sys
from pathlib import Path
from outpace import files
from outpace.train.versions import Versions
{inspect.getsource(little)}
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            versions = Versions(Path({str(folder)!r}), {about!r})
            for _ in range(20_000):
                versions.add(lambda path: little(path, 1), {{}})
        finally:
            os._exit(1)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    forks = subprocess.Popen(
        [sys.executable, "-c", code], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    number = 0
    with forks:
        for turn in range(4):
            print(turn, file=forks.stdin, flush=True)
            child = int(forks.stdout.readline())
            try:
                until(lambda last=number + 2 + turn: newest(folder) >= last)
            finally:
                os.kill(child, signal.SIGKILL)
            assert int(forks.stdout.readline()) == -signal.SIGKILL
            found = whole(folder, about)
            assert found > number
            number = found
        forks.stdin.close()
        assert forks.wait(20) == 0


def newest(folder):
    """Number of the last version that a process has begun to write."""
    return max((int(path.name[1:]) for path in folder.glob("v*")), default=0)


def test_damage_falls_back_to_the_parent_and_a_wrong_folder_is_said(tmp_path):
    about, folder = {"target_digest": "x"}, tmp_path / "b"
    versions = Versions(folder, about)
    for number in range(2):
        versions.add(lambda path, n=number: little(path, n), {})
    (versions.path(2) / "model.safetensors").write_bytes(b"cut")
    assert whole(folder, about) == 1
    with pytest.raises(ModelError, match=r"delete .* to learn anew"):
        Versions(folder, {"target_digest": "y"})
    with pytest.raises(OSError, match="full"):
        Versions(folder, about).add(lambda path: full(path), {})
    assert whole(folder, about) == 1
    good = (folder / "manifest.json").read_text()
    for old, new in (
        (good, "{"),
        ('"current": 2', '"current": 1e999'),
        ('"next": 3', '"next": 2'),
        ('"parent": 0', '"parent": null'),
        ('"parent": 0', '"parent": 1'),
        ('"number": 1', '"number": [1]'),
    ):
        assert old in good
        (folder / "manifest.json").write_text(good.replace(old, new))
        with pytest.raises(ModelError, match=r"cannot be used.*to learn anew"):
            Versions(folder, about)


def test_damaged_topics_are_said_before_a_text_is_routed(tmp_path):
    file, router = tmp_path / "topics.json", Router(2)
    router.route(list(range(40)))
    write_topics(file, {"": router}, 2)
    good = json.loads(file.read_text())
    assert read_topics(file, 2)[""].to_json() == router.to_json()
    for name, wrong in (("seen", []), ("seen", 5), ("texts", float("inf")), ("texts", -1)):
        file.write_text(json.dumps({"": {**good[""], name: wrong}}))
        with pytest.raises(ModelError, match=r"cannot be used.*to learn anew"):
            read_topics(file, 2)
    (topic, *_) = good[""]["topics"]
    for name, wrong in (("texts", -1), ("mean", float("nan")), ("sum", topic["sum"][1:])):
        file.write_text(json.dumps({"": {**good[""], "topics": [{**topic, name: wrong}]}}))
        with pytest.raises(ModelError, match=r"cannot be used.*to learn anew"):
            read_topics(file, 2)


def full(path):
    path.mkdir()
    raise OSError("the disk is full")


# Whose it is.


def test_keys_and_topics_are_apart(target, base, tmp_path):
    learner = OnlineLearner(target, base, tmp_path, replace(QUICK, branches=2))
    one, other = learner.begin("secret", [5, 9]), learner.begin("", [5, 9])
    assert one.branch != other.branch and "secret" not in one.branch
    assert learner.begin("secret", [5, 9, 7]).source is one.source
    learner.begin("third", [5])
    assert other.source.closed and not one.source.closed, "the least lately used gives way"
    assert learner.counts()["branches"] == 2
    learner.close()
    assert learner.counts()["branches"] == 0 and not list(tmp_path.rglob("*.safetensors"))


def texts(ids, count, seed):
    """Long texts of a subject, with words that all subjects share."""
    coins = np.random.default_rng(seed)
    return [
        [*coins.choice(ids, 30).tolist(), *coins.choice(range(500, 520), 30).tolist()] for _ in range(count)
    ]


def test_a_new_subject_opens_a_topic_and_an_odd_text_does_not():
    router = Router(3)
    assert {router.route(t) for t in texts(range(100, 160), 30, 0)} == {0}
    router.route(texts(range(900, 960), 1, 1)[0])
    assert {router.route(t) for t in texts(range(100, 160), 30, 2)} == {0}
    shift = [router.route(t) for t in texts(range(1100, 1160), 3 * ENOUGH, 3)]
    assert shift[-ENOUGH:] == [1] * ENOUGH
    again = Router.from_json(json.loads(json.dumps(router.to_json())), 3)
    mixed = [*texts(range(100, 160), 5, 4), *texts(range(1100, 1160), 5, 5)]
    for one in (router, again):
        assert [one.route(t) for t in mixed] == [0] * 5 + [1] * 5
    alone = Router(1)
    assert {alone.route(t) for t in [*mixed, []]} == {0}


def test_topics_come_back_with_their_drafters(target, base, tmp_path):
    config = replace(QUICK, topics=2, branches=4)
    stream = Stream(target, base, tmp_path, config)
    for t in texts(range(2, 60), 20, 0) + texts(range(200, 258), 24, 1):
        text = stream.learner.begin("", [one % 258 for one in t])
        stream.learner.end(text)
    assert text.branch.endswith("-1")
    branch = text.source
    stream.learner._coins = np.random.default_rng(0)
    piece = Piece(
        np.arange(2, 90, dtype=np.int32),
        np.arange(1, 88, dtype=np.int32),
        np.arange(3, 90, dtype=np.int32)[:87, None],
        np.ones((87, 1), np.float32),
        True,
    )
    for _ in range(3):
        branch.train.add(piece)
        branch.held.add(piece)
    branch.credit = 1e4
    version = None
    while version is None and branch.credit > 0:
        version = stream.learner.step(60.0)
    stream.learner.close()
    again = OnlineLearner(target, base, tmp_path, config)
    new = again.begin("", [one % 258 for one in texts(range(200, 258), 1, 7)[0]])
    old = again.begin("", [one % 258 for one in texts(range(2, 60), 1, 8)[0]])
    assert (new.branch, old.branch[-2:]) == (version.branch, "-0")
    assert new.drafter is not None and old.drafter is None
    again.close()
    (tmp_path / "topics.json").write_text('{"x": 3}')
    with pytest.raises(ModelError, match=r"topics.json cannot be used"):
        OnlineLearner(target, base, tmp_path, config)


def test_what_does_not_learn_is_said(target, base):
    for spec, words in (
        ("eagle3", "--learn is for draft_model, not for eagle3"),
        ("draft_model[model=tiny]", "needs a draft model that outpace train made"),
        (f"draft_model[model={base} layers=1]", "needs a draft model that outpace train made"),
    ):
        with pytest.raises(ModelError, match=words):
            OnlineLearner.open(target, spec, QUICK)
    for wrong in ({"topics": 0}, {"held_out": 0.0}, {"anchor": 2.0}):
        with pytest.raises(ValueError):
            OnlineConfig(**wrong)
