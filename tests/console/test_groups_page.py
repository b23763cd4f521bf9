"""The pages of groups, of a cluster with members and messages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest
from rocketlet.client import AdminClient, Consumer, Message, Producer, Reject, rebalanced
from rocketlet.client.admin.diagnosis import Examiner, Harm, ObservationTimes, diagnose
from rocketlet.client.wire.connection import Connection
from rocketlet.console.config import COLOURS
from rocketlet.console.group_watch import GroupSnapshot, GroupWatch, MemberRow
from rocketlet.console.server import ConsoleServer
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import Frame
from rocketlet.protocol.group_bodies import SHARED_OWNER
from rocketlet.testing import Cluster

from ..conftest import PATIENCE_S, Node, eventually
from ..support.handlers import Inbox
from .conftest import Site, plain


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


async def test_a_check_of_a_group_costs_four_requests_however_many_queues_it_has(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    request = Connection.request

    async def counted(self: Connection, code: int, *rest: Any, **named: Any) -> Frame:
        if self is ours:  # the consumer has its own
            asked.append(code)
        return await request(self, code, *rest, **named)

    async with AdminClient(node.address) as admin:
        ours = await admin._cluster.connection(node.address)
        await admin.create_topic("orders", queues=200)
        async with Consumer(node.address, "shipping", "orders", Inbox()):
            await rebalanced(node.address, "shipping", members=1)
            watch = GroupWatch(admin, "shipping")
            await watch.refresh()
            with monkeypatch.context() as patch:
                patch.setattr(Connection, "request", counted)
                await watch.poll()
    assert sorted(asked) == sorted(
        (
            RequestCode.GET_BROKER_CLUSTER_INFO,
            RequestCode.GET_CONSUME_STATS,
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            RequestCode.GET_GROUP_HISTORY,
        )
    )
    assert len([queue for queue in watch.look.owners if queue.topic == "orders"]) == 200


async def test_no_event_is_lost_or_shown_twice_where_the_clocks_of_brokers_differ() -> None:
    async with Cluster(brokers=2) as cluster, AdminClient(cluster.address) as admin:

        async def told() -> set[str]:
            reports = await admin.history("g")
            return {str({"broker": report["broker"], **event}) for report in reports for event in report["events"]}

        await cluster.create_topic("orders")
        cluster.brokers[1].clock.advance(minutes=5)
        watch = GroupWatch(admin, "g")
        async with Consumer(cluster.address, "g", "orders", Inbox()):
            await cluster.rebalanced("g", members=1)
            await watch.poll()
            async with Consumer(cluster.address, "g", "orders", Inbox()):
                await cluster.rebalanced("g", members=2)
                await watch.poll()
        before = await told()
        await watch.poll()
        shown = [str(event) for event in watch.events]
        assert before <= set(shown) <= await told()
    assert len(set(shown)) == len(shown)
    assert {event["broker"] for event in watch.events} == {"broker-a", "broker-b"}
    assert [event["ms"] for event in watch.events] == sorted(event["ms"] for event in watch.events)


async def test_a_group_that_nobody_knows_is_said_so(site: Site) -> None:
    assert "no broker knows the group nobody" in await site.text("/groups/nobody", 404)


async def test_a_group_shows_its_members_owners_and_hand_overs(site: Site, node: Node) -> None:
    async with Producer(node.address) as producer:
        await producer.send("orders", b"x")
    async with Consumer(node.address, "shipping", "orders", Inbox()) as first:
        await rebalanced(node.address, "shipping", members=1)
        page = await site.text("/groups/shipping")
        assert "orders [*]" in page
        assert "Rocketlet 0.1.0" in page
        assert "127.0.0.1:" in page
        async with Consumer(node.address, "shipping", "orders", Inbox()) as second:
            await rebalanced(node.address, "shipping", members=2)
            async for name, part in site.stream("/groups/shipping"):
                if name == "live_hand_overs" and "to finish its messages and release" in part:
                    assert "joined" in part
                    break
        html = await site.get("/groups/shipping")
        assert html.count("<rect") >= len(first.assignment()) + len(second.assignment()) - 2


async def test_older_hand_overs_are_on_pages_of_their_own_when_a_member_took_many_queues(
    site: Site, node: Node
) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_topic("orders", queues=60)
    async with Consumer(node.address, "shipping", "orders", Inbox()):
        await rebalanced(node.address, "shipping", members=1)
        await site.get("/groups/shipping")  # a group is observed from its first page on
        async with Consumer(node.address, "shipping", "orders", Inbox()) as second:
            await rebalanced(node.address, "shipping", members=2)
            moved = {str(queue) for queue in second.assignment()}
            async for name, part in site.stream("/groups/shipping"):
                if name == "live_hand_overs" and "25 older" in part:
                    break
            first, last = [await site.get(f"/groups/shipping?window=900&handovers={number}") for number in (1, 9)]
    assert len(moved) == 30
    assert "1–20 of 25 hand-overs" in first
    assert "21–25 of 25 hand-overs" in last
    assert '<details id="older-hand-overs">' in first
    assert '<details id="older-hand-overs" open>' in last
    tables = (
        first[first.index('id="h-hand"') : first.index('id="h-events"')]
        + last[last.index("older-hand-overs") : last.index('id="h-events"')]
    )
    assert set(re.findall(r'class="nowrap">(orders@[^<]+)<', tables)) == moved


async def test_the_queues_of_a_group_are_filtered(site: Site, node: Node) -> None:
    async with Producer(node.address) as producer:
        await producer.send("orders", b"x")
        await producer.send("bills", b"x")
    async with Consumer(node.address, "g", {"orders": "*", "bills": "*"}, Inbox()):
        await rebalanced(node.address, "g", members=1)
        page = await site.get("/groups/g?q=bills")
        assert 'href="/messages?topic=bills&amp;by=offset&amp;broker=broker-a&amp;queue=1' in page
        assert 'href="/messages?topic=orders' not in page


async def test_a_broker_that_is_away_is_reported_on_the_open_page(site: Site, node: Node) -> None:
    async for name, part in site.stream("/groups"):
        if name == "trouble" and not part:
            await node.stop()
        if name == "trouble" and part:
            assert "no name server can be reached" in part
            break
    assert "That did not work" in await site.text("/groups/g", 502)


async def test_the_first_page_shows_what_is_in_trouble_first(site: Site, node: Node) -> None:
    first = await site.http.get(site.url + "/", follow_redirects=True)
    assert (first.url.path, first.status_code) == ("/overview", 200)
    assert "There is no group yet" in first.text
    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "a-well", "orders", Inbox(), start="first") as well,
        Consumer(node.address, "b-rejects", "orders", Inbox(Reject("no such dish")), start="first"),
    ):
        await producer.send("orders", b"x", queue_key="k")
        await eventually(lambda: node.broker.store.queue("%DLQ%b-rejects", 0).next == 1)
        await well.commit()
        html = ""
        while "new dead letters 1" not in plain(html):
            html = await site.get("/overview")
    assert html.index("b-rejects") < html.index("a-well")
    assert "broker-a up" in plain(html)


async def test_a_broadcasting_group_shows_no_lag_and_no_queue_without_an_owner(site: Site, node: Node) -> None:
    inbox = Inbox()
    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "news", "orders", inbox, start="first", broadcasting=True),
    ):
        await producer.send("orders", b"x")
        await eventually(lambda: len(inbox.messages) == 1)
        page = await site.text("/groups/news")
        assert "messages waiting –" in page
        assert "queues without an owner 0" in page
        assert "every member" in page
        assert "news checking 1 orders –" in await site.text("/groups")


@pytest.fixture
async def quick_site(node: Node, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A console that finds a queue stuck after a moment."""
    monkeypatch.setattr("rocketlet.console.console.Examiner", partial(Examiner, watch_s=0.3, stuck_s=0.0))
    async with ConsoleServer(node.address) as server, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        yield Site(server.url, http)


