"""The draft model in training is the decoder that drafts; a short training raises acceptance."""

import pytest
import torch

from outpace.errors import ModelError
from outpace.methods.draft_model.files import load_trained
from outpace.methods.draft_model.objective import DraftModelObjective as Trainee
from outpace.methods.draft_model.objective import DraftModelTraining as Options
from outpace.models.tiny import tiny
from outpace.train.align import DRAFT_MODEL, Aligned, places
from outpace.train.batches import Batch
from outpace.train.loop import LoopConfig, train
from outpace.types import Feed
from tests.models.making import LATER, own_target
from tests.train.texts import Listed, most_used, written


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def batches(target):
    return [written(target, 12, seed=seed) for seed in range(3)]


def the_target_itself(target, batch):
    """All of its layers, which say what its own passes do, whatever rows are computed in the last one."""
    whole = Trainee.build(Options(layers=target.num_layers), target, None)
    aligned = Aligned(batch, DRAFT_MODEL)
    with torch.no_grad():
        hidden_BAW = whole.hidden(batch, aligned)
        z_BAV = hidden_BAW @ whole.head().T
        every_BTW = whole.module(whole.embedding()[batch.token_BT], places(batch), None)
    for b in (0, 1, 5):
        tokens = batch.token_BT[b, : int(batch.length_B[b])].tolist()
        cache = target.new_cache()
        logits_TV = target.score([Feed.chain(cache.open(), tokens)], cache).logits_TV
        for a in range(0, 20, 4):
            row = int(aligned.place_BA[b, a])
            torch.testing.assert_close(z_BAV[b, a], logits_TV[row], atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(hidden_BAW[b, a], every_BTW[b, row])
    return whole


@pytest.mark.parametrize("family", LATER)
def test_all_layers_are_the_target_in_every_family(family):
    target = own_target(family)
    the_target_itself(target, written(target, 6, seed=0))


def test_all_layers_of_the_target_are_the_target(target, batches):
    batch = batches[0]
    whole = the_target_itself(target, batch)
    step = whole.evaluate(batch)
    assert torch.equal(step.accepted_by_depth, step.counted_by_depth), "it guesses everything"
    assert step.counted_by_depth[0] > step.counted_by_depth[4] > 0
    assert step.overlap_by_depth[0] / step.counted_by_depth[0] > 0.99
    assert whole.loss(batch).loss.item() < 0.01


def test_acceptance_is_counted_along_chains(target, batches):
    vocab = most_used(batches, 150, target)
    trainee, batch = Trainee.build(Options(layers=1, take="1"), target, vocab), batches[1]
    step = trainee.evaluate(batch)
    right = []
    for b, length in enumerate(batch.length_B.tolist()):
        first = int(batch.answer_BT[b].nonzero()[0])
        only = Batch(
            token_BT=batch.token_BT[b : b + 1, :length],
            length_B=torch.tensor([length]),
            answer_BT=batch.answer_BT[b : b + 1, :length],
        )
        with torch.no_grad():
            hidden_TW = trainee.module(trainee.embedding()[only.token_BT], places(only), None)[0]
            guess_T = vocab.to_target_D[(hidden_TW @ trainee.head().T).argmax(-1)]
            law_TV = target.head(batch.feature["hidden.-1"][b, :length])
        right.append(
            [
                (
                    int(guess_T[t]) == int(law_TV[t].argmax()),
                    int(law_TV[t].argmax()) == int(batch.token_BT[b, t + 1]),
                )
                for t in range(first - 1, length - 1)
            ]
        )
    accepted, counted = [0] * 5, [0] * 5
    for line in right:
        for begin in range(len(line)):
            for depth, (hit, follows) in enumerate(line[begin : begin + 5]):
                counted[depth] += 1
                accepted[depth] += hit
                if not (hit and follows):
                    break
    assert step.counted_by_depth.tolist() == counted
    assert step.accepted_by_depth.tolist() == accepted
    assert 0 < accepted[1] < counted[1] < counted[0]


@pytest.mark.parametrize(
    "options", [{"layers": 1}, {"layers": 2, "take": "1,0", "train_head": True}, {"layers": 2, "width": 32}]
)
@pytest.mark.parametrize("reduced", [True, False])
def test_what_was_trained_is_what_drafts(target, batches, tmp_path, options, reduced):
    vocab = most_used(batches, 60, target) if reduced else None
    trainee = Trainee.build(Options(**options), target, vocab)
    with torch.no_grad():
        for parameter in trainee.module.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
            parameter.copy_(parameter.bfloat16())  # as it is stored
    trainee.save(tmp_path / "drafter", {})
    model, id_D = load_trained(tmp_path / "drafter", target)
    assert (id_D is None) == (vocab is None)
    if vocab is not None:
        assert id_D.tolist() == vocab.to_target_D.tolist()
    tokens, cache = [5, 9, 11, 200, 9, 3], model.new_cache()
    logits_TD = model.score([Feed.chain(cache.open(), tokens)], cache).logits_TV
    token_BT = torch.tensor([tokens])
    with torch.no_grad():
        hidden_BTW = trainee.module(trainee.embedding()[token_BT], torch.arange(len(tokens))[None], None)
        expected = hidden_BTW[0] @ trainee.head().T
    torch.testing.assert_close(logits_TD, expected, atol=2e-3, rtol=2e-3)
    stored = (tmp_path / "drafter" / "model.safetensors").read_bytes()
    own_ends = "width" in options
    assert (b"embed_tokens" in stored) == own_ends
    assert (b"lm_head" in stored) == (own_ends or "train_head" in options)


def learned(trainee, rows, held_out, folder, **settings):
    seen = []
    config = LoopConfig(steps=40, lr=2e-3, evaluate_every=100, bf16=False, **settings)
    before = trainee.evaluate(held_out)
    train(
        trainee,
        Listed(rows),
        [held_out],
        config,
        out=folder / "out",
        work=folder / "work",
        report=seen.append,
    )
    return float(before.accepted_by_depth[0] / before.counted_by_depth[0]), seen[-1]


@pytest.mark.parametrize("loss", ["kl", "lk_mix", "ce"])
def test_a_short_training_raises_acceptance(target, batches, tmp_path, loss):
    vocab = most_used(batches, 200, target)
    trainee = Trainee.build(Options(layers=1, take="1", loss=loss), target, vocab)
    held_out = written(target, 12, seed=99)
    first, last = learned(trainee, batches, held_out, tmp_path)
    assert last.acceptance[0] > first + 0.05 and last.emitted > 1


def test_hard_labels_need_no_features(target):
    bare = written(target, 6, seed=3, taps=())
    trainee = Trainee.build(Options(layers=1, loss="ce"), target, None)
    trainee.loss(bare).loss.backward()
    step = trainee.evaluate(bare)
    assert len(step.overlap_by_depth) == 0 and step.counted_by_depth[0] > 100


def test_answers_on_policy_are_the_students_and_their_laws_the_targets(target, batches):
    vocab = most_used(batches, 60, target)
    options = Options(layers=1, on_policy=0.5, temperature=1e-4)
    trainee, batch = Trainee.build(options, target, vocab), batches[0]
    assert trainee.on_policy_share == 0.5
    own = trainee.on_policy(batch, seed=7)
    kept = ~batch.answer_BT
    assert torch.equal(own.token_BT[kept], batch.token_BT[kept])
    assert not torch.equal(own.token_BT, batch.token_BT)
    with torch.no_grad():
        hidden_BTW = trainee.module(trainee.embedding()[own.token_BT], places(own), None)
        guess_BT = vocab.to_target_D[(hidden_BTW @ trainee.head().T).argmax(-1)]
    inside = own.answer_BT[:, 1:]
    assert torch.equal(own.token_BT[:, 1:][inside], guess_BT[:, :-1][inside]), "cold: its argmax"
    tokens, cache = own.token_BT[2, : int(own.length_B[2])].tolist(), target.new_cache()
    scored = target.score([Feed.chain(cache.open(), tokens)], cache, taps=frozenset({"hidden.-1"}))
    stored = own.feature["hidden.-1"][2, : len(tokens)]
    assert torch.equal(stored, scored.taps["hidden.-1"].bfloat16())
    warm = Trainee.build(Options(layers=1, on_policy=1.0), target, vocab)
    one, same, other = (warm.on_policy(batch, seed=s).token_BT for s in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("reduced", [False, True])
def test_answers_are_drawn_with_a_cache_as_without_one(target, batches, reduced):
    vocab, batch = most_used(batches, 60, target) if reduced else None, batches[0]
    trainee = Trainee.build(Options(layers=2, on_policy=1.0), target, vocab)
    read = []
    real = trainee.module.forward
    trainee.module.forward = lambda embed, *rest: read.append(embed.shape[1]) or real(embed, *rest)
    own = trainee.on_policy(batch, seed=5)
    drawn = batch.answer_BT & (places(batch) < batch.length_B[:, None])
    assert sum(read) == int(drawn.any(0).nonzero().max()), "every token is read once"
    token_BT, coins = batch.token_BT.clone(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for at in range(1, token_BT.shape[1]):
            rows = drawn[:, at].nonzero().squeeze(1)
            if len(rows):
                hidden = real(trainee.embedding()[token_BT[rows, :at]], places(batch)[:, :at], None)
                law = (hidden[:, -1] @ trainee.head().T).float().softmax(-1)
                picked = torch.multinomial(law, 1, generator=coins).squeeze(1)
                token_BT[rows, at] = picked if vocab is None else vocab.to_target_D[picked]
    assert torch.equal(own.token_BT, token_BT)


def test_the_loop_asks_for_its_own_answers(target, batches, tmp_path, monkeypatch):
    trainee = Trainee.build(Options(layers=1, on_policy=0.5), target, None)
    asked = []
    real = trainee.on_policy
    monkeypatch.setattr(trainee, "on_policy", lambda b, s: asked.append(s) or real(b, s))
    config = LoopConfig(steps=8, bf16=False)
    few = [
        Batch(
            token_BT=b.token_BT[:1],
            length_B=b.length_B[:1],
            answer_BT=b.answer_BT[:1],
            feature={k: v[:1] for k, v in b.feature.items()},
        )
        for b in batches
    ]
    train(trainee, Listed(few), [], config, out=tmp_path / "o", work=tmp_path / "w")
    assert 0 < len(asked) < 8 and len(set(asked)) == len(asked)


def test_what_cannot_be_built_is_said(target):
    for options, words in (
        ({"layers": 3}, "layers=3, but tiny has 2"),
        ({"layers": 2, "take": "0"}, "must name 2 layers of tiny, 0 to 1"),
        ({"layers": 1, "take": "x"}, "must name 1 layers"),
        ({"width": 20}, "multiple of the head width 16"),
    ):
        with pytest.raises(ModelError, match=words):
            Trainee.build(Options(**options), target, None)
    for wrong in ({"layers": 0}, {"on_policy": 1.5}, {"width": 32, "take": "0"}):
        with pytest.raises(ValueError):
            Options(**wrong)
