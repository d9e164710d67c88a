"""What a harness asks of a model, on an engine: log-likelihoods of token ids, and answers to texts.

    scorer = Scorer(engine, "auto")
    scorer.log_likelihoods([((1, 2, 3), (4, 5))])    [(-3.2, True)]
    scorer.answers(["Q: ..."], [params])

Prompts are read as for an answer, by the engine and with the drafter's members listening, and one token is
generated behind each. So what is compared between drafters is what a server with that drafter would say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outpace.engine.engine import Engine
from outpace.engine.results import Counters
from outpace.engine.sequence import ActiveSequence
from outpace.errors import RequestError
from outpace.models.prompts import tokenizer_of
from outpace.params import SamplingParams

_ONE = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)


class Scorer:
    """Answers for one drafter.

    Args:
        drafter: method spec.
        batch: sequences at a time.

    Raises:
        RequestError: the model has no tokenizer, or is an encoder-decoder.
    """

    def __init__(self, engine: Engine, drafter: str, batch: int = 8) -> None:
        if engine.target.encodes:
            raise RequestError(f"{engine.target.name} is an encoder-decoder; only decoders are scored")
        self.tokenizer = tokenizer_of(engine.target, "scoring tasks")
        self.engine, self.drafter, self.batch = engine, drafter, batch
        self.longest = engine.target.max_positions
        self.counters: list[Counters] = []
        """Of every answer so far."""

    @property
    def begin(self) -> int:
        """The token before a text that nothing precedes: one that begins texts, else one that ends them."""
        bos = self.tokenizer.bos_id
        if bos is not None:
            return bos
        ends = sorted(self.engine.eos_ids)
        if not ends:
            raise RequestError(f"{self.engine.target.name} has no token that begins or ends a text")
        return ends[0]

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Token ids; a text whose first token is written in it, as chat templates do, gets no second one."""
        ids = self.tokenizer.encode(text, special=True if special is None else special)
        bos = self.tokenizer.bos_id
        twice = special is None and ids[:2] == [bos, bos] and bos is not None
        return ids[1:] if twice else ids

    def log_likelihoods(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, bool]]:
        """Of every continuation: its log-probability behind its context, and whether it is the likeliest.

        Contexts that are too long lose their beginning.

        Raises:
            RequestError: an empty context or continuation, or a continuation longer than the model takes.
        """
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        method = self.engine.method(self.drafter)

        def opened(numbers: Sequence[int]) -> Iterator[ActiveSequence]:
            for number in numbers:
                context, rest = pairs[number]
                if not context or not rest or len(rest) >= self.longest:
                    raise RequestError(
                        f"a continuation of {len(rest)} tokens behind {len(context)} cannot be scored; the "
                        f"model takes {self.longest}, and both need one at least"
                    )
                whole = (*context, *rest)[-self.longest :]
                request = self.engine.request(whole[:-1], _ONE)
                slot = self.engine.cache.open()
                row = self.engine.start_sequence(request, slot, method, self.engine.verifier(method, None))
                row.read_prompt = self._reader(found, number, whole, len(rest))
                yield row

        for start in range(0, len(pairs), self.batch):
            numbers = range(start, min(len(pairs), start + self.batch))
            for _ in self.engine.chunks(opened(numbers), method):
                pass
        return found

    def _reader(
        self, found: list[tuple[float, bool]], number: int, whole: Sequence[int], count: int
    ) -> Callable[[int, Tensor], None]:
        """Adds what is said of the last ``count`` tokens; rows that are read again count once."""
        done = len(whole) - count

        def read(start: int, logits_JV: Tensor) -> None:
            nonlocal done
            end = start + 1 + len(logits_JV)
            if end <= done:
                return
            logits_KV = logits_JV[done - start - 1 :].float()
            token_K = torch.tensor(whole[done:end], device=logits_KV.device)
            said_K = torch.log_softmax(logits_KV, -1).gather(-1, token_K[:, None])[:, 0]
            total, greedy = found[number]
            likeliest = bool((logits_KV.argmax(-1) == token_K).all())
            found[number] = total + float(said_K.double().sum()), greedy and likeliest
            done = end

        return read

    def answers(self, texts: Sequence[str], params: Sequence[SamplingParams]) -> list[str]:
        """Generate behind texts. A text that leaves no room for its answer loses its beginning.

        With a seed, sampled answers are the same with every drafter.
        """
        asked = []
        for text, own in zip(texts, params, strict=True):
            room = self.longest - min(own.max_new_tokens, self.longest // 2)
            asked.append(self.encode(text)[-room:])
        out = []
        for start in range(0, len(asked), self.batch):
            part = slice(start, start + self.batch)
            results = self.engine.generate(
                asked[part], [replace(one, n=1) for one in params[part]], drafter=self.drafter
            )
            self.counters += [result.counters for result in results]
            out += [result.text for result in results]
        return out
