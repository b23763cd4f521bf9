"""A client's view of the cluster: routes of topics, connections to brokers; and the start and stop of a client."""

from __future__ import annotations

import asyncio
import math
import os
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum, auto
from itertools import count
from typing import ClassVar, Self, TypeVar

from msgspec.structs import replace

from ...host.address import local_address
from ...protocol import bodies, names
from ...protocol.bodies import Route
from ...protocol.codes import PERM_READ, PERM_WRITE, PULL_SUBSCRIPTION, RequestCode, ResponseCode
from ...protocol.frame import Ext, Frame
from ...protocol.headers import CreateTopic, Offset, PullMessage, SearchOffset, TopicName, write
from ...protocol.message import decode_records
from ...protocol.names import TOOLS_GROUP, Queue, Subscription
from ..config import CLIENT_LIMITS, OFFSET_TIMEOUT_S, TOPIC_QUEUES, ClientLimits, check_client_name, parse_addresses
from ..errors import (
    AnswerUnreadable,
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    RequestTimeout,
    RocketletError,
    TopicNotFound,
    get_logger,
)
from .connection import Access, Connection, Connections, KeptTask, body_of, cancelled, header_of

log = get_logger("rocketlet.cluster")


# ------------------------------------------------------------------------------
# One client's view of a cluster: name servers, the routes of topics, connections to brokers.


T = TypeVar("T")

RequestHandler = Callable[[Connection, Frame], None]
Listener = Callable[[str], None]


