"""A draft model of another tokenizer: text kept in step, shared laws, and exact output laws."""

import random
from dataclasses import dataclass, field, replace

import pytest
import tokenizers
import torch

from outpace import Engine, ModelError, SpecError
from outpace.analysis.tables import RIGHT
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.law import Law
from outpace.methods.cascade.drafter import Cascade, read_k
from outpace.methods.cross_vocabulary import drafter as cross_vocabulary
from outpace.methods.cross_vocabulary import mirror as mirror_module
from outpace.methods.cross_vocabulary import shared_law
from outpace.methods.cross_vocabulary.drafter import CrossVocabulary
from outpace.methods.cross_vocabulary.mirror import TAIL, Bridge
from outpace.methods.cross_vocabulary.retokenize import retokenized, stretched
from outpace.methods.cross_vocabulary.spelling import Piece, Shared, Spelling, shared
from outpace.methods.draft_model.drafter import DraftModel
from outpace.methods.lookup.prompt_lookup import PromptLookup, PromptLookupConfig
from outpace.methods.lookup.suffix import Suffix, SuffixConfig
from outpace.models.text import SPACE_MARK, Tokenizer
from outpace.models.tiny import TableTarget, tiny, tiny_tokenizer
from outpace.models.zoo import open_checkpoint
from outpace.params import SamplingParams
from outpace.sampling import Warp
from outpace.tree.growth import DraftRow
from outpace.tree.shapes import CHAIN, widths
from outpace.types import Budget, Draft, Drawn, Group, Outcome, Scored, Verdict
from tests.drafters.support import Telling
from tests.methods.cross_vocabulary.strangers import letters, stranger_tokenizer, table, write_stranger

SAMPLE = (
    "Hello, world!  3.14159 it's WE'LL 1234567 the other one\n\n\tdef f(x):\n        return x**2 "
    "caf\u00e9 \u65e5\u672c\u8a9e \U0001f389\U0001f469\u200d\U0001f467 e\u0301 \x00\x7f end   "
)


# Spelling and the mirror ----------------------------------------------------------------------


