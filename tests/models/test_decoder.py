"""The own decoder against transformers, against itself in other shapes, and bit for bit."""

import random
from functools import partial

import pytest
import torch
from transformers.models.gemma3 import modeling_gemma3

from outpace.engine.engine import Engine
from outpace.errors import ModelError, PromptTooLong
from outpace.models import fused
from outpace.models.decoder import Decoder
from outpace.models.hf.target import HFTarget
from outpace.models.onednn import packing_works
from outpace.models.weights import SafetensorsCheckpoint
from outpace.types import Draft, Feed, Resume, Riders, VocabMap
from tests.models.making import PHI3_LONG, save_hf

VOCABULARY = 96
LARGE = {"initializer_range": 0.3}
"""Weights large enough that a wrong mask or angle moves the logits by whole numbers."""


def scaled(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **more}}


MODELS = {
    "llama": ("llama", {}),
    "llama_biases_untied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama_no_groups": ("llama", {"num_key_value_heads": 4}),
    "linear": ("llama", scaled("linear", factor=4.0)),
    "llama3": (
        "llama",
        scaled(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "yarn": ("llama", scaled("yarn", factor=4.0, original_max_position_embeddings=64)),
    "dynamic_below": ("llama", scaled("dynamic", factor=2.0)),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "gemma3": (
        "gemma3",
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 20.0,
        },
    ),
    "gemma2": ("gemma2", {}),
    "granite": ("granite", {"attention_bias": True}),
    "smollm3": ("smollm3", {}),
    "smollm3, nothing turns": ("smollm3", {"no_rope_layers": [0] * 4}),
    "phi3": ("phi3", {"head_dim": 16}),
    "phi3_long": ("phi3", PHI3_LONG),
    "olmo2": ("olmo2", {}),
}


def tokens(count, seed=0):
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(count)]


def made(folder, family, dtype=torch.float32, packed=True, **changes):
    model = save_hf(folder, family, **LARGE, **changes)
    model.set_attn_implementation("eager")
    return model.eval(), Decoder.load(SafetensorsCheckpoint(folder), dtype=dtype, packed=packed)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return made(tmp_path_factory.mktemp("llama"), "llama")[1]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    family, changes = MODELS["gemma3"]
    return made(tmp_path_factory.mktemp("gemma"), family, **changes)[1]


@pytest.fixture(params=["llama", "gemma"])
def decoder(request):
    return request.getfixturevalue(request.param)


def opened(decoder, text, slots=1):
    """A cache whose slots hold ``text``."""
    cache = decoder.new_cache()
    for _ in range(slots):
        feed(decoder, cache, cache.open(), text)
    return cache


def feed(decoder, cache, slot, text):
    """Append text for good; give the logits of its rows."""
    if not text:
        return torch.empty(0, decoder.vocab_size)
    logits = decoder.score([Feed.chain(slot, text)], cache).logits_TV
    cache.keep(slot, range(len(text)))
    return logits


def fresh(decoder, text):
    """Logits of a pass over a whole text."""
    cache = decoder.new_cache()
    return decoder.score([Feed.chain(cache.open(), text)], cache).logits_TV


def close(got, want):
    # The same sums in another order: rounding of float32 through four layers.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)


def random_tree(size, seed):
    generator = random.Random(seed)
    parents = [generator.randrange(-1, i) for i in range(size)]
    ids = list(range(VOCABULARY))
    generator.shuffle(ids)
    return Draft.chosen(ids[:size], parents)


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_transformers(tmp_path, name, monkeypatch):
    family, changes = MODELS[name]
    if family == "gemma3" and "attn_logit_softcapping" in changes:
        # The model class reads this setting and forgets to pass it on.
        capped = partial(modeling_gemma3.eager_attention_forward, softcap=20.0)
        monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", capped)
    model, decoder = made(tmp_path, family, **changes)
    text = tokens(150)
    with torch.no_grad():
        want = model(torch.tensor([text]), output_hidden_states=True)
    cache = decoder.new_cache()
    slot = cache.open()
    parts = []
    hidden = frozenset({"hidden.0", "hidden.2", "hidden.-1"})
    for part in (text[:100], text[100:103], text[103:]):
        parts.append(decoder.score([Feed.chain(slot, part)], cache, taps=hidden))
        cache.keep(slot, range(len(part)))
    close(torch.cat([part.logits_TV for part in parts]), want.logits[0])
    for depth in (0, 2, -1):
        got = torch.cat([part.taps[f"hidden.{depth}"] for part in parts])
        close(got, want.hidden_states[depth][0] * (decoder.config.logit_scale if depth < 0 else 1.0))


