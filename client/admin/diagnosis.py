"""What is wrong with a cluster, in order of harm, and what to do about it: `rocketlet doctor`.

Everything is asked over the wire that Apache's brokers have, too. What only Rocketlet's brokers tell (who owns which queue,
disagreements that they have seen) makes some findings more exact.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from ...protocol import names
from ...protocol.admin_answers import Running
from ...protocol.admin_bodies import Progress
from ...protocol.bodies import BrokerData
from ...protocol.codes import PERM_READ, PERM_WRITE
from ...protocol.group_config import GroupConfig
from ...protocol.queue import Queue
from ..config import (
    ASKED_AT_ONCE,
    CLOCK_SKEW_S,
    DISK_FULL_RATIO,
    DISK_LOW_RATIO,
    OLDEST_VERSION,
    SHORT_LAG_S,
    WATCHED_AT_ONCE,
)
from ..errors import ConnectionFailed, RequestTimeout, RocketletError
from ..wire.side_by_side import side_by_side
from .admin_client import AdminClient, Masters
from .described import Group, Topic
from .ownership import locked


class Harm(IntEnum):
    """How much a finding hurts, worst first."""

    LOSS = 0  # messages are lost, or will be soon
    STANDS = 1  # messages wait, and nobody handles them
    TWICE = 2  # messages are handled more than once
    SLOW = 3
    RISK = 4


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """`subject` is what it is about, such as a group; `kind` is stable, for programs; `cure` says what to do."""

    harm: Harm
    kind: str
    subject: str
    text: str
    cure: str


@dataclass(frozen=True, slots=True)
class Observed:
    """A group as it was seen twice, some seconds apart."""

    group: Group
    later: Mapping[Queue, Progress]
    topics: Mapping[str, Topic]
    running: Mapping[str, Running]
    disagreements: tuple[str, ...]
    seconds: float


async def diagnose(admin: AdminClient, *, watch_s: float = 2.0) -> list[Finding]:
    """Asks all brokers and groups; the findings, worst first. `watch_s`: between the two looks that show what moves.

    Raises ConnectionFailed if no name server answers.
    """
    brokers = await admin.brokers()
    findings: list[Finding] = []
    if not brokers:
        text = "the name servers know no broker: nothing can be sent or read"
        return [
            Finding(Harm.STANDS, "no_broker", "cluster", text, "start a broker; if one runs, check its --nameserver")
        ]
    for broker in brokers:
        findings += await _of_broker(admin, broker)
    if any(finding.kind in ("broker_away", "broker_unknown") for finding in findings):
        return sorted(findings)  # groups and topics cannot be judged by a part of their brokers
    for topic in await side_by_side(admin.topic, await admin.topics()):
        findings += _of_topic(topic)
    masters = await admin.masters()
    configs = await admin.all_group_configs(masters)
    groups = [name for name in configs if not names.is_system_group(name)]
    watch = _Watch(admin, masters, configs, watch_s)
    for found in await side_by_side(watch.findings, groups, WATCHED_AT_ONCE):
        findings += found
    there = set(await admin.topics(system=True))
    for found in await side_by_side(
        partial(_dead_letters, admin), [name for name in groups if names.dlq_topic(name) in there]
    ):
        findings += found
    return sorted(set(findings))


# Brokers


async def _of_broker(admin: AdminClient, broker: BrokerData) -> list[Finding]:
    address = broker.addresses.get(0)
    if address is None:
        text = "the broker has no master: nothing can be sent to it"
        return [Finding(Harm.STANDS, "no_master", broker.name, text, "start its master")]
    try:
        status = await admin.broker_status(address)
    except (ConnectionFailed, RequestTimeout) as error:
        cure = "start the broker; if it runs, advertise an address that clients can reach (--advertise)"
        text = f"the name server says that it is at {address}, which does not answer here: {error}"
        return [Finding(Harm.STANDS, "broker_away", broker.name, text, cure)]
    except RocketletError as error:
        return [Finding(Harm.RISK, "broker_unknown", broker.name, str(error), "give this command the right keys")]
    return [*_disk(broker.name, status), *_clock(broker.name, status)]


def _disk(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    ratio = float(status.get("commitLogDiskRatio") or 0)
    if ratio >= DISK_LOW_RATIO:
        harm = Harm.LOSS if ratio >= DISK_FULL_RATIO else Harm.RISK
        text = f"its disk is {ratio:.0%} full; a broker without room refuses messages, Apache's deletes old ones early"
        yield Finding(harm, "disk", broker, text, "free space, or keep messages for a shorter time")


def _clock(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """A broker says when it started and for how long it has run."""
    running_s = _duration_s(status.get("runtime", ""))
    if running_s is None or "bootTimestamp" not in status:
        return
    skew_s = int(status["bootTimestamp"]) / 1000 + running_s - time.time()
    if abs(skew_s) > CLOCK_SKEW_S:
        text = f"its clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
        yield Finding(
            Harm.RISK, "clock_skew", broker, text, "synchronise both; delays, retention and resets by time go by it"
        )


def _duration_s(text: str) -> float | None:
    """Apache's `[ 1 days, 2 hours, 3 minutes, 4 seconds ]`, or the `[ 26:03:04 ]` of our earlier releases."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    weights = {3: (3600, 60, 1), 4: (86_400, 3600, 60, 1)}.get(len(numbers))
    return None if weights is None else float(sum(map(int.__mul__, numbers, weights)))


