"""The findings of `rocketlet doctor`: what is wrong with a cluster and with each group, worst first."""

from __future__ import annotations

import asyncio
import math
import re
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from ...protocol import names
from ...protocol.admin_bodies import Departed, GroupConnections, LiteTopicLag, QueueProgress, Running, RunningHandler
from ...protocol.bodies import BrokerData, GroupConfig
from ...protocol.codes import PERM_READ, PERM_WRITE
from ...protocol.group_bodies import SHARED_OWNER
from ...protocol.names import Queue, Sql, SubscriptionError, counted
from ..config import (
    ASKED_AT_ONCE,
    CERTIFICATE_WARNING_S,
    CLOCK_SKEW_S,
    DISK_FULL_RATIO,
    DISK_LOW_RATIO,
    EARLY_LOOKS,
    LOOK_S,
    MAX_WANTED,
    STUCK_S,
    SUSPECTS,
    WATCH_S,
    WATCHED_AT_ONCE,
)
from ..errors import ConnectionFailed, RequestTimeout, RocketletError
from ..message import Message
from ..wire.connection import gather_limited
from .admin_client import AdminClient, Group, LiteGroup, Masters, Topic, are_broadcasting, locked
from .dead_letters import Marks, all_marks, dead_letters
from .findings import (
    OF_A_MOMENT,
    BlockedLiteTopic,
    BlockedMessage,
    Finding,
    Harm,
    Observed,
    _of_a_moment,
    findings_of_group,
    outpaced,
    owned_by,
    suspects_of,
    without_deleted,
)

# ------------------------------------------------------------------------------
# Finds problems of a cluster, the worst first, and how to fix them: `rocketlet doctor`.
#
# Most requests are supported by Apache's brokers, too. Only Rocketlet's brokers return the owner of each queue and
# conflicts between members, which makes some findings more exact.


K = TypeVar("K", list, dict)  # type: ignore[type-arg]


@dataclass(frozen=True, slots=True)
class ObservationTimes:
    """How long groups are observed, in seconds.

    Args:
        look_s: the interval between two observations of a group.
        watch_s: the maximum time for which a queue without commits is observed.
        stuck_s: the minimum time for which the next message of a queue must have waited for its queue to be reported.
    """

    look_s: float = LOOK_S
    watch_s: float = WATCH_S
    stuck_s: float = STUCK_S


@dataclass(slots=True)
class Examined:
    """The number of groups that `diagnose` has examined, for a progress bar. `total` is 0 until the groups are known."""

    done: int = 0
    total: int = 0


async def diagnose(
    admin: AdminClient, patience: ObservationTimes = ObservationTimes(), examined: Examined | None = None
) -> list[Finding]:
    """Query all brokers and groups, and return the findings, worst first. If a broker is missing or cannot be queried,
    return only the findings about brokers.

    Args:
        patience: how long groups are observed.
        examined: an object in which the progress is recorded.

    Raises:
        ConnectionFailed: no name server responds.
    """
    examined = examined or Examined()
    skews: dict[str, float] = {}
    findings = await findings_of_brokers(admin, skews)
    if any(finding.kind in BROKERS_MISSING for finding in findings):
        return findings  # without all brokers, findings about groups and topics would be wrong
    for topic in await gather_limited(admin.topic, await admin.topics()):
        findings += findings_of_topic(topic)
    masters = await admin.masters()
    configs = await admin.all_group_configs(masters)
    groups = [name for name in configs if not names.is_system_group(name)]
    examined.total = len(groups)
    watch = _Watch(admin, masters, configs, patience, skews, examined)
    for found in await gather_limited(watch.findings, groups, WATCHED_AT_ONCE):
        findings += found
    there = set(await admin.topics(system=True))
    given_up = [name for name in groups if names.dlq_topic(name) in there]
    marks = await all_marks(admin) if given_up else {}
    for found in await gather_limited(partial(_dead_letters, admin, marks), given_up):
        findings += found
    return sorted(set(findings))


def _filter(topic: str, seen: Observed) -> str:
    """Return the filter of a topic that members report; one that matches all messages if their filters differ."""
    texts = {known.subscriptions[topic] for known in seen.group.connections.values() if topic in known.subscriptions}
    texts |= {member.subscriptions[topic] for member in seen.running.values() if topic in member.subscriptions}
    return texts.pop() if len(texts) == 1 else "*"


# Brokers


BROKERS_MISSING: Final = frozenset(("no_broker", "broker_away", "broker_unknown"))
"""Kinds of findings with which groups and topics cannot be judged, because not all of their brokers respond."""


