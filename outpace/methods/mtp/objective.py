"""Multi-token prediction on a frozen trunk: modules of one decoder layer, chained or side by side.

    row t      depth k reads token t + k and what depth k - 1 made of row t (chained), or the target's
               state of row t alone (parallel), and guesses token t + 1 + k

All rows of a text go through a module at once, each seeing the rows before it. Behind the last module a
chain uses that one again (``steps`` above ``modules``). Then a row sees its own keys of the depths
since, as in drafting. Modules start as the target's last layer; ``eh_proj`` starts as the identity on
the state. Only they are trained: the trunk, embedding and unembedding are the target's.

Papers: Gloeckle et al. 2024, arXiv:2404.19737 (there the trunk learns too); DeepSeek-V3,
arXiv:2412.19437; the weights of FastMTP, arXiv:2509.18362, are a decay of 0.6.

Shape letters: B sequences, T tokens, A learning rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.drafters.trained import decoder_to_json, lender
from outpace.law import VocabMap
from outpace.methods.mtp.files import METHOD
from outpace.methods.mtp.net import CHAINED, NORMED, PARALLEL, RAW
from outpace.models.base import HEAD, TAPS, Target
from outpace.models.decoder import Decoder
from outpace.models.families import DecoderConfig
from outpace.train.ahead import AheadTraining, LayerObjective
from outpace.train.align import Aligned, places
from outpace.train.batches import Batch
from outpace.train.networks import KeyValue, Layer, Norm, plain_shape, take_layer
from outpace.train.objective import LAST

SMALL = 0.05
"""Scale of what a layer adds at the start: in the target it adds to a stream of length 20."""
DOUBT = 0.5
"""Scale of the last norm at the start, which is sure of wrong tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpTraining(AheadTraining):
    kind: str = CHAINED
    """``chained``, each module behind the one before, or ``parallel``, all on the target's state."""
    modules: int = 1
    """How many modules."""
    steps: int = 3
    """Depths that can be drafted; behind its last module a chain uses that one again. In parallel as
    many as there are modules."""
    base: str = NORMED
    """State of the target that modules read: behind its last norm (normed) or before (raw)."""
    recycle: str = NORMED
    """What the next module of a chain reads: behind the module's norm (normed) or before (raw)."""

    def __post_init__(self) -> None:
        AheadTraining.__post_init__(self)
        self.at_least_one(modules=self.modules, steps=self.steps)
        for key, known in (
            ("kind", (CHAINED, PARALLEL)),
            ("base", (NORMED, RAW)),
            ("recycle", (NORMED, RAW)),
        ):
            if getattr(self, key) not in known:
                raise ValueError(f"{key} must be {' or '.join(known)}, got {getattr(self, key)!r}")
        if self.kind == CHAINED and self.steps < self.modules:
            raise ValueError(f"{self.modules} modules need as many steps, got {self.steps}")

    @property
    def depths(self) -> int:
        return self.modules if self.kind == PARALLEL else self.steps