def test_the_context_of_dynamic_scaling_ends_at_its_original_length(tmp_path):
    changes = scaled("dynamic", factor=2.0) | {"max_position_embeddings": 32}
    model, decoder = made(tmp_path, "llama", **changes)
    text = tokens(32)
    with torch.no_grad():
        close(fresh(decoder, text), model(torch.tensor([text])).logits[0])
    for target in (decoder, HFTarget(model)):
        assert target.max_positions == 32
        engine = Engine(target, "none")
        with pytest.raises(PromptTooLong, match=r"32 tokens.*dynamic rotary scaling"):
            engine.generate(tokens(32), max_new_tokens=4)
        result = engine.generate(tokens(24), max_new_tokens=20, temperature=0.0, ignore_eos=True)
        assert (len(result.tokens), result.finish_reason) == (8, "length")
    assert "dynamic rotary scaling" in decoder.note


def test_plain_weights_agree_with_packed_ones(tmp_path):
    _, packed = made(tmp_path, "qwen3")
    plain = Decoder.load(SafetensorsCheckpoint(tmp_path), dtype=torch.float32, packed=False)
    text = tokens(40)
    close(fresh(packed, text), fresh(plain, text))
    assert packed.weight_bytes == plain.weight_bytes


def test_bfloat16_is_float32_up_to_rounding(tmp_path):
    exact = made(tmp_path, "llama")[1]
    rough = Decoder.load(SafetensorsCheckpoint(tmp_path), dtype=torch.bfloat16)
    text = tokens(40)
    got, want = fresh(rough, text), fresh(exact, text)
    assert got.dtype == torch.float32
    assert rough.weight_bytes * 2 == exact.weight_bytes
    # bfloat16 keeps 8 bits; 4 layers of such roundings stay well within 5 % of the spread.
    assert (got - want).std() < 0.05 * want.std()


@pytest.mark.parametrize("base", [0, 30, 120])
def test_every_branch_of_a_tree_is_scored_as_if_alone(decoder, base):
    text, draft = tokens(base), random_tree(20, base)
    cache = opened(decoder, text)
    scored = decoder.score([Feed.tree(0, 7, draft)], cache).logits_TV
    alone = opened(decoder, text)
    for node in set(range(len(draft))) - set(draft.parent_N):
        chain = [7, *draft.path_tokens(node)]
        want = decoder.score([Feed.chain(0, chain)], alone).logits_TV
        alone.drop(0)
        close(scored[[0, *(i + 1 for i in draft.path(node))]], want)


@pytest.mark.parametrize("base", [12, 118])
def test_any_path_can_be_kept(decoder, base):
    draft = random_tree(16, base)
    for node in (0, 5, 15):
        cache = opened(decoder, tokens(base))
        decoder.score([Feed.tree(0, 7, draft)], cache)
        cache.keep(0, [0, *(i + 1 for i in draft.path(node))])
        text = [*tokens(base), 7, *draft.path_tokens(node)]
        assert cache.ids(0) == text
        more = tokens(6, seed=1)
        close(feed(decoder, cache, 0, more), fresh(decoder, [*text, *more])[len(text) :])


