"""A request router of Ray Serve that sends requests where their beginnings were read."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outpace.ray.beginnings import Beginnings
from outpace.ray.relay import Call


class BeginningsRouter(RequestRouter):
    """Sends a `Call` to the replica that was sent its beginning before, unless that is much busier.

    Requests are not exchanged for those that have waited longer: each goes where its own beginning is.
    """

    def initialize_state(self, busier: int) -> None:
        """Called by Ray Serve once.

        Args:
            busier: as in ``Settings``.
        """
        self._busier = busier
        self._beginnings: Beginnings[ReplicaID] = Beginnings()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas to try, each a rank of its own."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all are tried in every round
        by_id = {one.replica_id: one for one in candidate_replicas}
        loads = {one: self.replica_queue_len_cache.get(one) or 0 for one in by_id}
        ranked = self._beginnings.ranked(loads, _blocks(pending_request), self._busier)
        return [[by_id[one]] for one in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray Serve when a replica has taken a request."""
        self._beginnings.sent(replica_id, _blocks(pending_request))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve when there are others than before."""
        super().update_replicas(replicas)
        self._beginnings.keep({one.replica_id for one in replicas})


def _blocks(pending: PendingRequest | None) -> tuple[bytes, ...]:
    first = pending.args[0] if pending is not None and pending.args else None
    return first.blocks if isinstance(first, Call) else ()