async def findings_of_brokers(admin: AdminClient, skews: dict[str, float]) -> list[Finding]:
    """Query all brokers, and return the findings about them, worst first.

    Args:
        skews: gets the number of seconds that each broker's clock is ahead of this machine's, by broker name.

    Raises:
        ConnectionFailed: no name server responds.
    """
    brokers = await admin.brokers()
    findings = list(_gone(await admin.departed()))
    for broker in brokers:
        findings += await _of_broker(admin, broker, skews)
    findings = [replace(finding, about="broker") for finding in findings]
    if not brokers:
        text = "the name servers know no broker: nothing can be sent or read"
        cure = "start a broker; if one runs, check its --nameserver"
        findings.append(Finding(Harm.STANDS, "no_broker", "cluster", text, cure, "cluster"))
    return sorted(findings)


def _gone(departed: Iterable[Departed]) -> Iterator[Finding]:
    for broker in departed:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(broker.left_ms / 1000))
        text = f"it left at {since} with {counted(broker.topics, 'topic')}, which cannot be read or sent to there"
        cure = (
            f"start it (it was at {broker.address}); if it was retired for good: rocketlet brokers forget {broker.name}"
        )
        yield Finding(Harm.STANDS, "broker_gone", broker.name, text, cure)


async def _of_broker(admin: AdminClient, broker: BrokerData, skews: dict[str, float]) -> list[Finding]:
    """Query a broker, and return the findings about it.

    Args:
        skews: gets the number of seconds that the broker's clock is ahead of this machine's, by broker name.
    """
    address = broker.addresses.get(0)
    if address is None:
        text = "the broker has no master: nothing can be sent to it"
        return [Finding(Harm.STANDS, "no_master", broker.name, text, "start its master")]
    try:
        status = await admin.broker_status(address)
    except (ConnectionFailed, RequestTimeout) as error:
        cure = "start the broker; if it runs, advertise an address that clients can reach (--advertise)"
        text = f"the name server has its address as {address}, which does not respond from here: {error}"
        return [Finding(Harm.STANDS, "broker_away", broker.name, text, cure)]
    except RocketletError as error:
        return [
            Finding(Harm.RISK, "broker_unknown", broker.name, str(error), "give this command the keys of an account")
        ]
    skews[broker.name] = skew_s = _skew_s(status)
    return [
        *_writes(broker.name, status),
        *_disk(broker.name, status),
        *_clock(broker.name, skew_s),
        *_jump(broker.name, status),
        *_refused(broker.name, status),
        *_repeats(broker.name, status),
        *_unauthorized(broker.name, status),
        *_turned_away(broker.name, status),
        *_unburied(broker.name, status),
        *_failed_calls(broker.name, status),
        *_outdated_clients(broker.name, status),
        *_certificates(broker.name, status),
        *_damaged(broker.name, status),
        *_not_adopted(broker.name, status),
    ]


