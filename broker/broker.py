"""A broker: creates its parts and runs the timers. The protocol servers have the handlers of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from ..protocol.bodies import GroupConfig, TopicConfig, Work
from ..protocol.codes import RequestCode
from ..protocol.message import MessageError, encode_host
from ..protocol.names import retry_topic
from .access import Acl
from .cluster import FrameSigner, NameServers, Peers, Registration
from .config import (
    LEASE_SWEEP_S,
    LIMITS,
    MAX_NAMED_CHARS,
    PERSIST_INTERVAL_S,
    POP_CLIENTS_POLL_INTERVAL_S,
    REQUEST_BOUNDS_S,
    RETENTION_SWEEP_S,
    SAMPLE_INTERVAL_S,
    SAVE_LOCKS_DELAY_S,
    SWEEP_INTERVAL_S,
    BrokerConfig,
    Limits,
)
from .groups.drains import Draining, Notifications, RedeliveryCauses
from .groups.group import ConsumerGroup, ConsumerGroups, GroupChanges
from .groups.leases import Locks
from .groups.members import History, RefusedHeartbeats
from .groups.offsets import Offsets, ReaderGuard, Watch
from .groups.pulling import Commits, Pulling
from .groups.rates import Rates
from .groups.settings import GroupConfigs, RequestModes
from .groups.stages import QueueKey
from .machine import shares
from .messages.appender import Appender
from .messages.dedup import Deduplication
from .messages.delays import Delays, tag_code_of
from .messages.filters import Filters
from .messages.held_pulls import HeldPulls
from .messages.lite import LiteChanges, LiteFile, LiteTopic, LiteTopics
from .messages.sending import Retries, SendService
from .messages.statistics import Statistics
from .messages.timers import Timers
from .messages.topics import Topics
from .messages.transactions import Transactions
from .nameserver import Routes
from .pops.dead_letters import DeadLetterWriter
from .pops.division import Division
from .pops.journal import PopJournal
from .pops.lite import LiteOffsets
from .pops.pools import Pools
from .pops.pops import Pops
from .pops.progress import GroupProgress
from .runtime.clock import MACHINE, Clock, SingleTimer
from .runtime.histogram import Histogram
from .runtime.jobs import Device, Job, run
from .runtime.live_config import LiveConfig
from .runtime.runtime import Runtime
from .runtime.turns import FairQueue
from .sessions.clients import Clients
from .sessions.events import GroupChanged
from .sessions.grpc_stats import GrpcClientStats
from .sessions.reports import Recent
from .sessions.requests import ClientRequests
from .sessions.session import Session
from .store.files import Save, StoreFull
from .store.index import ConsumeQueue
from .store.journals import POPS_JOURNAL, Frames
from .store.store import Flusher, Retention, RetentionTime, Store
from .tls import Tls

log = structlog.get_logger("rocketlet.broker")
groups_log = structlog.get_logger("rocketlet.groups")


class BrokerController:
    """Opens the data folder and recovers it. Raises StoreError if that fails.

    Args:
        routes: the table of the name server in the same process; None without one.
        clock: the source of time for state.
    """

    def __init__(
        self,
        config: BrokerConfig,
        routes: Routes | None = None,
        clock: Clock = MACHINE,
        *,
        tls: Tls | None = None,
        acl: Acl | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self.clock = clock
        self.limits = limits
        self.runtime = Runtime(clock, limits, acl.file.generation if acl is not None else None)
        self.generation, self.tasks, self.turns = self.runtime.generation, self.runtime.tasks, self.runtime.turns
        self.changes = _Changes(self)
        self.settings = LiveConfig(config, self.generation)
        self.acl = acl
        self.tls = tls or Tls()
        self._make_engine()
        self._make_sessions(config, routes)
        self._open_store(config)
        self._make_messages(config)
        pop_frames = self._read_groups(config)
        self._make_members(config)
        self.pops = self._make_pops(pop_frames)
        self.commits = Commits(
            self.runtime, self.topics, self.store, self.offsets, self.groups, self.locks, self.draining, self.pops
        )
        self.pulling = self._make_pulling()
        self.progress = GroupProgress(self.topics, self.store, self.offsets, self.pops.pools)
        self.registration = self._make_registration()

        self._saving_handovers = SingleTimer(self.clock, self._save_handovers)
        self._saving: asyncio.Task[None] | None = None
        self._is_stopping = False

    # Parts. Each part gets only parts that are created before it.

    def _make_engine(self) -> None:
        limits, self.device = self.limits, Device()
        self.searches = FairQueue(self.turns, limits.max_searches, limits.max_waiting_searches)
        self.recalls = FairQueue(self.turns, limits.max_recalling, limits.max_waiting_recalls)
        self.request_times: dict[int, Histogram] = {code: Histogram(REQUEST_BOUNDS_S) for code in RequestCode}

    def _make_sessions(self, config: BrokerConfig, routes: Routes | None) -> None:
        clock, acl = self.clock, self.acl
        signer = FrameSigner(acl.file, config.name_server_account) if acl and config.name_server_account else None
        self.callers = GrpcClientStats(clock)
        self.turned_away = Recent(clock)
        self.clients = Clients(self.runtime, acl)
        self.client_requests = ClientRequests(self.runtime)
        self.name_servers = NameServers(config.name_servers, routes, self.tls, signer)
        self.peers = Peers(self.runtime, self.tls, signer)

    def _open_store(self, config: BrokerConfig) -> None:
        self.store = _store(config, self.clock)
        self.runtime.adoption.keep = self.store.folder.put_aside
        self.retention_time = RetentionTime(self.clock)
        self.topics = Topics(self.runtime, config, self.changes)
        self.recovered = self.store.recover(
            self.topics.since(), deleted=self.topics.deleted, knows_topics=self.topics.is_current
        )
        self.topics.adopt(self.recovered.unknown_topics)
        self.topics.clamp(self.store.end)
        self.statistics = Statistics(self.runtime, self.store, self.topics)

    def _make_messages(self, config: BrokerConfig) -> None:
        folder, runtime, topics = config.data_dir, self.runtime, self.topics
        self.filters = Filters(runtime)
        self.held_pulls = HeldPulls(runtime)
        self.appender = appender = Appender(self.store, self.changes)
        self.dedup = Deduplication(runtime, topics, self.store)
        lite_file = LiteFile(runtime.adoption, folder / "lite_offsets.json")
        self.lites = LiteTopics(runtime, topics, self.store, lite_file, self.changes)
        self.delays = Delays(runtime, folder / "delays.json", config.delay_levels_ms, topics, appender)
        self.timers = Timers(runtime, folder, topics, appender)
        path, time = folder / "transactions.json", self.retention_time
        self.transactions = Transactions(runtime, path, self.settings, topics, appender, self.clients, time)

    def _read_groups(self, config: BrokerConfig) -> Frames:
        """Read the stored settings and offsets of groups, and create the parts of sending that need them. Return the
        file of popped messages."""
        folder = config.data_dir
        self.history = History(self.runtime)
        self.groups = self._make_groups(config.name)
        self.offsets = Offsets(self.runtime, folder / "offsets.json", self.groups, self.topics)
        self.offsets.apply_journal(self.topics.deleted)
        self.lite_offsets = LiteOffsets(self.runtime, self.lites, self.topics)
        self.offsets.clamp(self.store.queues)
        self.group_configs = groups = GroupConfigs(
            self.runtime, self.groups, folder / "groups.json", auto_create=config.auto_create_groups
        )
        pop_frames = Frames(folder / POPS_JOURNAL, is_synced=config.flush == "sync")
        journals = (self.topics.journal, groups.journal, self.timers.journal, pop_frames)
        self.flusher = Flusher(self.store, journals, self.device) if config.flush == "sync" else None
        self.retries = Retries(self.topics, self.appender, self.delays, groups, self.statistics)
        self.sending = SendService(
            self.topics,
            self.appender,
            self.delays,
            self.transactions,
            self.retries,
            self.timers,
            self.lites,
            self.dedup,
            config,
        )
        return pop_frames

    def _make_members(self, config: BrokerConfig) -> None:
        folder, clock = config.data_dir, self.clock
        self.refused_heartbeats = RefusedHeartbeats(clock)
        self.repeats = RedeliveryCauses(clock)
        self.locks = self._make_locks(folder / "locks.json")
        self.watch = Watch(self.runtime, self.groups, self.history, self.topics)
        self.notifications = Notifications(self.runtime, self.groups, self.group_configs, self.history)
        self.draining = self._make_draining()
        self.guard = ReaderGuard(self.runtime, self.groups, self.locks, self.offsets, self.held_pulls)
        self.request_modes = RequestModes(self.runtime, folder / "modes.json")
        self.rates = Rates(self.runtime, self.name_servers)

    def _make_pulling(self) -> Pulling:
        return Pulling(
            self.runtime,
            self.topics,
            self.appender,
            self.held_pulls,
            self.filters,
            self.statistics,
            self.client_requests,
            self.groups,
            self.group_configs,
            self.locks,
            self.draining,
            self.guard,
            self.pops,
            self.commits,
            self.rates,
        )

    def _make_groups(self, broker_name: str) -> ConsumerGroups:
        return ConsumerGroups(self.runtime, self.history, broker_name, self.topics, self.changes)

    def _make_locks(self, path: Path) -> Locks:
        return Locks(
            self.runtime,
            self.groups,
            self.history,
            path,
            self.topics,
            self.store.queues,
        )

    def _make_draining(self) -> Draining:
        return Draining(
            self.runtime,
            self.groups,
            self.locks,
            self.held_pulls,
            self.notifications,
            routes=self.name_servers,
            peers=self.peers,
            repeats=self.repeats,
        )

    def _make_pops(self, frames: Frames) -> Pops:
        runtime, topics, groups, settings = self.runtime, self.topics, self.groups, self.group_configs
        pools = Pools(runtime, topics, self.appender, groups, self.offsets, settings, self.lite_offsets)
        division = Division(
            runtime,
            topics,
            groups,
            self.locks,
            self.request_modes,
            self.history,
            pools,
            self.name_servers,
        )
        return Pops(
            runtime,
            self.filters,
            settings,
            pools,
            PopJournal(runtime, frames, topics, self.offsets, self.flusher),
            DeadLetterWriter(topics, self.appender, settings, groups),
            division,
            self.statistics,
            self.rates,
        )

    def _make_registration(self) -> Registration:
        return Registration(
            self.settings,
            self.topics,
            self.name_servers,
            self.clock,
            self.notifications,
        )

    @property
    def config(self) -> BrokerConfig:
        return self.settings.now

    # Life

    def start(self) -> None:
        every, alone = self.tasks.every, self.turns.do_alone
        every(PERSIST_INTERVAL_S, "persist", self._save)
        every(LEASE_SWEEP_S, "leases", partial(alone, "leases", self.locks.expiring))
        every(RETENTION_SWEEP_S, "retention", lambda: self.tasks.spawn(self.expire_segments()))
        every(SWEEP_INTERVAL_S, "members", partial(alone, "members", self._expiring_members))
        every(POP_CLIENTS_POLL_INTERVAL_S, "silent clients", self.pops.expire_clients)
        every(LEASE_SWEEP_S, "watch", partial(alone, "watch", self.watch.reporting_orphans))
        every(LEASE_SWEEP_S, "rebalances", self.history.rebalances.end_finished)
        every(SAMPLE_INTERVAL_S, "samples", partial(alone, "samples", self.statistics.sampling))
        self.transactions.start()
        self.delays.start()
        self.timers.start()
        self.pops.expiry.start()

    async def stop(self) -> None:
        """Stop the timers, answer held pulls, save the state and unlock the folder. Connections that close later free
        no queues, because their members may come back after a restart. If the disk hangs, save nothing and leave the
        folder locked."""
        self._is_stopping = True
        self._saving_handovers.cancel()
        self.peers.close()
        end_s = asyncio.get_running_loop().time() + self.limits.device_stop_s
        if self._saving is not None:  # the last save below might not repeat all that a cancelled save had begun
            await asyncio.wait({self._saving}, timeout=self.limits.device_stop_s)
        await self.tasks.stop()
        self.transactions.stop()
        self.delays.stop()
        self.timers.stop()
        self.searches.stop()
        self.recalls.stop()
        self.held_pulls.answer_all()
        self.pops.stop()
        await self.turns.done()
        try:
            async with asyncio.timeout_at(end_s):
                await self._device_is_done()
        except TimeoutError:  # the call that hangs may still write: the folder stays locked until the process ends
            self.store.fail(f"the disk has not answered for {self.limits.device_stop_s:g} s")
            self.device.end()
            return
        self.device.end()
        self.persist(closes=True)
        self.store.close()

    async def _device_is_done(self) -> None:
        if self.flusher is not None:
            await self.flusher.drain()
        await self.device.make([])

    def when_kept(self, action: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """Call `action` immediately. With `--flush sync`, call it when everything stored is on the device, or `otherwise` if
        the device fails."""
        if self.flusher is None:
            action()
        else:
            self.flusher.after_sync(action, otherwise)

    def change_config(self, config: BrokerConfig) -> None:
        """Apply changed settings, and register them with the name servers."""
        self.settings.change(config)
        self.group_configs.auto_create = config.auto_create_groups
        self.topics.change_config(config)
        self.registration.config_changed()

    def advertise(self, address: str | None, external: str | None) -> None:
        """Change the addresses in routes, for clients inside and outside of the broker's network. None keeps an address."""
        former = self.config
        self.change_config(
            replace(former, address=address or former.address, external_address=external or former.external_address)
        )
        if address is not None:
            self.registration.moved(former.address)
        log.info("address_changed", address=self.config.address, external=self.config.external_address)

    def dropped(self, session: Session) -> None:
        """Remove the memberships, held pulls and producers of a connection that is gone, and its leases if the client has
        closed it (`Session.was_closed_by_client`). Do nothing while the broker stops."""
        if self._is_stopping:
            return
        self.groups.drop(session)
        self.locks.connection_gone(session)
        self.held_pulls.drop(session)
        self.clients.drop(session)
        self.client_requests.drop(session)

    def check_receive(
        self, topic: str, group: str, queue_id: int = -1, *, orderly: bool = False
    ) -> tuple[TopicConfig, GroupConfig]:
        """Check a receive of a client of either protocol in Apache's order, and return its topic and group. A missing group
        is created as `GroupConfigs.consuming` does. Raises Refusal.

        Args:
            queue_id: the only queue to receive from; -1 for all
            orderly: True to create the group as an ordered one
        """
        self.topics.check_reading()
        found = self.topics.readable(topic, queue_id)
        return found, self.group_configs.consuming(group, orderly=orderly)

    def note_turned_away(self, address: str, reason: str) -> None:
        """Record a connection that was refused or closed because of an error, with the reason."""
        self.turned_away.record((address, reason), f"{address}: {reason[:MAX_NAMED_CHARS]}")

    # Timers

    def _save(self) -> None:
        if self._saving is None or self._saving.done():  # a slow device may need longer than the interval
            self._saving = self.tasks.spawn(self.device.do(self.saving()))

    def persist(self, closes: bool = False) -> None:
        run(self.saving(closes))

    def saving(self, closes: bool = False) -> Job[None]:
        """Save indexes, offsets, popped messages, delays and transactions, and shorten the journals of topics, groups and
        leases that have become long. A save that fails because the disk is full is retried the next time.

        If `closes`, everything is on the device afterwards, so that the next start need not read the log, unless a save has
        failed.
        """
        is_synced = closes or self.flusher is not None
        self.pops.begin_saving()
        saves: list[Save] = []
        for state in (self.delays, self.timers, self.transactions):
            save = yield from state.preparing_save()
            if save is not None:
                saves.append(save)
        # The log first, because a delivered message would be lost if only the progress after it were saved.
        steps = [self.store.syncing(is_synced), *(save.saving(is_synced) for save in saves)]
        steps += [
            self.offsets.saving(is_synced),
            self.lite_offsets.saving(is_synced),
            self.topics.saving(self.store.begin),
            self.group_configs.saving(),
            self.pops.saving(),
            self.timers.saving_recalled(),
            self.locks.saving(closes=closes),
            self.store.checkpointing(is_synced, closes=closes),
        ]
        for step in steps:
            try:
                yield from step
            except StoreFull as error:
                self.store.room.save_failed(error)
                log.error("save_failed", reason=str(error))

    async def expire_segments(self) -> None:
        retention = Retention.of(self.config, self.retention_time.now_s(), self.timers.waiting_bytes)
        dropped = await self.device.do(self.store.expiring(retention, self.timers.carrying))
        if dropped:
            log.info("segments_expired", segments=dropped, begin=self.store.begin)
            self.turns.do_alone("lost messages", self.progress.noting_lost)
            self.turns.do_alone("lite topics", self.pops.expiry.retained)

    def _expiring_members(self) -> Work[None]:
        for session in self.groups.expired():
            if session is not None:
                self.groups.drop(session, "expired")
                session.close()
            yield

    def ensure_retry_topic(self, group: GroupConfig, session: Session) -> None:
        """Create a group's retry topic if it is missing, because Apache's tools find the brokers of a group by its route. If
        the disk is full, only log it.

        Args:
            group: the settings of the group.
            session: the client that needs the group.
        """
        name = retry_topic(group.name)
        if self.topics.get(name) is not None:
            return
        try:
            self.topics.ensure(TopicConfig(name, group.retry_queues, group.retry_queues), self.store.end)
        except StoreFull as error:  # members can read even if the disk is full
            if session.is_news("retry_topic_save_failed"):
                groups_log.error("retry_topic_save_failed", group=group.name, reason=str(error))

    def save_handovers_soon(self) -> None:
        """Save the leases that expired, and the offsets of queues that were handed over, together after SAVE_LOCKS_DELAY_S,
        so that they survive a kill of the broker."""
        if not self._saving_handovers.is_set and not self._is_stopping:
            self._saving_handovers.set(SAVE_LOCKS_DELAY_S)

    def _save_handovers(self) -> None:
        self.offsets.write_handed_over()
        self.tasks.spawn(self.device.do(self._locks_saving()))

    def _locks_saving(self) -> Job[None]:
        try:
            yield from self.locks.saving()
        except StoreFull as error:
            log.error("save_failed", reason=str(error))