async def text_with(site: Site, path: str, *wanted: str) -> str:
    """The text of a page as soon as it has all of these."""
    text = ""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not all(words in text for words in wanted):
                text = await site.text(path)
    except TimeoutError:
        pytest.fail(f"{path} does not show {wanted}: {text}")
    return text


async def test_every_page_has_the_findings_of_doctor_when_a_handler_hangs(quick_site: Site, node: Node) -> None:
    never = asyncio.Event()

    async def handle(message: Message) -> None:
        await never.wait()

    async with (
        Producer(node.address) as producer,
        Consumer(node.address, "hangs", "orders", handle, start="first"),
        Consumer(node.address, "news", "orders", Inbox(), start="first", broadcasting=True),
        Consumer(node.address, "well", "orders", Inbox(), start="first", commit_interval_s=0.05),
        AdminClient(node.address) as admin,
    ):
        sent = await producer.send("orders", b"x", queue_key="k")
        blocked = f"the oldest is message {sent.message_id} at offset 0 of {sent.queue}"
        for group in ("hangs", "well"):
            await rebalanced(node.address, group, members=1)
        page = await text_with(quick_site, "/groups/hangs", blocked)
        assert "[stuck_queue]" in page
        assert "Nothing that can be seen from here" in await text_with(quick_site, "/groups/well", "up to date")
        assert "Nothing that can be seen from here" in await text_with(quick_site, "/groups/news", "broadcasting")
        for path in ("/overview", "/groups"):
            await text_with(quick_site, path, "hangs stuck queue 1", "news broadcasting 1", "well up to date 1")
        doctor = await text_with(quick_site, "/doctor", blocked)
        assert "Messages wait without progress" in doctor
        assert '<a href="/groups/hangs">hangs</a>' in await quick_site.get("/doctor")
        assert 'title="findings that affect messages now">' in await quick_site.get("/groups")
        by_doctor = [item for item in await diagnose(admin, ObservationTimes(0.0, 0.1, 0.0)) if item.harm < Harm.RISK]
        assert [(item.subject, item.kind) for item in by_doctor if item.kind != "disk"] == [("hangs", "stuck_queue")]
        never.set()