def _writes(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Find a broker that cannot write, which only Rocketlet's brokers report."""
    fault = status.get("writeFault")
    if fault:
        cure = "free space on its disk; if the disk is not full, check it and restart the broker"
        yield Finding(Harm.STANDS, "writes_refused", broker, f"it rejects all messages: {fault}", cure)


def _disk(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    ratio = _disk_ratio(status)
    if ratio >= DISK_LOW_RATIO:
        harm = Harm.LOSS if ratio >= DISK_FULL_RATIO else Harm.RISK
        text = f"its disk is {ratio:.0%} full; a broker without free space rejects messages, Apache's deletes old ones early"
        yield Finding(harm, "disk", broker, text, "free space, or keep messages for a shorter time")


def _disk_ratio(status: Mapping[str, str]) -> float:
    return float(status.get("commitLogDiskRatio") or 0)


def _refused(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Find clients whose heartbeats a Rocketlet broker rejects. Such clients receive no messages, and most of them log
    nothing."""
    for text in _reported(status, "refusedHeartbeats", list):
        what = f"it rejects the heartbeats of {text}"
        cure = "change the client's subscriptions, or the limit that the reason names; it receives nothing until then"
        yield Finding(Harm.STANDS, "heartbeat_refused", broker, what, cure)


def _damaged(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    damaged = status.get("damagedMessages", "0")
    if damaged != "0":
        unread = counted(int(damaged), "message cannot be read and was", "messages cannot be read and were")
        text = f"{unread} skipped since its start"
        cure = "its log names them; check the disk, then `rocketlet fsck DIR` on the stopped broker"
        yield Finding(Harm.LOSS, "damaged", broker, text, cure)


def _not_adopted(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Find state of an earlier run that a Rocketlet broker could not use at its start."""
    for text in _reported(status, "notAdopted", list):
        what = f"at its start it could not use {text}; messages may be delivered again, and none is skipped"
        cure = "set again what is missing, or restore a backup; the finding ends with the next start"
        yield Finding(Harm.TWICE, "not_adopted", broker, what, cure)


def _repeats(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Find causes of messages that foreign members have handled twice or may handle twice: queues that moved while
    handlers ran, members that left without a commit, and peer brokers that are away. Rocketlet's brokers report the
    last ten minutes."""
    reported = _reported(status, "repeats", dict)
    for text in reported.get("undrained", ()):
        what = f"queues moved while handlers of a foreign member ran: {text}; their messages may be handled twice"
        cure = "make its handlers quicker than 2 s, or let it take fewer messages at a time (pullThresholdForQueue)"
        yield Finding(Harm.TWICE, "moved_undrained", broker, what, cure)
    for text in reported.get("left", ()):
        what = (
            f"a foreign member left {text} that it had not committed; those whose handlers had started are redelivered"
        )
        cure = "let it wait for its handlers: awaitTerminationMillisWhenShutdown in Java, your own wait in Go"
        yield Finding(Harm.RISK, "left_uncommitted", broker, what, cure)
    for text in reported.get("away", ()):
        what = f"it cannot query {text} for members, so foreign members may learn of changes at different times"
        cure = "start that broker, or let this one reach it; messages may be handled twice until then"
        yield Finding(Harm.TWICE, "peer_away", broker, what, cure)


def _reported(status: Mapping[str, str], name: str, kind: type[K]) -> K:
    """Return a value that a Rocketlet broker reports as JSON in its status; an empty one for other brokers."""
    try:
        found = orjson.loads(status.get(name, "null"))
    except ValueError:
        found = None
    return found if isinstance(found, kind) else kind()


def _unauthorized(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Find rejected requests. Those with a known access key count as requests of a service, which is stalled; others may
    be from any client."""
    for text in _reported(status, "refusedRequests", list):
        is_known = str(text).startswith(("signature", "permission", "admin"))
        cure = "correct the client's keys, or the account in the broker's --acl file"
        harm = Harm.STANDS if is_known else Harm.RISK
        yield Finding(harm, "requests_refused", broker, f"it rejects requests, {text}", cure)


def _turned_away(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Find connections that a broker closed before a request. Such connections may come from a port scanner."""
    for text in _reported(status, "turnedAway", list):
        cure = "if that is your client, fix the reason in the client or in the broker's options"
        yield Finding(Harm.RISK, "connections_refused", broker, f"it closes connections from {text}", cure)


def _unburied(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Find messages without retries left whose dead letters cannot be stored."""
    for text in _reported(status, "unburied", list):
        what = f"it cannot store dead letters of the group {text}; their messages stay in flight"
        cure = "free disk space, or delete topics that nobody uses; the broker retries every second"
        yield Finding(Harm.STANDS, "dead_letters_refused", broker, what, cure)


def _failed_calls(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Find failing calls of 5.x clients. A code that begins with 5 counts as the broker's fault."""
    for text in _reported(status, "failedCalls", list):
        is_ours = str(text).startswith("5")
        cure = "check the broker's log" if is_ours else "change the client as the reason says"
        harm = Harm.STANDS if is_ours else Harm.RISK
        yield Finding(harm, "calls_failing", broker, f"calls of 5.x clients fail: {text}", cure)


def _outdated_clients(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    for text in _reported(status, "outdatedClients", list):
        yield Finding(Harm.STANDS, "old_client", broker, f"a 5.x client is too old: {text}", "upgrade it")


def _certificates(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    for file, until_s in _reported(status, "certificates", dict).items():
        left_s = until_s - time.time() if isinstance(until_s, int) else math.inf
        if left_s < CERTIFICATE_WARNING_S:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(until_s))
            verb = "expires at" if left_s > 0 else "expired at"
            cure = "replace the file by a new certificate; the broker reloads it automatically"
            harm = Harm.RISK if left_s > 0 else Harm.STANDS
            yield Finding(harm, "certificate", broker, f"its TLS file {file} {verb} {when}", cure)


def _skew_s(status: Mapping[str, str]) -> float:
    """Return the number of seconds that the broker's clock is ahead of this machine's, from its start time and uptime."""
    running_s = _duration_s(status.get("runtime", ""))
    if running_s is None or "bootTimestamp" not in status:
        return 0.0
    return int(status["bootTimestamp"]) / 1000 + running_s - time.time()


def _clock(broker: str, skew_s: float) -> Iterator[Finding]:
    if abs(skew_s) > CLOCK_SKEW_S:
        text = f"its clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
        yield Finding(
            Harm.RISK, "clock_skew", broker, text, "synchronise both; delays, retention and resets by time use it"
        )


def _jump(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Find a broker whose clock was set ahead, which only Rocketlet's brokers report."""
    ahead_s = int(status.get("clockAheadSeconds") or 0)
    if ahead_s:
        text = f"its machine's clock jumped {ahead_s} s ahead; retention ignores the jump for as long, up to a day"
        cure = "if that clock is wrong, set it back before then, or messages are deleted too early"
        yield Finding(Harm.RISK, "clock_set_ahead", broker, text, cure)


def _duration_s(text: str) -> float | None:
    """Parse an uptime such as `[ 1 days, 2 hours, 3 minutes, 4 seconds ]` into seconds. Return None for any other text."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    return float(sum(map(int.__mul__, numbers, (86_400, 3600, 60, 1)))) if len(numbers) == 4 else None


# Topics


def findings_of_topic(topic: Topic) -> Iterator[Finding]:
    """Return the findings about a topic's settings."""
    for perm, verb in ((PERM_WRITE, "sent to"), (PERM_READ, "read")):
        if topic.config and not any(config.perm & perm for config in topic.config.values()):
            text = f"no broker allows it to be {verb}"
            cure = f"rocketlet topics set {topic.name} --perm 6"
            yield Finding(Harm.STANDS, "permission", topic.name, text, cure, "topic")
    for broker, config in topic.config.items():
        if config.read_queues < config.write_queues:
            text = f"{broker} writes to {config.write_queues} queues, of which only {config.read_queues} may be read"
            cure = (
                f"rocketlet topics set {topic.name} --read-queues {config.write_queues}: the others are not delivered"
            )
            yield Finding(Harm.STANDS, "unreadable_queues", topic.name, text, cure, "topic")


# Groups


class _Packed(NamedTuple):
    """The progress of a group in a few bytes for each queue, while `diagnose` waits for the next observation."""

    queues: tuple[Queue, ...]
    ends: array[int]
    committed: array[int]
    in_hand: array[int]

    def unpacked(self) -> dict[Queue, QueueProgress]:
        none = repeat(0)  # times and lost messages are not compared
        rows = map(QueueProgress, self.ends, self.committed, none, none, self.in_hand)
        return dict(zip(self.queues, rows, strict=True))


def _packed(progress: Mapping[Queue, QueueProgress], known: dict[tuple[Queue, ...], tuple[Queue, ...]]) -> _Packed:
    """Pack the progress of a group.

    Args:
        known: the queues of other groups; groups with the same queues share one tuple.
    """
    queues, items = tuple(progress), progress.values()
    return _Packed(
        known.setdefault(queues, queues),
        array("q", [item.broker_offset for item in items]),
        array("q", [item.consumer_offset for item in items]),
        array("q", [item.in_hand for item in items]),
    )


class _Watch:
    """Observes groups twice. Many groups wait for their second observation concurrently, while only a few are queried."""

    def __init__(
        self,
        admin: AdminClient,
        masters: Masters,
        configs: Mapping[str, Mapping[str, GroupConfig]],
        patience: ObservationTimes,
        skews: Mapping[str, float],
        examined: Examined,
    ) -> None:
        self._admin = admin
        self._masters = masters
        self._configs = configs
        self._patience = patience
        self._examined = examined
        self._places = asyncio.Semaphore(ASKED_AT_ONCE)
        self._topics: dict[str, asyncio.Task[Topic | None]] = {}
        self._queues: dict[tuple[Queue, ...], tuple[Queue, ...]] = {}  # equal for groups that read the same topics
        self._blocked = BlockedMessages(admin, skews, patience.stuck_s)
        self._lites = BlockedLiteTopics(admin, skews, patience.stuck_s)

    async def findings(self, name: str) -> list[Finding]:
        found = await self._findings(name)
        self._examined.done += 1
        return found

    async def _findings(self, name: str) -> list[Finding]:
        async with self._places:
            group, disagreements, full = await self._first(name)
            lite = await self._lites.first(group, self._masters)
            group = without_parent(group)
            began_s = asyncio.get_running_loop().time()
        packed, at = None, dict[Queue, int]()
        early: list[Finding] | None = None
        if group.members and (group.progress or lite is not None):  # without them, no offset changes
            packed = _packed(group.progress, self._queues)
            group = replace(group, progress={})
            if self._examined.total > EARLY_LOOKS and self._patience.look_s < self._patience.watch_s:
                await asyncio.sleep(self._patience.look_s)
                # An early second observation, so that no group needs a further one after it was watched.
                async with self._places:
                    early = list(_of_a_moment(await self._second(group, disagreements, began_s)))
            at = await self._wait_for_progress(group, lite, packed, began_s)
        async with self._places:
            if packed is not None:
                group = replace(group, progress=packed.unpacked())
            seen = await self._second(group, disagreements, began_s)
            limited = await self._limited(group)
            seen = replace(seen, full=full, limited=limited, moving=_advanced(at, seen.running))
            seen = replace(seen, waiting=await self._blocked.waiting(seen))
            seen = replace(seen, lite=lite, blocked_lite=await self._lites.blocked(group, lite, self._masters))
            found = list(findings_of_group(seen))
        if not any(finding.kind in OF_A_MOMENT for finding in found):
            return found
        group = replace(group, progress={})  # many groups wait concurrently, so they are kept in little memory
        seen = replace(seen, later={}, group=group)
        if early is None:
            await asyncio.sleep(self._patience.look_s)
        async with self._places:
            lasting = [finding for finding in found if finding.kind not in OF_A_MOMENT]
            again = _of_a_moment(await self._observe_again(seen, asks_members=early is None))
            return lasting + confirmed(found if early is None else early, again)

    async def _wait_for_progress(
        self, group: Group, lite: LiteGroup | None, packed: _Packed, began_s: float
    ) -> dict[Queue, int]:
        """Wait until each queue with messages makes progress, or until `watch_s` has passed. Return the offsets that
        members reported first, which may be ahead of the committed ones."""
        loop, patience = asyncio.get_running_loop(), self._patience
        at: dict[Queue, int] = {}
        while (left_s := began_s + patience.watch_s - loop.time()) > 0:
            await asyncio.sleep(min(patience.look_s, left_s))
            if left_s <= patience.look_s:
                break
            if self._examined.total > EARLY_LOOKS:
                continue
            async with self._places:
                later = await self._admin.progress(group.name, masters=self._masters, times=False)
                running = await self._admin.running(group.name, self._masters, group.connections)
            at = at or {queue: offset for item in running.values() for queue, offset in item.commit_offsets.items()}
            is_moving = not set(suspects_of(packed.unpacked(), later)) - _advanced(at, running)
            if is_moving and (lite is None or not self._lites.suspects(lite)):
                break
        return at

    async def _first(self, name: str) -> tuple[Group, tuple[str, ...], tuple[str, ...]]:
        connections, progress = await asyncio.gather(
            self._admin.connections(name, self._masters), self._admin.progress(name, masters=self._masters, times=False)
        )
        # Apache's brokers do not report owners, which are then taken from the members' responses.
        reports = await self._admin.group_report(name, self._masters) if connections else []
        disagreements = {text for report in reports for text in report["disagreements"]}
        full = {text for report in reports for text in report["full"]}
        progress = {} if are_broadcasting(connections) else progress
        group = Group(name, self._configs[name], connections, progress, locked(reports))
        return group, tuple(sorted(disagreements)), tuple(sorted(full))

    async def _limited(self, group: Group) -> frozenset[str]:
        """Return the topics in which a group is limited by its rate."""
        if not any(config.has_rate for config in group.config.values()):
            return frozenset()
        return limited_in(await self._admin.group_report(group.name, self._masters))

    async def _observe_again(self, seen: Observed, *, asks_members: bool) -> Observed:
        """Return the observation with the group's current members and owners.

        Args:
            asks_members: True to query the members again because their reports are old; members are not queried if none
                of them responded before.
        """
        name = seen.group.name
        connections = await self._admin.connections(name, self._masters)
        reports, running = await self._admin.group_report(name, self._masters), seen.running
        if running and asks_members:  # without reports, the group's members did not respond
            running = await self._admin.running(name, self._masters, connections)
        return replace(
            seen, group=replace(seen.group, connections=connections, owners=locked(reports)), running=running
        )

    async def _second(self, group: Group, disagreements: tuple[str, ...], began_s: float) -> Observed:
        later, running = group.progress, dict[str, Running]()
        if group.members:
            running = await self._admin.running(group.name, self._masters, group.connections)
        if group.members and group.progress:
            later = await self._admin.progress(group.name, masters=self._masters, times=False)
            later = _without(later, lite_topic_of(group.config))
        seconds = max(asyncio.get_running_loop().time() - began_s, 0.001)
        subscribed = {topic for told in group.connections.values() for topic in told.subscriptions}
        subscribed |= {topic for member in running.values() for topic in member.subscriptions}
        subscribed |= {queue.topic for queue in group.progress}
        subscribed.discard(lite_topic_of(group.config))
        topics: dict[str, Topic] = {}
        for name in sorted(subscribed):
            topic = None if name.startswith(names.RETRY_PREFIX) else await self._topic(name)
            if topic is not None:
                topics[name] = topic
        return Observed(group, without_deleted(later, topics), topics, running, disagreements, seconds)

    async def _topic(self, name: str) -> Topic | None:
        """Return a topic, which is queried only once even if several groups read it; None if that fails."""
        task = self._topics.get(name)
        if task is None:
            task = self._topics[name] = asyncio.create_task(topic_or_none(self._admin, name))
        return await asyncio.shield(task)


async def topic_or_none(admin: AdminClient, name: str) -> Topic | None:
    try:
        return await admin.topic(name)
    except RocketletError:  # members may subscribe to a topic that does not exist yet
        return None


def limited_in(reports: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the topics in which brokers report that a group is limited by its rate."""
    return frozenset(topic for report in reports for topic in report["limited"])


def _advanced(at: Mapping[Queue, int], running: Mapping[str, Running]) -> frozenset[Queue]:
    """Return the queues for which a member reports a higher offset than `at`. Members commit only every 5 s, but can report
    their offset at any time."""
    return frozenset(
        queue
        for member in running.values()
        for queue, offset in member.commit_offsets.items()
        if offset > at.get(queue, offset)
    )


class BlockedMessages:
    """Finds the next message of a queue that matches the group's filter. Groups with the same offset and filter share
    the result, and so do successive observations."""

    def __init__(self, admin: AdminClient, skews: Mapping[str, float], stuck_s: float = STUCK_S) -> None:
        self._admin = admin
        self._skews = skews
        self._stuck_s = stuck_s
        self._found: OrderedDict[tuple[Queue, int, str | Sql], asyncio.Task[Message | None]] = OrderedDict()

    async def waiting(self, seen: Observed) -> dict[Queue, BlockedMessage]:
        """Return, for queues that committed nothing or less than arrived, the next message if it has waited too long."""
        found: dict[Queue, BlockedMessage] = {}
        if not seen.group.members:
            return found
        suspects = [queue for queue in suspects_of(seen.group.progress, seen.later) if queue not in seen.moving]
        standing = frozenset(suspects)
        suspects = [*suspects, *outpaced(seen)][:SUSPECTS]
        owned = owned_by(seen) if suspects else {}
        filters = {topic: _filter(topic, seen) for topic in {queue.topic for queue in suspects}}
        for queue in suspects:
            progress = seen.later[queue]
            begin = progress.consumer_offset + progress.in_hand
            message = await self._next(queue, begin, progress.broker_offset, filters[queue.topic])
            if message is None:
                continue
            now_s = time.time() + self._skews.get(queue.broker_name, 0.0)
            waited_s = max(now_s - message.store_ms / 1000, 0.0)  # a broker reports its clock by the second
            if waited_s < self._stuck_s:
                continue
            member, handler = _handler_of(message, owned.get(queue, ()), seen)
            is_new = handler is not None and handler.age_ms < self._stuck_s * 1000
            if not is_new or queue not in standing:  # a handler that began not long ago is progress
                waiting = _waiting_of(message, waited_s, seen)
                found[queue] = waiting._replace(member=member, handler=handler)
        return found

    async def _next(self, queue: Queue, begin: int, end: int, wanted: str | Sql) -> Message | None:
        key = (queue, begin, wanted)
        task = self._found.get(key)
        if task is None or (task.done() and task.result() is None):
            task = self._found[key] = asyncio.create_task(self._read(queue, begin, end, wanted))
            if len(self._found) > MAX_WANTED:
                self._found.popitem(last=False)
        return task.result() if task.done() else await asyncio.shield(task)

    async def _read(self, queue: Queue, begin: int, end: int, wanted: str | Sql) -> Message | None:
        """Return the first message from `begin` up to `end` that matches the filter; None if there is none or a read
        fails."""
        try:
            async for messages in self._admin.read(queue, begin, end, expression=wanted):
                if messages:
                    return messages[0]
        except (RocketletError, SubscriptionError):  # a filter that this broker does not accept from us
            return None
        return None


def lite_topic_of(configs: Mapping[str, GroupConfig]) -> str:
    """Return the parent topic of a lite group; an empty text for other groups."""
    return next((config.lite_topic for config in configs.values() if config.lite_topic), "")


def _without(progress: Mapping[Queue, QueueProgress], topic: str) -> dict[Queue, QueueProgress]:
    return {queue: item for queue, item in progress.items() if queue.topic != topic}


def without_parent(group: Group) -> Group:
    """Return a lite group without its progress in the queues of the parent topic, and other groups unchanged. Messages of
    all lite topics are in these queues, so the progress there does not show which lite topics are stuck."""
    topic = lite_topic_of(group.config)
    if not group.members or not topic:
        return group
    return replace(group, progress=_without(group.progress, topic))


class BlockedLiteTopics:
    """Finds lite topics whose next message has waited too long."""

    def __init__(self, admin: AdminClient, skews: Mapping[str, float], stuck_s: float = STUCK_S) -> None:
        self._admin = admin
        self._skews = skews
        self._stuck_s = stuck_s

    async def first(self, group: Group, masters: Masters) -> LiteGroup | None:
        """Return the messages that a lite group with members has not finished, for the first observation."""
        if not group.members or not lite_topic_of(group.config):
            return None
        return await self._admin.lite_group(group.name, masters)

    def suspects(self, lite: LiteGroup) -> dict[str, tuple[LiteTopicLag, float]]:
        """Return the lite topics whose next message has waited too long, and for how many seconds, the longest wait
        first. If a broker reports too many, those without messages in flight are preferred."""
        stuck, unread = (list[tuple[LiteTopicLag, float]](), list[tuple[LiteTopicLag, float]]())
        for broker, lag in lite.lags.items():
            now_s = time.time() + self._skews.get(broker, 0.0)
            for found, items in ((stuck, lag.stuck), (unread, lag.unread or lag.oldest)):
                for item in items:
                    waited_s = max(now_s - item.waiting_ms / 1000, 0.0)  # a broker reports its clock by the second
                    if item.messages > item.in_flight and item.waiting_ms and waited_s >= self._stuck_s:
                        found.append((item, waited_s))
                found.sort(key=lambda pair: (pair[0].in_flight > 0, -pair[1]))
        suspects = {item.name: (item, waited_s) for item, waited_s in (*stuck[:SUSPECTS], *unread[:SUSPECTS])}
        return dict(sorted(suspects.items(), key=lambda pair: -pair[1][1]))

    async def blocked(self, group: Group, before: LiteGroup | None, masters: Masters) -> tuple[BlockedLiteTopic, ...]:
        """Make the second observation, and return the lite topics without progress since the first one."""
        earlier = self.suspects(before) if before is not None else {}
        later = await self._admin.lite_group(group.name, masters) if earlier else None
        if before is None or later is None:
            return ()
        found: list[BlockedLiteTopic] = []
        for name, (item, seconds) in self.suspects(later).items():
            if name in earlier and earlier[name][0].waiting_ms == item.waiting_ms:
                subscribers = await self._admin.lite_subscribers(before.topic, name, masters)
                is_subscribed = any(subscriber[1] == group.name for subscriber in subscribers)
                is_busy = later.in_flight > 0 or later.messages < before.messages
                found.append(BlockedLiteTopic(name, seconds, item.messages, item.in_flight, is_subscribed, is_busy))
        return tuple(found)


def _handler_of(message: Message, owners: Sequence[str], seen: Observed) -> tuple[str, RunningHandler | None]:
    """Return the handler call on which a message that waits depends, and its member: the call that handles the message, or
    else the newest one of the owners of its queue, after which the message may follow."""
    members = (
        seen.running
        if SHARED_OWNER in owners
        else {name: seen.running[name] for name in owners if name in seen.running}
    )
    calls = [(name, handler) for name, member in members.items() for handler in member.handlers]
    for name, handler in calls:
        if handler.message_id == message.message_id and handler.queue == message.queue:
            return name, handler
    return min(calls, key=lambda call: call[1].age_ms, default=("", None))


def _waiting_of(message: Message, seconds: float, seen: Observed) -> BlockedMessage:
    """Return a message as a BlockedMessage. An orderly consumer counts attempts itself; other attempts are in the
    message."""
    failed = next(
        (member.failures[message.queue] for member in seen.running.values() if message.queue in member.failures), None
    )
    attempt, reason = failed if failed is not None else (message.attempt, message.failure)
    return BlockedMessage(seconds, message.message_id, message.queue_offset, attempt, reason)


class Examiner:
    """Examines groups repeatedly, for the console, with the checks of `rocketlet doctor`.

    An observation of a group is compared with one that is at least `watch_s` older. Until then, the last findings stay.
    """

    def __init__(self, admin: AdminClient, *, watch_s: float = WATCH_S, stuck_s: float = STUCK_S) -> None:
        self._admin = admin
        self._watch_s = watch_s
        self._stuck_s = stuck_s
        self._groups: dict[str, _Examination] = {}
        self._queues: dict[tuple[Queue, ...], tuple[Queue, ...]] = {}
        self.configs: Mapping[str, Mapping[str, GroupConfig]] = {}
        self.skews: dict[str, float] = {}

    def keep(self, names: Iterable[str]) -> None:
        """Forget all groups except these."""
        kept = set(names)
        for name in self._groups.keys() - kept:
            del self._groups[name]
        self._queues.clear()

    async def examine(
        self,
        name: str,
        masters: Masters,
        connections: Mapping[str, GroupConnections],
        progress: Mapping[Queue, QueueProgress],
    ) -> tuple[Finding, ...] | None:
        """Return the findings about a group, or None if they need a further observation some seconds later."""
        known = self._groups.setdefault(name, _Examination())
        progress = {} if are_broadcasting(connections) else progress
        now_s = asyncio.get_running_loop().time()
        before = known.before
        if before is None:
            before = known.before = _packed(progress, self._queues)
            known.before_s = now_s
            if connections:
                return None
        elif now_s - known.before_s < self._watch_s:
            return known.findings
        seconds = max(now_s - known.before_s, 0.001)
        known.before, known.before_s = _packed(progress, self._queues), now_s
        found = await self._found(name, masters, connections, before.unpacked(), progress, seconds, known)
        known.findings = tuple(sorted(set(confirmed(known.found, found))))
        known.found = found
        return known.findings

    async def _found(
        self,
        name: str,
        masters: Masters,
        connections: Mapping[str, GroupConnections],
        before: Mapping[Queue, QueueProgress],
        progress: Mapping[Queue, QueueProgress],
        seconds: float,
        known: _Examination,
    ) -> list[Finding]:
        reports, running = list[dict[str, Any]](), dict[str, Running]()
        if connections:
            reports = await self._admin.group_report(name, masters)
            running = await self._admin.running(name, masters, connections)
        subscribed = {topic for told in connections.values() for topic in told.subscriptions}
        subscribed |= {topic for member in running.values() for topic in member.subscriptions}
        subscribed |= {queue.topic for queue in progress}
        found = await gather_limited(
            partial(topic_or_none, self._admin), sorted(topic for topic in subscribed if not topic.startswith("%"))
        )
        topics = {topic.name: topic for topic in found if topic is not None}
        group = Group(name, self.configs.get(name, {}), connections, before, locked(reports))
        parent = lite_topic_of(group.config) if connections else ""
        topics.pop(parent, None)
        lites = BlockedLiteTopics(self._admin, self.skews, self._stuck_s)
        blocked_lite = await lites.blocked(group, known.lite, masters)
        known.lite = await lites.first(group, masters)
        seen = Observed(
            without_parent(group),
            without_deleted(_without(progress, parent), topics),
            topics,
            running,
            tuple(sorted({text for report in reports for text in report["disagreements"]})),
            seconds,
            full=tuple(sorted({text for report in reports for text in report["full"]})),
            limited=limited_in(reports),
            moving=_advanced(known.at, running),
            lite=known.lite,
            blocked_lite=blocked_lite,
        )
        known.at = {queue: offset for member in running.values() for queue, offset in member.commit_offsets.items()}
        blocked = BlockedMessages(self._admin, self.skews, self._stuck_s)
        return list(findings_of_group(replace(seen, waiting=await blocked.waiting(seen))))


@dataclass(slots=True)
class _Examination:
    """The state of one group between two calls of `examine`.

    Attributes:
        before, before_s: the previous observation, and the loop's time of it.
        at: the offsets that members reported at the previous observation.
        lite: the messages that a lite group had not finished at the previous observation.
        found: all findings of the last observation.
        findings: the confirmed ones among `found`; None before the second observation.
    """

    before: _Packed | None = None
    before_s: float = 0.0
    at: Mapping[Queue, int] = field(default_factory=dict)
    lite: LiteGroup | None = None
    found: list[Finding] = field(default_factory=list)
    findings: tuple[Finding, ...] | None = None


def confirmed(before: Iterable[Finding], again: Iterable[Finding]) -> list[Finding]:
    """Return the findings of a second examination. A kind of `OF_A_MOMENT` counts only if the first examination found
    it, too."""
    kinds = {finding.kind for finding in before}
    return [finding for finding in again if finding.kind not in OF_A_MOMENT or finding.kind in kinds]


async def _dead_letters(admin: AdminClient, marks: Marks, group: str) -> list[Finding]:
    """Return the finding about a group's new dead letters, if any."""
    try:
        return findings_of_dead_letters(group, (await dead_letters(admin, group, marks)).new)
    except RocketletError:  # for example, the topic was deleted meanwhile
        return []


def findings_of_dead_letters(group: str, new: int) -> list[Finding]:
    """Return the finding about a group's dead letters that were neither replayed nor discarded; an empty list without
    any."""
    if not new:
        return []
    text = (
        f"{counted(new, 'message was', 'messages were')} dead-lettered and neither replayed nor discarded, in "
        f"{names.dlq_topic(group)}"
    )
    cure = (
        f"rocketlet messages dead {group} shows them with their reasons, rocketlet messages replay {group} resends them, "
        f"rocketlet messages discard {group} marks them as discarded"
    )
    return [Finding(Harm.LOSS, "dead_letters", group, text, cure)]
