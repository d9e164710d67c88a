"""Medusa and Hydra: laws against plain arithmetic, bookkeeping, trees, and what is refused."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

from outpace import Engine
from outpace.analysis.best_tree import expected, optimal
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.drafters.features import TrainedConfig
from outpace.drafters.last_state import STOCK
from outpace.drafters.static_tree import likeliest
from outpace.errors import ModelError
from outpace.law import VocabMap
from outpace.methods.medusa.drafter import Medusa
from outpace.methods.medusa.heads import HeadNet, Heads, HeadsShape
from outpace.methods.medusa.hydra_drafter import Hydra
from outpace.methods.medusa.hydra_objective import Hydra as HydraObjective
from outpace.methods.medusa.hydra_objective import HydraTraining
from outpace.methods.medusa.objective import Medusa as MedusaObjective
from outpace.methods.medusa.objective import MedusaTraining
from outpace.models.blocks import Form
from outpace.models.products import works
from outpace.models.tiny import tiny
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import budget, parse_shape
from outpace.types import ROOT, Budget, Draft, Drawn, Feed, Outcome, Shape, Verdict

TEXT = [5, 9, 11, 40, 7, 150, 5, 9, 12, 77, 8]
METHODS = [Medusa, Hydra]
HEADS = 3


@pytest.fixture(scope="module")
def target():
    return tiny()


def half(target):
    """A draft vocabulary of the even tokens."""
    ids = torch.arange(0, target.vocab_size, 2)
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[ids] = torch.arange(len(ids))
    return VocabMap(ids, feed_V)


def made(method, target, tree=None, packed=True, quantize=None):
    """A drafter with random heads of two blocks."""
    coins = torch.Generator().manual_seed(5)
    shape = HeadsShape(heads=HEADS, layers=2, hidden_size=target.hidden_size, conditioned=method is Hydra)
    tensors = {name: 0.3 * torch.randn(size, generator=coins) for name, size in shape.tensor_shapes().items()}
    drafter = method(Heads(shape=shape, tensors=tensors, vocab=half(target), tree=tree), target, quantize)
    if not packed:
        form = Form(target.dtype, target.device, packed=False)
        each = [[i] for i in range(HEADS)] if method is Hydra else [range(HEADS)]
        drafter.nets = [HeadNet(drafter.heads, numbers, target, form) for numbers in each]
    return drafter


def said(drafter, target, hidden, read, head=None):
    """Logits after a hidden state, the pending token and guesses: the oracle."""
    head, tensors = len(read) - 1 if head is None else head, drafter.heads.tensors
    embed_VH = target.checkpoint.tensor("model.embed_tokens.weight").float()
    at, x = f"heads.{head}.", hidden.float()
    if drafter.heads.shape.conditioned:
        rows = embed_VH[read]
        units = rows / (rows.square().mean(1, keepdim=True) + 1e-6).sqrt()
        x = tensors[f"{at}mix.weight"] @ torch.cat([x, *units])
    for block in range(2):
        weight, bias = (tensors[f"{at}blocks.{block}.{one}"] for one in ("weight", "bias"))
        x = x + F.silu(weight @ x + bias)
    return target.head(x[None])[0, drafter.heads.vocab.to_target_D]


def show(drafter, state, target, text, rows=None):
    """Let a drafter see a pass over a text; what was committed are the rows given."""
    cache = target.new_cache()
    passed = target.score([Feed.chain(cache.open(), text)], cache, taps=drafter.traits.taps)
    rows = tuple(range(len(text))) if rows is None else rows
    fed = tuple(text[row] for row in rows)
    outcome = Outcome(Draft(), passed.of(0), Verdict((), ()), fed, rows, 0, forced=True)
    drafter.observe([state], [outcome])
    return passed.taps["hidden.-1"].clone()


def begun(drafter, target, text):
    state = drafter.begin(Request(prompt=tuple(text)))
    return state, show(drafter, state, target, text[:-1])[-1]


def proposed(drafter, states, texts, budget, drawn=Drawn.CHOSEN, temperature=0.0):
    params = SamplingParams(temperature=temperature, seed=3).resolved(None)
    return drafter.propose(
        [
            DraftRow(
                state,
                text,
                budget,
                KeyedCoins(3, len(text) - 1, Stream.DRAFT),
                Warp(params, text, frozenset(), 10**6),
                drawn,
            )
            for state, text in zip(states, texts, strict=True)
        ]
    )


@pytest.mark.skipif(not works(), reason="C cannot be compiled for this machine")
@pytest.mark.parametrize("method", METHODS)
def test_compiled_heads_agree_with_torch_and_rows_with_themselves(target, method):
    plain, compiled, rounded = (
        made(method, target, packed=packed, quantize=quantize)
        for packed, quantize in ((False, None), (True, None), (True, "int8"))
    )
    for number, (net, oracle, other) in enumerate(
        zip(compiled.nets, plain.nets, rounded.nets, strict=True), 0 if method is Medusa else 1
    ):
        wide = target.hidden_size * (1 if method is Medusa else number + 1)
        u_FI = torch.randn(5, wide, generator=torch.Generator().manual_seed(number))
        assert net._plan.ready and not oracle._plan.ready
        got, want = net(u_FI), oracle(u_FI)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
        assert all(torch.equal(net(u_FI[i : i + 1])[0], got[i]) for i in range(5))
        off = float((other(u_FI) - got).abs().max() / got.abs().max())
        assert 0 < off < 0.02


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tree", ["3x2x1", "dynamic"])
def test_recorded_laws_of_a_batch_are_those_of_the_heads(target, method, tree):
    """q of every group is the softmax, at the temperature, of the oracle's logits there."""
    drafter, texts = made(method, target), [TEXT, TEXT[2:7]]
    begins = [begun(drafter, target, text) for text in texts]
    wide = Budget(9, 3, shape=parse_shape(tree))
    states = [state for state, _ in begins]
    drafts = proposed(drafter, states, texts, wide, Drawn.IID, 0.8)
    wrong = [0.0, 0.0]
    for (_, hidden), text, draft in zip(begins, texts, drafts, strict=True):
        assert max(draft.depth_N) == HEADS and len(draft.groups) >= 3
        for group in draft.groups:
            read = [text[-1], *draft.path_tokens(group.parent)]
            law = draft.laws[group.law]
            wanted = (said(drafter, target, hidden, read) / 0.8).softmax(0)
            assert torch.equal(law.id_S, drafter.heads.vocab.to_target_D)
            torch.testing.assert_close(law.prob_S, wanted, atol=1e-5, rtol=1e-3)
            others = [said(drafter, target, begins[text is TEXT][1], read)]  # another sequence
            if method is Medusa:  # the head of another depth
                others.append(said(drafter, target, hidden, read, head=len(read) % HEADS))
            else:  # the last guess is another one
                others.append(said(drafter, target, hidden, [*read[:-1], read[-1] + 1]))
            for i, one in enumerate(others):
                wrong[i] = max(wrong[i], float(((one / 0.8).softmax(0) - wanted).abs().max()))
    assert min(wrong) > 0.01, "planted: a wrong sequence, head or path would be seen"