class Module(nn.Module):
    """One module in training."""

    def __init__(self, config: DecoderConfig, chained: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.layer = Layer(config)
        self.norm = Norm(hidden, config)
        if chained:
            self.enorm, self.hnorm = Norm(hidden, config), Norm(hidden, config)
            self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def joined(self, embed_BAH: Tensor, state_BAH: Tensor) -> Tensor:
        """The stream that enters the layer."""
        both = torch.cat([self.enorm(embed_BAH), self.hnorm(state_BAH)], -1)
        return cast(Tensor, self.eh_proj(both).float())

    def after(self, x_BAH: Tensor, turn: Any, text: KeyValue, own: list[KeyValue], place: Tensor) -> Tensor:
        """The stream behind the layer, of rows that see a text and keys of their own."""
        layer = self.layer
        query = layer.self_attn.queries(layer.input_layernorm(x_BAH), turn)
        return layer.after(x_BAH, layer.self_attn(query, text, own, place))


class MtpNet(nn.Module):
    """All modules."""

    def __init__(self, config: DecoderConfig, modules: int, chained: bool) -> None:
        super().__init__()
        self.modules_ = nn.ModuleList(Module(config, chained) for _ in range(modules))


class Mtp(LayerObjective):
    """Modules in training."""

    Config = MtpTraining
    module: MtpNet

    def __init__(
        self, config: MtpTraining, target: Decoder, vocab: VocabMap | None, net: MtpNet, shape: DecoderConfig
    ) -> None:
        super().__init__(config, target, vocab, net, shape, config.depths)
        self._base = _base(config, target)

    @classmethod
    def taps(cls, config: MtpTraining, target: Target) -> tuple[str, ...]:
        return tuple(dict.fromkeys([_base(config, target), LAST]))

    @classmethod
    def build(cls, config: MtpTraining, target: Target, vocab: VocabMap | None) -> Mtp:
        lent = lender(target, METHOD, TAPS, HEAD)
        shape = plain_shape(lent.config, 1, -1)
        net = MtpNet(shape, config.modules, config.kind == CHAINED).to(lent.device)
        _take(net, lent, config.base == NORMED)
        return cls(config, lent, vocab, net, shape)

    def states(self, batch: Batch, aligned: Aligned) -> list[Tensor]:
        base_BTH = batch.feature[self._base].float()
        place_1T = places(batch)
        longest = batch.token_BT.shape[1] + self.config.depths + 1
        turn = self.turns.at(place_1T, longest)
        place_BT = place_1T.expand(len(base_BTH), -1)
        modules = [cast(Module, one) for one in self.module.modules_]
        if self.config.kind == PARALLEL:
            return [self._side_by_side(one, base_BTH, turn, aligned) for one in modules]
        out = list[Tensor]()
        state_BTH, last = base_BTH, len(modules) - 1
        for number, module in enumerate(modules):
            embed_BTH = self.embed(_shifted(batch.token_BT, number + 1))
            x_BTH = module.joined(embed_BTH, state_BTH)
            text = module.layer.self_attn.keys(module.layer.input_layernorm(x_BTH), turn)
            if number == last:
                x, rows = aligned.rows(x_BTH), aligned.place_BA
                x = module.after(x, self.turns.at(rows, longest), text, [], rows)
                return [*out, *self._again(module, x, text, aligned, longest)]
            x = module.after(x_BTH, turn, text, [], place_BT)
            state_BTH = self._given(module, x)
            out.append(module.norm(aligned.rows(x)))
        raise AssertionError("there is a last module")

    def _again(
        self, module: Module, x: Tensor, text: KeyValue, aligned: Aligned, longest: int
    ) -> list[Tensor]:
        """The last module, and that one again for all further depths."""
        out, own, place_BA = [module.norm(x)], list[KeyValue](), aligned.place_BA
        first = self.config.modules
        for depth in range(first + 1, self.config.steps + 1):
            turn = self.turns.at(place_BA + depth - first, longest)
            x = module.joined(self.embed(aligned.token(depth)), self._given(module, x))
            own.append(module.layer.self_attn.keys(module.layer.input_layernorm(x), turn))
            x = module.after(x, turn, text, own, place_BA)
            out.append(module.norm(x))
        return out

    def _side_by_side(self, module: Module, base_BTH: Tensor, turn: Any, aligned: Aligned) -> Tensor:
        layer, rows = module.layer, aligned.place_BA
        text = layer.self_attn.keys(layer.input_layernorm(base_BTH), turn)
        own_turn = self.turns.at(rows, base_BTH.shape[1])
        normed: Tensor = module.norm(module.after(aligned.rows(base_BTH), own_turn, text, [], rows))
        return normed

    def _given(self, module: Module, x: Tensor) -> Tensor:
        """What the next module reads."""
        given: Tensor = x if self.config.recycle == RAW else module.norm(x)
        return given

    def named(self) -> Mapping[str, Tensor]:
        state = self.module.state_dict()
        return {_named(name): one for name, one in state.items()}

    def save(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        config = self.config
        kept = {
            "kind": config.kind,
            "modules": config.modules,
            "steps": config.depths,
            "recycle": config.recycle,
            "decoder": decoder_to_json(self.shape),
        }
        self.save_tree(folder, {**self.about(METHOD, [self._base]), **kept}, provenance)


def _named(name: str) -> str:
    """``modules_.0.layer.self_attn.q_proj.weight`` as files call it."""
    return name.replace("modules_.", "modules.", 1)


def _base(config: MtpTraining, target: Target) -> str:
    return LAST if config.base == NORMED else f"hidden.{target.num_layers}"


def _shifted(token_BT: Tensor, ahead: int) -> Tensor:
    return F.pad(token_BT[:, ahead:], (0, min(ahead, token_BT.shape[1])))


@torch.no_grad()
def _take(net: MtpNet, target: Decoder, normed: bool) -> None:
    """Start as the last layer of the target, on the state alone: nothing is drawn at random.

    Args:
        normed: whether the state comes from behind the target's last norm, which is undone then.
    """
    hidden, offset = target.hidden_size, target.config.norm_offset
    last_H = target.checkpoint.tensor("model.norm.weight", torch.float32).to(target.device) + offset
    least = 0.1 * float(last_H.abs().mean())
    undone_H = torch.where(last_H.abs() < least, 1 / least, 1 / last_H)
    for one in net.modules_:
        module = cast(Module, one)
        take_layer(module.layer, target, target.num_layers - 1, SMALL)
        module.norm.weight.copy_(last_H * DOUBT)
        if hasattr(module, "eh_proj"):
            module.hnorm.weight.copy_(undone_H if normed else torch.ones_like(last_H))
            module.eh_proj.weight.copy_(torch.cat([0.1 * torch.eye(hidden), torch.eye(hidden)], 1))
