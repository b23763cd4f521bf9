"""A console before a real broker, asked over HTTP as a browser asks."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from rocketlet.client import AdminClient, Consumer, Producer, Reject, rebalanced
from rocketlet.console.server import ConsoleServer
from rocketlet.protocol.bodies import GroupConfig

from ..conftest import PATIENCE_S, Node
from ..support.browser import Windows, windows_of
from ..support.handlers import Inbox

LONG = "a" * 100
_TOKEN = re.compile(r'name="token" value="([0-9a-f]{64})"')
_HIDDEN = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)">')


@dataclass
class Site:
    """`url` without a slash at the end. The client keeps the cookie."""

    url: str
    http: httpx.AsyncClient

    async def get(self, path: str, status: int = 200) -> str:
        """The HTML of a page."""
        answer = await self.http.get(self.url + path)
        assert answer.status_code == status, answer.text
        return answer.text

    async def text(self, path: str, status: int = 200) -> str:
        """The text of a page, without tags."""
        return plain(await self.get(path, status))

    async def post(self, path: str, fields: Mapping[str, Any], **headers: str) -> httpx.Response:
        """Sends a form as a browser does that shows a page of the console."""
        found = {"origin": self.url, **headers}
        return await self.http.post(self.url + path, data=dict(fields), headers=found)

    async def change(self, form: str, path: str, **fields: Any) -> tuple[str, str]:
        """Fills in the form at `form`, sends it to `path`, and confirms: what was asked, and what was done."""
        token = token_of(await self.get(form))
        asked = await self.post(path, {"token": token, **fields})
        assert asked.status_code == 200, plain(asked.text)
        confirmed = [(name, html.unescape(value)) for name, value in _HIDDEN.findall(asked.text)]
        body = httpx.QueryParams([*confirmed, ("confirmed", "yes")])
        headers = {"origin": self.url, "content-type": "application/x-www-form-urlencoded"}
        done = await self.http.post(self.url + path, content=str(body), headers=headers, follow_redirects=True)
        assert done.status_code == 200, plain(done.text)
        notice = re.search(r'id="notice">(.*?)</p>', done.text)
        assert notice, plain(done.text)
        return plain(asked.text), html.unescape(notice[1])

    async def stream(self, path: str) -> AsyncIterator[tuple[str, str]]:
        """The live parts of a page as they come: name and HTML."""
        headers = {"accept": "text/event-stream"}
        async with self.http.stream("GET", self.url + path, headers=headers, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200
            name, lines = "", list[str]()
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    name, lines = line[7:], []
                elif line.startswith("data: "):
                    lines.append(line[6:])
                elif not line and name:
                    yield name, "\n".join(lines)
                    name = ""


def plain(page: str) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page))).strip()


def token_of(page: str) -> str:
    found = _TOKEN.search(page)
    assert found, "the page has no form that changes something"
    return found[1]


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


@pytest.fixture
async def site(node: Node) -> AsyncIterator[Site]:
    async with ConsoleServer(node.address) as server, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        yield Site(server.url, http)


@pytest.fixture
async def read_only_site(node: Node) -> AsyncIterator[Site]:
    async with ConsoleServer(node.address, read_only=True) as server, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        yield Site(server.url, http)


@pytest.fixture
async def windows(site: Site, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Windows]:
    async with windows_of(site.url, request.config.getoption("--screenshots") or tmp_path) as found:
        yield found


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
        await rebalanced(node.address, group, members=1)
    return f"/messages/orders/{sent.queue.broker_name}/{sent.queue.queue_id}/{sent.queue_offset}"
