"""A model as predictions need it: its shape, the bytes of its weights, of its keys and values.

    planned = read("model.gguf", here=True)
    planned.seconds(device, rows=8, context=1024)

Only config.json is read, or the header of a GGUF file; no weights are. On this machine the bytes are
those that ``Decoder.load`` would hold: weights of a GGUF file as stored, and as compiled code lays them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outpace.analysis.roofline import DOWN, GATE_UP, Device, Held, Op, Widths, op_table, seconds
from outpace.drafters.trained import decoder_from_json, is_drafter
from outpace.errors import ModelError, UnknownNameError
from outpace.files import expanded
from outpace.models.blocks import head_name
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.models.fields import brief, read_json
from outpace.models.fused import stored as cache_dtype
from outpace.models.load import fast_dtype
from outpace.models.measured import dtype_name
from outpace.models.places import Place
from outpace.models.products import CODED, stored_bytes, works
from outpace.models.quantize import KINDS
from outpace.models.zoo import known_models, open_checkpoint

CPU, CUDA, METAL = "cpu", "cuda", "metal"
FORMS = ("auto", "stored", "bfloat16", "float32")
"""How weights are held: ``stored`` means as they lie in a GGUF file."""
CACHES = ("auto", "float32", "bfloat16", "float16", "int8")
ROUNDED = "int8"
"""What drafters that were trained are rounded to on a CPU, unless told otherwise."""
_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """A model whose passes are predicted."""

    name: str
    config: DecoderConfig
    form: str
    """``stored``, a dtype, ``int8`` or ``int4``: what a calibration depends on."""
    dtype: str
    """Of what is computed."""
    cache: str
    """Dtype of keys and values."""
    widths: Widths
    held: Mapping[str, Sequence[Held]]
    """Operator -> its matrix in every layer."""
    resident_bytes: int
    """Weights in memory: those of a pass, norms, and an embedding of its own."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of matrices read by a pass; ``Decoder.weight_bytes`` of the loaded model."""
        return round(sum(self._once(one) for several in self.held.values() for one in several))

    def _once(self, one: Held) -> float:
        """Bytes of a matrix, or of those experts that a row goes through."""
        return one.nbytes * (1 if self.config.mixture is None else min(one.times, self.config.mixture.chosen))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Types of weights, those with most bytes first."""
        sizes: dict[str, float] = {}
        for several in self.held.values():
            for one in several:
                sizes[one.kind] = sizes.get(one.kind, 0.0) + self._once(one)
        return tuple(sorted(sizes, key=lambda kind: -sizes[kind]))

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of a token."""
        c = self.config
        return round(2 * c.num_layers * c.num_kv_heads * c.head_dim * self.widths.cache)

    def ops(self, *, rows: int = 1, context: int = 0, batch: int = 1, logits: int | None = None) -> list[Op]:
        """Operators of a pass; see ``op_table``."""
        return op_table(
            self.config, self.widths, rows=rows, context=context, batch=batch, logits=logits, held=self.held
        )

    def cut(self, layers: int) -> Planned:
        """The same with its first layers alone."""
        config = self.config.of_layers(range(layers))
        sparse = 0 if config.mixture is None else sum(config.mixture.sparse)
        counts = {"head": 1, "qkv": layers, "out": layers}
        counts |= {"gate, up": layers - sparse, "down": layers - sparse}
        held = {name: several[: counts.get(name, sparse)] for name, several in self.held.items()}
        return replace(self, config=config, held=held)

    def seconds(self, device: Device, *, rows: int = 1, context: int = 0, batch: int = 1) -> float:
        return seconds(self.ops(rows=rows, context=context, batch=batch), device)

    def by_rows(self, device: Device, context: int, batch: int) -> Callable[[int], float]:
        """Seconds of a pass, by its rows."""
        return lambda rows: self.seconds(device, rows=rows, context=context, batch=batch)


def planned(target: Decoder) -> Planned:
    """A model that is loaded, as it is. A drafter that was trained may have a head of fewer tokens."""
    forms = [target.quantize] if target.quantize else [dtype_name(target.dtype), "stored", *KINDS]
    places, kind = target.checkpoint.places, target.device.type
    config, head = target.config, target.unembedding(None).outputs
    if head != config.vocab_size:
        config = replace(config, vocab_size=head, tied_head=False)
    found = [_plan(target.name, config, places, form, target.dtype, kind, "auto") for form in forms]
    return min(found, key=lambda one: abs(one.weight_bytes - target.weight_bytes))


