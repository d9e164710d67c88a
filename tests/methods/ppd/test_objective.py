"""Prompt tokens in training: riders as the target runs them, losses, calibration, agreement."""

import json

import pytest
import torch
from safetensors.torch import load_file

from outpace import Engine
from outpace.errors import ModelError
from outpace.methods.ppd.files import read_prompts
from outpace.methods.ppd.objective import Ppd, PpdTraining
from outpace.models.tiny import TableTarget, tiny
from outpace.train import losses
from outpace.train.corpus import CorpusPrompt
from outpace.train.loop import LoopConfig, train
from outpace.train.options import read_options
from outpace.train.pipeline import Pipeline
from outpace.train.rider_net import attend, sight
from outpace.types import ROOT, Feed, Riders
from tests.train.texts import Listed, most_used, written

RIDERS = 3


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def batches(target):
    return [written(target, 4, seed=seed, new=14) for seed in range(2)]


def built(target, vocab=None, **options):
    objective = Ppd.build(PpdTraining(riders=RIDERS, **options), target, vocab)
    torch.manual_seed(0)
    with torch.no_grad():
        objective.module.moved_KEH.add_(0.004 * torch.randn_like(objective.module.moved_KEH))
    return objective


def ridden(objective, tokens):
    """Mean hidden states of riders behind a text, as a pass that drafts gives them, [K, H]."""
    target, embed_KEH = objective.target, objective.module().detach()
    chains = embed_KEH.shape[1]
    after = tuple(k - 1 if k % RIDERS else -1 for k in range(RIDERS * chains))
    embed_RH = embed_KEH.transpose(0, 1).flatten(0, 1)
    riders = Riders((ROOT,) * len(after), after, embed_RH=embed_RH)
    cache = target.new_cache()
    slot = cache.open()
    if tokens[:-1]:
        target.score([Feed.chain(slot, tokens[:-1], want=())], cache)
        cache.keep(slot, range(len(tokens) - 1))
    feed = Feed(slot, (tokens[-1],), (-1,), riders=riders)
    hidden_RH = target.score([feed], cache).rider_hidden_RH
    return hidden_RH.float().view(chains, RIDERS, -1).mean(0)


def guessed(objective, batch):
    """Places with riders as (sequence, row), and their states [G, K, H]."""
    aligned = objective.chosen(batch)
    with torch.no_grad():
        x_BGKH = torch.stack(objective.guesses(batch, aligned)[0], 2)
    real_BG, place_BG = aligned.real_BA, aligned.place_BA
    at = real_BG.nonzero().tolist()
    return [(b, int(place_BG[b, g])) for b, g in at], x_BGKH[real_BG]


@pytest.mark.parametrize("ensemble", [1, 2])
def test_riders_are_those_of_a_pass_that_drafts(target, batches, ensemble):
    objective, apart = built(target, ensemble=ensemble), 1.0
    places, x_GKH = guessed(objective, batches[0])
    assert len(places) > 20
    for (b, row), x_KH in list(zip(places, x_GKH, strict=True))[::5]:
        tokens = batches[0].token_BT[b].tolist()
        torch.testing.assert_close(x_KH, ridden(objective, tokens[: row + 1]), atol=5e-5, rtol=1e-4)
        late = ridden(objective, tokens[: row + 2])  # planted: it sees the token after its place
        apart = min(apart, float((x_KH - late).abs().max()))
    assert apart > 0.01


def test_places_are_drawn_and_the_same_again(target, batches):
    objective = built(target, places=5)
    chosen = objective.chosen(batches[0])
    place_BG = chosen.place_BA
    assert place_BG.shape == (4, 5) and bool(chosen.real_BA.all())
    assert all(len(set(row)) == 5 for row in place_BG.tolist())
    assert torch.equal(place_BG, objective.chosen(batches[0]).place_BA)
    assert not torch.equal(place_BG, objective.chosen(batches[1]).place_BA), "no fixed places"
    assert len(set(map(tuple, place_BG.tolist()))) > 1


