"""Move producers and groups to another cluster, on top of a mirror."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

from ..client.admin.admin_client import AdminClient
from ..client.admin.messages import Origin, origin_of
from ..client.config import CLIENT_LIMITS, MOVE_RETRIES_LOOK_BACK, ClientLimits
from ..client.errors import ConfigError, TopicNotFound
from ..client.wire.connection import Access
from ..protocol import names
from ..protocol.codes import PERM_WRITE
from ..protocol.names import counted
from .mirror import Mirror, MirrorProgress, Way, delayed

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group in a plan: the numbers of its uncommitted messages (`lag`), of messages that wait for a retry (`retries`),
    and of its dead letters (`dead`)."""

    name: str
    members: int
    lag: int
    retries: int
    dead: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a move.

    Attributes:
        topics: the number of messages of each topic.
        stays: texts about what is not moved.
        blocks: texts about what prevents the move.
    """

    topics: dict[str, int]
    groups: list[GroupPlan]
    stays: list[str]
    blocks: list[str]


@dataclass(frozen=True, slots=True)
class Taken:
    """A group that may resume at the target: the numbers of messages that wait for it there (`lag`), of retries that were
    sent there in addition (`retries`), and of its dead letters (`dead`)."""

    name: str
    lag: int
    retries: int
    dead: int


class Move:
    """`async with Move("a:9876", "b:9876") as move: ...`; `say` is called with each line of progress. Raises
    RocketletError."""

    def __init__(
        self,
        source: str,
        target: str,
        *,
        returns: bool = False,
        source_access: Access | None = None,
        target_access: Access | None = None,
        say: Say = lambda text: None,
        limits: ClientLimits = CLIENT_LIMITS,
    ) -> None:
        self._limits = limits
        if source == target:
            raise ConfigError(f"source and target are both {source}; give two clusters")
        self._addresses = source, target
        self._access = source_access, target_access
        self._way = Way.RETURN if returns else Way.MOVE
        self._say = say
        self._source = AdminClient(source, access=source_access, limits=limits)
        self._target = AdminClient(target, access=target_access, limits=limits)
        self._stack = AsyncExitStack()
        self._mirror: Mirror | None = None

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._source)
        await self._stack.enter_async_context(self._target)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    @property
    def progress(self) -> MirrorProgress | None:
        """Progress of the topic being copied, or of the last one; None before the first."""
        return self._mirror.progress if self._mirror is not None else None

    # Planning

    async def plan(self) -> Plan:
        """Return the plan of the move, without changing anything."""
        later = await delayed(self._source)
        topics = {name: (await self._source.topic(name)).messages for name in await self._source.topics()}
        groups = [await self._plan_of(name, later[names.retry_topic(name)]) for name in await self._source.groups()]
        return Plan(topics, groups, await self._stays(later), await self._blocks([group.name for group in groups]))

    async def _plan_of(self, name: str, later: int) -> GroupPlan:
        group = await self._source.group(name)
        retry = names.retry_topic(name)
        due = sum(item.lag for queue, item in group.progress.items() if queue.topic == retry)
        lag = sum(max(item.lag, 0) for queue, item in group.progress.items() if queue.topic != retry)
        return GroupPlan(name, len(group.members), lag, due + later, await self._dead(name))

    async def _dead(self, group: str) -> int:
        try:
            return (await self._source.topic(names.dlq_topic(group))).messages
        except TopicNotFound:
            return 0

    async def _stays(self, later: dict[str, int]) -> list[str]:
        stays = [
            f"{counted(count, f'message of {topic} waits for its', f'messages of {topic} wait for their')} time, to be "
            "copied when due; repeat the first step then"
            for topic, count in sorted(later.items())
            if count and not topic.startswith(names.RETRY_PREFIX)
        ]
        stays += [
            "brokers' settings and the accounts of --acl: set them up at the target",
            "messages in transactions without an outcome: let their producers end them first",
            "what broadcasting members have read: they keep that themselves",
            "store times and offsets of messages: copies have new ones; ids, keys and tags stay the same",
        ]
        if len(await self._target.brokers()) != len(await self._source.brokers()):
            stays.append("queues' places: the other side has another number of brokers; the order in each queue stays")
        return stays

    async def _blocks(self, groups: Sequence[str]) -> list[str]:
        blocks = []
        for name in groups:
            members = await self._target.connections(name)
            if any(known.members for known in members.values()):
                blocks.append(
                    f"the group {name} has members at the target already: stop them, or its offsets cannot be set"
                )
        return blocks

    # Steps

    async def copy(self, groups: Sequence[str] | None = None) -> int:
        """Copy messages and progress that are not at the target yet. Return the number of messages that were copied.

        Args:
            groups: the groups whose progress is copied. Default: all.
        """
        dead = [names.dlq_topic(name) for name in groups or await self._source.groups() if await self._dead(name)]
        topics, copied = await self._source.topics(), 0
        for chosen in (topics, dead):
            if not chosen:
                continue
            async with Mirror(
                *self._addresses,
                topics=chosen,
                groups=groups,
                way=self._way,
                source_access=self._access[0],
                target_access=self._access[1],
                limits=self._limits,
            ) as self._mirror:
                await self._mirror.run()
            copied += sum(copy.copied for copy in self._mirror.copies.values())
        return copied

    async def _open(self, topics: Sequence[str]) -> None:
        """Allow producers to send to the topics at the target."""
        for name in topics:
            for broker, config in (await self._target.topic(name)).config.items():
                if not config.perm & PERM_WRITE:
                    await self._target.change_topic(name, perm=config.perm | PERM_WRITE, brokers=[broker])

    async def close(self) -> int:
        """Make the source's topics read-only, copy the rest of their messages, and let the target's topics be written.
        Return the number of messages that were copied.

        Topics that the move has created at the target are read-only until then, because no copy may follow a producer's
        message, or a group's offset could not separate consumed and unconsumed messages.
        """
        copied = await self.copy()
        topics = await self._source.topics()
        for name in topics:
            for broker, config in (await self._source.topic(name)).config.items():
                if config.perm & PERM_WRITE:
                    await self._source.change_topic(name, perm=config.perm & ~PERM_WRITE, brokers=[broker])
        copied += await self._quieted()
        await self._open(topics)
        return copied

    async def _quieted(self) -> int:
        """Copy until no message was sent for `move_quiet_s`, in which producers notice the new permission: brokers reject
        only messages of gRPC clients, and clients query the route every 30 s by default. Return the number of copies."""
        copied, told, limits = 0, False, self._limits
        quiet_s = _now_s()
        while _now_s() - quiet_s < limits.move_quiet_s:
            await asyncio.sleep(limits.move_poll_interval_s)
            came = await self.copy()
            if came:
                copied += came
                quiet_s = _now_s()
            if not told:
                self._say(
                    "producers notice within 30 s that the topics are read-only; this step ends when none has sent for "
                    f"{limits.move_quiet_s:g} s"
                )
                told = True
        return copied

    async def is_closed(self) -> bool:
        """Return True if all topics of the source are read-only."""
        topics = [await self._source.topic(name) for name in await self._source.topics()]
        return not any(config.perm & PERM_WRITE for topic in topics for config in topic.config.values())

    async def take(self, group: str) -> Taken:
        """Wait until the group has no members at the source, then move its offsets and pending retries to the target."""
        if not await self.is_closed():
            raise ConfigError("the source's topics are still writable; move the producers first (--producers)")
        told = -1
        while members := sum(len(known.members) for known in (await self._source.connections(group)).values()):
            if members != told:
                self._say(f"{group} has {counted(members, 'member')} at the source: stop all")
                told = members
            await asyncio.sleep(self._limits.move_poll_interval_s)
        blocks = await self._blocks([group])
        if blocks:
            raise ConfigError(blocks[0])
        await self.copy((group,))
        retries, dead = await self._retries(group), await self._dead(group)
        if dead:
            await self._open([names.dlq_topic(group)])
        return Taken(group, await self._checked(group), retries, dead)

    async def _retries(self, group: str) -> int:
        """Send the group's pending retries to the target, and return their number. The group's offset at the source records
        the progress."""
        retry, moved, told = names.retry_topic(group), 0, -1
        while True:
            moved += await self._due_retries(group, retry)
            later = (await delayed(self._source))[retry]
            if not later:
                return moved + await self._due_retries(group, retry)
            if later != told:
                self._say(f"{later} messages of {group} wait for a retry; they are moved when they are due")
                told = later
            await asyncio.sleep(self._limits.move_poll_interval_s)

    async def _due_retries(self, group: str, retry: str) -> int:
        try:
            ranges = (await self._source.topic(retry)).ranges
        except TopicNotFound:
            return 0
        progress, moved = await self._source.progress(group, retry, times=False), 0
        there = await self._retries_there(retry)
        for queue, span in ranges.items():
            begin = max(progress[queue].consumer_offset if queue in progress else span.begin, span.begin)
            async for messages in self._source.read(queue, begin, span.end):
                for message in messages:
                    if not moved:
                        await self._make(retry)
                    if Origin(queue.broker_name, queue.queue_id, message.queue_offset) not in there:
                        await self._target.send_to_retry(message, group)
                    await self._source.reset(group, retry, {queue: message.queue_offset + 1})
                    moved += 1
        return moved

    async def _retries_there(self, retry: str) -> set[Origin]:
        """Return the originals of the last `MOVE_RETRIES_LOOK_BACK` retries of each queue at the target, because a move that
        was killed may have sent a retry without committing its offset."""
        try:
            ranges = (await self._target.topic(retry)).ranges
        except TopicNotFound:
            return set()
        found: set[Origin | None] = set()
        for queue, span in ranges.items():
            begin = max(span.begin, span.end - MOVE_RETRIES_LOOK_BACK)
            async for messages in self._target.read(queue, begin, span.end):
                found.update(map(origin_of, messages))
        return {origin for origin in found if origin is not None}

    async def _make(self, retry: str) -> None:
        try:
            await self._target.topic(retry)
        except TopicNotFound:
            await self._target.create_topic(retry, queues=1)

    async def _checked(self, group: str) -> int:
        """Return the number of messages that wait for the group at the target. Raises ConfigError if fewer wait there
        than at the source."""
        here, there = await self._waiting(self._source, group), await self._waiting(self._target, group)
        for topic, count in here.items():
            if there.get(topic, 0) < count:
                raise ConfigError(
                    f"{count} messages of {topic} wait for {group} at the source, and {there.get(topic, 0)} at the target: "
                    "repeat this step before you start its members there. If `rocketlet doctor` finds messages in queues "
                    "that may not be read any more, make these queues readable first"
                )
        return sum(there.values())

    async def _waiting(self, admin: AdminClient, group: str) -> dict[str, int]:
        waiting: dict[str, int] = {}
        for queue, item in (await admin.progress(group, times=False)).items():
            if not queue.topic.startswith(names.RETRY_PREFIX):
                waiting[queue.topic] = waiting.get(queue.topic, 0) + max(item.lag, 0)
        return waiting


def _now_s() -> float:
    return asyncio.get_running_loop().time()


__all__ = ["GroupPlan", "Move", "Plan", "Taken"]