@pytest.mark.parametrize("method", METHODS)
def test_nodes_of_several_levels_at_once(target, method):
    """The contract lets whoever grows a tree ask for nodes of different depths in one call."""
    drafter = made(method, target)
    state, hidden = begun(drafter, target, TEXT)
    drafter.expand([Branch(state, TEXT, (ROOT,), [], [])])
    got, _ = drafter.expand([Branch(state, TEXT, (1, 2), [4, 6, 10], [ROOT, ROOT, 0])])
    for row, read in zip(got, ([8, 6], [8, 4, 10]), strict=True):
        torch.testing.assert_close(row, said(drafter, target, hidden, read), atol=1e-4, rtol=1e-4)


def test_the_state_is_that_of_the_last_committed_row(target):
    """After a tree the rows of the kept path need not be neighbours."""
    drafter = made(Medusa, target)
    state = drafter.begin(Request(prompt=tuple(TEXT)))
    hidden_TH = show(drafter, state, target, TEXT, rows=(0, 2, 5))
    text = [TEXT[0], TEXT[2], TEXT[5], 33]
    (draft,) = proposed(drafter, [state], [text], Budget(3, 3), Drawn.IID, 1.0)
    for row, same in ((5, True), (2, False), (10, False)):
        wanted = said(drafter, target, hidden_TH[row], [33]).softmax(0)
        assert torch.allclose(draft.laws[0].prob_S, wanted, atol=1e-5) == same


