"""Figures for Prometheus, under names that differ from those of other servers by the prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outpace.engine.results import Result
from outpace.serving.events import ServiceStats
from outpace.serving.learning import LearningStats

PREFIX = "outpace:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0)
_TOKENS = tuple(float(factor * 10**power) for power in range(6) for factor in (1, 2, 5))


class Meters:
    """All figures of one server. Not thread-safe but for ``text``.

    Args:
        model: what the model is called; a label of every figure.
        stats: gives the service's own figures, read when somebody asks.
        lossless: drafter -> whether its answers have the distribution of the model.
    """

    def __init__(
        self, model: str, stats: Callable[[], ServiceStats], lossless: Mapping[str, bool] | None = None
    ) -> None:
        self._registry = CollectorRegistry()
        about = Gauge(
            PREFIX + "lossless",
            "1 if answers drafted by it have the distribution of the model, else 0.",
            ["model_name", "drafter"],
            registry=self._registry,
        )
        for drafter, kept in (lossless or {}).items():
            about.labels(model, drafter).set(kept)
        self._registry.register(_FromService(model, stats))

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, what, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(model)

        self._first = histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _SECONDS
        )
        self._gap = histogram(
            "inter_token_latency_seconds",
            "Between two portions of tokens; with speculation a portion is often several tokens.",
            _PER_TOKEN,
        )
        self._per_token = Histogram(
            PREFIX + "request_time_per_output_token_seconds",
            "Of an answer: seconds after its first token / tokens after its first.",
            ["model_name", "drafter"],
            buckets=_PER_TOKEN,
            registry=self._registry,
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "From the request to the last token.", _SECONDS
        )
        self._queue = histogram("request_queue_time_seconds", "From the request to its start.", _SECONDS)
        self._prefill = histogram(
            "request_prefill_time_seconds", "From the start of a request to its first token.", _SECONDS
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token of an answer to its last.", _SECONDS
        )
        self._inference = histogram(
            "request_inference_time_seconds", "From the start of a request to its last token.", _SECONDS
        )
        self._read = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._written = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._per_output = histogram(
            "time_per_output_token_seconds",
            "As request_time_per_output_token_seconds, under the name of older dashboards.",
            _PER_TOKEN,
        )
        self._http = Counter(
            PREFIX + "http_responses",
            "Responses by path and status.",
            ["model_name", "path", "status"],
            registry=self._registry,
        )
        self._model, self._seconds, self._answers = model, 0.0, 0

    def first(self, seconds: float) -> None:
        """An answer has begun, so long after its request."""
        self._first.observe(seconds)

    def later(self, seconds: float) -> None:
        """More tokens have come, so long after the ones before."""
        self._gap.observe(seconds)

    def ended(self, result: Result, seconds: float) -> None:
        """An answer has ended, so long after its request."""
        self._whole.observe(seconds)
        self._seconds, self._answers = self._seconds + result.seconds, self._answers + 1
        decode = result.seconds - result.prefill_seconds
        self._queue.observe(result.queue_seconds)
        self._prefill.observe(result.prefill_seconds)
        self._decode.observe(decode)
        self._inference.observe(result.seconds)
        self._read.observe(result.prompt_tokens)
        self._written.observe(len(result.tokens))
        if len(result.tokens) > 1:
            each = decode / (len(result.tokens) - 1)
            self._per_token.labels(self._model, result.drafter).observe(each)
            self._per_output.observe(each)

    def responded(self, path: str, status: int) -> None:
        self._http.labels(self._model, path, str(status)).inc()

    def wait(self, stats: ServiceStats) -> int:
        """Whole seconds, 1 to 60, until there may be room in the queue again."""
        mean = self._seconds / self._answers if self._answers else 1.0
        return min(60, max(1, round(mean * stats.waiting / max(1, stats.slots))))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _FromService(Collector):
    def __init__(self, model: str, stats: Callable[[], ServiceStats]) -> None:
        self._model, self._stats = model, stats

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand: figures are made when they are asked for."""
        return []

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield from self._gauges(stats)
        yield from self._counts(stats)
        yield from self._drafters(stats)
        if isinstance(stats, LearningStats):
            yield from self._learned(stats)

    def _learned(self, stats: LearningStats) -> Iterable[Metric]:
        kinds: dict[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str]] = {
            "rows": (CounterMetricFamily, "Judged tokens that came to learn from."),
            "held_rows": (CounterMetricFamily, "Judged tokens that came to judge by."),
            "updates": (CounterMetricFamily, "Updates of weights."),
            "versions": (CounterMetricFamily, "Versions of drafters that took another's place."),
            "rolled_back": (CounterMetricFamily, "Of these, given up again."),
            "seconds": (CounterMetricFamily, "Time spent on learning."),
            "acceptance": (GaugeMetricFamily, "Held-out acceptance at the last judgement."),
            "kept_rows": (GaugeMetricFamily, "Judged tokens in memory."),
            "branches": (GaugeMetricFamily, "Drafters that are learned: keys times topics."),
            "broken": (
                GaugeMetricFamily,
                "1 if learning has failed and stopped, or waits for room on the disk.",
            ),
        }
        for name, (kind, what) in kinds.items():
            made = kind(f"{PREFIX}learning_{name}", what, labels=["model_name"])
            made.add_metric([self._model], stats.learned.get(name, 0.0))
            yield made

    def _gauges(self, stats: ServiceStats) -> Iterable[Metric]:
        held = stats.pages_used + stats.pages_stored
        for name, what, value in (
            ("num_requests_running", "Answers that are being made.", stats.running),
            ("num_requests_waiting", "Answers that wait for room.", stats.waiting),
            (
                "kv_cache_usage_perc",
                "Share of the pages of keys and values in use; 1 is all.",
                held / stats.pages if stats.pages else 0.0,
            ),
        ):
            made = GaugeMetricFamily(PREFIX + name, what, labels=["model_name"])
            made.add_metric([self._model], value)
            yield made

    def _counts(self, stats: ServiceStats) -> Iterable[Metric]:
        for name, what, value in (
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("prefix_cache_hits", "Of these, stored from earlier texts.", stats.cached_tokens),
            ("generation_tokens", "Tokens of answers.", stats.new_tokens),
            ("target_passes", "Passes of the target, prompts included.", stats.passes),
            ("num_preemptions", "Answers that lost their memory for a while.", stats.preempted),
        ):
            made = CounterMetricFamily(PREFIX + name, what, labels=["model_name"])
            made.add_metric([self._model], value)
            yield made
        ended = CounterMetricFamily(
            PREFIX + "request_success",
            "Answers, by the reason why they ended.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in stats.finished.items():
            ended.add_metric([self._model, reason], count)
        yield ended

    def _drafters(self, stats: ServiceStats) -> Iterable[Metric]:
        labels = ["model_name", "drafter"]
        for name, what, field in (
            ("num_drafts", "Drafts that were not empty.", "drafts"),
            ("num_draft_tokens", "Drafted tokens.", "drafted"),
            ("num_accepted_tokens", "Drafted tokens that were kept.", "accepted"),
        ):
            made = CounterMetricFamily(f"{PREFIX}spec_decode_{name}", what, labels=labels)
            for spec, counts in stats.drafters.items():
                made.add_metric([self._model, spec], getattr(counts, field))
            yield made
        by_place = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Drafts of which the token at this place was kept; the first place is 0.",
            labels=[*labels, "position"],
        )
        for spec, counts in stats.drafters.items():
            for place, count in enumerate(counts.accepted_at):
                by_place.add_metric([self._model, spec, str(place)], count)
        yield by_place
