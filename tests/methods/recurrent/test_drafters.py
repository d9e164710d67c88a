"""Recurrent drafters: laws against plain arithmetic, beams in one tree, files of other programs."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.errors import ModelError
from outpace.methods.recurrent.cells import CellShape
from outpace.methods.recurrent.drafter import Lstm, MlpSpeculator, ReDrafter
from outpace.methods.recurrent.files import CellFile
from outpace.models.tiny import tiny
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import Branch, DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import ROOT, Budget, Draft, Drawn, Feed, Outcome, Verdict

TEXT = [5, 9, 11, 40, 7, 150, 5, 9, 12, 77, 8]
KINDS = [ReDrafter, Lstm, MlpSpeculator]
STEPS = 3


@pytest.fixture(scope="module")
def target():
    return tiny()


def made(kind, target, **fields):
    """A drafter with random weights, rounded as files are."""
    shape = CellShape(kind=kind.method, hidden_size=target.hidden_size, inner=48, steps=STEPS, **fields)
    return kind(CellFile(shape=shape, tensors=random_tensors(shape)), target)


def random_tensors(shape):
    coins = torch.Generator().manual_seed(5)
    out = {}
    for name, size in shape.tensor_shapes().items():
        sharp = 6 if name in [shape.head_name(stage) for stage in range(shape.stages)] else 1.5
        out[name] = torch.randn(size, generator=coins) * sharp * size[-1] ** -0.5
    return out


def rms(x):
    return x / (x.square().mean() + 1e-6).sqrt()


def said(drafter, target, hidden, read):
    """Logits behind a hidden state, the pending token and guesses: token by token, by hand."""
    shape, t = drafter.file.shape, {k: v.float() for k, v in drafter.file.tensors.items()}
    own, m, n = shape.own_rows, shape.inner, shape.steps
    embed_VH = target.checkpoint.tensor("model.embed_tokens.weight").float()
    keep = 0.5 ** (0.5 / n)
    weight = math.sqrt((1 - keep**2) * (m if own else 1) / 2) / keep
    state = cell = torch.zeros(shape.hidden_size if shape.kind == "redrafter" else m)
    for depth, token in enumerate(read):
        stage = 0 if shape.tied else depth
        vector = embed_VH[token] if own else rms(embed_VH[token])
        if shape.kind == "redrafter":
            if shape.recurrent:
                state = F.silu(t["rnn_w.weight"] @ vector + t["rnn_u.weight"] @ state + t["rnn_u.bias"])
            else:
                state = state + vector
            continue
        table = t[shape.embed_name(stage)]
        vector = table[token] if own else table @ vector
        before = (rms(hidden) / 2**0.5 if shape.scaled else hidden) if depth == 0 else state
        place = min(depth, 1) if shape.tied else depth
        if shape.kind == "lstm":
            forget, enter, leave, new = (t[f"projs.{place}.weight"] @ before).view(4, m) + weight * vector
            new = F.gelu(t["cell_ln.0.weight"] * rms(new) + t["cell_ln.0.bias"])
            cell = cell * forget.sigmoid() + new * enter.sigmoid()
            state = F.gelu(t["state_ln.0.weight"] * rms(cell) + t["state_ln.0.bias"]) * leave.sigmoid()
        else:
            mixed = t[f"proj.{place}.weight"] @ before + weight * vector
            state = F.gelu(t[f"ln.{stage}.weight"] * rms(mixed) + t[f"ln.{stage}.bias"])
    x = state
    if shape.kind == "redrafter":
        x = torch.cat([hidden, state])
        if m != len(x):
            x = t["input_proj.weight"] @ x + t["input_proj.bias"]
        for layer in range(shape.layers):
            at = f"lm_head.{layer}.linear"
            x = x + F.silu(t[f"{at}.weight"] @ x + t[f"{at}.bias"])
    out = t[shape.head_name(0 if shape.tied else len(read) - 1)] @ x
    return out if own else target.head(out[None])[0]


def begun(drafter, target, text):
    """A state that has seen a text, and the hidden state that it has to keep."""
    state, cache = drafter.begin(Request(prompt=tuple(text))), target.new_cache()
    passed = target.score([Feed.chain(cache.open(), text[:-1])], cache, taps=drafter.traits.taps)
    fed, rows = tuple(text[:-1]), tuple(range(len(text) - 1))
    drafter.observe([state], [Outcome(Draft(), passed.of(0), Verdict((), ()), fed, rows, 0, forced=True)])
    return state, passed.taps["hidden.-1"][-1].float().clone()


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


FORMS = [(kind, fields) for kind in KINDS for fields in ({}, {"own_rows": 260})] + [
    (MlpSpeculator, {"tied": False}),
    (MlpSpeculator, {"tied": False, "scaled": False, "own_rows": 260}),
    (ReDrafter, {"recurrent": False, "own_rows": 260}),
]


@pytest.mark.parametrize(("kind", "fields"), FORMS)
@pytest.mark.parametrize("tree", ["3x2x1", "dynamic"])
def test_recorded_laws_of_a_batch_are_those_of_the_formulas(target, kind, fields, tree):
    if "own_rows" in fields:
        fields = {**fields, "own_rows": target.vocab_size}
    drafter, texts = made(kind, target, **fields), [TEXT, TEXT[2:7]]
    begins = [begun(drafter, target, text) for text in texts]
    wide = Budget(15, STEPS, shape=parse_shape(tree))
    drafts = proposed(drafter, [state for state, _ in begins], texts, wide, Drawn.IID, 0.8)
    wrong = 0.0
    for (_, hidden), text, draft in zip(begins, texts, drafts, strict=True):
        assert len(draft.groups) >= (1 if tree == "dynamic" else 3)
        for group in draft.groups:
            path, law = draft.path_tokens(group.parent), draft.laws[group.law]
            logits = said(drafter, target, hidden, [text[-1], *path])
            torch.testing.assert_close(law.prob_S, (logits / 0.8).softmax(0), atol=1e-4, rtol=5e-3)
            other = said(drafter, target, hidden, [text[-1] + 1, *path])
            wrong = max(wrong, float((other - logits).abs().max()))
    assert wrong > 0.1, "planted: another pending token would be seen"


def beam_search(drafter, target, hidden, pending, width, depth):
    """The papers' search: every level keeps the likeliest of all successors of all beams."""
    beams = [(0.0, ())]
    for _ in range(depth):
        grown = []
        for value, path in beams:
            logp = said(drafter, target, hidden, [pending, *path]).log_softmax(0)
            best = logp.topk(width)
            grown += [(value + float(v), (*path, int(t))) for v, t in zip(*best, strict=True)]
        beams = sorted(grown, reverse=True)[:width]
    return [path for _, path in beams]


