"""A change: it is described and confirmed, then made, and reported on the next page.

A form is sent twice. The first response is a page that describes the effects; its button sends the same fields with
`confirmed`. The server keeps nothing in between. The same function computes the description and the change from the
fields.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ..client.errors import RocketletError, get_logger
from .form import Form, check_token, faults_of, posted
from .guard import TOKEN
from .page import Endpoint, Handler, Page, console_of, rendered, status_of, trouble
from .text import query

log = get_logger("rocketlet.console")
CONFIRMED = "confirmed"
BACK = "back"


@dataclass(frozen=True, slots=True)
class Change:
    """A change. `question`, `effects` and the table of `rows` describe it. `act` makes it and returns a report. `then`
    is the path of the next page."""

    question: str
    act: Callable[[], Awaitable[str]]
    then: str
    button: str
    effects: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = field(default_factory=tuple)
    is_harmful: bool = False


Planner = Callable[[Request, Form], Awaitable[Change]]


def change(plan: Planner, form_page: Handler) -> Endpoint:
    """Return the endpoint of a change. After an error it returns `form_page` with the typed values and the error, or an
    error page if the form cannot be read or `form_page` fails."""

    async def endpoint(request: Request) -> Response:
        form = None
        try:
            form = await posted(request)
            check_token(request, form)
            if form.text(BACK):
                return await _form_again(request, form_page, form)
            planned = await plan(request, form)
            if not form.text(CONFIRMED):
                return _asking(request, form, planned)
            done = await planned.act()
        except RocketletError as error:
            return trouble(request, error) if form is None else await _again(request, form_page, form, error)
        peer = request.client.host if request.client else ""
        log.info("console_changed", path=request.url.path, user=request.state.user, peer=peer, done=done)
        return RedirectResponse(planned.then + query(notice=console_of(request).notice(done)), 303)

    return endpoint


async def _again(request: Request, form_page: Handler, form: Form, error: RocketletError) -> Response:
    try:
        return await _form_again(request, form_page, form, error)
    except RocketletError:  # the page's object does not exist, or the cluster is unreachable
        return trouble(request, error)


async def _form_again(
    request: Request, form_page: Handler, form: Form, error: RocketletError | None = None
) -> Response:
    """Return the page of the form with the typed values and their errors."""
    request.state.typed = form
    found = await form_page(request)
    if error is not None:
        found = Page(found.template, {**found.values, "faults": faults_of(error)}, status_of(error))
    return rendered(request, found)


def _asking(request: Request, form: Form, planned: Change) -> Response:
    kept = [(name, value) for name, value in form.fields if name not in (TOKEN, CONFIRMED, BACK)]
    return rendered(request, Page("confirm.html", {"change": planned, "kept": kept}))
