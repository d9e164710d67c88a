"""The model that lm-evaluation-harness asks. The harness is imported here, when a task is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.bench.harness.scorer import Scorer
from outpace.errors import RequestError
from outpace.params import SamplingParams

USUAL = 256
"""Longest answer where a task does not say one."""
_KNOWN = ("top_p", "top_k", "min_p", "repetition_penalty")
_IGNORED = frozenset(
    {"do_sample", "until", "max_gen_toks", "temperature", "num_return_sequences", "use_cache"}
)


def settings(given: Mapping[str, Any], ends: Sequence[str], seed: int) -> SamplingParams:
    """What a task says of its answers, as sampling settings.

    Args:
        given: as the harness normalises them.
        ends: strings that end every answer.
        seed: of a sampled answer.

    Raises:
        RequestError: a setting that the engine does not have.
    """
    if unknown := sorted(given.keys() - _IGNORED - set(_KNOWN)):
        raise RequestError(f"a task asks for {unknown[0]}={given[unknown[0]]!r}, which is not supported")
    said = {name: given[name] for name in _KNOWN if given.get(name) is not None}
    temperature = float(given.get("temperature") or 0.0)
    neutral: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return SamplingParams(
        temperature=temperature,
        max_new_tokens=int(given.get("max_gen_toks", USUAL)),
        stop=tuple(dict.fromkeys(one for one in (*(given.get("until") or ()), *ends) if one)),
        seed=seed if temperature else None,
        **(neutral | said),
    )


def language_model(scorer: Scorer) -> Any:
    """An ``LM`` of the harness that asks a scorer."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs

    class EngineLM(TemplateLM):  # type: ignore[misc, unused-ignore]
        """Scores and answers through `Scorer`."""

        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = scorer.tokenizer

        @property
        def eot_token_id(self) -> int:
            return min(scorer.engine.eos_ids, default=scorer.begin)

        @property
        def prefix_token_id(self) -> int:
            return scorer.begin

        @property
        def max_length(self) -> int:
            return scorer.longest

        @property
        def tokenizer_name(self) -> str:
            return str(scorer.engine.target.name).replace("/", "__")

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return scorer.encode(string, add_special_tokens)

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            text = scorer.tokenizer.chat_text(chat_history, generation_prompt=add_generation_prompt)
            if add_generation_prompt:
                return text
            last = chat_history[-1]["content"]  # goes on: what ends a message is cut off
            return text[: text.rindex(last) + len(last)] if last else text

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
            found = scorer.log_likelihoods([(context, rest) for _, context, rest in requests])
            for (key, _, _), one in zip(requests, found, strict=True):
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, one)
            return found

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            out = []
            for request in requests:
                (text,) = request.args
                windows = utils.get_rolling_token_windows(
                    token_list=scorer.encode(text, False),
                    prefix_token=scorer.begin,
                    max_seq_len=scorer.longest - 1,
                    context_len=1,
                )
                pairs = [utils.make_disjoint_window(window) for window in windows]
                total = sum(one for one, _ in scorer.log_likelihoods(pairs))
                out.append(total)
                self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            return out

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            texts, params = [], []
            for number, request in enumerate(requests):
                text, given = request.args
                texts.append(text)
                params.append(settings(normalize_gen_kwargs(given, USUAL), (), number))
            found = scorer.answers(texts, params)
            for request, answer in zip(requests, found, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, answer)
            return found

    return EngineLM()
