"""The processes that train together, as ``torchrun`` starts them; one alone is the usual case."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.config import world


class Crew:
    """The processes that train together; alone, everything is a no-op."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = world()
        self._device = device
        self._began = self.size > 1 and not dist.is_initialized()
        if self._began:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    @property
    def leads(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def same(self, value: float) -> float:
        """The leader's number."""
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.broadcast(box, 0)
        return float(box)

    def agree(self, parameters: list[torch.nn.Parameter]) -> None:
        """Begin with the leader's weights."""
        if self.size > 1:
            for one in parameters:
                dist.broadcast(one.data, 0)

    def add_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Sum gradients over processes, all at once."""
        if self.size == 1:
            return
        for one in parameters:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        gradients = [one.grad for one in parameters if one.grad is not None]
        flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        start = 0
        for gradient in gradients:
            part = flat[start : start + gradient.numel()]
            gradient.copy_(part.view_as(gradient))
            start += gradient.numel()

    def close(self) -> None:
        """Leave, if this made the group."""
        if self._began:
            dist.barrier()
            dist.destroy_process_group()