def read(
    name: str, *, kind: str = CPU, dtype: str = "auto", quantize: str | None = None, cache: str = "auto"
) -> Planned:
    """Read a model's shape.

    Args:
        name: a folder with a config.json, a GGUF file, a short name, or a hub id, of which
            config.json alone is downloaded if need be.
        kind: of device: where ``auto`` is to be decided as ``Decoder.load`` does.
        dtype: one of ``FORMS``.
        quantize: ``int8`` or ``int4``: projections and head are rounded; on CPUs.
        cache: one of ``CACHES``; auto: what is kept there.

    Raises:
        UnknownNameError: an unknown model, dtype or rounding.
        ModelError: a file that is missing or corrupt, an architecture that is not supported, or a
            form that the file does not have.
    """
    for what, given, known in (("dtype", dtype, FORMS), ("KV cache dtype", cache, CACHES)):
        if given not in known:
            raise UnknownNameError(what, given, known)
    if quantize is not None and quantize not in KINDS:
        raise UnknownNameError("quantization", quantize, KINDS)
    if quantize is not None and kind != CPU:
        raise ModelError(f"quantize={quantize!r} works on the CPU, not on {kind}; leave one out")
    title, config, places = _shape(name)
    if quantize is None and dtype == "auto" and kind == CPU and is_drafter(name):
        quantize = ROUNDED
    coded = any(place.kind in CODED for place in places.values())
    if dtype == "stored" and not coded:
        raise ModelError(f"{title} holds no quantized weights; only those of a GGUF file are used as stored")
    computed = getattr(torch, dtype) if dtype in _SIZE else _fast(kind)
    form = quantize or dtype
    if form == "auto":
        form = "stored" if coded and kind != CUDA and (kind != CPU or works()) else dtype_name(computed)
    return _plan(title, config, places, form, computed, kind, cache)


def _fast(kind: str) -> torch.dtype:
    """What ``auto`` computes in; of other devices than this machine it is taken to be bfloat16."""
    return fast_dtype(torch.device("cpu")) if kind == CPU else torch.bfloat16


def _shape(name: str) -> tuple[str, DecoderConfig, Mapping[str, Place]]:
    """Name, shape, and the places of tensors where these tell more than the shape."""
    if name == "tiny" or name.startswith("tiny:"):
        from outpace.models.load import load_target

        target = load_target(name, dtype="float32")
        assert isinstance(target, Decoder)
        return target.name, target.config, {}
    path = expanded(name)
    short = name.lower() in {one.name for one in known_models()}
    if not short and (file := _config_file(name, path)) is not None:
        said = read_json(file)
        config = _drafter(said, file) if "decoder" in said else DecoderConfig.from_hf(said)
        return path.resolve().name if path.exists() else name, config, {}
    checkpoint = open_checkpoint(name)
    return checkpoint.name, checkpoint.config, checkpoint.places


def _drafter(said: Mapping[str, Any], file: Path) -> DecoderConfig:
    """The decoder of a drafter that was trained: its head has the rows of the draft vocabulary."""
    if said.get("taps"):
        raise ModelError(
            f"{file.parent} is a drafter that reads features of its target, so it is more than a decoder; "
            "measure what a level costs, and give --drafter-cost"
        )
    config = decoder_from_json(said["decoder"], file)
    rows = said.get("draft_vocab_size", config.vocab_size)
    return replace(config, vocab_size=rows, tied_head=False)


def shaped(name: str, shape: Mapping[str, Any], *, kind: str = CPU, quantize: str | None = None) -> Planned:
    """A model of which nothing is known but the fields of its ``DecoderConfig``.

    Raises:
        ModelError: fields that are missing or impossible.
    """
    config = decoder_from_json(shape, Path(name))
    computed = _fast(kind)
    return _plan(name, config, {}, quantize or dtype_name(computed), computed, kind, "auto")


