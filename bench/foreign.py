"""Requests of foreign clients, with JSON headers and with RocketMQ's binary ones, on our broker and on Apache's: sends of
1 KB and pulls of 32 messages, with 1, 16 and 128 in flight on one connection. The frames are made beforehand, so that
nearly all of the time is the broker's."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, cast

from rocketlet.client.wire.cluster import ClusterView
from rocketlet.protocol.codes import PULL_SUBSCRIPTION, VERSION, Language, RequestCode
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, Ext, ExtValue, Frame, encode
from rocketlet.protocol.headers import PullMessage, write

from . import runner
from .drain import fill
from .peers import Peer
from .runner import BODY

NAMES = ("rocketlet", "apache", "apache-5")
IN_FLIGHT = (1, 16, 128)
SECONDS = 2.0
TOPIC = "foreign"
BACKLOG = 32_000
ENCODINGS = {"JSON": JSON, "binary": ROCKETMQ}
# as Apache's Java client writes them
PROPERTIES = "KEYS\x01order-4711\x02UNIQ_KEY\x017F0000010000251A69D7000000000000\x02WAIT\x01true\x02TAGS\x01new"


def send_fields(topic: str, queue: int = 0, *, properties: str = "", batch: bool = False) -> dict[str, ExtValue]:
    """Return the header of a send (SEND_MESSAGE_V2)."""
    return {
        "a": "foreign", "b": topic, "c": "TBW102", "d": 4, "e": queue, "f": 0, "g": int(time.time() * 1000), "h": 0,
        "i": properties, "j": 0, "k": False, "m": batch,
    }  # fmt: skip


def sends(serialize_type: int) -> list[bytes]:
    fields = send_fields(TOPIC, properties=PROPERTIES)
    return [frame(RequestCode.SEND_MESSAGE_V2, fields, BODY, serialize_type, opaque) for opaque in range(1, 1001)]


def pulls(serialize_type: int) -> list[bytes]:
    header = PullMessage("foreign", TOPIC, 0, 0, 32, PULL_SUBSCRIPTION, 0, 0, 0, "*", "TAG")
    headers = [write(header._replace(queue_offset=offset)) for offset in range(0, BACKLOG, 32)]
    code = RequestCode.PULL_MESSAGE
    return [frame(code, fields, b"", serialize_type, opaque) for opaque, fields in enumerate(headers, 1)]


def frame(code: int, ext: Ext, body: bytes = b"", serialize_type: int = MSGPACK, opaque: int = 1) -> bytes:
    """Return a request of our client, whose headers are MessagePack, or of a Java client."""
    language = Language.PYTHON if serialize_type == MSGPACK else Language.JAVA
    return encode(Frame(code, opaque, ext, body, 0, None, int(language), VERSION, serialize_type))


class Load(asyncio.Protocol):
    """Keeps requests in flight until the time is up. An answer that is no success ends the program."""

    def __init__(self, frames: list[bytes], in_flight: int, seconds: float) -> None:
        self._frames: Iterator[bytes] = itertools.cycle(frames)
        self._in_flight = in_flight
        self._end_s = time.perf_counter() + seconds
        self._rest = b""
        self._transport: asyncio.WriteTransport | None = None
        self.answered = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self._ask(self._in_flight)

    def _ask(self, count: int) -> None:
        assert self._transport is not None
        self._transport.write(b"".join(itertools.islice(self._frames, count)))

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at = count = 0
        while len(data) - at >= 4 and (after := at + 4 + int.from_bytes(data[at : at + 4], "big")) <= len(data):
            head = data[at + 8 : at + 100]
            if not (b'"code":0,' in head if data[at + 4] == JSON else head.startswith(b"\0\0")):
                self._end(RuntimeError(f"the broker refused a request: {data[at:after][:400]!r}"))
                return
            at = after
            count += 1
        self._rest = data[at:]
        self.answered += count
        if time.perf_counter() < self._end_s:
            self._ask(count)
        elif self.answered:
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionError("the broker closed the connection"))

    def _end(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error) if error else self.done.set_result(None)


async def measure(peer: Peer, address: str, frames: list[bytes], in_flight: int, seconds: float) -> runner.Values:
    host, _, port = address.rpartition(":")
    watch, loop = runner.Stopwatch(peer), asyncio.get_running_loop()
    transport, load = await loop.create_connection(lambda: Load(frames, in_flight, seconds), host, int(port))
    await load.done
    clock_s, _, broker_s = watch.read_s()
    transport.close()
    return {"requests_per_s": load.answered / clock_s, "broker_us": broker_s / load.answered * 1e6}


async def prepared(peer: Peer) -> str:
    """Fill the topic, and return the address of its broker."""
    await fill(peer.address, BACKLOG, (TOPIC,), queues=1)
    cluster = ClusterView(peer.address)
    route = await cluster.find_route(TOPIC)
    assert route is not None
    address = (await cluster.broker(route.queues[0].broker_name)).address
    await cluster.close()
    return address


async def run(options: argparse.Namespace) -> Mapping[str, Any]:
    loads = {
        f"{what} {encoding} {count}": (frames, count)
        for encoding, kind in ENCODINGS.items()
        for what, frames in (("sends", sends(kind)), ("pulls of 32", pulls(kind)))
        for count in IN_FLIGHT
    }

    async def prepare(peer: Peer, _: AsyncExitStack) -> runner.Cases:
        address = await prepared(peer)
        return {
            case: partial(measure, peer, address, frames, count, options.seconds)
            for case, (frames, count) in loads.items()
        }

    figures = await runner.compare(options, NAMES, prepare, warm_ups=1)  # the JVM's
    figures.show("Requests of foreign clients: kind, headers, in flight", "requests_per_s")
    return figures.record()


if __name__ == "__main__":
    made = runner.parser(__doc__, NAMES)
    made.add_argument("--seconds", type=runner.positive, default=SECONDS)
    runner.main("foreign", made, run)
