"""GliDe in use: it reads the target's cache and nothing else of it, in any batch, compiled or not."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace import Engine
from outpace.errors import ModelError
from outpace.methods.glide.drafter import Glide
from outpace.methods.glide.objective import GlideObjective, GlideTraining
from outpace.tree.shapes import parse_shape
from outpace.types import Budget, Drawn
from tests.conformance.test_drafters import PROMPTS, proposal_rows
from tests.conformance.test_growth import told
from tests.support import put_keys

TREE = Budget(20, 4, shape=parse_shape("2x2x2x1"))
TEXTS = [PROMPTS[0], PROMPTS[3]]


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


@pytest.fixture(scope="module")
def folder(engine, tmp_path_factory):
    made = tmp_path_factory.mktemp("glide")
    objective = GlideObjective.build(GlideTraining(), engine.target, None)
    coins = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in objective.module.parameters():
            one.add_(0.1 * torch.randn(one.shape, generator=coins))
    objective.save(made, {})
    return made


def loaded(engine, folder):
    return Glide.load(Glide.Config(model=str(folder), quantize=None), engine.target)


def logits(engine, drafter, texts=TEXTS, forced=None):
    with torch.no_grad():
        rows = proposal_rows(engine.target, drafter, Drawn.CHOSEN, TREE, 0.0, texts)
        drafts, found = told(drafter, rows, forced)
    return rows, drafts, found


def test_torch_says_what_compiled_code_says(engine, folder):
    compiled, by_torch = loaded(engine, folder), loaded(engine, folder)
    by_torch.net._first.ready = by_torch.net._second.ready = False
    if not compiled.net._first.ready:
        pytest.skip("nothing is compiled here")
    _, _, one = logits(engine, compiled)
    _, _, other = logits(engine, by_torch)
    assert one.keys() == other.keys() and len(one) > 10
    for path in one:
        torch.testing.assert_close(one[path], other[path], atol=1e-3, rtol=1e-3)


def test_what_follows_a_node_depends_on_its_path_alone(engine, folder):
    """Siblings, other branches and other sequences leave no trace."""
    drafter, checked = loaded(engine, folder), 0
    _, drafts, tree = logits(engine, drafter)
    for i, draft in enumerate(drafts):
        leaf = max(range(len(draft)), key=lambda node: (draft.depth_N[node], node))
        _, _, alone = logits(engine, drafter, [TEXTS[i]], [draft.path_tokens(leaf)])
        for (_, path), got in alone.items():
            if (i, path) in tree:
                torch.testing.assert_close(got, tree[i, path], atol=1e-3, rtol=1e-3)
                checked += 1
    assert checked >= 8


def test_it_reads_what_is_committed_in_the_slot_lent(engine, folder):
    """Other keys of the layer it reads change what it says; other layers' and the tail's do not."""
    drafter = loaded(engine, folder)
    rows, _, _ = logits(engine, drafter)

    def said():
        with torch.no_grad():
            return told(drafter, rows)[1]

    before, lease = said(), rows[0].lease
    cache, slot, last = lease.cache, lease.slot, lease.cache.length(lease.slot)

    def lift(layer, rows):
        keys = cache.first_keys(slice(layer, layer + 1), slot, rows.stop)[..., rows.start :]
        put_keys(cache, slice(layer, layer + 1), slot, rows, keys + 1.0)

    lift(0, range(cache.rows))
    lift(drafter.reads, range(last, cache.rows))
    assert all(torch.equal(before[path], one) for path, one in said().items())
    lift(drafter.reads, range(1, 2))
    after = said()
    assert not torch.equal(before[0, ()], after[0, ()]) and torch.equal(before[1, ()], after[1, ()])


def test_accepted_guesses_keep_their_rows(engine, folder):
    """A pass reads the tokens that it has not seen, and no more."""
    spec, fed = f"glide[model={folder} tree=chain tree_size=3]", []
    drafter = engine.method(spec).preferred.drafter
    score = drafter.net.score

    def counted(feeds, cache, **more):
        fed.extend(len(feed.token_J) for feed in feeds if feed.parent_J[0] < 0 and feed.want != ())
        return score(feeds, cache, **more)

    drafter.net.score = counted
    try:
        result = engine.generate(PROMPTS[0], drafter=spec, max_new_tokens=40, ignore_eos=True)
    finally:
        del drafter.net.score
    # The last guess of a draft is never fed; an accepted one is fed with the next draft.
    assert result.counters.accepted > 0 and max(fed) <= 2 and fed


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer": 9}, "layer is 9, need 0 to"),
        ({"layer": "1"}, "'layer' must be"),
        ({"method": "fspad"}, "holds a drafter of method 'fspad'"),
        ({"decoder": {}}, "the decoder's fields are not right"),
        ({"draft_vocab_size": 7}, "draft_vocab_size is 7"),
    ],
)
def test_a_wrong_config_is_said_in_one_line(engine, folder, tmp_path, changes, match):
    said = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, **changes}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=match) as caught:
        loaded(engine, tmp_path)
    assert "\n" not in str(caught.value)


def test_wrong_heads_and_tensors_are_said(engine, folder, tmp_path):
    said = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    del tensors["glimpse.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=r"glimpse.q_proj.weight"):
        loaded(engine, tmp_path)
    said["decoder"]["head_dim"] *= 2
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match="head_dim is"):
        loaded(engine, tmp_path)