def test_a_tail_grows_level_by_level(decoder):
    base = tokens(20)
    cache = opened(decoder, base)
    decoder.score([Feed(0, (1, 2), (-1, 0))], cache)
    decoder.score([Feed(0, (3, 4), (0, 1))], cache)
    last = decoder.score([Feed(0, (5, 6), (3, 2), want=(1, 0))], cache).logits_TV
    close(last[0], fresh(decoder, [*base, 1, 3, 6])[-1])
    close(last[1], fresh(decoder, [*base, 1, 2, 4, 5])[-1])


def test_a_ragged_batch_is_scored_as_its_parts(decoder):
    """A long prompt, a tree, single rows, a gap in the slots, very different lengths."""
    texts = [tokens(n, seed=n) for n in (1, 60, 9, 9, 200, 33)]
    cache = decoder.new_cache()
    for text in texts:
        feed(decoder, cache, cache.open(), text)
    cache.close(2)
    draft = random_tree(9, 3)
    feeds = [
        Feed.chain(4, [5]),
        Feed.tree(1, 6, draft),
        Feed.chain(0, tokens(130, seed=9), want=(129, 0)),
        Feed.chain(3, [8], want=()),
        Feed.chain(5, [8, 9]),
    ]
    scored = decoder.score(feeds, cache, taps=frozenset({"hidden.3"}))
    assert [len(scored.of(i).logits_TV) for i in range(5)] == [1, 10, 2, 0, 2]
    for i, one in enumerate(feeds):
        alone = opened(decoder, texts[one.slot])
        part = Feed(0, one.token_J, one.parent_J, one.want)
        want = decoder.score([part], alone, taps=frozenset({"hidden.3"}))
        close(scored.of(i).logits_TV, want.logits_TV)
        close(scored.of(i).taps["hidden.3"], want.taps["hidden.3"])
    for one in feeds:
        cache.keep(one.slot, [0])
    after = decoder.score([Feed.chain(n, [3]) for n in (3, 4, 5)], cache)
    for i, slot in enumerate((3, 4, 5)):
        close(after.of(i).logits_TV, fresh(decoder, [*cache.ids(slot), 3])[-1:])


def test_a_reopened_slot_sees_nothing_old(llama):
    cache = opened(llama, tokens(70))
    cache.close(0)
    assert cache.open() == 0
    text = tokens(5, seed=4)
    close(feed(llama, cache, 0, text), fresh(llama, text))
    cache.sync(0, [*text[:3], 90])
    close(feed(llama, cache, 0, [90, 1]), fresh(llama, [*text[:3], 90, 1])[3:])


@pytest.mark.parametrize("embedded", [False, True])
def test_riders_see_their_path_and_their_chain_and_are_forgotten(decoder, embedded):
    base, draft = tokens(25), random_tree(6, 1)
    ids, node, after = (11, 12, 13, 14), (3, 3, -1, 3), (-1, 0, -1, 1)
    embeds = None
    if embedded:
        cache = decoder.new_cache()
        probe = decoder.score([Feed.chain(cache.open(), ids)], cache, taps=frozenset({"hidden.0"}))
        embeds = probe.taps["hidden.0"]
    riders = Riders(node, after, None if embedded else ids, embeds)
    draft = Draft(draft.token_N, draft.parent_N, draft.groups, riders=riders)
    cache = opened(decoder, base, slots=2)
    plain = decoder.score([Feed.chain(1, [4, 5])], cache)
    cache.drop(1)
    tree = Feed.tree(0, 7, draft)
    scored = decoder.score([Feed.chain(1, [4, 5]), tree], cache, taps=frozenset({"hidden.-1", "hidden.1"}))
    close(scored.of(0).logits_TV, plain.logits_TV)
    assert len(scored.of(0).rider_logits_RV) == 0
    mine = scored.of(1)
    assert mine.taps["hidden.1"].shape == (7, decoder.hidden_size)
    path = draft.path_tokens(3)
    for rider, chain in enumerate([(11,), (11, 12), (), (11, 12, 14)]):
        text = [*base, 7, 13] if rider == 2 else [*base, 7, *path, *chain]
        close(mine.rider_logits_RV[rider], fresh(decoder, text)[-1])
    close(decoder.head(mine.rider_hidden_RH), mine.rider_logits_RV)
    close(decoder.head(mine.taps["hidden.-1"]), mine.logits_TV)
    cache.keep(0, [0])
    close(feed(decoder, cache, 0, [2]), fresh(decoder, [*base, 7, 2])[-1:])


