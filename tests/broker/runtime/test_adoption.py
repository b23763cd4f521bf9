"""State files with entries that cannot be adopted: the broker starts, keeps these entries in a file and reports them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from rocketlet.broker.config import HANDOVER_LEASE_S, Limits
from rocketlet.broker.store.files import read_state, write_state
from rocketlet.broker.store.journals import POPS_JOURNAL, Frames, Journal
from rocketlet.client import AdminClient
from rocketlet.client.admin.diagnosis import findings_of_brokers
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.group_bodies import PULL, LockRequest, RequestMode
from rocketlet.testing.clock import MovableClock

from ...conftest import Connect, Node, Nodes, peer
from ...support.locks import make_locks
from ...support.requests import QUEUE, commit, pop, send
from ...support.topics import put


def entry_added(name: str, entry: Any) -> Callable[[Path], None]:
    """Return a function that adds an entry to a state file."""

    def add(folder: Path) -> None:
        path = folder / name
        value: Any = read_state(path)
        write_state(path, {**(value or {}), **entry})

    return add


def line_added(name: str, line: Any) -> Callable[[Path], None]:
    return lambda folder: Journal(folder / name).append(line)


def frame_added(folder: Path) -> None:
    frames = Frames(folder / POPS_JOURNAL)
    frames.append(b"another release wrote this")
    frames.close()


FAULTS = {
    "topics": line_added("topics.json", {"topicName": 7}),
    "groups": line_added("groups.json", {"groupName": "g2", "retryQueueNums": "many"}),
    "offsets": entry_added("offsets.json", {"t@g2": {"zero": 1}}),
    "handed-over offsets": line_added("offsets.json", [["t", "g2"]]),
    "lite offsets": entry_added("lite_offsets.json", {"t@g2": 7}),
    "request modes": lambda folder: write_state(folder / "modes.json", [7]),
    "recalled messages": line_added("recalled.json", [1, "t"]),
    "popped messages": frame_added,
}


WRONG_SHAPES = {
    "topics.json": ({"a": 7}, 7, {"topics": [], "deleted": {"a": None}}),
    "groups.json": (7,),
    "offsets.json": (7, {"rewinds": 7}, {"identities": 7}),
    "recalled.json": (7,),
    "lite_offsets.json": (7, {"t": 7}, {"t": {"identity": "i", "queues": {"0": [0, {"a": None}]}}}),
    "delays.json": (7, {"1": None}),
    "timers.json": (7, {"delivered": 7}),
    "transactions.json": (7, {"checks": 7}),
}
WRONG_LINES = {
    "topics.json": (7, {"deleted": 7, "at": 1 << 40}),
    "offsets.json": (7,),
    "lite_offsets.json": (7, {}, ["t", "g", "i", 7], ["t", "i", "a", 0, None]),
}


def shape_written(name: str, value: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).with_suffix(".old").unlink(missing_ok=True)
        write_state(folder / name, value)

    return write


async def used(node: Node, connect: Connect) -> None:
    """Give a broker state of each kind."""
    put(node)
    node.broker.group_configs.put(GroupConfig("g"))
    node.broker.request_modes.put(RequestMode("t", "g", PULL))
    wire = await connect(node.address)
    for _ in range(2):
        assert (await send(wire, queue=0)).code == 0
    await commit(wire, 1)
    assert (await wire.call(RequestCode.POP_MESSAGE, pop(consumerGroup="h", queueId=0, maxMsgNums=1))).code == 0


@pytest.mark.parametrize("part", FAULTS)
async def test_broker_starts_without_an_entry_that_it_cannot_adopt(
    nodes: Nodes, connect: Connect, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node = await nodes.start()
    await used(node, connect)
    await node.stop()
    folder = node.config.data_dir
    FAULTS[part](folder)
    again = await nodes.start(port=int(node.address.rpartition(":")[2]))
    assert "state_not_adopted" in capsys.readouterr().out
    (kept,) = (folder / "damaged").iterdir()
    assert kept.name.startswith(part.replace(" ", "-"))
    assert again.broker.offsets.get("g", "t", 0) == 1
    assert again.broker.group_configs.get("g") is not None
    assert again.broker.topics.get("t") is not None
    (pool,) = again.broker.pops.pools.all
    assert [len(deliveries.unfinished) for deliveries in pool.queues.opened()] == [1]
    async with AdminClient(again.address) as admin:
        (finding,) = [finding for finding in await findings_of_brokers(admin, {}) if finding.kind == "not_adopted"]
    assert f"1 of {part}" in finding.text
    assert kept.name in finding.text


@pytest.mark.parametrize(
    "fault",
    [
        *(
            pytest.param(shape_written(name, value), id=f"{name}-{number}")
            for name, values in WRONG_SHAPES.items()
            for number, value in enumerate(values)
        ),
        *(
            pytest.param(line_added(name, line), id=f"{name}-line-{number}")
            for name, lines in WRONG_LINES.items()
            for number, line in enumerate(lines)
        ),
    ],
)
async def test_broker_starts_and_saves_when_a_state_file_has_an_unexpected_shape(
    nodes: Nodes, fault: Callable[[Path], None]
) -> None:
    node = await nodes.start()
    put(node)
    await node.stop()
    fault(node.config.data_dir)
    again = await nodes.start(port=int(node.address.rpartition(":")[2]))
    assert len(again.broker.runtime.adoption.faults) == 1
    (kept,) = (node.config.data_dir / "damaged").iterdir()
    assert orjson.loads(kept.read_bytes()) is not None
    put(again, "another")
    await again.stop()


async def test_topics_of_records_are_restored_when_the_state_file_has_an_unexpected_shape(
    nodes: Nodes, connect: Connect
) -> None:
    node = await nodes.start()
    await used(node, connect)
    await node.stop()
    shape_written("topics.json", {"a": 7})(node.config.data_dir)
    again = await nodes.start(port=int(node.address.rpartition(":")[2]))
    assert again.broker.topics.get("t") is not None


async def test_entries_are_kept_as_they_were(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start()
    await used(node, connect)
    await node.stop()
    folder = node.config.data_dir
    FAULTS["offsets"](folder)
    await nodes.start(port=int(node.address.rpartition(":")[2]))
    (kept,) = (folder / "damaged").iterdir()
    assert orjson.loads(kept.read_bytes()) == [["t@g2", {"zero": 1}]]


@pytest.mark.limits(max_offsets=1)
async def test_popped_queue_beyond_the_limit_of_offsets_does_not_stop_the_start(nodes: Nodes, connect: Connect) -> None:
    node = await nodes.start(limits=Limits())
    await used(node, connect)
    await node.stop()
    (node.config.data_dir / "offsets.json").unlink()
    (node.config.data_dir / "offsets.old").unlink(missing_ok=True)
    write_state(node.config.data_dir / "offsets.json", {"t@g": {"0": 1}, "popped": {}})
    again = await nodes.start(port=int(node.address.rpartition(":")[2]))
    assert not again.broker.pops.pools.all
    assert "1 of popped messages" in again.broker.runtime.adoption.faults[0]


def test_queue_whose_lease_cannot_be_adopted_is_granted_to_nobody_for_a_lease(tmp_path: Path) -> None:
    clock = MovableClock(stands=True)
    locks = make_locks(tmp_path, clock)
    assert locks.lock(LockRequest("c1", "g", (QUEUE,), True), peer())

    class Unreadable(dict[Any, Any]):
        def get(self, key: object, default: object = None) -> Any:
            raise KeyError("an index that nobody expected")

    again = make_locks(tmp_path, clock, queues=Unreadable())
    wanted = LockRequest("c2", "g", (QUEUE,), True)
    assert again.lock(wanted, peer()) == {}
    clock.advance(HANDOVER_LEASE_S - 0.1)
    assert again.lock(wanted, peer()) == {}
    clock.advance(0.2)
    assert again.lock(wanted, peer())


async def test_only_the_user_of_the_broker_may_read_its_files(node: Node, connect: Connect) -> None:
    await used(node, connect)
    await node.stop()
    readable = [path for path in node.config.data_dir.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert readable == []
