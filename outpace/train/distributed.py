"""The processes that train together, as ``torchrun`` starts them; one alone is the usual case.

On GPUs every process has one of its own, ``cuda:LOCAL_RANK``: NCCL refuses two on one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from outpace.config import restarts, world
from outpace.errors import RequestError


def take_device(device: str | None) -> None:
    """Let ``cuda`` be this process's own GPU from now on, where several train together.

    Call it before anything is loaded. One process alone, or on the CPU, is left as it is.

    Raises:
        RequestError: this machine has fewer GPUs than processes.
    """
    _, size = world()
    if size == 1 or device not in ("auto", "cuda") or not torch.cuda.is_available():
        return
    own, count = dist.get_node_local_rank(0), torch.cuda.device_count()
    if own >= count:
        raise RequestError(
            f"process {own} of this machine has no GPU of its own: there are {count}; start at "
            f"most that many with --nproc-per-node {count}"
        )
    torch.cuda.set_device(own)


def check_device(device: torch.device) -> None:
    """Refuse a GPU that another process of the training computes on.

    Raises:
        RequestError: several processes, and this is not ``cuda:LOCAL_RANK``.
    """
    rank, size = world()
    if size == 1 or device.type != "cuda":
        return
    place = torch.cuda.current_device() if device.index is None else device.index
    own = dist.get_node_local_rank(0)
    if place != own:
        raise RequestError(
            f"process {rank} computes on cuda:{place}, and its own GPU is cuda:{own}; give "
            "--device cuda, without a number, or start one process"
        )


class ProcessGroup:
    """The processes that train together; alone, everything is a no-op."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = world()
        self._device = device
        self._began = self.size > 1 and not dist.is_initialized()
        if self._began:
            # Processes that torchrun starts anew find the store as it was, with addresses of those that died.
            store, rank, size = next(rendezvous("env://"))
            store = PrefixStore(f"start-{restarts()}", store)
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sums over processes, on the device of the values, whatever the group communicates on."""
        if self.size == 1:
            return values
        there = values.to(self._device)
        dist.all_reduce(there)
        return values.copy_(there)

    def sum_long(self, values: Tensor) -> Tensor:
        """Sums of vectors that are shorter where there was less to count; zeros stand for the rest."""
        if self.size == 1:
            return values
        length = torch.tensor([len(values)], device=self._device)
        dist.all_reduce(length, dist.ReduceOp.MAX)
        return self.sum(torch.cat([values, values.new_zeros(int(length) - len(values))]))

    def any(self, value: bool) -> bool:
        """Whether it is so in one of them."""
        return value if self.size == 1 else bool(self.sum(torch.tensor([float(value)])).item())

    def same(self, value: float) -> float:
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.broadcast(box, 0)
        return float(box)

    def agree(self, parameters: list[torch.nn.Parameter]) -> None:
        if self.size > 1:
            for one in parameters:
                dist.broadcast(one.data, 0)

    def add_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Sum gradients over processes, all at once. None is 0."""
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

    def wait(self) -> None:
        """Let nobody go on before all are here."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        if self._began:
            dist.destroy_process_group()