# Topics


def _of_topic(topic: Topic) -> Iterator[Finding]:
    for perm, verb in ((PERM_WRITE, "sent to"), (PERM_READ, "read")):
        if topic.config and not any(config.perm & perm for config in topic.config.values()):
            text = f"no broker lets it be {verb}"
            cure = f"rocketlet topics create {topic.name} --perm 6"
            yield Finding(Harm.STANDS, "permission", topic.name, text, cure)
    for broker, config in topic.config.items():
        if config.read_queues < config.write_queues:
            text = f"{broker} writes to {config.write_queues} queues and lets {config.read_queues} be read"
            cure = "make both numbers equal; messages in the others are not delivered"
            yield Finding(Harm.STANDS, "unreadable_queues", topic.name, text, cure)


# Groups


class _Watch:
    """Groups that are seen twice. Many wait for their second look at once, a few are asked about."""

    def __init__(
        self, admin: AdminClient, masters: Masters, configs: Mapping[str, Mapping[str, GroupConfig]], watch_s: float
    ) -> None:
        self._admin = admin
        self._masters = masters
        self._configs = configs
        self._watch_s = watch_s
        self._places = asyncio.Semaphore(ASKED_AT_ONCE)
        self._topics: dict[str, asyncio.Task[Topic | None]] = {}

    async def findings(self, name: str) -> list[Finding]:
        async with self._places:
            group, disagreements = await self._first(name)
        began_s = asyncio.get_running_loop().time()
        if group.members:  # without any, nothing moves
            await asyncio.sleep(self._watch_s)
        async with self._places:
            return list(findings_of_group(await self._second(group, disagreements, began_s)))

    async def _first(self, name: str) -> tuple[Group, tuple[str, ...]]:
        connections, progress = await asyncio.gather(
            self._admin.connections(name, self._masters), self._admin.progress(name, masters=self._masters, times=False)
        )
        # an Apache broker does not tell: who owns what is then seen from what the members answer
        reports = await self._admin.told(name, self._masters) if connections else []
        disagreements = {text for report in reports for text in report["disagreements"]}
        group = Group(name, self._configs[name], connections, progress, locked(reports))
        return group, tuple(sorted(disagreements))

    async def _second(self, group: Group, disagreements: tuple[str, ...], began_s: float) -> Observed:
        later, running = group.progress, dict[str, Running]()
        if group.members:
            later, running = await asyncio.gather(
                self._admin.progress(group.name, masters=self._masters, times=False),
                self._admin.running(group.name, self._masters, group.connections),
            )
        seconds = max(asyncio.get_running_loop().time() - began_s, 0.001)
        subscribed = {topic for told in group.connections.values() for topic in told.subscriptions}
        subscribed |= {topic for member in running.values() for topic in member.subscriptions}
        subscribed |= {queue.topic for queue in group.progress}
        topics: dict[str, Topic] = {}
        for name in sorted(subscribed):
            topic = None if name.startswith(names.RETRY_PREFIX) else await self._topic(name)
            if topic is not None:
                topics[name] = topic
        return Observed(group, later, topics, running, disagreements, seconds)

    async def _topic(self, name: str) -> Topic | None:
        """Asked for once, however many groups read it."""
        task = self._topics.get(name)
        if task is None:
            task = self._topics[name] = asyncio.create_task(self._ask_topic(name))
        return await asyncio.shield(task)

    async def _ask_topic(self, name: str) -> Topic | None:
        try:
            return await self._admin.topic(name)
        except RocketletError:  # its members wait for it
            return None


