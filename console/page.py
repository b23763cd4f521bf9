"""Renders a page, and then sends the parts of it that change.

Each block of a template whose name begins with `live_` is such a part. If a client requests the page's own address as
an event stream, the console renders the blocks about once a second, and sends those whose HTML has changed as events of
their names. A page and its updates therefore have one function and one template, and a browser without JavaScript still
shows the page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse

from ..client.admin.findings import Harm
from ..client.errors import (
    AnswerUnreadable,
    ConfigError,
    ConnectionFailed,
    RequestTimeout,
    RocketletError,
    TopicNotFound,
)
from ..protocol.names import counted
from . import text
from .config import LIVE_INTERVAL_S, MAX_STREAMS
from .console import Console
from .form import Form
from .guard import token
from .jobs import JobNotFound
from .login import Sessions

FOLDER: Final = Path(__file__).parent
LIVE: Final = "live_"


@dataclass(frozen=True, slots=True)
class Page:
    """The result of a page's handler: a template and its values."""

    template: str
    values: dict[str, Any] = field(default_factory=dict)
    status: int = 200


_NOTHING_TYPED: Final = Form([])
Handler = Callable[[Request], Awaitable[Page]]
Endpoint = Callable[[Request], Awaitable[Response]]

_templates: Final = Environment(
    loader=FileSystemLoader(FOLDER / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters |= {
    name: getattr(text, name)
    for name in "number size local_time clock_time duration age visible short short_id part language client_version".split()
}
_templates.filters["counted"] = counted
_templates.globals["query"] = text.query
_templates.globals["ui"] = _templates.get_template(
    "parts.html"
).module  # global, because a block that is rendered alone lacks the imports of its template


def console_of(request: Request) -> Console:
    found: Console = request.app.state.console
    return found


def typed_of(request: Request) -> Form:
    """Return the fields of the submitted form that led back to this page; empty for other requests."""
    found: Form = getattr(request.state, "typed", _NOTHING_TYPED)
    return found


def is_load(request: Request) -> bool:
    """Return True if the request loads a page, and False if it is for the updates of an open page."""
    return "text/event-stream" not in request.headers.get("accept", "")


def page(handler: Handler) -> Endpoint:
    """Return the endpoint of a page and its event stream."""

    async def endpoint(request: Request) -> Response:
        if not is_load(request):
            return _streaming(request, handler)
        return rendered(request, await handler(request))

    return guarded(endpoint)


def guarded(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint that responds with an error page where `endpoint` raises RocketletError."""

    async def found(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RocketletError as error:
            return trouble(request, error)

    return found


def for_programs(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint that responds with an error as text where `endpoint` raises RocketletError."""

    async def found(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RocketletError as error:
            return PlainTextResponse(str(error), status_of(error))

    return found


def rendered(request: Request, found: Page) -> Response:
    template = _templates.get_template(found.template)
    return HTMLResponse(template.render(_values(request, found)), found.status)


def trouble(request: Request, error: RocketletError) -> Response:
    """Return the page that shows an error."""
    return trouble_page(request, str(error), status_of(error))


def trouble_page(request: Request, reason: str, status: int) -> Response:
    return rendered(request, Page("trouble.html", {"reason": reason, "status": status}, status))


def status_of(error: RocketletError) -> int:
    if isinstance(error, ConnectionFailed | RequestTimeout | AnswerUnreadable):
        return 502
    if isinstance(error, TopicNotFound | JobNotFound):
        return 404
    if isinstance(error, ConfigError) and "no broker knows" in str(error):
        return 404
    return 400


def _values(request: Request, found: Page) -> dict[str, Any]:
    console, section = console_of(request), request.url.path.split("/")[1]
    return {
        "cluster": console.cluster,
        "read_only": not request.state.may_change,
        "user": request.state.user,
        "token": token(request),
        "path": text.own_path(request.scope["raw_path"]),
        "section": {"trace": "messages", "jobs": "groups", "new": ""}.get(section, section),
        "troubles": sum(finding.harm < Harm.RISK for finding in console.findings()),
        "notice": console.notice_of(request.query_params.get("notice", "")),
        "typed": typed_of(request),
        "faults": {},
        **found.values,
    }


def _streaming(request: Request, handler: Handler) -> Response:
    console = console_of(request)
    if console.streams >= MAX_STREAMS:
        return PlainTextResponse(f"{MAX_STREAMS} pages are updated already (the maximum); close some.", 503)
    return StreamingResponse(_events(request, handler, console), media_type="text/event-stream")


async def _events(request: Request, handler: Handler, console: Console) -> AsyncIterator[str]:
    console.streams += 1
    sent: dict[str, str] = {}
    try:
        while not console.closing.is_set() and _is_logged_in(request):
            try:
                blocks = dict(_blocks(request, await handler(request)))
                blocks["trouble"] = ""
            except RocketletError as error:
                blocks = {"trouble": str(escape(str(error)))}
            yield "".join(_event(name, html) for name, html in blocks.items() if sent.get(name) != html) or ":\n\n"
            sent |= blocks
            await _pause(console)
    finally:
        console.streams -= 1


def _is_logged_in(request: Request) -> bool:
    """Return False once the session that opened the page has ended."""
    sessions: Sessions | None = request.app.state.sessions
    return sessions is None or sessions.user_of(request.state.cookie) is not None


async def _pause(console: Console) -> None:
    try:
        async with asyncio.timeout(LIVE_INTERVAL_S):
            await console.closing.wait()
    except TimeoutError:
        pass


def _blocks(request: Request, found: Page) -> Iterator[tuple[str, str]]:
    template = _templates.get_template(found.template)
    context = template.new_context(_values(request, found))
    for name, block in template.blocks.items():
        if name.startswith(LIVE):
            yield name, "".join(block(context))


def _event(name: str, html: str) -> str:
    lines = "".join(f"data: {line}\n" for line in html.splitlines() or [""])
    return f"event: {name}\n{lines}\n"
