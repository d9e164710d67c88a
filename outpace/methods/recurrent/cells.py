"""The cells of `redrafter`, `lstm` and `mlp_speculator`: one state per node, and no attention.

    h          the target's last hidden state, the same for a whole draft
    e_t        embedding of the token at depth t; e_0 is the pending token's
    s_t        state of a node at depth t, made from its parent's

    redrafter       s = silu(W e + U s' + b), s' = 0 at the root
                    x = [h, s], then x <- x + silu(A x + b) some times
    lstm            f, i, o, c~ = P s' + a e (to each);  s' = h at the root
                    c = sigmoid(f) c' + sigmoid(i) gelu(norm(c~));  s = sigmoid(o) gelu(norm(c))
    mlp_speculator  s = gelu(norm(P_t s' + a e)), s' = h at the root;  a stage of its own per depth

The head of all three is the target's unembedding of ``out x`` (of ``out s``), or, in files of other
programs, a head of their own. ``a`` weighs a token against the state such that h keeps half of the
weight at the last stage. ``norm`` divides by the root of the mean square, then scales and shifts.

The arithmetic stands here once: training runs it on parameters, drafting on laid out weights.

Papers: Cheng et al. 2024 (ReDrafter), arXiv:2403.09919; Wertheimer et al. 2024 (IBM's MLP
speculator), arXiv:2404.19124. The LSTM is that of ArcticInference, github.com/snowflakedb/ArcticInference.

Shape letters: any leading dimensions *, H hidden size, M inner width, S width of a state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

REDRAFTER, LSTM, MLP = "redrafter", "lstm", "mlp_speculator"
_EPS = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class CellShape:
    """Which cell, and how large."""

    kind: str
    """``redrafter``, ``lstm`` or ``mlp_speculator``."""
    hidden_size: int
    inner: int
    """M: width of the state; of `redrafter`, that of its head."""
    steps: int
    """Depths that it was trained for; ``a`` depends on it."""
    layers: int = 2
    """Blocks of the head of `redrafter`."""
    tied: bool = True
    """Whether all depths share a stage."""
    recurrent: bool = True
    """False: the state of `redrafter` is the sum of the embeddings."""
    scaled: bool = True
    """Whether h is normed before it is a state (lstm, mlp_speculator)."""
    own_rows: int = 0
    """Rows of an embedding and a head of its own; 0: the target's are used."""

    @property
    def stages(self) -> int:
        return 1 if self.tied else self.steps

    @property
    def state(self) -> int:
        """S: numbers that a node keeps."""
        return {REDRAFTER: self.hidden_size, LSTM: 2 * self.inner, MLP: self.inner}[self.kind]

    @property
    def token_weight(self) -> float:
        """a: of the embedding beside the state."""
        keeps = 0.5 ** (0.5 / self.steps)
        wide = self.inner if self.own_rows else 1  # embeddings of its own have length 1
        return float(((1 - keeps**2) * wide / 2) ** 0.5 / keeps)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor besides a draft vocabulary; names are those of the published files."""
        hidden, inner = self.hidden_size, self.inner
        shapes: dict[str, tuple[int, ...]] = {}
        if self.kind == REDRAFTER:
            if self.recurrent:
                shapes |= {
                    "rnn_u.weight": (hidden, hidden),
                    "rnn_u.bias": (hidden,),
                    "rnn_w.weight": (hidden, hidden),
                }
            if inner != 2 * hidden:
                shapes |= {"input_proj.weight": (inner, 2 * hidden), "input_proj.bias": (inner,)}
            for layer in range(self.layers):
                at = f"lm_head.{layer}.linear"
                shapes |= {f"{at}.weight": (inner, inner), f"{at}.bias": (inner,)}
            shapes |= {self.head_name(0): (self.own_rows or hidden, inner)}
            return shapes
        first, later = (4 if self.kind == LSTM else 1) * inner, "projs" if self.kind == LSTM else "proj"
        for stage in range(min(self.steps, 2) if self.tied else self.steps):
            shapes[f"{later}.{stage}.weight"] = (first, hidden if stage == 0 else inner)
        for stage in range(self.stages):
            shapes[self.embed_name(stage)] = (self.own_rows, inner) if self.own_rows else (inner, hidden)
            for norm in ("cell_ln", "state_ln") if self.kind == LSTM else ("ln",):
                shapes |= {f"{norm}.{stage}.weight": (inner,), f"{norm}.{stage}.bias": (inner,)}
            shapes[self.head_name(stage)] = (self.own_rows or hidden, inner)
        return shapes

    def embed_name(self, stage: int) -> str:
        """The embedding of a stage, or the matrix that the target's goes through."""
        return f"{'forget_emb' if self.kind == LSTM else 'emb'}.{stage}.weight"

    def head_name(self, stage: int) -> str:
        """The head of a stage, or the matrix between the state and the target's."""
        if self.kind == REDRAFTER:
            return f"lm_head.{self.layers}.weight"
        return f"head.{stage}.weight"


