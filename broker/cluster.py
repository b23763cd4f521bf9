"""The broker as a client of name servers (registration) and of the other brokers of its cluster."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from ..protocol.bodies import BodyError, Route, TopicConfig, decode_route, encode_registration, finish
from ..protocol.codes import PERM_READ_WRITE, RequestCode, ResponseCode, code_name
from ..protocol.frame import Frame, FrameError, FrameReader, encode
from ..protocol.group_bodies import PeerMessage, encode_agreed_members
from ..protocol.headers import ACCESS_KEY, SIGNATURE, BrokerName, RegisterBroker, TopicName, write
from .access import AclError, AclFile
from .config import MAX_PENDING_TOPICS, PEER_IDLE_S, REGISTER_INTERVAL_S, REGISTER_POLL_INTERVAL_S, REGISTER_TIMEOUT_S
from .messages.topics import Topics
from .nameserver import Routes
from .runtime.clock import Clock, Timer
from .runtime.live_config import LiveConfig
from .runtime.runtime import Runtime
from .runtime.tasks import Tasks
from .tls import Tls

log = structlog.get_logger("rocketlet.registration")
groups_log = structlog.get_logger("rocketlet.groups")


# ------------------------------------------------------------------------------
# A broker's links to its name servers: the one in its own process is called directly, others by connections.


class FrameSigner:
    """Signs frames with one of the accounts, whose secret may change. Raises AclError if the account does not exist at the
    start; if it is deleted later, frames are not signed."""

    def __init__(self, file: AclFile, access_key: str) -> None:
        if access_key not in file.policy.accounts:
            raise AclError(f"there is no account {access_key} in {file.path}")
        self._file = file
        self._access_key = access_key

    def signed(self, frame: Frame) -> Frame:
        account = self._file.policy.accounts.get(self._access_key)
        if account is None:  # deleted from the file since; a name server with accounts refuses the frame with a reason
            return frame
        ext = {**frame.ext, ACCESS_KEY: self._access_key}
        return frame._replace(ext={**ext, SIGNATURE: account.signer.signature(ext, frame.body)})


class Link:
    """A connection to one name server or broker, opened when it is needed. `is_informed` is True once the server has
    responded to a registration of all topics on this connection."""

    def __init__(self, address: str, tls: Tls, signer: FrameSigner | None) -> None:
        self.address = address
        self._tls = tls
        self._signer = signer
        self.is_informed = False
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._frames = FrameReader()
        self._numbers = itertools.count(1)
        self._lock = asyncio.Lock()

    async def request(self, frame: Frame) -> Frame:
        """Send a request and return its response. Raises OSError, TimeoutError, FrameError, or ValueError for an invalid
        address, and closes the connection then."""
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
            if not 0 < int(port) < 65_536:
                raise ValueError(f"invalid address {self.address!r}; expected HOST:PORT with a port from 1 to 65535")
            self._streams = await asyncio.open_connection(
                host.strip("[]"), int(port), ssl=self._tls.name_server_context
            )
            self._frames = FrameReader()
        reader, writer = self._streams
        writer.write(encode(self._signer.signed(frame) if self._signer else frame))
        while True:
            data = await reader.read(65_536)
            if not data:
                raise ConnectionResetError(f"{self.address} closed the connection")
            for answer in self._frames.feed(data):
                if answer.is_response and answer.opaque == frame.opaque:
                    return answer

    @property
    def is_fresh(self) -> bool:
        """True if the server may be a new process, because there is no connection, or the server has closed it."""
        return self._streams is None or self._streams[0].at_eof()

    def close(self) -> None:
        self.is_informed = False
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class NameServers:
    """The name servers of a broker.

    Args:
        local: The routes of the name server in this process; None without one.
        tls: The settings of encrypted links.
        signer: Signs requests; None if name servers have no accounts.
    """

    def __init__(self, addresses: Iterable[str], local: Routes | None, tls: Tls, signer: FrameSigner | None) -> None:
        self.local = local
        self._links = [Link(address, tls, signer) for address in addresses]

    @property
    def are_elsewhere(self) -> bool:
        """True if there are name servers in other processes."""
        return bool(self._links)

    @property
    def any_is_fresh(self) -> bool:
        """True if one of them may not have this broker's registration yet."""
        return any(link.is_fresh or not link.is_informed for link in self._links)

    async def find_route(self, topic: str) -> Route | None:
        """Return a topic's route, from the name server in this process if there is one; else from the others, one after the
        other, the first route that has this broker's queues. Return None without a route."""
        if self.local is not None:
            return self.local.route(topic)
        request = Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext=write(TopicName(topic)))
        for link in self._links:
            answer = await self._ask(link, request)
            route = _route(link, answer) if answer is not None else None
            # a name server that has just started lacks topics, and this broker's queues until it has them again
            if route is not None and link.is_informed:
                return route
        return None

    async def send(self, frame: Frame, *, informs: bool = False) -> bool:
        """Send a request to all name servers in other processes concurrently, and wait until each has responded or failed.
        Return True if at least one accepted it.

        Args:
            informs: True for a registration of all topics.
        """
        return any(await asyncio.gather(*(self._send_to(link, frame, informs) for link in self._links)))

    async def _send_to(self, link: Link, frame: Frame, informs: bool) -> bool:
        answer = await self._ask(link, frame)
        link.is_informed |= informs and answer is not None
        if answer is not None and answer.code != ResponseCode.SUCCESS:
            log.warning("name_server_refused", address=link.address, code=answer.code, remark=answer.remark)
        return answer is not None and answer.code == ResponseCode.SUCCESS

    async def _ask(self, link: Link, frame: Frame) -> Frame | None:
        try:
            return await link.request(frame)
        except (OSError, FrameError) as error:  # TimeoutError is an OSError
            log.warning("name_server_unreachable", address=link.address, reason=str(error) or "timeout")
            return None

    def close(self) -> None:
        for link in self._links:
            link.close()