def test_without_features_there_is_no_draft(target):
    drafter = made(Hydra, target)
    empty, behind = (drafter.begin(Request(prompt=tuple(TEXT))) for _ in range(2))
    show(drafter, behind, target, TEXT[:4])
    full = begun(drafter, target, TEXT)[0]
    drafts = proposed(drafter, [empty, behind, full], [TEXT] * 3, Budget(3, 3))
    assert [len(draft) for draft in drafts] == [0, 0, 3]
    mark = drafter.mark(full)
    show(drafter, full, target, [*TEXT, 3, 4])
    again = proposed(drafter, [drafter.rewind(full, mark)], [TEXT], Budget(3, 3))
    assert again[0].token_N == drafts[2].token_N


def test_passes_of_a_draft(target):
    """All levels of medusa in one pass of the heads, one a level of hydra's; none of the target."""
    for method, passes in ((Medusa, 1), (Hydra, HEADS)):
        drafter, texts = made(method, target), [TEXT, TEXT[:4]]
        states = [begun(drafter, target, text)[0] for text in texts]
        before, targets = drafter.clock.count, target.clock.count
        drafts = proposed(drafter, states, texts, budget("3x2x1", None, 4))
        assert [len(draft) for draft in drafts] == [15, 15]
        assert (drafter.clock.count, target.clock.count) == (before + passes, targets)


