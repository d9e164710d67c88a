"""What differs between the layers of one model, as a config.json says it: windows and rotary tables."""

from collections.abc import Sequence

from outpace.errors import ModelError, shown
from outpace.models.fields import Fields
from outpace.models.rope import Rope

WINDOWED, FULL = "sliding_attention", "full_attention"
"""Layer types as config files name them."""


def layer_types(family: str, read: Fields, layers: int) -> list[str]:
    types: Sequence[str] | None = read.texts("layer_types") if read.get("layer_types") is not None else None
    window = read.get("sliding_window")
    if family in ("qwen2", "qwen3", "qwen3_moe", "smollm3") and not read.get("use_sliding_window"):
        window = None
    if types is None:
        if family in ("mistral", "mixtral", "phi3", "qwen3_moe"):
            types = [WINDOWED] * layers
        elif family == "gemma2":
            types = [FULL if i % 2 else WINDOWED for i in range(layers)]
        elif family == "smollm3":
            types = [FULL if turn else WINDOWED for turn in turning(family, read, layers)]
        elif family == "gemma3":
            every = read.count("sliding_window_pattern")
            types = [WINDOWED if (i + 1) % every else FULL for i in range(layers)]
        elif family in ("qwen2", "qwen3"):
            first = read.number("max_window_layers", zero=True)
            types = [WINDOWED if i >= first else FULL for i in range(layers)]
        else:
            types = [FULL] * layers
    if len(types) != layers or not set(types) <= {WINDOWED, FULL}:
        raise ModelError(f"layer_types must name {layers} layers as {FULL} or {WINDOWED}, got {shown(types)}")
    # Gemma 3 picks a layer's rotary table by its type, so the type stays even without a window.
    if window is None and family != "gemma3":
        return [FULL] * layers
    return list(types)


def turning(family: str, read: Fields, layers: int) -> list[bool]:
    """Whether queries and keys of each layer rotate."""
    if family != "smollm3":
        return [True] * layers
    said = read.get("no_rope_layers")
    if said is None:
        every = read.count("no_rope_layer_interval")
        return [(i + 1) % every > 0 for i in range(layers)]
    if not isinstance(said, list) or len(said) < layers or not set(said[:layers]) <= {0, 1}:
        raise ModelError(f"no_rope_layers must hold {layers} times 0 or 1, got {shown(said)}")
    return [bool(one) for one in said[:layers]]


def hf_ropes(family: str, read: Fields, head_dim: int) -> dict[str, Rope]:
    """Give the rotary table of each layer type."""
    positions, theta = read.count("max_position_embeddings"), read.number("rope_theta")
    said = dict(read.mapping("rope_scaling") or read.mapping("rope_parameters"))
    nested = {kind: said[kind] for kind in (FULL, WINDOWED) if isinstance(said.get(kind), dict)}
    outer = {"partial_rotary_factor": read.get("partial_rotary_factor")}
    partial = family == "phi3"
    if partial:
        outer["original_max_position_embeddings"] = read.get("original_max_position_embeddings")
        kind = said.get("rope_type", said.get("type"))
        said["rope_type"] = "longrope" if kind in ("su", "yarn") else kind
    thetas = {FULL: theta, WINDOWED: theta}
    if family == "gemma3":
        thetas[WINDOWED] = read.number("rope_local_base_freq")
        nested = nested or {FULL: said}
    elif not nested:
        nested = {FULL: said, WINDOWED: said}
    return {
        kind: Rope.from_hf(
            outer | dict(nested.get(kind) or {}),
            theta=thetas[kind],
            dim=head_dim,
            max_positions=positions,
            partial=partial,
        )
        for kind in (FULL, WINDOWED)
    }


def reach(rope: Rope, positions: int, said_in_full: bool) -> int:
    """Give the longest context; most configs state the length before stretching."""
    if rope.kind == "yarn":
        return max(positions, int(rope.original_max_positions * rope.factor))
    if rope.kind == "longrope":
        return min(positions, rope.original_max_positions)
    if rope.kind == "linear" and not said_in_full:
        return int(positions * rope.factor)
    return positions


def share(ropes: Sequence[Rope]) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """Give the distinct tables, and for each layer the index of its own."""
    distinct = tuple(dict.fromkeys(ropes))
    return distinct, tuple(distinct.index(rope) for rope in ropes)
