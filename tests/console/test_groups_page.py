"""The pages of groups, of a cluster with members and messages."""

from __future__ import annotations

from rocketlet.client import Consumer, Producer, settled

from ..conftest import Node, eventually
from ..handlers import Inbox
from .conftest import Site


async def test_groups_are_listed_with_lag_members_and_dead_letters(site: Site, node: Node) -> None:
    inbox = Inbox()
    async with Producer(node.address) as producer:
        for _ in range(3):
            await producer.send("orders", b"x")
        async with Consumer(node.address, "shipping", "orders", inbox, start="first"):
            await eventually(lambda: len(inbox.messages) == 3)
        for _ in range(5):
            await producer.send("orders", b"y")
    page = await site.text("/groups")
    assert "shipping no members 0 orders 5" in page
    assert "shipping" not in await site.text("/groups?q=bill")
    assert "shipping" in await site.text("/groups?q=SHIP&sort=lag")
    assert "CID_RMQ_SYS" not in page


async def test_a_group_that_nobody_knows_is_said_so(site: Site) -> None:
    assert "no broker knows the group nobody" in await site.text("/groups/nobody", 404)


async def test_a_group_shows_its_members_owners_and_hand_overs(site: Site, node: Node) -> None:
    async with Producer(node.address) as producer:
        await producer.send("orders", b"x")
    async with Consumer(node.address, "shipping", "orders", Inbox()) as first:
        await settled(node.address, "shipping", members=1)
        page = await site.text("/groups/shipping")
        assert "orders [*]" in page
        assert "Python 4.9.8" in page
        assert "127.0.0.1:" in page
        async with Consumer(node.address, "shipping", "orders", Inbox()) as second:
            await settled(node.address, "shipping", members=2)
            async for name, part in site.stream("/groups/shipping"):
                if name == "live_hand_overs" and "to finish its messages and let go" in part:
                    assert "joined" in part
                    break
        html = await site.get("/groups/shipping")
        assert html.count("<rect") >= len(first.assignment()) + len(second.assignment()) - 2


async def test_the_queues_of_a_group_are_filtered(site: Site, node: Node) -> None:
    async with Producer(node.address) as producer:
        await producer.send("orders", b"x")
        await producer.send("bills", b"x")
    async with Consumer(node.address, "g", {"orders": "*", "bills": "*"}, Inbox()):
        await settled(node.address, "g", members=1)
        page = await site.get("/groups/g?q=bills")
        assert 'href="/messages?topic=bills&amp;by=offset&amp;broker=broker-a&amp;queue=1' in page
        assert 'href="/messages?topic=orders' not in page


async def test_a_broker_that_is_away_is_told_on_the_open_page(site: Site, node: Node) -> None:
    async for name, part in site.stream("/groups"):
        if name == "trouble" and not part:
            await node.stop()
        if name == "trouble" and part:
            assert "no name server can be reached" in part
            break
    assert "That did not work" in await site.text("/groups/g", 502)
