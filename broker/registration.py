"""Tells name servers of the broker: at the start, every 30 s, with each topic that changes, and at the end.

The name server in the broker's own process is told directly; others over one connection each, a request at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import structlog

from ..protocol.bodies import Route, TopicConfig, decode_route
from ..protocol.codes import PERM_READ, PERM_WRITE, RequestCode
from ..protocol.frame import Frame, FrameError, FrameReader, encode
from ..protocol.headers import BrokerName, RegisterBroker, TopicName, write
from ..protocol.registration_body import encode_registration
from .broker import Broker
from .config import REGISTER_INTERVAL_S, REGISTER_TIMEOUT_S
from .nameserver.routes import Routes

log = structlog.get_logger("rocketlet.registration")

MAX_PENDING_TOPICS = 10_000
LINK_CHECK_S = 1.0


class _Link:
    """A connection to one name server, opened when it is needed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._frames = FrameReader()
        self._numbers = itertools.count(1)
        self._lock = asyncio.Lock()

    async def request(self, frame: Frame) -> Frame:
        """Raises OSError, TimeoutError or FrameError, the connection then closed."""
        async with self._lock, asyncio.timeout(REGISTER_TIMEOUT_S):
            try:
                return await self._request(frame._replace(opaque=next(self._numbers)))
            except BaseException:
                self.close()
                raise

    async def _request(self, frame: Frame) -> Frame:
        if self._streams is None or self.is_fresh:
            self.close()
            host, _, port = self.address.rpartition(":")
            self._streams = await asyncio.open_connection(host.strip("[]"), int(port))
            self._frames = FrameReader()
        reader, writer = self._streams
        writer.write(encode(frame))
        while True:
            data = await reader.read(65_536)
            if not data:
                raise ConnectionResetError(f"the name server {self.address} closed the connection")
            for answer in self._frames.feed(data):
                if answer.is_response and answer.opaque == frame.opaque:
                    return answer

    @property
    def is_fresh(self) -> bool:
        """Whether the name server may be another than the one that was told before: it has hung up, or was never told."""
        return self._streams is None or self._streams[0].at_eof()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Registration:
    def __init__(self, broker: Broker, local: Routes | None) -> None:
        self._broker = broker
        self._local = local
        self._links = [_Link(address) for address in broker.config.name_servers]
        self._changed: dict[str, TopicConfig] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when every name server has answered or failed to."""
        self._broker.topics.on_change = self._topic_changed
        self._broker.on_config = self._config_changed
        self._broker.find_route = self._find_route
        await self._register(list(self._broker.topics))
        if self._links:
            self._task = asyncio.create_task(self._run(), name="registration")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        config = self._broker.config
        header = BrokerName(config.name, config.address, config.cluster, 0)
        await self._tell(Frame(RequestCode.UNREGISTER_BROKER, ext=write(header)))
        if self._local is not None:
            self._local.unregister(config.name, config.address)
        for link in self._links:
            link.close()

    def _topic_changed(self, topic: TopicConfig) -> None:
        self._register_locally([topic])
        if not self._links:
            self._broker.topic_changed(topic)
        if self._links and len(self._changed) < MAX_PENDING_TOPICS:
            self._changed[topic.name] = topic
            self._wake.set()

    async def _find_route(self, topic: str) -> Route | None:
        """A topic's route, of the name server in this process or of the first one that answers."""
        if self._local is not None:
            return self._local.route(topic)
        for link in self._links:
            try:
                answer = await link.request(Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext=write(TopicName(topic))))
            except (OSError, FrameError) as error:
                log.warning("name server not reached", address=link.address, reason=str(error) or "timeout")
                continue
            return decode_route(answer.body) if answer.code == 0 else None
        return None

    def _config_changed(self) -> None:
        self._register_locally(list(self._broker.topics))
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._until_due()
            try:
                await self._register_due()
            except Exception:
                log.exception("timer failed", action="register")

    async def _register_due(self) -> None:
        self._wake.clear()
        changed, self._changed = self._changed, {}
        is_fresh = any(link.is_fresh for link in self._links)
        await self._register(list(self._broker.topics) if is_fresh or not changed else list(changed.values()))
        for topic in changed.values():
            self._broker.topic_changed(topic)

    async def _until_due(self) -> None:
        """Returns when a topic has changed, a name server has hung up, or the interval is over."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + REGISTER_INTERVAL_S
        while loop.time() < end_s and not any(link.is_fresh for link in self._links):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINK_CHECK_S):
                    await self._wake.wait()
                    return
        await asyncio.sleep(LINK_CHECK_S)

    async def _register(self, topics: list[TopicConfig]) -> None:
        self._register_locally(topics)
        config = self._broker.config
        header = RegisterBroker(
            config.name, config.address, config.cluster, config.address, 0, external_addr=config.external_address
        )
        body = encode_registration(self._broker.topics.version, map(self._as_permitted, topics))
        await self._tell(Frame(RequestCode.REGISTER_BROKER, ext=write(header), body=body))

    def _register_locally(self, topics: list[TopicConfig]) -> None:
        config = self._broker.config
        if self._local is not None:
            version = self._broker.topics.version
            topics = list(map(self._as_permitted, topics))
            self._local.register(
                config.cluster, config.name, 0, config.address, version, topics, None, config.external_address
            )

    def _as_permitted(self, topic: TopicConfig) -> TopicConfig:
        """A broker that may not be read or written says so of all its topics."""
        permission = self._broker.config.permission
        if permission & (PERM_READ | PERM_WRITE) == PERM_READ | PERM_WRITE:
            return topic
        return TopicConfig(topic.name, topic.read_queues, topic.write_queues, permission)

    async def _tell(self, frame: Frame) -> None:
        await asyncio.gather(*(self._tell_one(link, frame) for link in self._links))

    async def _tell_one(self, link: _Link, frame: Frame) -> None:
        try:
            answer = await link.request(frame)
        except (OSError, FrameError) as error:  # TimeoutError is an OSError
            log.warning("name server not reached", address=link.address, reason=str(error) or "timeout")
            return
        if answer.code:
            log.warning("name server refused", address=link.address, code=answer.code, remark=answer.remark)
