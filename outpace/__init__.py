"""outpace: the same text from your language model, sooner.

    >>> import outpace
    >>> engine = outpace.Engine.load("smollm2-135m")
    >>> print(engine.generate("Water boils at", max_new_tokens=20).text)
"""

from outpace.engine.conversation import Conversation
from outpace.engine.engine import Engine
from outpace.engine.results import Chunk, Counters, Result
from outpace.errors import (
    ModelError,
    OutpaceError,
    RequestError,
    SpecError,
    UnknownNameError,
)
from outpace.sampling import SamplingParams

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
