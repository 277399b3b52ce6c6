"""Counters and gauges in Prometheus's text format, with llama-server's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .completion_choice import ratio
from .engine_client import EngineClient
from .messages import ResultStats


def _n_rounds_drafted(stats: ResultStats) -> int:
    by_draft = stats.rounds_by_draft or {}
    return sum(n for name, n in by_draft.items() if name != "none")


Count = Callable[[ResultStats], float]
COUNTERS: tuple[tuple[str, str, Count], ...] = (
    ("prompt_tokens", "Prompt tokens computed", lambda x: x.n_prefilled),
    ("prompt_tokens_cached", "Prompt tokens found in a cache", lambda x: x.n_cached),
    ("prompt_seconds", "Seconds of computing prompts", lambda x: x.prefill_s),
    ("tokens_predicted", "Tokens generated", lambda x: x.n_tokens),
    ("tokens_predicted_seconds", "Seconds of generating", lambda x: x.decode_s),
    ("n_decode", "Passes of the model after prompts", lambda x: x.n_passes),
    ("spec_decode_num_draft_tokens", "Tokens drafted", lambda x: x.n_drafted),
    ("spec_decode_num_accepted_tokens", "Drafted tokens accepted", lambda x: x.n_accepted),
    ("spec_decode_num_drafts", "Passes that verified a draft", _n_rounds_drafted),
)
"""Each counter: name, help text, and a function of the statistics of one answer."""


class Metrics(Collector):
    """Statistics summed over all answers since the server started."""

    def __init__(self) -> None:
        self.started = time.time()
        self._max_context = self._n_rounds = 0
        self._sums = {name: 0.0 for name, _, _ in COUNTERS}
        self._engines: Iterable[EngineClient] = ()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, stats: ResultStats) -> None:
        """Adds the statistics of an ended answer to the counters."""
        self._max_context = max(self._max_context, stats.n_prompt + stats.n_tokens)
        self._n_rounds += stats.rounds
        for name, _, count in COUNTERS:
            self._sums[name] += count(stats)

    def text(self, engines: Iterable[EngineClient]) -> bytes:
        """Returns the body of GET /metrics."""
        self._engines = list(engines)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields all counters and gauges to the Prometheus registry."""
        for name, about, _ in COUNTERS:
            yield CounterMetricFamily(f"llamacpp:{name}", about, value=self._sums[name])
        processing = sum(engine.n_processing for engine in self._engines)
        gauges = (
            ("n_tokens_max", "Longest context so far", self._max_context),
            (
                "prompt_tokens_seconds",
                "Prompt tokens a second",
                ratio(self._sums["prompt_tokens"], self._sums["prompt_seconds"]),
            ),
            (
                "predicted_tokens_seconds",
                "Generated tokens a second",
                ratio(self._sums["tokens_predicted"], self._sums["tokens_predicted_seconds"]),
            ),
            ("requests_processing", "Answers being generated", processing),
            (
                "requests_deferred",
                "Answers that wait for a slot",
                sum(e.n_deferred for e in self._engines),
            ),
            (
                "n_busy_slots_per_decode",
                "Mean answers of a pass after prompts",
                ratio(self._n_rounds, self._sums["n_decode"]),
            ),
        )
        for name, about, value in gauges:
            yield GaugeMetricFamily(f"llamacpp:{name}", about, value=value)
