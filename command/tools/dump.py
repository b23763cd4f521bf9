"""`rocketlet dump PORT --to HOST:PORT`: a proxy between clients and a broker or name server, which shows frames.

The proxy forwards bytes unchanged in both directions, except for routes that it can decode: it replaces the brokers'
addresses in them by ports of this process, so that clients reach the brokers through the proxy as well. Bytes that are
not frames, such as TLS, are forwarded unread.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from ...protocol import bodies
from ...protocol.bodies import BrokerData
from ...protocol.codes import RequestCode
from ...protocol.config import MAX_FRAME_BYTES
from ...protocol.frame import Frame, FrameError, FrameReader, encode
from ..plumbing import numbers
from ..plumbing.output import Output
from ..serving.listening import listening_fault
from .frames import fields, lines

READ_BYTES: Final = 65_536
LENGTH_BYTES: Final = 4
KEPT_REQUESTS: Final = 10_000  # newest unanswered requests of a connection, in each direction, whose codes are kept
HOST: Final = "127.0.0.1"


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = (
        "show the frames between clients and a server: set PORT in the clients, and --to to the address that they had"
    )
    parser = commands.add_parser("dump", help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument(
        "port", type=numbers.port, metavar="PORT", help="the port to listen on for clients; 0 selects a free port"
    )
    parser.add_argument("--host", default=HOST, help=f"the address to listen on (default: {HOST})")
    parser.add_argument(
        "--to", type=_address, default=(HOST, 9876), metavar="HOST:PORT",
        help="the name server or broker (default: 127.0.0.1:9876)",
    )  # fmt: skip
    parser.add_argument(
        "--only", metavar="NAME[,NAME]", help="only these requests and their responses, such as PULL_MESSAGE"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each frame")
    parser.set_defaults(run=_dump, log_level="warning")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), numbers.port(port)


async def _dump(options: argparse.Namespace) -> int:
    only = frozenset(options.only.split(",")) if options.only else None
    if only and (unknown := sorted(only - RequestCode.__members__.keys())):
        print(f"rocketlet: no request is called {', '.join(unknown)}; names are as in PULL_MESSAGE", file=sys.stderr)
        return 1
    dump = Dump(options.host, Output(as_json=options.json), only)
    try:
        port = await dump.listen(options.port, options.to)
    except OSError as error:
        print(f"rocketlet: {listening_fault(error, options.host, options.port)}", file=sys.stderr)
        return 1
    dump.output.text(f"give clients {options.host}:{port}; it leads to {options.to[0]}:{options.to[1]}")
    try:
        await asyncio.get_running_loop().create_future()  # until Ctrl-C
    finally:
        dump.close()
    return 0


class Dump:
    """Listens in place of one name server or broker, and of each broker in the routes that it returns."""

    def __init__(self, host: str, output: Output, only: frozenset[str] | None = None) -> None:
        self.output = output
        self._host = host
        self._only = only
        self._servers: list[asyncio.Server] = []
        self._ports: dict[tuple[str, int], int] = {}  # by the host and port that the port forwards to
        self._numbers = itertools.count(1)

    async def listen(self, port: int, to: tuple[str, int]) -> int:
        """Listen for connections to forward to one address, and return the port. Raises OSError."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._serve(to, reader, writer)
            except asyncio.CancelledError:
                pass  # Ctrl-C: Python 3.11 would log it as an error
            finally:
                writer.close()

        server = await asyncio.start_server(connected, self._host, port)
        self._servers.append(server)
        self._ports[to] = found = int(server.sockets[0].getsockname()[1])
        return found

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _serve(self, to: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        conversation = Conversation(next(self._numbers), f"{to[0]}:{to[1]}")
        try:
            there = await asyncio.open_connection(*to)
        except (OSError, OverflowError, ValueError) as error:  # the port or the host of the address is invalid
            self.output.text(f"[{conversation.number}] cannot connect to {conversation.to}: {error}")
            writer.close()
            return
        ways = (
            self._pass(reader, there[1], Direction(conversation, is_answer=False)),
            self._pass(there[0], writer, Direction(conversation, is_answer=True)),
        )
        try:
            await asyncio.gather(*ways)
        except OSError:
            pass  # one side has closed its connection, so the other one is closed, too
        finally:
            for other in (writer, there[1]):
                other.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Direction) -> None:
        """Forward bytes until one side closes its connection. Raises OSError if a connection breaks."""
        while data := await reader.read(READ_BYTES):
            for piece, frame in way.read(data):
                shown = piece if frame is None else await self._shown(way, piece, frame)
                _check_open(writer)
                writer.write(shown)
            await writer.drain()
        _check_open(writer)
        writer.write_eof()

    async def _shown(self, way: Direction, piece: bytes, frame: Frame) -> bytes:
        """Print a frame unless --only excludes it, and return the bytes to forward."""
        asked = way.asked(frame)
        self._show(way, frame, asked)
        if asked in (RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_BROKER_CLUSTER_INFO) and not frame.code:
            return await self._rerouted(frame, asked) or piece
        return piece

    def _show(self, way: Direction, frame: Frame, asked: int | None) -> None:
        found = fields(frame, asked)
        if self._only is not None and found["request"] not in self._only:
            return
        now_s, conversation = time.time(), way.conversation
        if self.output.as_json:
            sender = "broker" if way.is_answer else "client"
            said = {
                "at_ms": int(now_s * 1000),
                "connection": conversation.number,
                "to": conversation.to,
                "from": sender,
            }
            self.output.json(said | found)
            return
        clock = time.strftime("%H:%M:%S", time.localtime(now_s)) + f".{int(now_s % 1 * 1000):03d}"
        arrow = "<-" if way.is_answer else "->"
        first, *rest = lines(frame, asked)
        self.output.text(f"{clock} [{conversation.number}] {arrow} {first}", *rest)

    async def _rerouted(self, frame: Frame, asked: int) -> bytes | None:
        """Return a route response with ports of this process in place of brokers' addresses; None if it cannot be
        decoded, or if this process cannot listen for one of them."""
        try:
            if asked == RequestCode.GET_BROKER_CLUSTER_INFO:
                body = bodies.encode_cluster(await self._reached(bodies.decode_cluster(frame.body)))
            else:
                route = bodies.decode_route(frame.body)
                body = bodies.encode_route(replace(route, brokers=tuple(await self._reached(route.brokers))))
        except (OSError, ValueError):  # BodyError, or an address without a port
            return None
        return encode(frame._replace(body=body))

    async def _reached(self, brokers: Iterable[BrokerData]) -> list[BrokerData]:
        return [replace(broker, addresses=await self._addresses(broker.addresses)) for broker in brokers]

    async def _addresses(self, addresses: Mapping[int, str]) -> dict[int, str]:
        found: dict[int, str] = {}
        for number, address in addresses.items():
            host, _, port = address.rpartition(":")
            to = host.strip("[]"), int(port)
            own_port = self._ports.get(to) or await self.listen(0, to)
            found[number] = f"{self._host}:{own_port}"
        return found


