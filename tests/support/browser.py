"""The machine's Chromium before a page of ours."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from ..conftest import PATIENCE_S

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Without a sandbox, because tests may run as root; without what a browser asks of its maker's hosts.
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


class Window:
    """A page of the browser that fails the test for what its console reports."""

    def __init__(self, page: Page, url: str, pictures: Path) -> None:
        self.page = page
        self.url = url
        self._pictures = pictures
        self.faults: list[str] = []
        self.expected = "nothing"  # faults of its console that begin so are none
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("dialog", lambda dialog: self.faults.append(f"a dialog: {dialog.message}"))

    def _note(self, kind: str, text: str) -> None:
        if kind == "error" and not text.startswith(self.expected):
            self.faults.append(text)

    async def open(self, path: str) -> None:
        await self.page.goto(self.url + path)

    async def text(self, selector: str = "main") -> str:
        return str(await self.page.inner_text(selector))

    async def has(self, selector: str) -> None:
        await self.page.wait_for_selector(selector)

    async def picture(self, name: str, *, full: bool = False) -> None:
        """full: the page as far as it goes, not the window alone."""
        path = self._pictures / f"{name}.png"
        await self.page.screenshot(path=path, full_page=full)
        assert path.stat().st_size > 10_000


class Windows:
    def __init__(self, browser: Browser, url: str, pictures: Path) -> None:
        self._browser = browser
        self._url = url
        self._pictures = pictures
        self.opened: list[Window] = []

    async def new(
        self, *, theme: Literal["light", "dark"] = "light", scripts: bool = True, width: int = 1180, height: int = 760
    ) -> Window:
        context = await self._browser.new_context(
            color_scheme=theme, java_script_enabled=scripts, viewport={"width": width, "height": height}
        )
        self.opened.append(Window(await context.new_page(), self._url, self._pictures))
        return self.opened[-1]


@asynccontextmanager
async def windows_of(url: str, pictures: Path) -> AsyncIterator[Windows]:
    """Windows of a browser, which ends with the block. Fails for what their consoles report; skips without a browser."""
    playwright = pytest.importorskip("playwright.async_api", reason="needs Playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium on the PATH: apt-get install chromium")
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        found = Windows(browser, url, pictures)
        yield found
        await browser.close()
    assert [fault for window in found.opened for fault in window.faults] == []
