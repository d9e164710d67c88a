"""``generate`` of transformers with any drafter: ``model.generate(..., custom_generate=outpace.hf.decode)``.

transformers prepares a call and hands over the model in memory, token ids, logits processors and
stopping criteria. Processors and criteria are honoured whatever they do, row by row and guess by guess;
what cannot be honoured is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.config import DEFAULT_DRAFTER
from outpace.engine.engine import Engine
from outpace.errors import RequestError
from outpace.files import write_whole
from outpace.models.hf.config import digest
from outpace.params import SamplingParams

_KEPT = "_outpace_engines"
_CACHES = ("past_key_values", "cache_params")
_TAKEN = frozenset("attention_mask position_ids cache_position use_cache logits_to_keep".split()).union(
    _CACHES
)
_STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
"""Processors whose result depends on earlier calls, so that they cannot be asked about guesses."""
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_MODES = ("greedy_search", "sample", "assisted_generation")
_COARSE = (torch.bfloat16, torch.float16)
_WARPERS = (
    ("TemperatureLogitsWarper", "temperature"),
    ("TopKLogitsWarper", "top_k"),
    ("TopPLogitsWarper", "top_p"),
    ("MinPLogitsWarper", "min_p"),
)

_FOLDER = '''"""Speculative decoding by outpace: the output keeps its distribution."""

from functools import partial

import outpace


def generate(model, streamer=None, **kwargs):
    given = {name: value for name, value in kwargs.items() if value is not None}
    return model.generate(custom_generate=partial(outpace.hf.decode, streamer=streamer), **given)
'''


class _Engines(dict[str, tuple[str, Engine]]):
    """Engines of one model, kept on it and freed with it; copies of the model begin without."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Engines:
        return _Engines()

    def __reduce__(self) -> tuple[type[_Engines], tuple[()]]:
        return _Engines, ()


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    generation_config: Any = None,
    drafter: str = DEFAULT_DRAFTER,
    backend: str = "auto",
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Generate from a model of transformers; pass it as ``custom_generate``.

    ``drafter`` and ``backend`` are given to ``model.generate`` beside it. A streamer is bound, since
    transformers keeps it back: ``custom_generate=functools.partial(decode, streamer=streamer)``.

    Args:
        input_ids: int64 [batch, tokens], padded on the left as transformers wants it.
        drafter: method spec.
        backend: ``auto`` runs the model as it is, without a copy of its weights. ``own`` runs it with
            the decoder of this library; see `Engine.load`.
        streamer: gets the prompt, then tokens as they are settled; batch of 1 only.

    Returns:
        As ``generate``: ids int64 [batch, longest], padded on the right, or with
        ``return_dict_in_generate`` a ``GenerateDecoderOnlyOutput`` with ``sequences``.

    Raises:
        RequestError: a wish that would be ignored; the line names it. Such are beams, a mask that hides
            more than padding, an input besides text, an output besides ids, and a processor with a state.

    A sampled text has the distribution of ``generate``, and ``torch.manual_seed`` names it. Tokens are others
    than those of ``generate`` with the same seed.
    Cost: the first call for a model finds out how it can be run, in about seven short passes.
    """
    if model.config.is_encoder_decoder:
        raise RequestError("outpace.hf.decode runs decoders; load an encoder-decoder with Engine.load")
    _check(input_ids, generation_config, model_kwargs, streamer, logits_processor or ())
    engine = _engine(model, drafter, backend)
    starts = _starts(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    prompts = [ids[start:] for ids, start in zip(input_ids.tolist(), starts, strict=True)]
    params = [
        _params(
            input_ids,
            row,
            len(prompt),
            logits_processor or (),
            stopping_criteria or (),
            generation_config,
            model.dtype in _COARSE,
        )
        for row, prompt in enumerate(prompts)
    ]
    if streamer is not None:
        streamer.put(input_ids.cpu())
    answers: list[list[int]] = [[] for _ in prompts]
    for chunk in engine.stream(prompts, params, drafter=drafter):
        answers[chunk.index] += chunk.tokens
        if streamer is not None:
            streamer.put(torch.tensor(chunk.tokens))
    if streamer is not None:
        streamer.end()
    longest = max(map(len, answers))
    pad = getattr(generation_config, "_pad_token_tensor", None)
    fill = 0 if pad is None else int(pad)
    tail = torch.tensor([[*answer, *[fill] * (longest - len(answer))] for answer in answers])
    sequences = torch.cat((input_ids, tail.to(input_ids.device)), 1)
    if not generation_config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)


def _engine(model: Any, drafter: str, backend: str) -> Engine:
    """The engine of a model, made anew when its weights have changed."""
    if _KEPT not in vars(model):
        setattr(model, _KEPT, _Engines())
    engines: _Engines = getattr(model, _KEPT)
    now = digest(model)
    if backend not in engines or engines[backend][0] != now:
        engines[backend] = now, Engine.load(model, drafter=drafter, backend=backend)
    return engines[backend][1]


def _check(
    input_ids: Tensor, config: Any, model_kwargs: dict[str, Any], streamer: Any, processors: Sequence[Any]
) -> None:
    """Refuse what would be ignored."""
    unknown = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _TAKEN)
    if unknown:
        raise RequestError(
            f"{unknown[0]} is no input of outpace.hf.decode, which takes text only; leave it out"
        )
    for name in _CACHES:
        if (held := model_kwargs.get(name)) is not None and _is_filled(held):
            raise RequestError(f"{name} holds tokens, which outpace.hf.decode cannot use; leave it out")
    if config.num_beams and config.num_beams > 1:
        raise RequestError(f"num_beams={config.num_beams}: outpace.hf.decode has no beam search; set it to 1")
    mode = str(config.get_generation_mode().value)
    if mode not in _MODES:
        raise RequestError(
            f"{mode}: outpace.hf.decode decodes greedily or samples; leave out what asks for it"
        )
    for name in _OUTPUTS:
        if getattr(config, name, None):
            raise RequestError(f"{name} is not given by outpace.hf.decode; leave it out")
    if streamer is not None and len(input_ids) > 1:
        raise RequestError(
            f"a streamer takes one sequence, got a batch of {len(input_ids)}; stream one by one"
        )
    for processor in processors:
        if type(processor).__name__ in _STATEFUL:
            raise RequestError(
                f"{type(processor).__name__} depends on earlier calls, so it cannot be asked about "
                "guesses; leave it out"
            )


def _starts(input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> list[int]:
    """Where the prompts begin, behind their padding; refuse a mask or positions of another kind."""
    shown = torch.ones_like(input_ids) if mask is None else mask[:, : input_ids.shape[1]]
    shown, place = shown != 0, torch.arange(shown.shape[1], device=shown.device)
    start = shown.int().argmax(1)
    if not torch.equal(shown, place >= start[:, None]):
        raise RequestError(
            "attention_mask hides tokens of a prompt, and outpace.hf.decode reads prompts whole; "
            "pad on the left"
        )
    if position_ids is not None and bool(((position_ids != place - start[:, None]) & shown).any()):
        raise RequestError(
            "position_ids must count the tokens of each prompt from 0 for outpace.hf.decode; leave them out"
        )
    found: list[int] = start.tolist()
    return found


def _params(
    input_ids: Tensor,
    row: int,
    length: int,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    config: Any,
    coarse: bool,
) -> SamplingParams:
    """The settings of one row of the batch; ``coarse``: logits are often equal."""
    rules = list(processors)
    warp: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
    # transformers puts temperature, top-k, top-p and min-p last, in this order; ours do the same, faster.
    for name, field in reversed(_WARPERS):
        if rules and type(rules[-1]).__name__ == name and config.do_sample and _usual(rules[-1]):
            warp[field] = getattr(rules.pop(), field)
    own: list[Callable[..., Tensor]] = [partial(_process, rule, input_ids, row, length) for rule in rules]
    if (coarse or rules) and warp.get("top_k"):  # rules, too, may make logits equal
        own.append(partial(_top_k, warp.pop("top_k")))
    # A user's own takes the place of the one that transformers would make.
    longest = min((one.max_length for one in criteria if _is_length(one)), default=config.max_length)
    stops = [one for one in criteria if not _is_length(one)]
    return SamplingParams(
        **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, **warp},
        processors=tuple(own),
        stop_when=partial(_stops, stops, input_ids, row) if stops else None,
        ignore_eos=True,
        max_new_tokens=max(1, longest - input_ids.shape[1]),
        seed=int(torch.randint(1 << 62, ())),
    )


def _is_filled(cache: Any) -> bool:
    """Whether a cache holds tokens; states alone have no length."""
    try:
        return bool(cache.get_seq_length())
    except (AttributeError, ValueError):
        return bool(cache.has_previous_state())


def _is_length(criterion: Any) -> bool:
    return type(criterion).__name__ == "MaxLengthCriteria"


def _usual(warper: Any) -> bool:
    """Whether a warper forbids what it drops, may drop all tokens but one, and has a value that ours take."""
    forbids = getattr(warper, "filter_value", -math.inf) == -math.inf
    inside = getattr(warper, "top_p", 1.0) > 0
    return forbids and inside and getattr(warper, "min_tokens_to_keep", 1) == 1


def _as_batch(input_ids: Tensor, row: int, answer: Sequence[int]) -> Tensor:
    """The ids that transformers would show: those of the row, padding included, in every row of the batch.

    Processors may read the number of a row, and the size of the batch.
    """
    own = torch.cat((input_ids[row], torch.tensor(answer, dtype=torch.int64, device=input_ids.device)))
    return own.expand(len(input_ids), -1)


def _process(
    rule: Any, input_ids: Tensor, row: int, length: int, tokens: Sequence[int], logits_V: Tensor
) -> Tensor:
    """One processor of transformers, asked about one row, whose prompt has ``length`` tokens."""
    with torch.inference_mode(False), torch.no_grad():  # a rule may change what it gets in place
        scores = logits_V.expand(len(input_ids), -1).clone()
        result: Tensor = rule(_as_batch(input_ids, row, tokens[length:]), scores)[row]
    return result


def _top_k(k: int, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    """Top-k as transformers does it: tokens as likely as the last one stay too."""
    least = logits_V.topk(min(k, len(logits_V))).values[-1]
    return logits_V.masked_fill(logits_V < least, -math.inf)


def _stops(
    criteria: Sequence[Callable[..., Any]], input_ids: Tensor, row: int, answer: Sequence[int]
) -> bool:
    """Whether one of the criteria of transformers ends a row."""
    ids = _as_batch(input_ids, row, answer)
    # A criterion may remember, so each is asked, as transformers does.
    return any([bool(torch.as_tensor(one(ids, None)).expand(len(input_ids))[row]) for one in criteria])


def write_folder(out: Path) -> list[Path]:
    """Write ``custom_generate/`` into a folder, for ``model.generate(custom_generate=FOLDER)``.

    Files of the same names are replaced; others, such as those of a model, stay.
    """
    folder = out / "custom_generate"
    files = {"generate.py": _FOLDER, "requirements.txt": "outpace\n"}
    for name, text in files.items():
        write_whole(folder / name, text)
    return [folder / name for name in files]