def _check_open(writer: asyncio.StreamWriter) -> None:
    """Raise ConnectionResetError if a connection is closed. uvloop's transports would raise RuntimeError, asyncio's
    nothing."""
    if writer.is_closing():
        raise ConnectionResetError("the connection is closed")


@dataclass(slots=True)
class Conversation:
    """One connection, with the codes of its unanswered requests in each direction by opaque number."""

    number: int
    to: str
    asked: dict[bool, dict[int, int]] = field(default_factory=lambda: {False: {}, True: {}})


class Direction:
    """One direction of a connection. `is_answer` is True for that from the broker to the client."""

    def __init__(self, conversation: Conversation, *, is_answer: bool) -> None:
        self.conversation = conversation
        self.is_answer = is_answer
        self._waiting = b""
        self._is_readable = True

    def read(self, data: bytes) -> list[tuple[bytes, Frame | None]]:
        """Return the received bytes, split into frames, and keep the rest. After bytes that are not a frame, return all
        bytes as they arrive."""
        if not self._is_readable:
            return [(data, None)]
        data = self._waiting + data
        self._waiting = b""
        found: list[tuple[bytes, Frame | None]] = []
        while len(data) >= LENGTH_BYTES:
            size = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big")
            try:
                if len(data) < size <= MAX_FRAME_BYTES:
                    break
                (frame,) = FrameReader().feed(data[:size])
            except (FrameError, ValueError):
                self._is_readable = False
                return [*found, (data, None)]
            found.append((data[:size], frame))
            data = data[size:]
        self._waiting = data
        return found

    def asked(self, frame: Frame) -> int | None:
        """Return the code of the request to which a frame responds, or 0 if it is unknown; None if the frame is a request.
        Record the code of a request that expects a response."""
        if not frame.is_response:
            if not frame.is_oneway:
                asked = self.conversation.asked[self.is_answer]
                asked[frame.opaque] = frame.code
                if len(asked) > KEPT_REQUESTS:
                    del asked[next(iter(asked))]
            return None
        return self.conversation.asked[not self.is_answer].pop(frame.opaque, 0)
