"""The checks of every request, and the headers of every response.

- The host name of the request must be an address or a known name. A page of another site whose name points at this
  machine (DNS rebinding) sends the name of that site.
- A POST request must come from a page of the console: its Origin or Sec-Fetch-Site header has to show it, and the form
  must have the token that belongs to its cookie (SameSite=Strict), which `form.check_token` checks.
- A page loads scripts, styles and pictures only from the console, and no other page may show it in a frame.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE: Final = "rocketlet-console"
TOKEN: Final = "token"
_SECRET: Final = secrets.token_bytes(32)
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers send forms with the origin "null"
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """ASGI middleware that checks requests. `hosts` are the allowed host names besides addresses and this machine's own
    name."""

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str] = (), read_only: bool = False) -> None:
        self._app = app
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        self._read_only = read_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        cookie = Request(scope).cookies.get(COOKIE, "")
        scope["state"]["cookie"] = cookie or secrets.token_urlsafe(32)
        refusal = self._refusal(scope, headers)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    found[name] = value
                if "cache-control" not in found:
                    found["Cache-Control"] = "no-store"
                if not cookie and refusal is None:
                    new = scope["state"]["cookie"]
                    found.append("Set-Cookie", f"{COOKIE}={new}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        await (refusal or self._app)(scope, receive, sending)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if not self._is_known(host):
            text = f"The console does not know the host name {host[:80]!r}. Start it with --allow-host to allow it."
            return PlainTextResponse(text, 421)
        if scope["method"] in ("GET", "HEAD"):
            return None
        if scope["method"] != "POST":
            return PlainTextResponse("Only GET and POST are served.", 405)
        if self._read_only:
            return PlainTextResponse("This console is read-only (--read-only): it changes nothing.", 403)
        origin = headers.get("origin")
        is_ours = origin.partition("://")[2] == host if origin else headers.get("sec-fetch-site") == "same-origin"
        return None if is_ours else PlainTextResponse("The form does not come from a page of this console.", 403)

    def _is_known(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:  # such as [
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._hosts
        return True  # DNS rebinding needs a name


def token(request: Request) -> str:
    """Return the token for forms on the page that responds to this request."""
    return hmac.digest(_SECRET, str(request.state.cookie).encode(), "sha256").hex()


def is_token(request: Request, text: str) -> bool:
    return COOKIE in request.cookies and hmac.compare_digest(token(request).encode(), text.encode())
