"""Max-Gram: copy what followed the longest suffix that occurred before; failing that, bigrams.

    ... the cat sat on the mat. [Then the cat] -> draft "sat on the mat."
    ... a word that never came before: [elec] -> draft "tric" "ity", from a table of pairs

The longest suffix is found anywhere in prompt and output. Its newest occurrence wins, and the draft copies on
from there. A copy that touches the end of the text goes round if the match is as long as the round. That is
what a loop looks like. Without a table it always goes round. A bigram table (``outpace build bigram``) takes
over where nothing matches and where the text to copy from ends. It also does where the pair is likelier than
a short match. So there is a guess at nearly every step, which pays on a machine where the first few are free.
Without a table the method is silent on new text.

Cost: amortised O(1) per token and per drafted token. Some 600 bytes per token of a running
sequence, and 20 bytes per token of the vocabulary for a table.
Paper: Chen et al. 2023, Cascade Speculative Drafting, arXiv:2312.11462, section 4 (there the
earliest occurrence wins, which guesses worse).
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.drafters.base import Request, Traits
from outpace.drafters.trained import candidates
from outpace.drafters.worth import grow
from outpace.files import expanded
from outpace.methods.lookup.automaton import SuffixAutomaton
from outpace.methods.lookup.bigram import METHOD, TABLE, BigramTable, usual_place
from outpace.methods.lookup.files import vocabulary_digest
from outpace.methods.lookup.follows import AutomatonState, FollowsText
from outpace.models.base import Target
from outpace.tree.growth import DraftRow
from outpace.types import Draft

ABROAD = 0.5
"""How much of a pair's share in the table's text to expect in an answer. The surest pairs of other
people's prose are kept about half as often as they came there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxGramConfig:
    min_match: int = 1
    """Shortest suffix worth copying after, tokens."""
    table: str | None = None
    """Bigram table; none: that of the user's data folder for this vocabulary, else one of the target's
    own answers, if there is one."""
    bigram: bool = True
    """Whether to use a bigram table."""

    def __post_init__(self) -> None:
        if self.min_match < 1:
            raise ValueError(f"min_match must be at least 1, got {self.min_match}")
        if self.table is not None and not self.bigram:
            raise ValueError(f"table={self.table} contradicts bigram=false; drop one of the two")


@dataclass(frozen=True, slots=True)
class _Node:
    token: int
    """The last token."""
    copy: int = -1
    """Index into the text of what the copy takes next; -1 if there is nothing to copy."""
    match: int = 0
    """Tokens before it that agree."""


class MaxGram(FollowsText[AutomatonState]):
    """Copies after the longest match, and fills up with bigrams.

    Args:
        table: None does without.
    """

    Config = MaxGramConfig
    traits = Traits(default_nodes=20, previews=True)

    def __init__(self, config: MaxGramConfig, table: BigramTable | None = None) -> None:
        self.config = config
        self.table = table

    @classmethod
    def load(cls, config: MaxGramConfig, target: Target) -> MaxGram:
        """Read the bigram table that is named, or the user's own.

        Raises:
            ModelError: a table that is missing, damaged, or made for another vocabulary.
        """
        if not config.bigram:
            return cls(config)
        path = None if config.table is None else expanded(config.table)
        own = candidates(METHOD, target)
        if path is None and not own and not usual_place("").parent.is_dir():
            return cls(config)
        digest = vocabulary_digest(target.tokenizer, target.vocab_size)
        if path is None and usual_place(digest).exists():
            path = usual_place(digest)
        elif path is None and own:
            path = own[0] / TABLE
        return cls(config, None if path is None else BigramTable.load(path, digest))

    def begin(self, request: Request) -> AutomatonState:
        """The text that is held already; the rest of the prompt arrives through ``observe``."""
        return AutomatonState(SuffixAutomaton(request.prompt[: request.num_cached]))

    def propose_one(self, row: DraftRow[AutomatonState]) -> Draft:
        """A chain; in a template the siblings come from the table. CHOSEN."""
        text, trust = row.state.automaton, row.state.trust
        if not text.tokens:
            return Draft()
        tokens = text.tokens
        state, match = next(text.suffixes(), (0, 0))
        first = text.newest[state] + 1 if match >= self.config.min_match else -1
        goes_round = match >= len(tokens) - first or self.table is None

        def after(node: _Node) -> list[tuple[int, float, _Node]]:
            found: dict[int, tuple[float, _Node]] = {}
            if node.copy >= 0:
                token, then = tokens[node.copy], node.copy + 1
                if then == len(tokens):
                    then = first if goes_round else -1
                found[token] = trust.chance(node.match), _Node(token, then, node.match + 1)
            if self.table is not None:
                for token, share in self.table.after(node.token):
                    if token not in found:
                        found[token] = ABROAD * share, _Node(token)
            out = [(token, *what) for token, what in found.items()]
            return sorted(out, key=lambda item: -item[1])

        return grow(after, _Node(tokens[-1], first, match), row.budget, trust.own)
