"""Groups and topics as they were seen last."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..client.admin.admin_client import AdminClient
from ..client.errors import TopicNotFound
from ..protocol import names
from ..protocol.admin_answers import GroupConnections
from ..protocol.admin_bodies import Progress
from ..protocol.queue import Queue
from .config import LAG_POINTS


def now_ms() -> int:
    return int(time.time() * 1000)


@dataclass(frozen=True, slots=True)
class GroupSample:
    """`lags`: time (ms) and messages that are not consumed, oldest first; shared with the samples before."""

    name: str
    ms: int
    members: int
    topics: tuple[str, ...]
    lag: int
    lags: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=LAG_POINTS))

    @property
    def state(self) -> str:
        if not self.members:
            return "no members" if self.lag else "idle"
        return "consuming" if self.lag else "up to date"


@dataclass(frozen=True, slots=True)
class TopicSample:
    """`end` counts all messages ever sent; `rate`: messages per second since the sample before, None for the first."""

    name: str
    ms: int
    brokers: tuple[str, ...]
    queues: int
    messages: int
    end: int
    last_ms: int
    rate: float | None = None
    rates: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LAG_POINTS))


async def sample_group(admin: AdminClient, name: str, before: GroupSample | None) -> GroupSample:
    masters = await admin.masters()
    progress, connections = await asyncio.gather(
        admin.progress(name, masters=masters, times=False), admin.connections(name, masters)
    )
    return group_sample(name, progress, connections, before)


def group_sample(
    name: str,
    progress: Mapping[Queue, Progress],
    connections: Mapping[str, GroupConnections],
    before: GroupSample | None,
) -> GroupSample:
    topics = {queue.topic for queue in progress} | {
        item for known in connections.values() for item in known.subscriptions
    }
    mine = tuple(sorted(topic for topic in topics if not topic.startswith(names.RETRY_PREFIX)))
    members = {member.client_id for known in connections.values() for member in known.members}
    lag = sum(max(item.lag, 0) for item in progress.values())
    sample = GroupSample(name, now_ms(), len(members), mine, lag)
    if before is not None:
        sample.lags.extend(before.lags)
    sample.lags.append((sample.ms, lag))
    return sample


async def sample_topic(admin: AdminClient, name: str, before: TopicSample | None) -> TopicSample | None:
    try:
        topic = await admin.topic(name)
    except TopicNotFound:
        return None
    end, ms = sum(span.end for span in topic.ranges.values()), now_ms()
    rate = None
    if before is not None and ms > before.ms and end >= before.end:
        rate = (end - before.end) * 1000 / (ms - before.ms)
    last_ms = max((span.last_ms for span in topic.ranges.values()), default=0)
    sample = TopicSample(name, ms, tuple(sorted(topic.config)), len(topic.ranges), topic.messages, end, last_ms, rate)
    if before is not None:
        sample.rates.extend(before.rates)
    if rate is not None:
        sample.rates.append((ms, rate))
    return sample