class Cell:
    """The arithmetic.

    Args:
        shape: of the cell.
        linear: multiplies rows [*, I] by the matrix of this name, and adds its bias if it has one.
        vector: the tensor of this name.
    """

    def __init__(
        self, shape: CellShape, linear: Callable[[str, Tensor], Tensor], vector: Callable[[str], Tensor]
    ) -> None:
        self.shape, self._linear, self._vector = shape, linear, vector

    def step(self, depth: int, hidden: Tensor, embed: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Read one more token.

        Args:
            depth: of the node that carries it; the pending token has 0.
            hidden: [*, H], float32.
            embed: of the token, float32: [*, H], the target's; [*, M] from an embedding of its own
                (lstm, mlp_speculator). Of mean square 1 where the target's head is used.
            state: of the node's parent, [*, S]; None at depth 0.

        Returns:
            The node's state [*, S], and what the head reads [*, M], both float32.
        """
        shape, inner = self.shape, self.shape.inner
        stage = 0 if shape.tied else depth
        if shape.kind == REDRAFTER:
            return self._redrafter(hidden, embed, state)
        before = self._scaled(hidden) if state is None else state[..., :inner]
        if not shape.own_rows:
            embed = self._linear(shape.embed_name(stage).removesuffix(".weight"), embed)
        token = shape.token_weight * embed
        place = min(depth, 1) if shape.tied else depth
        if shape.kind == MLP:
            mixed = self._linear(f"proj.{place}", before) + token
            fresh = F.gelu(self._norm(f"ln.{stage}", mixed))
            return fresh, fresh
        gates = self._linear(f"projs.{place}", before) + torch.cat([token] * 4, -1)
        forget, enter, leave = gates[..., : 3 * inner].sigmoid().chunk(3, -1)
        cell = enter * F.gelu(self._norm(f"cell_ln.{stage}", gates[..., 3 * inner :]))
        if state is not None:
            cell = cell + forget * state[..., inner:]
        fresh = leave * F.gelu(self._norm(f"state_ln.{stage}", cell))
        return torch.cat([fresh, cell], -1), fresh

    def _redrafter(self, hidden: Tensor, embed: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.shape.recurrent:
            before = torch.zeros_like(hidden) if state is None else state
            fresh = F.silu(self._linear("rnn_w", embed) + self._linear("rnn_u", before))
        else:
            fresh = embed.float() if state is None else embed + state
        x = torch.cat([hidden, fresh], -1)
        if self.shape.inner != x.shape[-1]:
            x = self._linear("input_proj", x)
        for layer in range(self.shape.layers):
            x = x + F.silu(self._linear(f"lm_head.{layer}.linear", x))
        return fresh, x

    def _scaled(self, hidden: Tensor) -> Tensor:
        if not self.shape.scaled:
            return hidden
        return F.rms_norm(hidden, hidden.shape[-1:], eps=_EPS) / 2**0.5

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._vector(f"{name}.weight")
        return F.rms_norm(x, x.shape[-1:], weight, _EPS) + self._vector(f"{name}.bias")
