"""How many replicas there should be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

ANSWERS = "answers"
"""What a replica calls its load: answers that it makes or has waiting. A request with ``n`` has n of them."""
FULL = 0.75
"""Share of ``max_ongoing`` at which another replica is wanted."""


class ByLoad:
    """Policy of Ray Serve: as many replicas as the answers under way fill to a share of their batches.

    Args:
        most: answers of a replica at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Replicas wanted, before Ray Serve applies its delays and bounds."""
        answers = (context.aggregated_metrics or {}).get(ANSWERS, {})
        load = sum(answers.values()) + (context.total_queued_requests or 0)
        return max(1, math.ceil(load / (FULL * self._most))), {}
