"""What arrives on a socket and was made to hurt: the others must not notice, and nothing may be left behind."""

from __future__ import annotations

from typing import Any

import msgpack
import orjson
import pytest
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import JSON, MSGPACK, Frame, encode
from rocketlet.protocol.message import decode_records

from ..conftest import Connect, Node, Wire, create_topic
from .test_pulls import pull


def send_v2(**fields: Any) -> dict[str, Any]:
    """The header of a send to queue 0 of the topic t."""
    return {"a": "p", "b": "t", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "i": "", **fields}


def raw_frame(header: bytes, body: bytes = b"", serialize_type: int = JSON) -> bytes:
    """A frame around header bytes that no encoder of ours would write."""
    size = len(header)
    total = (4 + size + len(body)).to_bytes(4, "big")
    return total + (serialize_type << 24 | size).to_bytes(4, "big") + header + body


async def bodies_of(wire: Wire, topic: str = "t") -> list[bytes]:
    answer = await wire.call(RequestCode.PULL_MESSAGE, pull(topic))
    return [record.body for record in decode_records(answer.body)]


def huge_opaque(serialize_type: int) -> bytes:
    """A send that is refused, with a number that no answer can carry."""
    ext = send_v2(b="no topic")
    if serialize_type == MSGPACK:
        header = msgpack.packb((310, 0, 2**63 + 1, 12, 0, None, ext))
    else:
        fields = {"code": 310, "flag": 0, "language": "JAVA", "version": 0, "extFields": ext}
        header = orjson.dumps(fields)[:-1] + b',"opaque":"%d"}' % 10**30
    return raw_frame(header, b"never", serialize_type)


@pytest.mark.parametrize("serialize_type", [JSON, MSGPACK])
async def test_answers_go_only_to_the_connection_that_asked(
    wire: Wire, connect: Connect, node: Node, serialize_type: int
) -> None:
    await create_topic(wire, "t")
    hostile = await connect(node.address)
    valid = encode(Frame(RequestCode.SEND_MESSAGE_V2, 2, send_v2(), b"first"))  # 2: the victim's next number
    hostile.write(valid + huge_opaque(serialize_type))  # in one read
    assert await hostile.closed()
    for body in (b"a", b"b", b"c"):
        answer = await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(), body)
        offset = int(answer.ext["queueOffset"])
        found = await wire.call(RequestCode.PULL_MESSAGE, pull(offset=offset, max_msg_nums=1))
        assert [record.body for record in decode_records(found.body)] == [body], "the answer is of this message"


@pytest.mark.parametrize("field", ["code", "opaque", "flag", "version"])
@pytest.mark.parametrize("value", [b"2147483648", b"-2147483649", b'"1e3"', b"[]", b"1.5"])
async def test_numbers_of_a_header_have_32_bits(node: Node, connect: Connect, field: str, value: bytes) -> None:
    hostile = await connect(node.address)
    fields = {"code": b"310", "opaque": b"1", "flag": b"0", "version": b"0"} | {field: value}
    hostile.write(raw_frame(b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), text) for name, text in fields.items())))
    assert await hostile.closed()


async def test_what_a_failed_request_staged_is_not_stored(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t")
    store = node.broker.store
    stage, staged = store.stage, []

    def failing(*args: Any, **fields: Any) -> Any:
        staged.append(stage(*args, **fields))
        if len(staged) == 2:
            raise RuntimeError("planted")
        return staged[-1]

    monkeypatch.setattr(store, "stage", failing)
    batch = b"".join(raw_batch_entry(body) for body in (b"one", b"two", b"three"))
    assert (await wire.call(RequestCode.SEND_BATCH_MESSAGE, send_v2(m=True), batch)).code == 1
    answer = await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(), b"next")
    assert (answer.code, int(answer.ext["queueOffset"])) == (0, 0)
    assert await bodies_of(wire) == [b"next"]


def raw_batch_entry(body: bytes) -> bytes:
    size = 22 + len(body)
    return b"".join(number.to_bytes(4, "big") for number in (size, 0, 0, 0, len(body))) + body + b"\0\0"


async def test_a_defect_in_a_handler_closes_only_its_connection(
    node: Node, wire: Wire, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(wire, "t")
    hostile = await connect(node.address)

    def broken(*args: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(node.broker.clients, "answer", broken)
    send = encode(Frame(RequestCode.SEND_MESSAGE_V2, 1, send_v2(), b"first"))
    hostile.write(send + encode(Frame(0, 7, flag=1)))
    with pytest.raises((ConnectionError, TimeoutError)):
        await hostile.answer(99)
    answer = await wire.call(RequestCode.SEND_MESSAGE_V2, send_v2(), b"mine")
    assert int(answer.ext["queueOffset"]) == 1
    assert await bodies_of(wire) == [b"first", b"mine"]