class ClusterView:
    """One client's view of a cluster: the routes of its topics, and connections to name servers and brokers.

    The view is created before the other parts of the client, which register with `listen` and `answer`.

    Attributes:
        keeps_brokers: True if brokers that disappear from a route are kept in it for a while, as group members need.
    """

    def __init__(
        self,
        name_server: str,
        access: Access | None = None,
        client_name: str | None = None,
        limits: ClientLimits = CLIENT_LIMITS,
    ) -> None:
        check_client_name("client_name", client_name)
        self.client_name = client_name
        self.limits = limits
        self._name_servers = parse_addresses(name_server)
        # Shuffled as by NettyRemotingClient, so that equally configured clients do not all use the first name server.
        random.shuffle(self._name_servers)
        self._unreached_s: dict[str, float] = {}  # by name server: the loop's time of the last failure
        self._routes: dict[str, Route] = {}
        self._masters: dict[str, str] = {}
        self.keeps_brokers = False
        self._missing_s: dict[tuple[str, str], float] = {}
        self._refresher: KeptTask | None = None
        self._unreached = asyncio.Event()
        self._unrefreshed: set[str] = set()  # topics whose last lookup of the route failed
        self._answers: dict[int, RequestHandler] = {}
        self._on_change: list[Listener] = []
        self._on_lost: list[Listener] = []
        self._connections = Connections(
            access or Access(),
            self._on_request,
            self._lost,
            limits,
        )

        self.check_home = self._connections.home.check

    def start(self) -> None:
        """Start refreshing routes. Raises ConfigError in a process that was forked after this object was created."""
        self._connections.home.begin()
        self._refresher = KeptTask(self._refresh_all, "routes", self.limits.restart_s)

    async def close(self) -> None:
        try:
            if self._refresher is not None:
                await cancelled([self._refresher])
        finally:
            await self._connections.close()

    def _on_request(self, connection: Connection, frame: Frame) -> None:
        answer = self._answers.get(frame.code)
        if answer is not None:
            answer(connection, frame)
        elif not frame.is_oneway:
            remark = f"request type {frame.code} not supported"
            connection.respond(frame, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)

    def _lost(self, connection: Connection) -> None:
        for listener in self._on_lost:
            listener(connection.address)

    # Registration

    def answer(self, code: int, answer: RequestHandler) -> None:
        """Register `answer(connection, frame)` as the handler of brokers' requests with this code."""
        self._answers[code] = answer

    def listen(self, *, on_change: Listener | None = None, on_lost: Listener | None = None) -> None:
        """Register listeners.

        Args:
            on_change: `on_change(topic)` is called when the route of a topic has changed.
            on_lost: `on_lost(address)` is called when a connection has ended, except while the client closes.
        """
        if on_change is not None:
            self._on_change.append(on_change)
        if on_lost is not None:
            self._on_lost.append(on_lost)

    # Name servers

    async def ask_name_server(self, code: int, ext: Ext | None = None, *, unknown: int | None = None) -> Frame:
        """Return the response of the first name server that can be reached, starting with the one that was used last.

        Raises BrokerRefused if a name server responds with an error code, and ConnectionFailed if none can be reached.

        Args:
            unknown: an error code after which the other name servers are queried, too, except those that were
                unreachable recently, because a name server that has just started does not know all brokers yet. A
                BrokerRefused with this code is raised if none of them responds with success.
        """
        failures: list[str] = []
        refusal: BrokerRefused | None = None
        loop = asyncio.get_running_loop()
        for address in list(self._name_servers):
            if (
                refusal is not None
                and loop.time() < self._unreached_s.get(address, -math.inf) + self.limits.route_interval_s
            ):
                continue  # do not delay the response by a name server that was unreachable recently
            try:
                connection = await self._connections.get(address)
                answer = await connection.request(code, ext or {})
            except (ConnectionFailed, RequestTimeout) as error:
                failures.append(str(error))
                self._unreached_s[address] = loop.time()
                self._name_servers.remove(address)
                self._name_servers.append(address)
            except BrokerRefused as error:
                if error.code != unknown:
                    raise
                refusal = refusal or error
            else:
                return answer
        raise refusal or ConnectionFailed(f"no name server can be reached: {'; '.join(failures)}")

    async def tell_name_servers(self, code: int, ext: Ext) -> None:
        """Send a request to every name server. Raises RocketletError if none of them carries it out; logs a failure of
        some."""
        failures: dict[str, RocketletError] = {}
        for address in list(self._name_servers):
            try:
                await (await self._connections.get(address)).request(code, ext)
            except RocketletError as error:
                failures[address] = error
        if len(failures) == len(self._name_servers):
            raise next(iter(failures.values()))
        for address, failure in failures.items():
            hint = "repeat the request when this name server is back, or its routes stay as they are"
            log.warning("name_server_failed", name_server=address, reason=str(failure), hint=hint)

    # Routes

    def route(self, topic: str) -> Route | None:
        """Return the last known route; None if none is known."""
        return self._routes.get(topic)

    async def find_route(self, topic: str) -> Route | None:
        """Query the route. Return None if no reachable name server knows the topic. Raises RocketletError."""
        ext = {**write(TopicName(topic)), "acceptStandardJsonOnly": "true"}
        unknown = ResponseCode.TOPIC_NOT_EXIST
        try:
            answer = await self.ask_name_server(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext, unknown=unknown)
        except BrokerRefused as error:
            if error.code == unknown:
                return None
            raise
        return self._keep(topic, body_of(answer, bodies.decode_route))

    def _keep(self, topic: str, route: Route) -> Route:
        route = self._with_living(topic, route)
        changed = self._routes.get(topic) != route
        self._routes[topic] = route
        for broker in route.brokers:
            if 0 in broker.addresses:
                self._masters[broker.name] = broker.addresses[0]
        if changed:
            for listener in self._on_change:
                listener(topic)
        return route

    def _with_living(self, topic: str, route: Route) -> Route:
        """For a member of a group, return the route together with brokers that disappeared from it recently.

        A broker that restarts is missing for a moment, and a name server that has just started does not know all brokers
        yet. Queues must not be reassigned because of a restart, so a missing broker is kept for `route_timeout_s`.
        """
        if not self.keeps_brokers:
            return route
        named = set()
        for broker in route.brokers:
            named.add(broker.name)
            self._missing_s.pop((topic, broker.name), None)
        before = self._routes.get(topic)
        if before is None:
            return route
        now_s = asyncio.get_running_loop().time()
        missing = [broker for broker in before.brokers if broker.name not in named]
        news = sorted(broker.name for broker in missing if (topic, broker.name) not in self._missing_s)
        if news:
            log.warning("brokers_missing_in_route", topic=topic, brokers=news, hint="they are kept for a while")
        kept = [
            broker
            for broker in missing
            if now_s - self._missing_s.setdefault((topic, broker.name), now_s) < self.limits.route_timeout_s
        ]
        if not kept:
            return route
        names_kept = {broker.name for broker in kept}
        queues = tuple(data for data in before.queues if data.broker_name in names_kept)
        return replace(route, queues=route.queues + queues, brokers=route.brokers + tuple(kept))

    async def _refresh_all(self) -> None:
        """Refresh all routes every `route_interval_s`, and already after `route_retry_s` if a connection to a broker has
        failed, because the broker may be back at another address."""
        while True:
            await asyncio.sleep(self.limits.route_retry_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.limits.route_interval_s - self.limits.route_retry_s):
                    await self._unreached.wait()
            self._unreached.clear()
            for topic in list(self._routes):
                await self._refresh(topic)

    async def _refresh(self, topic: str) -> None:
        try:
            await self.find_route(topic)
        except (ConnectionFailed, BrokerRefused, AnswerUnreadable) as error:
            if topic not in self._unrefreshed:  # log only the first of consecutive failures
                log.warning("route_not_refreshed", topic=topic, reason=str(error))
            self._unrefreshed.add(topic)
        else:
            self._unrefreshed.discard(topic)

    async def route_to_publish(self, topic: str, default_queues: int) -> list[Queue]:
        """Return the writable queues of a topic. If the topic does not exist, return those that brokers will create.

        Raises TopicNotFound if there are none, and RocketletError if no name server responds.

        Args:
            default_queues: the maximum number of queues of a new topic on each broker.
        """
        route = self.route(topic) or await self.find_route(topic)
        if route is not None:
            queues = publish_queues(topic, route)
        else:
            # As MQClientInstance.updateTopicRouteInfoFromNameServer: a broker creates as many queues as the template topic
            # has, but at most `default_queues`.
            template = await self.find_route(names.DEFAULT_TOPIC)
            queues = publish_queues(topic, template, default_queues) if template is not None else []
        if not queues:
            raise TopicNotFound(
                f"the topic {topic} does not exist or has no writable queue, and brokers do not create topics "
                f"automatically; create it with `rocketlet topics create {topic}`, or check that its brokers are running"
            )
        return queues

    async def ensure_topic(self, topic: str) -> None:
        """Create a topic that does not exist, if brokers create topics automatically. Return when its route is known.

        Raises TopicNotFound if the topic cannot be created, and RocketletError if no server responds.
        """
        if self.route(topic) is not None or await self.find_route(topic) is not None:
            return
        template = await self.find_route(names.DEFAULT_TOPIC)
        queues = publish_queues(topic, template, TOPIC_QUEUES) if template is not None else []
        if not queues:
            raise TopicNotFound(
                f"no name server knows the topic {topic}, and brokers do not create topics automatically; create it with "
                f"`rocketlet topics create {topic}`, or "
                "check its name and that its brokers are running"
            )
        for name, found in by_broker(queues).items():
            header = CreateTopic(topic, len(found), len(found), PERM_READ | PERM_WRITE, if_missing=True)
            try:
                await (await self.broker(name)).request(RequestCode.UPDATE_AND_CREATE_TOPIC, write(header))
            except BrokerRefused as error:
                raise TopicNotFound(
                    f"no name server knows the topic {topic}, and this client may not create it: {error}; create it, or send "
                    "it a message"
                ) from error
        while True:
            if await self.find_route(topic) is not None:
                return
            await asyncio.sleep(self.limits.reconnect_s)

    # Brokers

    async def find_masters(self) -> None:
        """Query the addresses of all brokers that the name server knows, and remember them. Raises RocketletError."""
        answer = await self.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
        for broker in body_of(answer, bodies.decode_cluster):
            if 0 in broker.addresses:
                self._masters[broker.name] = broker.addresses[0]

    def known_masters(self) -> list[str]:
        """Return the names of all brokers whose address is known."""
        return list(self._masters)

    def master(self, broker_name: str) -> str | None:
        return self._masters.get(broker_name)

    def masters(self) -> dict[str, str]:
        """Return the addresses of all masters in the routes of the client's topics, except the template topic, by
        broker name."""
        found: dict[str, str] = {}
        for topic, route in self._routes.items():
            # The template topic is on every broker of the cluster, so its route has brokers that a member does not need.
            for broker in route.brokers if topic != names.DEFAULT_TOPIC else ():
                if 0 in broker.addresses:
                    found[broker.name] = broker.addresses[0]
        return found

    def connected(self, broker_name: str) -> Connection | None:
        """Return the open connection to a broker, or None."""
        address = self._masters.get(broker_name)
        return None if address is None else self._connections.find(address)

    def connected_or_open(self, broker_name: str) -> Connection | None:
        """Return the open connection to a broker. If there is none, open it in the background, and return None."""
        connection, address = self.connected(broker_name), self._masters.get(broker_name)
        if connection is None and address is not None:
            self._connections.open(address).add_done_callback(self._note_failure)
        return connection

    def _note_failure(self, opening: asyncio.Task[Connection]) -> None:
        if not opening.cancelled() and opening.exception() is not None:
            self._unreached.set()  # refresh the routes, because the broker may have another address now

    async def broker(self, broker_name: str) -> Connection:
        """Return the connection to a broker, opened if necessary. Raises ConnectionFailed."""
        address = self._masters.get(broker_name)
        if address is None:
            raise ConnectionFailed(f"the address of the broker {broker_name} is unknown")
        return await self.connection(address)

    async def connection(self, address: str) -> Connection:
        """Return the connection to a broker's address, opened if necessary. Raises ConnectionFailed."""
        try:
            return await self._connections.get(address)
        except ConnectionFailed:
            self._unreached.set()  # refresh the routes, because the broker may have another address now
            raise

    def is_connected(self, address: str) -> bool:
        return self._connections.find(address) is not None


