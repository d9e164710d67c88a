"""Small models on disk, made on the spot: Hugging Face folders, GGUF files, tokenizers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors

from outpace.models.families import DecoderConfig
from outpace.models.text import byte_alphabet

CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    "  {%- if message.role not in ['system', 'user', 'assistant'] %}\n"
    "    {{- raise_exception('no such role: ' + message.role) }}\n"
    "  {%- endif %}\n"
    "  {{- bos_token + '[' + message['role'] + '] ' + message['content'] | trim + '\\n' }}\n"
    "  {%- if loop.index > 8 %}{% break %}{% endif %}\n"
    "{%- endfor %}\n"
    "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}\n"
    "{%- if add_generation_prompt %}\n"
    "[assistant] {% generation %}{{ prefill | default('') }}{% endgeneration %}\n"
    "{%- endif %}\n"
)

SAMPLE = (
    "Hello, world!  3.14159 it's WE'LL 1234567 x12\n\n"
    "\tdef f(x):\n        return x**2  # caf\u00e9\n"
    "\u65e5\u672c\u8a9e\u306e \u4e2d\u6587 \ud55c\uad6d\uc5b4 \u0627\u0644 \u0939\u093f \u00bd "
    "\U0001f389\U0001f469\u200d\U0001f469\u200d\U0001f467 e\u0301 \u00a0\u3000 \x00\x7f end   "
)
"""Numbers, code, runs of spaces, many scripts, emoji with joiners, control characters."""

HF_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
}


def hf_config(family: str, **changes: Any) -> Any:
    """Make a small config object of transformers."""
    import transformers

    kinds = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "gemma3": transformers.Gemma3TextConfig,
        "mixtral": transformers.MixtralConfig,
        "qwen3_moe": transformers.Qwen3MoeConfig,
    }
    return kinds[family](**(HF_SIZES | EXPERTS.get(family, {}) | changes))


def save_hf(folder: Path, family: str, *, shard_size: str = "5GB", **changes: Any) -> Any:
    """Save a random model of transformers and give it back."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(family, **changes))
    # Fresh norms are all ones or zeros, which would hide a mix-up of two of them.
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def byte_level(merges: Sequence[tuple[str, str]] = ()) -> tokenizers.Tokenizer:
    """Make a byte-level tokenizer of 256 bytes, some merges and three special tokens."""
    alphabet = list(byte_alphabet())
    vocabulary = ["<|end|>", "<|start|>", "<|pad|>", *alphabet]
    vocabulary += ["".join(pair) for pair in merges]
    made = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=list(merges))
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>", "<|start|>"])
    made.post_processor = processors.TemplateProcessing(
        single=["<|start|>", "$A"], special_tokens=[("<|start|>", 1)]
    )
    return made


MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("\u0120", "w"), ("\u00c3", "\u00a9"), ("1", "2"))


def save_tokenizer(folder: Path, **changes: Any) -> Any:
    """Save a byte-level tokenizer through transformers and give back the object."""
    import transformers

    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(MERGES),
        bos_token="<|start|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        **changes,
    )
    fast.save_pretrained(folder)
    return fast


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}


def gguf_name(name: str, arch: str) -> str:
    """Give the GGUF name of a tensor, by the rules of the converters."""
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    table = GGUF_NAMES
    if arch == "gemma3":
        table = table | {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    return f"blk.{layer}.{table[part]}.{kind}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of q or k as the converters do for architecture llama."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


GGUF_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "he", "ll"]


def gguf_metadata(config: DecoderConfig, arch: str) -> dict[str, Any]:
    """Give the metadata that a converter writes for a model."""
    rope = config.ropes[config.rope_of_layer[-1]]
    sparse = {}
    if (mixture := config.mixture) is not None:
        sparse = {f"{arch}.expert_count": mixture.experts, f"{arch}.expert_used_count": mixture.chosen}
        if arch != "llama":
            sparse[f"{arch}.expert_feed_forward_length"] = mixture.width
    return sparse | {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_positions,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.ffn_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{arch}.rope.freq_base": rope.theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": GGUF_TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 258,
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by GGUF name, those of experts one above the other, as converters write them."""
    found: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        if "experts" not in name:
            continue
        _, _, layer, _, _, _, part, _ = name.split(".")
        found.setdefault(f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight", []).append(tensor)
    return {name: np.stack(several) for name, several in found.items()}


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any],
    *,
    arch: str,
    kinds: Mapping[str, str] | None = None,
    raw: Mapping[str, tuple[str, np.ndarray]] | None = None,
) -> None:
    """Write tensors, by GGUF name, quantized as ``kinds`` says and float32 otherwise.

    Args:
        raw: more tensors, as bytes of a type.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        data = gguf.quantize(np.ascontiguousarray(tensor, dtype=np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    for name, (label, data) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[label])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def seq2seq(kind: str, seed: int = 0, **changes: Any) -> Any:
    """Make a small encoder-decoder of transformers: t5, t5 gated, bart or marian."""
    import transformers

    torch.manual_seed(seed)
    sizes = {"vocab_size": 96, "d_model": 32, "dropout_rate": 0.0}
    if kind.startswith("t5"):
        sizes |= {"d_kv": 6, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
        gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if "gated" in kind else {}
        config = transformers.T5Config(**sizes, **gated, **changes, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(config)
    else:
        stacks = {
            f"{side}_{name}": value
            for side, layers in (("encoder", 3), ("decoder", 2))
            for name, value in (("layers", layers), ("attention_heads", 4), ("ffn_dim", 48))
        }
        kinds = {
            "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
            "marian": (transformers.MarianConfig, transformers.MarianMTModel),
        }
        ends = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
        if kind == "marian":
            ends = {
                "pad_token_id": 95,
                "eos_token_id": 0,
                "decoder_start_token_id": 95,
                "scale_embedding": True,
            }
        make_config, make = kinds[kind]
        config = make_config(
            vocab_size=96, d_model=32, max_position_embeddings=128, **{**stacks, **ends, **changes}
        )
        model = make(config)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.dim() == 2 and "position" not in name:
                one.normal_(0.0, 1.0 if "shared" in name else 1.5 * one.shape[1] ** -0.5)
            elif "bias" in name or "norm" in name:
                one.add_(0.1 * torch.randn(one.shape))
        if kind in ("bart", "marian"):
            model.final_logits_bias.normal_(0.0, 0.3)
    return model.eval()
