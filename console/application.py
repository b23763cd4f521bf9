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
from .login import Sessions
from .metrics import metrics
from .page import FOLDER, Endpoint, Handler, for_programs, guarded, page, trouble_page
from .pages import (
    brokers,
    dead_letters,
    downloads,
    group_changes,
    groups,
    jobs,
    logging_in,
    messages,
    overview,
    sending,
    topics,
)

_PAGES: dict[str, Handler] = {
    "/overview": overview.shown,
    "/groups": groups.listed,
    "/groups/{group}": groups.shown,
    "/groups/{group}/dead": dead_letters.listed,
    "/groups/{group}/reset": group_changes.reset_form,
    "/groups/{group}/settings": group_changes.settings,
    "/new/group": group_changes.new,
    "/topics": topics.listed,
    "/topics/{topic}": topics.shown,
    "/topics/{topic}/settings": topics.settings,
    "/topics/{topic}/tail": messages.tailed,
    "/new/topic": topics.new,
    "/new/message": sending.new,
    "/messages": messages.found,
    "/messages/{topic}/{broker}/{queue:int}/{offset:int}": messages.shown,
    "/trace": messages.traced,
    "/jobs": jobs.listed,
    "/jobs/{job}": jobs.shown,
    "/brokers": brokers.listed,
    "/brokers/{broker}": brokers.shown,
    "/doctor": brokers.doctor,
}
_FILES: dict[str, Endpoint] = {
    "/messages.jsonl": downloads.listed,
    "/messages/{topic}/{broker}/{queue:int}/{offset:int}/body": downloads.body,
}
# A change, and the page that its form is on.
_CHANGES: dict[str, tuple[Planner, Handler]] = {
    "/new/group": (group_changes.put, group_changes.new),
    "/groups/{group}/settings": (group_changes.put, group_changes.settings),
    "/groups/{group}/delete": (group_changes.delete, group_changes.settings),
    "/groups/{group}/reset": (group_changes.reset, group_changes.reset_form),
    "/groups/{group}/replay": (dead_letters.replay, dead_letters.listed),
    "/groups/{group}/discard": (dead_letters.discard, dead_letters.listed),
    "/jobs/{job}/stop": (jobs.stop, jobs.shown),
    "/new/topic": (topics.put, topics.new),
    "/topics/{topic}/settings": (topics.put, topics.settings),
    "/topics/{topic}/delete": (topics.delete, topics.settings),
    "/new/message": (sending.send, sending.new),
}


async def _home(request: Request) -> Response:
    return RedirectResponse("/overview")


async def _missing(request: Request, error: Exception) -> Response:
    return trouble_page(request, f"There is no page {request.url.path}.", 404)


def application(console: Console, *, hosts: Sequence[str] = (), sessions: Sessions | None = None) -> Starlette:
    app = Starlette(
        routes=[
            Route("/", _home),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
            Route("/api/jobs", for_programs(jobs.listed_for_programs), methods=["GET"]),
            Route("/api/jobs", for_programs(jobs.add), methods=["POST"]),
            Route("/api/jobs/{job}/stop", for_programs(jobs.stop_for_programs), methods=["POST"]),
            Route("/login", logging_in.form, methods=["GET"]),
            Route("/login", logging_in.log_in, methods=["POST"]),
            Route("/logout", guarded(logging_in.log_out), methods=["POST"]),
            Route("/metrics", metrics, methods=["GET"]),
            *(Route(path, guarded(endpoint), methods=["GET"]) for path, endpoint in _FILES.items()),
            *(Route(path, change(*item), methods=["POST"]) for path, item in _CHANGES.items()),
            *(Route(path, page(handler), methods=["GET"]) for path, handler in _PAGES.items()),
        ],
        middleware=[Middleware(Guard, hosts=hosts, read_only=console.read_only, sessions=sessions)],
        exception_handlers={404: _missing, 405: _missing},  # 405: a path that only takes a form
    )
    app.state.console = console
    app.state.sessions = sessions
    return app
