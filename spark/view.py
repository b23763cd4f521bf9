"""The topics of a query, their queues and their brokers."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from ..client.config import ClientLimits
from ..client.consuming.queues import check_filters
from ..client.errors import (
    BrokerRefused,
    ConfigError,
    ConnectionFailed,
    RequestTimeout,
    RocketletError,
    TopicNotFound,
    get_logger,
)
from ..client.wire.cluster import ClusterView, new_client_id, pull_header
from ..client.wire.connection import body_of, header_of
from ..client.wire.late_queues import time_before
from ..protocol import names
from ..protocol.allocation import subscribe_queues
from ..protocol.bodies import decode_cluster, decode_topic_list
from ..protocol.codes import RequestCode, ResponseCode
from ..protocol.headers import PullMessageResult
from ..protocol.names import Queue
from .checkpoint import QueryStart, part_of
from .config import NEW_QUEUES_S, ROUTE_RETRY_S, SAMPLE_MESSAGES
from .data_loss import retired
from .extents import NOTHING, BrokerOffsets, Extents
from .options import ReadOptions
from .patience import FailureTimeout

log = get_logger("rocketlet.spark")


class View:
    """Connections of a query to the name server and brokers, with the topics that the query reads."""

    def __init__(self, options: ReadOptions) -> None:
        connect = options.connect
        self.options = options
        self.cluster = ClusterView(
            connect.name_server, connect.access, connect.client_name, limits=ClientLimits(route_interval_s=NEW_QUEUES_S)
        )
        self.extents = Extents(self.cluster, options.group)
        self._discovered_s = 0.0
        self._gone: set[str] = set()

    async def open(self) -> list[str]:
        """Connect, and return the query's topics, whose routes are then known.

        Raises:
            RocketletError: no name server is reachable, or a topic does not exist
            ConfigError: a broker rejects the filter
        """
        self.cluster.start()
        try:
            topics = await self._topics()
            filters = {topic: self.options.subscription(topic) for topic in topics}
            try:
                await check_filters(self.cluster, new_client_id(), self.options.group, filters)
            except BrokerRefused as error:
                if error.code != ResponseCode.SUBSCRIPTION_PARSE_FAILED:
                    raise
                raise ConfigError(f"the option sql: {error.remark}") from None
        except BaseException:
            await self.close()
            raise
        return topics

    async def close(self) -> None:
        await self.cluster.close()

    async def _topics(self) -> list[str]:
        """Return the topics of the query. Wait up to 15 s in total for named topics that do not exist yet. Raises
        TopicNotFound."""
        if self.options.pattern:
            return await self._matching()
        end_s = _now_s() + self.options.limits.topic_timeout_s
        for topic in self.options.topics:
            while await self.cluster.find_route(topic) is None:
                if _now_s() > end_s:
                    raise TopicNotFound(
                        f"the topic {topic} does not exist on {self.options.connect.name_server}: create it, or "
                        f"correct the option topic"
                    )
                await asyncio.sleep(0.2)
        return list(self.options.topics)

    async def start(self, topics: Iterable[str]) -> QueryStart:
        """Return which queues and brokers are there when a query starts at the latest messages, and the time."""
        queues = self.routed(topics)
        seen = await self.extents.of(queues)
        try:
            await self.cluster.find_masters()
        except RocketletError as error:
            log.info("brokers_unknown", reason=str(error), hint="queues that come later are read by their store times")
        brokers = frozenset(self.cluster.known_masters()) - self.extents.away
        times_ms = [mark.newest_ms for mark in seen.marks.values() if mark.identity]  # of Rocketlet's brokers
        time_ms = min(times_ms) if times_ms else await self._time_ms(brokers)
        return QueryStart(time_ms, brokers, Counter(map(part_of, queues)))

    async def _time_ms(self, brokers: Iterable[str]) -> int:
        """Return the time by the clock of a broker; by this machine's clock if none responds."""
        for name in sorted(brokers):
            with suppress(RocketletError):
                return await time_before(await self.cluster.broker(name), 0.0)
        return int(time.time() * 1000)

    def routed(self, topics: Iterable[str]) -> list[Queue]:
        """Return the queues of these topics that are in the known routes."""
        queues: list[Queue] = []
        for topic in topics:
            route = None if topic in self._gone else self.cluster.route(topic)
            queues += subscribe_queues(topic, route) if route is not None else []
        return queues

    async def refresh(self, topics: Iterable[str]) -> None:
        """Request the routes of these topics again, and of topics that had no route at the last request."""
        for topic in {*topics, *self._gone}:
            try:
                is_known = await self.cluster.find_route(topic) is not None
            except RocketletError as error:  # the known routes stay in use
                log.warning("route_lookup_failed", topic=topic, reason=str(error))
                continue
            self._gone.discard(topic) if is_known else self._gone.add(topic)

    async def _matching(self) -> list[str]:
        """Return the topics that match the pattern and have a route, except topics that brokers create. Request the
        routes that are not known yet."""
        self._discovered_s = _now_s()
        answer = await self.cluster.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        brokers = await self.cluster.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
        made_by_brokers = {
            text
            for broker in body_of(brokers, decode_cluster)
            for text in (broker.cluster, broker.name, names.reply_topic(broker.cluster))
        }
        matches = re.compile(self.options.pattern).fullmatch
        found = [
            topic
            for topic in body_of(answer, decode_topic_list)
            if matches(topic) and not names.is_made_by_brokers(topic) and topic not in made_by_brokers
        ]
        return [topic for topic in found if self.cluster.route(topic) or await self.cluster.find_route(topic)]

    async def new_topics(self, known: Iterable[str]) -> list[str]:
        """Return topics that match the pattern and are not in `known`; none within 10 s of the last request of the list
        of topics, and none if that request fails."""
        if not self.options.pattern or _now_s() < self._discovered_s + self.options.limits.discovery_interval_s:
            return []
        try:
            return sorted(set(await self._matching()) - set(known))
        except RocketletError as error:
            log.warning("topic_lookup_failed", reason=str(error))
            return []

    async def addresses(self, queues: Iterable[Queue]) -> dict[Queue, str]:
        known = {queue: await self._address(queue) for queue in queues}
        return {queue: address for queue, address in known.items() if address is not None}

    async def _address(self, queue: Queue) -> str | None:
        failing = FailureTimeout(self.options.poll_timeout_s)
        while (address := self.cluster.master(queue.broker_name)) is None:
            try:
                await self.cluster.find_route(queue.topic)
            except ConnectionFailed as error:
                log.warning("route_lookup_failed", topic=queue.topic, reason=str(error))
            if self.cluster.master(queue.broker_name) is None and failing.is_over():
                retired(queue, fail=self.options.fail_on_data_loss)
                return None
            await asyncio.sleep(ROUTE_RETRY_S)
        return address

    async def all(self, queues: Iterable[Queue]) -> BrokerOffsets:
        """Return the extents of all queues; `NOTHING` for queues that their broker does not have. Raises
        ConnectionFailed if a broker is unreachable."""
        seen = await self.extents.of(queues)
        if self.extents.away:
            raise ConnectionFailed(
                f"the broker {min(self.extents.away)} does not answer: its messages would be skipped; start it, or "
                "try later"
            )
        seen.extents |= dict.fromkeys(seen.absent, NOTHING)
        return seen

    async def message_bytes(self, queue: Queue, offset: int) -> float | None:
        """Return the mean size in bytes of the next messages of a queue; 1 if the response has no messages, or None if
        the broker is unreachable."""
        subscription = self.options.subscription(queue.topic)
        header = pull_header(self.options.group, queue, offset, SAMPLE_MESSAGES, subscription)
        try:
            connection = await self.cluster.broker(queue.broker_name)
            answer = await connection.request_unchecked(
                RequestCode.PULL_MESSAGE, header, timeout_s=self.options.poll_timeout_s
            )
        except (ConnectionFailed, RequestTimeout) as error:
            log.warning("message_size_unknown", queue=str(queue), reason=str(error), hint="the queue waits")
            return None
        messages = header_of(answer, PullMessageResult).next_begin_offset - offset if answer.body else 0
        return max(len(answer.body) / messages, 1.0) if messages > 0 else 1.0


def _now_s() -> float:
    return asyncio.get_running_loop().time()
