"""Registers the broker with name servers: at the start, every 30 s, whenever a topic changes, and at the end.

The name server in the broker's own process is called directly. Others get a connection each, with one request at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from ...protocol.bodies import TopicConfig
from ...protocol.codes import PERM_READ_WRITE, RequestCode
from ...protocol.frame import Frame
from ...protocol.headers import BrokerName, RegisterBroker, write
from ...protocol.registration_body import encode_registration
from ...protocol.work import finish
from ..clock import Clock
from ..config import MAX_PENDING_TOPICS, REGISTER_INTERVAL_S, REGISTER_LOOK_S, LiveConfig
from ..messages.topics import Topics
from ..running.tasks import Tasks
from .link import NameServers

log = structlog.get_logger("rocketlet.registration")


class Registration:
    """is_registered: whether a name server took the last registration. `on_known(topic)` is called when the name servers
    know a topic as it is now, `on_all_known()` when they know all topics: one of them may have been away when a topic
    changed."""

    def __init__(
        self,
        settings: LiveConfig,
        topics: Topics,
        name_servers: NameServers,
        clock: Clock,
        on_known: Callable[[TopicConfig], None],
        on_all_known: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._name_servers = name_servers
        self._on_known = on_known
        self._on_all_known = on_all_known
        self._clock = clock
        self._changed: dict[str, TopicConfig] = {}
        self._wake = asyncio.Event()
        self._is_running = False
        self.is_registered = False
        self._tasks = Tasks(clock)
        self._due_s = clock.monotonic_s() + REGISTER_INTERVAL_S

    async def start(self) -> None:
        """Returns when every name server has answered or failed to."""
        self._is_running = True
        await self._register(list(self._topics))
        if self._name_servers.are_elsewhere:
            self._tasks.spawn(self._run())
            self._tasks.every(REGISTER_LOOK_S, "registration", self._look)

    async def stop(self) -> None:
        self._is_running = self.is_registered = False
        await self._tasks.stop()
        config = self._settings.now
        header = BrokerName(config.name, config.address, config.cluster, 0)
        await self._name_servers.tell(Frame(RequestCode.UNREGISTER_BROKER, ext=write(header)))
        if self._name_servers.local is not None:
            self._name_servers.local.unregister(config.name, config.address)
        self._name_servers.close()

    def topic_changed(self, topic: TopicConfig) -> None:
        """A topic is new or altered. Before the start all of them are."""
        if not self._is_running:
            return
        self._register_locally([topic])
        if not self._name_servers.are_elsewhere:
            self._on_known(topic)
        elif len(self._changed) < MAX_PENDING_TOPICS:
            self._changed[topic.name] = topic
            self._wake.set()

    def config_changed(self) -> None:
        """Registers anew: topics are registered with the broker's settings."""
        self._register_locally(list(self._topics))
        self._wake.set()

    def moved(self, former: str) -> None:
        """The broker has another address than it had."""
        config, local = self._settings.now, self._name_servers.local
        if local is None:
            return
        if former != config.address:
            local.unregister(config.name, former)
        local.tell_registered()

    def _look(self) -> None:
        if self._name_servers.any_is_fresh or self._clock.monotonic_s() >= self._due_s:
            self._wake.set()

    async def _run(self) -> None:
        """Registers when a topic has changed, a name server has hung up, or the interval is over."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._register_due()
            except Exception:
                log.exception("timer_failed", action="register")

    async def _register_due(self) -> None:
        self._due_s = self._clock.monotonic_s() + REGISTER_INTERVAL_S
        # A name server that has hung up may have restarted, with no routes: it hears all of them, the others the new ones.
        changed, self._changed = self._changed, {}
        all_are_due = self._name_servers.any_is_fresh or not changed
        await self._register(list(self._topics) if all_are_due else list(changed.values()))
        # After the name servers: a member that hears of it asks them, and must not get the former number of queues.
        for topic in changed.values():
            self._on_known(topic)
        if all_are_due:
            self._on_all_known()

    async def _register(self, topics: list[TopicConfig]) -> None:
        self._register_locally(topics)
        config = self._settings.now
        header = RegisterBroker(
            config.name, config.address, config.cluster, config.address, 0, external_addr=config.external_address
        )
        body = encode_registration(self._topics.version, map(self._as_permitted, topics))
        is_known = await self._name_servers.tell(Frame(RequestCode.REGISTER_BROKER, ext=write(header), body=body))
        self.is_registered = self._is_running and (is_known or self._name_servers.local is not None)

    def _register_locally(self, topics: list[TopicConfig]) -> None:
        config, local = self._settings.now, self._name_servers.local
        if local is not None:
            work = local.registering(
                config.cluster,
                config.name,
                0,
                config.address,
                self._topics.version,
                list(map(self._as_permitted, topics)),
                None,
                config.external_address,
            )
            finish(work)

    def _as_permitted(self, topic: TopicConfig) -> TopicConfig:
        """A broker that may not be read or written says so of all its topics."""
        permission = self._settings.now.permission
        if permission & PERM_READ_WRITE == PERM_READ_WRITE:
            return topic
        return TopicConfig(topic.name, topic.read_queues, topic.write_queues, permission)
