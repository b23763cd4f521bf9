"""The console in the machine's Chromium: every page, a live rebalance, dead letters, hostile bodies, themes, keys.

`pytest tests/console/test_browser.py --screenshots docs/images` makes the pictures of docs/console.md.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from rocketlet.client import AdminClient, Consumer, Message, Producer, Reject, settled
from rocketlet.protocol.group_config import GroupConfig

from ..conftest import PATIENCE_S, Node, eventually
from ..support.handlers import Inbox
from .conftest import Site

playwright = pytest.importorskip("playwright.async_api", reason="needs Playwright: pip install playwright")
if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH"),
]
# Without a sandbox, because tests may run as root; without what a browser asks of its maker's hosts.
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
LONG = "a" * 100
HOSTILE = '<script>window.hacked = 1</script><img src="x" onerror="window.hacked = 2">'
# What a screen reader needs: labels for fields, headers for tables, one heading, landmarks, ids that are there once.
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


class Window:
    """A page of the browser that fails the test for what its console reports."""

    def __init__(self, page: Page, url: str, pictures: Path) -> None:
        self.page = page
        self.url = url
        self._pictures = pictures
        self.faults: list[str] = []
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("dialog", lambda dialog: self.faults.append(f"a dialog: {dialog.message}"))

    def _note(self, kind: str, text: str) -> None:
        if kind == "error":
            self.faults.append(text)

    async def open(self, path: str) -> None:
        await self.page.goto(self.url + path)

    async def text(self, selector: str = "main") -> str:
        return str(await self.page.inner_text(selector))

    async def has(self, selector: str) -> None:
        await self.page.wait_for_selector(selector)

    async def picture(self, name: str) -> None:
        path = self._pictures / f"{name}.png"
        await self.page.screenshot(path=path)
        assert path.stat().st_size > 10_000


class Windows:
    def __init__(self, browser: Browser, site: Site, pictures: Path) -> None:
        self._browser = browser
        self._site = site
        self._pictures = pictures
        self.opened: list[Window] = []

    async def new(
        self, *, theme: Literal["light", "dark"] = "light", scripts: bool = True, width: int = 1180, height: int = 760
    ) -> Window:
        context = await self._browser.new_context(
            color_scheme=theme, java_script_enabled=scripts, viewport={"width": width, "height": height}
        )
        self.opened.append(Window(await context.new_page(), self._site.url, self._pictures))
        return self.opened[-1]


@pytest.fixture
async def windows(site: Site, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Windows]:
    pictures = request.config.getoption("--screenshots") or tmp_path
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        found = Windows(browser, site, pictures)
        yield found
        await browser.close()
    assert [fault for window in found.opened for fault in window.faults] == []


async def filled(node: Node, stack: AsyncExitStack) -> str:
    """A cluster with something on every page; the place of a message."""
    producer = await stack.enter_async_context(Producer(node.address, "checkout"))
    await stack.enter_async_context(Consumer(node.address, "shipping", "orders", Inbox(), start="first"))
    await stack.enter_async_context(Consumer(node.address, "billing", "orders", Inbox(Reject()), start="first"))
    async with AdminClient(node.address) as admin:
        await admin.create_topic(LONG)
        await admin.create_group(GroupConfig(LONG))
    for number in range(12):
        sent = await producer.send(
            "orders", b'{"order": %d, "total": 9.95}' % number, tag="new", keys=f"order-{number}"
        )
    for group in ("shipping", "billing"):  # known to the broker when the topic has come into being, not before
        await settled(node.address, group, members=1)
    return f"/messages/orders/{sent.queue.broker_name}/{sent.queue.queue_id}/{sent.queue_offset}"


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
        await settled(node.address, "shipping", members=1)
        window = await windows.new(height=900)
        await window.open("/groups/shipping")
        await window.has("#live_timeline rect.owner-0")
        assert await window.page.query_selector("#live_timeline rect.owner-1") is None
        async with Consumer(node.address, "shipping", "orders", Inbox()):
            await window.has("#live_timeline rect.owner-1")
            await window.has("#live_hand_overs >> text=to finish its messages and let go")
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
        await settled(node.address, "g", members=1)  # a group that no broker knows has no page
        window = await windows.new(height=480)
        await window.open("/groups/g")
        await window.has("#live_summary .figure.bad dd >> text=3")
        is_broken = False
        await window.page.click("text=Dead letters >> nth=0")
        await window.page.check("tr:has-text('two') input[name=place]")
        await window.picture("console-dead-letters")
        await window.page.click("text=Dry run")
        assert "Send 1 messages again to the retry topic of g?" in await window.text("h1")
        assert mended.messages == []
        await window.page.click("button:has-text('Send them')")
        assert "1 messages were sent again" in await window.text("#notice")
        await eventually(lambda: mended.bodies == [b"two"])
        await window.page.check("[data-all=place]")
        await window.page.select_option("[name=to]", "topic")
        await window.page.click("text=Dry run")
        await window.page.click("button:has-text('Send them')")
        assert "3 messages were sent again to orders" in await window.text("#notice")
        await eventually(lambda: len(mended.messages) == 4)


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
        assert await window.page.evaluate("document.activeElement.className") == "scroll", "who scrolls by keys goes on"
        assert await window.page.evaluate("window.hacked") is None
        assert await window.page.evaluate("document.querySelectorAll('main img, main script').length") == 0


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


@pytest.mark.parametrize("width", [360, 768, 1400])
async def test_no_page_is_cut_at_any_width(windows: Windows, node: Node, width: int) -> None:
    inbox = Inbox(Reject("a long reason why nobody can cook this"))
    cut = "[...document.querySelectorAll('html, .scroll')].filter((it) => it.scrollWidth > it.clientWidth).length"
    topic = "orders-of-all-shops"
    async with Producer(node.address) as producer, Consumer(node.address, "g", topic, inbox, start="first"):
        await producer.send(topic, b"x" * 300, keys="a-long-key-by-which-it-is-found")
        await eventually(lambda: node.broker.store.queue("%DLQ%g", 0).next == 1)
        window = await windows.new(width=width)
        for path in ("/overview", "/groups", "/groups/g/dead", "/topics", f"/messages?topic={topic}", "/brokers"):
            await window.open(path)
            assert await window.page.evaluate(cut) == 0, path
