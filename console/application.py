"""The routes, from paths to pages."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from .change import Planner, change
from .console import Console
from .guard import Guard
from .page import FOLDER, Handler, Page, page, rendered
from .pages import groups

_PAGES: dict[str, Handler] = {
    "/groups": groups.listed,
    "/groups/{group}": groups.shown,
}
_CHANGES: dict[str, Planner] = {}


async def _home(request: Request) -> Response:
    return RedirectResponse("/groups")


async def _missing(request: Request, error: Exception) -> Response:
    return rendered(request, Page("trouble.html", {"reason": f"There is no page {request.url.path}."}, 404))


def application(console: Console, *, hosts: Sequence[str] = ()) -> Starlette:
    app = Starlette(
        routes=[
            Route("/", _home),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
            *(Route(path, change(planner), methods=["POST"]) for path, planner in _CHANGES.items()),
            *(Route(path, page(handler), methods=["GET"]) for path, handler in _PAGES.items()),
        ],
        middleware=[Middleware(Guard, hosts=hosts, read_only=console.read_only)],
        exception_handlers={404: _missing},
    )
    app.state.console = console
    return app
