"""Falcon on disk: the folders that ``outpace train falcon`` writes."""

from __future__ import annotations

from pathlib import Path

from outpace.drafters.trained import CONFIG, read_config
from outpace.drafters.trained_file import TrainedFile, read_file, read_layer
from outpace.methods.falcon.net import FalconShape
from outpace.models.base import Target
from outpace.models.fields import Fields

METHOD = "falcon"
_MOST = 64
FalconFile = TrainedFile[FalconShape]


def read_falcon(folder: Path, target: Target) -> FalconFile:
    """Read a drafter folder.

    Raises:
        ModelError: files that are corrupt or of another target or method, or tensors that are not
            those of the config.
    """
    said = read_config(folder, target, METHOD)
    read = Fields(str(folder / CONFIG), {}, said)
    shape = FalconShape(
        decoder=read_layer(read, target),
        block=read.count("block", most=_MOST),
        passes=read.count("passes", most=_MOST),
    )
    return read_file(folder, said, shape, target)