def test_what_riders_see():
    place_BR = torch.tensor([[2] * 3 + [4] * 3])
    position_BR = place_BR + torch.tensor([1, 2, 3] * 2)
    for window in (None, 3, 1):
        seen = sight(place_BR, position_BR, 6, 3, window)[0]
        for r in range(6):
            place, step = (2, 4)[r // 3], r % 3
            position = place + 1 + step
            reach = 100 if window is None else window
            text = [t <= place and position - t < reach for t in range(6)]
            own = [o // 3 == r // 3 and o <= r and r - o < reach for o in range(6)]
            assert seen[r].tolist() == text + own, (window, r)


def test_attention_with_a_softcap():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 3, 4, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.zeros(2, 12, 9).masked_fill_(torch.rand(2, 12, 9) < 0.4, -torch.inf)
    mask[..., 0] = 0.0
    for cap in (None, 2.0):
        out = attend(q, k, v, mask, cap)
        for b, n, g, r in ((0, 1, 2, 3), (1, 0, 0, 2)):
            score = k[b, n] @ q[b, n, g, r]
            score = score if cap is None else cap * (score / cap).tanh()
            share = (score + mask[b, g * 4 + r]).softmax(0)
            torch.testing.assert_close(out[b, n, g, r], share @ v[b, n], atol=1e-5, rtol=1e-4)


def plain_loss(objective, batch, vocab, name, decay, late=0):
    """The loss from plain logits, place by place; ``late`` is a planted shift of the labels."""
    places, x_GKH = guessed(objective, batch)
    _, last_BTH = objective.net.texts(batch)
    rows_DH = objective.head_DH
    total, first = 0.0, 0
    for (b, row), x_KH in zip(places, x_GKH, strict=True):
        for k in range(RIDERS):
            place = row + 2 + k  # the token that rider k guesses
            if place >= int(batch.length_B[b]):
                continue
            label = int(vocab.feed_V[batch.token_BT[b, place]])
            if label < 0:
                continue
            z_D = rows_DH @ x_KH[k]
            law = objective.target.head(last_BTH[b, place - 1 - late][None])
            p = law[:, vocab.to_target_D].softmax(-1)
            one = (
                losses.cross_entropy(z_D[None], torch.tensor([label]))
                if name == "ce"
                else losses.ORACLES[name](z_D[None], p)
            )
            total += decay**k * one.item()
            first += k == 0
    return total / first, first


@pytest.mark.parametrize("name", ["kl", "ce"])
def test_the_loss_is_that_of_plain_logits_and_no_row_off(target, batches, name):
    vocab = most_used(batches, 40, target)
    objective = built(target, vocab, decay=0.5, loss=name)
    step = objective.loss(batches[0])
    wanted, first = plain_loss(objective, batches[0], vocab, name, 0.5)
    assert step.tokens == first > 20
    assert step.loss.item() == pytest.approx(wanted, rel=1e-4)
    if name == "kl":
        late, _ = plain_loss(objective, batches[0], vocab, name, 0.5, late=1)
        assert abs(late - wanted) > 0.01


def test_gradients_are_slopes_and_reach_every_vector_alone(target, batches):
    objective = built(target, most_used(batches, 40, target), ensemble=2, places=4)
    moved = objective.module.moved_KEH
    objective.loss(batches[0]).loss.backward()
    grad = moved.grad.clone()
    assert bool((grad.abs().amax(-1) > 0).all()), "every vector learns"
    assert all(p.grad is None for layer in objective.net.layers.values() for p in layer.parameters())
    torch.manual_seed(1)
    way = torch.randn_like(moved)
    way /= way.norm()
    ends = []
    for step in (-2e-4, 2e-4):
        with torch.no_grad():
            moved.add_(step * way)
        ends.append(objective.loss(batches[0]).loss.item())
        with torch.no_grad():
            moved.sub_(step * way)
    slope = (ends[1] - ends[0]) / 4e-4
    assert slope == pytest.approx(float((grad * way).sum()), rel=0.05, abs=0.02)


def test_acceptance_and_ranks_are_counted_along_texts(target, batches):
    vocab = most_used(batches, 60, target)
    objective, batch = built(target, vocab), batches[1]
    step = objective.evaluate(batch)
    places, x_GKH = guessed(objective, batch)
    _, last_BTH = objective.net.texts(batch)
    accepted, counted, rank_KB = [0] * RIDERS, [0] * RIDERS, torch.zeros(RIDERS, 11)
    for (b, row), x_KH in zip(places, x_GKH, strict=True):
        chain = tree = True
        for k in range(RIDERS):
            place = row + 2 + k
            if place >= int(batch.length_B[b]):
                break
            truth = int(target.head(last_BTH[b, place - 1][None]).argmax())
            z_D = objective.head_DH @ x_KH[k]
            order = vocab.to_target_D[z_D.argsort(descending=True)].tolist()
            rank = min(order.index(truth), 10) if truth in order else 10
            goes_on = int(batch.token_BT[b, place]) == truth
            counted[k] += chain
            accepted[k] += chain and rank == 0
            rank_KB[k, rank] += tree
            chain, tree = chain and rank == 0 and goes_on, tree and rank < 10 and goes_on
    assert step.accepted_by_depth.tolist() == accepted
    assert step.counted_by_depth.tolist() == counted
    assert objective.ranks.count_SB.tolist() == rank_KB.tolist() and rank_KB[1].sum() > 0
    rates = objective.ranks.acceptance()
    assert rates[0][1] == pytest.approx(float(rank_KB[0, 1] / rank_KB[0].sum()))
    objective.loss(batch)
    assert objective.ranks.acceptance() == [], "a step of training makes the measurement old"


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """Prompt tokens after a few steps, their folder, and texts not trained on."""
    folder = tmp_path_factory.mktemp("ppd")
    rows = [written(target, 8, seed=seed, new=20) for seed in range(3)]
    held_out = written(target, 8, seed=99, new=24)
    objective = Ppd.build(PpdTraining(riders=2), target, most_used(rows, 200, target))
    before, seen = objective.evaluate(held_out), []
    config = LoopConfig(steps=40, lr=8e-4, evaluate_every=100, bf16=False)
    train(
        objective,
        Listed(rows),
        [held_out],
        config,
        out=folder / "out",
        work=folder / "work",
        report=seen.append,
    )
    return objective, folder / "out", held_out, before, seen[-1]


def test_a_short_training_raises_the_overlap(trained):
    objective, folder, _, before, progress = trained
    first = float(before.overlap_by_depth[0] / before.counted_by_depth[0])
    print(before.accepted_by_depth / before.counted_by_depth, first, progress.line())
    assert len(progress.acceptance) == 2, "by depth"
    assert progress.overlap[0] > 1.3 * first
    config = json.loads((folder / "config.json").read_text())
    assert (config["method"], config["riders"], config["ensemble"]) == ("ppd", 2, 1)
    assert config["acceptance"][0][0] == pytest.approx(progress.acceptance[0], abs=0.02)
    tensors = load_file(folder / "model.safetensors")
    assert {name: list(one.shape) for name, one in tensors.items()} == {
        "prompts": [2, 1, 64],
        "d2t": [200],
        "t2d": [objective.target.vocab_size],
    }
    stored = read_prompts(str(folder), objective.target).embed_KEH
    torch.testing.assert_close(stored, objective.module().detach(), atol=2e-3, rtol=1e-2)


def test_drafts_are_the_guesses_that_training_counts(trained):
    """Guess for guess, by the drafter that reads the folder, along the texts that it writes."""
    objective, folder, batch, _, _ = trained
    engine = Engine(objective.target, drafter="none")
    spec = f"ppd[model={folder} tree=chain tree_size=2 rows=9]"  # whatever passes take
    drafter, drafts = engine.method(spec).drafter, []
    with torch.no_grad():  # as it is stored
        module = objective.module
        module.moved_KEH.zero_()
        module.start_KEH.copy_(drafter.prompts.embed_KEH)
    real = drafter.propose

    def watched(rows):
        given = [list(row.tokens) for row in rows]
        out = real(rows)
        drafts.extend(zip(given, (draft.token_N for draft in out), strict=True))
        return out

    drafter.propose = watched
    prompts = [batch.token_BT[b, : int(batch.answer_BT[b].nonzero()[0])].tolist() for b in range(8)]
    engine.generate(prompts, drafter=spec, max_new_tokens=24, ignore_eos=True)
    places, x_GKH = guessed(objective, batch)
    guess_GK = objective.vocab.to_target_D[(x_GKH @ objective.head_DH.T).argmax(-1)].tolist()
    known = dict(zip(places, guess_GK, strict=True))
    texts = [batch.token_BT[b, :n].tolist() for b, n in enumerate(batch.length_B.tolist())]
    same = shifted = checked = 0
    for tokens, drafted in drafts:
        b = next(b for b, text in enumerate(texts) if text[: len(tokens)] == tokens)
        place = len(tokens) - 2  # the row before the pending token's
        for k, token in enumerate(drafted if (b, place) in known else ()):
            checked += 1
            same += known[b, place][k] == token
            shifted += (b, place - 1) in known and known[b, place - 1][k] == token
    print(same, shifted, checked)
    assert checked > 60 and same == checked
    assert shifted < 0.8 * checked, "planted: the riders of the row before guess something else"


def test_from_prompts_to_prompt_tokens_that_draft(tmp_path):
    engine = Engine.load("tiny", dtype="float32", drafter="none")
    prompts = [
        CorpusPrompt(messages=({"role": "user", "content": f"tell {i}"},), source=0) for i in range(60)
    ]
    settings = [
        "riders=2",
        "pipeline.vocab=64",
        "pipeline.tokens_per_batch=256",
        "loop.steps=4",
        "loop.evaluate_every=2",
        "loop.bf16=false",
        "data.batch=32",
        "data.max_new_tokens=16",
    ]
    pipeline = Pipeline(
        engine,
        read_options("ppd", settings, 700),
        prompts=prompts,
        work=tmp_path,
        out=tmp_path / "out",
        say=lambda tick: None,
    )
    lines = []
    made = pipeline.run(report=lines.append)
    assert len(lines[-1].acceptance) == 2 and pipeline.features is not None
    kept = list((tmp_path / "tokens" / "features").iterdir())
    layers = engine.target.num_layers
    assert [one.name for one in kept] == [f"hidden.-1+kv.0-{layers - 1}"], "keys and values are made once"
    config = json.loads((made.folder / "config.json").read_text())
    assert len(config["acceptance"]) == 2 and config["draft_vocab_size"] == 64
    settings = {"max_new_tokens": 12, "ignore_eos": True}
    plain = engine.generate([[5, 9, 11], [3]], drafter="none", **settings)
    fast = engine.generate([[5, 9, 11], [3]], drafter=f"ppd[model={made.folder}]", **settings)
    assert [r.tokens for r in fast] == [r.tokens for r in plain]


def test_what_cannot_be_built_is_said():
    with pytest.raises(ModelError, match="ppd needs embeddings, taps"):
        Ppd.build(PpdTraining(), TableTarget.random(0), None)
    for wrong in ({"riders": 0}, {"ensemble": 0}, {"places": 0}, {"decay": 0.0}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            PpdTraining(**wrong)
