"""The metrics of a supervisor of several brokers; imported only if there is a metrics port."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class Kept(Protocol):
    """A broker that is restarted when it ends."""

    name: str
    restarts: int
    is_ready: bool


class SupervisorMetrics:
    def __init__(self, cluster: str) -> None:
        self._cluster = cluster

    def of(self, brokers: Iterable[Kept]) -> list[Metric]:
        ready = self._gauge("rocketlet_broker_ready", "1 if the broker's process has started and is ready")
        restarts = self._counter(
            "rocketlet_broker_restarts", "Restarts of the broker's process after it ended, including failed ones"
        )
        for broker in brokers:
            ready.add_metric([self._cluster, broker.name], int(broker.is_ready))
            restarts.add_metric([self._cluster, broker.name], broker.restarts)
        return [ready, restarts]

    def _gauge(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=["cluster", "broker"])

    def _counter(self, name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=["cluster", "broker"])