def _config_file(name: str, path: Path) -> Path | None:
    """The config.json that a name stands for; None: it is no model of that layout."""
    if path.name == "config.json" and path.is_file():
        return path
    if path.exists() or path.suffix == ".gguf" or name.startswith((".", "~", "/")) or name.count("/") != 1:
        return path / "config.json" if (path / "config.json").is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        try:
            return Path(hf_hub_download(name, "config.json", local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(hf_hub_download(name, "config.json"))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ModelError(f"cannot get config.json of {name!r} from the hub: {brief(error)}") from error


def _plan(
    name: str,
    config: DecoderConfig,
    places: Mapping[str, Place],
    form: str,
    dtype: torch.dtype,
    kind: str,
    cache: str,
) -> Planned:
    compiled = kind == CPU and works()
    shape = config.head_shape
    if cache == "auto":
        cache = dtype_name(dtype if kind == METAL else cache_dtype(shape, dtype, torch.device(kind)))
    holder = _Holder(config, places, form, dtype, kind, compiled)
    embedding = "model.embed_tokens.weight"
    by_rows = form == "stored" and embedding in places and places[embedding].kind in CODED
    number = dtype.itemsize
    kept = 0 if config.tied_head or by_rows else config.vocab_size * config.hidden_size * number
    held = holder.all()
    norms = sum(4 * size[0] for at, size in config.tensor_shapes().items() if at.endswith("norm.weight"))
    matrices = sum(one.nbytes * one.times for several in held.values() for one in several)
    between = 4 if compiled else number
    return Planned(
        name=name,
        config=config,
        form=form,
        dtype=dtype_name(dtype),
        cache=cache,
        widths=Widths(weight=number, activation=between, residual=4, cache=_SIZE[cache]),
        held=held,
        resident_bytes=round(matrices + norms + kept),
    )


@dataclass(frozen=True, slots=True)
class _Holder:
    """How matrices are held: as ``outpace.models.blocks`` reads them."""

    config: DecoderConfig
    places: Mapping[str, Place]
    form: str
    dtype: torch.dtype
    kind: str
    compiled: bool

    def all(self) -> dict[str, list[Held]]:
        c, out = self.config, dict[str, list[Held]]()
        groups = (
            ("qkv", [f"self_attn.{one}_proj" for one in "qkv"], c.qkv_bias),
            ("out", ["self_attn.o_proj"], c.out_bias),
            ("gate, up", ["mlp.gate_proj", "mlp.up_proj"], c.mlp_bias),
            ("down", ["mlp.down_proj"], c.mlp_bias),
            (GATE_UP, ["mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"], False),
            (DOWN, ["mlp.experts.0.down_proj"], False),
        )
        shapes = c.tensor_shapes()
        for operator, names, bias in groups:
            listed = [[f"model.layers.{i}.{name}.weight" for name in names] for i in range(c.num_layers)]
            out[operator] = [self.one(several, shapes, bias) for several in listed if several[0] in shapes]
        if c.mixture is not None:
            experts, width = c.mixture.experts, c.hidden_size
            exact = stored_bytes("F32", experts, width) if self.compiled else 4 * experts * width
            out["router"] = [Held("F32", exact)] * sum(c.mixture.sparse)
            out |= {name: [replace(one, times=experts) for one in out[name]] for name in (GATE_UP, DOWN)}
        out["head"] = [self.one([head_name(c)], shapes, False)]
        return out

    def one(self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], bias: bool) -> Held:
        """Some matrices of one input as one."""
        outputs, inputs = sum(shapes[name][0] for name in names), shapes[names[0]][1]
        size = self.dtype.itemsize
        own = outputs * size if bias else 0
        plain = {torch.float32: "F32", torch.bfloat16: "BF16"}[self.dtype]
        if self.form in KINDS and self.compiled:
            kind = KINDS[self.form][0]
            return Held(kind, stored_bytes(kind, outputs, inputs) + own, outputs * inputs)
        coded = {name: self.coded(name) for name in names}
        if any(coded.values()):
            kinds = dict.fromkeys(coded[name] or plain for name in names)
            parts = [self.bytes_of(name, coded[name] or plain, *shapes[name]) for name in names]
            codes = sum(math.prod(shapes[name]) for name in names if coded[name])
            return Held(" + ".join(kinds), sum(parts) + own, codes)
        if self.compiled:
            return Held(plain, stored_bytes(plain, outputs, inputs) + own)
        return Held(plain, outputs * inputs * size + own)

    def coded(self, name: str) -> str | None:
        place = self.places.get(name)
        return place.kind if self.form == "stored" and place is not None and place.kind in CODED else None

    def bytes_of(self, name: str, kind: str, outputs: int, inputs: int) -> int:
        if self.compiled:
            return stored_bytes(kind, outputs, inputs)
        return self.places[name].size if kind in CODED else outputs * inputs * self.dtype.itemsize
