"""Prometheus metrics, served by prometheus-client in a thread of its own; it asks the broker's loop for the numbers.

Imported only if a metrics port is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .broker import Broker
from .config import METRICS_ANSWER_S


class Collector:
    """What is measured; `collect` runs in the thread, `snapshot` in the loop."""

    def __init__(self, broker: Broker, loop: asyncio.AbstractEventLoop) -> None:
        self._broker = broker
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        return asyncio.run_coroutine_threadsafe(self._snapshot(), self._loop).result(METRICS_ANSWER_S)

    async def _snapshot(self) -> list[Metric]:
        broker = self._broker
        put = CounterMetricFamily(
            "rocketlet_messages_put", "Messages stored, since the data folder began", labels=["topic"]
        )
        for topic in {queue.topic for queue in broker.store.queues.values()}:
            put.add_metric([topic], sum(q.next for q in broker.store.queues.values() if q.topic == topic))
        got = CounterMetricFamily("rocketlet_messages_got", "Messages read, since the start", labels=["topic", "group"])
        for key, count in broker.statistics.got.items():
            got.add_metric(list(key.rsplit("@", 1)), count)
        log_bytes = GaugeMetricFamily(
            "rocketlet_commit_log_bytes", "Bytes in the commit log", broker.store.end - broker.store.begin
        )
        damaged = CounterMetricFamily(
            "rocketlet_messages_damaged", "Messages left out because they cannot be read", len(broker.store.damaged)
        )
        failed = GaugeMetricFamily(
            "rocketlet_store_failed",
            "1 if the disk failed, so that nothing is written",
            int(broker.store.fault is not None),
        )
        return [put, got, log_bytes, damaged, failed, *self._access(), *await self._groups()]

    def _access(self) -> list[Metric]:
        broker = self._broker
        refused = CounterMetricFamily(
            "rocketlet_requests_refused", "Requests that their account may not make, by reason", labels=["reason"]
        )
        for reason, count in (broker.acl.refused if broker.acl else {}).items():
            refused.add_metric([reason], count)
        handshakes = CounterMetricFamily(
            "rocketlet_tls_handshakes", "TLS handshakes, by how they ended", labels=["outcome"]
        )
        handshakes.add_metric(["done"], broker.tls.handshakes)
        handshakes.add_metric(["failed"], broker.tls.failed_handshakes)
        mismatched = CounterMetricFamily(
            "rocketlet_tls_mismatches",
            "Clients that came with TLS to a plain port, or without to one that enforces it",
            broker.tls.refused,
        )
        return [refused, handshakes, mismatched]

    async def _groups(self) -> list[Metric]:
        broker = self._broker
        members = GaugeMetricFamily("rocketlet_group_members", "Members of a group", labels=["group"])
        faults = GaugeMetricFamily(
            "rocketlet_group_disagreement",
            "1 for each thing that members of a group disagree in",
            labels=["group", "fault"],
        )
        lag = GaugeMetricFamily(
            "rocketlet_group_lag", "Messages that a group has not committed", labels=["group", "topic"]
        )
        oldest = GaugeMetricFamily(
            "rocketlet_group_oldest_seconds",
            "Age of the oldest message that a group has not committed; 0 if there is none",
            labels=["group", "topic"],
        )
        now_ms = broker.clock.time_ms()
        for name in broker.progress.groups():
            await asyncio.sleep(0)  # clients do not wait for a thousand groups
            group = broker.groups.get(name)
            members.add_metric([name], len(group.members) if group else 0)
            for fault in sorted(group.reported) if group else ():
                faults.add_metric([name, fault], 1)
            for topic in broker.progress.topics_of(name):
                total = sum(item.lag for item in broker.progress.of(name, topic).values())
                lag.add_metric([name, topic], total)
                since_ms = broker.progress.oldest_ms(name, topic)
                oldest.add_metric([name, topic], 0 if since_ms is None else max(now_ms - since_ms, 0) / 1000)
        double = CounterMetricFamily(
            "rocketlet_double_readers", "Times that a queue was read by two members", broker.watch.double_readers
        )
        orphans = GaugeMetricFamily(
            "rocketlet_orphaned_queues", "Queues that no member reads now", broker.watch.orphans
        )
        waiting = GaugeMetricFamily(
            "rocketlet_transactions_waiting", "Half messages without an outcome", broker.transactions.waiting
        )
        set_aside = CounterMetricFamily(
            "rocketlet_delayed_set_aside", "Delayed messages that could not be delivered", broker.delays.set_aside
        )
        return [members, faults, lag, oldest, double, orphans, waiting, set_aside]


class _Threads(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Requests are not logged."""


class Metrics:
    """Serves /metrics until `close`. Raises OSError if the port is taken."""

    def __init__(self, broker: Broker, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        collector: Any = Collector(broker, asyncio.get_running_loop())
        collector.describe = list  # nothing is collected before the first request
        registry.register(collector)
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = make_server(host, port, self._answer, _Threads, handler_class=_Quiet)
        except OSError as error:
            raise OSError(error.errno, f"the metrics port {host}:{port}: {error.strerror}") from None
        self.port = int(self._server.server_port)
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == "/metrics":
            found: Iterable[bytes] = self._metrics(environ, start_response)
            return found
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"The metrics are at /metrics.\n"]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