async def test_group_page_says_checking_when_the_group_was_checked_once(site: Site, node: Node) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_topic("orders")
    async with Consumer(node.address, "g", "orders", Inbox()):
        await rebalanced(node.address, "g", members=1)
        page = await site.text("/groups/g")
    assert "Checking: a second look follows" in page
    assert "Nothing that can be seen from here" not in page


async def test_colours_of_members_differ_when_members_come_and_go(node: Node) -> None:
    def member(name: str) -> MemberRow:
        return MemberRow(name, "", "", 0, "", {}, False, 0)

    async with AdminClient(node.address) as admin:
        watch = GroupWatch(admin, "g")
    for round_ in range(5):
        watch.look = GroupSnapshot(members=tuple(member(f"{round_}-{number}") for number in range(COLOURS)))
        colours = [watch.colour(item.client_id) for item in watch.look.members]
        assert sorted(colours, key=int) == [str(number) for number in range(COLOURS)]
    assert watch.colour("0-0") == "gone"
    assert watch.colour(SHARED_OWNER) == "shared"
    kept = watch.colour("4-3")
    watch.look = GroupSnapshot(members=(member("4-3"), *(member(f"new-{number}") for number in range(COLOURS))))
    assert [watch.colour(item.client_id) for item in watch.look.members].count(kept) == 1
    assert watch.colour(f"new-{COLOURS - 1}") == "more"


async def test_metrics_of_the_console_report_the_findings_of_its_pages(site: Site, node: Node) -> None:
    async with AdminClient(node.address) as admin:
        await admin.create_group(GroupConfig("idle"))
    async for name, part in site.stream("/doctor"):
        if name == "live_doctor" and "it has no members" in part:
            break
    answer = await site.http.get(
        site.url + "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    found = re.findall(r"rocketlet_finding\{(.*)\} 1\.0", answer.text)
    assert found == ['about="group",harm="risk",kind="no_members",subject="idle"']
    assert "rocketlet_groups_examined 1.0" in answer.text
