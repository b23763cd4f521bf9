"""Finds what is wrong with a cluster, in order of harm, and says what to do about it: `rocketlet doctor`.

Everything is asked over the wire that Apache's brokers have, too. Rocketlet's brokers also tell who owns which queue and
which disagreements they saw, which makes some findings more exact.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import orjson

from ...protocol import names
from ...protocol.admin_answers import Running
from ...protocol.admin_bodies import Departed
from ...protocol.bodies import BrokerData
from ...protocol.codes import PERM_READ, PERM_WRITE
from ...protocol.counting import counted
from ...protocol.group_config import GroupConfig
from ...protocol.queue import Queue
from ...protocol.subscription import Sql, SubscriptionError
from ..config import (
    ASKED_AT_ONCE,
    CERTIFICATE_WARNING_S,
    CLOCK_SKEW_S,
    DISK_FULL_RATIO,
    DISK_LOW_RATIO,
    LOOK_S,
    STUCK_S,
    SUSPECTS,
    WATCH_S,
    WATCHED_AT_ONCE,
)
from ..errors import ConnectionFailed, RequestTimeout, RocketletError
from ..wire.side_by_side import side_by_side
from .admin_client import AdminClient, Masters
from .dead_letters import Marks, all_marks, dead_letters
from .described import Group, Topic, are_broadcasting
from .group_findings import (
    OF_A_MOMENT,
    Finding,
    Harm,
    Observed,
    findings_of_group,
    outpaced,
    suspects_of,
    without_deleted,
)
from .ownership import locked

K = TypeVar("K", list, dict)  # type: ignore[type-arg]


@dataclass(frozen=True, slots=True)
class Patience:
    """look_s: between two looks at a group. watch_s: how long a queue is looked at that commits nothing. stuck_s: how long a
    message must have waited for its handler."""

    look_s: float = LOOK_S
    watch_s: float = WATCH_S
    stuck_s: float = STUCK_S


async def diagnose(admin: AdminClient, patience: Patience = Patience()) -> list[Finding]:
    """Asks all brokers and groups; the findings, worst first.

    Raises ConnectionFailed if no name server answers.
    """
    brokers = await admin.brokers()
    findings: list[Finding] = []
    skews: dict[str, float] = {}
    findings += _gone(await admin.departed())
    if not brokers:
        text = "the name servers know no broker: nothing can be sent or read"
        cure = "start a broker; if one runs, check its --nameserver"
        return sorted([*findings, Finding(Harm.STANDS, "no_broker", "cluster", text, cure)])
    for broker in brokers:
        findings += await _of_broker(admin, broker, skews)
    if any(finding.kind in ("broker_away", "broker_unknown") for finding in findings):
        return sorted(findings)  # groups and topics cannot be judged by a part of their brokers
    for topic in await side_by_side(admin.topic, await admin.topics()):
        findings += _of_topic(topic)
    masters = await admin.masters()
    configs = await admin.all_group_configs(masters)
    groups = [name for name in configs if not names.is_system_group(name)]
    watch = _Watch(admin, masters, configs, patience, skews)
    for found in await side_by_side(watch.findings, groups, WATCHED_AT_ONCE):
        findings += found
    there = set(await admin.topics(system=True))
    given_up = [name for name in groups if names.dlq_topic(name) in there]
    marks = await all_marks(admin) if given_up else {}
    for found in await side_by_side(partial(_dead_letters, admin, marks), given_up):
        findings += found
    return sorted(set(findings))


def _filter(topic: str, seen: Observed) -> str | Sql:
    """The topic's filter, as members tell it; everything where they differ."""
    texts = {known.subscriptions[topic] for known in seen.group.connections.values() if topic in known.subscriptions}
    texts |= {member.subscriptions[topic] for member in seen.running.values() if topic in member.subscriptions}
    text = texts.pop() if len(texts) == 1 else "*"
    return text if re.fullmatch(r"[\w\s|*.:%-]*", text) else Sql(text)  # members do not tell which kind it is


# Brokers


def _gone(departed: Iterable[Departed]) -> Iterator[Finding]:
    for broker in departed:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(broker.left_ms / 1000))
        text = f"it left at {since} with {counted(broker.topics, 'topic')}; what it holds cannot be read, nor sent to"
        cure = (
            f"start it (it was at {broker.address}); if it was retired for good: rocketlet brokers forget {broker.name}"
        )
        yield Finding(Harm.STANDS, "broker_gone", broker.name, text, cure)


