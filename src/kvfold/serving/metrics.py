"""What Prometheus can read: counted as it happens, and the engine's state when it asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.process_collector import ProcessCollector

if TYPE_CHECKING:
    from kvfold.serving.engine import Engine

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
GAUGES = {
    "rows": "Rows that are being generated.",
    "tokens": "Tokens that those rows have seen.",
    "cache_bytes": "Bytes of the rows' caches.",
    "plain_bytes": "Bytes that the plain model's cache would hold of the same tokens.",
}


class Metrics:
    """One server's figures, in a registry of their own. It is the engine's listener too."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.answers = self._counter("http_requests", "Answers by status.", "path", "status")
        self.prompt = self._counter("prompt_tokens", "Tokens of prompts.", "model")
        self.cached = self._counter("cached_prompt_tokens", "Those found in a store.", "model")
        self.generated = self._counter("generated_tokens", "Tokens generated.", "model")
        self.first = self._histogram("time_to_first_token", "Until the first text.", "model")
        self.seconds = self._histogram("http_request", "Until the answer was complete.", "path")
        self.steps = self._histogram("step", "Steps of a batch.", "model")

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(f"kvfold_{name}_total", told, labels, registry=self.registry)

    def _histogram(self, name: str, told: str, *labels: str) -> Histogram:
        made = f"kvfold_{name}_seconds"
        return Histogram(made, told, labels, buckets=SECONDS, registry=self.registry)

    def prompt_read(self, lane: str, tokens: int, cached: int, choices: int) -> None:
        """See `kvfold.serving.engine.Listener`."""
        self.prompt.labels(lane).inc(tokens)
        self.cached.labels(lane).inc(cached)
        self.generated.labels(lane).inc(choices)

    def stepped(self, lane: str, rows: int, seconds: float) -> None:
        """See `kvfold.serving.engine.Listener`."""
        self.generated.labels(lane).inc(rows)
        self.steps.labels(lane).observe(seconds)

    def watch(self, engine: Engine) -> None:
        """Tell the engine's state too, as it is when someone asks."""
        self.registry.register(_EngineCollector(engine))

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        made: bytes = generate_latest(self.registry)
        return made


class _EngineCollector:
    """Gauges that are read off the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Any]:
        """Called by the registry."""
        state = self.engine.state()
        waiting = GaugeMetricFamily("kvfold_waiting_requests", "Requests in the queue.")
        waiting.add_metric([], state.waiting)
        yield waiting
        for name, told in GAUGES.items():
            gauge = GaugeMetricFamily(f"kvfold_{name}", told, labels=["model"])
            for lane, held in state.lanes.items():
                gauge.add_metric([lane], getattr(held, name))
            yield gauge
