"""EAGLE heads as other programs write them."""

import json

import torch
from safetensors.torch import save_file

LAYER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "model_type": "llama",
}


def ids(target):
    return torch.arange(0, target.vocab_size, 2)


def offsets(target):
    known = torch.zeros(target.vocab_size, dtype=torch.bool)
    known[ids(target)] = True
    return {"d2t": ids(target) - torch.arange(len(ids(target))), "t2d": known}


def write(folder, config, tensors, pickled=False):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def speculators(target, **changes):
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"verifier": {"name_or_path": "some/model"}},
        "transformer_layer_config": LAYER | {"vocab_size": target.vocab_size},
        "draft_vocab_size": len(ids(target)),
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 1, 0],
    } | changes


def plain(target, **changes):
    return (
        LAYER
        | {
            "vocab_size": target.vocab_size,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(ids(target)),
            "bias": False,
        }
        | changes
    )
