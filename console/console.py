"""The state that all pages share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Self

from ..client.admin.admin_client import AdminClient, Masters
from ..client.admin.dead_letters import Marks, all_marks, dead_letters
from ..client.admin.diagnosis import Examiner, findings_of_brokers
from ..client.admin.findings import Finding
from ..client.errors import RocketletError, get_logger
from ..client.producer import Producer
from ..protocol import names
from ..protocol.admin_bodies import GroupConnections, QueueProgress
from ..protocol.names import Queue
from .config import BROKERS_INTERVAL_S, LAG_POINTS, MARKS_INTERVAL_S, MAX_NOTICES, MAX_WATCHES
from .group_watch import GroupWatch
from .jobs import Jobs
from .oldest import Oldest
from .rotation import Rotation
from .samples import GroupSample, TopicSample, group_sample, now_ms, rate_of, sample_topic

log = get_logger("rocketlet.console")


class _BrokerSample(NamedTuple):
    """Messages per second that were sent and read, and the end of the commit log in bytes."""

    ms: int
    sent: float
    read: float
    log_end: int


def _written_per_s(points: Sequence[_BrokerSample]) -> float | None:
    if len(points) < 2 or points[-1].ms <= points[-2].ms:
        return None
    return max(points[-1].log_end - points[-2].log_end, 0) * 1000 / (points[-1].ms - points[-2].ms)


class Console:
    """The state of the console. `cluster` is the text that identifies the cluster on pages, `read_only` is True to disable
    changes, `producer` creates a producer, and `folder` keeps the jobs."""

    def __init__(
        self,
        admin: AdminClient,
        producer: Callable[[], Producer[bytes]],
        *,
        cluster: str,
        read_only: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.admin: Final = admin
        self.producer: Final = producer
        self.cluster: Final = cluster
        self.read_only: Final = read_only
        self.jobs: Final = Jobs(admin, folder)
        self.examiner = Examiner(admin)
        self.groups = Rotation[GroupSample](self._group_names, self._sample_group)
        self.topics = Rotation[TopicSample](self._topic_names, partial(sample_topic, admin))
        self.oldest = Oldest(admin)
        self.examining = asyncio.Lock()  # held while a page examines the whole cluster
        self.closing = asyncio.Event()
        self.streams = 0
        self._watches: OrderedDict[str, GroupWatch] = OrderedDict()
        self._notices: OrderedDict[str, str] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
        self._of_brokers: list[Finding] = []
        self._own_topics: set[str] = set()
        self._rates: dict[str, deque[_BrokerSample]] = {}
        self._marks: Marks = {}
        self._marks_read_s = float("-inf")

    async def __aenter__(self) -> Self:
        self.jobs.start(is_read_only=self.read_only)
        running = (self.groups.run(), self.topics.run(), self._examine_brokers())
        self._tasks = [asyncio.create_task(item, name="samples") for item in running]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.closing.set()
        await self.jobs.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _group_names(self) -> list[str]:
        configs = self.examiner.configs = await self.admin.all_group_configs()
        self.examiner.keep(configs)
        return sorted(configs)

    async def _topic_names(self) -> list[str]:
        self._own_topics = {
            text
            for broker in await self.admin.brokers()
            for text in (broker.cluster, broker.name, names.reply_topic(broker.cluster))
        }
        return await self.admin.topics(system=True)

    def is_own_topic(self, name: str) -> bool:
        """Return True for a topic that a broker created for itself or for its cluster."""
        return name in self._own_topics or names.is_made_by_brokers(name)

    async def _sample_group(self, name: str, before: GroupSample | None) -> GroupSample:
        masters = await self.admin.masters()
        progress, connections = await asyncio.gather(
            self.admin.progress(name, masters=masters, times=False), self.admin.connections(name, masters)
        )
        return await self.sample(name, masters, progress, connections, before)

    async def sample(
        self,
        name: str,
        masters: Masters,
        progress: Mapping[Queue, QueueProgress],
        connections: Mapping[str, GroupConnections],
        before: GroupSample | None,
    ) -> GroupSample:
        """Return a sample of a group from its progress and members, which the caller has queried."""
        findings = None
        if not names.is_system_group(name):
            findings = await self.examiner.examine(name, masters, connections, progress)
        return group_sample(name, progress, connections, before, findings, await self._dead(name))

    async def _dead(self, group: str) -> int:
        """Return the number of dead letters that were neither replayed nor discarded, as of up to MARKS_INTERVAL_S ago."""
        if names.dlq_topic(group) not in await self.topics.list():
            return 0
        if time.monotonic() - self._marks_read_s >= MARKS_INTERVAL_S:
            self._marks_read_s = time.monotonic()
            self._marks = await all_marks(self.admin)
        return (await dead_letters(self.admin, group, self._marks)).new

    async def _examine_brokers(self) -> None:
        while True:
            try:
                self._of_brokers = await findings_of_brokers(self.admin, self.examiner.skews)
                await self._sample_rates()
            except RocketletError as error:
                log.debug("console_sample_failed", subject="brokers", reason=str(error))
            await asyncio.sleep(BROKERS_INTERVAL_S)

    async def _sample_rates(self) -> None:
        masters = await self.admin.masters()
        for name in self._rates.keys() - masters.keys():
            del self._rates[name]
        for name, address in masters.items():
            try:
                status = await self.admin.broker_status(address)
            except RocketletError:  # `findings_of_brokers` reports it
                continue
            points = self._rates.setdefault(name, deque(maxlen=LAG_POINTS))
            end = status.get("commitLogMaxOffset", "")
            points.append(
                _BrokerSample(
                    now_ms(),
                    rate_of(status, "putTps"),
                    rate_of(status, "getTransferedTps"),
                    int(end) if end.isdecimal() else 0,
                )
            )

    def throughput(self, broker: str = "", *, sent: bool) -> list[tuple[int, float]]:
        """Return times (ms) with the messages per second that were sent or read, for one broker, or the sum of all for the
        time that all were sampled."""
        if broker:
            return [(point.ms, point.sent if sent else point.read) for point in self._rates.get(broker, ())]
        rounds = zip(*(list(points)[::-1] for points in self._rates.values()), strict=False)
        return [(points[0].ms, sum(it.sent if sent else it.read for it in points)) for points in rounds][::-1]

    def written_per_s(self, broker: str = "") -> float | None:
        """Return the bytes per second that one broker, or all, wrote to the commit log between the last two samples; None
        before them."""
        found = [_written_per_s(points) for name, points in self._rates.items() if broker in ("", name)]
        known = [rate for rate in found if rate is not None]
        return sum(known) if known else None

    def findings(self) -> list[Finding]:
        """Return the last findings about brokers, topics and groups, worst first."""
        found = list(self._of_brokers)
        for topic in self.topics.found.values():
            found += () if self.is_own_topic(topic.name) else topic.findings
        for group in self.groups.found.values():
            found += group.findings or ()
        return sorted(set(found))

    def watch(self, group: str) -> GroupWatch:
        """Return the watch of a group, which all pages that show it share. Drop the least recently used one if there are
        too many."""
        found = self._watches.pop(group, None) or GroupWatch(self.admin, group)
        self._watches[group] = found
        if len(self._watches) > MAX_WATCHES:
            self._watches.popitem(last=False)
        return found

    def forget_watch(self, group: str) -> None:
        self._watches.pop(group, None)

    def notice(self, text: str) -> str:
        """Keep the report of a change for the next page. Return its key."""
        key = secrets.token_urlsafe(9)
        self._notices[key] = text
        if len(self._notices) > MAX_NOTICES:
            self._notices.popitem(last=False)
        return key

    def notice_of(self, key: str) -> str:
        return self._notices.get(key, "")
