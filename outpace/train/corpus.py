"""From files to chat prompts: rows that ask something, and texts with a task around a passage.

Rows of JSON and JSONL files are recognised by their keys:

    messages, or conversations      a chat; what follows its last question is left out
    prompt                          the question itself
    instruction [input] [output]    a task with its material
    question [answer]
    query, docs                     a question about numbered passages
    text, code                      a programming task (MBPP)
    text                            a text, for ``read_texts`` alone

Everything else is plain text: one prompt a line, or texts to cut into passages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from outpace.errors import RequestError
from outpace.files import expanded, parse_json, read_text
from outpace.train.templates import passage_prompts

Message = Mapping[str, str]
_SEPARATOR = "<|endoftext|>"
_SHORT, _LONG = 250, 12_000  # characters of a passage
_CODE = (".py", ".js", ".ts", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".rb", ".sh")
_ALPACA = re.compile(r"### Instruction:\s*(.*?)\s*(?:### Input:\s*(.*?)\s*)?### Response:", re.S)
_DOCS = 4  # passages of one prompt
_SECOND_TURN = 6  # one in so many rows with an answer opens a conversation for the next


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusPrompt:
    """One conversation that the target is to go on with."""

    messages: tuple[Message, ...]
    source: int
    """Which file it came from; see ``Source``."""

    @property
    def question(self) -> str:
        return self.messages[-1]["content"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file that was read, for the manifest."""

    name: str
    sha256: str
    prompts: int
    licence: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256, "prompts": self.prompts, "licence": self.licence}


def read_corpus(
    prompts: Sequence[str] = (), texts: Sequence[str] = (), *, exclude: Sequence[str] = ()
) -> tuple[list[CorpusPrompt], list[Source]]:
    """Read files into prompts, in an order that mixes the files.

    Args:
        prompts: files of rows that ask something, ``FILE`` or ``FILE::LICENCE``.
        texts: files of texts; every passage gets a task.
        exclude: questions that must not occur, for example those to be measured with.

    Returns:
        Prompts, each once, and the files. The same files give the same prompts.

    Raises:
        RequestError: no file, no prompt in one, an empty prompt, or rows of an unknown kind.
    """
    if not prompts and not texts:
        raise RequestError("no prompts; give files with --prompts or --texts")
    banned = [_plain(text) for text in exclude]
    seen = set(banned)
    files: list[list[CorpusPrompt]] = []
    sources: list[Source] = []
    for given, read in [*((p, read_prompts) for p in prompts), *((t, read_texts) for t in texts)]:
        name, _, licence = given.partition("::")
        path = expanded(name)
        kept: list[CorpusPrompt] = []
        count = 0
        for messages in read(path):
            count += 1
            question = _plain(messages[-1]["content"])
            if question in seen or any(text in question for text in banned):
                continue
            seen.add(question)
            kept.append(CorpusPrompt(messages=messages, source=len(sources)))
        if not kept:
            why = "that is not there already" if count else "at all"
            raise RequestError(f"{path} gives no prompt {why}; leave it out")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        sources.append(Source(name=path.name, sha256=digest, prompts=len(kept), licence=licence or None))
        files.append(_shuffled(kept))
    return _interleaved(files), sources


def read_prompts(path: Path) -> Iterator[tuple[Message, ...]]:
    """Conversations of one file, each ending with a question.

    Raises:
        RequestError: an empty prompt, or a row of an unknown kind, with its number.
    """
    if path.suffix not in (".json", ".jsonl"):
        for line in read_text(path).splitlines():
            if line.strip():
                yield _ask(line.strip())
        return
    before: tuple[Message, ...] = ()
    for number, row in enumerate(_rows(path), 1):
        messages = _conversation(row, number)
        if messages is None or not messages:
            known = "messages, prompt, instruction, question, query or text and code"
            raise RequestError(
                f"{path} row {number} has keys {', '.join(map(str, row))}; need {known}"
                " (texts alone go to --texts)"
            )
        if not messages[-1]["content"].strip():
            raise RequestError(f"{path} row {number}: the prompt is empty; remove the row")
        yield messages
        answer = row.get("output") or row.get("answer") or row.get("code")
        if before and len(messages) == 1:
            yield (*before, *messages)
        before = ()
        if isinstance(answer, str) and len(messages) == 1 and number % _SECOND_TURN == 0:
            before = (*messages, {"role": "assistant", "content": _cleaned(answer)})


def read_texts(path: Path) -> Iterator[tuple[Message, ...]]:
    """Prompts around the passages of one file; see `outpace.train.templates`.

    Raises:
        RequestError: rows of JSON without ``text``.
    """
    code = path.suffix in _CODE
    number = 0
    for text in _texts(path):
        for passage in _passages(text, code):
            for prompt in passage_prompts(passage, number, path.suffix[1:] if code else None):
                yield _ask(prompt)
            number += 1