def findings_of_group(seen: Observed) -> Iterator[Finding]:
    """What is wrong with a group as it was seen twice."""
    for check in _CHECKS:
        yield from check(seen)


def _lost(seen: Observed) -> Iterator[Finding]:
    for queue, progress in seen.later.items():
        topic = seen.topics.get(queue.topic)
        begin = topic.ranges[queue].begin if topic and queue in topic.ranges else 0
        if 0 < progress.consumer_offset < begin:
            text = f"{queue}: {begin - progress.consumer_offset} messages were deleted before the group read them"
            yield Finding(
                Harm.LOSS, "retention", seen.group.name, text, "keep messages longer, or add consumers to catch up"
            )


def _standing(seen: Observed) -> Iterator[Finding]:
    name, lag = seen.group.name, sum(max(item.lag, 0) for item in seen.later.values())
    if not seen.group.members:
        if lag:
            text = f"{lag} messages wait and the group has no members"
            yield Finding(
                Harm.STANDS, "no_members", name, text, "start its consumers, or delete the group if it is gone"
            )
        return
    if seen.group.config and not any(config.consume_enable for config in seen.group.config.values()):
        text = "consumption is switched off by the group's settings"
        yield Finding(Harm.STANDS, "consumption_off", name, text, "switch consumeEnable on")
    owned = _owned(seen)
    unread = [queue for queue in _subscribed(seen) if queue not in owned]
    if unread:
        text = f"nobody reads {_some(unread)}"
        cure = "wait for a rebalance; if it stays, restart the members that subscribe to the topic"
        yield Finding(Harm.STANDS, "unread_queues", name, text, cure)


def _lagging(seen: Observed) -> Iterator[Finding]:
    owned = _owned(seen) if seen.group.members else {}
    for queue, later in seen.later.items():
        before = seen.group.progress.get(queue)
        owner = owned.get(queue)
        if before is None or later.lag <= 0 or owner is None:
            continue
        consumed = later.consumer_offset - before.consumer_offset
        arrived = later.broker_offset - before.broker_offset
        waits = f"{queue} has {later.lag} messages waiting"
        if consumed <= 0 and before.lag > 0:
            text = f"{waits} and its owner {owner[0]} has committed nothing for {seen.seconds:.0f} s"
            cure = (
                "look at that member's log: a slow or blocked handler, a paused consumer, or a message retried for ever"
            )
            yield Finding(Harm.STANDS, "stuck_queue", seen.group.name, text, cure)
        elif arrived > consumed and later.lag > SHORT_LAG_S * consumed / seen.seconds:
            text = (
                f"{waits}: {arrived / seen.seconds:.0f} messages/s arrive, {consumed / seen.seconds:.0f} are consumed"
            )
            yield Finding(Harm.SLOW, "growing_lag", seen.group.name, text, _cure_of_lag(seen, queue))


def _cure_of_lag(seen: Observed, queue: Queue) -> str:
    topic, members = seen.topics.get(queue.topic), len(seen.group.members)
    queues = len(topic.ranges) if topic else 0
    if members >= queues:
        return f"{queue.topic} has {queues} queues for {members} members: add queues, or faster handlers"
    return "add members, or make the handlers faster (more of them at once, batches)"