def test_layers_stop_early_and_variants_share_weights(decoder):
    text = tokens(40)
    whole = decoder.new_cache()
    early = decoder.score([Feed.chain(whole.open(), text)], whole, layers=2).logits_TV
    first = decoder.variant(layers=[0, 1])
    assert first.num_layers == 2
    assert first.weight_bytes < decoder.weight_bytes
    assert first.digest != decoder.digest
    assert torch.equal(fresh(first, text), early)
    assert torch.equal(fresh(decoder.variant(layers=range(4)), text), fresh(decoder, text))
    skipped = decoder.variant(layers=[0, 3])
    assert not torch.allclose(fresh(skipped, text), early)
    close(fresh(skipped, text), fresh(skipped.variant(layers=[0, 1]), text))
    with pytest.raises(ModelError, match="not made by"):
        first.score([Feed.chain(0, text)], whole)
    for bad in ([], [4], [-1]):
        with pytest.raises(ModelError, match="cannot take layers"):
            decoder.variant(layers=bad)
    with pytest.raises(ModelError, match="cannot run 5 layers"):
        decoder.score([Feed.chain(0, text)], whole, layers=5)


@pytest.mark.parametrize("covered", [1, 3, 5])
def test_resumed_rows_are_not_run_again(decoder, covered):
    """An early exit drafts; its rows join verification at layer 2, others run from layer 0."""
    base = tokens(30)
    draft = Draft.chosen([1, 2, 3, 4], [-1, 0, 0, 2])
    full = Feed.tree(0, 7, draft)
    want = decoder.score([full], opened(decoder, base)).logits_TV
    other = decoder.score([Feed.chain(0, [5])], opened(decoder, base)).logits_TV
    cache = opened(decoder, base, slots=3)
    hidden = []
    for row in range(covered):
        step = Feed(0, (full.token_J[row],), (full.parent_J[row],))
        drafted = decoder.score([step], cache, layers=2, taps=frozenset({"hidden.2"}))
        hidden.append(drafted.taps["hidden.2"])
    resume = Resume(2, tuple(range(covered)), torch.cat(hidden))
    # A second sequence that resumes elsewhere, and a third that does not.
    deep = decoder.score([Feed.chain(1, [5])], cache, layers=3, taps=frozenset({"hidden.3"}))
    feeds = [
        Feed(0, full.token_J, full.parent_J, resume=resume),
        Feed(1, (5,), (-1,), resume=Resume(3, (0,), deep.taps["hidden.3"])),
        Feed.chain(2, [5]),
    ]
    scored = decoder.score(feeds, cache)
    close(scored.of(0).logits_TV, want)
    close(scored.of(1).logits_TV, other)
    close(scored.of(2).logits_TV, other)
    cache.keep(0, [0, 1])
    close(feed(decoder, cache, 0, [9]), fresh(decoder, [*base, 7, 1, 9])[-1:])
    cache.drop(1)
    with pytest.raises(ModelError, match="resume must cover"):
        decoder.score([feeds[1]], cache)


