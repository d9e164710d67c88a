"""What answers cost, in figures."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.engine.results import DrafterCounts, Result
from outpace.server.encoding import Json


def metrics(results: Sequence[Result]) -> Json | None:
    """What one answer cost; None for several, whose figures would not add up to a rate."""
    if len(results) != 1:
        return None
    (result,) = results
    c = result.counters
    return {
        "speculative_decoding": speculative_decoding(result),
        "drafter": result.drafter,
        "by_drafter": {
            spec: {"drafts": d.drafts, "drafted": d.drafted, "accepted": d.accepted}
            for spec, d in result.by_drafter.items()
        },
        "passes": c.passes,
        "mean_emitted": c.mean_emitted,
        "acceptance_rate": c.acceptance_rate,
        "tokens_per_second": result.tokens_per_second,
        "seconds": result.seconds,
        "prefill_seconds": result.prefill_seconds,
        "queue_seconds": result.queue_seconds,
        "seed": result.seed,
        "lossless": result.lossless,
    }


def speculative_decoding(result: Result) -> Json:
    """All drafters together, under the names that other servers use."""
    total = sum(result.by_drafter.values(), DrafterCounts())
    deepest = max(len(result.counters.drafted_at), len(total.accepted_at))
    reached = (*total.accepted_at, *(0,) * (deepest + 1 - len(total.accepted_at)))
    return {
        "mean_acceptance_length": 1 + total.accepted / total.drafts if total.drafts else None,
        "draft_acceptance_rate": total.accepted / total.drafted if total.drafted else None,
        "acceptance_histogram": [
            more - deeper for more, deeper in zip((total.drafts, *reached), reached, strict=False)
        ],
        "num_spec_steps": total.drafts,
        "num_accepted_draft_tokens": total.accepted,
        "num_draft_tokens": total.drafted,
        "num_spec_tokens": deepest,
    }
