"""Prometheus metrics of brokers and name servers, and the port that serves metrics and health checks."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sized
from importlib.metadata import version
from socketserver import BaseRequestHandler, ThreadingMixIn
from threading import Lock, Thread
from typing import Protocol, TypeVar
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from ..host.address import is_loopback
from ..protocol import names
from ..protocol.bodies import SLICE, Work
from ..protocol.codes import RequestCode
from ..protocol.fast import MODULE
from .broker import BrokerController
from .config import LIMITS, MAX_METRIC_LEVELS, MAX_METRICS_CONNECTIONS, MAX_ORPHANED_TOPICS, METRICS_CLIENT_S, Limits
from .memory import Memory
from .messages.statistics import GOT, PUT
from .nameserver import Routes
from .runtime.histogram import Histogram
from .tls import Tls

log = structlog.get_logger("rocketlet.metrics")


# ------------------------------------------------------------------------------
# Prometheus metrics and health checks of a broker.
#
# Imported only if a metrics port is configured. Names that start with `rocketlet_` are Rocketlet's own. Names that
# start with `rocketmq_` are those of Apache's exporter (RMQMetricsCollector) and of Apache's broker since 5.1, with their
# labels, so that dashboards, alerts and autoscalers that use these metrics also work here.


_MINUTE_S = 60.0
_BROKER_LABELS = ("cluster", "broker")
_NODE_LABELS = ("cluster", "node_type", "node_id")
# metrics of Apache's broker since 5.1; others have the exporter's labels
_OF_NODE = frozenset(
    (
        "rocketmq_messages_in",
        "rocketmq_messages_out",
        "rocketmq_consumer_lag_messages",
        "rocketmq_consumer_lag_latency",
        "rocketmq_consumer_inflight_messages",
        "rocketmq_consumer_ready_messages",
    )
)

T = TypeVar("T")


class Collector:
    """Collector of a broker's metrics and its readiness."""

    def __init__(self, broker: BrokerController, memory: Memory, connections: Sized) -> None:
        self._broker = broker
        self._memory = memory
        self._connections = connections

    async def readiness(self) -> str | None:
        fault = self._broker.store.write_fault()
        if fault is not None:
            return fault
        return None if self._broker.registration.is_registered else "the broker is not registered with a name server"

    async def snapshot(self) -> list[Metric]:
        return [
            *self._process(),
            *await self._topics(),
            *self._store(),
            *self._requests(),
            *self._access(),
            *await self._groups(),
        ]

    @property
    def _labels(self) -> list[str]:
        return [self._broker.config.cluster, self._broker.config.name]

    @property
    def _node_labels(self) -> list[str]:
        return [self._broker.config.cluster, "broker", self._broker.config.name]

    def _gauge(self, name: str, text: str, value: float | None = None, *labels: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=[*_labels_of(name), *labels])
        if value is not None:
            family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float | None = None, *labels: str) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=[*_labels_of(name), *labels])
        if value is not None:
            family.add_metric(self._labels, value)
        return family

    def _histogram(self, name: str, text: str, *labels: str) -> HistogramMetricFamily:
        return HistogramMetricFamily(name, text, labels=["cluster", "broker", *labels])

    def _process(self) -> Iterator[Metric]:
        info = InfoMetricFamily(
            "rocketlet", "Version of Rocketlet, and of its module: compiled or pure", labels=["cluster", "broker"]
        )
        info.add_metric(self._labels, {"version": version("rocketlet"), "module": MODULE})
        yield info
        yield self._gauge("rocketlet_connections", "Open connections", len(self._connections))
        yield self._gauge(
            "rocketlet_grpc_connections", "Open connections of 5.x clients", self._broker.callers.connections
        )
        yield self._gauge(
            "rocketlet_connections_held_bytes",
            "Memory counted for connections in bytes: waiting requests, unread responses, held pulls, memberships",
            self._memory.used_bytes,
        )
        yield self._gauge(
            "rocketlet_connections_budget_bytes",
            "Maximum bytes held by connections (--memory)",
            self._memory.budget_bytes,
        )

    async def _topics(self) -> list[Metric]:
        broker, labels = self._broker, self._labels
        put = self._counter("rocketlet_messages_put", "Messages stored in a topic since it was created", None, "topic")
        offset = self._gauge(
            "rocketmq_producer_offset", "Messages stored in a topic since it was created", None, "topic"
        )
        tps = self._gauge("rocketmq_producer_tps", "Messages stored per second in the last minute", None, "topic")
        totals, rates = await _run_in_pieces(broker.statistics.all_rates(_MINUTE_S))
        got = self._counter("rocketlet_messages_got", "Messages read since the start", None, "topic", "group")
        got_tps = self._gauge(
            "rocketmq_consumer_tps", "Messages read per second in the last minute", None, "topic", "group"
        )
        stored = self._counter("rocketmq_messages_in", "Messages stored in a topic since it was created", None, "topic")
        taken = self._counter("rocketmq_messages_out", "Messages read since the start", None, "topic", "consumer_group")
        of_broker = {PUT: 0.0, GOT: 0.0}
        for number, ((kind, key), total) in enumerate(totals.of.items(), 1):
            if kind not in of_broker:
                continue
            rate = rates[kind, key]
            of_broker[kind] += rate
            if kind == PUT:
                put.add_metric([*labels, key], total)
                offset.add_metric([*labels, key], total)
                tps.add_metric([*labels, key], rate)
                stored.add_metric([*self._node_labels, key], total)
            else:
                topic, _, group = key.rpartition("@")
                got.add_metric([*labels, topic, group], total)
                got_tps.add_metric([*labels, topic, group], rate)
                taken.add_metric([*self._node_labels, topic, group], total)
            if number % SLICE == 0:
                await asyncio.sleep(0)
        return [
            *(put, offset, tps, got, got_tps, stored, taken),
            *self._dedup(),
            self._gauge("rocketmq_broker_tps", "Messages stored per second in the last minute", of_broker[PUT]),
            self._gauge("rocketmq_broker_qps", "Messages read per second in the last minute", of_broker[GOT]),
        ]

    def _dedup(self) -> tuple[Metric, ...]:
        """Return the metrics of topics with `dedup`."""
        ids = self._gauge("rocketlet_dedup_ids", "Known ids of messages of a topic with dedup", None, "topic")
        repeated = self._counter(
            "rocketlet_dedup_repeated", "Repeated messages that were not stored, since the start", None, "topic"
        )
        forgotten = self._counter(
            "rocketlet_dedup_forgotten", "Ids that were forgotten early because the broker had too many", None, "topic"
        )
        for topic, found in self._broker.dedup:
            ids.add_metric([*self._labels, topic], found.count)
            repeated.add_metric([*self._labels, topic], found.repeated)
            forgotten.add_metric([*self._labels, topic], found.forgotten)
        return ids, repeated, forgotten

    def _store(self) -> Iterator[Metric]:
        store = self._broker.store
        yield self._gauge("rocketlet_commit_log_bytes", "Size of the commit log in bytes", store.end - store.begin)
        yield self._gauge(
            "rocketlet_disk_used_ratio", "Used fraction of the data folder's disk, 0 to 1", store.disk_ratio()
        )
        yield self._gauge(
            "rocketlet_store_failed",
            "1 if the disk has failed, so that the broker has stopped writing",
            int(store.fault is not None),
        )
        yield self._gauge(
            "rocketlet_store_full",
            "1 if the disk has refused a write, for example because it is full, so that messages are refused",
            int(store.room.now() is not None),
        )
        yield self._gauge(
            "rocketlet_clock_ahead_seconds",
            "Seconds that the machine's clock jumped ahead, while retention uses the time before the jump; otherwise 0",
            self._broker.retention_time.ahead_s,
        )
        yield self._gauge(
            "rocketlet_registered",
            "1 if the broker is registered with a name server",
            int(self._broker.registration.is_registered),
        )
        yield self._counter(
            "rocketlet_messages_damaged",
            "Damaged messages that were skipped since the start, counted up to 10,000",
            len(store.damaged),
        )
        yield self._gauge(
            "rocketlet_transactions_waiting",
            "Half messages without commit or rollback",
            self._broker.transactions.waiting,
        )
        timers = self._broker.timers
        yield self._gauge("rocketlet_timed_waiting", "Messages that wait for their delivery time", timers.waiting)
        yield self._counter("rocketlet_heartbeats_refused", "Refused heartbeats", self._broker.refused_heartbeats.count)
        yield self._counter(
            "rocketlet_filter_failures", "Messages for which an SQL92 filter failed", self._broker.filters.failed
        )
        yield self._counter(
            "rocketlet_delayed_set_aside",
            "Delayed messages that could not be delivered",
            self._broker.delays.set_aside + timers.set_aside,
        )

    def _requests(self) -> Iterator[Metric]:
        """Yield metrics of requests and gRPC calls. Only request codes that were used have a histogram."""
        family = self._histogram(
            "rocketlet_request_seconds",
            "Time to process a request, excluding the time that a pull is held",
            "request",
        )
        for code, histogram in self._broker.request_times.items():
            if any(histogram.counts):
                _add(family, [*self._labels, RequestCode(code).name], histogram)
        yield family
        calls = self._counter(
            "rocketlet_grpc_calls",
            "Responses to 5.x clients, by method and response code; 20000 is success",
            None,
            "method",
            "code",
        )
        for (method, response), count in self._broker.callers.answers.items():
            calls.add_metric([*self._labels, method, response], count)
        yield calls

    def _access(self) -> Iterator[Metric]:
        broker, labels = self._broker, self._labels
        refused = self._counter(
            "rocketlet_requests_refused", "Requests refused by access control, by reason", None, "reason"
        )
        for reason, count in (broker.acl.refused if broker.acl else {}).items():
            refused.add_metric([*labels, reason], count)
        yield refused
        previous = self._counter(
            "rocketlet_former_secret_used", "Requests signed with an account's formerSecretKey", None, "account"
        )
        for account, count in (broker.acl.former if broker.acl else {}).items():
            previous.add_metric([*labels, account], count)
        yield previous
        expires = self._gauge(
            "rocketlet_certificate_expires_timestamp_seconds",
            "Earliest expiry of the certificates in a TLS file",
            None,
            "file",
        )
        for path, at_s in broker.tls.expires_s.items():
            expires.add_metric([*labels, path.name], at_s)
        yield expires
        handshakes = self._counter("rocketlet_tls_handshakes", "TLS handshakes, by outcome", None, "outcome")
        handshakes.add_metric([*labels, "done"], broker.tls.handshakes)
        handshakes.add_metric([*labels, "failed"], broker.tls.failed_handshakes)
        yield handshakes
        yield self._counter(
            "rocketlet_tls_mismatches",
            "Clients that used TLS on a plain port, or no TLS on a port that enforces it",
            broker.tls.refused,
        )

    async def _groups(self) -> list[Metric]:
        return [*await self._members(), *await self._lags(), self._lost(), *self._ownership()]

    async def _members(self) -> list[Metric]:
        broker, labels = self._broker, self._labels
        members = self._gauge("rocketlet_group_members", "Members of a group", None, "group")
        faults = self._gauge(
            "rocketlet_group_disagreements", "Conflicts between settings of a group's members", None, "group"
        )
        dead = self._gauge("rocketlet_dead_letters", "Stored dead letters of a group", None, "group")
        in_flight = self._gauge(
            "rocketlet_group_unfinished", "Popped messages that are not acknowledged", None, "group"
        )
        popping = self._gauge(
            "rocketlet_group_popping_clients", "Clients that popped messages in the last two minutes", None, "group"
        )
        redelivered = self._counter(
            "rocketlet_messages_redelivered", "Redeliveries of popped messages since the start", None, "group"
        )
        for name in broker.progress.groups():
            await asyncio.sleep(0)  # clients need not wait until all groups are collected
            group = broker.groups.get(name)
            dead_queue = broker.store.queues.get((names.dlq_topic(name), 0))
            for family, value in (
                (members, len(group.members) if group else 0),
                (faults, len(group.reported) if group else 0),
                (in_flight, group.unfinished if group else 0),
                (popping, len(broker.pops.pools.clients_of(name)) if broker.pops.pools.all else 0),
                (redelivered, group.redelivered if group else 0),
                (dead, dead_queue.next - dead_queue.begin if dead_queue else 0),
            ):
                family.add_metric([*labels, name], value)
        return [members, faults, dead, in_flight, popping, redelivered]

    async def _lags(self) -> list[Metric]:
        """Return the lag and progress of each group in each of its topics."""
        broker = self._broker
        names_of = ("topic", "group")
        lag = self._gauge("rocketlet_group_lag", "Messages that a group has not committed", None, *names_of)
        accumulated = self._gauge(
            "rocketmq_message_accumulation", "Messages that a group has not committed", None, *names_of
        )
        offset = self._gauge("rocketmq_consumer_offset", "Sum of a group's committed offsets", None, *names_of)
        oldest = self._gauge(
            "rocketlet_group_oldest_seconds",
            "Age of the oldest message that a group has not committed; 0 if there is none",
            None,
            *names_of,
        )
        latency = self._gauge(
            "rocketmq_group_get_latency_by_storetime",
            "Age of the oldest message that a group has not committed, in ms",
            None,
            *names_of,
        )
        levels = self._gauge(
            "rocketlet_group_level_lag",
            "Messages of a level that a group has not committed, in topics of the type PRIORITY",
            None,
            *(*names_of, "level"),
        )
        of_group = ("consumer_group", "topic")
        lag_messages = self._gauge(
            "rocketmq_consumer_lag_messages", "Messages that a group has not committed", None, *of_group
        )
        lag_latency = self._gauge(
            "rocketmq_consumer_lag_latency",
            "Age of the oldest message that a group has not committed, in ms",
            None,
            *of_group,
        )
        in_flight = self._gauge(
            "rocketmq_consumer_inflight_messages", "Messages that a group has popped", None, *of_group
        )
        ready = self._gauge(
            "rocketmq_consumer_ready_messages", "Messages that no member of a group has popped yet", None, *of_group
        )
        now_ms = broker.clock.time_ms()
        for name in broker.progress.groups():
            await asyncio.sleep(0)
            for topic in broker.progress.topics_of(name):
                messages, since_ms, popped = await _run_in_pieces(broker.progress.lag(name, topic))
                age_ms = 0 if since_ms is None else max(now_ms - since_ms, 0)
                committed = broker.progress.committed(name, topic)
                values = (messages, messages, committed, age_ms / 1000, age_ms)
                for family, value in zip((lag, accumulated, offset, oldest, latency), values, strict=True):
                    family.add_metric([*self._labels, topic, name], value)
                of_5_1 = (messages, age_ms, popped, messages - popped)
                for family, value in zip((lag_messages, lag_latency, in_flight, ready), of_5_1, strict=True):
                    family.add_metric([*self._node_labels, name, topic], value)
                config = broker.topics.get(topic)
                if config is not None and config.has_priorities:
                    for level, messages in enumerate(await self._levels(name, topic)):
                        levels.add_metric([*self._labels, topic, name, str(level)], messages)
        return [lag, accumulated, offset, oldest, latency, levels, lag_messages, lag_latency, in_flight, ready]

    async def _levels(self, group: str, topic: str) -> list[int]:
        """Return a group's lag in each level of a topic with priorities. The last of MAX_METRIC_LEVELS levels includes all
        higher ones."""
        columns = await _run_in_pieces(self._broker.progress.columns(group, topic, times=False))
        lags = [max(end - at, 0) for end, at in zip(columns.broker_offsets, columns.consumer_offsets, strict=True)]
        last = MAX_METRIC_LEVELS - 1
        return [*lags[:last], sum(lags[last:])] if len(lags) > last else lags

    def _lost(self) -> Metric:
        lost = self._counter(
            "rocketlet_messages_expired_unread",
            "Messages that retention deleted before a group had committed them, since the start",
            None,
            *("topic", "group"),
        )
        for name, topic, messages in self._broker.progress.lost():
            lost.add_metric([*self._labels, topic, name], messages)
        return lost

    def _ownership(self) -> Iterator[Metric]:
        locks, watch, rebalances = self._broker.locks, self._broker.watch, self._broker.history.rebalances
        yield self._counter(
            "rocketlet_double_readers",
            "Number of times that two members read the same queue",
            locks.double_readers,
        )
        yield self._counter(
            "rocketlet_undrained_queues",
            "Queues that moved while a foreign member was handling messages of them, which are then redelivered",
            self._broker.repeats.undrained,
        )
        yield self._counter(
            "rocketlet_left_uncommitted",
            "Messages that foreign members had pulled but not committed when they left",
            self._broker.repeats.left,
        )
        yield self._gauge(
            "rocketlet_peers_away",
            "Unreachable peer brokers of groups with foreign members",
            len(self._broker.draining.agreement.away()),
        )
        yield self._gauge(
            "rocketlet_receives_waiting", "Receive requests that wait for a message", self._broker.pops.waiting
        )
        orphaned = watch.orphaned()
        yield self._gauge("rocketlet_orphaned_queues", "Queues without a reader", orphaned.total())
        unread = self._gauge(
            "rocketlet_group_orphaned_queues",
            "Queues of a topic without a reader in a group",
            None,
            "topic",
            "group",
        )
        for (group, topic), count in orphaned.most_common(MAX_ORPHANED_TOPICS):
            unread.add_metric([*self._labels, topic, group], count)
        yield unread
        handover = self._histogram(
            "rocketlet_handover_seconds", "Time that a queue had no owner between two owners (Rocketlet members)"
        )
        _add(handover, self._labels, rebalances.handovers)
        rebalance = self._histogram(
            "rocketlet_settle_seconds",
            "Time from a change of members to the last handover of a queue (Rocketlet members)",
        )
        _add(rebalance, self._labels, rebalances.settling)
        yield from (handover, rebalance)


