"""A checkpoint whose tensors are already in memory: made on the spot, or another library's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.models.families import DecoderConfig, GenerationDefaults
from outpace.models.measured import dtype_name
from outpace.models.mixtures import tensors_apart
from outpace.models.places import Place
from outpace.models.text import Tokenizer
from outpace.models.weights import Checkpoint


class MemoryCheckpoint(Checkpoint):
    """Tensors by Hugging Face name, lent and never written to.

    ``tensor`` gives a tensor itself where it is contiguous, on the CPU and of the wanted dtype.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, Tensor],
        *,
        name: str,
        tokenizer: Tokenizer | None = None,
        defaults: GenerationDefaults | None = None,
    ) -> None:
        """Take a model apart.

        Args:
            tensors: everything ``config.tensor_shapes`` names; more is not read, nor what is no tensor, as
                modules of rounded weights have it.
            name: what to call it in reports.
            tokenizer: its tokenizer, if there is one.
            defaults: how its authors sample from it.

        Raises:
            ModelError: a tensor is missing or has another shape than the config says.
        """
        self.config, self.name, self.files = config, name, ()
        self.defaults = defaults or GenerationDefaults()
        tensors = tensors_apart({at: one for at, one in tensors.items() if isinstance(one, Tensor)})
        self._tensors, self._tokenizer = tensors, tokenizer
        self.places = {
            at: Place(
                path=Path(name),
                start=0,
                size=tensor.nbytes,
                shape=tuple(tensor.shape),
                kind=dtype_name(tensor.dtype),
            )
            for at, tensor in tensors.items()
        }
        self._check_shapes()

    def tokenizer(self) -> Tokenizer:
        """Give the tokenizer; the same one at every call.

        Raises:
            ModelError: there is none.
        """
        if self._tokenizer is None:
            raise ModelError(f"{self.name} came without a tokenizer; give token ids")
        return self._tokenizer

    @cached_property
    def digest(self) -> str:
        """A stable id of the weights: configuration, shapes, and a few values of each tensor."""
        lines = hashlib.sha256(self.config.text.encode())
        for name, tensor in sorted(self._tensors.items()):
            flat = tensor.detach().reshape(-1)
            some = flat[:: max(1, len(flat) // 8)].float().tolist()
            lines.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {some}\n".encode())
        return lines.hexdigest()[:16]

    def rows(self, name: str, dtype: torch.dtype) -> Callable[[Sequence[int]], Tensor]:
        """Read rows of a tensor that is lent; see the base class."""
        tensor = self._tensors[name].detach()
        return lambda ids: tensor[list(ids)].to("cpu", dtype)

    def _read(self, name: str, place: Place, dtype: torch.dtype | None) -> Tensor:
        tensor = self._tensors[name].detach()
        return tensor.to("cpu", dtype or tensor.dtype).contiguous()


class Replaced(Checkpoint):
    """A checkpoint some of whose tensors are others, of the same shapes; for reading layers."""

    def __init__(self, whole: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
        self.config, self.name, self.files = whole.config, whole.name, whole.files
        self._whole, self._others = whole, tensors

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, in the wanted dtype."""
        if name not in self._others:
            return self._whole.tensor(name, dtype)
        other = self._others[name]
        return other.to("cpu", dtype or other.dtype).contiguous()

    def rows(self, name: str, dtype: torch.dtype) -> Callable[[Sequence[int]], Tensor]:
        return self._whole.rows(name, dtype)

    def tokenizer(self) -> Tokenizer:
        return self._whole.tokenizer()

    def _read(self, name: str, place: Place, dtype: torch.dtype | None) -> Tensor:
        return self._whole._read(name, place, dtype)


class LayersOnly(MemoryCheckpoint):
    """Layers without embedding and head, whose shapes were checked by whoever read them."""

    def _check_shapes(self) -> None:
        return
