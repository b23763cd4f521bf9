"""Log in and out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ...client.errors import ConfigError, get_logger
from ..form import check_token, faults_of, posted, query_of
from ..guard import cookie_header, log_failed_login, log_refused_login
from ..login import Sessions, TooManyLogins
from ..page import Page, rendered
from ..text import own_path

log = get_logger("rocketlet.console")


def sessions_of(request: Request) -> Sessions | None:
    found: Sessions | None = request.app.state.sessions
    return found


async def form(request: Request) -> Response:
    return _form(request, query_of(request).text("then", "/"))


async def log_in(request: Request) -> Response:
    sessions, then = sessions_of(request), "/"
    if sessions is None:
        return RedirectResponse(then, 303)
    name, peer = "", request.client.host if request.client else ""
    try:
        given = await posted(request)
        then, name = given.text("then", "/"), given.text("name")
        check_token(request, given)
        user = await sessions.user_with(name, given.raw("password"))
    except TooManyLogins as error:
        log_refused_login(peer)
        return _form(request, then, name, error)
    except ConfigError as error:
        return _form(request, then, name, error)
    if user is None:
        log_failed_login(peer)
        return _form(request, then, name, ConfigError("the name or the password is wrong"))
    log.info("console_login", user=user.name, role=user.role.value, peer=peer)
    response = RedirectResponse(own_path(then.encode()), 303)
    # a new cookie, because another page may have chosen the one of the form
    is_secure = request.headers.get("origin", "").startswith("https://")  # a proxy in front of the console has TLS
    response.headers.append("Set-Cookie", cookie_header(sessions.open(user), is_secure=is_secure))
    return response


async def log_out(request: Request) -> Response:
    check_token(request, await posted(request))
    sessions = sessions_of(request)
    if sessions is not None:
        sessions.close(request.state.cookie)
    return RedirectResponse("/login", 303)


def _form(request: Request, then: str, name: str = "", error: ConfigError | None = None) -> Response:
    status = 200 if error is None else 429 if isinstance(error, TooManyLogins) else 403
    faults = {} if error is None else faults_of(error)
    return rendered(request, Page("login.html", {"then": then, "name": name, "faults": faults}, status))