def _labels_of(name: str) -> tuple[str, ...]:
    return _NODE_LABELS if name in _OF_NODE else _BROKER_LABELS


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    family.add_metric(labels, histogram.buckets(), histogram.sum_s)


async def _run_in_pieces(work: Work[T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------
# The metrics port: /metrics, /healthz and /readyz, served by prometheus-client in threads, which query the event loop.
#
# Imported only if a metrics port is configured.


class Measured(Protocol):
    """The source of metrics and readiness. Its methods are called in the event loop. `readiness` returns the reason why
    the broker cannot serve clients, or None."""

    async def snapshot(self) -> list[Metric]: ...

    async def readiness(self) -> str | None: ...


_Accepted = socket.socket | tuple[bytes, socket.socket]
"""What a socketserver accepts: a connection, or of UDP a packet with its socket."""


class _Threads(ThreadingMixIn, WSGIServer):
    """A WSGI server with a thread for each connection.

    If there are too many connections, the oldest one is closed, so that clients that connect without sending a request do
    not use up the broker's threads and descriptors.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: Callable[..., BaseRequestHandler]) -> None:
        self._open: dict[_Accepted, socket.socket] = {}
        self._changing = Lock()
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, object]:
        accepted, address = super().get_request()
        with self._changing:
            if len(self._open) >= MAX_METRICS_CONNECTIONS:
                oldest = self._open.pop(next(iter(self._open)))
                with contextlib.suppress(OSError):  # its client has disconnected
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread receives the end of the stream, and closes it
            self._open[accepted] = accepted
        return accepted, address

    def shutdown_request(self, request: _Accepted) -> None:
        with self._changing:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: _Accepted, client_address: object) -> None:
        """Log defects, but no errors of a client such as a disconnect."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("metrics_request_failed")


class _Quiet(WSGIRequestHandler):
    timeout = METRICS_CLIENT_S

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


def _is_own(host: str) -> bool:
    """Return True for an IP address, and for a name of this machine. Other names may belong to a site that makes them point
    here."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", socket.gethostname().lower())
    return True


class MetricsPort:
    """The metrics port, which serves until `close`. Raises OSError if the port is in use.

    On a loopback address, only requests for addresses and for this machine's names are served. A web page whose host
    name was made to point here (DNS rebinding) therefore reads nothing.
    """

    def __init__(self, measured: Measured, host: str, port: int, limits: Limits = LIMITS) -> None:
        self._answer_s = limits.metrics_answer_s
        self._no_response = f"the event loop has not responded for {self._answer_s:g} s"
        self._measured = measured
        self._is_local = is_loopback(host)
        self._loop = asyncio.get_running_loop()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        ProcessCollector(registry=registry)
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = make_server(host, port, self._answer, _Threads, handler_class=_Quiet)
        except OSError as error:
            raise OSError(error.errno, f"the metrics port {host}:{port}: {error.strerror}") from None
        self.port = int(self._server.server_port)
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def describe(self) -> list[Metric]:
        """Return no metrics, so that nothing is collected before the first request."""
        return []

    def collect(self) -> list[Metric]:
        """Return the metrics for prometheus-client, in its thread."""
        return self._ask(self._measured.snapshot())

    def _ask(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine in the event loop, from another thread. Raises TimeoutError if the loop does not respond; the
        coroutine is then cancelled."""
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return asked.result(self._answer_s)
        except TimeoutError:
            asked.cancel()
            raise

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        host = str(environ.get("HTTP_HOST") or "")
        if self._is_local and host and not _is_own(host):
            text = f"The metrics port rejects the host name {host[:80]!r}; use an address."
            status = "403 Forbidden"
        elif path == "/metrics":
            try:
                found: Iterable[bytes] = self._metrics(environ, start_response)
                return found
            except TimeoutError:
                status, text = "503 Service Unavailable", self._no_response
            # prometheus-client raises these for an Accept header whose version is not a number
            except (TypeError, ValueError):
                return self._metrics({**environ, "HTTP_ACCEPT": ""}, start_response)  # type: ignore[no-any-return]
        elif path in ("/healthz", "/readyz"):
            fault = self._fault(is_ready=path == "/readyz")
            status, text = ("503 Service Unavailable", fault) if fault else ("200 OK", "ok")
        else:
            status, text = "404 Not Found", "Not found; paths: /metrics, /healthz, /readyz."
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    def _fault(self, *, is_ready: bool) -> str | None:
        """Return the reason why the event loop does not respond or, with `is_ready`, why the process is not ready for
        clients; None without a reason."""
        try:
            return self._ask(self._measured.readiness() if is_ready else asyncio.sleep(0))
        except TimeoutError:
            return self._no_response

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


# ------------------------------------------------------------------------------
# Prometheus metrics of a name server without a broker. Imported only if a metrics port is configured.


class NameServerMetrics:
    """Metrics of a name server. `connections` are its open connections."""

    def __init__(self, routes: Routes, connections: Sized, tls: Tls) -> None:
        self._routes = routes
        self._connections = connections
        self._tls = tls

    async def readiness(self) -> str | None:
        return None

    async def snapshot(self) -> list[Metric]:
        expires = self._gauge(
            "rocketlet_name_server_certificate_expires_timestamp_seconds",
            "Earliest expiry of the certificates in a TLS file",
            "file",
        )
        for path, at_s in self._tls.expires_s.items():
            expires.add_metric([path.name], at_s)
        departed = self._gauge(
            "rocketlet_name_server_departed_broker", "1 for a departed broker that had topics", "cluster", "broker"
        )
        for broker in self._routes.departed():
            departed.add_metric([broker.cluster, broker.name], 1)
        return [
            self._gauge("rocketlet_name_server_brokers", "Registered brokers", value=len(self._routes.brokers())),
            self._gauge("rocketlet_name_server_topics", "Topics of all brokers", value=self._routes.entries),
            self._gauge("rocketlet_name_server_connections", "Open connections", value=len(self._connections)),
            departed,
            expires,
        ]

    def _gauge(self, name: str, text: str, *labels: str, value: float | None = None) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, value=value, labels=labels or None)
