"""What tests of several drafters share: requests told in every way they can go, layers counted,
adapters in files.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch

from outpace.analysis.enumeration import EnumeratingCoins, fates
from outpace.analysis.tables import distance
from outpace.drafters.base import Drafter, Request
from outpace.law import VocabMap
from outpace.machine import Machine, Member
from outpace.models.layers import Layers
from outpace.models.program import Programs
from outpace.models.tiny import TableTarget
from outpace.params import SamplingParams
from outpace.policies.fixed import Fixed, FixedConfig
from outpace.sampling import Warp
from outpace.step import prefill, step
from outpace.types import NOTHING, Budget, Draft, Feed, Outcome, Verdict
from outpace.verifiers.base import Verifier
from tests.support import off_start


@dataclass
class Telling:
    """A request to a drafter, told in every way that the coins can fall.

    A state is a tuple: the emitted tokens first, the coins that are still needed last, and between
    them what else a drafter remembers that the text does not say.
    """

    target: TableTarget
    drafter: Drafter
    prompt: tuple[int, ...]
    length: int
    """Tokens to emit."""
    verifier: Verifier
    budget: Budget
    params: SamplingParams

    def __post_init__(self):
        self.machine = Machine(
            self.target, self.target.new_cache(), {"d": self.drafter}, Fixed(FixedConfig())
        )

    def error(self, go, start):
        """Largest error of the law of the emitted tokens.

        Args:
            go: from a state and a fate to a later state.
            start: before anything was emitted.
        """
        done, open_ = defaultdict(float), {start: 1.0}
        while open_:
            state = min(open_, key=lambda s: len(s[0]))
            weight = open_.pop(state)
            for fate, after in fates(partial(go, state), dict(state[-1])):
                share = weight * fate.weight
                if len(after[0]) == self.length:
                    done[after[0]] += share
                else:
                    open_[after] = open_.get(after, 0.0) + share
        return distance(done, self._p, self.target.vocab_size, self.length)

    def warp(self, emitted):
        warp = Warp(self.params, self.prompt, frozenset(), self.target.vocab_size)
        warp.advance(emitted)
        return warp

    def _p(self, context):
        return self.warp(context).law(self.target.law_after((*self.prompt, *context)).log())

    def begin(self, fate, emitted=()):
        """A sequence with a text that was there before. ``end`` gives back what it holds."""
        state = self.drafter.begin(Request(prompt=(*self.prompt, *emitted)))
        return Row(self, fate, state, self.machine.cache.open(), emitted)

    def read(self, row):
        """Show the target and the drafter all but the pending token."""
        *fed, pending = row.tokens
        cache = self.machine.cache
        scored = self.target.score([Feed.chain(row.slot, fed, want=())], cache)
        cache.keep(row.slot, range(len(fed)))
        self.drafter.observe(
            [row.members["d"].state],
            [
                Outcome(
                    Draft(),
                    scored.of(0),
                    Verdict((), (pending,)),
                    tuple(fed),
                    tuple(range(len(fed))),
                    0,
                    forced=True,
                )
            ],
        )

    def prefill(self, row):
        while len(row.tokens) == len(self.prompt):
            prefill(self.machine, [row])

    def step(self, row):
        """The outcome of one step."""
        (outcome,) = step(self.machine, [row])
        return outcome

    def end(self, row):
        """(Emitted tokens, coins that later steps may use)."""
        self.drafter.end(row.members["d"].state)
        self.machine.cache.close(row.slot)
        pending = len(row.tokens) - 1
        live = frozenset((coin, at) for coin, at in row.fate.known.items() if coin[3] >= pending)
        return tuple(row.tokens[len(self.prompt) :]), live


class Row:
    """One sequence of a telling, as the step sees it."""

    number, policy_state = 0, None

    def __init__(self, telling, fate, state, slot, emitted):
        self.fate, self.slot, self.tokens = fate, slot, [*telling.prompt, *emitted]
        self.warp, self.verifier = telling.warp(emitted), telling.verifier
        self.members = {"d": Member(state, telling.budget, telling.verifier)}
        self._whole = len(telling.prompt) + telling.length

    @property
    def missing(self):
        return self._whole - len(self.tokens)

    read_prompt = None

    def coins(self, stream):
        return EnumeratingCoins(self.fate, 0, len(self.tokens) - 1, stream)

    def room(self):
        return Budget(1 << 20, self.missing) if self.missing > 0 else NOTHING

    failed = False

    def fail(self, error):
        raise error

    def cut(self, verdict):
        return verdict.cut(self.missing)

    def extend(self, outcome):
        self.tokens.extend(outcome.verdict.emitted)
        self.warp.advance(outcome.verdict.emitted)


def count_rows(monkeypatch, target):
    """Rows that each layer really computes, from now on."""
    rows = [0] * target.num_layers
    real = Layers.run

    def counting(self, x_TH, layers, spans, *rest):
        for layer in layers:
            rows[layer] += sum(len(span.stored) for span in spans)
        return real(self, x_TH, layers, spans, *rest)

    monkeypatch.setattr(Layers, "run", counting)
    layers_of, list_, some = {}, Programs._list, Programs._some

    def listing(self, layers, *rest):
        listed = list_(self, layers, *rest)
        layers_of[id(listed)] = layers
        return listed

    def running(self, buffers, listed, spans, *rest):
        for layer in layers_of[id(listed)]:
            rows[layer] += sum(len(span.stored) for span in spans)
        return some(self, buffers, listed, spans, *rest)

    monkeypatch.setattr(Programs, "_list", listing)
    monkeypatch.setattr(Programs, "_some", running)
    return rows


def without_hand_over(monkeypatch, drafter):
    """The planted waste: what a draft computed in the target's slot is dropped."""
    real = drafter.propose

    def forgetful(given):
        drafts = []
        for row, draft in zip(given, real(given), strict=True):
            row.lease.cache.drop(row.lease.slot)
            drafts.append(Draft(draft.token_N, draft.parent_N, draft.groups, draft.laws))
        return drafts

    monkeypatch.setattr(drafter, "propose", forgetful)


def lacking(target, every):
    """A draft vocabulary without every so many-th token, the first among them."""
    ids = torch.tensor([i for i in range(target.vocab_size) if i % every])
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[ids] = torch.arange(len(ids))
    return VocabMap(ids, feed_V)


def written_off_start(objective, folder):
    """An objective as its file holds it, away from its start, and the file."""
    with torch.no_grad():
        for parameter in off_start(objective, 0.02).module.parameters():
            parameter.copy_(parameter.bfloat16())
    objective.save(folder, {})
    objective.folder = folder
    return objective
