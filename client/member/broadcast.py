"""Broadcasting: every member reads every queue, from offsets that it keeps in a file of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from ...host.files import locked_beside, read_file
from ...host.version import own_version
from ...protocol.allocation import subscribe_queues
from ...protocol.bodies import ConsumerData, Heartbeat
from ...protocol.queue import Queue
from ...protocol.schema import BodyError
from ...protocol.subscription import Subscription
from ..config import MAX_INT, MAX_LONG, MAX_OFFSETS_BYTES, Start
from ..errors import ConfigError, RocketletError
from ..lease import Lease
from ..log import get_logger
from ..tasks import cancelled
from ..wire.cluster import Cluster
from ..wire.identity import new_client_id
from .heartbeats import Heartbeats
from .leases import QueueUser
from .offsets import begin_offset

log = get_logger("rocketlet.broadcast")


class Broadcast:
    """Stands where `Membership` stands in a clustering consumer, without rebalance and locks.

    offsets_file: where this member's offsets are kept between runs; without one every run starts anew. It is locked while the
    member runs: two that write one file would each go on, when they start again, where the other was.
    """

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        subscriptions: Mapping[str, Subscription],
        user: QueueUser,
        *,
        start: Start,
        offsets_file: Path | str | None,
    ) -> None:
        self.client_id = new_client_id(cluster.client_name)
        self.owned: dict[Queue, Lease] = {}
        self._cluster = cluster
        self._limits = cluster.limits
        self._group = group
        self._subscriptions = dict(subscriptions)
        self._user = user
        self._start = start
        self._file = None if offsets_file is None else Path(os.path.realpath(offsets_file))  # a link stays one
        self._offsets = _load(offsets_file)
        self._lock: BinaryIO | None = None
        self._at_joining: frozenset[Queue] = frozenset()
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._heartbeats = Heartbeats(cluster, self._described, lambda: cluster.masters().values())
        cluster.keeps_brokers = True  # one that restarts is connected with as soon as it is back
        cluster.listen(on_change=lambda topic: self._wake.set(), on_lost=lambda address: self._wake.set())

    async def join(self) -> None:
        self._lock = _locked(self._file)
        self._offsets = _load(self._file)  # another member may have kept its offsets since
        for topic in self._subscriptions:
            await self._cluster.find_route(topic)
        self._at_joining = frozenset(
            queue
            for topic in self._subscriptions
            if (route := self._cluster.route(topic)) is not None
            for queue in subscribe_queues(topic, route)
        )
        await self._heartbeats.beat()
        await self._take_queues()
        self._tasks = [asyncio.create_task(self._keep_up(), name="broadcast")]

    async def leave(self) -> None:
        await cancelled(self._tasks)
        try:
            for queue in list(self.owned):
                del self.owned[queue]
                offset = await self._user.give_queue(queue)
                if offset is not None:
                    self._offsets[queue] = offset
                self._user.lose_queue(queue)
        finally:  # also if cancelled
            self._save()
            self._unlock()

    async def abandon(self) -> None:
        """Like `Membership.abandon`."""
        await cancelled(self._tasks)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def unsettled(self) -> str:
        """Why the member is not settled, in words; empty if it is."""
        topics = [topic for topic in self._subscriptions if self._cluster.route(topic) is None]
        return f"no name server knows the topic {', '.join(topics)}" if topics else "a broker of its queues is away"

    @property
    def is_settled(self) -> bool:
        """Whether it has taken every queue."""
        return self._settled.is_set()

    async def settled(self) -> None:
        await self._settled.wait()

    async def commit(self, offsets: Mapping[Queue, int]) -> set[Queue]:
        self._offsets |= offsets
        self._save()
        return set(offsets)

    async def commit_place(self, queue: Queue, offset: int, *, sought: bool) -> None:
        await self.commit({queue: offset})

    def _described(self) -> Heartbeat:
        consumer = ConsumerData(
            self._group,
            "CONSUME_PASSIVELY",
            "BROADCASTING",
            subscriptions=tuple(self._subscriptions.values()),
            own_version=own_version(),
        )
        return Heartbeat(self.client_id, (consumer,))

    async def _keep_up(self) -> None:
        """Heartbeats, which connect with a broker that is back, and takes the queues that routes show."""
        loop = asyncio.get_running_loop()
        beat_s = loop.time()
        while True:
            self._wake.clear()
            missing = await self._take_queues()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s(missing=missing)):
                    await self._wake.wait()
            is_due = missing or self._wake.is_set() or self._heartbeats.are_failing
            if is_due or loop.time() - beat_s >= self._limits.heartbeat_interval_s:
                await self._heartbeats.beat()
                beat_s = loop.time()

    def _pause_s(self, *, missing: bool) -> float:
        if missing:
            return self._limits.missing_route_interval_s
        return self._limits.heartbeat_retry_s if self._heartbeats.are_failing else self._limits.rebalance_interval_s

    async def _take_queues(self) -> bool:
        """Takes every queue; True if something could not be taken yet."""
        missing = False
        for topic in self._subscriptions:
            try:
                route = self._cluster.route(topic) or await self._cluster.find_route(topic)
                queues = subscribe_queues(topic, route) if route is not None else []
                missing = missing or not queues
                for queue in queues:
                    if queue not in self.owned:
                        offset = await self._start_offset(queue)
                        self.owned[queue] = Lease(0)
                        self._user.take_queue(queue, offset, self.owned[queue])
            except (RocketletError, BodyError) as error:
                log.info("queues_not_taken", topic=topic, reason=str(error))
                missing = True
        if not missing:
            self._settled.set()
        return missing

    async def _start_offset(self, queue: Queue) -> int:
        kept = self._offsets.get(queue)
        if kept is not None:
            return kept
        start = self._start if queue in self._at_joining else "first"
        return await begin_offset(await self._cluster.broker(queue.broker_name), queue, start)

    def _save(self) -> None:
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        value = [[*queue, offset] for queue, offset in self._offsets.items()]
        temporary = self._file.with_name(f"{self._file.name}.new")  # another file's has another name
        temporary.write_bytes(orjson.dumps(value))
        os.replace(temporary, self._file)


def _locked(path: Path | None) -> BinaryIO | None:
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return locked_beside(path)
    except BlockingIOError:
        raise ConfigError(
            f"offsets_file: {path} is in use by another member; each member needs a file of its own"
        ) from None
    except OSError as error:
        raise ConfigError(f"offsets_file: {path} cannot be written: {error}") from None


def _load(path: Path | str | None) -> dict[Queue, int]:
    if path is None:
        return {}
    try:
        kept = read_file(path, MAX_OFFSETS_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"offsets_file: {path} cannot be read: {error}") from None
    try:
        return dict(map(_entry, _listed(orjson.loads(kept))))
    except ValueError as error:
        raise ConfigError(
            f"offsets_file: {path} is damaged ({error}); restore it, or delete it to start again"
        ) from None


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"it holds {value!r:.100}, which is not a list")
    return value


def _entry(item: Any) -> tuple[Queue, int]:
    match item:
        case [str(topic), str(broker), int(number), int(offset)] if 0 <= number <= MAX_INT and 0 <= offset <= MAX_LONG:
            return Queue(topic, broker, number), offset
    raise ValueError(f"{item!r:.100} is not an offset of a queue")
