"""What a load session and its command line have in common. Standard library only."""

from __future__ import annotations

PLAIN = "none"
"""The drafter that all others are compared with."""
MIXED = "mixed"
"""In the place of a drafter: requests take turns."""
LEAST = 16
"""Requests of a round, at least, unless said otherwise."""
USUAL = f"twice the clients, {LEAST} at least"
"""``usual_requests`` in words."""


def usual_requests(clients: int) -> int:
    """Requests of a round where nobody says how many; 0 clients: an open loop."""
    return max(LEAST, 2 * clients)
