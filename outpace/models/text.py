"""Text to tokens and back: encoding, chat templates, and decoding while tokens still arrive.

Built on the ``tokenizers`` library alone. Decoding is our own and works on bytes, so that a
stream and a whole text can never disagree.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from outpace.errors import ModelError, PromptTooLong, RequestError
from outpace.models.chat import check_messages, compile_template, render
from outpace.models.fields import brief, read_json, token_ids
from outpace.models.literal import LiteralEncoder
from outpace.models.text_files import ROLES, chat_templates, more_special, named_tokens, surround_as_said

SPACE_MARK = "\u2581"
"""What SentencePiece writes for a space."""
_SHORT = 1 << 12
"""Characters that are encoded with the interpreter lock held: some milliseconds."""
_PIECE = 1 << 14
"""Characters of a long text that are counted at a time."""
_CUTS = 1.1
"""Cutting a text into pieces makes no more than so many times its tokens."""


class Tokenizer:
    """A model's own tokenizer; holds no state of any text."""

    vocab_size: int
    """Tokens it knows; the model's embedding may have more rows, which decode to nothing."""
    bos_id: int | None
    """The token that begins a text."""
    eos_ids: frozenset[int]
    """Every token that ends a text."""
    special_ids: frozenset[int]
    """Tokens that are never part of a text that a person reads."""
    chat_template: str | None
    """The template of ``chat``, in jinja2; None for a model without one."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str] | None = None,
        special: Iterable[str] = (),
        eos_ids: Iterable[int] = (),
        templates: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap a tokenizer of the ``tokenizers`` library, which belongs to this object from now on.

        Args:
            backend: the tokenizer; padding and truncation are switched off.
            named: special tokens by role, for example ``{"eos_token": "</s>"}``. Those the
                vocabulary lacks are left out.
            eos_ids: ids that end a text beside ``eos_token``.
            templates: chat templates; ``default``, and possibly ``tool_use``.

        Raises:
            ModelError: the way it decodes is not supported.
        """
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._named = {
            role: token for role, token in (named or {}).items() if backend.token_to_id(token) is not None
        }
        added = backend.get_added_tokens_decoder()
        known = {token.content for token in added.values() if token.special}
        wanted = [*self._named.values(), *special]
        extra = [t for t in wanted if t not in known and backend.token_to_id(t) is not None]
        if extra:
            backend.add_special_tokens(
                [tokenizers.AddedToken(token, special=True, normalized=False) for token in extra]
            )
            added = backend.get_added_tokens_decoder()
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_id = self._id_of("bos_token")
        eos_id = self._id_of("eos_token")
        self.eos_ids = frozenset(eos_ids) | ({eos_id} if eos_id is not None else set())
        self._templates = dict(templates or {})
        self.chat_template = self._templates.get("default")
        self._compiled: dict[str, Any] = {}
        self._alphabet, self._drops_first_space = _decoding(backend)
        self._bytes: dict[int, bytes] = {}

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """Of the ``tokenizers`` library; read only."""
        return self._backend

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json and what lies beside it in a model folder.

        Raises:
            ModelError: a file is missing, corrupt, or of a kind that is not supported.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{folder} holds no tokenizer.json; save its tokenizer with save_pretrained "
                "of a fast tokenizer"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"cannot read {path}: {brief(error)}") from error
        config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
        try:
            named = named_tokens(config)
            special, templates = more_special(config), chat_templates(folder, config)
        except (KeyError, TypeError, AttributeError, OSError, UnicodeDecodeError) as error:
            raise ModelError(f"the tokenizer files of {folder} are corrupt: {brief(error)}") from error
        surround_as_said(backend, config, named)
        files = (read_json(folder / "generation_config.json"), read_json(folder / "config.json"))
        return cls(
            backend,
            named=named,
            special=special,
            eos_ids=[i for file in files for i in token_ids(file, "eos_token_id")],
            templates=templates,
        )

    @classmethod
    def from_transformers(cls, tokenizer: Any) -> "Tokenizer":
        """Copy a fast tokenizer of transformers that is already in memory.

        Raises:
            ModelError: it is not backed by the ``tokenizers`` library.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ModelError(
                f"tokenizer {type(tokenizer).__name__} is not a fast tokenizer of transformers; "
                "give one backed by the tokenizers library"
            )
        template = tokenizer.chat_template
        templates = template if isinstance(template, Mapping) else {"default": template}
        named = {role: str(getattr(tokenizer, role)) for role in ROLES if _has(tokenizer, role)}
        return cls(
            tokenizers.Tokenizer.from_str(backend.to_str()),
            named=named,
            special=[str(token) for token in tokenizer.all_special_tokens],
            templates={name: text for name, text in templates.items() if text},
        )

    def encode(self, text: str, *, special: bool = True, most: int | None = None) -> list[int]:
        """Turn text into token ids; special tokens written in the text are recognised.

        Args:
            text: any text that has a UTF-8 form; the empty text gives only what ``special`` adds.
            special: add the tokens that the model expects around a text (often the first one).
            most: refuse a text that is sure to have more tokens. Reading it takes time and memory
                for about so many tokens, however long it is.

        Raises:
            PromptTooLong: more than ``most`` tokens. A text that is only a little longer may pass.
            RequestError: not a string, or one with half a surrogate pair.

        Effects: a long text is encoded with the interpreter lock released.
        """
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text has half a surrogate pair at character {error.start}; it has no UTF-8 form"
            ) from error
        self._check_length(text, most)
        return _encoded(self._backend, text, special)

    def _check_length(self, text: str, most: int | None) -> None:
        if most is not None and len(text) > _PIECE and self._exceeds(text, most):
            raise PromptTooLong(most)

    def _exceeds(self, text: str, most: int) -> bool:
        """Whether a text has more tokens for sure; reads no more of it than that takes."""
        left = _CUTS * most + len(self._named)
        for start in range(0, len(text), _PIECE):
            left -= len(_encoded(self._backend, text[start : start + _PIECE], special=False))
            if left < 0:
                return True
        return False

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """Turn token ids into text.

        Bytes that are not UTF-8 become one U+FFFD per malformed stretch.

        Args:
            ids: any ids; those outside the vocabulary stand for nothing.
            continues: the ids continue a text. Otherwise SentencePiece models drop one space at
                the start, as they add one when they encode.
        """
        stream = TextStream(self, skip_special=skip_special, continues=continues)
        return stream.push(ids) + stream.flush()

    def token_bytes(self, id: int) -> bytes:
        """Give the bytes that a token stands for; nothing for an id outside the vocabulary."""
        known = self._bytes.get(id)
        if known is None:
            known = self._bytes[id] = self._spell(self._backend.id_to_token(id))
        return known

    def text_stream(self, *, skip_special: bool = True, continues: bool = False) -> "TextStream":
        """Begin to decode a text whose tokens arrive in portions; arguments as in ``decode``."""
        return TextStream(self, skip_special=skip_special, continues=continues)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Write a conversation as the text that the model was trained on.

        Args:
            generation_prompt: end with the opening of the assistant's answer.
            tools: JSON schemas of functions that the model may call.
            variables: more values for the template, for example ``enable_thinking=False``.

        Raises:
            RequestError: no template, a bad message, or a template that refuses the messages.
        """
        checked = check_messages(messages)
        source = self._templates.get("tool_use") if tools else None
        source = source or self.chat_template
        if source is None:
            raise RequestError("this model has no chat template; give a raw prompt instead of messages")
        if source not in self._compiled:
            self._compiled[source] = compile_template(source)
        values = {
            **self._named,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": generation_prompt,
            **variables,
        }
        return render(self._compiled[source], checked, **values)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        most_tokens: int | None = None,
        special_in_messages: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Turn a conversation into token ids; as ``chat_text``, then encoded.

        Args:
            messages: as for ``chat_text``, like the arguments that are not named here.
            most_tokens: refuse a conversation that is sure to have more.
            special_in_messages: whether a special token that is written in a message, a tool or a
                variable is that token, as in the template. Otherwise it is text.

        Raises:
            PromptTooLong: as ``encode``.
            RequestError: as ``chat_text``; a special token that cannot be spelled as text.
        """
        messages, given = check_messages(messages), {**variables, "tools": tools}
        literal = None if special_in_messages else self.literal
        if literal is None or not literal.finds([messages, given]):
            text = self.chat_text(messages, generation_prompt=generation_prompt, **given)
            return self.encode(text, special=False, most=most_tokens)
        hidden = literal.hidden(given)
        text = self.chat_text(literal.hidden(messages), generation_prompt=generation_prompt, **hidden)
        self._check_length(literal.shown(text), most_tokens)
        return literal.encode(text)

    @cached_property
    def literal(self) -> LiteralEncoder:
        """Encodes conversations that special tokens are written in; made when first asked for."""
        return LiteralEncoder(self._backend, self.special_ids, lambda b, text: _encoded(b, text, False))

    def _id_of(self, role: str) -> int | None:
        token = self._named.get(role)
        found: int | None = None if token is None else self._backend.token_to_id(token)
        return found

    def _spell(self, token: str | None) -> bytes:
        if token is None:
            return b""
        if self._alphabet is None:
            return _spell_piece(token)
        if self._alphabet and all(char in self._alphabet for char in token):
            return bytes(self._alphabet[char] for char in token)
        # Without any alphabet the vocabulary holds whole words, which are set apart by spaces.
        return (b"" if self._alphabet else b" ") + token.encode()


class TextStream:
    """Decodes one text from tokens that arrive in portions; cost is linear in the text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False) -> None:
        """Begin a text; arguments as in ``Tokenizer.decode``."""
        self._spell = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_first_space = tokenizer._drops_first_space and not continues
        self._at_start = self._drops_first_space

    def push(self, ids: Iterable[int]) -> str:
        """Take more tokens and give the text that is certain now.

        A character whose bytes are not all there yet is held back. So pushes and one ``flush``
        concatenate to what ``Tokenizer.decode`` gives for all the tokens.
        """
        new = b"".join([self._spell(id) for id in ids if id not in self._skipped])
        if self._at_start and new:
            self._at_start = False
            new = new.removeprefix(b" ")
        return self._decoder.decode(new)

    def flush(self) -> str:
        """End the text: give what was held back, as U+FFFD; the stream is empty again."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._at_start = self._drops_first_space
        return rest


def _has(tokenizer: Any, role: str) -> bool:
    return getattr(tokenizer, role, None) is not None


def _encoded(backend: tokenizers.Tokenizer, text: str, special: bool) -> list[int]:
    """Token ids. A batch is encoded without the interpreter lock, a single text with it."""
    if len(text) <= _SHORT:
        ids: list[int] = backend.encode(text, add_special_tokens=special).ids
    else:
        ids = backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
    return ids


def byte_alphabet() -> dict[str, int]:
    """Give the character that byte-level vocabularies write for each byte (GPT-2's table).

    Bytes that print in Latin-1 stand for themselves; the others take the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


def _decoding(backend: tokenizers.Tokenizer) -> tuple[dict[str, int] | None, bool]:
    """Say how tokens become bytes.

    Returns:
        The alphabet of a byte-level vocabulary, an empty one for whole words, None for pieces of
        SentencePiece. Then, whether a space at the start of a text is dropped.
    """
    if backend.decoder is None:
        return {}, True
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_alphabet(), False
    pieces = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if steps[:1] == [pieces] and kinds[1:3] == ["ByteFallback", "Fuse"]:
        if not steps[3:]:
            return None, False
        if steps[3:] == [strip]:
            return None, True
    raise ModelError(
        f"tokenizers that decode by {' + '.join(kinds)} are not supported, only byte-level "
        "and SentencePiece ones"
    )


def _spell_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace(SPACE_MARK, " ").encode()
