"""docs/operations.md followed from an empty folder to a dead letter that is sent again, on Rocketlet and Apache's broker.

`pytest tests/docs/test_runbook.py --screenshots docs/images` makes the page's pictures of the console, as it shows each step.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rocketlet.client import Access, Consumer, Producer, Reject
from rocketlet.console.server import ConsoleServer
from rocketlet.testing.ports import free_port

from bench.peers import Apache, process

from ..conftest import eventually
from ..interop.conftest import fetch_apache
from ..interop.systems import HEAP
from ..support.handlers import Inbox

__all__ = ["fetch_apache"]
DOCS = Path(__file__).parents[2] / "docs"
RUNBOOK, SECURITY = ((DOCS / name).read_text() for name in ("operations.md", "security.md"))
pytestmark = pytest.mark.timeout(300)


def _accounts() -> str:
    found = re.search(r"```yaml\n(globalWhiteRemoteAddresses.*?)```", SECURITY, re.DOTALL)
    assert found
    return found[1]


ACCOUNTS = _accounts()
NAMED = dict(re.findall(r"(ROCKETLET_\w+_KEY)=(\S+)", RUNBOOK))  # as whom the page's commands sign
ADMINISTRATOR = Access(access_key=NAMED["ROCKETLET_ACCESS_KEY"], secret_key=NAMED["ROCKETLET_SECRET_KEY"])


def steps() -> list[list[str]]:
    """The commands for a dead letter at night, without what is said of them."""
    block = RUNBOOK.partition("## A dead letter at night")[2].split("```")[1]
    return [line.partition("#")[0].split() for line in block.strip().splitlines()]


def settings(folder: Path, port: int) -> Path:
    """The service's settings, with this machine's folders and ports, and the accounts that the page sends readers to; TLS
    has tests of its own."""
    text = re.search(r'title="/etc/rocketlet.toml"\n(.*?)```', RUNBOOK, re.DOTALL)
    assert text
    accounts = folder / "plain_acl.yml"
    accounts.write_text(ACCOUNTS)
    here = {
        "host": '"127.0.0.1"',
        "advertise": '"127.0.0.1"',
        "data": f'"{folder}/data"',
        "metrics-port": str(free_port()),
        "port": str(port),
        "acl": f'"{accounts}"',
    }
    lines = [line for line in text[1].splitlines() if line.split(" = ")[0] not in {*here, "tls-cert", "tls-key"}]
    file = folder / "rocketlet.toml"
    file.write_text("\n".join((*lines, *(f"{name} = {value}" for name, value in here.items()))))
    return file


@asynccontextmanager
async def a_cluster(kind: str, folder: Path) -> AsyncIterator[str]:
    if kind == "rocketlet":
        port = free_port()
        start = (sys.executable, "-m", "rocketlet.command.cli", "start", "--config", str(settings(folder, port)))
        async with process(start, folder / "log"):
            yield f"127.0.0.1:{port}"
    else:
        async with Apache(folder, kind, HEAP) as apache:
            yield apache.address


async def ran(words: list[str], address: str) -> tuple[int, str]:
    """Exit status and output of a command; a question is answered with yes."""
    assert words[0] == "rocketlet"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rocketlet.command.cli", *words[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, **NAMED, "ROCKETLET_NAMESERVER": address},
    )  # fmt: skip
    out, _ = await child.communicate(b"y\n")
    assert child.returncode is not None
    return child.returncode, out.decode()


class Camera:
    """Takes pictures of the console, if pictures are asked for."""

    def __init__(self, page: Any, url: str, folder: Path, kind: str) -> None:
        self._page = page
        self._url = url
        self._folder = folder
        self._kind = kind

    async def takes(self, name: str, path: str, *clicks: str) -> None:
        if self._page is None:
            return
        await self._page.goto(self._url + path)
        for selector in clicks:
            await self._page.click(selector)
        await self._page.wait_for_selector("h1")
        await self._page.screenshot(path=self._folder / f"runbook-{name}-{self._kind}.png")


@asynccontextmanager
async def a_camera(address: str, folder: Path | None, kind: str) -> AsyncIterator[Camera]:
    if folder is None:
        yield Camera(None, "", Path(), kind)
        return
    from playwright.async_api import async_playwright

    from ..support.browser import CHROMIUM, FLAGS

    async with ConsoleServer(address, access=ADMINISTRATOR) as server, async_playwright() as started:
        browser = await started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield Camera(await browser.new_page(viewport={"width": 1080, "height": 460}), server.url, folder, kind)
        await browser.close()


@pytest.mark.parametrize("kind", ["rocketlet", pytest.param("4.9.7", marks=pytest.mark.java)])
async def test_from_an_empty_folder_to_a_replayed_dead_letter(
    kind: str, tmp_path: Path, fetch_apache: Callable[[str], None], request: pytest.FixtureRequest
) -> None:
    if kind != "rocketlet":
        await asyncio.to_thread(fetch_apache, kind)
    mended, is_broken = Inbox(), True

    async def handle(message: Any) -> Reject | None:
        if is_broken:
            return Reject()
        await mended(message)
        return None

    doctor, dead, dry_run, replay, show = steps()
    pictures = request.config.getoption("--screenshots")
    async with a_cluster(kind, tmp_path) as address, a_camera(address, pictures, kind) as camera:

        async def prints(text: str, command: list[str]) -> bool:
            return text in (await ran(command, address))[1]

        await eventually(lambda: prints("orders", "rocketlet topics create orders".split()), 120)  # the cluster is up
        consumer = Consumer(address, "shop", "orders", handle, start="first", access=ADMINISTRATOR)
        async with consumer, Producer(address, access=ADMINISTRATOR) as producer:
            sent = await producer.send("orders", b"order 4711")
            await eventually(lambda: prints("dead_letters", doctor), 120)
            status, said = await ran(dead, address)
            assert (status, "order 4711" in said) == (0, True)
            await camera.takes("1-dead", "/groups/shop/dead")
            await camera.takes("2-dry-run", "/groups/shop/dead", "[data-all=place]", "text=Dry run")
            assert "would be sent again: 1 message," in (await ran(dry_run, address))[1]
            assert mended.messages == []
            is_broken = False
            assert "1 message was sent again" in (await ran(replay, address))[1]
            await eventually(lambda: mended.bodies == [b"order 4711"])
            assert mended.messages[0].message_id == sent.message_id
            said = (await ran(replay, address))[1]  # the mark is there, on Apache's broker, too
            assert "1 messages" not in said, said
            assert "replayed" in (await ran(dead, address))[1]
            assert "dead_letters" not in (await ran(doctor, address))[1]
            assert len(mended.messages) == 1
            status, said = await ran(show, address)
            assert (status, "shop" in said) == (0, True)
            await camera.takes("3-replayed", "/groups/shop")
