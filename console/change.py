"""A change: it is described and asked about first, then done, and the next page reports it.

A form is sent twice. The first time the answer is a page that says what would happen; its button sends the same fields with
`confirmed`. Nothing is kept in between, so the form decides, not the description: both come from the same function of the
same fields.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ..client.errors import RocketletError
from ..client.log import get_logger
from .form import Form, posted
from .guard import TOKEN
from .page import Endpoint, Page, console_of, rendered, trouble
from .text import query

log = get_logger("rocketlet.console")
CONFIRMED = "confirmed"


@dataclass(frozen=True, slots=True)
class Change:
    """`question` and `effects` describe it, `rows` (with `columns`) in numbers. `act` does it and reports it; `then` is
    where the user goes after it, `back` (default: there, too) instead of it. `act` is None if there is nothing to do."""

    question: str
    act: Callable[[], Awaitable[str]] | None
    then: str
    button: str
    effects: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = field(default_factory=tuple)
    is_harmful: bool = False
    back: str = ""


Planner = Callable[[Request, Form], Awaitable[Change]]


def change(plan: Planner) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            form = await posted(request)
            planned = await plan(request, form)
            if planned.act is None or not form.text(CONFIRMED):
                return _asking(request, form, planned)
            done = await planned.act()
        except RocketletError as error:
            return trouble(request, error)
        log.info(
            "console_changed", path=request.url.path, peer=request.client.host if request.client else "", done=done
        )
        return RedirectResponse(planned.then + query(notice=console_of(request).notice(done)), 303)

    return endpoint


def _asking(request: Request, form: Form, planned: Change) -> Response:
    kept = [(name, value) for name, value in form.fields if name not in (TOKEN, CONFIRMED)]
    return rendered(request, Page("confirm.html", {"change": planned, "kept": kept}))
