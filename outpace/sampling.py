"""From logits to distributions: every sampling setting, for target and draft alike.

The order of the processors is that of transformers, and of vLLM but for min-p:

1. logit bias, then allowed and banned tokens, grammar, min_tokens: what may be generated at all;
2. repetition, then presence and frequency penalties: they read the model's own scale, so they come before
   processors of the user's own, and these before
3. temperature;
4. top-k, top-p, min-p, each on the distribution that the one before it left: they speak of the
   probabilities that would be drawn from.

Entries of equal logit rank by ascending id, so that truncation is deterministic. Values are
float32, or float64 where the logits are (enumeration).

Shape letters: V vocabulary or draft vocabulary, S support, R rows, F nodes of a frontier, K ids.
C tokens seen so far, J rows of one sequence's tree (the pending token first).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from outpace.errors import LogitsError, RequestError
from outpace.kernels.draws import softmax, truncate
from outpace.law import Law
from outpace.params import Grammar, Matcher, Processor, SamplingParams
from outpace.rows import TokenLogprobs as TokenLogprobs
from outpace.rows import as_float, at_least, best_rows, largest, rank
from outpace.rows import logprobs as logprobs
from outpace.types import ROOT, Draft, Scored, Verdict

_LARGEST = float(torch.finfo(torch.float32).max)
_GREEDY_BELOW = 1e-5  # logits divided by less overflow; vLLM draws the same line


class Warp:
    """The sampling settings of one sequence, applied to rows of logits.

    Its history (which tokens were seen, how often, how many were generated) advances through
    ``advance`` alone, when tokens are committed. Evaluating a path changes nothing.

    Args:
        params: None counts as neutral.
        eos_ids: banned until ``min_tokens`` were generated, unless ``ignore_eos``.
        rule: in the place of the grammar of ``params``.

    Raises:
        RequestError: a setting names an id outside the vocabulary, or all tokens are banned.
    """

    _matcher: Matcher | None = None

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        eos_ids: frozenset[int],
        vocab_size: int,
        rule: Grammar | None = None,
    ) -> None:
        params.check_vocab(vocab_size, eos_ids)
        self.params, self.vocab_size = params, vocab_size
        self.generated = 0
        """Tokens committed after the prompt."""
        self.temperature = params.temperature or 0.0
        self.truncation = params.top_k or 0, params.top_p or 1.0, params.min_p or 0.0
        self._repetition = params.repetition_penalty or 1.0
        self.greedy = self.temperature < _GREEDY_BELOW
        """Whether every distribution is one-hot."""
        ends = params.end_ids(eos_ids) if params.min_tokens else frozenset()
        self._end_K = _ids([token for token in ends if token < vocab_size])
        self._ban_K = _ids(params.banned_tokens)
        allowed, banned = params.allowed_tokens, params.banned_tokens
        self._allow_K = None if allowed is None else _ids(allowed - banned)
        self._bias_K = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)
        self._penalized = self._repetition != 1 or bool(params.presence_penalty or params.frequency_penalty)
        rule = rule or params.grammar
        self._matcher = None if rule is None else rule.begin()
        self._allowed: dict[tuple[int, ...], tuple[Tensor | None, int | None]] = {}
        self._text = list(prompt) if params.processors else []
        edits = self._penalized or params.processors or banned or params.logit_bias
        self._always = bool(edits) or allowed is not None
        seen = dict.fromkeys(prompt if self._repetition != 1 else ())
        self._place = {token: i for i, token in enumerate(seen)}
        self._seen_C = torch.tensor(list(self._place), dtype=torch.int64)
        self._count_C = torch.zeros(len(self._place))

    @property
    def plain(self) -> bool:
        """Whether the distribution of every row from now on is the argmax of its raw logits."""
        return self.greedy and self.raw

    @property
    def raw(self) -> bool:
        """Whether every distribution from now on is a softmax of raw logits, but for its truncation."""
        return self._matcher is None and not self._edits(0)

    def truncates(self, width: float = math.inf) -> bool:
        """Whether top-k, top-p or min-p leaves less than all of so many entries."""
        return 0 < self.truncation[0] < width or self.truncation[1] < 1 or self.truncation[2] > 0

    @property
    def ruled(self) -> bool:
        """Whether a grammar or a budget of thinking says what may follow."""
        return self._matcher is not None

    def certain(self, path: Sequence[int] = ()) -> int | None:
        """The token that alone may follow a path, whatever the model says; None: there are several."""
        return self._rule(path)[1]

    def expects(self, path: Sequence[int] = ()) -> Sequence[int]:
        """Tokens that the rules hold likely after a path. A guess: they need not be allowed."""
        told = getattr(self._matcher, "expects", None)
        return () if told is None else told(path)

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Whether the rules allow a token after a path that they allow."""
        allowed_V, _ = self._rule(path)
        return allowed_V is None or bool(allowed_V[token])

    def _rule(self, path: Sequence[int]) -> tuple[Tensor | None, int | None]:
        """What may follow a path, and the one token if there is but one; kept until the text goes on."""
        if self._matcher is None:
            return None, None
        found = self._allowed.get(key := tuple(path))
        if found is None:
            allowed_V, only = self._matcher.allowed(path), None
            if allowed_V is not None and int(allowed_V.count_nonzero()) == 1:
                only = int(allowed_V.to(torch.uint8).argmax())
            found = self._allowed[key] = allowed_V, only
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        """Count committed tokens. Called once per commit with all of them, the pending included.

        Cost: host only; O(tokens seen) if a penalty is on, else O(1).
        """
        self.generated += len(tokens)
        if self.params.processors:
            self._text += tokens
        if self._matcher is not None:
            self._allowed.clear()
            self._matcher.advance(tokens)
        if self._penalized:
            self._seen_C, self._count_C, fresh = self._history(tokens)
            self._place.update(fresh)

    def law(self, logits_V: Tensor, path: Sequence[int] = (), id_V: Tensor | None = None) -> Law:
        """The distribution of the token after the committed text and a path of drafted tokens.

        Args:
            logits_V: one row, before any processor; any float type. Not changed.
            path: drafted tokens from the first guess down to the node.
            id_V: int64 target ids of the columns, for a draft vocabulary; None: the ids.

        Returns:
            One-hot at temperature 0. After top-k, top-p, min-p or ``allowed_tokens`` the distribution on
            its support, in ascending column order; else all columns.

        Raises:
            LogitsError: the row holds a NaN or an infinity, or nothing but -inf.
            RequestError: the settings leave no distribution: they forbid every token, or overflow.

        Cost: one host sync; truncation by torch needs two or more. A row of 49152 takes 50 us, truncated up
        to twice that; a flat row is the worst case of top-p: its entries are sorted.
        """
        only = self.certain(path)
        other = self.params.processors or only in self.params.banned_tokens
        if only is not None and not other and (id_V is None or bool((id_V == only).any())):
            return Law.one_hot(only, as_float(logits_V[:0]).dtype)
        x_V, ids = self._scores(logits_V, path, id_V)
        if self.greedy:
            (best,), (value,) = best_rows([x_V[None]])
            self._check(value, logits_V)
            return Law.one_hot(best if ids is None else int(ids[best]), x_V.dtype)
        if self.truncates(len(x_V)):
            if (found := truncate(x_V, self.temperature, *self.truncation)) is not None:
                return Law(found[1], found[0] if ids is None else ids[found[0]])
            self._check(float(x_V.max()) / self.temperature, logits_V)
            kept = self._truncated(x_V)
            x_V, ids = x_V[kept], kept if ids is None else ids[kept]
        if (prob_S := softmax(x_V, self.temperature)) is None:
            self._check(float(x_V.max()) / self.temperature, logits_V)
        assert prob_S is not None
        return Law(prob_S, ids)

    def guess(self, logits_V: Tensor, path: Sequence[int] = (), id_V: Tensor | None = None) -> Law:
        """As ``law``, for a draft. Where the settings leave it no distribution any will do."""
        try:
            return self.law(logits_V, path, id_V)
        except RequestError:
            return Law.one_hot(0 if id_V is None else int(id_V[0]), as_float(logits_V[:0]).dtype)

    def _check(self, largest: float, logits_V: Tensor) -> None:
        """Raise unless the largest score of a row, made of these logits, is finite in float32."""
        if abs(largest) <= _LARGEST:
            return
        if not math.isfinite(highest := float(logits_V.max())):
            raise LogitsError(
                f"the model's logits are not finite (largest: {highest:g}), so no token can be drawn; "
                "check its weights, or load it in another dtype"
            )
        raise RequestError(
            f"the sampling settings leave no distribution for the next token: its largest score is "
            f"{largest:g}; check grammar, allowed_tokens, banned_tokens, logit_bias and penalties"
        )

    def ranking(
        self, logits_FV: Tensor, paths: Sequence[Sequence[int]], k: int, id_V: Tensor | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The k likeliest tokens of each row after the same processors, best first.

        Args:
            paths: of each row, as for ``law``.
            k: wanted; a row where fewer may be generated gives fewer.

        Returns:
            Per row the tokens, and their probabilities at temperature 1 without truncation.

        Cost: one host sync for all rows, one per row while a setting depends on history or
        bans something. 16 rows of 49152, k = 4: 0.65 ms, of which 0.48 ms are the softmax.
        """
        if self.ruled or any(self._edits(len(path)) for path in paths):
            rows = [self._scores(x_V, p, id_V) for x_V, p in zip(logits_FV, paths, strict=True)]
            ranked = [rank(x_V[None], ids, k)[0] for x_V, ids in rows]
        else:
            ranked = rank(as_float(logits_FV), id_V, k)
        return [[t for t, _ in row] for row in ranked], [[p for _, p in row] for row in ranked]

    def _edits(self, depth: int) -> bool:
        """Whether anything but temperature and truncation acts at this depth."""
        return self._always or self._too_short(depth)

    def _too_short(self, depth: int) -> bool:
        return self.generated + depth < self.params.min_tokens and len(self._end_K) > 0

    def _scores(
        self, logits_V: Tensor, path: Sequence[int], id_V: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits after processors 1 and 2, and the target ids of the entries."""
        x_V, known_V = as_float(logits_V), id_V
        allowed_V, _ = self._rule(path)
        if allowed_V is None and not self._edits(len(path)):
            return x_V, id_V
        if id_V is None and len(x_V) < self.vocab_size:
            id_V = torch.arange(len(x_V), device=x_V.device)
        # Spread over the target's ids, so that a draft vocabulary needs no inverse table.
        full_V = x_V.new_full((self.vocab_size,), -math.inf)
        full_V[slice(None) if id_V is None else id_V] = x_V
        on = x_V.device
        full_V[self._bias_K.to(on)] += self._bias.to(on, x_V.dtype)
        full_V[self._ban_K.to(on)] = -math.inf
        if allowed_V is not None:
            full_V[~allowed_V.to(on)] = -math.inf
        if self._too_short(len(path)):
            full_V[self._end_K.to(on)] = -math.inf
        if self._penalized:
            self._penalize(full_V, path)
        for process in self.params.processors:
            full_V = self._processed(process, full_V, path)
        if known_V is not None and self.params.processors:  # tokens that a drafter does not know stay out
            full_V = torch.full_like(full_V, -math.inf).index_copy(0, known_V, full_V[known_V])
        ids = id_V if self._allow_K is None else self._allow_K.to(on)
        edited_S = full_V if ids is None else full_V[ids]
        if known_V is not None and not bool((edited_S > -math.inf).any()):
            # No column may be generated. Any distribution is right: the target refuses what it gives.
            return x_V, id_V
        return edited_S, ids

    def _processed(self, process: Processor, full_V: Tensor, path: Sequence[int]) -> Tensor:
        result_V = process((*self._text, *path), full_V)
        if not isinstance(result_V, Tensor) or result_V.shape != full_V.shape:
            raise RequestError(
                f"processor {getattr(process, '__name__', type(process).__name__)} must return logits "
                f"[{len(full_V)}], got {getattr(result_V, 'shape', type(result_V).__name__)}"
            )
        return result_V.to(full_V.dtype)

    def _penalize(self, full_V: Tensor, path: Sequence[int]) -> None:
        """Apply the penalties in place, at the tokens seen."""
        seen_C, count_C, _ = self._history(path)
        seen_C, count_C = seen_C.to(full_V.device), count_C.to(full_V.device, full_V.dtype)
        x_C = full_V[seen_C]
        r = self._repetition
        x_C = torch.where(x_C < 0, x_C * r, x_C / r)
        x_C -= self.params.presence_penalty * count_C.clamp_max(1)
        x_C -= self.params.frequency_penalty * count_C
        full_V[seen_C] = x_C

    def _history(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor, dict[int, int]]:
        """Tokens seen, their counts in the output, and the places of new ones, after ``tokens``."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._place]
        fresh = {token: len(self._place) + i for i, token in enumerate(new)}
        at = [self._place[t] if t in self._place else fresh[t] for t in tokens]
        seen_C = torch.cat((self._seen_C, torch.tensor(new, dtype=torch.int64)))
        count_C = torch.cat((self._count_C, torch.zeros(len(new))))
        count_C.index_add_(0, torch.tensor(at, dtype=torch.int64), torch.ones(len(at)))
        return seen_C, count_C, fresh

    def _truncated(self, x_V: Tensor) -> Tensor:
        """Columns that top-k, top-p and min-p leave, ascending.

        No sort of the whole row: top-k reads only blocks whose maximum is large enough. Top-p
        sorts the tokens above a floor that falls until they weigh enough. The floor ends below
        (1 - top_p) / V at the latest: tokens below that weigh at most 1 - top_p together.
        """
        top_k, top_p, min_p = self.truncation
        least = x_V.max() + self.temperature * math.log(min_p) if min_p else None
        if 0 < top_k < len(x_V):
            at_S = largest(x_V, top_k)
            prob_S = (x_V[at_S] / self.temperature).softmax(0)
        elif top_p < 1:
            prob_V = (x_V / self.temperature).softmax(0)
            floor, enough = (1 - top_p) / 8, False
            while not enough:
                floor /= 8
                at_S = at_least(prob_V, floor)
                mass = float(prob_V[at_S].double().sum())
                # Half the bound of the last resort, so that rounding cannot lose a token.
                enough = mass >= top_p or floor * len(x_V) <= 0.5 * (1 - top_p)
            at_S = at_S[x_V[at_S].sort(descending=True, stable=True).indices]
            prob_S = prob_V[at_S]
        else:
            assert least is not None
            return at_least(x_V, least)
        keep = len(at_S)
        if top_p < 1:
            above_S = prob_S.double().cumsum(0) - prob_S
            keep = max(1, int((above_S < top_p).sum()))
        if least is not None:
            keep = min(keep, int((x_V[at_S] >= least).sum()))
        return at_S[:keep].sort().values


class Laws:
    """Target distributions at the rows of one sequence's tree, each warped when it is first read.

    Args:
        logits_JV: row 0 follows the pending token, row n + 1 follows node n.
        warp: of the sequence, before this step's tokens are committed.
        best: index and value of the largest logit of each row, where that is the distribution
            (``warp.plain``).
    """

    def __init__(
        self,
        logits_JV: Tensor,
        warp: Warp,
        draft: Draft,
        best: tuple[Sequence[int], Sequence[float]] | None = None,
    ) -> None:
        assert len(draft) < len(logits_JV if best is None else best[0]), (logits_JV.shape, len(draft))
        self._logits_JV, self._warp, self._draft, self._best = logits_JV, warp, draft, best
        self._law: dict[int, Law] = {}
        self._undefined: set[int] = set()

    def certain(self, node: int) -> int | None:
        """The only token that may follow ``node``, if that is known without its distribution."""
        if self._best is None or not math.isfinite(self._best[1][node + 1]):
            return None
        return self._best[0][node + 1]

    def law(self, node: int) -> Law:
        """The distribution of the token that follows ``node`` (ROOT: follows the pending token).

        Raises:
            LogitsError, RequestError: ROOT has none, see ``Warp.law``.
        """
        law = self._law.get(node)
        if law is None:
            row_V = self._logits_JV[node + 1]
            token = self.certain(node)
            if token is not None:
                wide = row_V.dtype == torch.float64
                law = Law.one_hot(token, row_V.dtype if wide else torch.float32)
            else:
                try:
                    law = self._warp.law(row_V, self._draft.path_tokens(node))
                except (LogitsError, RequestError):
                    if node == ROOT:
                        raise
                    self._undefined.add(node)
                    law = Law.one_hot(0, as_float(row_V[:0]).dtype)
            self._law[node] = law
        return law

    def defined(self, verdict: Verdict) -> Verdict:
        """The verdict up to the first node kept that has no distribution. A text may end before it
        needs one; where it goes on, that node is the next ROOT.
        """
        lost = (i for i, node in enumerate(verdict.kept, 1) if node in self._undefined)
        return verdict.cut(next(lost, len(verdict.emitted)))


def laws_of_batch(scored: Scored, warps: Sequence[Warp], drafts: Sequence[Draft]) -> list[Laws]:
    """Target distributions of a whole pass.

    Args:
        scored: of the pass. Feeds that asked for no logits (unfinished prompts) are skipped.
        warps: one per feed with logits, in order.
        drafts: likewise; their rows must all have been wanted.

    Returns:
        One object per warp, valid as long as ``scored``.

    Cost: one argmax and one host sync for the rows of all plain sequences together; the other
    rows cost nothing until they are read.
    """
    if len(warps) == 1 and scored.best is not None and warps[0].plain and len(scored.start_B) == 2:
        return [Laws(scored.logits_TV, warps[0], drafts[0], scored.best)]
    spans = [(lo, hi) for lo, hi in pairwise(scored.start_B) if hi > lo]
    plain = [slice(*s) for s, warp in zip(spans, warps, strict=True) if warp.plain]
    found = scored.best
    if plain and found is None:
        whole = len(plain) == len(spans)
        found = best_rows([scored.logits_TV] if whole else [scored.logits_TV[part] for part in plain])
    laws, start = [], 0
    for (lo, hi), warp, draft in zip(spans, warps, drafts, strict=True):
        best = None
        if found is not None and warp.plain:
            rows = slice(start, start + hi - lo) if scored.best is None else slice(lo, hi)
            best, start = (found[0][rows], found[1][rows]), start + hi - lo
        laws.append(Laws(scored.logits_TV[lo:hi], warp, draft, best))
    return laws


def _ids(tokens: Collection[int]) -> Tensor:
    return torch.tensor(sorted(tokens), dtype=torch.int64)
