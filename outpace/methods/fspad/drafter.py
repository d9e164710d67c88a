"""FSPAD: EAGLE's first network, with feature sampling and partial alignment.

How rows follow each other: `outpace.drafters.feature_rows`; the two parts: `outpace.methods.fspad.net`.
Either can be left out when it is trained, so that each one's gain over plain EAGLE can be measured.
Reads what ``outpace train fspad`` made. It is here to be compared: `eagle3` reads more of the target, and
is not held to its features.

Paper: Gui et al. 2024, arXiv:2408.15562, of which the abstract was known: reconstructed.
"""

from __future__ import annotations

from pathlib import Path

from outpace.drafters.feature_rows import RowDrafter
from outpace.drafters.features import TrainedConfig
from outpace.drafters.trained import CONFIG, find, read_config, rounding
from outpace.drafters.trained_file import read_file, read_layer
from outpace.methods.fspad.net import FspadNet, FspadShape
from outpace.models.base import Target
from outpace.models.fields import Fields

METHOD = "fspad"


class Fspad(RowDrafter):
    """Drafts with EAGLE's network and what FSPAD adds to it."""

    Config = TrainedConfig

    @classmethod
    def load(cls, config: TrainedConfig, target: Target) -> Fspad:
        """Read the network; embedding and unembedding are the target's."""
        folder = find(METHOD, target, config.model)
        shape, said = read_shape(folder, target)
        file = read_file(folder, said, shape, target)
        rounded = rounding(config.quantize, target)
        net = FspadNet(shape, file.tensors, target, file.vocab, quantize=rounded)
        return cls(net, None if file.vocab is None else file.vocab.to_target_D.to(target.device))


def read_shape(folder: Path, target: Target) -> tuple[FspadShape, dict[str, object]]:
    """What a drafter folder's config says.

    Raises:
        ModelError: it is corrupt, or of another target or method.
    """
    said = read_config(folder, target, METHOD)
    read = Fields(str(folder / CONFIG), {}, said)
    decoder = read_layer(read, target)
    sampling, partial = read.whole("sampling") or 0, bool(said.get("partial"))
    return FspadShape(decoder=decoder, sampling=sampling, partial=partial), said
