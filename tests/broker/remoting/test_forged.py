"""A place in the log that a client names is answered only if an index names it: bodies may look like records."""

from __future__ import annotations

import pytest
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.message import decode_record
from structlog.testing import capture_logs

from ...conftest import Node, Wire, create_topic
from ...support import forged
from ...support.requests import bodies_of, send


async def test_a_record_in_a_body_has_no_id(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    await create_topic(wire, "u")
    await send(wire, b"real", topic="u")
    at = node.broker.store.end + forged.HEAD_BYTES
    await send(wire, forged.next_body(node.broker.store, b"FORGED"))
    assert node.broker.store._log.record_at(at) is not None, "the body is a record, if one believes it"
    answer = await wire.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": at})
    assert (answer.code, answer.body) == (ResponseCode.SYSTEM_ERROR, b"")


async def test_a_record_in_a_body_cannot_be_sent_back(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    at = node.broker.store.end + forged.HEAD_BYTES
    await send(wire, forged.next_body(node.broker.store, b"FORGED"))
    back = {"offset": at, "group": "g", "delayLevel": -1, "originMsgId": "", "originTopic": "u", "unitMode": False}
    assert (await wire.call(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("topic", ["t", "u"])
async def test_a_message_is_found_where_an_index_has_it(node: Node, wire: Wire, topic: str) -> None:
    await create_topic(wire, topic)
    at = node.broker.store.end
    await send(wire, b"real", topic=topic)
    answer = await wire.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": at})
    assert decode_record(answer.body).body == b"real"
    node.broker.store.delete_topic(topic)
    assert (await wire.call(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": at})).code == ResponseCode.SYSTEM_ERROR


async def test_a_message_damaged_while_the_broker_runs_is_skipped_and_named(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t")
    for number in range(5):
        await send(wire, b"message-%d" % number)
    (segment,) = (node.broker.config.data_dir / "commitlog").iterdir()
    data = segment.read_bytes()
    segment.write_bytes(data.replace(b"message-2", b"massage-2"))
    with capture_logs() as logs:
        assert await bodies_of(wire) == [b"message-0", b"message-1", b"message-3", b"message-4"]
        assert await bodies_of(wire) == [b"message-0", b"message-1", b"message-3", b"message-4"]
    found = [(log["topic"], log["queue"], log["offset"]) for log in logs if log["event"] == "damaged_message_skipped"]
    assert found == [("t", 0, 2)]
    assert node.broker.store.damaged == {("t", 0, 2)}