def test_taps_are_named_and_refused_by_name(llama):
    cache = opened(llama, [])
    slot = cache.open()
    names = frozenset({"hidden.0", "hidden.1", "hidden.4", "attn_in.0", "attn_out.3"})
    scored = llama.score([Feed.chain(slot, [1, 2, 3])], cache, taps=names)
    assert set(scored.taps) == names
    assert all(rows.shape == (3, llama.hidden_size) for rows in scored.taps.values())
    assert not any(rows.is_inference() for rows in scored.taps.values())
    assert not scored.logits_TV.is_inference()
    # Layer 0 reads the normed embedding, whatever follows.
    ratio = scored.taps["attn_in.0"] / scored.taps["hidden.0"]
    torch.testing.assert_close(ratio[0] / ratio[1], (ratio[0] / ratio[1]).mean().expand(32))
    for bad in ("hidden.5", "attn_in.4", "query.0", "hidden", "hidden.x", "attn_out.-1"):
        with pytest.raises(ModelError, match="no tap"):
            llama.score([Feed.chain(slot, [1])], cache, taps=frozenset({bad}))
        cache.drop(slot)


def test_the_head_unembeds_a_part_of_the_vocabulary_and_learns(decoder):
    hidden = torch.randn(5, decoder.hidden_size, generator=torch.Generator().manual_seed(0))
    whole = decoder.head(hidden)
    keep = torch.tensor([3, 90, 17])
    feed_V = torch.full((VOCABULARY,), -1)
    feed_V[keep] = torch.arange(3)
    vocab = VocabMap(keep, feed_V)
    for _ in range(2):
        close(decoder.head(hidden, vocab), whole[:, keep])
    learner = hidden.clone().requires_grad_()
    logits = decoder.head(learner)
    close(logits.detach(), whole)
    logits.sum().backward()
    assert learner.grad.abs().sum() > 0


def test_what_cannot_be_loaded_is_refused(tmp_path):
    save_hf(tmp_path, "llama")
    with pytest.raises(ModelError, match="float16"):
        Decoder.load(SafetensorsCheckpoint(tmp_path), dtype=torch.float16)


def sums_are_ordered():
    """Whether products of up to 192 terms add them one after another on this machine."""
    generator = torch.Generator().manual_seed(0)
    weight, value = (torch.randn(2, n, m, generator=generator) for n, m in ((9, 192), (192, 64)))
    want = torch.zeros(2, 9, 64, dtype=torch.float64)
    for k in range(192):
        want += weight[..., k : k + 1].double() * value[:, k : k + 1].double()
        want = want.float().double()
    return torch.equal(torch.bmm(weight, value), want.float())


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_bit_equal_however_they_are_fed(tmp_path, monkeypatch, dtype, compiled):
    """One by one, in chains, in trees across a block border, beside others."""
    if not compiled:
        monkeypatch.setattr(fused, "library", lambda *name: None)
    elif fused.library() is None:
        pytest.skip("C cannot be compiled for this machine")
    if not (packing_works(dtype) and sums_are_ordered()):
        pytest.skip("matrix products of this machine do not add up their terms in order")
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16}
    decoder = made(tmp_path, "llama", dtype, **sizes)[1]
    for base in (3, 62, 120, 126, 250, 380):
        text = tokens(base)
        draft = random_tree(24, base)
        cache = opened(decoder, text, slots=3)
        tree = decoder.score([Feed.tree(0, 7, draft), Feed.chain(2, [1, 2])], cache).of(0)
        cache.drop(0)
        cache.drop(2)
        for node in set(range(len(draft))) - set(draft.parent_N):
            chain = [7, *draft.path_tokens(node)]
            ones = torch.cat([feed(decoder, cache, 1, [token]) for token in chain])
            cache.truncate(1, base)
            whole = decoder.score([Feed.chain(0, chain)], cache).logits_TV
            cache.drop(0)
            assert torch.equal(whole, ones), (base, len(chain))
            got = tree.logits_TV[[0, *(i + 1 for i in draft.path(node))]]
            assert torch.equal(got, ones), (base, node)


@pytest.mark.parametrize("width", [6, 8, 10, 12])
def test_heads_whose_products_tell_rows_apart_promise_nothing(tmp_path, width):
    _, target = made(tmp_path, "llama", head_dim=width, num_hidden_layers=1)
    assert target.equal_rows == (width in (8, 12))