@pytest.mark.parametrize("kind", KINDS)
def test_beams_are_one_tree(target, kind):
    """Every beam is a path of one tree, and what beams share is there, and was computed, once."""
    drafter, width = made(kind, target), 4
    state, hidden = begun(drafter, target, TEXT)
    passes = drafter.clock.count
    shape = parse_shape(f"dynamic:{width}:0")
    (draft,) = proposed(drafter, [state], [TEXT], Budget(64, STEPS, shape=shape))
    assert drafter.clock.count == passes + STEPS, "a pass per level, whatever its width"
    paths = {draft.path_tokens(node) for node in range(len(draft))}
    assert len(paths) == len(draft)
    beams = beam_search(drafter, target, hidden, TEXT[-1], width, STEPS)
    assert set(beams) <= paths
    shared = len({beam[:1] for beam in beams})
    assert shared < width, "not vacuous: beams share prefixes"


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_of_several_levels_at_once(target, kind):
    drafter = made(kind, target)
    state, hidden = begun(drafter, target, TEXT)
    drafter.expand([Branch(state, TEXT, (ROOT,), [], [])])
    drafter.expand([Branch(state, TEXT, (1,), [4, 6, 10], [ROOT, ROOT, 1])])
    got, _ = drafter.expand([Branch(state, TEXT, (2, 0), [4, 6, 10], [ROOT, ROOT, 1])])
    for row, read in zip(got, ([8, 6, 10], [8, 4]), strict=True):
        torch.testing.assert_close(row, said(drafter, target, hidden, read), atol=1e-3, rtol=1e-3)


