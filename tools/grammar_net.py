"""A small T5 in training that corrects grammar; it copies from its first step on.

Correcting is copying with a few changes, and a network takes long to find out how to copy. So the
first weights say it. Half of the heads of both stacks look at the token before, and write part of it
into directions of their own. Cross-attention of the first decoder layer looks for the source's token
behind the one just written, and brings it to the output. All of this is trained like the rest.

Shape letters: B pairs, S source tokens, T target tokens, H width, A width of the heads together,
P the half of it that shifts, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration

from outpace.files import replaced, write_whole
from outpace.law import VocabMap
from outpace.models.base import Target
from outpace.train.batches import Batch
from outpace.train.objective import Objective, Step

PAD, END = "<pad>", "</s>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is made."""

    encoder: int = 5
    """Layers that read."""
    decoder: int = 2
    """Layers that write; few, as in shallow aggressive decoding (arXiv:2106.04970)."""
    width: int = 320
    """H; of the heads together too."""
    heads: int = 8
    """Of every attention; half of them look at the token before when training begins."""
    ffn: int = 1024
    """Width of the MLPs."""
    vocab: int = 6000
    """Tokens of a byte-level tokenizer that is trained on the texts."""
    batch: int = 32
    """Pairs of a step."""
    seed: int = 0
    """Of the weights and of the errors."""

    def __post_init__(self) -> None:
        if self.heads < 2 or self.heads % 2 or self.width % self.heads:
            raise ValueError(f"heads must be even and divide the width {self.width}, got {self.heads}")

    def config(self) -> T5Config:
        """The shape, as transformers names it."""
        return T5Config(
            vocab_size=self.vocab,
            d_model=self.width,
            d_kv=self.width // self.heads,
            d_ff=self.ffn,
            num_layers=self.encoder,
            num_decoder_layers=self.decoder,
            num_heads=self.heads,
            dropout_rate=0.0,
            feed_forward_proj="relu",
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pairs(Batch):
    """Clean sentences as the batch's tokens, and the wrong ones beside them."""

    source_BS: Tensor


class GrammarModel(Objective):
    """The model in training, as the training loop sees a method."""

    Config = Recipe

    def __init__(self, recipe: Recipe, tokenizer: tokenizers.Tokenizer) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer
        config = recipe.config()
        config._attn_implementation = "eager"  # plain products are faster for texts this short
        self.module = T5ForConditionalGeneration(config)
        begin(self.module, recipe)

    @classmethod
    def taps(cls, config: Any, target: Target) -> tuple[str, ...]:
        return ()

    @classmethod
    def build(cls, config: Any, target: Target, vocab: VocabMap | None) -> GrammarModel:
        raise NotImplementedError("a model of its own has no target")

    def _logits(self, batch: Batch) -> Tensor:
        assert isinstance(batch, Pairs)
        before_BT = F.pad(batch.token_BT[:, :-1], (1, 0))  # the padding token begins every answer
        seen_BS = (batch.source_BS != 0).long()
        logits_BTV: Tensor = self.module(
            input_ids=batch.source_BS, attention_mask=seen_BS, decoder_input_ids=before_BT, use_cache=False
        ).logits
        return logits_BTV

    def loss(self, batch: Batch) -> Step:
        token_BT, logits_BTV = batch.token_BT, self._logits(batch)
        loss = F.cross_entropy(
            logits_BTV.flatten(0, 1).float(), token_BT.flatten(), ignore_index=0, label_smoothing=0.02
        )
        return Step(loss, int((token_BT != 0).sum()))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Step:
        token_BT, logits_BTV = batch.token_BT, self._logits(batch)
        real_BT = token_BT != 0
        right_BT = (logits_BTV.argmax(-1) == token_BT) | ~real_BT
        # Whole sentences: what a user sees, and what copying alone cannot raise.
        counted = torch.tensor([float(len(token_BT))])
        return Step(torch.zeros(()), int(real_BT.sum()), right_BT.all(1).float().sum()[None], counted)

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: one.detach().contiguous().clone()
            for name, one in self.module.state_dict().items()
            if name not in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
        }
        with replaced(folder / "model.safetensors") as fresh:
            save_file(tensors, fresh, metadata={"format": "pt"})
        config = {**self.module.config.to_dict(), "architectures": ["T5ForConditionalGeneration"]}
        generation = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
        for name, content in (
            ("provenance.json", dict(provenance)),
            ("generation_config.json", generation),
            ("config.json", config),
        ):
            write_whole(folder / name, json.dumps(content, indent=1, default=str) + "\n")


@torch.no_grad()
def begin(model: nn.Module, recipe: Recipe) -> None:
    """Give the first weights: random, and a copier."""
    coins = torch.Generator().manual_seed(recipe.seed)
    for name, one in model.named_parameters():
        if one.dim() == 2 and "relative_attention_bias" not in name:
            deep = name.endswith((".o.weight", ".wo.weight"))
            spread = 1.0 if name == "shared.weight" else (0.2 if deep else 1.0) * one.shape[1] ** -0.5
            if name.endswith(".q.weight"):
                spread *= recipe.width**-0.25  # T5 does not scale scores
            one.copy_(spread * torch.randn(one.shape, generator=coins))
    half = recipe.width // 2
    eye_HH = torch.eye(recipe.width)
    shift_HP = torch.linalg.qr(torch.randn(recipe.width, half, generator=coins)).Q
    for stack in (model.encoder, model.decoder):
        bias = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        bias.zero_()
        bias[1, : recipe.heads // 2] = 6.0  # bucket 1 is the token before, in both stacks
        for block in stack.block[:2]:
            attention = block.layer[0].SelfAttention
            attention.q.weight[:half] *= 0.1
            attention.v.weight[:half] = eye_HH[:half]
            attention.o.weight[:, :half] = shift_HP
    cross = model.decoder.block[0].layer[1].EncDecAttention
    scale = (12 / half) ** 0.5
    cross.q.weight.copy_(scale * torch.cat([eye_HH[:half], eye_HH[:half]]))
    cross.k.weight.copy_(scale * torch.cat([shift_HP.T, shift_HP.T]))
    cross.v.weight.copy_(eye_HH)
    cross.o.weight.copy_(3.0 * eye_HH)
