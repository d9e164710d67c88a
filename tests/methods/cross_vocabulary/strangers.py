"""Models that speak other vocabularies: the tiny one under other ids, and tables over letters."""

import json

import tokenizers
import torch
from safetensors.torch import save_file

from outpace.models.text import Tokenizer, byte_alphabet
from outpace.models.tiny import _MERGES, BEGIN, END, TableTarget

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def stranger_tokenizer():
    """The bytes in another order, some of the pairs of ``tiny``, two of its own, other ends."""
    pairs = [pair for i, pair in enumerate(_MERGES.split()) if i % 3] + ["qu", "ll"]
    pieces = [*reversed(byte_alphabet()), "<s>", *pairs, "</s>"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, [(pair[0], pair[1]) for pair in pairs]
        )
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend, pieces


def write_stranger(target, folder):
    """Save ``tiny`` as a model of another vocabulary, which says what it says where it can."""
    backend, pieces = stranger_tokenizer()
    ours = [BEGIN, END, *byte_alphabet(), *_MERGES.split()]
    names = {"<s>": BEGIN, "</s>": END}
    at = [ours.index(names.get(piece, piece)) if names.get(piece, piece) in ours else -1 for piece in pieces]
    checkpoint = target.checkpoint
    tensors = {}
    for name in checkpoint.config.tensor_shapes():
        tensors[name] = checkpoint.tensor(name, torch.float32).clone()
        if name in (EMBED, HEAD):
            coins = torch.Generator().manual_seed(1)
            new = 0.1 * torch.randn(len(pieces), tensors[name].shape[1], generator=coins)
            for row, old in enumerate(at):
                if old >= 0:
                    new[row] = tensors[name][old]
            tensors[name] = new
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    backend.save(str(folder / "tokenizer.json"))
    said = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    config = checkpoint.config
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": len(pieces),
                "hidden_size": config.hidden_size,
                "intermediate_size": tensors["model.layers.0.mlp.up_proj.weight"].shape[0],
                "num_hidden_layers": config.num_layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 1024,
                "tie_word_embeddings": False,
                "eos_token_id": pieces.index("</s>"),
                "bos_token_id": pieces.index("<s>"),
            }
        )
    )


def letters(*pieces, special=(), byte_level=True):
    """A tokenizer over a few letters; pieces of two are merged wherever they stand."""
    vocab = {piece: i for i, piece in enumerate((*special, *pieces))}
    merges = [(piece[0], piece[1]) for piece in pieces if len(piece) == 2]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    if byte_level:
        backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    named = {"eos_token": special[0]} if special else None
    return Tokenizer(backend, named=named)


def table(seed, tokenizer, order=2):
    """A table that speaks a tokenizer's tokens."""
    model = TableTarget.random(seed, tokenizer.vocab_size, order)
    model.tokenizer = tokenizer
    return model
