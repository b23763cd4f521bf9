"""The checks of every request, and the headers of every response.

- The host name of the request must be an address or a known name. A page of another site whose name points at this
  machine (DNS rebinding) sends the name of that site.
- A POST request must come from a page of the console: its Origin or Sec-Fetch-Site header has to show it, and the form
  must have the token that belongs to its cookie (SameSite=Strict), which `form.check_token` checks.
- If users have to log in, a request must have the cookie of a session, and a POST request that of a user who may operate.
  Programs may use basic authentication for `/metrics` and `/api/`. Their POST requests have JSON, which no page of another
  site can send without the permission of this one.
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
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..client.errors import get_logger
from .login import Role, Sessions, TooManyLogins
from .text import own_path, query

log = get_logger("rocketlet.console")
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


_FOR_PROGRAMS: Final = ("/metrics", "/api/")


class Guard:
    """ASGI middleware that checks requests. `hosts` are the allowed host names besides addresses and this machine's own
    name; without `sessions` nobody has to log in."""

    def __init__(
        self, app: ASGIApp, *, hosts: Iterable[str] = (), read_only: bool = False, sessions: Sessions | None = None
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        self._read_only = read_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        cookie = Request(scope).cookies.get(COOKIE, "")
        scope["state"]["cookie"] = cookie or secrets.token_urlsafe(32)
        refusal = self._refusal(scope, headers) or await self._login_refusal(scope, headers, cookie)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    found[name] = value
                if "cache-control" not in found:
                    found["Cache-Control"] = "no-store"
                if not cookie and refusal is None:
                    found.append("Set-Cookie", cookie_header(scope["state"]["cookie"]))
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
        if self._read_only and scope["path"] not in ("/login", "/logout"):
            return PlainTextResponse("This console is read-only (--read-only): it changes nothing.", 403)
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        is_ours = origin.partition("://")[2] == host if origin else site == "same-origin"
        is_json = headers.get("content-type") == "application/json" and scope["path"].startswith("/api/")
        if is_ours or (is_json and origin is site is None):  # browsers send these headers with a POST request
            return None
        return PlainTextResponse("The form does not come from a page of this console.", 403)

    async def _login_refusal(self, scope: Scope, headers: Headers, cookie: str) -> Response | None:
        """Find the user of the request. Return the response for one who has to log in, or may not do this."""
        state, path = scope["state"], scope["path"]
        state["user"], state["may_change"] = "", not self._read_only
        if self._sessions is None:
            return None
        user = self._sessions.user_of(cookie)
        if user is None and path.startswith(_FOR_PROGRAMS):
            peer, given = (scope.get("client") or ("", 0))[0], headers.get("authorization", "")
            try:
                user = await self._sessions.user_of_header(given)
                if user is None and given:
                    log_failed_login(peer)
            except TooManyLogins as error:
                log_refused_login(peer)
                return PlainTextResponse(str(error), 429)
        if user is None:
            state["may_change"] = False
            if path == "/login" or path.startswith("/static/"):
                return None
            if not path.startswith(_FOR_PROGRAMS):
                is_page = scope["method"] in ("GET", "HEAD")
                return RedirectResponse("/login" + (query(then=own_path(scope["raw_path"])) if is_page else ""), 303)
            return PlainTextResponse("Log in first.", 401, {"WWW-Authenticate": "Basic"})
        state["user"], state["may_change"] = user.name, not self._read_only and user.role is Role.OPERATE
        if scope["method"] == "POST" and not state["may_change"] and path not in ("/login", "/logout"):
            return PlainTextResponse(f"The user {user.name} may look, and not change anything.", 403)
        return None

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


def cookie_header(value: str, *, is_secure: bool = False) -> str:
    """Return the header that sets the cookie. `is_secure` is True to have browsers send it only over TLS."""
    return f"{COOKIE}={value}; Path=/; HttpOnly; SameSite=Strict{'; Secure' if is_secure else ''}"


def log_failed_login(peer: str) -> None:
    log.warning("console_login_failed", peer=peer)


def log_refused_login(peer: str) -> None:
    log.warning("console_logins_refused", peer=peer, hint="somebody may be guessing passwords")


def token(request: Request) -> str:
    """Return the token for forms on the page that responds to this request."""
    return hmac.digest(_SECRET, str(request.state.cookie).encode(), "sha256").hex()


def is_token(request: Request, text: str) -> bool:
    return COOKIE in request.cookies and hmac.compare_digest(token(request).encode(), text.encode())
