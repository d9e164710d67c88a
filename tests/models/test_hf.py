"""Models of transformers as targets, against their own plain forward."""

import random

import pytest
import torch
import transformers

from outpace.errors import ModelError
from outpace.models.base import TAPS, TREE
from outpace.models.hf.target import HFTarget
from outpace.types import Draft, Feed, Resume, Riders
from tests.models.making import hf_config, save_tokenizer

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MIXED = ["sliding_attention", "full_attention"] * 2
CONFIGS = {
    "llama": lambda: hf_config("llama"),
    "windows": lambda: hf_config("mistral", sliding_window=3),
    "mixed windows": lambda: hf_config("gemma3", sliding_window=3, layer_types=MIXED),
    "chunks": lambda: transformers.Llama4TextConfig(
        **SMALL,
        **HEADS,
        head_dim=8,
        num_local_experts=2,
        intermediate_size_mlp=48,
        attention_chunk_size=3,
        layer_types=["chunked_attention", "full_attention"],
    ),
    "learned positions": lambda: transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ),
    "windows of its own": lambda: transformers.GPTNeoConfig(
        vocab_size=61,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,  # longer than what is tried when a model is wrapped
        bos_token_id=0,
        eos_token_id=0,
    ),
    "experts": lambda: transformers.Qwen3MoeConfig(
        **SMALL, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "alibi": lambda: transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4),
    "recurrent": lambda: transformers.MambaConfig(**SMALL, state_size=4),
    "recurrent, list of states": lambda: transformers.RwkvConfig(**SMALL),
    "convolutions": lambda: transformers.Lfm2Config(**SMALL, **HEADS, layer_types=["conv", "full_attention"]),
}
WAY = {"alibi": "resume", "recurrent": "single", "convolutions": "resume", "windows of its own": "resume"}
WAY["recurrent, list of states"] = "resume"


