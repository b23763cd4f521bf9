"""Requests to a console, for the commands that use its jobs."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from ...client.errors import ConfigError
from .output import Instant, Output

VARIABLE: Final = "ROCKETLET_CONSOLE"
DEFAULT_URL: Final = "http://127.0.0.1:9890"
TIMEOUT_S: Final = 30.0
_COLUMNS: Final = ("id", "group", "state", "total", "sent", "failed", "starts", "reason")


def add_console_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--console",
        default=os.environ.get(VARIABLE, DEFAULT_URL),
        metavar="URL",
        help=f"the console, such as http://NAME:PASSWORD@HOST:9890 (default: ${VARIABLE}, or {DEFAULT_URL})",
    )


class ConsoleClient:
    """Sends requests to the console at a URL, which may have a name and a password. Raises ConfigError."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--console: {parts.hostname or url[:80]} is not a URL; use http://HOST:PORT")
        self._base = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._headers = {"content-type": "application/json"}
        if parts.username:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["authorization"] = f"Basic {base64.b64encode(login).decode()}"

    async def get(self, path: str) -> Any:
        return await asyncio.to_thread(self._request, path, None)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return await asyncio.to_thread(self._request, path, json.dumps(body or {}).encode())

    def _request(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(self._base + path, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                reason = error.read(1000).decode(errors="replace")
            if error.code == 401:
                reason = f"it needs a login; give --console http://NAME:PASSWORD@HOST:PORT, or set ${VARIABLE}"
            raise ConfigError(f"the console at {self._base}: {reason}") from None
        except (OSError, ValueError) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ConfigError(
                f"the console at {self._base} does not respond: {cause}; start it, or give its URL with --console"
            ) from None


def show_jobs(output: Output, jobs: Iterable[Mapping[str, Any]]) -> None:
    rows = []
    for job in jobs:
        times = {"at": Instant(job["at_ms"]), "created": Instant(job["created_ms"]), "ended": Instant(job["ended_ms"])}
        kept = {name: value for name, value in job.items() if not name.endswith("_ms")}
        rows.append(kept | times | ({} if output.as_json else {"starts": times["at"]}))
    output.records(_COLUMNS, rows)
