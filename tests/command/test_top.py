"""The columns of `rocketlet top`."""

from __future__ import annotations

import pytest
from rocketlet.client import AdminClient, Consumer, rebalanced
from rocketlet.client.admin.diagnosis import Examiner
from rocketlet.command.tools.top import _caught_up, _look

from ..conftest import Node, Wire, create_topic, eventually
from ..support.handlers import Inbox


@pytest.mark.parametrize(
    ("lag", "out_per_s", "gains_per_s", "told"),
    [
        (0, 0, 0, "now"),
        (50, 10, 0, "now"),  # messages under way
        (51, 10, 0, "never, at this rate"),
        (1, 0, 0, "never, at this rate"),
        (120, 10, 2, "1 min 0 s"),
        (7200, 10, 1, "2 h 0 min"),
    ],
)
def test_a_group_has_caught_up_when_it_reads_what_is_left_in_a_moment(
    lag: int, out_per_s: int, gains_per_s: float, told: str
) -> None:
    assert _caught_up(lag, out_per_s, gains_per_s) == told


async def test_groups_have_the_findings_of_doctor(node: Node, wire: Wire) -> None:
    await create_topic(wire, "t", 1)
    async with (
        Consumer(node.address, "off", "t", Inbox()),
        Consumer(node.address, "well", "t", Inbox()),
        AdminClient(node.address) as admin,
    ):
        for group in ("off", "well"):
            await rebalanced(node.address, group, members=1)
        await admin.change_group("off", consume_enable=False)
        examiner = Examiner(admin, watch_s=0)

        async def findings() -> dict[str, str]:
            return {row["group"]: row["findings"] for row in (await _look(admin, examiner)).groups}

        assert await findings() == {"off": "checking", "well": "checking"}

        async def is_seen() -> bool:
            return await findings() == {"off": "consumption_off", "well": "none"}

        await eventually(is_seen)