class _Changes(GroupChanges, LiteChanges):
    """Passes the events that lower parts report to the parts above them, which are created later."""

    def __init__(self, broker: BrokerController) -> None:
        self._broker = broker

    def topic_changed(self, topic: TopicConfig) -> None:
        self._broker.registration.topic_changed(topic)
        self._broker.pops.topic_changed(topic)

    def appended(self, queues: list[ConsumeQueue]) -> None:
        broker = self._broker
        broker.held_pulls.wake(queues)
        if broker.pops.pools.all:
            broker.pops.appended(queues)

    def lite_appended(self, lites: list[LiteTopic]) -> None:
        self._broker.pops.lite_appended(lites)

    def members_changed(self, group: ConsumerGroup) -> None:
        self._broker.pops.division.members_changed(group)
        self._broker.draining.begin_change(group)
        self._broker.notifications.schedule(group)

    def lease_freed(self, group: ConsumerGroup, waiter: Session) -> None:
        waiter.send_event(GroupChanged(group.name))

    def queue_refused(self, group: ConsumerGroup, key: QueueKey) -> None:
        self._broker.draining.allotment.queue_refused(group, *key)

    def owners_moved(self, group: ConsumerGroup) -> None:
        self._broker.draining.begin_change(group)

    def peer_away(self, group: ConsumerGroup) -> None:
        self._broker.draining.peers_changed(group)

    def ahead_ended(self, group: ConsumerGroup, key: QueueKey) -> None:
        self._broker.pops.ahead_ended(group, key)

    def leases_changed(self) -> None:
        self._broker.save_handovers_soon()

    def queue_released(self, group: ConsumerGroup, key: QueueKey, reader: Session | None) -> None:
        self._broker.offsets.fence(group, key)
        if reader is not None:
            self._broker.locks.drained(group.queue(*key), reader)


def _store(config: BrokerConfig, clock: Clock) -> Store:
    return Store(
        config.data_dir,
        segment_bytes=config.segment_bytes,
        store_host=_store_host(config.address),
        tag_code_of=partial(tag_code_of, levels_ms=config.delay_levels_ms),
        open_files=shares().segments,
        is_synced=config.flush == "sync",
        clock=clock,
    )


def _store_host(address: str) -> bytes:
    """Return the broker's address as message ids have it. A host name is looked up."""
    import socket

    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        return encode_host(host, int(port))
    except MessageError:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        return encode_host(str(found[4][0]), int(port))
