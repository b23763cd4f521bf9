"""A broker's links to its name servers: to the table in its own process, and to others by connections."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable

import structlog

from ...protocol.bodies import Route, decode_route
from ...protocol.codes import RequestCode, ResponseCode
from ...protocol.frame import Frame, FrameError, FrameReader, encode
from ...protocol.headers import TopicName, write
from ...protocol.schema import BodyError
from ...protocol.signature import ACCESS_KEY, SIGNATURE
from ..access.accounts import AclError
from ..access.file import AclFile
from ..config import REGISTER_TIMEOUT_S
from ..listening.tls import Tls
from ..nameserver.routes import Routes

Sign = Callable[[Frame], Frame]


def signing(file: AclFile, access_key: str) -> Sign:
    """Signs frames as one of the accounts, whose secret may change. Raises AclError."""
    if access_key not in file.policy.accounts:
        raise AclError(f"there is no account {access_key} in {file.path}")

    def signed(frame: Frame) -> Frame:
        account = file.policy.accounts.get(access_key)
        if account is None:  # it is gone from the file since: the name server refuses, with a reason
            return frame
        ext = {**frame.ext, ACCESS_KEY: access_key}
        return frame._replace(ext={**ext, SIGNATURE: account.signer.signature(ext, frame.body)})

    return signed


log = structlog.get_logger("rocketlet.registration")


class Link:
    """A connection to one name server or broker, opened when it is needed."""

    def __init__(self, address: str, tls: Tls, sign: Sign | None) -> None:
        self.address = address
        self._tls = tls
        self._sign = sign
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
            if not 0 < int(port) < 65_536:
                raise ValueError(f"{self.address} is no address: its port is none")
            self._streams = await asyncio.open_connection(
                host.strip("[]"), int(port), ssl=self._tls.name_server_context
            )
            self._frames = FrameReader()
        reader, writer = self._streams
        writer.write(encode(self._sign(frame) if self._sign else frame))
        while True:
            data = await reader.read(65_536)
            if not data:
                raise ConnectionResetError(f"{self.address} closed the connection")
            for answer in self._frames.feed(data):
                if answer.is_response and answer.opaque == frame.opaque:
                    return answer

    @property
    def is_fresh(self) -> bool:
        """Whether the server may be a new one: it has hung up, or was never told."""
        return self._streams is None or self._streams[0].at_eof()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class NameServers:
    """`local`: the table of the name server in this process, if there is one. tls: whether and how to encrypt
    links. sign: as which account to ask, if name servers have accounts."""

    def __init__(self, addresses: Iterable[str], local: Routes | None, tls: Tls, sign: Sign | None) -> None:
        self.local = local
        self._links = [Link(address, tls, sign) for address in addresses]

    @property
    def are_elsewhere(self) -> bool:
        """Whether there are name servers in other processes."""
        return bool(self._links)

    @property
    def any_is_fresh(self) -> bool:
        """Whether one of them may know nothing of this broker yet."""
        return any(link.is_fresh for link in self._links)

    async def find_route(self, topic: str) -> Route | None:
        """A topic's route, of the name server in this process or of the first one that answers."""
        if self.local is not None:
            return self.local.route(topic)
        request = Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext=write(TopicName(topic)))
        for link in self._links:
            answer = await self._ask(link, request)
            if answer is not None:
                return _route(link, answer)
        return None

    async def tell(self, frame: Frame) -> bool:
        """Asks all at once; returns when each has answered or failed to. Whether one has taken it."""
        return any(await asyncio.gather(*(self._tell(link, frame) for link in self._links)))

    async def _tell(self, link: Link, frame: Frame) -> bool:
        answer = await self._ask(link, frame)
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
