"""The console in the machine's Chromium: every page, a live rebalance, dead letters, hostile bodies, themes, keys.

`pytest tests/console/test_browser.py --screenshots docs/images` makes the pictures of docs/console.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from rocketlet.client import Consumer, Message, Producer, Reject, rebalanced

from ..conftest import Node, eventually
from ..support.browser import Window, Windows
from ..support.handlers import Inbox
from .conftest import LONG, filled

pytestmark = pytest.mark.browser
HOSTILE = '<script>window.hacked = 1</script><img src="x" onerror="window.hacked = 2">'
# A screen reader needs labels for fields, headers for tables, one heading, landmarks, ids that are there once.
FAULTS = """() => {
  const faults = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  for (const field of all("input:not([type=hidden]), select, textarea")) {
    if (!field.labels?.length && !field.ariaLabel) faults.push("no label: " + field.outerHTML);
  }
  for (const table of all("table")) {
    if (table.querySelectorAll("thead th[scope=col]").length < 2) faults.push("a table without headers");
    if (!table.closest("[role=group][aria-label][tabindex]")) faults.push("a table that cannot be scrolled by keys");
  }
  for (const picture of all("svg")) if (!picture.ariaLabel) faults.push("a picture without words");
  for (const image of all("img")) if (image.alt === null) faults.push("an image without alt");
  for (const button of all("button, a")) if (!button.innerText.trim() && !button.ariaLabel) faults.push(button.outerHTML);
  if (all("h1").length !== 1) faults.push("not one h1");
  if (!document.querySelector("main") || !document.querySelector("nav[aria-label]")) faults.push("no landmarks");
  const named = all("section[aria-labelledby], nav[aria-label]").map((item) =>
    item.ariaLabel ?? document.getElementById(item.getAttribute("aria-labelledby")).innerText);
  for (const name of named) if (named.indexOf(name) !== named.lastIndexOf(name)) faults.push("two landmarks: " + name);
  if (!document.documentElement.lang) faults.push("no language");
  const ids = all("[id]").map((item) => item.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) faults.push("twice: " + id);
  for (const item of all("main *")) {
    if (getComputedStyle(item).overflowY === "auto" && item.tabIndex < 0) faults.push("no keys scroll: " + item.tagName);
  }
  if (document.documentElement.scrollWidth > innerWidth + 1) faults.push("wider than the window");
  return faults;
}"""


async def test_every_page_opens_and_can_be_read_aloud(windows: Windows, node: Node) -> None:
    async with AsyncExitStack() as stack:
        message = await filled(node, stack)
        window = await windows.new()
        for path in (
            "/overview",
            "/groups",
            "/groups/shipping",
            "/groups/billing/dead",
            "/groups/shipping/reset",
            "/groups/shipping/settings",
            "/new/group",
            "/topics?system=1",
            "/topics/orders",
            f"/topics/{LONG}",
            f"/groups/{LONG}",
            "/topics/orders/tail",
            "/topics/orders/settings",
            "/new/topic",
            "/messages?topic=orders",
            "/messages?topic=orders&by=key&value=order-1",
            message,
            "/trace",
            "/jobs",
            "/brokers",
            "/brokers/broker-a",
            "/doctor",
        ):
            await window.open(path)
            for width in (1180, 320):
                await window.page.set_viewport_size({"width": width, "height": 760})
                assert await window.page.evaluate(FAULTS) == [], (path, width)
        grounds: dict[Literal["light", "dark"], str] = {"light": "rgb(246, 247, 249)", "dark": "rgb(20, 23, 28)"}
        for theme, ground in grounds.items():
            window = await windows.new(theme=theme, height=480)
            await window.open("/groups")
            await window.has("#pulse.on")
            assert await window.page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
            await window.picture(f"console-groups-{theme}")


async def test_a_rebalance_is_seen_as_it_happens(windows: Windows, node: Node) -> None:
    async with Producer(node.address) as producer, Consumer(node.address, "shipping", "orders", Inbox(), start="first"):
        await producer.send("orders", b"x")
        await rebalanced(node.address, "shipping", members=1)
        window = await windows.new(height=900)
        await window.open("/groups/shipping")
        await window.has("#live_timeline rect.owner-0")
        assert await window.page.query_selector("#live_timeline rect.owner-1") is None
        async with Consumer(node.address, "shipping", "orders", Inbox()):
            await window.has("#live_timeline rect.owner-1")
            await window.has("#live_hand_overs >> text=to finish its messages and release")
            await window.has("#live_members tbody tr:nth-child(2)")
            await window.has("#live_timeline .mark")
            async with Consumer(node.address, "shipping", "orders", Inbox()):
                await window.has("#live_timeline rect.owner-2")
            await window.has("#live_members tbody tr:nth-child(2):last-child")
            await window.picture("console-rebalance")
        await window.has("#live_members tbody tr:only-child")


async def test_dead_letters_are_replayed_with_the_mouse(windows: Windows, node: Node) -> None:
    is_broken, mended = True, Inbox()

    async def handle(message: Message) -> Reject | None:
        if is_broken:
            return Reject()
        await mended(message)
        return None

    async with Producer(node.address) as producer, Consumer(node.address, "g", "orders", handle, start="first"):
        for body in (b"one", b"two", b"three"):
            await producer.send("orders", body)
        await rebalanced(node.address, "g", members=1)  # a group that no broker knows has no page
        window = await windows.new(height=480)
        await window.open("/groups/g")
        await window.has("#live_summary .figure.bad dd >> text=3")
        is_broken = False
        await window.page.click("text=Dead letters >> nth=0")
        await window.page.check("tr:has-text('two') input[name=place]")
        await window.picture("console-dead-letters")
        await window.page.click("text=Dry run")
        assert "Resend 1 message to the retry topic of g?" in await window.text("h1")
        assert mended.messages == []
        await window.page.click("button:has-text('Resend')")
        assert "The replay of 1 message to the retry topic of g has started" in await window.text("#notice")
        await eventually(lambda: mended.bodies == [b"two"])
        await window.has("#live_job >> text=done")
        await window.page.click("a.button >> text=Dead letters")
        await window.page.check("[data-all=place]")
        await window.page.select_option("[name=to]", "topic")
        await window.page.click("text=Dry run")
        await window.page.click("button:has-text('Resend')")
        assert "The replay of 3 messages to orders has started" in await window.text("#notice")
        await eventually(lambda: len(mended.messages) == 4)


async def test_all_dead_letters_are_selected_when_the_box_is_checked_before_the_script_has_loaded(
    windows: Windows, node: Node
) -> None:
    loads = asyncio.Event()

    async def late(route: Any) -> None:
        await loads.wait()
        await route.continue_()

    async with Producer(node.address) as producer, Consumer(node.address, "g", "orders", reject, start="first"):
        for body in (b"one", b"two"):
            await producer.send("orders", body)
        await rebalanced(node.address, "g", members=1)
        window = await windows.new(height=480)
        await window.open("/groups/g")
        await window.has("#live_summary .figure.bad dd >> text=2")
        await window.page.route("**/console.js*", late)
        await window.page.goto(f"{window.url}/groups/g/dead", wait_until="commit")
        await window.page.check("[data-all=place]")
        assert await window.page.locator("[name=place]:checked").count() == 0
        loads.set()
        await window.page.wait_for_load_state()
        assert await window.page.locator("[name=place]:checked").count() == 2


async def reject(message: Message) -> Reject:
    return Reject()


async def test_nothing_in_a_message_runs(windows: Windows, node: Node) -> None:
    async with Producer(node.address) as producer:
        sent = await producer.send("orders", HOSTILE.encode(), tag="T", keys="<b>", properties={HOSTILE: HOSTILE})
        window = await windows.new()
        for path in (
            f"/messages/orders/{sent.queue.broker_name}/{sent.queue.queue_id}/{sent.queue_offset}",
            "/messages?topic=orders",
            f"/messages?topic=orders&by=key&value={HOSTILE}",
            "/topics/orders/tail",
        ):
            await window.open(path)
            assert await window.page.evaluate("window.hacked") is None, path
        assert HOSTILE in await window.text("#live_messages")
        await window.page.focus("#live_messages .scroll")
        await producer.send("orders", (HOSTILE + " it came live").encode())
        await window.has("#live_messages >> text=it came live")
        assert await window.page.evaluate("document.activeElement.className") == "scroll", (
            "who scrolls by keys scrolls on"
        )
        assert await window.page.evaluate("window.hacked") is None
        assert await window.page.evaluate("document.querySelectorAll('main img, main script').length") == 0


async def test_message_opens_beside_its_list_in_a_wide_window(windows: Windows, node: Node) -> None:
    async with Producer(node.address) as producer:
        sent = await producer.send("orders", HOSTILE.encode(), keys="k-1")
    window = await windows.new()
    await window.open("/messages?topic=orders")
    await window.page.click("a[data-panel]")
    await window.has("#panel >> text=k-1")
    assert HOSTILE in await window.text("#panel pre")
    assert await window.text("#panel-title") == sent.message_id
    assert await window.page.evaluate("window.hacked") is None
    assert (await window.page.get_attribute("#panel a:has-text('hex')", "href") or "").endswith("0?as=hex")
    await window.picture("message-panel-1400-light")
    await window.page.keyboard.press("Escape")
    assert not await window.page.is_visible("#panel")
    assert await window.page.evaluate("document.activeElement.matches('a[data-panel]')")
    await window.page.set_viewport_size({"width": 768, "height": 900})
    async with window.page.expect_navigation():
        await window.page.click("a[data-panel]")
    assert "/messages/orders/" in window.page.url


async def test_the_theme_is_switched_and_kept_and_keys_go_where_they_should(windows: Windows, node: Node) -> None:
    window = await windows.new(theme="light")
    await window.open("/topics")
    await window.page.keyboard.press("Tab")
    assert await window.page.evaluate("document.activeElement.className") == "skip"
    await window.page.keyboard.press("/")
    assert await window.page.evaluate("document.activeElement.name") == "q"
    await window.page.click("#theme")
    assert await window.text("#theme") == "Light", "what the button changes to"
    await window.open("/groups")
    assert await window.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    await window.page.click("#theme")
    assert await window.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"


async def test_a_page_that_nobody_sees_gives_its_stream_back_and_works_without_scripts(
    windows: Windows, node: Node
) -> None:
    async with AsyncExitStack() as stack:
        await filled(node, stack)
        window = await windows.new()
        await window.open("/groups")
        await window.has("#pulse.on")
        await window.page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: true}); document.dispatchEvent(new Event('visibilitychange'))"
        )
        await window.has("#pulse:not(.on)")
        plain = await windows.new(scripts=False)
        await plain.open("/groups/shipping")
        assert "orders@broker-a:0" in await plain.text()


# Every page in six ways, at 360, 768 and 1,400 px, light and dark: nothing is cut, hidden, crooked or hard to read.
# The agreement is about geometry and colours, not pixels, so that it holds with the fonts of any machine. `pytest
# tests/console/test_browser.py --screenshots DIR` keeps a picture of each page in each way, to be looked through.


WIDTHS = (360, 768, 1400)
THEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
TOPIC = "orders-of-all-shops"
JUDGE = (Path(__file__).parent / "judge.js").read_text()
STYLE = """(text) => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(text);
  document.adoptedStyleSheets = [sheet];
}"""
Going = Callable[[Window], Awaitable[None]]


@asynccontextmanager
async def busy(node: Node) -> AsyncIterator[str]:
    """A cluster with something on every page; the path of a message."""
    async with AsyncExitStack() as stack:
        producer = await stack.enter_async_context(Producer(node.address, "checkout"))
        inbox = Inbox(Reject("a long reason why nobody can cook this: the kitchen has no such dish on its list"))
        for group, handler in (("shipping-and-handling", Inbox()), ("billing", inbox)):
            await stack.enter_async_context(Consumer(node.address, group, TOPIC, handler, start="first"))
        for number in range(12):
            body = b'{"order": %d, "dish": "a dish with a name that is rather long", "total": 9.95}' % number
            sent = await producer.send(TOPIC, body, tag="new", keys=f"a-key-by-which-it-is-found-{number}")
        for group in ("shipping-and-handling", "billing"):
            await rebalanced(node.address, group, members=1)
        await eventually(lambda: node.broker.store.queue("%DLQ%billing", 0).next == 12)
        async with Consumer(node.address, "shipping-and-handling", TOPIC, Inbox()):
            await rebalanced(node.address, "shipping-and-handling", members=2)
        await rebalanced(node.address, "shipping-and-handling", members=1)
        yield f"/messages/{TOPIC}/{sent.queue.broker_name}/{sent.queue.queue_id}/{sent.queue_offset}"


def loaded(path: str) -> Going:
    async def go(window: Window) -> None:
        await window.open(path)

    return go


def sent(path: str, button: str, **fields: str) -> Going:
    """A form, filled in and sent; browsers check some fields themselves, which is switched off here."""

    async def go(window: Window) -> None:
        await window.open(path)
        await window.page.evaluate("document.querySelectorAll('form').forEach((form) => (form.noValidate = true))")
        for name, value in fields.items():
            field = window.page.locator(f"main [name={name}]").first
            if value == "on":
                await field.check()
            elif await field.evaluate("(it) => it.tagName") == "SELECT":
                await field.select_option(value)
            else:
                await field.fill(value)
        async with window.page.expect_navigation():
            await window.page.click(f"main button:has-text('{button}')")

    return go


def pages(message: str) -> dict[str, Going]:
    place = message.removeprefix("/messages/")
    return {
        "overview": loaded("/overview"),
        "groups": loaded("/groups"),
        "group": loaded("/groups/shipping-and-handling"),
        "group-in-trouble": loaded("/groups/billing"),
        "group-reset": loaded("/groups/billing/reset"),
        "group-reset-fault": sent("/groups/billing/reset", "Preview", to="offsets", offsets="broker-a 0 1"),
        "group-reset-sure": sent("/groups/billing/reset", "Preview", to="first"),
        "group-settings": loaded("/groups/billing/settings"),
        "group-new": loaded("/new/group"),
        "group-new-fault": sent("/new/group", "Create", group="a b", retries="3"),
        "dead-letters": loaded("/groups/billing/dead"),
        "dead-letters-fault": sent("/groups/billing/dead", "Dry run"),
        "dead-letters-sure": sent("/groups/billing/dead", "Dry run", which="all"),
        "topics": loaded("/topics?system=1"),
        "topic": loaded(f"/topics/{TOPIC}"),
        "topic-live": loaded(f"/topics/{TOPIC}/tail"),
        "topic-settings": loaded(f"/topics/{TOPIC}/settings"),
        "topic-new": loaded("/new/topic"),
        "messages": loaded("/messages"),
        "messages-found": loaded(f"/messages?topic={TOPIC}"),
        "messages-by-offset": loaded(f"/messages?topic={TOPIC}&by=offset&broker=broker-z"),
        "message": loaded(message),
        "message-copy": loaded(f"/new/message?copy={place}"),
        "message-fault": sent("/new/message", "Send", topic="nothing", body="x", tag="a || b"),
        "message-sure": sent(f"/new/message?copy={place}", "Send"),
        "brokers": loaded("/brokers"),
        "broker": loaded("/brokers/broker-a"),
        "doctor": loaded("/doctor"),
        "trouble": loaded("/topics/nothing"),
    }


async def test_every_page_is_as_agreed_in_all_six_ways(
    windows: Windows, node: Node, request: pytest.FixtureRequest
) -> None:
    found: list[str] = []
    is_kept = request.config.getoption("--screenshots")
    async with busy(node) as message:
        window = await windows.new()
        window.expected = "Failed to load resource"  # a fault has the status 400
        for name, go in pages(message).items():
            await go(window)
            for theme, width in product(THEMES, WIDTHS):
                await window.page.emulate_media(color_scheme=theme)
                await window.page.set_viewport_size({"width": width, "height": 900})
                found += [f"{name}, {width} px, {theme}: {fault}" for fault in await window.page.evaluate(JUDGE)]
                if is_kept:
                    await window.picture(f"{name}-{width}-{theme}", full=True)
    assert not found, "\n".join(found)


async def test_the_judge_sees_what_is_wrong(windows: Windows, node: Node) -> None:
    window = await windows.new(width=768)
    for style, fault in {
        "main { width: 2000px }": "the page is",
        "h1 { font-size: 9px }": "text of 9.0 px",
        ".top nav a { color: #999 !important }": "contrast of",
        ".figure dd { height: 0 }": "overlap",
        ".filters button { height: 50px }": "crooked",
        ".filters button { width: 20px; padding: 0 }": "cut",
        ".top nav a { padding: 0; line-height: 12px }": "too small",
    }.items():
        await window.open("/groups")
        await window.page.evaluate(
            STYLE,
            style,
        )
        assert fault in str(await window.page.evaluate(JUDGE)), style
