"""The control interface: a rig behind HTTP, for `rocketlet start --control-port`.

Every client that can reach it can delete everything. `rocketlet start` therefore makes it listen only on this machine,
unless --control-host has another address. Requests with an `Origin` are rejected, because web pages send them, and on a
loopback address also requests for other host names.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Self

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..broker.config import LimitExceeded
from ..client.errors import RocketletError
from ..host.address import is_loopback
from ..web.server import WebServer
from . import openapi
from .config import MAX_BODY_BYTES, STOP_S
from .errors import UnknownName
from .operations import OPERATIONS, Call, Operation
from .rig import Rig
from .shapes import Problem

log = structlog.get_logger("rocketlet.control")


_LOCAL_NAMES: Final = ["localhost", "127.0.0.1", "[::1]", "::1"]
_STATUS: Final = {
    "ValueError": 400,
    "KeyError": 404,
    "UnknownGroup": 404,
    "UnknownTopic": 404,
    "TimeoutError": 409,
    "RuntimeError": 409,
}


class Control:
    """Control interface for `async with Control(rig, host, port) as control`. Port 0 is a free port.

    Raises OSError if it cannot listen on the address.
    """

    def __init__(self, rig: Rig, host: str, port: int) -> None:
        self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self._socket.getsockname()[1]
        app = application(rig, is_local=is_loopback(host))
        self._server = WebServer(app, self._socket, stop_s=STOP_S)

    async def __aenter__(self) -> Self:
        self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.stop()


def application(rig: Rig, *, is_local: bool) -> Starlette:
    """Return the ASGI application of the control interface.

    Args:
        rig: the broker under test
        is_local: True to accept only requests for names of this machine, so that no other host name leads a browser
            here
    """
    changes = asyncio.Lock()  # serializes starts and stops of the broker
    routes = [
        Route(operation.path, partial(_answer, rig, operation, changes), methods=[operation.method])
        for operation in OPERATIONS
    ]
    document = msgspec.json.encode(openapi.description(OPERATIONS))

    async def described(request: Request) -> Response:
        return Response(document, media_type="application/json")

    trusted = [Middleware(TrustedHostMiddleware, allowed_hosts=_LOCAL_NAMES)] if is_local else []
    return Starlette(routes=[Route("/openapi.json", described, methods=["GET"]), *routes], middleware=trusted)


async def _answer(rig: Rig, operation: Operation[Any], changes: asyncio.Lock, request: Request) -> Response:
    try:
        if request.headers.get("origin") is not None:
            raise ValueError("origin: requests of web pages are rejected")
        found = operation.act(rig, await _call(operation, request))
        if inspect.isawaitable(found):
            found = await _serialized(operation, changes, found)
    except (ValueError, LimitExceeded, OverflowError) as error:
        return _problem("ValueError", str(error))
    except KeyError as error:
        return _problem(type(error).__name__ if isinstance(error, UnknownName) else "KeyError", str(error.args[0]))
    except TimeoutError as error:
        return _problem("TimeoutError", str(error))
    except (RuntimeError, RocketletError) as error:
        return _problem("RuntimeError", str(error))
    except Exception as error:  # a defect of this program: report it to the caller, and continue to serve others
        log.exception("control_failed", operation=operation.name)
        return _problem("RuntimeError", f"{operation.name} failed: {error!r}")
    return Response(msgspec.json.encode(found), media_type="application/json")


async def _serialized(operation: Operation[Any], changes: asyncio.Lock, work: Awaitable[Any]) -> Any:
    """Run an operation; only waits run concurrently with others, because two concurrent restarts would conflict."""
    if operation.name == "waitFor":
        return await work
    async with changes:
        return await work


def _problem(error: str, message: str) -> Response:
    body = msgspec.json.encode(Problem(error, message))
    return Response(body, status_code=_STATUS[error], media_type="application/json")


async def _call(operation: Operation[Any], request: Request) -> Call:
    """Return the contents of a request. Raises ValueError."""
    return Call(request.path_params, _query(operation, request), await _body(operation, request))


def _query(operation: Operation[Any], request: Request) -> Any:
    given = dict(request.query_params)
    if operation.query is None:
        if given:
            raise ValueError(f"{next(iter(given))} is not a parameter; {operation.path} has no parameters")
        return None
    return _checked(lambda: msgspec.convert(given, operation.query, strict=False), operation.query)


async def _body(operation: Operation[Any], request: Request) -> Any:
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise ValueError(f"the body has more than {MAX_BODY_BYTES} bytes")
    if operation.body is None:
        return None
    return _checked(lambda: msgspec.json.decode(data or b"{}", type=operation.body), operation.body)


def _checked(read: Callable[[], Any], wanted: Any) -> Any:
    """Decode a value. Raises ValueError, which names an invalid field and, if they are known, its allowed values."""
    try:
        return read()
    except msgspec.ValidationError as error:
        text = str(error)
        path = found[1] if (found := re.search(r"at `(.*)`", text)) else "$"
        allowed = openapi.allowed(wanted, path)
        raise ValueError(f"{text}; allowed: {allowed}" if allowed else text) from None
    except msgspec.DecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
