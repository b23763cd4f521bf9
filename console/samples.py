"""Samples of groups and topics, with their history."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..client.admin.admin_client import AdminClient, are_broadcasting
from ..client.admin.diagnosis import findings_of_dead_letters, findings_of_topic
from ..client.admin.findings import Finding, Harm
from ..client.config import SHORT_LAG_S
from ..client.errors import BrokerRefused, TopicNotFound
from ..protocol import names
from ..protocol.admin_bodies import GroupConnections, QueueProgress
from ..protocol.names import Queue
from .config import CATCH_UP_S, LAG_POINTS, RATE_S
from .text import duration


def now_ms() -> int:
    return int(time.time() * 1000)


def rate_of(status: Mapping[str, str], name: str) -> float:
    """Return the first of a broker's rates over 10 s, a minute and ten minutes; 0 without one, as in the first seconds of
    Apache's broker."""
    try:
        return float(next(iter((status.get(name) or "").split()), "0"))
    except ValueError:
        return 0.0


@dataclass(frozen=True, slots=True)
class GroupSample:
    """The state of a group at one time.

    Attributes:
        ms: the time of the sample, in ms since the epoch.
        lags: times (ms since the epoch) with the number of unconsumed messages, oldest first.
        reads: times with the sum of the committed offsets of `queues` queues.
        findings: the findings of `rocketlet doctor` about the group, worst first; None until a group with members was
            observed twice, and for the groups that RocketMQ creates for its own use.
        dead: the number of dead letters that were neither replayed nor discarded.
    """

    name: str
    ms: int
    members: int
    topics: tuple[str, ...]
    lag: int
    queues: int = 0
    broadcasts: bool = False  # its members keep their own offsets, and its lag is not known
    lags: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=LAG_POINTS))
    reads: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=LAG_POINTS))
    findings: tuple[Finding, ...] | None = None
    dead: int = 0

    @property
    def rate(self) -> float | None:
        """Messages per second that the group committed in the last RATE_S; None with fewer than two samples, or if offsets
        were reset to lower ones."""
        recent = [point for point in self.reads if point[0] >= self.ms - RATE_S * 1000]
        if len(recent) < 2 or recent[-1][0] <= recent[0][0] or recent[-1][1] < recent[0][1]:
            return None
        return (recent[-1][1] - recent[0][1]) * 1000 / (recent[-1][0] - recent[0][0])

    @property
    def caught_up(self) -> str:
        """Text about when the group will have no lag if it continues as in the last CATCH_UP_S; a dash if that is unknown,
        and other words if the lag does not shrink. A
        lag that the group consumes within SHORT_LAG_S counts as none."""
        if self.broadcasts:
            return "–"
        if self.lag <= SHORT_LAG_S * (self.rate or 0):
            return "now"
        recent = [point for point in self.lags if point[0] >= self.lags[-1][0] - CATCH_UP_S * 1000]
        if len(recent) < 2 or self.rate is None:
            return "–"
        took_ms, shrunk = recent[-1][0] - recent[0][0], recent[0][1] - recent[-1][1]
        if shrunk <= 0 or took_ms <= 0:
            return "not at this rate"
        return f"in {duration(int(self.lag / shrunk * took_ms))}"

    @property
    def worst(self) -> Finding | None:
        """The worst finding that affects messages now."""
        return next((finding for finding in self.findings or () if finding.harm < Harm.RISK), None)

    @property
    def state(self) -> str:
        """The kind of the worst finding that affects messages now; without one, a word about members and lag."""
        if self.worst is not None:
            return self.worst.kind.replace("_", " ")
        if self.findings is None:
            return "checking"
        if not self.members:
            return "idle"
        if self.broadcasts:
            return "broadcasting"
        return "up to date" if self.lag <= SHORT_LAG_S * (self.rate or 0) else "behind"

    @property
    def tone(self) -> str:
        """The colour of the state: `bad`, `warn`, `good`, or empty."""
        if self.worst is not None:
            return "warn" if self.worst.harm is Harm.SLOW else "bad"
        return "good" if self.state in ("up to date", "broadcasting") else ""


@dataclass(frozen=True, slots=True)
class TopicSample:
    """The state of a topic at one time. `end` is the sum of the queues' end offsets. `rate` is the number of messages per
    second since the previous sample; None without one, or if `end` has fallen. `bytes_rate` is the number of bytes that
    were sent per second in the last minute; None if it is unknown."""

    name: str
    ms: int
    brokers: tuple[str, ...]
    queues: int
    messages: int
    end: int
    last_ms: int
    rate: float | None = None
    bytes_rate: float | None = None
    rates: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LAG_POINTS))
    findings: tuple[Finding, ...] = ()


def group_sample(
    name: str,
    progress: Mapping[Queue, QueueProgress],
    connections: Mapping[str, GroupConnections],
    before: GroupSample | None,
    findings: tuple[Finding, ...] | None = None,
    dead: int = 0,
) -> GroupSample:
    topics = {queue.topic for queue in progress} | {
        item for known in connections.values() for item in known.subscriptions
    }
    mine = tuple(sorted(topic for topic in topics if not topic.startswith(names.RETRY_PREFIX)))
    members = {member.client_id for known in connections.values() for member in known.members}
    broadcasts = are_broadcasting(connections)
    progress = {} if broadcasts else progress
    lag = sum(max(item.lag, 0) for item in progress.values())
    offsets = [item.consumer_offset for item in progress.values() if item.consumer_offset > 0]
    if findings is not None:
        findings = tuple(sorted((*findings, *findings_of_dead_letters(name, dead))))
    sample = GroupSample(
        name, now_ms(), len(members), mine, lag, len(offsets), broadcasts, findings=findings, dead=dead
    )
    if before is not None:
        sample.lags.extend(before.lags)
        if before.queues == sample.queues:  # a further queue's offset is not a number of messages that were read since
            sample.reads.extend(before.reads)
    sample.lags.append((sample.ms, lag))
    sample.reads.append((sample.ms, sum(offsets)))
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
    sample = TopicSample(
        name,
        ms,
        tuple(sorted(topic.config)),
        len(topic.ranges),
        topic.messages,
        end,
        last_ms,
        rate,
        await _bytes_rate(admin, name),
        findings=tuple(findings_of_topic(topic)),
    )
    if before is not None:
        sample.rates.extend(before.rates)
    if rate is not None:
        sample.rates.append((ms, rate))
    return sample


async def _bytes_rate(admin: AdminClient, topic: str) -> float | None:
    try:
        return await admin.put_bytes_per_s(topic)
    except BrokerRefused:  # for example, the account may not query statistics
        return None
