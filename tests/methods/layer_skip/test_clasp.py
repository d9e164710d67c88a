"""Layers chosen as the text goes on: by the recurrence, for each sequence by itself, at a known price."""

import itertools

import pytest
import torch

from outpace import Engine, SamplingParams, SpecError
from outpace.cache.base import Lease
from outpace.coins import KeyedCoins, Stream
from outpace.drafters.base import Request
from outpace.methods.layer_skip import programme
from outpace.methods.layer_skip.clasp import Clasp, ClaspConfig
from outpace.methods.layer_skip.parts import PartDrafter
from outpace.methods.layer_skip.programme import Table, whole_layers
from outpace.methods.layer_skip.skip_sets import SkipSet
from outpace.models.tiny import tiny
from outpace.sampling import Warp
from outpace.serving.service import Service
from outpace.tree.growth import DraftRow
from outpace.types import Budget, Drawn, Feed
from tests.methods.layer_skip.test_drafter import idle_target
from tests.serving.test_service import LONG as WORDS
from tests.serving.test_service import ask_at_once

TEXTS = [
    [5, 9, 11, 5, 9, 11, 5, 9, 40, 41, 42, 43, 44, 77, 3, 1, 4, 1, 5, 9],
    [40, 41, 42, 43, 44],
    [77],
    [8, 2, 60, 31, 2, 2, 7, 19, 33],
]
LAYERS = 8
LONG = {"max_new_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def target():
    return tiny(layers=LAYERS)


def committed(target, texts):
    """A cache with all of each text but its last token, and slot and last token of each."""
    cache, asked = target.new_cache(), []
    for text in texts:
        slot = cache.open()
        if text[:-1]:
            target.score([Feed.chain(slot, text[:-1], want=())], cache)
            cache.keep(slot, range(len(text) - 1))
        asked.append((slot, text[-1]))
    return cache, asked


def cosine(x_H, y_H):
    return float(torch.cosine_similarity(x_H.double(), y_H.double(), dim=0))


class Slow:
    """The state behind some layers of a part of the target, by a pass of that part alone."""

    def __init__(self, target, text):
        self.target = target
        self.cache, ((self.slot, self.token),) = committed(target, [text])
        self.known = {}

    def state(self, left_out, layers):
        if (left_out, layers) not in self.known:
            part = SkipSet(left_out, left_out).part(self.target) if left_out else self.target
            name, feed = f"hidden.{layers}", Feed.chain(self.slot, [self.token], want=())
            scored = part.score([feed], self.cache, taps=frozenset({name}), layers=max(1, layers))
            self.cache.drop(self.slot)
            self.known[left_out, layers] = scored.taps[name][0].clone()
        return self.known[left_out, layers]

    def cosine(self, left_out, layers):
        return cosine(self.state(left_out, layers), self.state(frozenset(), layers))

    def chosen(self, most):
        """The sets of the recurrence, by number of layers left out."""
        best = {0: frozenset()}
        for layer in range(self.target.num_layers):
            ways = {}
            for count, left_out in best.items():
                ways.setdefault(count, []).append(left_out)
                ways.setdefault(count + 1, []).append(left_out | {layer})
            best = {
                count: max(some, key=lambda one: self.cosine(one, layer + 1))
                for count, some in ways.items()
                if count <= most
            }
        return best


def differ(target, most=LAYERS):
    """Where the programme's sets or cosines are not those of the slow way."""
    with torch.no_grad():
        cache, asked = committed(target, TEXTS)
        tables = whole_layers(target, cache, asked, most)
        for text, table in zip(TEXTS, tables, strict=True):
            slow = Slow(target, text)
            for count, left_out in slow.chosen(most).items():
                if table.left_out(count) != sorted(left_out):
                    return text, count
                if float(table.cosine_K[count]) != pytest.approx(slow.cosine(left_out, LAYERS), abs=1e-9):
                    return text, count
        assert all(not cache.slot(slot).tail_ids for slot, _ in asked)
    return None


def test_the_sets_are_those_of_the_recurrence(target):
    assert differ(target) is None and differ(target, 3) is None


@pytest.mark.parametrize("bug", ["skipped from its own column", "the worse way", "rows that see each other"])
def test_the_comparison_can_fail(target, monkeypatch, bug):
    step, begun, cosines = Table.step, programme._begun, programme._cosines
    if bug == "skipped from its own column":
        monkeypatch.setattr(
            Table,
            "step",
            lambda table, ran_KH: (
                setattr(table, "state_KH", table.state_KH.roll(-1, 0)),
                step(table, ran_KH),
            ),
        )
    elif bug == "the worse way":
        monkeypatch.setattr(programme, "_cosines", lambda x_KH: -cosines(x_KH))
    else:
        monkeypatch.setattr(
            programme,
            "_begun",
            lambda *args: [Feed.chain(feed.slot, feed.token_J, want=()) for feed in begun(*args)],
        )
    assert differ(target) is not None


def test_what_it_chooses_beside_all_sets(target):
    """No better than the best of all; the same with none or all left out, and of two layers with one."""
    ranks = []
    for text in TEXTS[:2]:
        with torch.no_grad():
            cache, asked = committed(target, [text])
            (table,) = whole_layers(target, cache, asked, LAYERS)
            slow = Slow(target, text)
            for count in range(LAYERS + 1):
                every = [frozenset(some) for some in itertools.combinations(range(LAYERS), count)]
                cosines = sorted((slow.cosine(one, LAYERS) for one in every), reverse=True)
                own = float(table.cosine_K[count])
                assert own <= cosines[0] + 1e-9
                assert len(table.left_out(count)) == count
                if count in (0, LAYERS):
                    assert own == pytest.approx(cosines[0], abs=1e-9)
                ranks.append(sum(one > own + 1e-9 for one in cosines) / len(cosines))
    assert 0 < sum(ranks) / len(ranks) < 0.25, "a good guess, and not the best"
    short = tiny(layers=2)
    for text in TEXTS:
        with torch.no_grad():
            cache, asked = committed(short, [text])
            (table,) = whole_layers(short, cache, asked, 1)
            slow = Slow(short, text)
            best = max((slow.cosine(frozenset({layer}), 2), layer) for layer in (0, 1))
        assert table.left_out(1) == [best[1]]


def tokens(results):
    return [result.tokens for result in results]


@pytest.fixture
def choices(monkeypatch):
    """Every choice: sequences asked, the sets of each, and rows of the widest pass."""
    seen, choose = [], Clasp._choose

    def watched(drafter, rows):
        choose(drafter, rows)
        seen.append([str(row.state.part[0]) for row in rows])

    monkeypatch.setattr(Clasp, "_choose", watched)
    return seen


@pytest.mark.parametrize(
    "settings", ["share=0.4 every=1", "share=0.2 every=5 tree=3x2x1", "tree=dynamic:8:0 share=0.4 every=3"]
)
@pytest.mark.parametrize("more", [{}, {"temperature": 0.8, "seed": 5}])
def test_a_batch_is_its_sequences(target, choices, settings, more):
    """Each chooses for itself; a batch drafts, and keeps, what each would alone."""
    engine, spec = Engine(target, drafter="none"), f"clasp[{settings}]"
    kind = {**LONG, **more, "reproducible": False} if more else LONG
    batch = engine.generate(TEXTS, drafter=spec, **kind)
    assert any(len(set(one)) > 1 for one in choices), "several sets at once"
    assert len({one for some in choices for one in some}) > 3, "the sets follow the text"
    for text, one in zip(TEXTS, batch, strict=True):
        alone = engine.generate(text, drafter=spec, **kind)
        assert (alone.tokens, alone.counters) == (one.tokens, one.counters)
    if not more:
        assert tokens(batch) == tokens(engine.generate(TEXTS, drafter="none", **LONG))
    assert sum(one.counters.accepted for one in batch) > 0


@pytest.fixture
def rows(target):
    """A drafter, and rows for a draft of each text, with the slots that they lend."""
    cache, asked = committed(target, TEXTS)
    drafter, params = Clasp(ClaspConfig(share=0.3), target), SamplingParams(temperature=0.9, seed=1)
    return drafter, [
        DraftRow(
            drafter.begin(Request(prompt=tuple(text))),
            text,
            Budget(2, 2),
            KeyedCoins(1, len(text) - 1, Stream.DRAFT),
            Warp(params.resolved(None), text, frozenset(), 10**6),
            Drawn.IID,
            Lease(cache, slot),
        )
        for text, (slot, _) in zip(TEXTS, asked, strict=True)
    ]


def q_of_others(drafter, rows):
    """Rows whose draft was not drawn from what their own part says."""
    wrong = []
    with torch.no_grad():
        drafts = drafter.propose(rows)
        assert len({row.state.part[0] for row in rows}) > 1
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            row.lease.cache.drop(row.lease.slot)
            _, part = row.state.part
            feed = Feed.chain(row.lease.slot, [row.tokens[-1], draft.token_N[0]])
            logits_TV = part.score([feed], row.lease.cache).logits_TV
            for place, (law, path) in enumerate(zip(draft.laws, ((), draft.token_N[:1]), strict=True)):
                own = row.warp.guess(logits_TV[place], path, None)
                wrong += [i] if not torch.equal(law.prob_S, own.prob_S) else []
            row.lease.cache.drop(row.lease.slot)
    return wrong


def test_q_is_what_the_part_of_a_sequence_says(rows):
    assert q_of_others(*rows) == []


def test_q_of_another_part_is_seen(rows, monkeypatch):
    """Planted: all sequences are asked of the part of the first."""
    monkeypatch.setattr(PartDrafter, "expand", lambda drafter, branches: (drafter._pass(branches), None))
    assert q_of_others(*rows)


def test_sets_outlast_a_loss_of_memory(target, choices):
    """A sequence that waits without its slot drafts on with what was chosen before."""
    texts = [WORDS[: 61 + i] for i in range(2)]
    settings = {"max_new_tokens": 70, "ignore_eos": True, "draft_tokens": 3}
    heard, chosen = [], []
    for pages in (7, 99):
        own = Engine(target, "none")
        spec = "clasp[every=9 share=0.3]"
        with Service(own, drafters=(spec,), pages=pages, stored_pages=0, chunk=24) as service:
            heard.append([one.result for one in ask_at_once(service, texts, **settings)])
            assert (service.stats().preempted > 0) == (pages == 7)
        chosen.append(sorted(one for some in choices for one in some))
        choices.clear()
    assert chosen[0] == chosen[1]
    for one, other in zip(*heard, strict=True):
        assert (one.tokens, one.counters) == (other.tokens, other.counters)


def test_a_choice_comes_back_with_the_text(rows):
    drafter, (row, *_) = rows
    with torch.no_grad():
        mark = drafter.mark(row.state)
        drafter.propose([row])
        first, noted = row.state.part, drafter.mark(row.state)
        row.state.part, row.state.chosen = None, 99
        assert drafter.rewind(row.state, noted).part is first and row.state.chosen == len(row.tokens)
        assert drafter.rewind(row.state, mark).part is None
        drafter.propose([row])
    assert row.state.part[0] == first[0] and row.state.part[1] is first[1], "parts are shared"


def test_idle_layers_are_the_ones_left_out():
    engine, spec = Engine(idle_target(), drafter="none"), "clasp[share=0.25]"
    results = engine.generate(TEXTS, drafter=spec, **LONG)
    assert all(one.counters.acceptance_rate == 1.0 for one in results), "nothing that matters"


def test_a_choice_costs_the_layers_once_over_a_few_rows(target, choices, monkeypatch):
    """And comes as often as it is said."""
    engine, fed, score = Engine(target, drafter="none"), [], target.score

    def watched(feeds, *args, layers=None, **more):
        if layers is not None:
            fed.append((layers, len(feeds[0].token_J), feeds[0].wanted))
        return score(feeds, *args, layers=layers, **more)

    monkeypatch.setattr(target, "score", watched)
    for every, most in ((1, 16), (7, 3), (99, 1)):
        fed.clear(), choices.clear()
        result = engine.generate(TEXTS[0], drafter=f"clasp[share=0.25 every={every}]", **LONG)
        assert len(choices) == min(most, result.counters.passes) or 1 < len(choices) < most
        assert fed == [(layer, 3, 0) for layer in range(1, LAYERS + 1)] * len(choices)
    drafter, before = engine.method("clasp").drafter, target.clock.count
    with torch.no_grad():
        whole_layers(target, *committed(target, TEXTS[2:3]), drafter.count)
    assert target.clock.count == before + 1, "one pass"


def test_what_does_not_fit_is_said(target):
    engine = Engine(target, drafter="none")
    for settings, words in (("share=1", "between 0 and 1"), ("every=0", "at least 1")):
        with pytest.raises(SpecError, match=words):
            engine.generate([1, 2], drafter=f"clasp[{settings}]")
    assert [Clasp(ClaspConfig(share=share), target).count for share in (0.01, 0.5, 0.99)] == [1, 4, 7]
    assert Clasp(ClaspConfig(share=0.5), target).traits.level_D[0] == pytest.approx(0.5, abs=0.1)
