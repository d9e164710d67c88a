import json
import random

import numpy as np
import pytest

from outpace import Engine, ModelError, RequestError, SpecError
from outpace.coins import KeyedCoins, Stream
from outpace.methods.lookup.datastore import Datastore, build_datastore, suffix_array, write_datastore
from outpace.methods.lookup.retrieval import Retrieval, RetrievalConfig
from outpace.models.tiny import TableTarget, tiny, tiny_tokenizer
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import parse_shape
from outpace.types import Budget, Drawn, Shape

TOKENIZER = tiny_tokenizer()
PARAMS = SamplingParams().resolved(None)


def store_of(folder, documents):
    file = folder / "some.store"
    write_datastore(documents, TOKENIZER, file)
    return Datastore.open(file)


def propose(store, text, budget, **settings):
    drafter = Retrieval(RetrievalConfig(store="", **settings), store)
    row = DraftRow(
        None,
        text,
        budget,
        KeyedCoins(0, 0, Stream.DRAFT),
        Warp(PARAMS, text, frozenset(), 1000),
        Drawn.CHOSEN,
    )
    draft = drafter.propose([row])[0]
    return draft.token_N, draft.parent_N


@pytest.mark.parametrize("alphabet", [1, 2, 3, 50, 70000])
@pytest.mark.parametrize("depth", [1, 4, 7, 32])
def test_places_are_sorted_by_the_text_from_there_on(alphabet, depth):
    tokens = np.random.default_rng(alphabet).integers(1, alphabet + 1, 300).astype(np.uint32)
    order = suffix_array(tokens, depth).tolist()
    assert sorted(order) == list(range(300))
    heads = [tokens[place : place + depth].tolist() for place in order]
    assert heads == sorted(heads)
    assert heads != sorted(heads, reverse=True) or alphabet == depth == 1


def longest_suffix(documents, text, longest, shortest):
    """By hand: length and number of occurrences."""
    for n in range(min(longest, len(text)), shortest - 1, -1):
        wanted = text[len(text) - n :]
        count = sum(d[i : i + n] == wanted for d in documents for i in range(len(d)))
        if count:
            return n, count
    return None


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_suffix_is_found_as_by_hand(tmp_path, seed):
    coins = random.Random(seed)
    documents = [[coins.randrange(3) for _ in range(coins.randrange(1, 60))] for _ in range(5)]
    store = store_of(tmp_path, documents)
    found = set()
    for _ in range(100):
        text = [coins.randrange(3) for _ in range(coins.randrange(12))]
        longest = coins.choice([1, 4, 16])
        got = store.find(text, longest, 1)
        assert (got and (got[0], len(got[1]))) == longest_suffix(documents, text, longest, 1)
        found.add(got and got[0])
    assert {1, 4} < found
    assert store.find([0, 1, 286, 1000], 9, 1) is None, "no text of this vocabulary"


CORPUS = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 8], [9, 2, 3, 7], [9, 1, 2]]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ([1, 2], (3, 4, 5)),  # 3 followed twice, 8 once; of 4 and 6, once each, the lower id
        ([7, 7, 9, 2], (3, 7)),  # the longer suffix decides; the document ends
        ([7, 2], ()),  # shorter than min_ngram
        ([2, 8], ()),  # found at the end of a document only
        ([5], ()),
    ],
)
def test_a_chain_is_the_commonest_continuation(tmp_path, text, want):
    assert propose(store_of(tmp_path, CORPUS), text, Budget(3, 3))[0] == want


def test_a_tree_takes_the_commonest_child_of_each_place(tmp_path):
    store = store_of(tmp_path, CORPUS)
    budget = Budget(6, 3, shape=parse_shape("2x2x1"))
    assert propose(store, [7, 2], budget, min_ngram=1) == ((3, 8, 4, 6, 5), (-1, -1, 0, 0, 2))
    assert propose(store, [7, 2], Budget(3, 2, shape=budget.shape), min_ngram=1) == ((3, 8, 4), (-1, -1, 0))
    dynamic = Budget(3, 3, shape=Shape(beam=8))
    # 3 with 3/4, 8 with 1/4; after 3 come 4, 6 and 7, a third of it each.
    assert propose(store, [7, 2], dynamic, min_ngram=1) == ((3, 8, 4), (-1, -1, 0))
    few = propose(store, [7, 2], budget, min_ngram=1, matches=1)[0]
    assert few == (3, 4, 5), "one occurrence has one continuation"


def test_words_of_many_occurrences_are_sampled_evenly(tmp_path):
    store = store_of(tmp_path, [[1, 2]] * 300 + [[1, 3]] * 100 + [[1, 4]] * 1600)
    wide = Budget(3, 1, shape=parse_shape("3"))
    assert propose(store, [1], wide, min_ngram=1, matches=20)[0] == (4, 2, 3)


