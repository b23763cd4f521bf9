"""Attacks on the limited resources of a broker, each a process: `python -m campaigns._attacks NAME ADDRESS SIZE`.

An attack prints `ready` when it has taken all that it takes, holds it until its standard input ends, and then prints what it
has found.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import orjson
import uvloop
from rocketlet.broker.grpc import schema
from rocketlet.protocol import http2
from rocketlet.protocol.bodies import ConsumerData, Heartbeat, encode_heartbeat
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.config import MAX_SYNCED_LITE_TOPICS
from rocketlet.protocol.frame import FrameReader
from rocketlet.protocol.group_bodies import (
    LiteAction,
    LiteOffset,
    LiteSubscription,
    OffsetPolicy,
    encode_lite_subscription,
)
from rocketlet.protocol.headers import CreateTopic, PullMessage, write
from rocketlet.protocol.names import parse_subscription

from tests.support.peers import GREETING, MAX_FRAME_BYTES, SEND, call_frames, head_block, request

MIB = 1 << 20
TOPIC = "attacked"
QUEUES = 64
BATCH = 200  # requests in flight
WRITE_S = 20.0  # maximum time of a write to a client that the broker does not read

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Found = dict[str, Any]
HELD: list[Streams] = []


async def connect(address: str) -> Streams:
    host, _, port = address.rpartition(":")
    HELD.append(streams := await asyncio.open_connection(host, int(port), limit=4 * MIB))
    return streams


class Client:
    """One connection with many requests in flight. `codes` counts the responses by code."""

    def __init__(self, streams: Streams) -> None:
        self._reader, self._writer = streams
        self._frames = FrameReader()
        self.codes: dict[int, int] = {}

    async def ask(self, requests: list[bytes]) -> None:
        """Raises OSError when the broker closes the connection, TimeoutError when it sends nothing for 60 s."""
        for first in range(0, len(requests), BATCH):
            batch = requests[first : first + BATCH]
            self._writer.write(b"".join(batch))
            left = len(batch)
            while left > 0:
                async with asyncio.timeout(60):
                    data = await self._reader.read(MIB)
                if not data:
                    raise ConnectionResetError("the broker closed the connection")
                for frame in self._frames.feed(data):
                    if frame.is_response:
                        left -= 1
                        self.codes[frame.code] = self.codes.get(frame.code, 0) + 1


async def ask(address: str, requests: Iterable[bytes]) -> Found:
    """Send requests over one connection."""
    client = Client(await connect(address))
    try:
        await client.ask(list(requests))
    except (OSError, TimeoutError) as error:
        return {"responses": client.codes, "ended": repr(error)}
    return {"responses": client.codes}


async def hold(address: str, size: int, parts: Callable[[int], Iterable[bytes]], *, reads: bool = True) -> Found:
    """Let many clients write some parts each, and keep their connections.

    Args:
        address: The address of the broker.
        size: The number of clients.
        parts: The parts of a client, by its number.
        reads: True if the clients read.
    """
    failed = 0
    for number in range(size):
        _, writer = await connect(address)
        if not reads:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        try:
            for part in parts(number):
                writer.write(part)
                async with asyncio.timeout(WRITE_S):
                    await writer.drain()
        except (OSError, TimeoutError):
            failed += 1
    await asyncio.sleep(1)
    return {"opened": size, "failed": failed, "closed": sum(reader.at_eof() for reader, _ in HELD)}


def send(body: bytes = b"x", queue: int = 0) -> bytes:
    return request(Code.SEND_MESSAGE_V2, {**SEND, "b": TOPIC, "e": queue}, body)


def pulls(queues: Iterable[int]) -> bytes:
    headers = (PullMessage("attackers", TOPIC, queue, 0, 32, 4 | 2, 0, 60_000, subscription="*") for queue in queues)
    return b"".join(request(Code.PULL_MESSAGE, write(header), opaque=number) for number, header in enumerate(headers))


def heartbeat(client_id: str, groups: list[str], topics: list[str]) -> bytes:
    subscriptions = tuple(parse_subscription(topic, "*") for topic in topics)
    consumers = tuple(ConsumerData(group, subscriptions=subscriptions) for group in groups)
    return request(Code.HEART_BEAT, {}, encode_heartbeat(Heartbeat(client_id, consumers)))


def creation(topic: str, queues: int) -> bytes:
    return request(Code.UPDATE_AND_CREATE_TOPIC, write(CreateTopic(topic, queues, queues, 6)))


async def connections(address: str, size: int) -> Found:
    """Idle connections."""
    return await hold(address, size, lambda _: ())


async def unread(address: str, size: int) -> Found:
    """Pulls of 256 KiB, 200 by each of many clients that do not read."""
    await ask(address, [send(bytes(60_000))] * 5)
    return await hold(address, size, lambda _: [pulls([0] * 200)], reads=False)


async def woken_pulls(address: str, size: int) -> Found:
    """Clients that hold 200 pulls of one queue each and do not read, while the queue gets messages."""
    found = await hold(address, size, lambda _: [pulls([40] * 200)], reads=False)
    return found | await ask(address, [send(bytes(60_000), queue=40)])


async def unfinished_requests(address: str, size: int) -> Found:
    """60,000 bytes of a request, by each of many clients: each holds too little to be closed for it alone."""
    start = (70_000).to_bytes(4, "big") + (60_000).to_bytes(4, "big") + bytes(59_992)
    return await hold(address, size, lambda _: [start])


async def tag_expressions(address: str, size: int) -> Found:
    """Receives that wait with a tag expression of 60 KB, each of another group and another client id."""
    expression = "||".join(f"{number:057}" for number in range(999))

    def receives(client: int) -> Iterable[bytes]:
        yield GREETING
        for number in range(50):
            name = f"tags-{50 * client + number}"
            receive = schema.ReceiveMessageRequest(
                group={"name": name},
                message_queue={"topic": {"name": TOPIC}, "id": -1},
                filter_expression={"type": 1, "expression": f"{name}||{expression}"},
                batch_size=1,
                auto_renew=True,
            )
            receive.long_polling_timeout.FromSeconds(20)
            yield call_frames(2 * number + 1, "ReceiveMessage", receive, (b"x-mq-client-id", name.encode()))

    return await hold(address, max(size // 50, 1), receives)


def _tiny_frames(stream_id: int, count: int) -> bytes:
    """Return a call whose message has 4 MB, with this many frames of 2 bytes."""
    block = head_block("SendMessage", (b"x-mq-client-id", b"tiny"))
    head = http2.headers_frames(stream_id, block, False, MAX_FRAME_BYTES)
    first = http2.encode(http2.DATA, 0, stream_id, b"\0" + (4_000_000).to_bytes(4, "big"))
    return head + first + count * http2.encode(http2.DATA, 0, stream_id, b"xx")


async def tiny_frames(address: str, size: int) -> Found:
    """Unfinished calls, each with 100,000 frames of 2 bytes."""
    parts = [GREETING, *(_tiny_frames(2 * number + 1, 100_000) for number in range(5))]
    return await hold(address, size, lambda _: parts)


async def groups(address: str, size: int) -> Found:
    """New groups by heartbeats, a hundred in each."""
    names = ([f"flood-{number}" for number in range(at, at + 100)] for at in range(0, size, 100))
    return await ask(address, (heartbeat("attacker", groups, [TOPIC]) for groups in names))


async def pools(address: str, size: int) -> Found:
    """Pops of many topics by 100 groups, once each."""
    topics = [f"popped-{number}" for number in range(max(size // 100, 1))]
    await ask(address, (creation(topic, 1) for topic in topics))
    fields = {"queueId": -1, "maxMsgNums": 1, "invisibleTime": 60_000, "pollTime": 0, "bornTime": 0, "initMode": 1}
    names = ({"topic": topic, "consumerGroup": f"poppers-{number}"} for topic in topics for number in range(100))
    return await ask(address, (request(Code.POP_MESSAGE, {**name, **fields}) for name in names))


async def waiting_receives(address: str, size: int) -> Found:
    """Pops that wait, of 100 groups, on one connection, which is then lost."""
    fields = {"topic": TOPIC, "queueId": -1, "maxMsgNums": 1, "invisibleTime": 60_000, "initMode": 1}
    fields |= {"pollTime": 600_000, "bornTime": 4_000_000_000_000}
    names = ({"consumerGroup": f"waiting-{number % 100}"} for number in range(size))
    pops = (request(Code.POP_MESSAGE, {**name, **fields}, opaque=number) for number, name in enumerate(names))
    return await hold(address, 1, lambda _: pops)


PARENT = "attacked-lite"
NAMES = 10_000  # lite topics of attacks on offsets, syncs and claims; a synchronization has up to 20,000


def names_of_lite(count: int, first: int = 0) -> list[str]:
    return [f"lite-{number}" for number in range(first, first + count)]


async def lite_topics(address: str, count: int) -> Found:
    """Create a parent topic and lite topics."""
    parent = write(CreateTopic(PARENT, 8, 8, 6, attributes="+message.type=LITE"))
    await ask(address, [request(Code.UPDATE_AND_CREATE_TOPIC, parent)])
    sent = {**SEND, "b": PARENT}
    names = names_of_lite(count)
    return await ask(
        address, (request(Code.SEND_MESSAGE_V2, {**sent, "i": f"__LITE_TOPIC\x01{name}"}, b"x") for name in names)
    )


def lite_group(name: str, **attributes: str) -> bytes:
    settings = {"lite.bind.topic": PARENT, "lite.sub.client.quota": "-1", **attributes}
    return request(
        Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, orjson.dumps({"groupName": name, "attributes": settings})
    )


def lite_sync(
    client: str, group: str, action: LiteAction, names: Iterable[str], offset: LiteOffset | None = None
) -> bytes:
    change = LiteSubscription(action, client, group, PARENT, tuple(names))._replace(offset=offset)
    return request(Code.LITE_SUBSCRIPTION_CTL, {}, encode_lite_subscription(change))


async def lite_offsets(address: str, size: int) -> Found:
    """Offsets of groups in lite topics, by the offset option of subscriptions that are then removed."""
    names = names_of_lite(min(NAMES, size))
    await lite_topics(address, len(names))
    groups = [f"offsets-{number}" for number in range(max(size // NAMES, 1))]
    await ask(address, map(lite_group, groups))
    found: Found = {}
    for group in groups:
        add = lite_sync("c", group, LiteAction.PARTIAL_ADD, names, LiteOffset(OffsetPolicy.MAX, 0))
        answers = await ask(address, [add, lite_sync("c", group, LiteAction.COMPLETE_REMOVE, ())])
        for code, count in answers["responses"].items():
            found[code] = found.get(code, 0) + count
    return {"responses": found}


async def lite_syncs(address: str, size: int) -> Found:
    """Synchronizations of 20,000 names, by each of many gRPC clients."""
    await lite_topics(address, 1)
    await ask(address, [lite_group("syncs")])

    def syncs(client: int) -> Iterable[bytes]:
        yield GREETING
        names = names_of_lite(MAX_SYNCED_LITE_TOPICS, client * MAX_SYNCED_LITE_TOPICS)
        sync = schema.SyncLiteSubscriptionRequest(
            action=2, topic={"name": PARENT}, group={"name": "syncs"}, lite_topic_set=names
        )
        yield call_frames(1, "SyncLiteSubscription", sync, (b"x-mq-client-id", b"c%d" % client))

    return await hold(address, size, syncs)


async def lite_names(address: str, size: int) -> Found:
    """Lite topics, each with one message."""
    return await lite_topics(address, size)


async def exclusive_claims(address: str, size: int) -> Found:
    """Clients that claim the lite topics of an exclusive group from each other."""
    names = names_of_lite(min(NAMES, size))
    await lite_topics(address, len(names))
    await ask(address, [lite_group("claims", **{"lite.sub.model": "Exclusive"})])
    clients = range(max(size // NAMES, 1))
    return await ask(address, (lite_sync(f"c{number}", "claims", LiteAction.PARTIAL_ADD, names) for number in clients))


async def registrations(address: str, size: int) -> Found:
    """Brokers that register 200 topics with long names each."""
    topics = {f"{number:0>120}": {"topicName": f"{number:0>120}", "readQueueNums": 1} for number in range(200)}
    table = {name: {**topic, "writeQueueNums": 1, "perm": 6} for name, topic in topics.items()}
    body = orjson.dumps({"topicConfigSerializeWrapper": {"topicConfigTable": table, "dataVersion": {}}})
    fields = {"clusterName": "c", "haServerAddr": "", "brokerId": 0}
    brokers = ({**fields, "brokerName": f"b{number}", "brokerAddr": f"10.0.0.1:{number + 1}"} for number in range(size))
    return await ask(address, (request(Code.REGISTER_BROKER, broker, body) for broker in brokers))


async def flood_of_sends(connections: int, address: str, seconds: int) -> Found:
    """Clients that send as fast as they can, 200 requests at a time."""
    end_s = asyncio.get_running_loop().time() + seconds

    async def flood() -> int:
        client, count = Client(await connect(address)), 0
        while asyncio.get_running_loop().time() < end_s:
            await client.ask([send()] * BATCH)
            count += BATCH
        return count

    return {"sent": sum(await asyncio.gather(*(flood() for _ in range(connections))))}


async def flood_of_frames(connections: int, address: str, seconds: int) -> Found:
    """Clients that write frames of 2 bytes as fast as they can."""
    end_s = asyncio.get_running_loop().time() + seconds

    async def flood() -> int:
        reader, writer = await connect(address)
        reading = asyncio.create_task(reader.read(-1))
        writer.write(GREETING)
        count = 0
        with contextlib.suppress(OSError, TimeoutError):
            while (left_s := end_s - asyncio.get_running_loop().time()) > 0 and not reading.done():
                stream_id = 2 * (count // 20_000) + 1
                writer.write(_tiny_frames(stream_id, 20_000) + http2.encode_reset(stream_id, 8))
                count += 20_000
                async with asyncio.timeout(left_s):
                    await writer.drain()
        reading.cancel()
        writer.transport.abort()
        return count

    return {"frames": sum(await asyncio.gather(*(flood() for _ in range(connections))))}


ATTACKS: dict[str, tuple[Callable[[str, int], Awaitable[Found]], int]] = {
    "connections": (connections, 5000),
    "unread answers": (unread, 60),
    "woken pulls": (woken_pulls, 60),
    "groups": (groups, 5000),
    "sends of 1 connection": (partial(flood_of_sends, 1), 5),
    "sends of 8 connections": (partial(flood_of_sends, 8), 5),
    "frames of 1 connection": (partial(flood_of_frames, 1), 5),
    "frames of 8 connections": (partial(flood_of_frames, 8), 5),
    "unfinished requests": (unfinished_requests, 1200),
    "tag expressions": (tag_expressions, 1000),
    "tiny frames": (tiny_frames, 10),
    "pools": (pools, 100_000),
    "waiting receives": (waiting_receives, 20_000),
    "more waiting receives": (waiting_receives, 100_000),
    "lite offsets": (lite_offsets, 200_000),
    "more lite offsets": (lite_offsets, 400_000),
    "lite synchronizations": (lite_syncs, 30),
    "more lite synchronizations": (lite_syncs, 300),
    "lite names": (lite_names, 20_000),
    "more lite names": (lite_names, 100_000),
    "exclusive claims": (exclusive_claims, 100_000),
    "more exclusive claims": (exclusive_claims, 400_000),
    "registrations": (registrations, 100),
    "more registrations": (registrations, 1000),
}
"""Each with its size when a campaign runs by hand."""

LEAN = frozenset(("unfinished requests", "tag expressions", "tiny frames", "pools", *list(ATTACKS)[12:]))
"""Each of these has a broker of its own, with the smallest budget."""


async def _main(name: str, address: str, size: int) -> None:
    found = await ATTACKS[name][0](address, size)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for _, writer in HELD:
        writer.transport.abort()
    await asyncio.sleep(0.1)
    print(orjson.dumps(found, option=orjson.OPT_NON_STR_KEYS).decode(), flush=True)


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