def _route(link: Link, answer: Frame) -> Route | None:
    if answer.code != ResponseCode.SUCCESS:
        return None
    try:
        return decode_route(answer.body)
    except BodyError as error:
        log.warning("name_server_refused", address=link.address, code=answer.code, remark=str(error))
        return None


# ------------------------------------------------------------------------------
# A broker's connections to its peers, opened for the first request and closed when idle for long.
#
# Each peer gets one request at a time (except CONFIRM_WORD). Changes of a group during a request are sent in one request
# after it, in their latest state.


Make = Callable[[], PeerMessage | None]
Failed = Callable[[bool], None]


class Peers:
    def __init__(self, runtime: Runtime, tls: Tls, signer: FrameSigner | None) -> None:
        self._limits = runtime.limits
        self._tls = tls
        self._signer = signer
        self._tasks = runtime.tasks
        self._clock = runtime.clock
        self._links: dict[str, Link] = {}
        self._due: dict[str, dict[str, tuple[Make, Failed]]] = {}  # by address and group
        self._idle: dict[str, Timer] = {}
        self._refused: set[str] = set()  # addresses that are logged already
        self._is_crowded = False  # the limit on connections is logged already
        self._asking = 0
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """True if no message to a peer is in flight or waits."""
        return not self._due

    def send(self, address: str, group: str, make: Make, failed: Failed) -> None:
        """Send a message about a group once the peer has responded to earlier ones. `make` returns the message at that time,
        or None to send nothing. A message about the same group that still waits is replaced.

        `failed(is_for_good)` is called if the peer is unreachable or refuses the message, or if there are too many
        connections; `is_for_good` is True if the peer does not know the request code.
        """
        if self._is_closed:
            return
        if address in self._due:
            self._due[address][group] = make, failed
            return
        self._due[address] = {group: (make, failed)}
        self._tasks.spawn(self._send_due(address))

    async def _send_due(self, address: str) -> None:
        due = self._due[address]
        try:
            while due:
                group = next(iter(due))
                make, failed = due.pop(group)
                message = make()
                code = await self._ask(address, _frame(message)) if message is not None else ResponseCode.SUCCESS
                if code is None:  # requests for other groups would fail, too
                    failed(False)
                    for _, other_failed in list(due.values()):
                        other_failed(False)
                    due.clear()
                elif code != ResponseCode.SUCCESS:
                    failed(code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        finally:
            del self._due[address]
        if address in self._links:
            self._close_later(address)

    async def _ask(self, address: str, frame: Frame) -> int | None:
        """Return the response code; None if the peer is unreachable, or if there are too many connections."""
        if not self._has_room(address):
            return None
        link = self._links.setdefault(address, Link(address, self._tls, self._signer))
        was_open = not link.is_fresh
        try:
            answer = await link.request(frame)
        except TimeoutError:
            reason = "timeout"
        except (OSError, FrameError, ValueError) as error:  # ValueError: the address is invalid
            # The peer may have closed an idle connection: retry on a new one
            if was_open:
                return await self._ask(address, frame)
            reason = str(error)
        else:
            self._log_refusal(address, answer)
            return answer.code
        if address not in self._refused:
            self._refused.add(address)
            groups_log.warning("peer_unreachable", address=address, reason=reason)
        return None

    @property
    def may_ask(self) -> bool:
        """True if the limit allows another `confirms`."""
        return self._asking < self._limits.max_proofs

    async def confirms(self, address: str, request: Frame) -> bool:
        """Return True if the broker at this address confirms the request.

        The request has a connection of its own, because a request on the shared one may wait for a response that depends on
        this.
        """
        link = Link(address, self._tls, self._signer)
        self._asking += 1
        try:
            return (await link.request(request)).code == ResponseCode.SUCCESS
        except (OSError, FrameError, ValueError):  # ValueError: the address is invalid
            return False
        finally:
            self._asking -= 1
            link.close()

    def _has_room(self, address: str) -> bool:
        """Return True if a connection to this peer may be opened; close an idle one if necessary. The limit exists because
        anybody may register brokers at a name server without accounts."""
        if address in self._links or len(self._links) < self._limits.max_peer_links:
            return True
        idle = next((other for other in self._links if other not in self._due), None)
        if idle is not None:
            self._close_idle(idle)
        elif not self._is_crowded:
            others = f"all {self._limits.max_peer_links} connections to other brokers are in use"
            groups_log.warning("peer_unreachable", address=address, reason=others)
        self._is_crowded = idle is None
        return idle is not None

    def _log_refusal(self, address: str, answer: Frame) -> None:
        if answer.code == ResponseCode.SUCCESS:
            self._refused.discard(address)
        elif address not in self._refused:
            self._refused.add(address)
            groups_log.warning("peer_refused", address=address, code=code_name(answer.code), remark=answer.remark)

    def _close_later(self, address: str) -> None:
        if address in self._idle:
            self._idle[address].cancel()
        self._idle[address] = self._clock.call_later(PEER_IDLE_S, self._close_idle, address)

    def _close_idle(self, address: str) -> None:
        if address not in self._due:
            timer = self._idle.pop(address, None)
            if timer is not None:
                timer.cancel()
            self._refused.discard(address)
            link = self._links.pop(address, None)
            if link is not None:
                link.close()

    def close(self) -> None:
        """Close the connections and send nothing more. The owner of the tasks ends them."""
        self._is_closed = True
        for timer in self._idle.values():
            timer.cancel()
        self._idle.clear()
        for link in self._links.values():
            link.close()
        self._links.clear()


def _frame(message: PeerMessage) -> Frame:
    return Frame(RequestCode.AGREE_ON_MEMBERS, ext=write(message.header), body=encode_agreed_members(message.members))


# ------------------------------------------------------------------------------
# Registers the broker with name servers: all topics at the start, every 30 s, and when the broker's settings change; a topic
# when it changes. Unregisters the broker at the end.
#
# The name server in the broker's own process is called directly. Each other name server gets a connection, with one
# request at a time.


class RouteChanges(Protocol):
    """Events that a registration reports."""

    def topic_changed(self, topic: TopicConfig) -> None:
        """Handle a changed topic, after it was registered with each name server that was reachable."""
        ...

    def topics_registered(self) -> None:
        """Handle a registration of all topics with each name server that was reachable, including those that were
        unreachable when a topic changed."""
        ...


class Registration:
    """The broker's registration. `is_registered` is True if a name server has accepted the last one."""

    def __init__(
        self,
        settings: LiveConfig,
        topics: Topics,
        name_servers: NameServers,
        clock: Clock,
        changes: RouteChanges,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._name_servers = name_servers
        self._changes = changes
        self._clock = clock
        self._changed: dict[str, TopicConfig] = {}
        self._wake = asyncio.Event()
        self._is_running = False
        self.is_registered = False
        self._tasks = Tasks(clock)
        self._due_s = clock.monotonic_s() + REGISTER_INTERVAL_S

    async def start(self) -> None:
        """Register all topics, and return when every name server has responded or failed."""
        self._is_running = True
        await self._register(list(self._topics), is_whole=True)
        if self._name_servers.are_elsewhere:
            self._tasks.spawn(self._run())
            self._tasks.every(REGISTER_POLL_INTERVAL_S, "registration", self._wake_if_due)

    async def stop(self) -> None:
        self._is_running = self.is_registered = False
        await self._tasks.stop()
        config = self._settings.now
        header = BrokerName(config.name, config.address, config.cluster, 0)
        await self._name_servers.send(Frame(RequestCode.UNREGISTER_BROKER, ext=write(header)))
        if self._name_servers.local is not None:
            self._name_servers.local.unregister(config.name, config.address)
        self._name_servers.close()

    def topic_changed(self, topic: TopicConfig) -> None:
        """Register a topic that was created or changed: immediately with the name server in this process, soon with others.
        Ignored before `start`, which registers all topics. Beyond MAX_PENDING_TOPICS, the next registration of all topics
        has the topic."""
        if not self._is_running:
            return
        self._register_locally([topic])
        if not self._name_servers.are_elsewhere:
            self._changes.topic_changed(topic)
        elif len(self._changed) < MAX_PENDING_TOPICS:
            self._changed[topic.name] = topic
            self._wake.set()

    def config_changed(self) -> None:
        """Register all topics again, because registrations contain the broker's settings."""
        self._register_locally(list(self._topics))
        self._due_s = self._clock.monotonic_s()
        self._wake.set()

    def moved(self, former: str) -> None:
        """Handle a change of the broker's address in the routes of the name server in this process, if there is one."""
        config, local = self._settings.now, self._name_servers.local
        if local is None:
            return
        if former != config.address:
            local.unregister(config.name, former)
        local.announce_registered()

    def _wake_if_due(self) -> None:
        if self._name_servers.any_is_fresh or self._clock.monotonic_s() >= self._due_s:
            self._wake.set()

    async def _run(self) -> None:
        """Register when topics or settings have changed, a name server has closed its connection, or the interval is over."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._register_due()
            except Exception:
                log.exception("timer_failed", action="register")

    async def _register_due(self) -> None:
        now_s = self._clock.monotonic_s()
        changed, self._changed = self._changed, {}
        # A name server that closed its connection may have restarted without routes, so it gets all topics.
        all_are_due = self._name_servers.any_is_fresh or now_s >= self._due_s or not changed
        if all_are_due:
            self._due_s = now_s + REGISTER_INTERVAL_S
        await self._register(list(self._topics) if all_are_due else list(changed.values()), is_whole=all_are_due)
        # after the registration, because a notified member requests the route, and must not get the previous number of queues
        for topic in changed.values():
            self._changes.topic_changed(topic)
        if all_are_due:
            self._changes.topics_registered()

    async def _register(self, topics: list[TopicConfig], *, is_whole: bool) -> None:
        self._register_locally(topics)
        config = self._settings.now
        header = RegisterBroker(
            config.name, config.address, config.cluster, config.address, 0, external_addr=config.external_address
        )
        body = encode_registration(self._topics.version, map(self._as_permitted, topics))
        frame = Frame(RequestCode.REGISTER_BROKER, ext=write(header), body=body)
        is_known = await self._name_servers.send(frame, informs=is_whole)
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
        """Return the topic, with the broker's own permission if that forbids reading or writing."""
        permission = self._settings.now.permission
        if permission & PERM_READ_WRITE == PERM_READ_WRITE:
            return topic
        return TopicConfig(topic.name, topic.read_queues, topic.write_queues, permission)
