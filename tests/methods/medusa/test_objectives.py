"""Medusa's and Hydra's training: alignment, losses, calibration, agreement with what drafts."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from outpace import Engine
from outpace.drafters.static_tree import likeliest
from outpace.errors import ModelError
from outpace.methods.medusa.hydra_objective import Hydra, HydraTraining
from outpace.methods.medusa.objective import Medusa, MedusaTraining
from outpace.models.tiny import TableTarget, tiny
from outpace.train import losses
from outpace.train.align import EAGLE, Aligned
from outpace.train.corpus import CorpusPrompt
from outpace.train.options import read_options
from outpace.train.pipeline import Pipeline
from outpace.train.ranks import ranked
from outpace.tree.shapes import read_shape
from tests.train.texts import most_used, written

KINDS = [(Medusa, MedusaTraining), (Hydra, HydraTraining)]
HEADS = 3


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def batches(target):
    """Greedy texts, and sampled ones, which leave the target's likeliest token now and then."""
    return [written(target, 8, seed=seed, new=14, temperature=0.7 * seed) for seed in range(2)]


def built(kind, training, target, vocab=None, **options):
    torch.manual_seed(0)
    objective = kind.build(training(heads=HEADS, **options), target, vocab)
    with torch.no_grad():  # away from the start, where heads are alike
        for parameter in objective.module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return objective


def plain_state(objective, batch, b, place, k, shift=0):
    """What the unembedding reads for the guess of head k (from 0) at one row, by hand.

    ``shift`` is planted: the hidden state of another row.
    """
    head = objective.module.heads[k]
    x = batch.feature["hidden.-1"][b, place + shift].float()
    if head.mix is not None:
        between = batch.token_BT[b, place + 1 : place + k + 2].tolist()
        embed = objective.target.embed(between)
        units = embed / (embed.square().mean(1, keepdim=True) + 1e-6).sqrt()
        x = head.mix.weight @ torch.cat([x, *units])
    for block in head.blocks:
        x = x + F.silu(block(x))
    return x


def plain_loss(objective, batch, vocab, name, decay, shift=0, late=0):
    """The loss from plain logits, row by row; ``shift`` and ``late`` are planted shifts."""
    aligned = Aligned(batch, EAGLE)
    total, first = 0.0, 0
    for b, a in aligned.real_BA.nonzero().tolist():
        row = int(aligned.place_BA[b, a])
        for k in range(HEADS):
            place = row + 2 + k  # the token that head k guesses
            if place >= int(batch.length_B[b]) or not batch.answer_BT[b, place]:
                continue
            label = int(vocab.feed_V[batch.token_BT[b, place]])
            if label < 0:
                continue
            x = plain_state(objective, batch, b, row, k, shift)
            z = objective.target.head(x[None])[0, vocab.to_target_D]
            last = batch.feature["hidden.-1"][b, place - 1 - late][None]
            p = objective.target.head(last)[:, vocab.to_target_D].softmax(-1)
            one = (
                losses.cross_entropy(z[None], torch.tensor([label]))
                if name == "ce"
                else losses.ORACLES[name](z[None], p)
            )
            total += decay**k * one.item()
            first += k == 0
    return total / first, first


@pytest.mark.parametrize("kind,training", KINDS)
@pytest.mark.parametrize("name", ["kl", "ce"])
def test_the_loss_is_that_of_plain_logits_and_no_row_off(target, batches, kind, training, name):
    vocab = most_used(batches, 40, target)
    objective = built(kind, training, target, vocab, decay=0.5, loss=name)
    step = objective.loss(batches[0])
    with torch.no_grad():
        wanted, first = plain_loss(objective, batches[0], vocab, name, 0.5)
        shifted, _ = plain_loss(objective, batches[0], vocab, name, 0.5, shift=-1)
        late, _ = plain_loss(objective, batches[0], vocab, name, 0.5, late=1)
    assert step.tokens == first > 20
    assert step.loss.item() == pytest.approx(wanted, rel=1e-4)
    assert abs(shifted - wanted) > 1e-3 * wanted, "planted: hidden states one row early"
    assert (abs(late - wanted) > 1e-3 * wanted) == (name != "ce"), "planted: laws one row early"
    step.loss.backward()
    for parameter_name, parameter in objective.module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("kind,training", KINDS)
