"""Messages that retention deletes before a group has read them are lost for it, and nobody waits for them any more."""

from __future__ import annotations

from rocketlet.client import AdminClient
from rocketlet.client.admin.diagnosis import Harm, ObservationTimes, diagnose
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import Queue
from structlog.testing import capture_logs

from ...conftest import Connect, Nodes, create_topic, eventually
from ...support.metrics import samples
from ...support.requests import commit, send, value


async def test_expired_messages_are_reported_by_group_and_are_no_lag(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(metrics_port=0, segment_bytes=2_000, retain_hours=1)
    wire = await connect(node.address)
    await create_topic(wire, "t", 1)
    for _ in range(40):
        await send(wire)
    await commit(wire, 0, group="at-0")  # where a member that began at the first message has committed
    await commit(wire, 40, group="ready")
    with capture_logs() as logs:
        node.clock.advance(2 * 3600)
        await node.broker.expire_segments()
        await eventually(lambda: any(node.broker.progress.lost()))
    begin = node.broker.store.queues["t", 0].begin
    assert 0 < begin < 40
    expired = [line for line in logs if line["event"] == "messages_expired_unread"]
    assert [(line["group"], line["topic"], line["messages"]) for line in expired] == [("at-0", "t", begin)]
    metric = "rocketlet_messages_expired_unread_total"
    told = {labels: count for (name, labels), count in (await samples(node)).items() if name == metric}
    assert told == {frozenset({("group", "at-0"), ("topic", "t")}): begin}
    wire = await connect(node.address)  # the clock that was moved has closed the first as idle
    table = value(await wire.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "at-0", "topic": "t"}))[
        "offsetTable"
    ]
    assert [item["brokerOffset"] - item["consumerOffset"] for item in table.values()] == [40 - begin]
    async with AdminClient(node.address) as admin:
        await admin.create_group(GroupConfig("at-0"))
        at = Queue("t", "broker-a", 0)
        found = {group: (await admin.progress(group, "t"))[at] for group in ("at-0", "ready", "never")}
        findings = [one for one in await diagnose(admin, ObservationTimes(0, 0, 0)) if one.kind == "retention"]
    assert {group: (item.lag, item.lost) for group, item in found.items()} == {
        "at-0": (40 - begin, begin),
        "ready": (0, 0),
        "never": (40 - begin, 0),  # it has read nothing: where it will begin is its members' affair
    }
    assert [(one.harm, one.subject) for one in findings] == [(Harm.LOSS, "at-0")]
    assert f"{begin:,} message" in findings[0].text