def publish_queues(topic: str, route: Route, limit: int | None = None) -> list[Queue]:
    """Return the writable queues of all brokers that have a master.

    Args:
        limit: the maximum number of queues on each broker, for a topic that does not exist yet.
    """
    with_master = {broker.name for broker in route.brokers if 0 in broker.addresses}
    return [
        Queue(topic, data.broker_name, number)
        for data in sorted(route.queues, key=lambda data: data.broker_name)
        if data.perm & PERM_WRITE and data.broker_name in with_master
        for number in range(data.write_queues if limit is None else min(limit, data.write_queues))
    ]


def parts(queues: Sequence[Queue], most: int) -> list[list[Queue]]:
    """Split queues into lists of up to `most`, for requests that lock, renew or commit them."""
    return [list(queues[first : first + most]) for first in range(0, len(queues), most)]


def by_broker(queues: Iterable[Queue]) -> dict[str, list[Queue]]:
    groups: dict[str, list[Queue]] = {}
    for queue in queues:
        groups.setdefault(queue.broker_name, []).append(queue)
    return groups


# ------------------------------------------------------------------------------
# The first message of a queue that was stored at a time or later.


async def stored_since(connection: Connection, queue: Queue, time_ms: int) -> int:
    """Return the offset of the first message that was stored at `time_ms` or later; the end of the queue if there is none.

    A broker returns the nearest message (SEARCH_OFFSET_BY_TIMESTAMP), which may be the one before `time_ms`, any of several
    messages with exactly that store time, or the newest message for a later time. `stored_since` therefore searches for
    the boundary from the returned offset, first in steps that double, then by bisection.

    Args:
        time_ms: a time in ms since the epoch.

    Raises RocketletError.
    """
    header = write(SearchOffset(queue.topic, queue.queue_id, time_ms))
    answer = await connection.request(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header, timeout_s=OFFSET_TIMEOUT_S)
    offset = header_of(answer, Offset).offset
    stored_ms = await _stored_ms(connection, queue, offset)
    is_before = stored_ms is not None and stored_ms < time_ms
    step = 1 if is_before else -1
    low = high = offset  # the result is after `low` and at most `high`
    while True:
        at = max(offset + step, 0)
        if at == offset:
            return high
        stored_ms = await _stored_ms(connection, queue, at)
        if is_before and (stored_ms is None or stored_ms >= time_ms):  # None means that the queue ends before `at`
            high = at
            break
        if not is_before and (stored_ms is None or stored_ms < time_ms):  # None means that the message has expired
            low = at
            break
        low = high = offset = at
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        stored_ms = await _stored_ms(connection, queue, middle)
        is_in_front = not is_before if stored_ms is None else stored_ms < time_ms
        low, high = (middle, high) if is_in_front else (low, middle)
    return high


