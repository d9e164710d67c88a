"""Figures of several replicas as one page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merged(pages: Mapping[str, str]) -> bytes:
    """The figures of all replicas, each with the label ``replica``.

    Args:
        pages: name of a replica -> its own page.
    """
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for one in text_string_to_metric_families(page):
            whole = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
            for sample in one.samples:
                whole.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Listed(families.values()))
    return generate_latest(registry)


class _Listed(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
