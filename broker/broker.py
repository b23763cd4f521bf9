"""A broker's state and its timers. The handlers of requests are in the verbs beside it; `dispatch` has the table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from ..protocol.bodies import Route, TopicConfig
from ..protocol.codes import ONEWAY_FLAG, RequestCode
from ..protocol.frame import Frame, encode
from ..protocol.headers import ConsumerGroup as ConsumerGroupHeader
from ..protocol.headers import write
from ..protocol.message import MessageError, encode_host
from . import config as limits
from .config import BrokerConfig, LiveConfig
from .groups.draining import Draining, is_foreign
from .groups.history import History
from .groups.locks import Locks
from .groups.members import ConsumerGroup, ConsumerGroups
from .groups.offsets import Offsets
from .groups.progress import GroupProgress
from .groups.settings import GroupConfigs
from .groups.watch import Watch
from .messages.appender import Appender
from .messages.delays import Delays, tag_code_of
from .messages.held_pulls import HeldPulls
from .messages.statistics import Statistics
from .messages.topics import Topics
from .messages.transactions import Transactions
from .net.clients import Clients
from .open_files import shares
from .store.store import Store, StoreFull

log = structlog.get_logger("rocketlet.broker")


class Broker:
    """Opens the data folder and recovers it. Raises StoreError if that cannot be done."""

    def __init__(self, config: BrokerConfig) -> None:
        self.settings = LiveConfig(config)
        self.history = History()
        folder = config.data_dir
        self.store = Store(
            folder,
            segment_bytes=config.segment_bytes,
            store_host=_store_host(config.address),
            tag_code_of=partial(tag_code_of, levels_ms=config.delay_levels_ms),
            open_files=shares().segments,
            syncs=config.flush == "sync",
        )
        self.topics = Topics(config)
        self.recovered = self.store.recover(self.topics.since(), knows_topics=self.topics.is_current)
        self.topics.adopt(self.recovered.unknown_topics)
        self.offsets = Offsets(folder / "offsets.json")
        self.group_configs = GroupConfigs(folder / "groups.json", auto_create=config.auto_create_groups)
        self.groups = ConsumerGroups(self.history, config.name, self.topics.queues_of)
        self.locks = Locks(self.history, folder / "locks.json")
        self.held_pulls = HeldPulls()
        self.appender = Appender(self.store, self.held_pulls)
        self.delays = Delays(folder / "delays.json", config.delay_levels_ms, self.topics, self.appender)
        self.clients = Clients()
        self.transactions = Transactions(folder / "transactions.json", self.settings, self.appender, self.clients)
        self.statistics = Statistics(self.store)
        self.watch = Watch(self.groups, self.locks, self.history, self.topics.queues_of)
        self.progress = GroupProgress(config.name, self.topics, self.store, self.offsets, self.groups)
        self.draining = Draining(self)
        self.locks.is_held_back = self.draining.is_draining
        self.on_config: Callable[[], None] = lambda: None
        self.find_route: Callable[[str], Awaitable[Route | None]] = _no_route
        self.groups.on_change = self.notify_later
        self.locks.on_free = self._notify_waiter
        self.locks.on_change = self._save_locks_later
        self._saving_locks: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._to_notify: dict[str, ConsumerGroup] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def config(self) -> BrokerConfig:
        """The settings in force."""
        return self.settings.now

    # Life

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._every(limits.PERSIST_INTERVAL_S, self.persist), name="persist"),
            asyncio.create_task(self._every(limits.LEASE_SWEEP_S, self.locks.expire), name="leases"),
            asyncio.create_task(self._every(limits.RETENTION_SWEEP_S, self.expire_segments), name="retention"),
            asyncio.create_task(self._every(limits.SWEEP_INTERVAL_S, self._expire_members), name="members"),
            asyncio.create_task(self._every(limits.LEASE_SWEEP_S, self.watch.look), name="watch"),
            asyncio.create_task(self._every(limits.SAMPLE_INTERVAL_S, self.statistics.sample), name="samples"),
            asyncio.create_task(
                self._every(self.config.transaction_sweep_s, self.transactions.check), name="transactions"
            ),
        ]
        self.delays.start()

    async def stop(self) -> None:
        """Stops the timers, answers what is held, keeps everything, and unlocks the folder. Connections that close after
        this free nothing: their members may come back to the next run."""
        self._is_stopping = True
        if self._saving_locks is not None:
            self._saving_locks.cancel()
        tasks = [*self._tasks, *self._answering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.delays.stop()
        self.held_pulls.answer_all()
        self.persist(sync=True)
        self.store.close()

    async def _every(self, interval_s: float, action: Callable[[], object]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                action()
            except Exception:
                self.store.roll_back()
                log.exception("timer failed", action=action.__name__)

    def spawn(self, answering: Coroutine[Any, Any, None]) -> None:
        """Runs what answers a request later."""
        task = asyncio.create_task(answering)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def change_config(self, config: BrokerConfig) -> None:
        """Other settings from now on; name servers are told."""
        self.settings.change(config)
        self.group_configs.auto_create = config.auto_create_groups
        self.topics.change_config(config)
        self.on_config()

    def persist(self, sync: bool = False) -> None:
        """Offsets, delay progress and the indexes; what a full disk refuses is tried again the next time."""
        sync = sync or self.config.flush == "sync"
        for save in (
            self.offsets.save,
            self.delays.save,
            self.transactions.save,
            self.locks.save,
            self.store.checkpoint,
        ):
            try:
                save(sync)
            except StoreFull as error:
                log.error("cannot save; will try again", reason=str(error))

    def expire_segments(self) -> None:
        config = self.config
        dropped = self.store.expire(
            older_than_s=time.time() - config.retain_hours * 3600, total_bytes=config.retain_bytes
        )
        if dropped:
            log.info("segments expired", segments=dropped, begin=self.store.begin)

    def _expire_members(self) -> None:
        for connection in self.groups.expired():
            self.groups.drop(connection, "expired")
            connection.close()

    def dropped(self, connection: Any) -> None:
        """A connection is gone: its memberships, leases, held pulls and producers go with it."""
        if self._is_stopping:
            return
        self.groups.drop(connection)
        self.locks.drop(connection)
        self.held_pulls.drop(connection)
        self.clients.drop(connection)
        self.watch.drop(connection)

    def _save_locks_later(self) -> None:
        """Soon, so that a broker that is killed remembers; not at each of the many that a rebalance moves."""
        if self._saving_locks is None:
            loop = asyncio.get_running_loop()
            self._saving_locks = loop.call_later(limits.SAVE_LOCKS_DELAY_S, self._save_locks)

    def _save_locks(self) -> None:
        self._saving_locks = None
        try:
            self.locks.save()
        except StoreFull as error:
            log.error("cannot save; will try again", reason=str(error))

    # Notifications

    def notify_later(self, group: ConsumerGroup) -> None:
        """Tells the members that the group changed; changes within 5 ms make one notification."""
        self.draining.changed(group)
        if not self._to_notify:
            asyncio.get_running_loop().call_later(limits.NOTIFY_DELAY_S, self._notify)
        self._to_notify[group.name] = group

    def _notify(self) -> None:
        groups, self._to_notify = self._to_notify, {}
        for name in groups:
            group = self.groups.get(name)
            try:
                if group is not None:
                    self.notify_members(group)
            except Exception:
                log.exception("timer failed", action="notify", group=name)

    def notify_members(self, group: ConsumerGroup) -> None:
        """Tells the members that the group changed; foreign ones later if queues of theirs are still drained."""
        settings = self.group_configs.find(group.name)
        if settings is None or not settings.notify_enable:
            return
        later = self.draining.keep_back(group.name)
        told = [at for at, member in group.members.items() if not (later and is_foreign(member))]
        for connection in told:
            notify(connection, group.name)
        self.history.add(group.name, "notified", "", members=len(told))

    def _notify_waiter(self, group: str, connection: Any) -> None:
        notify(connection, group)

    def topic_changed(self, topic: TopicConfig) -> None:
        """Tells the groups that read a topic that it has other queues; name servers know it by now."""
        for group in self.groups:
            if any(topic.name in member.subscriptions for member in group.members.values()):
                for connection in group.members:
                    notify(connection, group.name, topic.name)
                self.groups.check(group)

    # Topics

    def ensure_topic(self, topic: TopicConfig) -> TopicConfig:
        """The topic as it is, or made as asked. Raises StoreFull, LimitExceeded."""
        return self.topics.get(topic.name) or self.topics.put(topic, self.store.end)

    def delete_topic(self, name: str) -> None:
        self.topics.delete(name)
        self.store.delete_topic(name)
        self.offsets.forget_topic(name)


async def _no_route(topic: str) -> Route | None:
    """Before the broker is registered anywhere."""
    return None


def notify(connection: Any, group: str, topic: str | None = None) -> None:
    """NOTIFY_CONSUMER_IDS_CHANGED; JSON, because its receiver may be of any kind. A topic, which only Rocketlet clients
    look at, has other queues than before."""
    code = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
    connection.write([encode(Frame(code, 0, write(ConsumerGroupHeader(group, topic)), flag=ONEWAY_FLAG))])


def _store_host(address: str) -> bytes:
    """The address that message ids name. A host name that is no IP address is looked up."""
    import socket

    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        return encode_host(host, int(port))
    except MessageError:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        return encode_host(str(found[4][0]), int(port))