def apple(shape, tensors):
    return {
        "model_type": "recurrent_drafting_drafter",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.own_rows,
        "exit_dim": shape.inner,
        "num_draft_layers": shape.layers,
        "rnn": shape.recurrent,
    }, tensors


def ibm(shape, tensors):
    config = {
        "model_type": "mlp_speculator",
        "emb_dim": shape.hidden_size,
        "inner_dim": shape.inner,
        "vocab_size": shape.own_rows,
        "n_predict": shape.steps,
        "scale_input": shape.scaled,
        "tie_weights": shape.tied,
    }
    stored = {f"speculator.{name}": one for name, one in tensors.items()}
    if shape.tied and "emb.0.weight" in tensors:  # as some are stored
        stored |= {f"speculator.emb.{i}.weight": tensors["emb.0.weight"].clone() for i in (1, 2)}
    return config, stored


def arctic(shape, tensors):
    config, _ = ibm(shape, tensors)
    widths = {key: str(shape.inner) for key in ("inner_dim", "emb_dim", "proj_dim")}
    config |= {**widths, "input_hidden_dim": shape.hidden_size, "method": "sum_lstm", "tie_lstm_embs": True}
    return config, tensors


PUBLISHED = [
    (ReDrafter, apple, {}),
    (ReDrafter, apple, {"recurrent": False}),
    (MlpSpeculator, ibm, {"tied": False, "scaled": False}),
    (MlpSpeculator, ibm, {"tied": True}),
    (Lstm, arctic, {"tied": True}),
]


def write(folder, target, kind, layout, fields):
    fields = {"own_rows": target.vocab_size, "tied": True, "scaled": True, **fields}
    fields = {"layers": 2 if kind is ReDrafter else 0, **fields}
    shape = CellShape(kind=kind.method, hidden_size=target.hidden_size, inner=48, steps=STEPS, **fields)
    config, tensors = layout(shape, random_tensors(shape))
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize(("kind", "layout", "fields"), PUBLISHED)
def test_published_layouts_are_read(target, tmp_path, kind, layout, fields):
    write(tmp_path, target, kind, layout, fields)
    drafter = kind.load(kind.Config(model=str(tmp_path), quantize=None), target)
    state, hidden = begun(drafter, target, TEXT)
    (draft,) = proposed(drafter, [state], [TEXT], Budget(15, STEPS, shape=parse_shape("3x2x1")))
    assert max(draft.depth_N) == STEPS
    for node in range(3):
        first = said(drafter, target, hidden, [TEXT[-1]])
        assert draft.token_N[node] == int(first.topk(3).indices[node])


def test_what_cannot_be_read_is_said(target, tmp_path):
    config = write(tmp_path, target, MlpSpeculator, ibm, {"tied": False})
    for kind, wrong, message in (
        (Lstm, {}, "holds a mlp_speculator, not a lstm"),
        (MlpSpeculator, {"model_type": "llama"}, "recurrent drafters of"),
        (MlpSpeculator, {"n_predict": 4}, r"'emb.3.weight' has shape None"),
        (MlpSpeculator, {"n_predict": 0}, "'n_predict' must be a positive whole number"),
        (MlpSpeculator, {"emb_dim": 65}, "with hidden size 65, but tiny has 64"),
        (MlpSpeculator, {"vocab_size": 7}, "with vocabulary size 7"),
        (Lstm, {"method": "sum_lstm"}, "must have tie_weights"),
        (Lstm, {"method": "gru"}, "sum_rnn and sum_lstm can be read"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **wrong}))
        with pytest.raises(ModelError, match=message):
            kind.load(kind.Config(model=str(tmp_path)), target)