def _twice(seen: Observed) -> Iterator[Finding]:
    group = seen.group.name
    if seen.group.connections and any(
        known.message_model == "BROADCASTING" for known in seen.group.connections.values()
    ):
        return
    owned = _owned(seen)
    shared = [queue for queue, owners in owned.items() if len(owners) > 1]
    if shared:
        readers = ", ".join(owned[shared[0]])
        text = f"{_some(shared)}: read by {readers} at once"
        yield Finding(Harm.TWICE, "two_readers", group, text, "see who disagrees below; restart the older member")
    for known in seen.group.connections.values():
        for client_id, count in Counter(member.client_id for member in known.members).items():
            if count > 1:
                text = f"{count} members call themselves {client_id}; they read the same queues"
                cure = "give each its own client id (instanceName in Java; containers that share a host name and pid)"
                yield Finding(Harm.TWICE, "client_id_twice", group, text, cure)


def _disagreeing(seen: Observed) -> Iterator[Finding]:
    group = seen.group.name
    cure = "give all members of the group the same subscriptions, strategy and model, or use two groups"
    for text in seen.disagreements:
        yield Finding(Harm.STANDS, "disagreement", group, text, cure)
    wanted: dict[str, list[str]] = {}
    for client_id, member in sorted(seen.running.items()):
        mine = {topic: text for topic, text in member.subscriptions.items() if not topic.startswith(names.RETRY_PREFIX)}
        wanted.setdefault(str(sorted(mine.items())), []).append(client_id)
    if len(wanted) > 1 and not seen.disagreements:
        kinds = "; ".join(f"{' and '.join(ids)}: {text}" for text, ids in wanted.items())
        yield Finding(Harm.STANDS, "disagreement", group, f"members have different subscriptions: {kinds}", cure)


def _idle(seen: Observed) -> Iterator[Finding]:
    owners = {client_id for ids in _owned(seen).values() for client_id in ids}
    idle = [member.client_id for member in seen.group.members if member.client_id not in owners]
    if idle and seen.running:
        queues = len(_subscribed(seen))
        text = f"{len(idle)} of {len(seen.group.members)} members have no queue: {', '.join(idle[:3])}"
        yield Finding(
            Harm.RISK,
            "idle_members",
            seen.group.name,
            text,
            f"the topics have {queues} queues: add queues, or stop them",
        )


def _old(seen: Observed) -> Iterator[Finding]:
    for member in seen.group.members:
        if member.language == "JAVA" and 0 < member.version < OLDEST_VERSION:
            text = f"{member.client_id} at {member.address} uses a client older than 4.9"
            yield Finding(Harm.RISK, "old_client", seen.group.name, text, "upgrade it")


_CHECKS: tuple[Callable[[Observed], Iterator[Finding]], ...] = (
    _lost,
    _standing,
    _lagging,
    _twice,
    _disagreeing,
    _idle,
    _old,
)


def _owned(seen: Observed) -> dict[Queue, list[str]]:
    """Who says that it reads each queue, and who holds its lock."""
    owners: dict[Queue, list[str]] = {queue: [client_id] for queue, client_id in seen.group.owners.items()}
    for client_id, member in seen.running.items():
        for queue in member.commit_offsets:
            known = owners.setdefault(queue, [])
            if client_id not in known:
                known.append(client_id)
    return owners


def _subscribed(seen: Observed) -> list[Queue]:
    """The queues that the members should read between them."""
    wanted = {topic for known in seen.group.connections.values() for topic in known.subscriptions}
    wanted |= {topic for member in seen.running.values() for topic in member.subscriptions}
    return [queue for name in sorted(wanted & seen.topics.keys()) for queue in seen.topics[name].ranges]


def _some(queues: list[Queue]) -> str:
    shown = ", ".join(map(str, queues[:3]))
    return shown if len(queues) <= 3 else f"{shown} and {len(queues) - 3} more"


async def _dead_letters(admin: AdminClient, group: str) -> list[Finding]:
    try:
        dead = (await admin.topic(names.dlq_topic(group))).messages
    except RocketletError:  # it has just gone
        return []
    if not dead:
        return []
    text = f"{dead} messages were given up and lie in {names.dlq_topic(group)}"
    cure = f"rocketlet messages dead {group} shows them, rocketlet messages replay {group} sends them again"
    return [Finding(Harm.LOSS, "dead_letters", group, text, cure)]


__all__ = ["Finding", "Harm", "Observed", "diagnose", "findings_of_group"]
