"""A smaller language model with the target's vocabulary guesses, chain or tree.

Any Target may draft: another model, or some layers of the target itself (which then share its
weights). Its cache follows the committed text by ids, so it may lag and catch up; guesses that
were accepted keep their keys and values, so a step costs one pass per level and no more.

Without ``model`` it is the one that ``outpace train draft_model`` made for the target, which may
know a part of the vocabulary only.

Pays if the model is several times cheaper than the target and agrees with it; the last level
of a draft is never run through the draft model.

Paper: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. As trees:
SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from outpace.clock import PassClock
from outpace.drafters.base import ExpandingDrafter, Request
from outpace.drafters.lm.trained_model import load_trained
from outpace.drafters.trained import find, is_drafter
from outpace.errors import ModelError
from outpace.models.base import LAYERS, Target
from outpace.models.load import load_target
from outpace.tree.growth import Branch, DraftRow
from outpace.types import NOTHING, ROOT, Draft, Feed, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModelConfig:
    """Settings of the drafter."""

    model: str | None = None
    """Name, folder, GGUF file or hub id of the draft model; it may be the target itself, or a
    folder that ``outpace train draft_model`` wrote. Without it, the one trained for the target."""
    layers: int | None = None
    """Use only the first so many layers."""
    dtype: str | None = None
    """float32 or bfloat16; the target's by default."""

    def __post_init__(self) -> None:
        if self.layers is not None and self.layers < 1:
            raise ValueError(f"layers must be at least 1, got {self.layers}")


@dataclass(slots=True, eq=False)
class _State:
    """One sequence in the draft model's cache."""

    slot: int
    draft: Draft | None = None
    """The last proposal, until it is observed."""
    lead: int = 0
    """Tail rows that hold committed tokens, the pending one last."""
    row: dict[int, int] = field(default_factory=dict)
    """Draft node -> its row in the tail of the slot."""


