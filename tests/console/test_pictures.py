"""Every page in six ways, at 360, 768 and 1,400 px, light and dark: nothing is cut, hidden, crooked or hard to read.

The agreement is about geometry and colours, not pixels, so that it holds with the fonts of any machine.
`pytest tests/console/test_pictures.py --screenshots DIR` keeps a picture of each page in each way, to be looked through.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Final, Literal

import pytest
from rocketlet.client import Consumer, Producer, Reject, rebalanced

from ..conftest import Node, eventually
from ..support.browser import Window, Windows
from ..support.handlers import Inbox

pytestmark = pytest.mark.browser
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
