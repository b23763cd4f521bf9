"""Prometheus metrics of a name server that runs alone; imported only if a metrics port is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from ..nameserver.routes import Routes


class NameServerMetrics:
    """`connections`: how many are open; `expires_s`: when its certificates expire."""

    def __init__(
        self, routes: Routes, connections: Callable[[], int], expires_s: Callable[[], Mapping[Path, float]]
    ) -> None:
        self._routes = routes
        self._connections = connections
        self._expires_s = expires_s

    async def readiness(self) -> str | None:
        return None

    async def snapshot(self) -> list[Metric]:
        expires = self._gauge(
            "rocketlet_name_server_certificate_expires_timestamp_seconds",
            "When a certificate in a TLS file expires",
            "file",
        )
        for path, at_s in self._expires_s().items():
            expires.add_metric([path.name], at_s)
        departed = self._gauge(
            "rocketlet_name_server_departed_broker", "1 for a broker that had topics and is gone", "cluster", "broker"
        )
        for broker in self._routes.departed():
            departed.add_metric([broker.cluster, broker.name], 1)
        return [
            self._gauge(
                "rocketlet_name_server_brokers", "Brokers that are registered", value=len(self._routes.brokers())
            ),
            self._gauge("rocketlet_name_server_topics", "Topics of all brokers together", value=self._routes.entries),
            self._gauge("rocketlet_name_server_connections", "Open connections", value=self._connections()),
            departed,
            expires,
        ]

    def _gauge(self, name: str, text: str, *labels: str, value: float | None = None) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, value=value, labels=labels or None)
