"""Small targets for tests, examples and CI: one with a distribution that is known, one that is real.

``TableTarget`` is a language model given by its distributions, in float64. So the distribution of an
output can be enumerated and compared to the last digit. ``tiny`` is a decoder of two layers on random
weights with a tokenizer of its own: everything a large model does, in milliseconds.

Shape letters: T rows of a pass, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import tokenizers
import torch
from torch import Tensor

from outpace.cache.base import KVCache
from outpace.errors import ModelError
from outpace.models.base import TREE, Target
from outpace.models.decoder import Decoder
from outpace.models.defaults import GenerationDefaults
from outpace.models.families import DecoderConfig
from outpace.models.memory import MemoryCheckpoint
from outpace.models.text import Tokenizer, byte_alphabet
from outpace.types import Feed, Scored

Rule = Callable[[tuple[int, ...]], Tensor]
"""Context -> float64 distribution [V] of the next token."""


class TableCache(KVCache):
    """The bookkeeping of a cache, without keys: a table reads the tokens themselves."""

    copies = True

    @property
    def nbytes(self) -> int:
        return 0

    def _reserve(self, slots: int, rows: int) -> None:
        """Lists grow by themselves."""

    def _move(self, slot: int, rows: Sequence[int], start: int) -> None:
        """The ids are moved by the bookkeeping."""

    def _copy(self, slot: int, start: int, stop: int) -> None:
        """Nothing but ids."""

    def _paste(self, slot: int, start: int, part: None) -> None:
        """Nothing but ids."""


class TableTarget(Target):
    """A language model given by a rule from contexts to distributions; logits are log p, in float64."""

    def __init__(
        self, rule: Rule, vocab_size: int, *, name: str = "table", eos_ids: Sequence[int] = ()
    ) -> None:
        """Wrap a rule.

        Args:
            rule: gives the distribution after a context, the empty one included; the same at every
                call. Probabilities of zero are fine.
        """
        self._rule = rule
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.vocab_size = vocab_size
        self.hidden_size, self.num_layers, self.max_positions = 1, 1, 1 << 20
        self.device, self.dtype = torch.device("cpu"), torch.float64
        self.can = frozenset({TREE})
        self.name = name
        self.defaults = GenerationDefaults(eos_ids=tuple(sorted(eos_ids)))
        some = range(min(vocab_size, 4))
        contexts = [(), *((a,) for a in some), *((a, b) for a in some for b in some)]
        laws = repr([self.law_after(context).tolist() for context in contexts])
        self.digest = hashlib.sha256(laws.encode()).hexdigest()[:16]

    @classmethod
    def of(cls, laws: Mapping[tuple[int, ...], Sequence[float]], name: str = "table") -> TableTarget:
        """Give every context the distribution of its longest suffix in ``laws``, which must hold ``()``."""
        if () not in laws:
            raise ValueError("laws need an entry for the empty context, ()")
        longest = max(len(context) for context in laws)
        rows = {context: torch.tensor(law, dtype=torch.float64) for context, law in laws.items()}

        def rule(context: tuple[int, ...]) -> Tensor:
            suffixes = (context[len(context) - n :] for n in range(longest, -1, -1))
            return next(rows[suffix] for suffix in suffixes if suffix in rows)

        return cls(rule, len(laws[()]), name=name)

    @classmethod
    def random(
        cls,
        seed: int,
        vocab_size: int = 3,
        order: int | None = 2,
        *,
        sharpness: float = 1.0,
        zeros: float = 0.0,
        eos_ids: Sequence[int] = (),
    ) -> TableTarget:
        """Draw a table.

        Args:
            order: how many last tokens the distribution depends on; None: on the whole context.
            sharpness: standard deviation of the logits; 0 makes every distribution uniform.
            zeros: share of tokens that a distribution forbids; one is always left.
        """

        def rule(context: tuple[int, ...]) -> Tensor:
            seen = context if order is None else context[max(0, len(context) - order) :]
            digest = hashlib.sha256(repr((seed, seen)).encode()).digest()
            coins = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            logit_V = sharpness * torch.randn(vocab_size, generator=coins, dtype=torch.float64)
            banned_V = torch.rand(vocab_size, generator=coins, dtype=torch.float64) < zeros
            banned_V[logit_V.argmax()] = False
            return logit_V.masked_fill(banned_V, -torch.inf).softmax(0)

        return cls(rule, vocab_size, name=f"table:{seed}", eos_ids=eos_ids)

    def mixed(self, other: TableTarget, share: float) -> TableTarget:
        """A table whose distributions are ``share`` parts of ``other`` and the rest of this one.

        With this one as the target, it is a draft that agrees with it the more, the smaller
        the share. The total variation of any two distributions shrinks by that factor.
        """
        if not 0 <= share <= 1 or other.vocab_size != self.vocab_size:
            raise ValueError(
                f"need a share in [0, 1] and {self.vocab_size} tokens, got {share} and "
                f"{other.vocab_size} tokens"
            )

        def rule(context: tuple[int, ...]) -> Tensor:
            return (1 - share) * self.law_after(context) + share * other.law_after(context)

        return TableTarget(
            rule,
            self.vocab_size,
            name=f"{self.name}+{share}*{other.name}",
            eos_ids=self.defaults.eos_ids if self.defaults else (),
        )

    def law_after(self, tokens: Sequence[int]) -> Tensor:
        """Law of the next token, float64 [V]; the oracle of ``score``. Do not write to it."""
        context = tuple(tokens)
        law_V = self._known.get(context)
        if law_V is None:
            law_V = self._rule(context)
            if law_V.shape != (self.vocab_size,) or law_V.dtype is not torch.float64:
                raise ValueError(
                    f"the distribution after {context} must be float64 [{self.vocab_size}], got "
                    f"{law_V.dtype} {list(law_V.shape)}"
                )
            if bool((law_V < 0).any()) or abs(float(law_V.sum()) - 1) > 1e-9:
                raise ValueError(f"no distribution after {context}: {law_V.tolist()}")
            self._known[context] = law_V
        return law_V

    @property
    def equal_rows(self) -> bool:
        """A table says the same in every pass."""
        return True

    def new_cache(self, capacity: int = 0) -> KVCache:
        """An empty cache; ``capacity`` is of no use here."""
        return TableCache()

    def score(
        self,
        feeds: Sequence[Feed],
        cache: KVCache,
        *,
        taps: frozenset[str] = frozenset(),
        layers: int | None = None,
    ) -> Scored:
        """Look up log p of every wanted row, float64 [T, V]; -inf where a token is forbidden."""
        if taps or layers is not None:
            raise ModelError(f"{self.name} has no layers and no taps {sorted(taps)}")
        logits, start = [], [0]
        for feed in feeds:
            if feed.riders is not None or feed.resume is not None:
                raise ModelError(f"{self.name} takes no riders and no resume")
            state = cache.slot(feed.slot)
            first = len(state.tail_ids)
            cache.append(feed.slot, feed.token_J, feed.parent_J)
            paths: list[tuple[int, ...]] = []
            for token, parent in zip(state.tail_ids, state.tail_parents, strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            committed = tuple(state.ids)
            for row in range(len(feed.token_J)) if feed.want is None else feed.want:
                logits.append(self.law_after(committed + paths[first + row]).log())
            start.append(len(logits))
        empty_TV = torch.empty(0, self.vocab_size, dtype=torch.float64)
        return Scored(torch.stack(logits) if logits else empty_TV, tuple(start))


BEGIN, END = "<|begin|>", "<|end|>"
_MERGES = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou"
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]\n"
    "{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    """Make a byte-level tokenizer: 2 special tokens, 256 bytes, and a few pairs of letters."""
    pairs = [(pair[0], pair[1]) for pair in _MERGES.split()]
    pieces = [BEGIN, END, *byte_alphabet(), *_MERGES.split()]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, pairs))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([BEGIN, END])
    return Tokenizer(backend, named={"bos_token": BEGIN, "eos_token": END}, templates={"default": _TEMPLATE})


def tiny(
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layers: int = 2,
    max_positions: int = 1024,
    experts: int = 0,
) -> Decoder:
    """Make a Llama of random weights, with a tokenizer and an end-of-sequence token.

    Its text means nothing, but depends on all that came before and repeats itself now and then. A
    2-gram lookup guesses a fifth of a greedy text. Its distributions are peaked.

    Args:
        seed: same seed, same weights, whatever the dtype.
        experts: of every layer but the first, if there are any; a row goes through three of them.
    """
    tokenizer = tiny_tokenizer()
    sparse = {"model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": 3}
    sparse |= {"moe_intermediate_size": 32, "mlp_only_layers": [0], "norm_topk_prob": True}
    config = DecoderConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": max_positions,
            **(sparse if experts else {}),
        }
    )
    coins = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        tensors[name] = torch.ones(shape)
        if len(shape) == 2:
            spread = 1.0 if "embed" in name else shape[1] ** -0.5
            # Queries and keys of size 2 make attention look at few tokens, and not at all alike;
            # what it adds is small, so that texts repeat phrases, which lookup can draft.
            part = name.split(".")[-2]
            spread *= {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 0.25}.get(part, 1.0)
            spread *= 3.0 if part == "lm_head" else 1.0
            tensors[name] = spread * torch.randn(shape, generator=coins)
    end = next(iter(tokenizer.eos_ids))
    checkpoint = MemoryCheckpoint(
        config,
        tensors,
        name=f"tiny:{seed}"[: None if seed else 4] + f" of {experts} experts" * bool(experts),
        tokenizer=tokenizer,
        defaults=GenerationDefaults(eos_ids=(end,), bos_id=tokenizer.bos_id),
    )
    return Decoder.load(checkpoint, dtype=dtype, device=device)