def test_acceptance_and_ranks_are_counted_along_texts(target, batches, kind, training):
    vocab = most_used(batches, 60, target)
    objective, batch = built(kind, training, target, vocab), batches[1]
    step, aligned = objective.evaluate(batch), Aligned(batch, EAGLE)
    accepted, counted, rank_KB = [0] * HEADS, [0] * HEADS, torch.zeros(HEADS, 11)
    with torch.no_grad():
        for b, a in aligned.real_BA.nonzero().tolist():
            row, chain, tree = int(aligned.place_BA[b, a]), True, True
            for k in range(HEADS):
                place = row + 2 + k
                if place >= int(batch.length_B[b]):
                    break
                x = plain_state(objective, batch, b, row, k)
                z = target.head(x[None])[0, vocab.to_target_D]
                truth = int(target.head(batch.feature["hidden.-1"][b, place - 1][None]).argmax())
                order = vocab.to_target_D[z.argsort(descending=True)].tolist()
                rank = min(order.index(truth), 10) if truth in order else 10
                goes_on = int(batch.token_BT[b, place]) == truth
                counted[k] += chain
                accepted[k] += chain and rank == 0
                rank_KB[k, rank] += tree
                chain, tree = chain and rank == 0 and goes_on, tree and rank < 10 and goes_on
    assert step.accepted_by_depth.tolist() == accepted
    assert step.counted_by_depth.tolist() == counted
    assert objective.ranks.count_SB.tolist() == rank_KB.tolist() and rank_KB[1].sum() > counted[1]
    assert 0 < step.overlap_by_depth[0] / step.counted_by_depth[0] < 1
    rates = objective.ranks.acceptance()
    assert rates[0][1] == pytest.approx(float(rank_KB[0, 1] / rank_KB[0].sum()))
    objective.loss(batch)
    assert objective.ranks.acceptance() == [], "a step of training makes the measurement old"


def test_of_equal_logits_the_first_counts_as_drafted():
    """In bfloat16 many are equal: then one token alone is the first guess, not all of them."""
    z_RD = torch.tensor([[1.0, 3.0, 3.0, 3.0]]).repeat(4, 1)
    row_R, p_ND = torch.zeros(4, dtype=torch.int64), torch.full((1, 4), 0.25)
    rank_R, _ = ranked(z_RD, torch.eye(4), None, torch.arange(4), p_ND, row_R)
    assert rank_R.tolist() == [3, 0, 1, 2]


def test_what_is_saved(target, batches, tmp_path):
    vocab = most_used(batches, 40, target)
    for kind, training in KINDS:
        folder = tmp_path / kind.method
        objective = kind.build(training(heads=HEADS, layers=2), target, vocab)
        own_BAH = Aligned(batches[0], EAGLE).rows(batches[0].feature["hidden.-1"]).float()
        for x_BAH in objective.states(batches[0], Aligned(batches[0], EAGLE)):
            assert torch.equal(x_BAH, own_BAH), "training begins with the target's own law"
        objective.save(folder, {"command": "test"})
        config = json.loads((folder / "config.json").read_text())
        assert config["tree"] == config["acceptance"] == []
        assert not (folder / "tree.json").exists(), "nothing was measured"
        objective.evaluate(batches[0])
        objective.save(folder, {"command": "test"})
        config = json.loads((folder / "config.json").read_text())
        assert config["acceptance"] == objective.ranks.acceptance()
        assert config["tree"] == list(likeliest(config["acceptance"], 63)) != []
        assert read_shape(folder / "tree.json").parent_N == tuple(config["tree"])
        wanted = {"d2t": [40], "t2d": [target.vocab_size]}
        for k in range(HEADS):
            wanted |= {f"heads.{k}.blocks.{i}.weight": [64, 64] for i in range(2)}
            wanted |= {f"heads.{k}.blocks.{i}.bias": [64] for i in range(2)}
            wanted |= {f"heads.{k}.mix.weight": [64, 64 * (k + 2)]} if kind is Hydra else {}
        # No unembedding among them: it is the target's.
        tensors = load_file(folder / "model.safetensors")
        assert {name: list(one.shape) for name, one in tensors.items()} == wanted


