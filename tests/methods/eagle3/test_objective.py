"""Training-time test against drafting one row at a time, and a run that learns."""

import json

import pytest
import torch
from safetensors.torch import load_file

from outpace.errors import ModelError
from outpace.methods.eagle3.objective import Eagle3, Eagle3Config
from outpace.models.tiny import TableTarget, tiny
from outpace.train.align import EAGLE, Aligned
from outpace.train.batches import Batch, noisy
from outpace.train.loop import LoopConfig, train
from outpace.train.networks import turned
from tests.train.texts import Listed, most_used, written

TAPS = ("hidden.2", "hidden.1", "hidden.-1")


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def batches(target):
    return [written(target, 4, seed=seed, new=14, taps=TAPS) for seed in range(2)]


def built(target, vocab=None, **options):
    torch.manual_seed(0)
    objective = Eagle3.build(Eagle3Config(**options), target, vocab)
    with torch.no_grad():  # away from the start, where some parts are equal
        for parameter in objective.module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return objective


def drafted(objective, batch, b, row, depths):
    """One chain from one row, as a drafter runs it: keys are appended, nothing is masked."""
    net, layer, shape = objective.module, objective.module.layer, objective.shape
    tokens = batch.token_BT[b]
    features = [batch.feature[tap][b, : row + 1].float() for tap in (*TAPS[:2], TAPS[1])]
    fused = torch.cat(features, -1)
    stream = net.fc(fused)
    keys, values = [], []

    def put(u, position):
        turn = objective._turns.at(torch.tensor([[position]]), 64)
        q, k, v = (getattr(layer.self_attn, f"{one}_proj")(u).view(1, 1, -1, shape.head_dim) for one in "qkv")
        keys.append(turned(k, turn)[0, 0])
        values.append(v[0, 0])
        return turned(q, turn)[0, 0]

    for t in range(row + 1):
        embed = torch.stack([target_embed(objective, tokens[t + 1])])
        query = put(net.inputs(embed[None], stream[t : t + 1][None])[0, 0], t)
    state, out = stream[row], []
    for depth in range(1, depths + 1):
        if depth > 1:
            embed = target_embed(objective, tokens[row + depth])
            query = put(net.inputs(embed[None, None], state[None, None])[0, 0], row + depth - 1)
        groups = shape.num_heads // shape.num_kv_heads
        mixed = []
        for head in range(shape.num_heads):
            k = torch.stack([one[head // groups] for one in keys])
            v = torch.stack([one[head // groups] for one in values])
            mixed.append((k @ query[head] * shape.head_dim**-0.5).softmax(0) @ v)
        mixed_H = layer.self_attn.o_proj(torch.cat(mixed))
        state = layer.after(state[None], mixed_H[None])[0]
        out.append(net.norm(state))
    return out


def target_embed(objective, token):
    return objective.target.embed([int(token)])[0]


def test_all_rows_and_depths_at_once_are_chains_drafted_one_by_one(target, batches):
    objective, batch = built(target), batches[0]
    aligned = Aligned(batch, EAGLE)
    with torch.no_grad():
        outs = objective.unroll(batch, aligned, 3)
        apart = 0.0
        for b in range(len(batch.token_BT)):
            for a in (0, 2, 5):
                row = int(aligned.place_BA[b, a])
                chain = drafted(objective, batch, b, row, 3)
                for out, one in zip(outs, chain, strict=True):
                    torch.testing.assert_close(out[b, a], one, atol=2e-5, rtol=2e-5)
                    apart = max(apart, float((out[b, a + 1] - one).abs().max()))
    assert apart > 0.1, "neighbouring rows differ, so that a shift would be seen"


def test_a_row_does_not_see_what_comes_after_it(target, batches):
    """Depth j at row t reads features up to t and tokens up to t + j, in its own sequence."""
    objective, batch = built(target), batches[0]
    aligned = Aligned(batch, EAGLE)
    a, depths = 4, 3
    row = int(aligned.place_BA[0, a])

    def outs(**changes):
        kept = {name: getattr(batch, name) for name in ("token_BT", "length_B", "answer_BT")}
        with torch.no_grad():
            one = Batch(**{**kept, "feature": batch.feature, **changes})
            return [out[0, a] for out in objective.unroll(one, Aligned(one, EAGLE), depths)]

    before = outs()
    later = {tap: x.clone() for tap, x in batch.feature.items()}
    for x in later.values():
        x[0, row + 1 :] += 1
        x[1:] += 1
    for one, other in zip(before, outs(feature=later), strict=True):
        torch.testing.assert_close(one, other)
    for depth in range(1, depths + 1):
        token_BT = batch.token_BT.clone()
        token_BT[0, row + depth] = (token_BT[0, row + depth] + 1) % 100
        changed = [
            float((one - other).abs().max())
            for one, other in zip(before, outs(token_BT=token_BT), strict=True)
        ]
        assert all(change < 1e-6 for change in changed[: depth - 1])
        assert all(change > 1e-4 for change in changed[depth - 1 :]), changed


@pytest.mark.parametrize("name", ["kl", "ce", "lk_mix"])
def test_the_loss_is_that_of_plain_logits(target, batches, name):
    """Depth by depth, over the rows whose token is in the vocabulary, from all logits at once."""
    from outpace.train import losses

    vocab = most_used(batches, 40, target)
    objective = built(target, vocab, steps=2, decay=0.5, loss=name)
    batch, aligned = batches[0], Aligned(batches[0], EAGLE)
    step = objective.loss(batch)
    total, first = 0.0, 0
    with torch.no_grad():
        for i, hidden in enumerate(objective.unroll(batch, aligned, 2)):
            for b in range(hidden.shape[0]):
                for a in range(hidden.shape[1]):
                    place = int(aligned.place_BA[b, a]) + 2 + i
                    real = bool(aligned.real_BA[b, a]) and place < int(batch.length_B[b])
                    label = int(vocab.feed_V[batch.token_BT[b, place]]) if real else -1
                    if label < 0:
                        continue
                    z = objective.module.lm_head(hidden[b, a])[None]
                    last = batch.feature["hidden.-1"][b, place - 1][None]
                    p = target.head(last)[:, vocab.to_target_D].softmax(-1)
                    one = (
                        losses.cross_entropy(z, torch.tensor([label]))
                        if name == "ce"
                        else losses.ORACLES[name](z, p)
                    )
                    total += 0.5**i * one.item()
                    first += i == 0
    assert step.tokens == first > 20
    assert step.loss.item() == pytest.approx(total / first, rel=1e-4)
    step.loss.backward()
    for name, parameter in objective.module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_rows_behind_a_refused_guess_weigh_more(target, batches):
    """By hand: the loss is a mean of those rows and of the others, weighed."""
    batch, vocab = batches[0], most_used(batches, 60, target)
    losses, plain = {}, built(target, vocab, steps=1)
    aligned = Aligned(batch, EAGLE)
    state_BAH = plain.unroll(batch, aligned, 1)[0]
    head_DH = plain.module.lm_head.weight
    begins_BA = plain._behind_refused(state_BAH, aligned, EAGLE, head_DH)
    guess_BA = vocab.to_target_D[(state_BAH @ head_DH.T).argmax(-1)]
    for b, a in aligned.real_BA.nonzero().tolist():
        place = int(aligned.place_BA[b, a])
        behind = a > 0 and int(aligned.place_BA[b, a - 1]) == place - 1
        wrong = behind and int(guess_BA[b, a - 1]) != int(batch.token_BT[b, place + 1])
        assert bool(begins_BA[b, a]) == wrong
    label_BA = vocab.feed_V[aligned.token(EAGLE)]
    keep_BA = aligned.teaches(EAGLE) & (label_BA >= 0)
    some, all_rows = int((begins_BA & keep_BA).sum()), int(keep_BA.sum())
    assert 0 < some < all_rows
    for weight in (1.0, 3.0, 5.0):
        losses[weight] = built(target, vocab, steps=1, refused=weight).loss(batch).loss.item()
    sums = {w: loss * (all_rows + (w - 1) * some) for w, loss in losses.items()}
    assert sums[5.0] - sums[3.0] == pytest.approx(sums[3.0] - sums[1.0], rel=1e-3)
    assert sums[3.0] > sums[1.0] * 1.01


def test_noise_is_on_features_alone_while_training_and_the_same_again(target, batches):
    objective, batch = built(target, noise=0.3), batches[0]
    objective.module.eval()
    quiet = objective.loss(batch).loss.item()
    assert quiet == built(target).loss(batch).loss.item()
    objective.module.train()
    loud = [objective.loss(batch).loss.item() for _ in range(2)]
    assert loud[0] == loud[1] != quiet
    given = noisy(batch, TAPS[:2], 0.3)
    assert torch.equal(given.feature["hidden.-1"], batch.feature["hidden.-1"])
    size = batch.feature[TAPS[0]].float().square().mean(-1, keepdim=True).sqrt()
    apart = (given.feature[TAPS[0]].float() - batch.feature[TAPS[0]].float()).abs() / size
    assert 0.2 < float(apart.nan_to_num().max()) < 0.31  # padding has no size


def test_a_step_down_the_gradient_goes_down(target, batches):
    objective = built(target, steps=2)
    loss = objective.loss(batches[0]).loss
    loss.backward()
    length = sum(p.grad.square().sum() for p in objective.module.parameters())
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter -= 1e-4 * parameter.grad
    lower = objective.loss(batches[0]).loss
    assert (loss - lower).item() == pytest.approx(1e-4 * length.item(), rel=0.05)


def test_acceptance_is_counted_along_chains(target, batches):
    vocab = most_used(batches, 60, target)
    objective, batch = Eagle3.build(Eagle3Config(), target, vocab), batches[1]
    step, aligned = objective.evaluate(batch), Aligned(batch, EAGLE)
    accepted, counted = [0] * 5, [0] * 5
    with torch.no_grad():
        outs = objective.unroll(batch, aligned, 5)
        for b, a in aligned.real_BA.nonzero().tolist():
            for i in range(5):
                place = int(aligned.place_BA[b, a]) + 2 + i
                if place >= int(batch.length_B[b]):
                    break
                counted[i] += 1
                z = objective.module.lm_head(outs[i][b, a])
                truth = int(target.head(batch.feature["hidden.-1"][b, place - 1][None]).argmax())
                if int(vocab.to_target_D[z.argmax()]) != truth:
                    break
                accepted[i] += 1
                if int(batch.token_BT[b, place]) != truth:
                    break
    assert step.accepted_by_depth.tolist() == accepted
    assert step.counted_by_depth.tolist() == counted
    assert 0 < step.overlap_by_depth[0] / step.counted_by_depth[0] < 1


def test_what_is_saved(target, batches, tmp_path):
    vocab = most_used(batches, 40, target)
    objective = built(target, vocab)
    objective.save(tmp_path / "head", {"command": "test"})
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    attn, mlp = "layers.0.self_attn.", "layers.0.mlp."
    assert {name: list(one.shape) for name, one in tensors.items()} == {
        "fc.weight": [64, 192],
        "layers.0.input_layernorm.weight": [64],
        "layers.0.hidden_norm.weight": [64],
        "layers.0.post_attention_layernorm.weight": [64],
        f"{attn}q_proj.weight": [64, 128],
        f"{attn}k_proj.weight": [32, 128],
        f"{attn}v_proj.weight": [32, 128],
        f"{attn}o_proj.weight": [64, 64],
        f"{mlp}gate_proj.weight": [128, 64],
        f"{mlp}up_proj.weight": [128, 64],
        f"{mlp}down_proj.weight": [64, 128],
        "norm.weight": [64],
        "lm_head.weight": [40, 64],
        "d2t": [40],
        "t2d": [target.vocab_size],
    }
    assert (tensors["d2t"] + torch.arange(40)).tolist() == vocab.to_target_D.tolist()
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == vocab.to_target_D.tolist()
    assert tensors["fc.weight"].dtype is torch.bfloat16
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert (config["method"], config["target_digest"]) == ("eagle3", target.digest)
    assert config["taps"] == ["hidden.2", "hidden.1", "hidden.1"]
    assert Eagle3.taps(Eagle3Config(), target) == TAPS


def test_a_short_training_raises_acceptance(target, tmp_path):
    rows = [written(target, 16, seed=seed, new=24, taps=TAPS) for seed in range(3)]
    vocab = most_used(rows, 200, target)
    objective = Eagle3.build(Eagle3Config(), target, vocab)
    held_out = [written(target, 16, seed=99, new=24, taps=TAPS)]
    seen = []
    config = LoopConfig(steps=40, lr=4e-3, evaluate_every=100, bf16=False)
    before = objective.evaluate(held_out[0])
    train(
        objective,
        Listed(rows),
        held_out,
        config,
        out=tmp_path / "out",
        work=tmp_path / "work",
        report=seen.append,
    )
    first = float(before.accepted_by_depth[0] / before.counted_by_depth[0])
    print(first, seen[-1].line())
    assert seen[-1].acceptance[0] > first + 0.1
    assert seen[-1].overlap[0] > float(before.overlap_by_depth[0] / before.counted_by_depth[0])


def test_what_cannot_be_built_is_said(target):
    with pytest.raises(ModelError, match="layer=7, but tiny has 2"):
        Eagle3.build(Eagle3Config(layer=7), target, None)
    with pytest.raises(ModelError, match="taps='1,9', but tiny has 0 to 2"):
        Eagle3.taps(Eagle3Config(taps="1,9"), target)
    with pytest.raises(ModelError, match="eagle3 needs head, taps"):
        Eagle3.build(Eagle3Config(), TableTarget.random(0), None)
    for wrong in ({"steps": 0}, {"decay": 0.0}, {"start": "middle"}):
        with pytest.raises(ValueError, match="must be"):
            Eagle3Config(**wrong)
