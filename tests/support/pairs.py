"""Two brokers that get the same bytes, one with the compiled module and one without, and what they answer and store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from rocketlet.broker.broker import BrokerController
from rocketlet.broker.config import BATCH_TURN_BYTES, BATCH_TURN_MESSAGES, BrokerConfig
from rocketlet.broker.messages import sending
from rocketlet.broker.nameserver import Routes
from rocketlet.broker.remoting import connection, dispatch
from rocketlet.broker.remoting.connection import RemotingConnection
from rocketlet.broker.runtime import turns
from rocketlet.broker.server import Listening, Serve, Server, Taps
from rocketlet.protocol import fast
from rocketlet.protocol.bodies import TopicConfig
from rocketlet.testing.clock import MovableClock

from .peers import Peer

REPORTED_BYTES = 300


class Pair:
    """Two brokers with the same clock, of which the first uses the compiled module for sends."""

    def __init__(self, folder: Path) -> None:
        clock = MovableClock(stands=True)
        self.nodes = [Node(folder / name, clock, is_compiled=name == "compiled") for name in ("compiled", "pure")]
        self._compared = 0

    def put_topic(self, config: TopicConfig) -> None:
        for node in self.nodes:
            node.broker.topics.put(config, node.broker.store.end)

    def delete_topic(self, name: str) -> None:
        for node in self.nodes:
            if node.broker.topics.get(name) is not None:
                node.broker.topics.delete(name, node.broker.store.end)
                node.broker.store.delete_topic(name)

    @property
    def taken(self) -> int:
        """Sends that the compiled module has taken."""
        return self.nodes[0].taken

    @property
    def repeated(self) -> int:
        """Pulls that the compiled module has repeated."""
        return self.nodes[0].repeated

    async def difference(self, reads: list[bytes]) -> str | None:
        """Return what differs after both brokers have read the same bytes; None if nothing does."""
        with still():
            for node in self.nodes:
                for data in reads:
                    if not node.peer.socket.is_closed:
                        node.peer.send(data)
            while not all(node.is_done for node in self.nodes):
                await asyncio.sleep(0)
        seen = [node.seen() for node in self.nodes]
        if seen[0] != seen[1]:
            at = next((at for at, (one, other) in enumerate(zip(*seen, strict=False)) if one != other), 0)
            shown = (data[max(at - REPORTED_BYTES, 0) : at + REPORTED_BYTES] for data in seen)
            return "responses differ at {}: {!r} and {!r}".format(at, *shown)
        ends = [node.broker.store.end for node in self.nodes]
        if ends[0] != ends[1]:
            return f"the logs end at {ends[0]} and {ends[1]}"
        size = ends[0] - self._compared
        if size and len({node.broker.store.read_log(self._compared, size) for node in self.nodes}) > 1:
            return f"the logs differ after {self._compared}"
        if self.nodes[0].indexes() != self.nodes[1].indexes():
            return f"the indexes differ after {self._compared}"
        self._compared = ends[0]
        return None


def in_python(serve: Serve) -> Serve:
    """Return the function without the compiled module."""

    def served(connection: RemotingConnection) -> None:
        with mock.patch.object(dispatch, "IS_COMPILED", False):
            serve(connection)

    return served


class Node:
    def __init__(self, folder: Path, clock: MovableClock, *, is_compiled: bool) -> None:
        routes = Routes(clock)
        config = BrokerConfig(folder, "127.0.0.1:9", name="broker-a", vip_channel=False)
        with mock.patch("rocketlet.broker.store.log.secrets.token_bytes", bytes):  # marks are the same in both
            self.broker = BrokerController(config, routes, clock)
        taps = Taps() if is_compiled else Taps(serve=in_python)
        self.server = Server(Listening("127.0.0.1", 0), broker=self.broker, routes=routes, taps=taps)
        self.taken = self.repeated = 0
        take = self.broker.store.take_pulls
        self.broker.store.take_pulls = lambda *args: self._count_pulls(take(*args))
        stage = self.broker.store.stage_sends
        self.broker.store.stage_sends = lambda *args: self._count(stage(*args))  # type: ignore[method-assign]
        self.peer = Peer(self.server, 1)

    @property
    def is_done(self) -> bool:
        """Whether everything that the broker has read is served."""
        return self.peer.socket.is_closed or self.peer.connection.is_reading

    def _count(self, taken: fast.EncodedSends | None) -> fast.EncodedSends | None:
        self.taken += taken.sends if taken is not None else 0
        return taken

    def _count_pulls(self, served: fast.ServedPulls | None) -> fast.ServedPulls | None:
        self.repeated += served.served if served is not None else 0
        return served

    def seen(self) -> bytes:
        """Return what the client has received; it connects again if its connection was closed."""
        data, self.peer.socket.written = b"".join(self.peer.socket.written), []
        if self.peer.socket.is_closed:
            self.peer.connection.connection_lost(None)
            self.peer = Peer(self.server, 1)
            data += b" closed"
        return data

    def indexes(self) -> object:
        """Return each queue's state and entries."""
        return [
            (key, queue.begin, queue.next, queue.put_bytes, queue.entries(queue.begin, queue.next - queue.begin))
            for key, queue in sorted(self.broker.store.queues.items())
        ]


@contextlib.contextmanager
def still() -> Iterator[None]:
    """No piece of work is ever over, and the broker chooses the first queue: chance decides nothing. Batches that are stored
    in pieces without the compiled module are not taken by it, because they would be answered, and get their marks, with
    the sends before them."""
    clock = SimpleNamespace(**vars(time) | {"perf_counter": lambda: 0.0})
    body, properties, _, _, *pieces = sending._RUN_LIMITS
    limits = body, properties, BATCH_TURN_BYTES, BATCH_TURN_MESSAGES, *pieces
    with (
        mock.patch.object(turns, "time", clock),
        mock.patch.object(dispatch, "time", clock),
        mock.patch.object(connection, "time", clock),
        mock.patch.object(sending, "_RUN_LIMITS", limits),
        mock.patch.object(sending, "random", SimpleNamespace(randrange=lambda count: 0)),
    ):
        yield
