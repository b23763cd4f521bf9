"""Requests that are answered later: one limit for all of them, and nothing is half done because of it."""

from __future__ import annotations

import gc

import pytest
from rocketlet.broker.config import HELD_PULL_BYTES, Limits
from rocketlet.broker.runtime import MovableClock
from rocketlet.protocol.codes import RequestCode as Code
from rocketlet.protocol.codes import ResponseCode
from rocketlet.protocol.frame import Frame, encode

from campaigns.frames import Peer

from ...conftest import Connect, Node, Nodes, Wire, create_topic, eventually
from ...support.requests import heartbeat, join, pull, send


async def test_long_requests_are_limited_with_flush_sync_too(nodes: Nodes) -> None:
    node = await nodes.start(flush="sync", limits=Limits(max_answering=0))
    peer = Peer(node.server, 1)
    peer.send(encode(Frame(Code.GET_ALL_TOPIC_CONFIG, 1)))
    (refused,) = peer.received()
    assert (refused.code, "try again later" in (refused.remark or "")) == (1, True)
    peer.hang_up()


async def test_a_topic_whose_deletion_is_refused_is_still_there(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start()
    wire = await connect(node.address)
    await create_topic(wire, "t")
    assert (await send(wire)).code == 0
    await node.stop()
    node = await nodes.start(limits=Limits(max_answering=0))
    wire = await connect(node.address)
    refused = await wire.call(Code.DELETE_TOPIC_IN_BROKER, {"topic": "t"})
    assert (refused.code, "try again later" in (refused.remark or "")) == (1, True)
    assert node.broker.topics.get("t") is not None
    await node.stop()
    node = await nodes.start()
    wire = await connect(node.address)
    assert (await wire.call(Code.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})).ext["offset"] == "1"
    assert (await wire.call(Code.DELETE_TOPIC_IN_BROKER, {"topic": "t"})).code == 0
    assert node.broker.topics.get("t") is None


async def test_an_answer_that_cannot_be_given_costs_nobody_elses(
    nodes: Nodes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.start(flush="sync")
    assert node.broker.flusher is not None
    wire = await connect(node.address)
    await create_topic(wire, "t")

    def fail() -> None:
        raise RuntimeError("a defect")

    node.broker.flusher.after_sync(fail, fail)
    assert (await send(wire)).code == 0
    assert (await send(wire)).code == 0, "and the flusher goes on"


async def test_a_deletion_is_answered_when_it_is_on_the_device(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(flush="sync")
    wire = await connect(node.address)
    await create_topic(wire, "t")
    node.broker.store.fail("the device is gone")
    answer = await wire.call(Code.DELETE_TOPIC_IN_BROKER, {"topic": "t"})
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE


async def test_a_request_that_has_not_begun_when_the_broker_stops_is_closed(nodes: Nodes) -> None:
    """Else Python says that it was never awaited, which is an error here."""
    node = await nodes.start()
    peer = Peer(node.server, 1)
    peer.send(encode(Frame(Code.DELETE_TOPIC_IN_BROKER, 1, {"topic": "t"})))
    await node.broker.tasks.stop()
    gc.collect()
    peer.hang_up()


async def test_a_pull_that_waits_for_a_heartbeat_is_counted_charged_and_answered_at_the_end(
    nodes: Nodes, connect: Connect
) -> None:
    node = await nodes.start(clock=MovableClock(stands=True))
    wire = await connect(node.address)
    await create_topic(wire, "t")
    await heartbeat(wire)
    (connection,) = node.server.connections
    before = connection.held_bytes()
    opaque = wire.send(Code.PULL_MESSAGE, pull(flags=0, sub_version=11))
    await eventually(lambda: connection.held_pulls == 1)
    assert connection.held_bytes() > before + HELD_PULL_BYTES
    node.broker.held_pulls.answer_all()
    assert (await wire.answer(opaque)).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    assert connection.held_pulls == 0


async def test_a_body_that_a_waiting_request_does_not_need_is_not_kept(
    wire: Wire, connect: Connect, node: Node
) -> None:
    """The tool's request waits for a member that never answers."""
    await join(wire, "c1")
    tool = await connect(node.address)
    asked = {"consumerGroup": "g", "clientId": "c1", "jstackEnable": "false"}
    body = b"x" * 1_000_000
    tool.send(Code.GET_CONSUMER_RUNNING_INFO, asked, body)
    assert not (await wire.request(Code.GET_CONSUMER_RUNNING_INFO)).body
    kept = [found for found in gc.get_objects() if isinstance(found, Frame) and len(found.body) == len(body)]
    assert kept == []
