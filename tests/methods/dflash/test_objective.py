"""The block drafter's training: masks, alignment, shares, agreement with what drafts, and files."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from outpace.drafters.features import TrainedConfig
from outpace.drafters.static_tree import LARGEST, likeliest
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.dflash import training_net as dflash_net
from outpace.methods.dflash.drafter import Dflash
from outpace.methods.dflash.dspark import Dspark
from outpace.methods.dflash.dspark_objective import DsparkObjective, DsparkTraining
from outpace.methods.dflash.jetspec import Jetspec
from outpace.methods.dflash.jetspec_objective import JetspecObjective, JetspecTraining
from outpace.methods.dflash.objective import Anchored, DflashObjective, DflashTraining
from outpace.models.tiny import TableTarget, tiny
from outpace.train import losses
from outpace.train.align import EAGLE, Aligned
from outpace.train.loop import LoopConfig, train
from outpace.tree.growth import Branch
from outpace.types import ROOT, Draft, Feed, Outcome, Verdict
from tests.methods.dflash.oracle import TAPS, block
from tests.train.texts import Listed, most_used, written

SLOTS = 3
LAYERS = ",".join(tap.removeprefix("hidden.") for tap in TAPS)


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def batches(target):
    return [written(target, 4, seed=seed, new=14, taps=TAPS) for seed in range(2)]


SEEDS = {"rows": "seeds", "slots": SLOTS}
MASKS = {"rows": "masks", "slots": SLOTS + 1, "mask": 7}
KINDS = {
    "seeds": (DflashObjective, DflashTraining, SEEDS),
    "masks": (DflashObjective, DflashTraining, MASKS),
    "dspark": (DsparkObjective, DsparkTraining, MASKS | {"slots": SLOTS, "rank": 8}),
    "jetspec": (JetspecObjective, JetspecTraining, MASKS),
}


def built(target, vocab=None, moved=True, kind="seeds", **options):
    objective, config, own = KINDS[kind]
    options = {"layers": 1, "taps": LAYERS, **own, **options}
    objective = objective.build(config(**options), target, vocab)
    coins = torch.Generator().manual_seed(0)
    with torch.no_grad():  # away from the start, where rows are alike
        for parameter in objective.module.parameters() if moved else ():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=coins))
            parameter.copy_(parameter.bfloat16())  # as files hold them
    return objective


def every(aligned):
    return aligned.real_BA.new_ones(*aligned.real_BA.shape, SLOTS)


def outputs(objective, batch, aligned=None):
    """What the unembedding reads at all rows, [B, A, S, H]."""
    aligned = Aligned(batch, EAGLE) if aligned is None else aligned
    keep = every(aligned)
    with torch.no_grad():
        return objective.outputs(batch, aligned, keep).view(*keep.shape, -1)


def by_hand(objective, batch, b, row, later=0, **planted):
    """The same for one anchor; ``later`` context rows are planted behind it."""
    shape = objective.shape
    taps = {tap: batch.feature[tap][b, : row + 1 + later] for tap in TAPS}
    pending = int(batch.token_BT[b, row + 1])
    with torch.no_grad():
        state = objective.module.state_dict()
        return block(shape, state, objective.target, taps, pending, **planted)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_learned_as_they_are_drafted(target, batches, layers, kind):
    """Against the oracle of the drafter, anchor by anchor, and one context row more is seen."""
    objective, batch = built(target, layers=layers, kind=kind), batches[0]
    aligned, got = Aligned(batch, EAGLE), outputs(objective, batch)
    for b, a in ((0, 0), (1, 4), (3, 7)):
        row = int(aligned.place_BA[b, a])
        torch.testing.assert_close(got[b, a], by_hand(objective, batch, b, row), atol=2e-4, rtol=2e-4)
        for planted in ({"later": 1}, {"late": 1}, {"causal": kind != "jetspec"}):
            other = by_hand(objective, batch, b, row, **planted)
            assert float((other - got[b, a]).abs().max()) > 2e-3, planted


def touched(objective, batch):
    """Which blocks change with the features of row ``at`` of sequence 0; bool [A] by ``at``."""
    aligned, before = Aligned(batch, EAGLE), outputs(objective, batch)
    table = {}
    for at in range(int(batch.length_B[0])):
        feature = {name: one.clone() for name, one in batch.feature.items()}
        for one in feature.values():
            one[0, at] += 1
        after = outputs(objective, replace(batch, feature=feature))
        assert torch.equal(after[1:], before[1:]), "other sequences"
        changed = (after[0] - before[0]).abs().amax((1, 2)) > 0
        table[at] = [bool(c) for c in changed[aligned.real_BA[0]]]
    rows = aligned.place_BA[0][aligned.real_BA[0]].tolist()
    return rows, table


def leaks(objective, batch):
    """Pairs (anchor, later row) where a block knows of its own future."""
    rows, table = touched(objective, batch)
    return [
        (row, at)
        for at, changed in table.items()
        for row, one in zip(rows, changed, strict=True)
        if one and at > row
    ]


def test_no_block_sees_features_of_its_own_future(target, batches, monkeypatch):
    objective, batch = built(target, layers=2), batches[0]
    assert leaks(objective, batch) == []
    rows, table = touched(objective, batch)
    assert all(table[at][i] for i, row in enumerate(rows) for at in range(row + 1)), "it sees all"
    real = dflash_net.unseen
    for planted in (1, 2):
        monkeypatch.setattr(dflash_net, "unseen", lambda place, tokens, n=planted: real(place + n, tokens))
        found = leaks(objective, batch)
        assert {at - row for row, at in found} == set(range(1, planted + 1)), "planted"


def test_a_block_reads_the_pending_token_and_no_later_one(target, batches):
    objective, batch = built(target), batches[0]
    aligned, before = Aligned(batch, EAGLE), outputs(objective, batch)
    row = int(aligned.place_BA[0, 4])
    for ahead in range(4):
        token_BT = batch.token_BT.clone()
        token_BT[0, row + ahead] = (token_BT[0, row + ahead] + 1) % 100
        after = outputs(objective, replace(batch, token_BT=token_BT))
        assert (float((after[0, 4] - before[0, 4]).abs().max()) > 1e-4) == (ahead == 1), ahead


def test_blocks_do_not_see_each_other(target, batches):
    """A block alone, and among all others of its text."""
    objective, batch = built(target, layers=2, anchors=0.4), batches[0]
    whole, every_one = outputs(objective, batch), Aligned(batch, EAGLE)
    aligned, _ = objective.drawn(batch)
    some = outputs(objective, batch, aligned)
    for b, a in aligned.real_BA.nonzero().tolist():
        same = (every_one.place_BA[b] == aligned.place_BA[b, a]) & every_one.real_BA[b]
        wanted = whole[b, int(same.nonzero()[0])]
        torch.testing.assert_close(some[b, a], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["kl", "ce"])
def test_the_loss_is_that_of_plain_logits_and_no_row_off(target, batches, name):
    vocab, batch = most_used(batches, 40, target), batches[0]
    objective = built(target, vocab, decay=0.7, anchors=0.8, loss=name)
    step = objective.loss(batch)
    aligned, keep_BAS = objective.drawn(batch)
    y_BASH = outputs(objective, batch, aligned)
    totals, first = [0.0, 0.0], 0
    for b, a, i in keep_BAS.nonzero().tolist():
        place = int(aligned.place_BA[b, a]) + 2 + i  # the token that row i guesses
        assert bool(batch.answer_BT[b, place])
        label = int(vocab.feed_V[batch.token_BT[b, place]])
        z = target.head(y_BASH[b, a, i][None])[0, vocab.to_target_D]
        for late in (0, 1):  # planted: the target's law of the token before
            last = batch.feature["hidden.-1"][b, place - 1 - late][None]
            p = target.head(last)[:, vocab.to_target_D].softmax(-1)
            one = (
                losses.cross_entropy(z[None], torch.tensor([label]))
                if name == "ce"
                else losses.ORACLES[name](z[None], p)
            )
            totals[late] += one.item()
        first += i == 0
    assert step.tokens == first > 10
    assert step.loss.item() == pytest.approx(totals[0] / first, rel=1e-3)
    assert (abs(totals[1] - totals[0]) > 0.02 * totals[0]) == (name != "ce")
    step.loss.backward()
    for parameter_name, parameter in objective.module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, parameter_name


def test_anchors_and_rows_are_drawn_in_their_shares(target):
    batch = written(target, 24, seed=5, new=30, taps=TAPS)
    objective = built(target, moved=False, anchors=0.5, decay=0.6)
    aligned, keep_BAS = objective.drawn(batch)
    anchors, rows = int(aligned.real_BA.sum()), int(Aligned(batch, EAGLE).real_BA.sum())
    share = keep_BAS.sum((0, 1)) / anchors
    # Of 700 rows and 350 anchors: five standard deviations are 0.1 and 0.13.
    assert abs(anchors / rows - 0.5) < 0.1 and rows > 600
    for i in range(SLOTS):
        assert float(share[i]) == pytest.approx(0.6**i, abs=0.13)
    again, _ = objective.drawn(batch)
    assert torch.equal(again.place_BA, aligned.place_BA), "a function of the batch"
    other = replace(batch, token_BT=(batch.token_BT + 1) % target.vocab_size)
    assert not torch.equal(objective.drawn(other)[0].place_BA, aligned.place_BA)
    least = Anchored(batch, 1e-9, torch.Generator().manual_seed(0))
    assert int(least.real_BA.sum()) == 1, "never none"


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_drafting_give_the_same_logits(target, batches, tmp_path, kind):
    """Of dspark before its Markov head: the next test has that."""
    vocab, batch = most_used(batches, 40, target), batches[1]
    objective = built(target, vocab, kind=kind)
    objective.save(tmp_path, {})
    load = {"dspark": Dspark, "jetspec": Jetspec}.get(kind, Dflash).load
    drafter = load(TrainedConfig(model=str(tmp_path), quantize=None), target)
    aligned, wanted = Aligned(batch, EAGLE), outputs(objective, batch)
    for b, a in ((0, 0), (2, 5), (1, 8)):
        row = int(aligned.place_BA[b, a])
        text = batch.token_BT[b, : row + 2].tolist()
        cache = target.new_cache()
        passed = target.score([Feed.chain(cache.open(), text[:-1])], cache, taps=drafter.traits.taps)
        state, rows = drafter.begin(None), tuple(range(row + 1))
        drafter.observe(
            [state], [Outcome(Draft(), passed.of(0), Verdict((), ()), tuple(text[:-1]), rows, 0, forced=True)]
        )
        got = drafter.blocks([Branch(state, text, (ROOT,), [], [])])[0]
        theirs = target.head(wanted[b, a])[:, vocab.to_target_D]
        torch.testing.assert_close(got, theirs, atol=0.02, rtol=0.02)  # features in bfloat16
        before = target.head(wanted[b, a + 1])[:, vocab.to_target_D]
        assert float((got - before).abs().max()) > 0.2, "planted: another row"


def test_guesses_follow_the_one_above_and_foresee_what_is_kept(target, batches, tmp_path):
    """The Markov head and the confidence head, in training and in use."""
    vocab, batch = most_used(batches, 40, target), batches[1]
    objective = built(target, vocab, kind="dspark")
    objective.save(tmp_path, {})
    drafter = Dspark.load(TrainedConfig(model=str(tmp_path), quantize=None), target)
    text = batch.token_BT[0, :9].tolist()
    cache = target.new_cache()
    passed = target.score([Feed.chain(cache.open(), text[:-1])], cache, taps=drafter.traits.taps)
    state = drafter.begin(None)
    rows = tuple(range(8))
    drafter.observe(
        [state], [Outcome(Draft(), passed.of(0), Verdict((), ()), tuple(text[:-1]), rows, 0, forced=True)]
    )
    tokens, parents = vocab.to_target_D[:3].tolist(), [ROOT, ROOT, 0]
    net, base_AD = objective.module.requires_grad_(False), None
    for nodes, depth in (((ROOT,), 0), ((0, 1), 1), ((2,), 2)):
        branch = Branch(state, text, nodes, tokens, parents)
        got_FD, _ = drafter.expand([branch])
        base_AD = drafter._logits_NKD[0] if base_AD is None else base_AD
        for i, node in enumerate(nodes):
            above = vocab.feed_V[text[-1] if node == ROOT else tokens[node]].reshape(1)
            vector = net.markov_head.above(above)[0]
            wanted = base_AD[depth] + net.markov_head.markov_w2.weight @ vector
            torch.testing.assert_close(got_FD[i], wanted, atol=2e-3, rtol=2e-3)
            sure = net.confidence_head["proj"](torch.cat([drafter._hidden_BAH[0, depth], vector])).sigmoid()
            assert float(drafter.foresee([branch])[i]) == pytest.approx(float(sure), abs=2e-3)
    assert float((got_FD[0] - base_AD[2]).abs().max()) > 0.05, "the head says something"


def test_what_is_saved_and_measured(target, batches, tmp_path):
    vocab = most_used(batches, 40, target)
    objective = built(target, vocab)
    objective.save(tmp_path, {"command": "test"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tree"] == config["acceptance"] == []
    step = objective.evaluate(batches[0])
    rates = objective.ranks.acceptance()
    assert rates[0][0] == pytest.approx(float(step.accepted_by_depth[0] / step.counted_by_depth[0]))
    assert len(step.counted_by_depth) == SLOTS
    objective.save(tmp_path, {"command": "test"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["method"], config["target_digest"]) == ("dflash", target.digest)
    assert (config["slots"], config["taps"]) == (SLOTS, list(TAPS))
    assert config["acceptance"] == rates and config["tree"] == list(likeliest(rates, LARGEST))
    wanted = {name: list(size) for name, size in objective.shape.tensor_shapes().items()}
    wanted |= {"d2t": [40], "t2d": [target.vocab_size]}
    tensors = load_file(tmp_path / "model.safetensors")
    # No unembedding among them: it is the target's.
    assert {name: list(one.shape) for name, one in tensors.items()} == wanted
    objective.loss(batches[0])
    assert objective.ranks.acceptance() == [], "a step of training makes the measurement old"


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_training_raises_acceptance(target, tmp_path, kind):
    rows = [written(target, 16, seed=seed, new=24, taps=TAPS) for seed in range(3)]
    held_out = written(target, 12, seed=99, new=24, taps=TAPS)
    objective, seen = built(target, most_used(rows, 200, target), moved=False, kind=kind), []
    before = objective.evaluate(held_out)
    config = LoopConfig(steps=30, lr=1e-2, evaluate_every=100, bf16=False)
    train(
        objective,
        Listed(rows),
        [held_out],
        config,
        out=tmp_path / "net",
        work=tmp_path / "work",
        report=seen.append,
    )
    print(before.accepted_by_depth / before.counted_by_depth, seen[-1].line())
    first = float(before.accepted_by_depth[0] / before.counted_by_depth[0])
    assert seen[-1].acceptance[0] > first + 0.05
    tree = json.loads((tmp_path / "net" / "config.json").read_text())["tree"]
    assert len(tree) > 3 and tree == list(likeliest(objective.ranks.acceptance(), LARGEST))
    assert json.loads((tmp_path / "net" / "tree.json").read_text())["parents"] == tree
    assert seen[-1].overlap[0] > float(before.overlap_by_depth[0] / before.counted_by_depth[0])


def test_the_mask_is_a_token_that_texts_hardly_hold(target, batches, monkeypatch):
    """Neither one of the draft vocabulary nor an end; one that is named is taken."""

    def mask(vocab=None, **options):
        return built(target, vocab, kind="masks", **({"mask": None} | options)).shape.mask

    last = target.vocab_size - 1
    assert mask() == last and mask(mask=7) == 7
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[[0, 1, 9, last - 1, last]] = torch.arange(5)
    drafted = VocabMap(torch.tensor([0, 1, 9, last - 1, last]), feed_V)
    assert mask(drafted) == last - 2
    monkeypatch.setattr(target, "defaults", replace(target.defaults, eos_ids=(1, last)))
    assert mask() == last - 1 and mask(drafted) == last - 2
    none_left = VocabMap(torch.arange(last + 1), torch.arange(last + 1))
    assert mask(none_left) == last


def test_what_cannot_be_built_is_said(target):
    with pytest.raises(ModelError, match="dflash needs head, taps"):
        DflashObjective.build(DflashTraining(), TableTarget.random(0), None)
    with pytest.raises(ModelError, match="layers=3, but tiny has 2"):
        DflashObjective.build(DflashTraining(layers=3), target, None)
    for taps in ("1,9", "x", "-2"):
        with pytest.raises(ModelError, match="has layers 0 to 2"):
            DflashObjective.taps(DflashTraining(taps=taps), target)
    for wrong in ({"slots": 0}, {"layers": 0}, {"decay": 0.0}, {"anchors": 1.5}):
        with pytest.raises(ValueError, match="must be"):
            DflashTraining(**wrong)
