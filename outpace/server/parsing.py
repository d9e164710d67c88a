"""From a body to requests that a service takes: names, defaults, limits.

Runs off the event loop: encoding a long prompt takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outpace import registry
from outpace.config import MethodSpec
from outpace.errors import PromptTooLong
from outpace.models.chat import check_messages
from outpace.models.prompts import check_ids
from outpace.params import SamplingParams
from outpace.server import reasoning
from outpace.server.bounds import Bounds
from outpace.server.client_request import ClientRequest
from outpace.server.errors import ApiError, too_long
from outpace.server.limits import Limits
from outpace.server.schema import (
    MOST_MESSAGES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Generation,
    Speculation,
    TokenizeBody,
    Tool,
)
from outpace.server.structured_output import StructuredOutput, structured_output
from outpace.server.tools import Toolbox, check_calls
from outpace.serving.service import Service

if TYPE_CHECKING:
    from outpace.server.grammar import Grammars

_COMPLETION_TOKENS = 16  # what the API promises where a completion names no length
_TEMPERATURE = 1.0  # likewise, where the model's authors say nothing
_ECHOED = {"refusal", "annotations", "audio", "function_call", "reasoning_content"}
"""Keys that a client sends back with an answer of ours, as null."""
_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
_TAKEN = {
    "messages": "give the field messages",
    "tools": "give the field tools",
    "add_generation_prompt": "give the field add_generation_prompt",
    "generation_prompt": "give the field add_generation_prompt",
    "most_tokens": "leave it out",
    "special_in_messages": "give the field special_tokens_in_messages",
    "self": "leave it out, since a template means itself by that",
}
"""Variables that a request may not put into a chat template, and what to do."""


class BodyParser:
    """Reads bodies for one service.

    Args:
        grammars: compiles what ``response_format`` asks for; None where that is not installed.
    """

    def __init__(
        self,
        service: Service,
        name: str,
        limits: Limits,
        grammars: Grammars | None = None,
        thinking_marks: Sequence[str] = (),
    ) -> None:
        self.service, self.name, self.limits, self.grammars = service, name, limits, grammars
        self.target = service.engine.target
        self.marks = reasoning.marks_of(self.target, thinking_marks)
        if self.target.tokenizer is not None:
            _ = self.target.tokenizer.literal  # half a second, which no stream shall wait for

    def completion(self, body: CompletionBody) -> ClientRequest:
        """Read a completion.

        Raises:
            ApiError, OutpaceError: what is wrong with it.
        """
        self.check_model(body.model)
        if body.best_of not in (None, 1):
            raise ApiError(
                400,
                f"best_of must be 1, got {body.best_of}; answers are not ranked, ask for n of them",
                "best_of",
            )
        if body.stream and body.echo and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs is no stream; set stream to false", "stream")
        prompts = _prompts(body.prompt)
        self._check_count(len(prompts), body.n or 1)
        encoded = [self.service.engine.encode(prompt) for prompt in prompts]
        for ids in encoded:
            check_ids(ids, self.target, "the prompt")
        texts = None
        if body.echo:
            texts = tuple(self._text(p) for p in prompts)
        wanted = self._client_request(
            body, encoded, body.max_tokens, body.logprobs, continues=True, echo=texts
        )
        if body.max_tokens == 0:
            wanted = replace(wanted, silent=True)
        if body.echo and body.logprobs is not None:
            scored = [replace(one, prompt_logprobs=body.logprobs) for one in wanted.requests]
            wanted = replace(wanted, requests=tuple(scored))
        return wanted

    def chat(self, body: ChatBody) -> ClientRequest:
        """Read a chat; raises as ``completion``."""
        self.check_model(body.model)
        self._check_count(1, body.n or 1)
        longest = body.max_completion_tokens or body.max_tokens
        if None not in (body.max_tokens, body.max_completion_tokens) and longest != body.max_tokens:
            raise ApiError(
                400,
                f"max_tokens is {body.max_tokens} and max_completion_tokens {longest}; give one of them",
                "max_tokens",
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs; set it to true", "top_logprobs")
        tools = None if body.tool_choice == "none" else body.tools
        parallel = body.parallel_tool_calls is not False
        must = body.tool_choice not in (None, "none", "auto")
        calls = bool(tools) or must
        form = self._toolbox.structured_output(tools, body.tool_choice, parallel) if calls else None
        ids = self._messages(body, body.messages, tools)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        wanted = self._client_request(body, [ids], longest, logprobs, continues=False, form=form)
        ruled = wanted.requests[0].params.grammar is not None
        told = reasoning.reasoning_of(self.target, self.marks, ids, body.thinking_token_budget, ruled)
        syntax = self._toolbox.call_syntax(tools, parallel, must) if tools else None
        return replace(wanted, call_syntax=syntax, reasoning=told)

    def tokenize(self, body: TokenizeBody) -> list[int]:
        """Token ids of a text or of messages."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give prompt or messages, one of the two", "prompt")
        if body.messages is not None:
            ids = self._messages(body, body.messages, body.tools)
            self._check_lengths([ids], None, "messages")
            return ids
        assert body.prompt is not None
        encoded: list[int] = self.tokenizer.encode(
            body.prompt, special=body.add_special_tokens, most=self._most
        )
        self._check_lengths([encoded], None, "prompt")
        return encoded

    def detokenize(self, body: DetokenizeBody) -> str:
        self.check_model(body.model)
        self._check_lengths([body.tokens], None, "tokens")
        wrong = max(body.tokens, default=0)
        if wrong >= self.target.vocab_size:
            raise ApiError(
                400, f"tokens holds {wrong}, but ids go from 0 to {self.target.vocab_size - 1}", "tokens"
            )
        return str(self.tokenizer.decode(body.tokens, skip_special=body.skip_special_tokens))

    @property
    def bounds(self) -> Bounds:
        """What bodies are checked against, for those who read the description."""
        limits = self.limits
        return Bounds(
            vocab_size=self.target.vocab_size,
            context=self._most,
            prompt=min(self._most, self.service.longest - 1, limits.prompt_tokens or self._most),
            answers=min(limits.answers, self.service.max_queue),
            new_tokens=limits.new_tokens,
            logprobs=limits.logprobs,
            stops=limits.stops,
            drafters=self.service.drafters,
            template_keys=tuple(_TAKEN),
            messages=self._most_messages,
            thinks=bool(self.marks),
        )

    @property
    def _most(self) -> int:
        return self.target.max_positions - 1

    @property
    def _most_messages(self) -> int:
        """Templates write some tokens around each, so more would not fit."""
        return max(1, min(MOST_MESSAGES, self._most // 16))

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model than the one that is served."""
        if name is not None and name != self.name:
            raise ApiError(404, f"the model {name!r} is not served here; use {self.name!r}", "model")

    @property
    def tokenizer(self) -> Any:
        if self.target.tokenizer is None:
            raise ApiError(400, f"{self.target.name} has no tokenizer; give token ids", "prompt")
        return self.target.tokenizer

    def _text(self, prompt: str | Sequence[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return str(self.tokenizer.decode(prompt))

    def _messages(
        self,
        body: ChatBody | TokenizeBody,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] | None,
    ) -> list[int]:
        variables = body.chat_template_kwargs
        wrong = sorted(_TAKEN.keys() & (variables or {}).keys())
        if wrong:
            raise ApiError(
                400,
                f"chat_template_kwargs may not hold {wrong[0]!r}; {_TAKEN[wrong[0]]}",
                "chat_template_kwargs",
            )
        if len(messages) > self._most_messages:
            raise too_long(f"{len(messages)} messages are more than fit into {self._most} tokens", "messages")
        kept: list[dict[str, Any]] = [_message(i, one) for i, one in enumerate(messages)]
        plain: list[dict[str, Any]] | None = None
        if tools or any(one.get("tool_calls") or one.get("role") == "tool" for one in kept):
            kept, plain = self._toolbox.conversation(check_messages(kept), tools)
        try:
            ids: list[int] = self.tokenizer.chat(
                kept,
                generation_prompt=body.add_generation_prompt,
                tools=plain,
                most_tokens=self._most,
                special_in_messages=body.special_tokens_in_messages,
                **(variables or {}),
            )
        except PromptTooLong as error:
            raise too_long(str(error), "messages") from error
        return ids

    @cached_property
    def _toolbox(self) -> Toolbox:
        return Toolbox(self.tokenizer)

    def _check_count(self, prompts: int, n: int) -> None:
        if prompts == 0:
            raise ApiError(400, "prompt holds no prompt; give one", "prompt")
        most = min(self.limits.answers, self.service.max_queue)
        if prompts * n > most:
            raise ApiError(
                400,
                f"{prompts * n} answers are asked for, and at most {most} per "
                "request are made; ask for fewer",
                "n",
            )

    def _client_request(
        self,
        body: Generation,
        prompts: Sequence[Sequence[int]],
        longest: int | None,
        logprobs: int | None,
        *,
        continues: bool,
        echo: tuple[str, ...] | None = None,
        form: StructuredOutput | None = None,
    ) -> ClientRequest:
        limits = self.limits
        if logprobs is not None and logprobs > limits.logprobs:
            raise ApiError(
                400,
                f"at most {limits.logprobs} alternatives per token are reported, "
                f"got {logprobs}; ask for fewer",
                "logprobs" if continues else "top_logprobs",
            )
        self._check_lengths(prompts, longest, "prompt" if continues else "messages")
        speculation = body.speculation or Speculation()
        settings = self._settings(body, logprobs, form)
        reference = None if body.prediction is None else self._reference(body.prediction.text)
        requests = []
        for ids in prompts:
            room = max(1, self.service.longest - len(ids))
            usual = _COMPLETION_TOKENS if continues else room
            most = min(room, usual, limits.new_tokens or room) if longest is None else max(1, longest)
            one = self.service.request(
                ids,
                SamplingParams(**settings, max_new_tokens=most),
                drafter=self._drafter(body, speculation),
                draft_tokens=speculation.num_speculative_tokens,
                reference=reference,
                reproducible=speculation.reproducible,
            )
            requests.append(replace(one, continues=continues, traced=speculation.trace))
        options = body.stream_options
        if options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream; set it to true", "stream_options")
        if speculation.trace and not body.stream:
            raise ApiError(400, "speculation.trace needs stream; set it to true", "speculation.trace")
        return ClientRequest(
            requests=tuple(requests),
            n=body.n or 1,
            stream=bool(body.stream),
            include_usage=options is not None and options.include_usage,
            running_usage=options is not None and options.continuous_usage_stats,
            token_ids=body.return_token_ids,
            detailed=speculation.detailed,
            traced=speculation.trace,
            predicted=body.prediction is not None,
            echo=echo,
        )

    def _reference(self, text: str) -> list[int]:
        try:
            ids: list[int] = self.tokenizer.encode(text, special=False, most=self._most)
        except PromptTooLong as error:
            raise ApiError(
                400, f"prediction has more than {self._most} tokens; shorten it", "prediction"
            ) from error
        return ids

    def _check_lengths(self, prompts: Sequence[Sequence[int]], longest: int | None, param: str) -> None:
        limits = self.limits
        over = max(len(ids) for ids in prompts)
        if limits.prompt_tokens is not None and over > limits.prompt_tokens:
            raise too_long(
                f"a prompt has {over} tokens, and at most {limits.prompt_tokens} are read; shorten it", param
            )
        if over > self._most:
            raise too_long(str(PromptTooLong(self._most, over, self.target.why_shorter)), param)
        if longest is not None and limits.new_tokens is not None and longest > limits.new_tokens:
            raise ApiError(
                400,
                f"answers have at most {limits.new_tokens} tokens, got max_tokens={longest}; ask for fewer",
                "max_tokens",
            )

    def _settings(
        self, body: Generation, logprobs: int | None, form: StructuredOutput | None
    ) -> dict[str, Any]:
        """Arguments of SamplingParams; what the body leaves out stays out."""
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        for name, entries in (("stop", stop), ("stop_token_ids", body.stop_token_ids or [])):
            if len(entries) > self.limits.stops:
                raise ApiError(
                    400,
                    f"{name} holds {len(entries)} entries, and at most "
                    f"{self.limits.stops} are looked for; give fewer",
                    name,
                )
        given = {
            "temperature": self._temperature(body.temperature),
            "top_p": body.top_p,
            "top_k": body.top_k,
            "min_p": body.min_p,
            "repetition_penalty": body.repetition_penalty,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "logit_bias": None if body.logit_bias is None else _bias(body.logit_bias),
            "allowed_tokens": body.allowed_token_ids,
            "seed": _seed(body.seed),
            "n": body.n,
            "min_tokens": body.min_tokens,
            "stop": tuple(stop) or None,
            "stop_token_ids": body.stop_token_ids,
            "logprobs": logprobs,
        }
        settings = {key: value for key, value in given.items() if value is not None}
        settings["include_stop"] = body.include_stop_str_in_output
        settings["ignore_eos"] = body.ignore_eos
        if (grammar := self._grammar(body, form)) is not None:
            settings["grammar"] = grammar
        budget = body.thinking_token_budget
        return settings | reasoning.settings(self.marks, budget, grammar is not None, self.name)

    def _temperature(self, asked: float | None) -> float | None:
        """What the client says, else the model's authors, else the API."""
        defaults = self.target.defaults
        said = defaults is not None and not (defaults.temperature is None and defaults.do_sample is None)
        return _TEMPERATURE if asked is None and not said else asked

    def _drafter(self, body: Generation, speculation: Speculation) -> str | None:
        if speculation.drafter is not None or body.prediction is None:
            return speculation.drafter
        for spec in self.service.drafters:
            if registry.can("drafter", MethodSpec.parse(spec).name, registry.READS_REFERENCE):
                return spec
        raise ApiError(
            400, "prediction needs a drafter that reads it, and none was started; leave it out", "prediction"
        )

    def _grammar(self, body: Generation, form: StructuredOutput | None) -> Any:
        """The compiled grammar that the body asks for, if any; ``form`` is that of its tools."""
        shape = structured_output(body, self.limits.schema_chars, form)
        if shape is None:
            return None
        if self.grammars is None:
            raise ApiError(
                400,
                f"{shape.field} needs the package llguidance: pip install "
                "'outpace[grammar]' where the server runs",
                shape.field,
            )
        for name, value in (
            ("min_tokens", body.min_tokens),
            ("ignore_eos", body.ignore_eos),
            ("allowed_token_ids", body.allowed_token_ids),
        ):
            if value:
                raise ApiError(400, f"{name} and {shape.field} exclude each other; drop one of the two", name)
        return self.grammars.compile(shape)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt, or several, as a list."""
    one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    return [prompt] if one else list(prompt)


def _message(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the keys that templates know; those of an echoed answer are dropped."""
    kept = {k: v for k, v in message.items() if not (v is None and k in _ECHOED | {"tool_calls"})}
    if kept.get("annotations") == []:
        del kept["annotations"]
    check_calls(number, kept)
    unknown = sorted(kept.keys() - _MESSAGE)
    if unknown:
        field = f"messages.{number}.{unknown[0]}"
        raise ApiError(400, f"unknown field {field!r}; leave it out", field)
    return kept


def _seed(given: int | None) -> int | None:
    """A seed of ours; negative and very large ones, which some clients send, are seeds too."""
    return None if given is None else given % (1 << 64)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 19 and str(int(token)) == token):
            raise ApiError(
                400, f"logit_bias: {token[:40]!r} is no token id; give whole numbers from 0", "logit_bias"
            )
    return {int(token): bias for token, bias in given.items()}
