"""``outpace chat``: a conversation in the terminal that keeps what it has read."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from outpace.cli import show
from outpace.cli.drafting import DrafterOptions
from outpace.cli.generate import LOSSY, check_text
from outpace.cli.options import AutoOptions, SamplingOptions, notes, option
from outpace.errors import OutpaceError

if TYPE_CHECKING:
    from outpace.engine.conversation import Conversation
    from outpace.engine.engine import Engine
    from outpace.engine.results import Result
    from outpace.params import SamplingParams

_COMMANDS = {
    "/reset": "forget the conversation and start a new one",
    "/stats": "what the conversation cost so far",
    "/help": "this list",
    "/quit": "leave; so does Ctrl-D",
}

EXAMPLES = """
Examples:

  outpace chat

  outpace chat --system "Answer in one sentence." --temperature 0.7

  echo "What is a monad?" | outpace chat --max-new-tokens 80
"""


def chat(
    *,
    model: AutoOptions,
    drafting: DrafterOptions,
    system: str | None = option(
        None, "What the model is told before the conversation.", metavar="TEXT", panel="Prompt"
    ),
    sampling: SamplingOptions,
) -> None:
    """Talk with a model; each line is a message. Ctrl-C stops an answer, Ctrl-D leaves."""
    params = sampling.params()
    if system is not None:
        check_text(system, "--system")
    engine = model.load(drafter=drafting.spec, allow_lossy=drafting.allow_lossy)
    from outpace.models.prompts import tokenizer_of

    tokenizer_of(engine.target, "a chat")  # said before the first message
    params.check_vocab(engine.target.vocab_size, engine.eos_ids)
    engine.remember()
    for line in notes(engine, params):
        show.note(f"outpace: {line}")
    talk = Talk(engine, params, system, sampling.reproducible)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # input() then edits lines and recalls them
        show.hint("outpace: /help lists commands")
    try:
        for line in _lines():
            if line in ("/quit", "/exit"):
                break
            talk.take(line)
    finally:
        talk.close()


def _lines() -> Iterator[str]:
    """Lines of the user, with a prompt on a terminal; blank ones are left out."""
    on_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # whoever takes the line says what is wrong
    while True:
        try:
            line = input("> " if on_terminal else "")
        except EOFError:
            if on_terminal:
                show.write("\n")
            return
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            show.write("\n")
            continue
        if line.strip():
            yield line.strip()


class Talk:
    """A conversation, its commands, and its counters."""

    def __init__(
        self, engine: Engine, params: SamplingParams, system: str | None, reproducible: bool | None
    ) -> None:
        self._engine = engine
        self._settings: dict[str, Any] = {"params": params, "system": system, "reproducible": reproducible}
        self._dialogue = self._begin()
        self._results: list[Result] = []
        self._num_cached = 0

    def _begin(self) -> Conversation:
        from outpace.engine.conversation import Conversation

        return Conversation(self._engine, **self._settings)

    def close(self) -> None:
        self._dialogue.close()

    def take(self, line: str) -> None:
        """Obey a command, or answer a message.

        Raises:
            OutpaceError: a message that cannot be answered, where nobody can mend it.
        """
        try:
            check_text(line, "the message")
            if line.startswith("/"):
                self._obey(line)
            else:
                self._answer(line)
        except OutpaceError as error:
            if not sys.stdin.isatty():
                raise
            show.note(f"outpace: {error}")

    def _obey(self, line: str) -> None:
        if line == "/reset":
            self._dialogue.close()
            self._dialogue = self._begin()
            self._results, self._num_cached = [], 0
            show.note("outpace: a new conversation")
        elif line == "/stats":
            show.note(f"outpace: {self._stats()}")
        elif line == "/help":
            for name, what in _COMMANDS.items():
                show.note(f"  {name:8}{what}")
        else:
            near = difflib.get_close_matches(line, _COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_COMMANDS)}"
            raise OutpaceError(f"unknown command {line!r}; {hint}")

    def _answer(self, message: str) -> None:
        result = None
        # send() is inside as well: the first message makes tokenizer and drafter ready, which takes a while.
        with (
            _stop_at_ctrl_c() as stopped,
            contextlib.closing(self._dialogue.send(message)) as chunks,  # type: ignore[type-var]
        ):
            for chunk in () if stopped else chunks:
                show.write(chunk.text)
                result = chunk.result
                if stopped:
                    break
        show.write("\n")
        if result is None:
            show.note("outpace: stopped; this turn is not kept")
        else:
            self._results.append(result)
            self._num_cached += result.cached_tokens

    def _stats(self) -> str:
        if not self._results:
            return "nothing said yet"
        tokens = sum(len(r.tokens) for r in self._results)
        later = tokens - len(self._results)
        decode = sum(r.seconds - r.prefill_seconds for r in self._results)
        passes = sum(r.counters.passes for r in self._results)
        read = sum(r.prompt_tokens for r in self._results)
        return (
            f"{show.count(len(self._results), 'turn')}, {show.count(tokens, 'token')}, "
            f"{later / decode if decode > 0 else 0.0:.1f} tokens/s, "
            f"mean emitted {later / passes if passes else 1.0:.2f}, "
            f"{self._num_cached} of {read} prompt tokens were kept from earlier turns, "
            f"drafter {self._results[0].drafter}"
            + ("" if all(r.lossless for r in self._results) else f", {LOSSY}")
        )


@contextlib.contextmanager
def _stop_at_ctrl_c() -> Iterator[list[bool]]:
    """Let Ctrl-C ask for an end instead of raising: a pass is never torn apart.

    Yields:
        A list that is empty until Ctrl-C was pressed. Pressed again, it raises.
    """
    stopped: list[bool] = []

    def ask(signum: int, frame: Any) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(True)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
