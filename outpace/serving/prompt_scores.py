"""Log-probabilities of a prompt, taken from the passes that read it."""

from __future__ import annotations

from torch import Tensor

from outpace.sampling import TokenLogprobs, logprobs

_ROWS = 32  # of logits whose log-probabilities are taken at a time, since that takes copies of them


class PromptScores:
    """Notes what the target thought of every token of one prompt."""

    def __init__(self, ids: tuple[int, ...], alternatives: int) -> None:
        self._ids, self._alternatives = ids, alternatives
        self.found: list[TokenLogprobs | None] = [None] * len(ids)
        """One per token; the first has none."""

    def read(self, start: int, logits_JV: Tensor) -> None:
        """Take the logits of the tokens from ``start`` on; text that is read again changes nothing."""
        following = self._ids[start + 1 : start + 1 + len(logits_JV)]
        for lo in range(0, len(following), _ROWS):
            part = following[lo : lo + _ROWS]
            place = start + 1 + lo
            self.found[place : place + len(part)] = logprobs(
                logits_JV[lo : lo + len(part)], part, self._alternatives
            )