def test_text_beyond_the_sorted_depth_repeats_no_sibling(tmp_path):
    store = store_of(tmp_path, [[1] * 40 + [token] for token in (2, 3, 2, 3, 2, 3)])
    draft = propose(store, [1] * 5, Budget(40, 36, shape=parse_shape("x".join(["1"] * 35 + ["2"]))))
    assert draft[0][-2:] != draft[0][-1:] * 2 and len(draft[0]) > 30


def test_files_become_documents(tmp_path):
    (tmp_path / "a.txt").write_text("the rest is nothing\n")
    rows = [{"role": "user", "content": "in the end"}, {"id": "x1", "n": 3}, ["to be", "or not"]]
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    seen = []
    out = tmp_path / "new" / "c.store"
    build_datastore(
        [tmp_path / "a.txt", tmp_path / "b.jsonl"],
        TOKENIZER,
        out,
        progress=lambda file, size: seen.append((file, size)),
    )
    store = Datastore.open(out)
    text = [token for token in store.token_M.tolist() if token != TOKENIZER.vocab_size]
    assert TOKENIZER.decode(text) == "the rest is nothing\nin the endto be\nor not"
    assert store.token_M.tolist().count(TOKENIZER.vocab_size) == 3
    assert seen[0] == (str(tmp_path / "a.txt"), 20) and len(seen) == 5
    assert [file.name for file in out.parent.iterdir()] == ["c.store"]


def test_what_cannot_be_built_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine words"}\n{oops\n')
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_text("")
    out = tmp_path / "out.store"
    for name, fault in (
        ("a.jsonl", "line 2 is not JSON"),
        ("b.txt", r"not UTF-8 text \(byte 3\)"),
        ("c.txt", "hold no text"),
        ("d.txt", "cannot read"),
    ):
        with pytest.raises(RequestError, match=fault):
            build_datastore([tmp_path / name], TOKENIZER, out, progress=lambda file, size: None)
    assert not list(tmp_path.glob("out.store*"))


def test_damaged_files_and_other_vocabularies_are_refused(tmp_path):
    store_of(tmp_path, CORPUS)
    good = (tmp_path / "some.store").read_bytes()
    file = tmp_path / "bad.store"

    def refusal(data):
        file.write_bytes(data)
        with pytest.raises(ModelError) as caught:
            Datastore.open(file)
        assert "\n" not in str(caught.value) and "outpace build datastore" in str(caught.value)
        return str(caught.value)

    assert "not a datastore" in refusal(b"") and "not a datastore" in refusal(b"PK" + good)
    assert "header of datastore" in refusal(good[:25] + b"?" + good[26:])
    assert "its header says" in refusal(good[:300])
    assert "its header says" in refusal(good[:-1])
    for place in (515, len(good) - 1, good.index(b'"vocabulary": "') + 16):
        flipped = bytes([good[place] ^ 1])
        assert "checksum differs" in refusal(good[:place] + flipped + good[place + 1 :])
    store = Datastore.open(tmp_path / "some.store")
    store.check_fits(tiny())
    with pytest.raises(ModelError, match="built for a vocabulary of 286 tokens"):
        store.check_fits(TableTarget.random(0, 5))
    other = tiny()
    other.tokenizer = tiny_tokenizer()
    other.tokenizer._bytes[7] = b"another"
    with pytest.raises(ModelError, match="not that of tiny"):
        store.check_fits(other)


def test_ids_above_two_bytes_are_kept_apart(tmp_path):
    class Large:
        vocab_size = 70000
        special_ids = frozenset()

        def token_bytes(self, token):
            return b""

    write_datastore([[69999, 1, 66000], [4463, 1, 5]], Large(), tmp_path / "large.store")
    store = Datastore.open(tmp_path / "large.store")
    assert propose(store, [69999, 1], Budget(2, 2))[0] == (66000,)  # 4463 is 69999 in two bytes
    assert propose(store, [4463, 1], Budget(2, 2))[0] == (5,)


def test_a_corpus_of_the_answer_is_repeated_and_settings_are_checked(tmp_path):
    engine = Engine(tiny(), "none")
    settings = {"max_new_tokens": 40, "ignore_eos": True}
    plain = engine.generate([5, 9, 11], **settings)
    store_of(tmp_path, [[5, 9, 11, *plain.tokens]])
    spec = f"retrieval[store={tmp_path}/some.store tree_size=12]"
    fast = engine.generate([5, 9, 11], drafter=spec, **settings)
    assert fast.tokens == plain.tokens and fast.counters.passes == 3
    assert engine.generate([7, 7, 7], drafter=spec, **settings).counters.drafted < 12 * 39
    with pytest.raises(SpecError, match="min_ngram <= max_ngram <= 32, got 2 and 33"):
        engine.method(f"retrieval[store={tmp_path}/some.store max_ngram=33]")
    with pytest.raises(SpecError, match=r"needs store=..., a file; make one with `outpace build datastore"):
        engine.method("retrieval")
