"""The offsets that queues hold, and the identities of their topics, as brokers return them.

Requests for the first and last offsets of queues and for the identities of their topics (GET_QUEUE_OFFSETS): one request
for up to `MAX_TOPICS_ASKED` topics of a broker.

An Apache broker, which does not support this request, gets one request for the statistics of each topic, all
concurrently. Where the statistics leave out a queue, the offsets of this queue are requested separately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..client.config import OFFSET_TIMEOUT_S
from ..client.errors import BrokerRefused, ConnectionFailed, RequestTimeout, get_logger
from ..client.wire.cluster import ClusterView, by_broker, pull_header
from ..client.wire.connection import Connection, body_of, header_of
from ..protocol.admin_bodies import decode_topic_stats
from ..protocol.codes import RequestCode, ResponseCode
from ..protocol.config import MAX_TOPICS_ASKED
from ..protocol.frame import Frame
from ..protocol.group_bodies import TopicExtent, decode_extents, encode_topics
from ..protocol.headers import BrokerTimes, Offset, OptionalGroup, TopicName, TopicQueue, write
from ..protocol.message import decode_records
from ..protocol.names import TOOLS_GROUP, Queue, Subscription
from .checkpoint import UNMARKED, Fingerprint, Part, TopicSnapshot, part_of

log = get_logger("rocketlet.spark")


class Extent(NamedTuple):
    """The offsets that a queue holds: `begin` inclusive, `end` exclusive."""

    begin: int
    end: int


NOTHING = Extent(0, 0)


@dataclass(slots=True)
class BrokerOffsets:
    """Extents and marks that brokers returned. Queues of unreachable brokers are missing.

    Attributes:
        extents: the offsets that each queue holds
        absent: queues that their broker does not have
        marks: identity of each topic on each broker
    """

    extents: dict[Queue, Extent] = field(default_factory=dict)
    absent: set[Queue] = field(default_factory=set)
    marks: dict[Part, TopicSnapshot] = field(default_factory=dict)


class Extents:
    """Requests extents from the brokers of one cluster, on behalf of a group, which may be empty.

    `away` has the names of the brokers that did not answer the last request.
    """

    def __init__(self, cluster: ClusterView, group: str) -> None:
        self._cluster = cluster
        self._group = group
        self._foreign: set[str] = set()
        self.away: set[str] = set()

    async def of(self, queues: Iterable[Queue]) -> BrokerOffsets:
        """Return the extents of queues. Raises BrokerRefused; unreachable brokers are logged and left out."""
        seen = BrokerOffsets()
        asked = by_broker(queues)
        await asyncio.gather(*(self._ask(name, wanted, seen) for name, wanted in asked.items()))
        self.away &= asked.keys()
        return seen

    async def _ask(self, name: str, queues: list[Queue], seen: BrokerOffsets) -> None:
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

    async def _ask_ours(self, connection: Connection, name: str, queues: list[Queue], seen: BrokerOffsets) -> None:
        topics = list(dict.fromkeys(queue.topic for queue in queues))
        ext = write(OptionalGroup(self._group or None))
        parts = [topics[at : at + MAX_TOPICS_ASKED] for at in range(0, len(topics), MAX_TOPICS_ASKED)]
        answers = await asyncio.gather(
            *(
                connection.request_unchecked(RequestCode.GET_QUEUE_OFFSETS, ext, encode_topics(part), OFFSET_TIMEOUT_S)
                for part in parts
            )
        )
        reported: dict[str, TopicExtent] = {}
        times = BrokerTimes(0, 0)
        for answer in answers:
            if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                self._foreign.add(name)
                return
            if answer.code:
                raise BrokerRefused(RequestCode.GET_QUEUE_OFFSETS, answer.code, answer.remark, connection.address)
            reported |= body_of(answer, decode_extents)
            times = header_of(answer, BrokerTimes)
        for queue in queues:  # not all reported queues, because a topic may have many more than are requested
            topic = reported.get(queue.topic)
            if topic is None or queue.queue_id >= len(topic.begins):
                seen.absent.add(queue)
            else:
                seen.extents[queue] = Extent(topic.begins[queue.queue_id], topic.ends[queue.queue_id])
        seen.marks |= {
            (name_of, name): TopicSnapshot(
                reported[name_of].identity, times.now_ms, reported[name_of].rewinds, times.started_ms
            )
            for name_of in topics
            if name_of in reported
        }

    async def _ask_apache(self, connection: Connection, name: str, queues: list[Queue], seen: BrokerOffsets) -> None:
        topics = dict.fromkeys(queue.topic for queue in queues)
        reported = await asyncio.gather(*(self._ask_statistics(connection, name, topic, seen) for topic in topics))
        unknown = {topic for topic, is_known in zip(topics, reported, strict=True) if not is_known}
        seen.absent |= {queue for queue in queues if queue.topic in unknown}
        missing = [queue for queue in queues if queue not in seen.extents and queue not in seen.absent]
        await asyncio.gather(*(self._ask_one(connection, queue, seen) for queue in missing))
        # the statistics lack this queue, so the newest store time of the topic is unknown
        seen.marks |= {part_of(queue): UNMARKED for queue in missing}

    async def _ask_statistics(self, connection: Connection, name: str, topic: str, seen: BrokerOffsets) -> bool:
        """Store the extents and mark of a topic, and return True; False if the broker does not have the topic."""
        code = RequestCode.GET_TOPIC_STATS_INFO
        answer = await connection.request_unchecked(code, write(TopicName(topic)), timeout_s=OFFSET_TIMEOUT_S)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return False
        if answer.code:
            raise BrokerRefused(code, answer.code, answer.remark, connection.address)
        ranges = body_of(answer, decode_topic_stats)
        for queue, reported in ranges.items():
            seen.extents[Queue(topic, name, queue.queue_id)] = Extent(max(reported.begin, 0), max(reported.end, 0))
        seen.marks[topic, name] = TopicSnapshot(
            newest_ms=max((reported.last_ms for reported in ranges.values()), default=0)
        )
        return True

    async def end_of(self, queue: Queue) -> int:
        """Return the end of a queue, even if its topic no longer has the queue. Raises RocketletError."""
        seen = BrokerOffsets()
        await self._ask_one(await self._cluster.broker(queue.broker_name), queue, seen)
        return seen.extents[queue].end

    async def _ask_one(self, connection: Connection, queue: Queue, seen: BrokerOffsets) -> None:
        ext = write(TopicQueue(queue.topic, queue.queue_id))
        codes = (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
        answers = await asyncio.gather(*(connection.request(code, ext, timeout_s=OFFSET_TIMEOUT_S) for code in codes))
        seen.extents[queue] = Extent(*(max(header_of(answer, Offset).offset, 0) for answer in answers))

    async def fingerprint(self, queue: Queue, offset: int) -> Fingerprint | None:
        """Return the fingerprint of the message at an offset, or None if there is no message or the broker does not
        answer."""
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
        return connection.request_unchecked(RequestCode.PULL_MESSAGE, header, timeout_s=OFFSET_TIMEOUT_S)


def found_at(answer: Frame, offset: int) -> Fingerprint | None:
    """Return the fingerprint of the message at an offset in a pull response, or None if the response does not contain
    it."""
    records = body_of(answer, decode_records)
    return next((Fingerprint.of(record) for record in records if record.queue_offset == offset), None)