def build(config, dtype=torch.float32):
    """A random model, weights large enough for attention to matter."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and not name.endswith("A_log"):
                weight.mul_(4)
    return model


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = build(CONFIGS[kind]())
        return made[kind]

    return get


def plain(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def assert_close(got_TV, want_TV, tolerance=2e-4):
    # In float32 sums of other shapes differ by some 1e-6 of the spread; a wrong key by 1e-1.
    assert got_TV.shape == want_TV.shape
    assert float((got_TV - want_TV).abs().max()) <= tolerance * float(want_TV.std())


def plain_rows(model, paths):
    """The last row of the plain forward of each path; a path answers for its prefixes too."""
    known = {}
    for path in sorted(paths, key=len, reverse=True):
        if tuple(path) not in known:
            for end, row_V in enumerate(plain(model, path), start=1):
                known[tuple(path[:end])] = row_V
    return [known[tuple(path)] for path in paths]


def random_feed(rng, target, slot, tail):
    """Rows below the committed text or below rows that a slot holds already."""
    count = rng.choice([1, 1, 2, 3, 5, 8])
    tokens = [rng.randrange(61) for _ in range(count)]
    parents = list(range(len(tail) - 1, len(tail) - 1 + count))
    if TREE in target.can:
        parents = [rng.randint(-1, len(tail) + i - 1) for i in range(count)]
    want = None if rng.random() < 0.7 else tuple(rng.sample(range(count), rng.randint(0, count)))
    return Feed(slot, tuple(tokens), tuple(parents), want)


def walk(target, model, seed, steps=25):
    """Score, keep, drop, truncate, sync and swap slots at random; every row is checked."""
    rng = random.Random(seed)
    cache = target.new_cache(rng.choice([0, 100]))
    slots = [cache.open() for _ in range(3)]
    for _ in range(steps):
        feeds = []
        for slot in rng.sample(slots, rng.randint(1, 3)):
            tail = cache.slot(slot).tail_ids
            feeds.append(random_feed(rng, target, slot, tail))
        befores = {feed.slot: len(cache.slot(feed.slot).tail_ids) for feed in feeds}
        scored = target.score(feeds, cache)
        for i, feed in enumerate(feeds):
            state = cache.slot(feed.slot)
            paths = []
            for token, parent in zip(state.tail_ids, state.tail_parents, strict=True):
                paths.append([*(paths[parent] if parent >= 0 else []), token])
            rows = range(len(feed.token_J)) if feed.want is None else feed.want
            got_TV = scored.of(i).logits_TV
            assert len(got_TV) == len(rows)
            wanted = [[*state.ids, *paths[befores[feed.slot] + row]] for row in rows]
            for got_V, want_V in zip(got_TV, plain_rows(model, wanted), strict=True):
                assert_close(got_V, want_V)
        for slot in slots:
            parents = cache.slot(slot).tail_parents
            move = rng.random()
            if move < 0.6 and parents:
                row = rng.randrange(len(parents))
                path = []
                while row >= 0:
                    path.insert(0, row)
                    row = parents[row]
                cache.keep(slot, path)
            elif move < 0.7:
                cache.drop(slot)
            elif move < 0.8:
                cache.truncate(slot, rng.randint(0, cache.length(slot)))
            elif move < 0.9:
                other = [*cache.ids(slot)[: rng.randint(0, 6)], 60]
                cache.sync(slot, other)
            elif move < 0.93:
                cache.close(slot)
                slots[slots.index(slot)] = cache.open()
        cache.check_integrity()
    assert cache.nbytes > 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_row_is_the_plain_forward(models, kind):
    model = models(kind)
    target = HFTarget(model)
    assert target.way == WAY.get(kind, "gather")
    assert (TREE in target.can) == (target.way == "gather")
    assert target.vocab_size == 61 or kind in ("llama", "windows", "mixed windows")
    for seed in range(2):
        walk(target, model, seed)


@pytest.mark.parametrize("way", ["resume", "single", "whole"])
def test_every_slower_way_is_right_too(models, way):
    target = HFTarget(models("windows"))
    target.way, target.can = way, frozenset({TAPS})
    if way != "whole":
        walk(target, target.model, 3)
    cache = target.new_cache()
    slot = cache.open()
    ids = list(range(1, 21))
    target.score([Feed.chain(slot, ids, want=())], cache)
    cache.keep(slot, range(20))
    for token in (7, 8):  # the first is dropped, and the whole text is read again
        got_TV = target.score([Feed.chain(slot, [token, 9])], cache).logits_TV
        assert_close(got_TV, plain(target.model, [*ids, token, 9])[-2:])
        cache.drop(slot)
    with pytest.raises(ModelError, match="cannot check a tree"):
        target.score([Feed.tree(slot, 1, Draft.chosen([1, 2], [-1, -1]))], cache)


def test_a_cache_grows_and_keeps_what_it_holds(models):
    model = models("mixed windows")
    target = HFTarget(model)
    cache = target.new_cache()
    rng = random.Random(0)
    texts = [[rng.randrange(61) for _ in range(90)] for _ in range(2)]
    one = cache.open()
    target.score([Feed.chain(one, texts[0][:50])], cache)
    cache.keep(one, range(50))
    before = cache.nbytes
    two = cache.open()  # more slots, then more rows
    feeds = [Feed.chain(two, texts[1][:60]), Feed.chain(one, texts[0][50:])]
    scored = target.score(feeds, cache)
    assert cache.nbytes > 2 * before
    assert_close(scored.of(0).logits_TV, plain(model, texts[1][:60]))
    assert_close(scored.of(1).logits_TV, plain(model, texts[0])[50:])


def test_feeds_share_a_forward_unless_padding_costs_more(models, monkeypatch):
    target = HFTarget(models("llama"))
    shapes = []
    forward = target._forward

    def watched(id_BJ, **given):
        shapes.append(tuple(id_BJ.shape))
        return forward(id_BJ, **given)

    monkeypatch.setattr(target, "_forward", watched)
    for lengths, want in [([1, 5, 9, 16], {(4, 16)}), ([1, 40, 1, 64], {(2, 64), (2, 1)})]:
        cache = target.new_cache()
        shapes.clear()
        target.score([Feed.chain(cache.open(), range(n)) for n in lengths], cache)
        assert set(shapes) == want


def test_a_rejected_guess_costs_no_second_reading(models, monkeypatch):
    target = HFTarget(models("convolutions"))
    read = []
    forward = target._forward

    def watched(id_BJ, **given):
        read.append(id_BJ.shape[1])
        return forward(id_BJ, **given)

    monkeypatch.setattr(target, "_forward", watched)
    cache = target.new_cache()
    slot = cache.open()
    target.score([Feed.chain(slot, range(40), want=(39,))], cache)
    cache.keep(slot, range(40))
    for kept in (2, 2, 5, 1):
        target.score([Feed.chain(slot, [1, 2, 3, 4, 5])], cache)
        cache.keep(slot, range(kept))
    assert read == [40, 5, 7, 9, 5]


def test_taps_are_the_models_hidden_states(models):
    for kind in ("llama", "recurrent"):
        model = models(kind)
        target = HFTarget(model)
        assert TAPS in target.can
        cache = target.new_cache()
        one, two = cache.open(), cache.open()
        target.score([Feed.chain(one, [5, 6])], cache)
        cache.keep(one, [0, 1])
        feeds = [Feed.chain(one, [7, 8], want=(1,)), Feed.chain(two, [9])]
        scored = target.score(feeds, cache, taps=frozenset({"hidden.0", "hidden.1", "hidden.-1"}))
        for part, ids, rows in [(scored.of(0), [5, 6, 7, 8], 2), (scored.of(1), [9], 1)]:
            with torch.no_grad():
                states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            assert set(part.taps) == {"hidden.0", "hidden.1", "hidden.-1"}
            for name, features in part.taps.items():
                want_TH = states[int(name.partition(".")[2])][0, -rows:]
                assert torch.allclose(features, want_TH, atol=1e-4)
        for tap in ("hidden.9", "hidden.-2", "hidden.x", "attn_in.0"):
            with pytest.raises(ModelError, match=r"hidden\.-1 after the final norm"):
                target.score([Feed.chain(two, [1])], cache, taps=frozenset({tap}))


def deaf(module, query, key, value, attention_mask, **kwargs):
    """An attention kernel that knows causal masks only, as some fast ones do."""
    kernel = transformers.AttentionInterface()["sdpa"]
    return kernel(module, query, key, value, None, **kwargs)


def test_the_users_model_stays_as_it_was(models):
    model = models("llama")
    transformers.AttentionInterface.register("deaf_flex", deaf)
    try:
        model.train()
        model.model.layers[0].eval()
        model.set_attn_implementation("deaf_flex")
        target = HFTarget(model)
        assert target.way == "gather"
        cache = target.new_cache()
        logits_TV = target.score([Feed.chain(cache.open(), [1, 2, 3])], cache).logits_TV
        assert not logits_TV.requires_grad
        assert model.training and not model.model.layers[0].training
        assert model.model.layers[1].mlp.training
        assert model.config._attn_implementation == "deaf_flex"
        assert all(weight.requires_grad for weight in model.parameters())
    finally:
        model.set_attn_implementation("sdpa")
        model.eval()
    assert_close(logits_TV, plain(model, [1, 2, 3]))


def test_bfloat16_branches(models):
    model = build(CONFIGS["llama"](), torch.bfloat16)
    target = HFTarget(model)
    assert (target.way, target.dtype) == ("gather", torch.bfloat16)
    cache = target.new_cache()
    slot = cache.open()
    draft = Draft.chosen([4, 5, 6], [-1, -1, 1])
    logits_TV = target.score([Feed.tree(slot, 3, draft)], cache).logits_TV
    assert logits_TV.dtype is torch.float32
    assert_close(logits_TV[3], plain(model, [3, 5, 6])[-1], tolerance=0.2)


def test_it_says_what_the_model_says(models, tmp_path):
    fast = save_tokenizer(tmp_path)
    model = build(hf_config("llama", vocab_size=300, tie_word_embeddings=False))
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[0, 7], temperature=0.6, top_p=0.9, do_sample=True, num_beams=2
    )
    target = HFTarget(model, fast)
    said = target.defaults
    assert said is not None
    assert said.eos_ids == (0, 2, 7)
    assert (said.temperature, said.top_p, said.top_k, said.do_sample) == (0.6, 0.9, None, True)
    assert said.unsupported == ("num_beams=2",)
    assert target.tokenizer.decode(target.tokenizer.encode("hello w")) == "hello w"
    assert target.tokenizer.eos_ids == {0, 2, 7}
    assert (target.vocab_size, target.tokenizer.vocab_size) == (300, 265)
    assert (target.hidden_size, target.num_layers, target.max_positions) == (32, 4, 256)
    total = sum(p.nbytes for p in model.parameters())
    assert target.weight_bytes == total - 300 * 32 * 4
    assert target.name == "LlamaForCausalLM"
    assert target.digest == HFTarget(model).digest
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.1)
    assert target.digest != HFTarget(model).digest


def test_frequencies_that_jump_end_the_context(models):
    config = transformers.Phi3Config(
        **SMALL,
        **HEADS,
        pad_token_id=0,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 16,
        },
    )
    target = HFTarget(build(config))
    assert target.max_positions == 16
    assert "longrope" in target.why_shorter


def test_what_cannot_be_a_target_is_refused(models):
    with pytest.raises(ModelError, match="Linear is no language model of transformers"):
        HFTarget(torch.nn.Linear(2, 2))
    bert = transformers.BertConfig(**SMALL, num_attention_heads=4, intermediate_size=48)
    bert.is_decoder = False
    with pytest.raises(ModelError, match="depend on later tokens"):
        HFTarget(build(bert))
    with pytest.raises(ModelError, match="not a fast tokenizer"):
        HFTarget(models("llama"), tokenizer=object())
    target = HFTarget(models("llama"))
    cache = target.new_cache()
    slot = cache.open()
    riders = Riders((-1,), (-1,), (0,))
    resume = Resume(1, (0,), torch.zeros(1, 32))
    for feed in (Feed(slot, (0,), (-1,), riders=riders), Feed(slot, (0,), (-1,), resume=resume)):
        with pytest.raises(ModelError, match="own decoder"):
            target.score([feed], cache)
    with pytest.raises(ModelError, match="after 1 layers"):
        target.score([Feed.chain(slot, [1])], cache, layers=1)
    with pytest.raises(ModelError, match="not a cache of"):
        from outpace.models.tiny import TableCache

        target.score([Feed.chain(slot, [1])], TableCache())
