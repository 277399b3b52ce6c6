"""Counters and gauges in Prometheus's text form, by llama-server's names."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine_client import EngineClient
from .messages import ResultStats


class Metrics(Collector):
    """Sums over all answers since the start."""

    def __init__(self) -> None:
        self.started = time.time()
        self.n_prompt = self.n_cached = self.n_predicted = self.n_most = 0
        self.prompt_s = self.predicted_s = 0.0
        self.n_rounds = self.n_rounds_drafted = self.n_drafted = self.n_accepted = 0
        self._engines: Iterable[EngineClient] = ()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, stats: ResultStats) -> None:
        """Counts an answer that ended."""
        self.n_prompt += stats.n_prefilled
        self.n_cached += stats.n_prompt - stats.n_prefilled
        self.n_predicted += stats.n_tokens
        self.n_most = max(self.n_most, stats.n_prompt + stats.n_tokens)
        self.prompt_s += stats.prefill_s
        self.predicted_s += stats.decode_s
        self.n_rounds += stats.rounds
        by_draft = stats.rounds_by_draft or {}
        self.n_rounds_drafted += sum(n for name, n in by_draft.items() if name != "none")
        self.n_drafted += stats.n_drafted
        self.n_accepted += stats.n_accepted

    def text(self, engines: Iterable[EngineClient]) -> bytes:
        """Returns the body of /metrics."""
        self._engines = list(engines)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics, for the registry."""
        counters = (
            ("prompt_tokens", "Prompt tokens computed", self.n_prompt),
            ("prompt_tokens_cached", "Prompt tokens found in a cache", self.n_cached),
            ("prompt_seconds", "Seconds of computing prompts", self.prompt_s),
            ("tokens_predicted", "Tokens generated", self.n_predicted),
            ("tokens_predicted_seconds", "Seconds of generating", self.predicted_s),
            ("n_decode", "Passes of the model after prompts", self.n_rounds),
            ("spec_decode_num_draft_tokens", "Tokens drafted", self.n_drafted),
            ("spec_decode_num_accepted_tokens", "Drafted tokens accepted", self.n_accepted),
            ("spec_decode_num_drafts", "Passes that verified a draft", self.n_rounds_drafted),
        )
        for name, about, value in counters:
            yield CounterMetricFamily(f"llamacpp:{name}", about, value=value)
        processing = sum(engine.n_processing for engine in self._engines)
        gauges = (
            ("n_tokens_max", "Longest context so far", self.n_most),
            (
                "prompt_tokens_seconds",
                "Prompt tokens a second",
                _rate(self.n_prompt, self.prompt_s),
            ),
            (
                "predicted_tokens_seconds",
                "Generated tokens a second",
                _rate(self.n_predicted, self.predicted_s),
            ),
            ("requests_processing", "Answers being made", processing),
            ("requests_deferred", "Answers that wait", sum(e.n_deferred for e in self._engines)),
            ("n_busy_slots_per_decode", "Answers being made at once", processing),
        )
        for name, about, value in gauges:
            yield GaugeMetricFamily(f"llamacpp:{name}", about, value=value)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