def pieces(bytes_too=True, extra=()):
    """A tokenizer as SentencePiece makes them: a space before every text, bytes as last resort."""
    words = ["<unk>", "<s>", "</s>"]
    words += [f"<0x{byte:02X}>" for byte in range(256 if bytes_too else 0)]
    words += [SPACE_MARK, *"etaonhisrdlucmfwypvbgkjqxz", SPACE_MARK + "t", "he", "an", *extra]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [(SPACE_MARK, "t"), ("h", "e"), ("a", "n")]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=bytes_too)
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend(SPACE_MARK), tokenizers.normalizers.Replace(" ", SPACE_MARK)]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace(SPACE_MARK, " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    return Tokenizer(backend, named={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def stranger():
    return Tokenizer(stranger_tokenizer()[0], named={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="module")
def smol():
    return open_checkpoint("smollm2-135m").tokenizer()


@pytest.fixture(scope="module")
def spellings(smol):
    made = {
        "smol": smol,
        "tiny": tiny_tokenizer(),
        "stranger": stranger(),
        "pieces": pieces(),
        "characters": pieces(bytes_too=False),
    }
    return {name: Spelling(one, one.vocab_size) for name, one in made.items()}


ALL = ("smol", "tiny", "stranger", "pieces", "characters")
PAIRS = [
    ("tiny", "stranger"),
    ("stranger", "pieces"),
    ("pieces", "tiny"),
    ("tiny", "characters"),
    ("tiny", "smol"),
    ("smol", "pieces"),
]


def said(spelling, ids):
    return b"".join(spelling.spell(token) for token in ids)


@pytest.mark.parametrize("name", ALL)
def test_bytes_come_back_as_they_were(spellings, name):
    spelling = spellings[name]
    for data in (SAMPLE.encode(), b"the \x80\xbf rest \xe6\x97", b"", b" ", b"\xe2\x82"):
        for first in (True, False):
            found = spelling.encode(data, first)
            assert sum(piece.size for piece in found) == len(data)
            if name != "characters":
                assert (
                    said(spelling, [piece.id for piece in found]).removeprefix(
                        b" " if first and name == "pieces" else b""
                    )
                    == data
                )
                assert all(piece.id not in spelling.special for piece in found)


def test_what_a_vocabulary_lacks_stands_for_its_bytes(spellings):
    unknown = 0
    spelling = spellings["characters"]
    found = spelling.encode("the \u65e5 he".encode())
    assert Piece(unknown, 3) in found
    assert found[-1] == Piece(spelling.tokenizer.encode("he")[-1], 2)


def common(spellings, draft, target):
    """What two of them share; the draft model's vocabulary is padded."""
    known = spellings.setdefault("common", {})
    if (draft, target) not in known:
        a, b = spellings[draft], spellings[target]
        known[draft, target] = shared(a, b, TableTarget.random(0, a.size + 3, 0), b.size)
    return known[draft, target]


def bridge(spellings, source, goal, by_token=False):
    both = common(spellings, goal, source)
    return Bridge(spellings[source], spellings[goal], both.draft_of, by_token)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize(("source", "goal"), PAIRS)
def test_a_text_that_grows_is_the_text(spellings, source, goal, by_token):
    """Token by token: bytes, what is said to have stayed, and in the end the tokens themselves."""
    text = SAMPLE + "the other rest"
    tokens = [piece.id for piece in spellings[source].encode(text.encode(), True)]
    bytes_ = [spellings[source].spell(token) for token in tokens]
    coins = random.Random(1)
    mirror = bridge(spellings, source, goal, by_token).mirror()
    opening = len(mirror.ids)
    fed = 0
    while fed < len(tokens):
        before, stable = list(mirror.ids), mirror.stable
        count = coins.choice([1, 1, 2, 5])
        same = mirror.extend(tokens[fed : fed + count])
        fed += count
        assert before[:same] == mirror.ids[:same]
        assert same == len(before) or mirror.ids[same : same + 1] != before[same : same + 1]
        assert stable <= min(same, mirror.stable)
        assert len(mirror.ids) - mirror.stable <= 2 * TAIL + 3
        spelled = b"".join(bytes_[:fed]).removeprefix(b" " if source == "pieces" else b"")
        if not by_token:
            assert sum(mirror.sizes) == len(spelled) - mirror.held
        if goal != "characters":
            ours = said(spellings[goal], mirror.ids[opening:])
            covered = spelled[: len(spelled) - mirror.held]
            assert ours.removeprefix(b" ") == covered.removeprefix(b" ")
    if not by_token:
        whole = bridge(spellings, source, goal).mirror()
        whole.extend(tokens)
        assert mirror.ids == whole.ids
        if goal in ("smol", "tiny", "stranger"):
            assert mirror.ids == spellings[goal].tokenizer.encode(text)


def test_work_per_step_is_bounded(spellings):
    across = bridge(spellings, "tiny", "smol")
    asked, real = [], Spelling.encode
    mirror = across.mirror()
    tokens = spellings["tiny"].tokenizer.encode(SAMPLE * 40)
    mirror.extend(tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Spelling, "encode", lambda self, data, first=False: asked.append(data) or real(self, data, first)
        )
        for token in tokens[:200]:
            mirror.extend([token])
    assert len(asked) == 200 and max(len(data) for data in asked) < 8 * 2 * TAIL
    assert len(mirror.ids) > 1000


def test_a_text_cut_within_a_word_keeps_its_tokens(spellings):
    """The planted mistake: without what stood before, the beginning of a tail is split anew."""
    text = "".join(random.Random(1).choices(["other", "the", "her", "stand"], k=60))
    tokens = spellings["tiny"].encode(text.encode())
    expected = spellings["stranger"].tokenizer.encode(text)

    def grown():
        mirror = bridge(spellings, "tiny", "stranger").mirror()
        for piece in tokens:
            mirror.extend([piece.id])
        return mirror.ids

    assert grown() == expected
    real = Spelling.encode
    with pytest.MonkeyPatch.context() as patch:
        # A vocabulary that puts the beginning of every text in other tokens than its middle.
        def shy(self, data, first=False):
            found = real(self, data, first)
            head = [Piece(self.known[data[i : i + 1]], 1) for i in range(found[0].size)]
            return [*head, *found[1:]]

        patch.setattr(Spelling, "encode", shy)
        assert grown()[TAIL:] == shy_text(shy, spellings["stranger"], text)[TAIL:]
        patch.setattr(mirror_module, "spliced", lambda old, new: list(new))
        assert grown()[TAIL:] != shy_text(shy, spellings["stranger"], text)[TAIL:]


def shy_text(shy, spelling, text):
    return [piece.id for piece in shy(spelling, text.encode(), True)]


def test_special_tokens_part_a_text_and_have_counterparts(spellings):
    tiny_, other = spellings["tiny"], spellings["stranger"]
    begin, end = tiny_.tokenizer.bos_id, max(tiny_.tokenizer.eos_ids)
    across = bridge(spellings, "tiny", "stranger")
    mirror = across.mirror()
    mirror.extend([begin, *tiny_.tokenizer.encode("he"), end, *tiny_.tokenizer.encode("an")])
    assert mirror.ids == [
        other.tokenizer.bos_id,
        *other.tokenizer.encode("he"),
        max(other.tokenizer.eos_ids),
        *other.tokenizer.encode("an"),
    ]
    # A beginning is not doubled, and a mark that the other vocabulary lacks leaves nothing.
    mirror = bridge(spellings, "tiny", "pieces").mirror()
    mirror.extend([begin, *tiny_.tokenizer.encode("the")])
    assert mirror.ids == spellings["pieces"].tokenizer.encode("the")
    mirror = bridge(spellings, "smol", "tiny").mirror()
    mirror.extend([5, *spellings["smol"].tokenizer.encode("the"), 6])
    assert mirror.ids == tiny_.tokenizer.encode("the")


def test_half_a_character_waits_where_no_byte_can_be_said(spellings):
    smol = spellings["smol"]
    mirror = bridge(spellings, "smol", "characters").mirror()
    known = smol.known
    mirror.extend([*smol.tokenizer.encode("an"), known[b"\xc3"]])
    assert mirror.held == 1 and sum(mirror.sizes) == 2
    mirror.extend([known[b"\xa9"]])
    assert mirror.held == 0 and sum(mirror.sizes) == 4


@pytest.mark.parametrize(("draft", "target"), [(b, a) for a, b in PAIRS])
def test_shared_tokens_stand_for_the_same_bytes(spellings, draft, target):
    a, b, both = spellings[draft], spellings[target], common(spellings, draft, target)
    assert len(both.target_of) == a.size + 3, "padding of the model has no counterpart"
    pairs = [(mine, theirs) for mine, theirs in enumerate(both.target_of) if theirs >= 0]
    assert len({theirs for _, theirs in pairs}) == len(pairs) == len(both.draft_K)
    for mine, theirs in pairs:
        assert both.draft_of[theirs] == mine
        assert (mine in a.special) == (theirs in b.special)
        if mine not in a.special:
            assert a.spell(mine) == b.spell(theirs)
    ends = [both.target_of[token] for token in a.tokenizer.eos_ids]
    assert set(ends) & b.tokenizer.eos_ids, "an end can always be guessed"


def test_of_two_tokens_of_the_same_bytes_the_used_one_is_shared(spellings):
    letter = spellings["pieces"].known[b"h"]
    assert letter == spellings["pieces"].tokenizer.encode("h")[-1] + 0
    assert spellings["pieces"].spell(3 + ord("h")) == b"h" and letter != 3 + ord("h")


# Retokenizing ---------------------------------------------------------------------------------


def turned(spellings, source, target, before, path, held=0, budget=None, parents=None):
    a, b, both = spellings[source], spellings[target], common(spellings, source, target)
    draft = Draft.chosen([piece if isinstance(piece, int) else a.known[piece] for piece in path], parents)
    return retokenized(draft, before, held, budget or Budget(20, 20), source=a, target=b, common=both)


def test_a_draft_becomes_tokens_of_the_target(spellings):
    smol = spellings["smol"].tokenizer
    before = smol.encode("The cat sat")
    draft = turned(spellings, "tiny", "smol", before, [b" ", b"on", b" ", b"th", b"e"])
    assert draft.token_N == tuple(smol.encode(" on the"))
    assert all(group.law is None for group in draft.groups)


def test_tokens_do_not_reach_across_the_committed_text(spellings):
    smol = spellings["smol"].tokenizer
    before = [*smol.encode("The"), spellings["smol"].known[b" ca"]]
    draft = turned(spellings, "tiny", "smol", before, [b"t", b" ", b"is"])
    assert smol.encode("The cat")[-1] not in draft.token_N
    assert said(spellings["smol"], draft.token_N) == b"t is"


def test_a_tree_becomes_a_tree(spellings):
    smol = spellings["smol"]
    draft = turned(
        spellings,
        "tiny",
        "smol",
        smol.tokenizer.encode("The"),
        [b" ", b"c", b"a", b"t", b"d", b"o", b"g"],
        parents=[-1, 0, 1, 2, 0, 4, 5],
    )
    words = [smol.known[b" cat"], smol.known[b" dog"]]
    assert list(draft.token_N) == words and draft.parent_N == (-1, -1)
    least = turned(
        spellings, "tiny", "smol", smol.tokenizer.encode("The"), [b" ", b"c", b"a", b"t"], budget=Budget(1, 1)
    )
    assert least.token_N == (words[0],)
    none = turned(spellings, "tiny", "smol", [1], [b"c"], budget=Budget(0, 0))
    assert not len(none)


def test_ends_are_translated_and_padding_ends_a_draft(spellings):
    a, b = spellings["stranger"], spellings["tiny"]
    end = max(a.tokenizer.eos_ids)
    draft = turned(spellings, "stranger", "tiny", [], [b"x", end, b"y"])
    assert draft.token_N == (b.known[b"x"], max(b.tokenizer.eos_ids), b.known[b"y"])
    padded = turned(spellings, "stranger", "tiny", [], [b"x", a.size + 1, b"y"])
    assert padded.token_N == (b.known[b"x"],)


def test_a_draft_repeats_the_bytes_that_were_held_back(spellings):
    b = spellings["smol"]
    before = [b.known[b"\xc3"]]
    draft = turned(spellings, "tiny", "smol", before, [b"\xc3", b"\xa9", b"!"], held=1)
    assert said(b, draft.token_N) == b"\xa9!"
    assert not len(turned(spellings, "tiny", "smol", before, [b"x"], held=1))


def test_budgets_stretch_with_the_tokens():
    assert stretched(Budget(4, 3), 2.5) == Budget(10, 8)
    assert stretched(Budget(4, 4), 0.5) == Budget(2, 2)
    assert stretched(Budget(4, 4), 100).max_depth == 32
    assert stretched(Budget(6, 2, shape=widths((3, 1))), 3.0).max_nodes == 6


# The law --------------------------------------------------------------------------------------

OURS = letters("a", "b", "ab")
THEIRS = letters("b", "a", "ba")
ENDING = letters("ba", "b", "a", special=("<end>",))
PROMPT = (0, 1, 2)


def by_id(draft, target, model, rows):
    """The planted mistake: tokens of the same number are taken for the same."""
    both = min(model.vocab_size, rows)
    of = [[i if i < both else -1 for i in range(size)] for size in (model.vocab_size, rows)]
    to_target_D, to_draft_V = map(torch.tensor, of)
    return Shared(to_target_D, to_draft_V, torch.arange(both), *map(tuple, of), both)


def test_ids_are_not_text(engine, other, monkeypatch):
    """They would leave the law as it is, and nothing of a draft would be kept."""
    spec = f"cross_vocabulary[model={other} by=tokens]"

    def accepted(engine):
        result = engine.generate(TEXTS, drafter=spec, **GREEDY)
        return sum(one.counters.accepted for one in result)

    assert accepted(engine) > 15
    monkeypatch.setattr(cross_vocabulary, "shared", by_id)
    assert accepted(Engine(engine.target, drafter="none")) < 3


@dataclass
class Case:
    """A request over {a, b, ab}, drafted for over {b, a, ba}, told in every way it can go."""

    by: str = "auto"
    verifier: str = "tree"
    shape: object = CHAIN
    length: int = 3
    depth: int = 2
    theirs: object = THEIRS
    lookup: bool = False
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    drafted: float = 0.0
    accepted: float = 0.0

    def __post_init__(self):
        self.target, self.model = table(3, OURS), table(20, self.theirs)
        inner = DraftModel(self.model, self.model.vocab_size)
        if self.lookup:
            inner = Cascade([self.model], Suffix(SuffixConfig()), read_k("2,1/1"))
        self.cross = CrossVocabulary(inner, self.model, self.target, self.by)
        size = len(self.shape.parent_N or ()) or self.depth
        self.told = Telling(
            self.target,
            self.cross,
            PROMPT,
            self.length,
            RIGHT[self.verifier],
            Budget(size, size, shape=self.shape),
            self.params,
        )

    def error(self):
        """Largest error of the law of the emitted tokens."""
        self.drafted = self.accepted = 0.0
        return self.told.error(self._on, ((), frozenset()))

    def _on(self, state, fate):
        emitted, _ = state
        row = self.told.begin(fate, emitted)
        if emitted:
            self.told.read(row)
            outcome = self.told.step(row)
            self.drafted += len(outcome.draft) > 0
            self.accepted += len(outcome.verdict.kept) > 0
        else:
            self.told.prefill(row)
        return self.told.end(row)


SETTINGS = SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4)
SOME = SamplingParams(temperature=1.0, allowed_tokens=frozenset({0, 2}))
LESS = SamplingParams(temperature=1.0, top_k=2)
CASES = {
    "text, sampled": Case("text"),
    "text, a tree": Case("text", shape=widths((2, 2))),
    "text, coupled": Case("text", verifier="coupled"),
    "text, greedy": Case("text", length=6, params=SamplingParams(temperature=0.0)),
    "tokens": Case("tokens"),
    "tokens, by default": Case("auto", length=4),
    "tokens, a tree": Case("tokens", shape=widths((2, 1))),
    "tokens, drawn again": Case("tokens", shape=widths((2, 1)), verifier="k_seq"),
    "tokens, block": Case("tokens", verifier="block"),
    "tokens, traversal": Case("tokens", shape=widths((2, 1)), verifier="traversal"),
    "tokens, best and one": Case("tokens", shape=widths((2,)), verifier="greedy_plus_one"),
    "tokens, with the hub": Case("tokens", shape=widths((2,)), verifier="spechub"),
    "tokens, coupled": Case("tokens", verifier="coupled", length=4),
    "tokens, penalties": Case("tokens", params=SETTINGS),
    "tokens, some allowed": Case("tokens", params=SOME),
    "tokens, truncated": Case("tokens", params=LESS),
    "tokens, greedy": Case("tokens", length=5, params=SamplingParams(temperature=0.0)),
    "tokens, another end": Case("tokens", theirs=ENDING),
    "tokens, cascade": Case("tokens", lookup=True),
    "text, cascade": Case("text", lookup=True),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_emitted_has_the_targets_law(name):
    case = CASES[name]
    assert case.error() < 1e-12
    assert case.drafted > 0 and case.accepted > 0, (case.drafted, case.accepted)


def unrestricted(self, logits_V, path=(), id_V=None, real=shared_law.SharedWarp.law):
    """Draws from the law over shared tokens, and records what the model gave them."""
    law = real(self, logits_V, path, id_V)
    mass = logits_V.softmax(0)[law.ids]
    return Law(mass, law.id_S)


def by_number(law, common):
    """Tokens are translated, the law under them keeps the draft model's ids."""
    return Law(law.prob_S, law.id_S)


def several_at_once(draft, common, who):
    """What was drawn and is unlikely is taken back."""
    out = TRANSLATED(draft, common, who)
    if len(out.laws) == 1 or out.laws[-1].prob(out.token_N[-1]) > 0.5:
        return out
    return Draft(out.token_N[:-1], out.parent_N[:-1], out.groups[:-1], out.laws[:-1])


TRANSLATED = shared_law.in_target_ids
PLANTED = {
    "the law before it was restricted": (shared_law.SharedWarp, "law", unrestricted),
    "ids taken for tokens": (shared_law, "renamed", by_number),
    "dropped for what it is": (cross_vocabulary, "in_target_ids", several_at_once),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_caught(name, monkeypatch):
    monkeypatch.setattr(*PLANTED[name])
    assert Case("tokens").error() > 1e-3


def test_a_sample_of_text_must_not_be_given_a_law(monkeypatch):
    """By text, a likeliest guess with the model's softmax as its q would be kept too often."""

    def with_laws(draft, tokens, held, budget, **more):
        out = retokenized(draft, tokens, held, budget, **more)
        if len(out) == 0:
            return out
        law = Law(torch.full((3,), 1 / 3, dtype=torch.float64))
        return Draft(out.token_N[:1], (-1,), (Group(-1, Drawn.IID, (0,), 0),), (law,))

    monkeypatch.setattr(cross_vocabulary, "retokenized", with_laws)
    assert Case("text").error() > 1e-3


# Whole requests -------------------------------------------------------------------------------

GREEDY = {"max_new_tokens": 24, "ignore_eos": True}
TEXTS = ["the other one said", "an end is near, the rest is not", "x"]


@pytest.fixture(scope="module")
def engine():
    return Engine.load("tiny", drafter="none", dtype="float32")


@pytest.fixture(scope="module")
def other(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "other"
    write_stranger(engine.target, folder)
    return folder


INNER = [
    "by=text",
    "by=tokens",
    "by=text drafter=cascade[levels=draft_model[model=M]+suffix]",
    "by=text drafter=suffix",
    "by=text drafter=prompt_lookup",
    "by=tokens drafter=recycling",
    "by=tokens drafter=lookahead",
    "by=text drafter=reference",
]


@pytest.mark.parametrize("inner", INNER)
def test_any_drafter_may_stand_behind_it(engine, other, inner):
    spec = f"cross_vocabulary[model={other} {inner.replace('M]', f'{other}]')}]"
    circles = {**GREEDY, "allowed_tokens": frozenset(engine.target.tokenizer.encode("the rest"))}
    drafted = accepted = 0
    for settings in (GREEDY, circles):
        plain = engine.generate(TEXTS, drafter="none", **settings)
        fast = engine.generate(TEXTS, drafter=spec, **settings)
        assert [one.tokens for one in fast] == [one.tokens for one in plain]
        drafted += sum(one.counters.drafted for one in fast)
        accepted += sum(one.counters.accepted for one in fast)
    assert drafted > 0
    assert accepted > 10 or ("drafter=" in inner and "model=M" not in inner)


def test_the_draft_model_reads_every_token_once(engine, other):
    """What is kept of a draft stays in the model's cache; a revised tail costs no more passes."""
    for by in ("text", "tokens"):
        drafter = engine.method(f"cross_vocabulary[model={other} by={by}]").drafter
        rows, real = [], drafter.model.score
        drafter.model.score = lambda feeds, cache, real=real, rows=rows, **more: (
            rows.extend(len(feed.token_J) for feed in feeds),
            real(feeds, cache, **more),
        )[1]
        result = engine.generate(TEXTS[1], drafter=f"cross_vocabulary[model={other} by={by}]", **GREEDY)
        del drafter.model.score
        assert result.counters.accepted > 5
        prompt = rows.pop(0)
        assert prompt > 10 and max(rows) <= 2 + TAIL // 4, (by, rows)


def test_members_of_other_drafters_can_take_it_back(engine, other):
    one = f"cross_vocabulary[model={other}]"
    looked = f"cross_vocabulary[model={other} by=text drafter=suffix]"
    for spec in (
        f"select[members=suffix+{one}]",
        f"cascade[levels=draft_model[model=tiny layers=1]+{looked}]",
        f"auto[drafters={one}+suffix]",
    ):
        plain = engine.generate(TEXTS, drafter="none", **GREEDY)
        fast = engine.generate(TEXTS, drafter=spec, **GREEDY)
        assert [r.tokens for r in fast] == [r.tokens for r in plain]


def news_of(drafter, state, tokens, draft=None):
    outcome = Outcome(
        draft or Draft(), Scored(torch.zeros(0, 1), (0, 0)), Verdict((), tuple(tokens)), (0,), (), 0
    )
    drafter.observe([state], [outcome])


def test_a_marked_state_comes_back(engine, other):
    """Whatever was read since, the inner lookup then knows exactly the marked text."""
    target = engine.target
    model = table(5, stranger())
    cross = CrossVocabulary(Suffix(SuffixConfig()), model, target, "text")
    encode = target.tokenizer.encode
    state = cross.begin(Request(prompt=(), num_cached=0))
    news_of(cross, state, encode("the other one and th"))
    before = list(state.mirror.ids)
    mark = cross.mark(state)
    for _ in range(9):
        news_of(cross, state, encode("e rest of it "))
    assert state.reading.state.automaton.tokens == state.mirror.ids != before
    state = cross.rewind(state, mark)
    assert state.mirror.ids == before == state.reading.state.automaton.tokens
    for _ in range(9):
        news_of(cross, state, encode("en some more "))
        assert state.reading.state.automaton.tokens == state.mirror.ids
    assert state.reading.anchor > 0


def test_a_model_is_rewound_to_the_first_token_that_changed(engine, other):
    target, model = engine.target, table(5, stranger())
    cross = CrossVocabulary(DraftModel(model, model.vocab_size), model, target, "text")
    encode, inner = target.tokenizer.encode, cross.drafter
    state = cross.begin(Request(prompt=()))
    forced = Outcome(
        Draft(),
        Scored(torch.zeros(0, 1), (0, 0)),
        Verdict((), encode("h")[:1]),
        tuple(encode("x the other")),
        (),
        0,
        forced=True,
    )
    cross.observe([state], [forced])
    slot = state.reading.state.slot
    assert inner.cache.ids(slot) == state.mirror.ids[:-1]
    mark = cross.mark(state)
    kept = list(inner.cache.ids(slot))
    news_of(cross, state, encode("e"))  # "h" becomes "he": nothing that was read has changed
    assert inner.cache.ids(slot) == kept == state.mirror.ids[: len(kept)]
    state = cross.rewind(state, mark)
    assert inner.cache.ids(slot) == kept == state.mirror.ids[: len(kept)]


def test_a_context_that_was_held_already_is_read(engine, other):
    method = engine.method(f"cross_vocabulary[model={other}]")
    text = engine.target.tokenizer.encode("the rest of the other one " * 12)
    state = method.drafter.begin(Request(prompt=tuple(text), num_cached=len(text) - 1))
    whole = stranger().encode("the rest of the other one " * 12)
    assert len(whole) - 4 < len(state.mirror.ids) <= len(whole)
    assert 0 < state.reading.told <= state.mirror.stable
    method.drafter.end(state)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("cross_vocabulary", "needs model="),
        ("cross_vocabulary[model=M by=ids]", "by must be one of auto, text, tokens, got ids"),
        ("cross_vocabulary[model=M drafter=suffix+max_gram]", "names 2 drafters; give one"),
        ("cross_vocabulary[model=M drafter=layer_skip]", "which nobody lends; use a language model"),
        ("cross_vocabulary[model=M drafter=early_exit]", "which nobody lends; use a language"),
        ("cross_vocabulary[model=M drafter=ouroboros[draft=early_exit]]", "which nobody lends"),
        ("cross_vocabulary[model=M drafter=suffix[tree=2x2]]", "tree, which the whole decides"),
        ("cross_vocabulary[model=no-such-model]", "unknown model 'no-such-model'"),
    ],
)
def test_bad_settings_are_refused_in_one_line(engine, other, spec, says):
    with pytest.raises((SpecError, ModelError, ValueError), match=says) as caught:
        engine.method(spec.replace("=M", f"={other}"))
    assert "\n" not in str(caught.value)


def test_vocabularies_without_a_common_token_are_refused_by_tokens():
    target, model = table(1, letters("a", "b")), table(2, letters("c", "d"))
    with pytest.raises(ModelError, match="share none of their 2 and 2 tokens; use by=text"):
        CrossVocabulary(DraftModel(model, 2), model, target, "tokens")
    for by in ("auto", "text"):
        CrossVocabulary(DraftModel(model, 2), model, target, by)
    bare = TableTarget.random(1, 2)
    with pytest.raises(ModelError, match="table:1 has no tokenizer"):
        CrossVocabulary(DraftModel(bare, 2), bare, target)


def test_drawing_without_the_given_settings_is_found_out():
    case = Case("tokens")
    real = DraftModel.propose

    def careless(self, rows):
        whole = Warp(SamplingParams(temperature=1.0), (), frozenset(), 3)
        return real(self, [replace(row, warp=whole) for row in rows])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftModel, "propose", careless)
        with pytest.raises(SpecError, match="DraftModel draws tokens that the target does not"):
            case.error()


@pytest.mark.slow
def test_a_real_model_and_a_drafter_of_another_tokenizer(tmp_path):
    engine = Engine.load("smollm2-135m", drafter="none", dtype="float32")
    write_stranger(tiny(), tmp_path / "other")
    prompt = "The capital of France is"
    for settings in ({}, {"temperature": 0.8, "seed": 2, "reproducible": True}):
        plain = engine.generate(prompt, drafter="none", max_new_tokens=12, **settings)
        for by in ("text", "tokens"):
            spec = f"cross_vocabulary[model={tmp_path / 'other'} by={by}]"
            fast = engine.generate(prompt, drafter=spec, max_new_tokens=12, **settings)
            assert fast.tokens == plain.tokens and fast.counters.drafted > 0
    told = "cross_vocabulary[model=smollm2-135m by=text]"
    same = engine.generate(prompt, drafter=told, max_new_tokens=12)
    assert same.counters.accepted >= 6, "a model behind its own tokenizer agrees with itself"


def test_lookups_over_draft_tokens_follow_the_text():
    """A text that repeats itself is drafted by a lookup that reads the other vocabulary."""
    target, model = table(1, tiny_tokenizer()), table(5, stranger())
    cross = CrossVocabulary(PromptLookup(PromptLookupConfig()), model, target, "text")
    text = target.tokenizer.encode("the other one ran, the other")
    state = cross.begin(Request(prompt=tuple(text)))
    cross.observe(
        [state],
        [
            Outcome(
                Draft(),
                Scored(torch.zeros(0, 1), (0, 0)),
                Verdict((), tuple(text[-1:])),
                tuple(text[:-1]),
                (),
                0,
                forced=True,
            )
        ],
    )
    warp = Warp(SamplingParams(temperature=0.0), (), frozenset(), target.vocab_size)
    row = DraftRow(state, text, Budget(5, 5), KeyedCoins(0, 3, Stream.DRAFT), warp, Drawn.CHOSEN)
    (draft,) = cross.propose([row])
    assert target.tokenizer.decode(draft.token_N).startswith(" one")