@pytest.fixture(scope="module", params=["medusa", "hydra"])
def made(request, tmp_path_factory):
    """What one command makes of prompts: answers, features, heads with their calibrated tree."""
    work = tmp_path_factory.mktemp(request.param)
    prompts = [
        CorpusPrompt(messages=({"role": "user", "content": f"tell {i}"},), source=0) for i in range(60)
    ]
    settings = [
        f"heads={HEADS}",
        "pipeline.vocab=200",
        "pipeline.tokens_per_batch=512",
        "loop.steps=40",
        "loop.evaluate_every=40",
        "loop.lr=0.01",
        "loop.bf16=false",
        "data.batch=32",
        "data.max_new_tokens=24",
        "data.greedy=1.0",
        "data.answers=1",
    ]
    pipeline = Pipeline(
        Engine.load("tiny", dtype="float32", drafter="none"),
        read_options(request.param, settings, 3600),
        prompts=prompts,
        work=work,
        out=work / "out",
        say=lambda tick: None,
    )
    return pipeline, pipeline.run(report=lambda progress: None)


def test_one_command_makes_heads_that_draft(made):
    pipeline, result = made
    config = json.loads((result.folder / "config.json").read_text())
    told = json.loads((result.folder / "provenance.json").read_text())
    assert len(config["tree"]) == 63 and len(told["held_out"]["acceptance"]) == HEADS, "by depth"
    assert config["acceptance"][0][0] == pytest.approx(told["held_out"]["acceptance"][0])
    start = pipeline.options.objective.build(pipeline.options.own, pipeline.target, pipeline.vocab)
    with torch.no_grad():
        steps = [start.evaluate(batch) for batch in pipeline.batches("held_out")]
    right, counted = (
        sum(float(one[0]) for one in ones)
        for ones in ([s.accepted_by_depth for s in steps], [s.counted_by_depth for s in steps])
    )
    assert told["held_out"]["acceptance"][0] > right / counted + 0.1, "training raises it"


def test_drafts_are_the_guesses_that_training_counts(made):
    """Guess for guess, by the drafter that reads the folder, along the texts that it sees."""
    pipeline, result = made
    objective = pipeline.options.objective.build(pipeline.options.own, pipeline.target, pipeline.vocab)
    tensors = load_file(result.folder / "model.safetensors")
    objective.module.load_state_dict({k: v for k, v in tensors.items() if k.startswith("heads.")})
    spec = f"{objective.method}[model={result.folder} tree=chain]"
    drafter, drafts = pipeline.engine.method(spec).drafter, {}
    real = drafter.propose

    def watched(rows):
        out = real(rows)
        drafts.update((tuple(row.tokens), d.token_N) for row, d in zip(rows, out, strict=True))
        return out

    drafter.propose = watched
    same, shifted, checked = 0, 0, [0] * HEADS
    for batch in pipeline.batches("train"):
        aligned = Aligned(batch, EAGLE)
        texts = [batch.token_BT[b, :n].tolist() for b, n in enumerate(batch.length_B.tolist())]
        starts = [int(row.nonzero()[0]) for row in batch.answer_BT]
        prompts = [text[:start] for text, start in zip(texts, starts, strict=True)]
        pipeline.engine.generate(prompts, drafter=spec, max_new_tokens=24, ignore_eos=True)
        with torch.no_grad():
            guess_KBA = torch.stack(
                [
                    pipeline.vocab.to_target_D[
                        pipeline.target.head(x.flatten(0, 1), pipeline.vocab).argmax(-1)
                    ]
                    for x in objective.states(batch, aligned)
                ]
            ).unflatten(1, aligned.real_BA.shape)
        for b, a in aligned.real_BA.nonzero().tolist():
            end = int(aligned.place_BA[b, a]) + 2
            drafted = drafts.get(tuple(texts[b][:end]), ())
            for depth, token in enumerate(drafted):
                right = list(drafted[:depth]) == texts[b][end : end + depth]
                if objective.method == "hydra" and not right:
                    break  # training reads the text, drafting its own guesses
                checked[depth] += 1
                same += int(guess_KBA[depth, b, a]) == token
                shifted += a > 0 and int(guess_KBA[depth, b, a - 1]) == token
    print(objective.method, same, shifted, checked)
    assert checked[0] > 100 and checked[1] > 30
    assert same >= 0.97 * sum(checked), "features are bfloat16 in training, so ties may differ"
    assert shifted < 0.7 * sum(checked), "planted: the row before guesses something else"


def test_what_cannot_be_built_is_said():
    with pytest.raises(ModelError, match="medusa needs head, taps"):
        Medusa.build(MedusaTraining(), TableTarget.random(0), None)
    for wrong in ({"heads": 0}, {"layers": 0}, {"decay": 0.0}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            HydraTraining(**wrong)
