"""What an application of Ray Serve is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Named as the options of ``outpace serve``, where these say the same."""

    model: str = "smollm2-135m"
    """Name, folder, GGUF file, or hub id. Every node must be able to read it."""
    drafter: str = "auto"
    """Method specs, with commas between them; the first serves requests that name none."""
    name: str | None = None
    """What clients call the model; None: its own name."""
    dtype: str = "auto"
    """As of ``outpace serve``."""
    quantize: str | None = None
    """As of ``outpace serve``."""
    replicas: str = "1"
    """A number, or LEAST-MOST: as many as the load needs."""
    max_ongoing: int = 32
    """Requests of a replica at a time."""
    max_queue: int = 256
    """Requests that may wait for a replica; what comes then is told to try again later."""
    busier: int = 8
    """By how many requests a replica may be busier than the least busy one, and still get those whose
    beginning it has read."""
    threads: int = 1
    """CPUs of a replica: Ray counts them, and the replica computes with so many threads."""
    gpus: float = 0.0
    """GPUs of a replica, which computes on one where this is above 0."""
    grace: int = 30
    """Seconds that answers under way get where a replica is stopped."""
    api_key_file: str | None = None
    """Keys, one per line. Every node must be able to read it."""
    allowed_hosts: str | None = None
    """Further names that clients may call the server by, with commas between them."""

    def __post_init__(self) -> None:
        for name in ("max_ongoing", "max_queue", "busier", "threads", "grace"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.gpus < 0:
            raise ValueError(f"gpus must be at least 0, got {self.gpus:g}")
        least, most = self.bounds
        if not 1 <= least <= most:
            raise ValueError(f"replicas must be N or LEAST-MOST, from 1 up, got {self.replicas[:40]!r}")

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most replicas; (0, 0) where the text is neither a number nor two."""
        words = self.replicas.split("-")
        if len(words) > 2 or not all(word.isascii() and word.isdigit() for word in words):
            return 0, 0
        return int(words[0]), int(words[-1])
