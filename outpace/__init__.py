"""outpace: the same text from your language model, sooner.

    >>> import outpace
    >>> engine = outpace.Engine.load("smollm2-135m")
    >>> print(engine.generate("Water boils at", max_new_tokens=20).text)

Names are imported on first use, so that a command which needs no model does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.engine.conversation import Conversation
    from outpace.engine.engine import Engine
    from outpace.engine.results import Chunk, Counters, Result
    from outpace.errors import ModelError, OutpaceError, RequestError, SpecError, UnknownNameError
    from outpace.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "Conversation",
    "Counters",
    "Engine",
    "ModelError",
    "OutpaceError",
    "RequestError",
    "Result",
    "SamplingParams",
    "SpecError",
    "UnknownNameError",
    "__version__",
]

_HOME = {
    "Chunk": "outpace.engine.results",
    "Conversation": "outpace.engine.conversation",
    "Counters": "outpace.engine.results",
    "Engine": "outpace.engine.engine",
    "ModelError": "outpace.errors",
    "OutpaceError": "outpace.errors",
    "RequestError": "outpace.errors",
    "Result": "outpace.engine.results",
    "SamplingParams": "outpace.params",
    "SpecError": "outpace.errors",
    "UnknownNameError": "outpace.errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name == "hf":
        return importlib.import_module("outpace.hf")
    raise AttributeError(f"module 'outpace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
