"""AdamW for all weights, or Muon for the matrices between vectors and AdamW for the rest.

Muon replaces the momentum of a matrix by the nearest orthogonal one. It is scaled so that an update is
as long as AdamW's, and one learning rate serves both.

Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; the scale: Liu et al. 2025, arXiv:2502.16982.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import SpecError

KINDS = ("adamw", "muon")
_ENDS = ("lm_head.", "embed", "markov_head.", "slots.", "confidence_head.")
"""Parts of names of matrices that have to do with tokens: each of their rows stands for itself."""


class Both:
    """Two optimizers as one; each parameter is one's.

    Args:
        first: of which ``first_ids`` are the parameters' identities.
    """

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        self.state = _States(self.parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


class _States:
    """What the optimizer of a parameter keeps of it."""

    def __init__(self, parts: tuple[torch.optim.Optimizer, ...]) -> None:
        self._of: dict[int, MutableMapping[Tensor, Any]] = {
            id(parameter): part.state
            for part in parts
            for group in part.param_groups
            for parameter in group["params"]
        }

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        return self._of[id(parameter)].get(parameter, default)

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._of[id(parameter)][parameter] = value


Optimizer = torch.optim.Optimizer | Both


def made(
    kind: str, module: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float, fused: bool
) -> Optimizer:
    """An optimizer of everything in a module that is trained.

    Raises:
        SpecError: Muon, where torch is too old to have it.
    """
    trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    hidden = [one for name, one in trained if one.dim() == 2 and not any(end in name for end in _ENDS)]
    own = {id(one) for one in hidden} if kind == "muon" else set()
    rest = [one for _, one in trained if id(one) not in own]
    adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=weight_decay, fused=fused)
    if not own:
        return adamw
    if not hasattr(torch.optim, "Muon"):
        raise SpecError("loop.optimizer=muon needs torch 2.9 or newer; use adamw")
    muon = torch.optim.Muon(
        hidden, lr=lr, weight_decay=weight_decay, momentum=betas[1], adjust_lr_fn="match_rms_adamw"
    )
    return Both((muon, adamw))