async def _stored_ms(connection: Connection, queue: Queue, offset: int) -> int | None:
    """Return the store time of the message at an offset in ms since the epoch; None if there is no such message."""
    pull = pull_header(TOOLS_GROUP, queue, offset, 1, Subscription(queue.topic))
    answer = await connection.request_unchecked(RequestCode.PULL_MESSAGE, pull, timeout_s=OFFSET_TIMEOUT_S)
    for record in body_of(answer, decode_records):
        if record.queue_offset == offset:
            return record.store_ms
    return None


# ------------------------------------------------------------------------------
# Client ids.


_instances = count()


def new_client_id(name: str | None = None) -> str:
    """Return a unique client id: `address@pid#number`, or `name#random` for a given name, which several processes may
    share."""
    if name is not None:
        return f"{name}#{secrets.token_hex(4)}"
    return f"{local_address()}@{os.getpid()}#{time.time_ns() + next(_instances)}"


# ------------------------------------------------------------------------------
# The header of a single pull.


def pull_header(
    group: str,
    queue: Queue,
    offset: int,
    count: int,
    subscription: Subscription,
    *,
    max_bytes: int | None = None,
    identity: str | None = None,
) -> Ext:
    """Return the header of a PULL_MESSAGE that has its own filter, is not held by the broker, and commits nothing.

    Args:
        max_bytes: the maximum size of the response, if it is to exceed the broker's usual maximum.
        identity: the identity of the topic (`TopicExtent`). The broker rejects the pull if the topic was recreated.

    Apache's brokers ignore `max_bytes` and `identity`.
    """
    return write(
        PullMessage(
            group or TOOLS_GROUP,
            queue.topic,
            queue.queue_id,
            offset,
            count,
            PULL_SUBSCRIPTION,
            0,
            0,
            0,
            subscription.expression,
            subscription.kind,
            max_bytes,
            identity,
        )
    )