def digest_of(prompts: Sequence[CorpusPrompt]) -> str:
    """Short hash of all prompts in their order."""
    text = json.dumps([[dict(m) for m in prompt.messages] for prompt in prompts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _ask(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _conversation(row: Mapping[str, Any], number: int) -> tuple[Message, ...] | None:
    """The conversation of a row, up to its last question; None if its kind is unknown."""
    if isinstance(turns := row.get("messages", row.get("conversations")), list):
        chat = [_message(turn) for turn in turns if isinstance(turn, Mapping)]
        while chat and chat[-1]["role"] != "user":
            chat.pop()
        return tuple(chat)
    if isinstance(prompt := row.get("prompt"), str):
        return _ask(prompt)
    if isinstance(task := row.get("instruction"), str):
        return _ask(f"{task}\n\n{row.get('input') or ''}".strip())
    if isinstance(question := row.get("question"), str):
        return _ask(question)
    if isinstance(query := row.get("query"), str):
        return _ask(_with_docs(query, row.get("docs"), number))
    if isinstance(text := row.get("text"), str) and isinstance(code := row.get("code"), str):
        return _ask(_program(text, code, row.get("test_list"), number))
    return None


def _message(turn: Mapping[str, Any]) -> Message:
    role = str(turn.get("role", turn.get("from", "user")))
    role = {"human": "user", "gpt": "assistant"}.get(role, role)
    return {"role": role, "content": str(turn.get("content", turn.get("value", "")))}


def _with_docs(query: str, docs: Any, number: int) -> str:
    """A question with a few of its passages; a query that holds its own material stands alone."""
    if found := _ALPACA.search(query):
        return "\n\n".join(part for part in found.groups() if part)
    passages = [doc for doc in docs if isinstance(doc, str)] if isinstance(docs, list) else []
    if len(passages) < 2:
        return query
    first = number % max(1, len(passages) - _DOCS + 1)
    listed = [f"[{i}] {doc}" for i, doc in enumerate(passages[first : first + _DOCS], 1)]
    return "\n\n".join([*listed, f"Use these passages to answer: {query}"])


def _program(text: str, code: str, tests: Any, number: int) -> str:
    """A programming task: write it, write it so that a test passes, or explain a solution."""
    kind = number % 4
    if kind == 1 and isinstance(tests, list) and tests:
        return f"{text}\n\nThe following must hold:\n\n```python\n{tests[0]}\n```"
    solution = code.replace("\r\n", "\n").replace("\t", "    ").strip()
    if kind == 2:
        return f"How does this Python code work?\n\n```python\n{solution}\n```"
    if kind == 3:
        return (
            "Add a docstring and comments to this Python code and show all of it.\n\n"
            f"```python\n{solution}\n```"
        )
    return text


def _cleaned(answer: str) -> str:
    """An answer without the notes for calculators that GSM8K has."""
    return re.sub(r"<<.*?>>", "", answer).replace("####", "Answer:").replace("\r\n", "\n")


def _rows(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON list, or of a file of JSON lines."""
    text = read_text(path)
    rows: list[Any] = []
    number = 1
    try:
        if text.lstrip().startswith("["):
            rows = parse_json(text)
        else:
            for number, line in enumerate(text.split("\n"), 1):  # noqa: B007
                if line.strip():
                    rows.append(parse_json(line))
    except ValueError as error:
        raise RequestError(f"{path} line {number} is no JSON ({error}); mend the file") from None
    wrong = next((i for i, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
    if wrong is not None:
        raise RequestError(f"{path} row {wrong} is no JSON object; give objects with named fields")
    return rows


def _texts(path: Path) -> Iterator[str]:
    if path.suffix in (".json", ".jsonl"):
        for number, row in enumerate(_rows(path), 1):
            if not isinstance(row.get("text"), str):
                raise RequestError(f"{path} row {number} has keys {', '.join(map(str, row))}; need text")
            yield row["text"]
        return
    yield from read_text(path).split(_SEPARATOR)


def _passages(text: str, code: bool) -> Iterator[str]:
    """Stretches of a text of different lengths, from one end of a sentence or block to another."""
    pattern = r"\n\n(?=\S)" if code else r"\n\s*\n|(?<=[.!?])\s+(?=[\"'A-Z])"
    if code:
        pieces = [(piece, "\n\n") for piece in re.split(pattern, text)]
    else:
        cuts = [0, *(m.end() for m in re.finditer(pattern, text)), len(text)]
        pieces = [(text[a:b], "") for a, b in pairwise(cuts)]
    held = ""
    for piece, glue in pieces:
        # What a passage begins with chooses its length: half are under 660 characters, a quarter above 2000.
        coin = hashlib.sha256(held[:80].encode()).digest()[0] / 255
        limit = _SHORT * (_LONG / _SHORT) ** (coin**2)
        if held and len(held) + len(piece) > limit:
            if len(held) >= _SHORT:
                yield held.strip("\n") if code else _tidy(held)
            held = ""
        held += piece[:_LONG] + glue
    if len(held) >= _SHORT:
        yield held.strip("\n") if code else _tidy(held)


def _tidy(text: str) -> str:
    """Paragraphs without the line breaks inside, and without the marks of WikiText."""
    text = text.replace(" <unk> ", " ").replace(" @-@ ", "-").replace(" @,@ ", ",")
    text = text.replace(" @.@ ", ".").replace(" ,", ",").replace(" .", ".")
    blocks = (re.sub(r"\s*\n\s*", " ", block).strip() for block in re.split(r"\n\s*\n", text))
    return "\n\n".join(block for block in blocks if block)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _shuffled(prompts: list[CorpusPrompt]) -> list[CorpusPrompt]:
    return sorted(prompts, key=lambda p: hashlib.sha256(p.question.encode("utf-8", "replace")).digest())


def _interleaved(files: Sequence[Sequence[CorpusPrompt]]) -> list[CorpusPrompt]:
    """Mix files so that of any beginning a file has a part like the root of its size.

    Otherwise one large file of one kind would be nearly all that a short training sees.
    """
    timed = [
        ((rank + 0.5) / len(prompts) ** 0.5, source, prompt)
        for source, prompts in enumerate(files)
        for rank, prompt in enumerate(prompts)
    ]
    return [prompt for _, _, prompt in sorted(timed, key=lambda item: item[:2])]
