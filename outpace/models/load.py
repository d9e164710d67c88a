"""The one door to a model: whatever the user has, a target comes out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from outpace.errors import ModelError, UnknownNameError
from outpace.files import expanded
from outpace.models.base import Target
from outpace.models.blocks import Form
from outpace.models.families import DecoderConfig
from outpace.models.fields import BadValue, brief, check_counts, read_json
from outpace.models.measured import dtype_name
from outpace.models.onednn import packing_works
from outpace.models.seq2seq.config import is_seq2seq
from outpace.models.weights import Checkpoint
from outpace.models.zoo import OTHERS, open_checkpoint

T = TypeVar("T")

BACKENDS = ("auto", "own", "hf")
DTYPES: Mapping[str, torch.dtype | None] = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


def load_target(
    model: Any,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    backend: str = "auto",
    tokenizer: Any = None,
    quantize: str | None = None,
) -> Target:
    """Load a model, or wrap one that is loaded.

    Args:
        model: a short name (``smollm2-135m``, ``tiny``, ``tiny:SEED``), a folder in the layout
            of Hugging Face, a ``.gguf`` file, or a hub id ``owner/name``. Also a causal language
            model of transformers in memory, or a target, which comes back as it is.
        dtype: ``float32``, ``bfloat16``, or ``auto``: weights of a GGUF file as they are stored,
            where compiled code multiplies them on a CPU. Else ``auto`` is bfloat16 where the device
            multiplies it natively, which halves the bytes read per pass, or float32. A model in
            memory keeps its own; asking for another one is an error.
        device: where to compute; None is the CPU, or where a model in memory is; ``auto``
            takes a GPU if there is one.
        backend: ``own`` decoder, ``hf`` (transformers), or ``auto``: the own decoder for every
            family it knows. Other folders and hub ids get transformers, with a note that says
            so. A model in memory stays with transformers unless ``own`` is asked for. That decoder
            shares the embedding and the norms. It lays out matrices anew where that makes products
            faster, which is on CPUs, and where several become one; others it shares.
        tokenizer: the tokenizer of a model in memory: a fast one of transformers, or ours.
        quantize: ``int8`` or ``int4``: round the weights of projections and head. The rounded
            model is then the target, with a digest of its own: its text is what drafters keep.

    Returns:
        A target with ``tokenizer`` (None if there is none), ``defaults`` and ``note``.

    Raises:
        UnknownNameError: an unknown model name, dtype or backend; near names are suggested.
        ModelError: missing, corrupt, not supported, or not what was asked for.
    """
    if backend not in BACKENDS:
        raise UnknownNameError("backend", backend, BACKENDS)
    wanted, place = _dtype(dtype), _device(device)
    if tokenizer is not None and isinstance(model, (Target, str, Path)):
        name = model.name if isinstance(model, Target) else model
        raise ModelError(
            f"{name} brings its own tokenizer; give one only with a model of transformers in memory"
        )
    if isinstance(model, Target):
        return _as_asked(model, wanted, place, quantize)
    if not isinstance(model, (str, Path)):
        return _in_memory(model, wanted, place, backend, tokenizer, quantize)
    place = place or torch.device("cpu")
    if place.type == "meta":
        raise ModelError("device 'meta' computes nothing; give cpu, cuda, cuda:1 or auto")
    return _by_name(str(model), wanted, place, backend, quantize)


def load_beside(target: Target, model: str, dtype: str | torch.dtype | None = None) -> Target:
    """Load another model for drafters of a target: once, however many of them name it.

    Models are the same whose weights have the same digest, and those of the target's digest and
    dtype are the target. A model is freed with the last drafter that holds it.

    Args:
        dtype: None: the target's.

    Raises:
        OutpaceError: as ``load_target``.
    """
    wanted = (_dtype(dtype) if dtype is not None else None) or target.dtype
    try:
        known = open_checkpoint(model).digest
    except (ModelError, UnknownNameError):  # transformers loads it, or nobody does
        known = str(expanded(model).resolve()) if expanded(model).exists() else model

    def make() -> Target:
        loaded = load_target(model, dtype=dtype or target.dtype, device=target.device)
        return target if (loaded.digest, loaded.dtype) == (target.digest, target.dtype) else loaded

    return (
        target if (known, wanted) == (target.digest, target.dtype) else shared(target, (known, dtype), make)
    )


def shared(target: Target, key: Hashable, make: Callable[[], T]) -> T:
    """What drafters of a target share: made once, and freed with the last drafter that holds it."""
    held = vars(target).setdefault("_shared", WeakValueDictionary())
    found: T | None = held.get(key)
    if found is None:
        held[key] = found = make()
    return found


def fast_dtype(device: torch.device) -> torch.dtype:
    """Give what ``auto`` stands for: bfloat16 where it is multiplied natively, else float32.

    On a CPU that is where it has AMX or AVX-512 instructions for bfloat16 and packed weights
    work. A pass then reads half the bytes, and 16 rows cost hardly more than one.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type != "cpu" or not packing_works(torch.bfloat16):
        return torch.float32
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    native = any(getattr(torch.cpu, probe, bool)() for probe in probes)
    return torch.bfloat16 if native else torch.float32


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if isinstance(dtype, torch.dtype):
        dtype = dtype_name(dtype)
    if dtype not in DTYPES:
        raise UnknownNameError("dtype", str(dtype), DTYPES)
    return DTYPES[dtype]


def _device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"device {str(device)!r} cannot be used; give cpu, cuda, cuda:1 or auto ({brief(error)})"
        ) from error
    return place


