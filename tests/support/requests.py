"""Requests as foreign clients write them, for tests that speak plain frames (`Wire`). The group is g, the topic t."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from rocketlet.protocol import bodies, group_bodies
from rocketlet.protocol.bodies import ConsumerData, Heartbeat, Route
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import JSON, ExtValue, Frame
from rocketlet.protocol.group_bodies import LockRequest
from rocketlet.protocol.headers import EndTransaction, PullMessage, SendMessage, write
from rocketlet.protocol.message import Record, decode_records
from rocketlet.protocol.names import Queue, parse_subscription
from rocketlet.protocol.properties import find

from ..conftest import Node, Wire

SUBSCRIBED = 0x4
SUSPEND = 0x2
QUEUE = Queue("t", "broker-a", 0)
COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
HALF_PROPERTIES = "TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01u1\x02TAGS\x01a\x02WAIT\x01true"
REPLY_PROPERTIES = "CORRELATION_ID\x01c1\x02REPLY_TO_CLIENT\x01{}\x02MSG_TYPE\x01reply"


# Sends


def send_v2(**fields: Any) -> dict[str, Any]:
    """The header of a send to queue 0 of the topic t."""
    return {"a": "p", "b": "t", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "i": "", **fields}


def write_send_v2(header: SendMessage) -> dict[str, ExtValue]:
    ext: dict[str, ExtValue] = {
        "a": header.producer_group,
        "b": header.topic,
        "c": header.default_topic,
        "d": header.default_topic_queue_nums,
        "e": header.queue_id,
        "f": header.sys_flag,
        "g": header.born_timestamp,
        "h": header.flag,
        "i": header.properties,
        "j": header.reconsume_times,
        "k": False,
        "m": header.batch,
    }
    if header.max_reconsume_times is not None:
        ext["l"] = header.max_reconsume_times
    return ext


async def send(
    wire: Wire, body: bytes = b"x", *, topic: str = "t", queue: int = 0, tag: str = "", **fields: Any
) -> Frame:
    properties = f"TAGS\x01{tag}" if tag else ""
    header = SendMessage("p", topic, "TBW102", 4, queue, 0, int(time.time() * 1000), 0, properties)
    return await wire.call(RequestCode.SEND_MESSAGE_V2, write_send_v2(header._replace(**fields)), body)


async def half(wire: Wire, body: bytes = b"pay", queue: int = 1, **fields: Any) -> Frame:
    sent = await send(wire, body, queue=queue, properties=HALF_PROPERTIES, sys_flag=4, **fields)
    assert (sent.code, sent.ext["queueId"]) == (0, str(queue))
    return sent


def end(sent: Frame, outcome: int, group: str = "p", **fields: Any) -> dict[str, Any]:
    position = int(str(sent.ext["msgId"])[-16:], 16)
    header = EndTransaction(group, int(sent.ext["queueOffset"]), position, outcome, msg_id="u1")
    return write(header._replace(**fields))


def reply(client: str) -> dict[str, str | int | bool]:
    header = SendMessage("r", "DefaultCluster_REPLY_TOPIC", "TBW102", 4, 0, 0, int(time.time() * 1000), 0)
    return write_send_v2(header._replace(properties=REPLY_PROPERTIES.format(client)))


# Pulls


def pull(
    topic: str = "t", *, queue: int = 0, offset: int = 0, flags: int = SUBSCRIBED, **fields: Any
) -> dict[str, Any]:
    header = PullMessage("g", topic, queue, offset, 32, flags, 0, 15_000, subscription="*")
    return write(header._replace(**fields))


async def bodies_of(wire: Wire, topic: str = "t") -> list[bytes]:
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(topic))
    return [record.body for record in decode_records(answer.body)]


# Pops


def pop(topic: str = "t", **fields: Any) -> dict[str, Any]:
    return {
        "consumerGroup": "g",
        "topic": topic,
        "queueId": -1,
        "maxMsgNums": 32,
        "invisibleTime": 60_000,
        "pollTime": 0,
        "bornTime": 0,
        "initMode": 1,
        **fields,
    }


async def popped(wire: Wire, **fields: Any) -> list[Record]:
    answer = await wire.call(RequestCode.POP_MESSAGE, pop(**fields))
    return list(decode_records(answer.body)) if answer.code == 0 else []


def ack(record: Record, **fields: Any) -> dict[str, Any]:
    return {
        "consumerGroup": "g",
        "topic": "t",
        "queueId": record.queue_id,
        "extraInfo": find(record.properties, "POP_CK"),
        "offset": record.queue_offset,
        **fields,
    }


# Membership


async def heartbeat(wire: Wire, group: str = "g", topic: str = "t", expression: str = "*", **fields: Any) -> None:
    await join(wire, "c1", topic, group=group, expression=expression, **{"version": 10, **fields})


async def beat(wire: Wire, client_id: str, topics: dict[str, str] | None = None, group: str = "g") -> Frame:
    subscriptions = tuple(parse_subscription(topic, text, version=1) for topic, text in (topics or {"t": "*"}).items())
    body = bodies.encode_heartbeat(Heartbeat(client_id, (ConsumerData(group, subscriptions=subscriptions),)))
    return await wire.call(RequestCode.HEART_BEAT, body=body)


async def join(
    wire: Wire,
    client_id: str,
    topic: str = "t",
    *,
    group: str = "g",
    expression: str = "*",
    version: int = 1,
    producers: tuple[str, ...] = (),
    **fields: Any,
) -> None:
    data = ConsumerData(group, subscriptions=(parse_subscription(topic, expression, version=version),), **fields)
    body = bodies.encode_heartbeat(Heartbeat(client_id, (data,), producers))
    assert (await wire.call(RequestCode.HEART_BEAT, body=body)).code == 0


async def commit(wire: Wire, offset: int, queue: int = 0, group: str = "g", topic: str = "t") -> None:
    ext = {"consumerGroup": group, "topic": topic, "queueId": queue, "commitOffset": offset}
    assert (await wire.call(RequestCode.UPDATE_CONSUMER_OFFSET, ext)).code == 0


async def members(wire: Wire, **ext: str) -> list[str]:
    answer = await wire.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g", **ext})
    return group_bodies.decode_members(answer.body) if answer.code == 0 else []


def routes_known_later(node: Node) -> asyncio.Event:
    """The broker does not know what a change moves before this is set."""
    allotment, known = node.broker.draining.allotment, asyncio.Event()
    find_route = allotment.routes.find_route

    async def found_later(topic: str) -> Route | None:
        await known.wait()
        return await find_route(topic)

    allotment.routes = SimpleNamespace(find_route=found_later)
    return known


async def lock(wire: Wire, client_id: str, *, handover: bool = True, code: int = RequestCode.LOCK_BATCH_MQ) -> Frame:
    body = group_bodies.encode_lock_request(LockRequest(client_id, "g", (QUEUE,), handover))
    return await wire.call(code, body=body)


# Frames


def raw_frame(header: bytes, body: bytes = b"", serialize_type: int = JSON) -> bytes:
    """A frame around header bytes that no encoder of ours would write."""
    size = len(header)
    total = (4 + size + len(body)).to_bytes(4, "big")
    return total + (serialize_type << 24 | size).to_bytes(4, "big") + header + body


def value(answer: Frame) -> Any:
    assert answer.code == 0, answer.remark
    return bodies.loads(answer.body)