# ------------------------------------------------------------------------------
# The lifecycle of a producer or consumer: it starts once and stops once.
#
#     NEW -- start --> RUNNING -- stop --> STOPPED
#                         |
#                         +-- start raises --> FAILED
#
# A consumer is RUNNING already while it joins its group.


class Stage(Enum):
    NEW = auto()
    """Created, and not started."""
    RUNNING = auto()
    """Started, and not stopped."""
    FAILED = auto()
    """The start failed."""
    STOPPED = auto()
    """Stopped, or stopping."""


class Lifecycle(ABC):
    """Start and stop of a producer or consumer.

    Attributes:
        _idle_reason: the reason why the client is not running; empty while it is running.
    """

    _noun: ClassVar[str] = "consumer"

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._stage = Stage.NEW
        self._undoing: asyncio.Task[None] | None = None
        self._idle_reason = f"has not been started; use `async with`, or `await {self._noun}.start()`"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the client. Once a consumer has started, its group gets messages that are sent from then on, even if
        the group is new and has `start="last"`.

        Raises:
            ConnectionFailed: no name server can be reached.
            BrokerRefused: a broker rejected the consumer or its filters.
            ConfigError: the client was started before.
        """
        if self._stage is not Stage.NEW:
            reason = self._idle_reason if self._stage is Stage.FAILED else "has been started before; create a new one"
            raise ConfigError(f"this {self._noun} {reason}")
        self._cluster.start()
        self._stage, self._idle_reason = Stage.RUNNING, ""
        try:
            await self._begin()
        except BaseException as error:
            self._stage, self._idle_reason = Stage.FAILED, f"could not be started ({error}); create a new one"
            if isinstance(error, GeneratorExit):  # a coroutine that is being closed must not await anything
                self._undo_later()
            else:
                await self._undo()
            raise

    def _undo_later(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, which has ended its tasks
            self._undoing = asyncio.get_running_loop().create_task(self._undo(), name="undo")

    async def stop(self) -> None:
        """Stop the client: wait for running handlers (up to `drain_s`) and transaction checks, commit or report their
        results, and unregister.

        Do nothing if the client is not running. Raises ConfigError in another event loop, and when a handler calls it,
        because stopping waits for the handler.
        """
        if self._stage is not Stage.RUNNING:
            return
        self.check_stop()
        self._cluster.check_home()
        self._stage, self._idle_reason = Stage.STOPPED, "has been stopped; create a new one"
        await self._end()

    @abstractmethod
    async def _begin(self) -> None: ...

    @abstractmethod
    async def _undo(self) -> None:
        """Clean up after a failed start."""

    @abstractmethod
    async def _end(self) -> None: ...

    @property
    def has_ended(self) -> bool:
        """True if the client was stopped, or its start failed."""
        return self._stage in (Stage.STOPPED, Stage.FAILED)

    def check_stop(self) -> None:
        """Raise ConfigError where `stop` would wait for its own caller, as in a handler."""
        return

    def _check_running(self) -> None:
        """Raise ConfigError if the client is not running. Without a start and stop, its connections would stay open."""
        if self._idle_reason:
            raise ConfigError(f"this {self._noun} {self._idle_reason}")
        self._cluster.check_home()
