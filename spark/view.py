"""The cluster as a query sees it: its topics, their queues and brokers, and the offsets that queues hold."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from ..client.config import ClientLimits
from ..client.consuming.pulling import check_filters
from ..client.errors import ConnectionFailed, RequestTimeout, RocketletError, TopicNotFound
from ..client.log import get_logger
from ..client.wire.answers import body_of, header_of
from ..client.wire.cluster import Cluster
from ..client.wire.identity import new_client_id
from ..client.wire.pull_header import pull_header
from ..protocol import names
from ..protocol.allocation import subscribe_queues
from ..protocol.bodies import decode_topic_list
from ..protocol.codes import RequestCode
from ..protocol.headers import PullMessageResult
from ..protocol.queue import Queue
from .config import DISCOVERY_INTERVAL_S, NEW_QUEUES_S, ROUTE_RETRY_S, SAMPLE_MESSAGES, TOPIC_PATIENCE_S
from .extents import Extents, Seen
from .loss import retired
from .options import ReadOptions
from .patience import Patience

log = get_logger("rocketlet.spark")


class View:
    def __init__(self, options: ReadOptions) -> None:
        connect = options.connect
        self.options = options
        self.cluster = Cluster(connect.name_server, connect.access, limits=ClientLimits(route_interval_s=NEW_QUEUES_S))
        self.extents = Extents(self.cluster, options.group)
        self._discovered_s = 0.0

    async def open(self) -> list[str]:
        """Returns the query's topics, whose routes are known. Raises RocketletError if no name server can be reached, or a
        topic does not exist."""
        self.cluster.start()
        try:
            topics = await self._topics()
            filters = {topic: self.options.subscription(topic) for topic in topics}
            await check_filters(self.cluster, new_client_id(), self.options.group, filters)
        except BaseException:
            await self.close()
            raise
        return topics

    async def close(self) -> None:
        await self.cluster.close()

    async def _topics(self) -> list[str]:
        """The topics of the query. One that is named but does not exist yet is waited for. Raises TopicNotFound."""
        if self.options.pattern:
            return await self._matching()
        end_s = _now_s() + TOPIC_PATIENCE_S
        for topic in self.options.topics:
            while await self.cluster.find_route(topic) is None:
                if _now_s() > end_s:
                    raise TopicNotFound(
                        f"the topic {topic} does not exist on {self.options.connect.name_server}: create it, or "
                        f"correct the option topic"
                    )
                await asyncio.sleep(0.2)
        return list(self.options.topics)

    def routed(self, topics: Iterable[str]) -> list[Queue]:
        """The queues of these topics that routes know."""
        queues: list[Queue] = []
        for topic in topics:
            route = self.cluster.route(topic)
            queues += subscribe_queues(topic, route) if route is not None else []
        return queues

    async def _matching(self) -> list[str]:
        """The topics that the pattern matches now, with their routes."""
        self._discovered_s = _now_s()
        answer = await self.cluster.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        matches = re.compile(self.options.pattern).fullmatch
        found = [
            topic
            for topic in body_of(answer, decode_topic_list)
            if matches(topic) and not names.is_made_by_brokers(topic)
        ]
        return [topic for topic in found if self.cluster.route(topic) or await self.cluster.find_route(topic)]

    async def new_topics(self, known: Iterable[str]) -> list[str]:
        """Topics that match the pattern and are not yet known. Looked for every 10 s."""
        if not self.options.pattern or _now_s() < self._discovered_s + DISCOVERY_INTERVAL_S:
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
        patience = Patience(self.options.poll_timeout_s)
        while (address := self.cluster.master(queue.broker_name)) is None:
            try:
                await self.cluster.find_route(queue.topic)
            except ConnectionFailed as error:
                log.warning("route_lookup_failed", topic=queue.topic, reason=str(error))
            if self.cluster.master(queue.broker_name) is None and patience.is_over():
                retired(queue, fail=self.options.fail_on_data_loss)
                return None
            await asyncio.sleep(ROUTE_RETRY_S)
        return address

    async def all(self, queues: Iterable[Queue]) -> Seen:
        """The extents of all queues. Raises ConnectionFailed if a broker is away."""
        seen = await self.extents.of(queues)
        if self.extents.away:
            raise ConnectionFailed(
                f"the broker {min(self.extents.away)} does not answer: what it holds would be passed over; start it, or "
                "try later"
            )
        return seen

    async def message_bytes(self, queue: Queue, offset: int) -> float | None:
        """The mean size of the next messages of a queue; None if its broker is away."""
        subscription = self.options.subscription(queue.topic)
        header = pull_header(self.options.group, queue, offset, SAMPLE_MESSAGES, subscription)
        try:
            connection = await self.cluster.broker(queue.broker_name)
            answer = await connection.ask(RequestCode.PULL_MESSAGE, header, timeout_s=self.options.poll_timeout_s)
        except (ConnectionFailed, RequestTimeout) as error:
            log.warning("message_size_unknown", queue=str(queue), reason=str(error), hint="the queue waits")
            return None
        messages = header_of(answer, PullMessageResult).next_begin_offset - offset if answer.body else 0
        return max(len(answer.body) / messages, 1.0) if messages > 0 else 1.0


def _now_s() -> float:
    return asyncio.get_running_loop().time()