def test_further_levels_of_a_dynamic_tree_cost_next_to_nothing(target):
    """Halves of halves are worth a look-up, and the second one is not worth a pass of the heads."""
    half_D = torch.full((target.vocab_size // 2,), 0.5 / (target.vocab_size // 2 - 1)).log()
    half_D[3], depths = math.log(0.5), {}
    for method in METHODS:
        drafter = made(method, target)
        drafter.blocks = lambda branches: half_D.expand(len(branches), HEADS, -1)
        drafter.logits = lambda hidden_FH, read_F: half_D.expand(len(read_F), -1)
        state, _ = begun(drafter, target, TEXT)
        (draft,) = proposed(drafter, [state], [TEXT], budget("dynamic", 8, 8))
        depths[method] = max(draft.depth_N)
    assert depths == {Medusa: 3, Hydra: 2}


def test_the_calibrated_tree_stands_in_for_the_stock_tree_alone(target):
    deep = Shape((ROOT, 0, 1, ROOT, 0, 3))
    drafter, stock = made(Medusa, target, deep), parse_shape(STOCK).parent_N
    state, _ = begun(drafter, target, TEXT)

    def parents(tree, size=None, drafter=drafter):
        asked = budget(tree, size, drafter.traits.default_nodes)
        return proposed(drafter, [state], [TEXT], asked)[0].parent_N

    assert parents(STOCK) == (ROOT, ROOT, 0, 0, 1, 2), "the same, level by level"
    assert parents(STOCK, 3) == (ROOT, 0, 1), "the likeliest, as deep as they are"
    assert parents("2x1") == (ROOT, ROOT, 0, 1)
    assert parents("chain") == (ROOT, 0, 1), "no deeper than there are heads"
    left = parents(STOCK, drafter=made(Medusa, target))
    assert len(left) == len(stock) - 2, "the chain's ends beyond the heads are left out"


def test_the_likeliest_tree_is_the_best_one():
    alike = [0.5, 0.2, 0.1]
    for nodes in range(1, 20):
        mine = Shape(likeliest([alike] * 4, nodes))
        assert expected(mine, alike) == pytest.approx(expected(optimal(alike, nodes, 4), alike))
    first, second = [0.56, 0.12, 0.06], [0.32, 0.11, 0.05]
    places = [*first, *(a * b for a in first for b in second)]
    for nodes in (1, 2, 5, 9, 12):
        parents = likeliest([first, second], nodes)
        value, born = [], {}
        for parent in parents:
            rank = born[parent] = born.get(parent, -1) + 1
            value.append(first[rank] if parent == ROOT else value[parent] * second[rank])
        assert sum(value) == pytest.approx(sum(sorted(places, reverse=True)[:nodes]))
        assert parents == likeliest([first, second], 12)[:nodes], "the first are the smaller tree"
    assert likeliest([[0.5, 0.0], [0.1, 0.4]], 9) == (ROOT, 0, 0), "rank 2 only after rank 1"
    assert likeliest([], 9) == ()


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory):
    """Drafter folders whose heads were moved away from their start."""
    out = tmp_path_factory.mktemp("heads")
    torch.manual_seed(0)
    for kind, config in (
        (MedusaObjective, MedusaTraining(heads=HEADS)),
        (HydraObjective, HydraTraining(heads=HEADS)),
    ):
        objective = kind.build(config, target, half(target))
        with torch.no_grad():
            for parameter in objective.module.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        objective.save(out / kind.method, {})
    return out


def test_blockwise_decoding_is_the_plain_case(target, folders):
    """One chain of the argmax of every head, kept as far as it is the target's own choice."""
    engine = Engine(target, drafter="none")
    spec = f"medusa[model={folders / 'medusa'} tree=chain verifier=match]"
    drafter, seen = engine.method(spec).drafter, []
    real = drafter.propose

    def checked(rows):
        for row, draft in zip(rows, out := real(rows), strict=True):
            logits_KD = drafter.logits(row.state.hidden_H[None])[0]
            best = drafter.id_D[logits_KD.argmax(-1)].tolist()
            assert list(draft.token_N) == best[: len(draft)]
            seen.append(len(draft))
        return out

    drafter.propose = checked
    prompts, settings = [TEXT, TEXT[:3]], {"max_new_tokens": 16, "ignore_eos": True}
    plain = engine.generate(prompts, drafter="none", **settings)
    fast = engine.generate(prompts, drafter=spec, **settings)
    assert [r.tokens for r in fast] == [r.tokens for r in plain]
    assert seen.count(HEADS) > 10


def test_what_cannot_be_read_is_said(target, folders, tmp_path):
    with pytest.raises(ModelError, match="method 'medusa', not 'hydra'"):
        Hydra.load(TrainedConfig(model=str(folders / "medusa")), target)
    config = json.loads((folders / "medusa" / "config.json").read_text())
    weights = (folders / "medusa" / "model.safetensors").read_bytes()
    for number, (wrong, message) in enumerate(
        (
            ({"heads": 0}, "heads and layers must be above 0"),
            ({"heads": 4}, r"'heads.3.blocks.0.bias' has shape None"),
            ({"heads": 2}, r"'heads.2.blocks.0.bias' has shape \(64,\), its config needs None"),
            ({"draft_vocab_size": 5}, "draft_vocab_size is 5"),
            ({"tree": [-1, 5]}, "need an earlier node"),
            ({"target_digest": "0", "target_likeness": None}, r"was trained for tiny \(0\)"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **wrong}))
        (folder / "model.safetensors").write_bytes(weights)
        with pytest.raises(ModelError, match=message):
            Medusa.load(TrainedConfig(model=str(folder)), target)