class DraftModel(ExpandingDrafter[_State]):
    """Drafts with a second Target.

    Args:
        model: shares the vocabulary of the target; owns the cache of this drafter.
        vocab_size: of the target; columns beyond it are padding of the draft model.
        id_D: target ids of the columns, if the model knows a part of the vocabulary only.
    """

    Config = DraftModelConfig
    default_nodes = 5

    def __init__(self, model: Target, vocab_size: int, id_D: Tensor | None = None) -> None:
        self.model = model
        self._vocab_size, self._id_D = vocab_size, id_D
        self.cache = model.new_cache()

    @property
    def clock(self) -> PassClock:
        """The draft model's own; where the target drafts for itself, the target's."""
        return self.model.clock

    @classmethod
    def load(cls, config: DraftModelConfig, target: Target) -> DraftModel:
        """Load the draft model, or borrow the target's own layers.

        Raises:
            ModelError: unknown model, too many layers, another vocabulary, or a draft model that
                was trained for another target, or none.
        """
        model: Target
        id_D = None
        if config.model is None or is_drafter(config.model):
            folder = find("draft_model", target, config.model)
            model, id_D = load_trained(folder, target, config.dtype)
        elif config.model == target.name and config.dtype is None:
            model = target
        else:
            model = load_target(
                config.model, dtype=config.dtype or target.dtype, device=target.device
            )
            if (model.digest, model.dtype) == (target.digest, target.dtype):
                model = target  # the same weights by another name: one copy will do
            check_vocabulary(model, target)
        if config.layers is not None:
            if config.layers > model.num_layers:
                raise ModelError(
                    f"draft_model: layers={config.layers}, but {model.name} has {model.num_layers}"
                )
            model.require(frozenset({LAYERS}), "draft_model with layers=")
            model = model.variant(layers=range(config.layers))
        return cls(model, target.vocab_size, id_D)

    def begin(self, request: Request) -> _State:
        """Take a slot of the draft model's cache."""
        return _State(self.cache.open())

    def propose(self, rows: Sequence[DraftRow[_State]]) -> list[Draft]:
        """Grow drafts; a sequence that outgrew the draft model's context gets an empty one."""
        fits = [
            row
            if len(row.tokens) + row.budget.max_depth <= self.model.max_positions
            else replace(row, budget=NOTHING)
            for row in rows
        ]
        for row in fits:
            self._forget(row.state)
        drafts = super().propose(fits)
        for row, draft in zip(fits, drafts, strict=True):
            row.state.draft = draft
        return drafts

    def expand(self, branches: Sequence[Branch[_State]]) -> tuple[Tensor, Tensor | None]:
        """One pass of the draft model over what it has not seen, then over the new nodes."""
        feeds = []
        for branch in branches:
            state = branch.state
            if branch.nodes == (ROOT,):
                behind = branch.tokens[self.cache.length(state.slot) :]
                state.lead = len(behind)
                state.row = {ROOT: state.lead - 1}
                feeds.append(Feed.chain(state.slot, behind, want=(state.lead - 1,)))
                continue
            start = len(state.row) - 1 + state.lead
            tokens = tuple(branch.token_N[node] for node in branch.nodes)
            parents = tuple(state.row[branch.parent_N[node]] for node in branch.nodes)
            state.row.update({node: start + i for i, node in enumerate(branch.nodes)})
            feeds.append(Feed(state.slot, tokens, parents))
        logits_TV = self.model.score(feeds, self.cache).logits_TV
        return logits_TV[:, : self._vocab_size], self._id_D

    def renumber(self, state: _State, numbers: Sequence[int]) -> None:
        """Follow the nodes that stayed in a draft to their rows."""
        rows = {node: state.row[old] for node, old in enumerate(numbers) if old in state.row}
        state.row = {ROOT: state.row[ROOT], **rows}

    def observe(self, states: Sequence[_State], outcomes: Sequence[Outcome]) -> None:
        """Keep the rows that were committed; read a prompt along with the target."""
        prompts = []
        for state, outcome in zip(states, outcomes, strict=True):
            if outcome.forced:
                end = outcome.start + len(outcome.fed)
                if (
                    self.cache.length(state.slot) == outcome.start
                    and end <= self.model.max_positions
                ):
                    prompts.append(Feed.chain(state.slot, outcome.fed, want=()))
            elif state.draft is outcome.draft and state.lead:
                committed = [row - 1 for row in outcome.row_F[1:]]
                path = [state.row[node] for node in committed if node in state.row]
                self.cache.keep(state.slot, [*range(state.lead), *path])
            self._forget(state)
        if prompts:
            self.model.score(prompts, self.cache)
            for feed in prompts:
                self.cache.keep(feed.slot, range(len(feed.token_J)))

    def _forget(self, state: _State) -> None:
        """Drop a proposal that was never observed, or is done with."""
        self.cache.drop(state.slot)
        state.draft, state.lead, state.row = None, 0, {}

    def reset(self, state: _State) -> None:
        """Read everything anew at the next proposal."""
        self._forget(state)
        self.cache.truncate(state.slot, 0)

    def end(self, state: _State) -> None:
        """Give the slot back."""
        self.cache.close(state.slot)


def check_vocabulary(model: Target, target: Target) -> None:
    """Refuse a draft model that speaks another vocabulary.

    Sizes may differ by padding (Qwen pads differently from size to size) as long as the
    tokenizers agree on every token.

    Raises:
        ModelError: naming the first difference.
    """
    mine, theirs = model.tokenizer, target.tokenizer
    if mine is None or theirs is None or mine is theirs:
        if model.vocab_size != target.vocab_size:
            raise ModelError(
                f"draft model {model.name} has {model.vocab_size} tokens, target {target.name} "
                f"has {target.vocab_size}; use a draft model with the same vocabulary"
            )
        return
    for token in range(max(mine.vocab_size, theirs.vocab_size)):
        ours = mine.token_bytes(token) if token < mine.vocab_size else None
        other = theirs.token_bytes(token) if token < theirs.vocab_size else None
        if ours != other:
            raise ModelError(
                f"draft model {model.name} and target {target.name} differ at token {token} "
                f"({ours!r} and {other!r}); use a draft model with the same vocabulary"
            )
