"""Suffix automaton: all that ever followed any piece of a text, in one step per token.

    text  a b c a b d a b     longest suffix that was there before: "a b", twice
                              after it came: c once, d once; d is newer

A state stands for the pieces of the text that end at the same places. ``next`` leads from a
piece to the same piece with one more token; ``link`` to the longest of its suffixes that also
ends elsewhere. So ``link[last]`` is the longest suffix of the text that occurred before, and the
chain of links from there on holds all shorter ones.

Cost: amortised O(1) per token for the states, plus at most `HOPS` counters; two states at most
per token, about 600 bytes per token in all. That is right for one sequence, whose length the
model's context bounds, and wrong for a large history: `outpace.methods.lookup.history` keeps
that.

Source: Blumer et al. 1985, Theoretical Computer Science 40, "The smallest automaton recognizing
the subwords of a text".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

HOPS = 32
"""Suffixes of a place whose counters are kept up to date, longest first. A text has few that
repeat, but one long run of a single token has as many as it has tokens."""


_Push = tuple[int, list[int], int]
"""The state of the whole text before a token, what ``newest`` was along its suffixes, and the
state that was parted, or -1."""


class SuffixAutomaton:
    """Everything that occurs in one text. Grows at the end only."""

    __slots__ = ("_log", "count", "last", "length", "link", "newest", "next", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        """The text."""
        self.next: list[dict[int, int]] = [{}]
        """State -> token -> state. State 0 is the empty piece."""
        self.link: list[int] = [-1]
        """State -> state of its longest suffix that also occurs elsewhere; -1 for state 0."""
        self.length: list[int] = [0]
        """State -> tokens of its longest piece."""
        self.newest: list[int] = [-1]
        """State -> index of the last token of its newest occurrence before the end of the text;
        -1 if there is none."""
        self.count: list[int] = [0]
        """State -> how often its pieces occur, the end of the text included."""
        self.last = 0
        """The state of the whole text."""
        self._log: list[_Push] | None = None
        """What undoes the tokens since the mark; None where there is no mark."""
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._push(token)

    def mark(self) -> int:
        """Remember the text as it is. Until ``rewind``, tokens cost a little more."""
        self._log = []
        return len(self.tokens)

    def rewind(self, mark: int) -> None:
        """Take back every token since the mark, and forget the mark."""
        log, self._log = self._log or [], None
        while len(self.tokens) > mark:
            self._pop(log.pop())

    def suffixes(self) -> Iterator[tuple[int, int]]:
        """Give (state, length) of every suffix of the text that occurred before, longest first.

        Of suffixes that occurred at the same places only the longest is given.
        """
        state = self.link[self.last]
        while state > 0:
            yield state, self.length[state]
            state = self.link[state]

    def after(self, state: int) -> list[tuple[int, int, int]]:
        """What followed the pieces of a state: (token, how often, state), likeliest first.

        Of tokens that came equally often, the newest is first.
        """
        count, newest = self.count, self.newest
        found = [(token, count[at], at) for token, at in self.next[state].items()]
        if len(found) > 1:
            found.sort(key=lambda item: (-item[1], -newest[item[2]], item[0]))
        return found

    def likeliest(self, state: int) -> tuple[int, int, int, int] | None:
        """The first of ``after``, with how often anything followed before its state; None if nothing did."""
        count, newest, total, best = self.count, self.newest, 0, None
        for token, at in self.next[state].items():
            total += count[at]
            if best is None or (count[at], newest[at], -token) > (count[best[1]], newest[best[1]], -best[0]):
                best = token, at
        return None if best is None else (best[0], count[best[1]], total, best[1])

    def _state(self, length: int, count: int, newest: int, after: dict[int, int]) -> int:
        self.length.append(length)
        self.count.append(count)
        self.newest.append(newest)
        self.next.append(after)
        self.link.append(0)
        return len(self.next) - 1

    def _push(self, token: int) -> None:
        after, link, length = self.next, self.link, self.length
        if self._log is not None:
            self._log.append(self._before())
        # The old end of the text becomes an occurrence like any other.
        place, state = len(self.tokens) - 1, self.last
        for _ in range(HOPS):
            if state <= 0:
                break
            self.newest[state] = place
            state = link[state]
        state = self.last
        self.tokens.append(token)
        self.last = made = self._state(length[state] + 1, 0, -1, {})
        while state != -1 and token not in after[state]:
            after[state][token] = made
            state = link[state]
        if state != -1:
            old = after[state][token]
            if length[old] != length[state] + 1:
                if self._log is not None:
                    self._log[-1] = (*self._log[-1][:2], old)
                old = self._split(state, token, old)
            link[made] = old
        state = made
        for _ in range(HOPS):
            if state <= 0:
                break
            self.count[state] += 1
            state = link[state]

    def _split(self, state: int, token: int, old: int) -> int:
        """Part the shorter pieces of ``old``, which now end at one more place, from the longer."""
        part = self._state(self.length[state] + 1, self.count[old], self.newest[old], dict(self.next[old]))
        self.link[part] = self.link[old]
        self.link[old] = part
        while state != -1 and self.next[state].get(token) == old:
            self.next[state][token] = part
            state = self.link[state]
        return part

    def _before(self) -> _Push:
        newest, state = [], self.last
        for _ in range(HOPS):
            if state <= 0:
                break
            newest.append(self.newest[state])
            state = self.link[state]
        return self.last, newest, -1

    def _pop(self, push: _Push) -> None:
        before, newest, old = push
        made, token = self.last, self.tokens.pop()
        state = made
        for _ in range(HOPS):
            if state <= 0:
                break
            self.count[state] -= 1
            state = self.link[state]
        part = made + 1 if old >= 0 else -2
        state = before
        while state != -1 and self.next[state].get(token) in (made, part):
            if self.next[state][token] == made:
                del self.next[state][token]
            else:
                self.next[state][token] = old
            state = self.link[state]
        if old >= 0:
            self.link[old] = self.link[part]
        for table in (self.length, self.count, self.newest, self.next, self.link):
            del table[made:]
        self.last = state = before
        for value in newest:
            self.newest[state] = value
            state = self.link[state]
