"""Asks where queues begin and end, and how their topics are recognized, with one request for each broker.

An Apache broker does not know that request. It is asked for the statistics of each topic, all at once, which are its
shortest answer to the question; and, where those leave a queue out, for that queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..client.config import OFFSET_TIMEOUT_S
from ..client.errors import BrokerRefused, ConnectionFailed, RequestTimeout
from ..client.log import get_logger
from ..client.wire.answers import body_of, header_of
from ..client.wire.cluster import Cluster, by_broker
from ..client.wire.connection import Connection
from ..client.wire.pull_header import pull_header
from ..protocol.admin_bodies import decode_topic_stats
from ..protocol.codes import RequestCode, ResponseCode
from ..protocol.config import MAX_TOPICS_ASKED
from ..protocol.extents import TopicExtent, decode_extents, encode_topics
from ..protocol.frame import Frame
from ..protocol.headers import BrokerTimes, Offset, OptionalGroup, TopicName, TopicQueue, write
from ..protocol.message import decode_records
from ..protocol.names import TOOLS_GROUP
from ..protocol.queue import Queue
from ..protocol.subscription import Subscription
from .checkpoint import UNMARKED, Fingerprint, Mark, Part, part_of

log = get_logger("rocketlet.spark")


class Extent(NamedTuple):
    """The offsets that a queue holds, the second exclusive."""

    begin: int
    end: int


NOTHING = Extent(0, 0)


@dataclass(slots=True)
class Seen:
    """The brokers' answers. Queues of brokers that are away are missing."""

    extents: dict[Queue, Extent] = field(default_factory=dict)
    marks: dict[Part, Mark] = field(default_factory=dict)


class Extents:
    """Asks the brokers of one cluster, on behalf of one group, which may be empty."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._group = group
        self._foreign: set[str] = set()
        self.away: set[str] = set()

    async def of(self, queues: Iterable[Queue]) -> Seen:
        """Raises BrokerRefused."""
        seen = Seen()
        asked = by_broker(queues)
        await asyncio.gather(*(self._ask(name, wanted, seen) for name, wanted in asked.items()))
        self.away &= asked.keys()
        return seen

    async def _ask(self, name: str, queues: list[Queue], seen: Seen) -> None:
        try:
            connection = await self._cluster.broker(name)
            if name not in self._foreign:
                await self._ask_ours(connection, name, queues, seen)
            if name in self._foreign:
                await self._ask_apache(connection, name, queues, seen)
        except (ConnectionFailed, RequestTimeout) as error:
            if name not in self.away:
                log.warning(
                    "broker_away", broker=name, reason=str(error), hint="its queues are skipped until it is back"
                )
            self.away.add(name)
        else:
            self.away.discard(name)

    async def _ask_ours(self, connection: Connection, name: str, queues: list[Queue], seen: Seen) -> None:
        topics = list(dict.fromkeys(queue.topic for queue in queues))
        ext = write(OptionalGroup(self._group or None))
        parts = [topics[at : at + MAX_TOPICS_ASKED] for at in range(0, len(topics), MAX_TOPICS_ASKED)]
        answers = await asyncio.gather(
            *(
                connection.ask(RequestCode.GET_QUEUE_OFFSETS, ext, encode_topics(part), OFFSET_TIMEOUT_S)
                for part in parts
            )
        )
        told: dict[str, TopicExtent] = {}
        times = BrokerTimes(0, 0)
        for answer in answers:
            if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                self._foreign.add(name)
                return
            if answer.code:
                raise BrokerRefused(RequestCode.GET_QUEUE_OFFSETS, answer.code, answer.remark, connection.address)
            told |= body_of(answer, decode_extents)
            times = header_of(answer, BrokerTimes)
        for queue in queues:  # not all that are told: a broker may tell of very many
            topic = told.get(queue.topic)
            if topic is None or queue.queue_id >= len(topic.begins):
                seen.extents[queue] = NOTHING  # it is not there
            else:
                seen.extents[queue] = Extent(topic.begins[queue.queue_id], topic.ends[queue.queue_id])
        seen.marks |= {
            (name_of, name): Mark(told[name_of].identity, times.now_ms, told[name_of].rewinds, times.started_ms)
            for name_of in topics
            if name_of in told
        }

    async def _ask_apache(self, connection: Connection, name: str, queues: list[Queue], seen: Seen) -> None:
        topics = dict.fromkeys(queue.topic for queue in queues)
        await asyncio.gather(*(self._ask_statistics(connection, name, topic, seen) for topic in topics))
        missing = [queue for queue in queues if queue not in seen.extents]
        await asyncio.gather(*(self._ask_one(connection, queue, seen) for queue in missing))
        seen.marks |= {part_of(queue): UNMARKED for queue in missing}  # these may hold newer messages than all others

    async def _ask_statistics(self, connection: Connection, name: str, topic: str, seen: Seen) -> None:
        code = RequestCode.GET_TOPIC_STATS_INFO
        answer = await connection.ask(code, write(TopicName(topic)), timeout_s=OFFSET_TIMEOUT_S)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return
        if answer.code:
            raise BrokerRefused(code, answer.code, answer.remark, connection.address)
        ranges = body_of(answer, decode_topic_stats)
        for queue, told in ranges.items():
            seen.extents[Queue(topic, name, queue.queue_id)] = Extent(max(told.begin, 0), max(told.end, 0))
        seen.marks[topic, name] = Mark(newest_ms=max((told.last_ms for told in ranges.values()), default=0))

    async def _ask_one(self, connection: Connection, queue: Queue, seen: Seen) -> None:
        ext = write(TopicQueue(queue.topic, queue.queue_id))
        codes = (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
        answers = await asyncio.gather(*(connection.request(code, ext, timeout_s=OFFSET_TIMEOUT_S) for code in codes))
        seen.extents[queue] = Extent(*(max(header_of(answer, Offset).offset, 0) for answer in answers))

    async def fingerprint(self, queue: Queue, offset: int) -> Fingerprint | None:
        """Return the fingerprint of a message; None if the message is not there, or its broker does not answer."""
        try:
            connection = await self._cluster.broker(queue.broker_name)
            answer = await self._pull(connection, queue, offset, TOOLS_GROUP)
            if answer.code == ResponseCode.NO_PERMISSION and self._group:
                answer = await self._pull(connection, queue, offset, self._group)
        except (ConnectionFailed, RequestTimeout):
            return None
        return found_at(answer, offset)

    def _pull(self, connection: Connection, queue: Queue, offset: int, group: str) -> asyncio.Future[Frame]:
        header = pull_header(group, queue, offset, 1, Subscription(queue.topic))
        return connection.ask(RequestCode.PULL_MESSAGE, header, timeout_s=OFFSET_TIMEOUT_S)


def found_at(answer: Frame, offset: int) -> Fingerprint | None:
    """Return the fingerprint of the message at an offset in the answer to a pull; None if it is not there."""
    records = body_of(answer, decode_records)
    return next((Fingerprint.of(record) for record in records if record.queue_offset == offset), None)