def _by_name(
    name: str, wanted: torch.dtype | None, device: torch.device, backend: str, quantize: str | None
) -> Target:
    dtype = wanted or fast_dtype(device)
    if name == "tiny" or name.startswith("tiny:"):
        return _tiny(name, dtype, device, backend, quantize)
    try:
        checkpoint = open_checkpoint(name)
    except UnknownNameError as error:
        raise UnknownNameError(error.kind, name, [*error.known, "tiny"], OTHERS) from error
    except ModelError as error:
        config = _config_of(name)
        if config is not None and is_seq2seq(config):
            return _seq2seq(name, dtype, device, backend, quantize)
        if backend == "own" or config is None:
            raise
        check_counts("config.json", config)
        if backend == "hf":
            return _hf(name, dtype, device, None, quantize)
        try:
            DecoderConfig.from_hf(config)
        except BadValue:
            raise
        except ModelError as reason:
            return _hf(name, dtype, device, str(reason), quantize)
        raise error
    if backend != "hf":
        return _own(checkpoint, dtype, device, quantize, stored=wanted is None)
    if _config_of(name) is None:
        raise ModelError(f"{name} is a GGUF file, which only the own decoder reads: backend='own'")
    return _hf(name, dtype, device, None, quantize)


def _tiny(name: str, dtype: torch.dtype, device: torch.device, backend: str, quantize: str | None) -> Target:
    from outpace.models.tiny import tiny

    seed = name.partition(":")[2] or "0"
    if not seed.isdecimal() or backend == "hf":
        raise ModelError(f"{name!r} with backend {backend!r}: tiny:SEED is our own decoder only")
    target = tiny(int(seed), dtype=dtype, device=device)
    return target if quantize is None else target.quantized(quantize)


def _own(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantize: str | None,
    stored: bool = False,
) -> Target:
    from outpace.models.decoder import Decoder

    return Decoder.load(checkpoint, dtype=dtype, device=device, quantize=quantize, stored=stored)


def _hf(
    name: str, dtype: torch.dtype, device: torch.device, reason: str | None, quantize: str | None
) -> Target:
    from outpace.models.hf.target import load_hf

    if quantize is not None:
        raise ModelError(
            f"quantize={quantize!r} works with the own decoder, and {name} is run by transformers"
            f"{f': {reason}' if reason else ''}; leave it out, or quantize with transformers"
        )
    return load_hf(name, dtype, device, reason)


def _seq2seq(
    name: str, dtype: torch.dtype, device: torch.device, backend: str, quantize: str | None
) -> Target:
    from outpace.models.seq2seq.load import load_folder

    file = _config_file(name)
    assert file is not None
    if backend == "hf":
        raise ModelError(f"{name} is an encoder-decoder, which only the own decoder runs: backend='own'")
    return load_folder(file.parent, Form(dtype, device, quantize=quantize), Path(name).name)


def _config_of(name: str) -> Mapping[str, Any] | None:
    """Read the config.json of a folder, or of a hub id that was downloaded; None without one."""
    file = _config_file(name)
    return None if file is None else read_json(file)


def _config_file(name: str) -> Path | None:
    path = expanded(name) / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(name, "config.json")
        except HFValidationError:
            return None
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    return path


def _in_memory(
    model: Any,
    dtype: torch.dtype | None,
    device: torch.device | None,
    backend: str,
    tokenizer: Any,
    quantize: str | None,
) -> Target:
    from outpace.models.hf.compare import apart, beside_its_weights
    from outpace.models.hf.config import generation_defaults, said_name, wrap_tokenizer
    from outpace.models.hf.target import HFTarget
    from outpace.models.layout import from_transformers
    from outpace.models.memory import MemoryCheckpoint

    if is_seq2seq(getattr(model.config, "to_dict", dict)() if hasattr(model, "config") else {}):
        from outpace.models.seq2seq.load import wrap

        form = Form(dtype or model.dtype, device or model.device, quantize=quantize)
        return wrap(model, form, said_name(model), wrap_tokenizer(tokenizer, None))
    if backend != "own":
        return _as_asked(HFTarget(model, tokenizer), dtype, device, quantize)
    defaults, config = generation_defaults(model), DecoderConfig.from_hf(model.config.to_dict())
    checkpoint = MemoryCheckpoint(
        config,
        from_transformers(config, model.state_dict()),
        name=said_name(model),
        tokenizer=wrap_tokenizer(tokenizer, defaults),
        defaults=defaults,
    )
    target = _own(checkpoint, dtype or model.dtype, device or model.device, quantize)
    if quantize is not None:
        return target
    if wrong := [off for off, most in (apart(model, target), beside_its_weights(model)) if not off <= most]:
        raise ModelError(
            f"{target.name} says something else than its weights do (logits are off by {wrong[0]:.2g} of "
            "their deviation): it has hooks or modules of its own, which backend='own' does not run; "
            "leave that out"
        )
    return target


def _as_asked(
    target: Target, dtype: torch.dtype | None, device: torch.device | None, quantize: str | None
) -> Target:
    """Refuse a loaded model that is not of the dtype or on the device that was asked for."""
    if quantize not in (None, target.quantize):
        raise ModelError(
            f"{target.name} is in memory and not rounded to {quantize!r}; name a model to load, "
            "or give a model of transformers with backend='own'"
        )
    if dtype not in (None, target.dtype):
        raise ModelError(
            f"{target.name} is in memory as {target.dtype}, not {dtype}; convert it yourself "
            "with .to(), or leave dtype out"
        )
    if device is not None and target.device.type != device.type:
        raise ModelError(
            f"{target.name} is on {target.device}, not on {device}; move it yourself with .to(), "
            "or leave device out"
        )
    return target