async def _of_broker(admin: AdminClient, broker: BrokerData, skews: dict[str, float]) -> list[Finding]:
    """skews: gets by how many seconds the broker's clock is ahead of ours."""
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
        *_certificates(broker.name, status),
        *_damaged(broker.name, status),
    ]


def _writes(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Only Rocketlet's brokers tell."""
    fault = status.get("writeFault")
    if fault:
        cure = "free space on its disk; if it is not full: check the disk, then start the broker again"
        yield Finding(Harm.STANDS, "writes_refused", broker, f"it refuses what is sent: {fault}", cure)


def _disk(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    ratio = _disk_ratio(status)
    if ratio >= DISK_LOW_RATIO:
        harm = Harm.LOSS if ratio >= DISK_FULL_RATIO else Harm.RISK
        text = f"its disk is {ratio:.0%} full; a broker without room refuses messages, Apache's deletes old ones early"
        yield Finding(harm, "disk", broker, text, "free space, or keep messages for a shorter time")


def _disk_ratio(status: Mapping[str, str]) -> float:
    return float(status.get("commitLogDiskRatio") or 0)


def _refused(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Clients whose heartbeats a Rocketlet broker refuses: they read nothing, and most say nothing."""
    for text in _told(status, "refusedHeartbeats", list):
        what = f"it refuses the heartbeats of {text}"
        cure = "change what the client subscribes to, or the limit that the reason names; it reads nothing until then"
        yield Finding(Harm.STANDS, "heartbeat_refused", broker, what, cure)


def _damaged(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    damaged = status.get("damagedMessages", "0")
    if damaged != "0":
        unread = counted(int(damaged), "message cannot be read and was", "messages cannot be read and were")
        text = f"{unread} left out, since its start"
        cure = "its log names them; check the disk, then `rocketlet fsck DIR` on the stopped broker"
        yield Finding(Harm.LOSS, "damaged", broker, text, cure)


def _repeats(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Messages of foreign members that were, or may be, handled again. Rocketlet's brokers tell of the last ten minutes."""
    told = _told(status, "repeats", dict)
    for text in told.get("undrained", ()):
        what = f"queues moved while handlers of a foreign member ran: {text}; their messages are handled twice"
        cure = "make its handlers quicker than 2 s, or let it take fewer messages at a time (pullThresholdForQueue)"
        yield Finding(Harm.TWICE, "moved_undrained", broker, what, cure)
    for text in told.get("left", ()):
        what = f"a foreign member left {text} that it had not committed; those that its handlers had begun come again"
        cure = "let it wait for its handlers: awaitTerminationMillisWhenShutdown in Java, your own wait in Go"
        yield Finding(Harm.RISK, "left_uncommitted", broker, what, cure)
    for text in told.get("away", ()):
        what = f"it cannot ask {text} about members: foreign members may be told of changes at different moments"
        cure = "start that broker, or let this one reach it; messages may be handled twice until then"
        yield Finding(Harm.TWICE, "peer_away", broker, what, cure)


def _told(status: Mapping[str, str], name: str, kind: type[K]) -> K:
    """A value of the status that a Rocketlet broker tells as JSON; nothing for other brokers."""
    try:
        found = orjson.loads(status.get(name, "null"))
    except ValueError:
        found = None
    return found if isinstance(found, kind) else kind()


def _unauthorized(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """A request that names an account is a service's, which stands; others may be anybody's."""
    for text in _told(status, "refusedRequests", list):
        is_known = str(text).startswith(("signature", "permission", "admin"))
        cure = "correct the client's keys, or the account in the broker's --acl file"
        harm = Harm.STANDS if is_known else Harm.RISK
        yield Finding(harm, "requests_refused", broker, f"it refuses requests, {text}", cure)


def _turned_away(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Connections that came to nothing. A scanner's do, too."""
    for text in _told(status, "turnedAway", list):
        cure = "if that is a client of yours: change what the reason names, in the client or at the broker's start"
        yield Finding(Harm.RISK, "connections_refused", broker, f"it turns connections away, from {text}", cure)


def _unburied(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Messages that were tried often enough, and whose dead letters cannot be stored."""
    for text in _told(status, "unburied", list):
        what = f"it cannot store dead letters of the group {text}; their messages stay in flight"
        cure = "free disk space, or delete topics that nobody uses; the broker retries every second"
        yield Finding(Harm.STANDS, "dead_letters_refused", broker, what, cure)


def _failed_calls(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Calls of 5.x clients. Those whose code begins with 5 fail at the broker."""
    for text in _told(status, "failedCalls", list):
        is_ours = str(text).startswith("5")
        cure = "look at the broker's log" if is_ours else "change the client as the reason says"
        harm = Harm.STANDS if is_ours else Harm.RISK
        yield Finding(harm, "calls_failing", broker, f"calls of 5.x clients fail: {text}", cure)


def _certificates(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    for file, until_s in _told(status, "certificates", dict).items():
        left_s = until_s - time.time() if isinstance(until_s, int) else math.inf
        if left_s < CERTIFICATE_WARNING_S:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(until_s))
            verb = "expires at" if left_s > 0 else "expired at"
            cure = "put a new certificate in the file's place; the broker reads it by itself"
            harm = Harm.RISK if left_s > 0 else Harm.STANDS
            yield Finding(harm, "certificate", broker, f"its TLS file {file} {verb} {when}", cure)


def _skew_s(status: Mapping[str, str]) -> float:
    """How far the broker's clock is ahead of ours, by when it started and for how long it has run."""
    running_s = _duration_s(status.get("runtime", ""))
    if running_s is None or "bootTimestamp" not in status:
        return 0.0
    return int(status["bootTimestamp"]) / 1000 + running_s - time.time()


def _clock(broker: str, skew_s: float) -> Iterator[Finding]:
    if abs(skew_s) > CLOCK_SKEW_S:
        text = f"its clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
        yield Finding(
            Harm.RISK, "clock_skew", broker, text, "synchronise both; delays, retention and resets by time go by it"
        )


def _jump(broker: str, status: Mapping[str, str]) -> Iterator[Finding]:
    """Only Rocketlet's brokers tell."""
    ahead_s = int(status.get("clockAheadSeconds") or 0)
    if ahead_s:
        text = f"its machine's clock jumped {ahead_s} s ahead; segments expire by the time before for as long, a day at most"
        cure = "if that clock is wrong set it back before then: messages would be deleted too early"
        yield Finding(Harm.RISK, "clock_set_ahead", broker, text, cure)


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
            cure = f"rocketlet topics set {topic.name} --perm 6"
            yield Finding(Harm.STANDS, "permission", topic.name, text, cure)
    for broker, config in topic.config.items():
        if config.read_queues < config.write_queues:
            text = f"{broker} writes to {config.write_queues} queues and lets {config.read_queues} be read"
            cure = (
                f"rocketlet topics set {topic.name} --read-queues {config.write_queues}: the others are not delivered"
            )
            yield Finding(Harm.STANDS, "unreadable_queues", topic.name, text, cure)


# Groups


class _Watch:
    """Groups that are seen twice. Many wait for their second look at once, a few are asked about."""

    def __init__(
        self,
        admin: AdminClient,
        masters: Masters,
        configs: Mapping[str, Mapping[str, GroupConfig]],
        patience: Patience,
        skews: Mapping[str, float],
    ) -> None:
        self._admin = admin
        self._masters = masters
        self._configs = configs
        self._patience = patience
        self._skews = skews
        self._places = asyncio.Semaphore(ASKED_AT_ONCE)
        self._topics: dict[str, asyncio.Task[Topic | None]] = {}

    async def findings(self, name: str) -> list[Finding]:
        async with self._places:
            group, disagreements, full = await self._first(name)
        began_s = asyncio.get_running_loop().time()
        if group.members and group.progress:  # else nothing moves
            await self._until_it_moves(group, began_s)
        async with self._places:
            seen = await self._second(group, disagreements, began_s)
            seen = replace(seen, full=full, waiting_s=await self._waiting(seen))
        found = list(findings_of_group(seen))
        if not any(finding.kind in OF_A_MOMENT for finding in found):
            return found
        await asyncio.sleep(self._patience.look_s)
        async with self._places:
            return _confirmed(found, list(findings_of_group(await self._once_more(seen))))

    async def _until_it_moves(self, group: Group, began_s: float) -> None:
        """Looks again and again while messages wait and nothing is committed, for as long as the patience lasts."""
        loop, patience = asyncio.get_running_loop(), self._patience
        while True:
            await asyncio.sleep(patience.look_s)
            if loop.time() + patience.look_s >= began_s + patience.watch_s:
                return
            async with self._places:
                later = await self._admin.progress(group.name, masters=self._masters, times=False)
            if not suspects_of(group.progress, later):
                return

    async def _waiting(self, seen: Observed) -> dict[Queue, float]:
        """How long messages have waited that their owners want, in queues that committed nothing, or less than came."""
        waiting_s: dict[Queue, float] = {}
        for queue in [*suspects_of(seen.group.progress, seen.later), *outpaced(seen)][:SUSPECTS]:
            stored_ms = await self._stored_ms(queue, seen)
            if stored_ms is not None:
                now_s = time.time() + self._skews.get(queue.broker_name, 0.0)
                waited_s = max(now_s - stored_ms / 1000, 0.0)  # a broker tells its clock by the second
                if waited_s >= self._patience.stuck_s:
                    waiting_s[queue] = waited_s
        return waiting_s

    async def _stored_ms(self, queue: Queue, seen: Observed) -> int | None:
        """When the next message was stored that somebody in the group wants; None if there is none, or it cannot be told."""
        progress = seen.later[queue]
        wanted = _filter(queue.topic, seen)
        try:
            async for messages in self._admin.read(
                queue, progress.consumer_offset + progress.in_hand, progress.broker_offset, expression=wanted
            ):
                if messages:
                    return messages[0].store_ms
        except (RocketletError, SubscriptionError):  # a filter that this broker does not take from us
            return None
        return None

    async def _first(self, name: str) -> tuple[Group, tuple[str, ...], tuple[str, ...]]:
        connections, progress = await asyncio.gather(
            self._admin.connections(name, self._masters), self._admin.progress(name, masters=self._masters, times=False)
        )
        # an Apache broker does not tell: owners are then seen from the members' answers
        reports = await self._admin.told(name, self._masters) if connections else []
        disagreements = {text for report in reports for text in report["disagreements"]}
        full = {text for report in reports for text in report["full"]}
        progress = {} if are_broadcasting(connections) else progress
        group = Group(name, self._configs[name], connections, progress, locked(reports))
        return group, tuple(sorted(disagreements)), tuple(sorted(full))

    async def _once_more(self, seen: Observed) -> Observed:
        """The group with its members and owners of now."""
        name = seen.group.name
        connections = await self._admin.connections(name, self._masters)
        reports, running = await asyncio.gather(
            self._admin.told(name, self._masters), self._admin.running(name, self._masters, connections)
        )
        return replace(
            seen, group=replace(seen.group, connections=connections, owners=locked(reports)), running=running
        )

    async def _second(self, group: Group, disagreements: tuple[str, ...], began_s: float) -> Observed:
        later, running = group.progress, dict[str, Running]()
        if group.members:
            running = await self._admin.running(group.name, self._masters, group.connections)
        if group.members and group.progress:
            later = await self._admin.progress(group.name, masters=self._masters, times=False)
        seconds = max(asyncio.get_running_loop().time() - began_s, 0.001)
        subscribed = {topic for told in group.connections.values() for topic in told.subscriptions}
        subscribed |= {topic for member in running.values() for topic in member.subscriptions}
        subscribed |= {queue.topic for queue in group.progress}
        topics: dict[str, Topic] = {}
        for name in sorted(subscribed):
            topic = None if name.startswith(names.RETRY_PREFIX) else await self._topic(name)
            if topic is not None:
                topics[name] = topic
        return Observed(group, without_deleted(later, topics), topics, running, disagreements, seconds)

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


def _confirmed(found: list[Finding], again: list[Finding]) -> list[Finding]:
    """Findings of a moment are those of the second look, if the first had them, too."""
    kinds = {finding.kind for finding in found} & OF_A_MOMENT
    lasting = [finding for finding in found if finding.kind not in OF_A_MOMENT]
    return [*lasting, *(finding for finding in again if finding.kind in kinds)]


async def _dead_letters(admin: AdminClient, marks: Marks, group: str) -> list[Finding]:
    """The dead letters that nobody has dealt with."""
    try:
        new = (await dead_letters(admin, group, marks)).new
    except RocketletError:  # it has just gone
        return []
    if not new:
        return []
    text = (
        f"{counted(new, 'message was given up and lies', 'messages were given up and lie')} in {names.dlq_topic(group)}"
    )
    cure = (
        f"rocketlet messages dead {group} shows them and why, rocketlet messages replay {group} sends them again, "
        f"rocketlet messages discard {group} says that they are not wanted"
    )
    return [Finding(Harm.LOSS, "dead_letters", group, text, cure)]


__all__ = ["Finding", "Harm", "Observed", "Patience", "diagnose", "findings_of_group"]
