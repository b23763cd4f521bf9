"""The metrics port: /metrics, /healthz and /readyz, served by prometheus-client in a thread that asks the event loop.

Imported only if a metrics port is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import sys
from collections.abc import Coroutine, Iterable
from socketserver import ThreadingMixIn
from threading import Lock, Thread
from typing import Any, Protocol
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric

from ..config import LIMITS, MAX_METRICS_CONNECTIONS, METRICS_CLIENT_S, Limits
from ..sessions.session import is_loopback

log = structlog.get_logger("rocketlet.metrics")


class Measured(Protocol):
    """The source of the answers. Both methods run in the event loop. `readiness` is the reason why the broker cannot serve
    clients, or None."""

    async def snapshot(self) -> list[Metric]: ...

    async def readiness(self) -> str | None: ...


class _Threads(ThreadingMixIn, WSGIServer):
    """A thread for each connection. When there are too many, the oldest one makes room: a client that connects and asks
    nothing must not use up the broker's threads and descriptors."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[socket.socket, None] = {}
        self._changing = Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changing:
            if len(self._open) >= MAX_METRICS_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # its client has hung up
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread sees the end, and closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changing:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs defects, but no fault of a client, such as hanging up."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("metrics_request_failed")


class _Quiet(WSGIRequestHandler):
    timeout = METRICS_CLIENT_S

    def log_message(self, *arguments: object) -> None:
        """Requests are not logged."""


def _is_own(host: str) -> bool:
    """Whether nobody else can make the name of a Host header point here."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", socket.gethostname().lower())
    return True


class MetricsPort:
    """Serves until `close`. Raises OSError if the port is taken. On a loopback address it knows only addresses and this
    machine's names: the page of a site that makes its own name point there (DNS rebinding) reads nothing."""

    def __init__(self, measured: Measured, host: str, port: int, limits: Limits = LIMITS) -> None:
        self._answer_s = limits.metrics_answer_s
        self._no_answer = f"the event loop has not answered for {self._answer_s:g} s"
        self._measured = measured
        self._is_local = host == "localhost" or is_loopback(host)
        self._loop = asyncio.get_running_loop()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        ProcessCollector(registry=registry)
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = make_server(host, port, self._answer, _Threads, handler_class=_Quiet)
        except OSError as error:
            raise OSError(error.errno, f"the metrics port {host}:{port}: {error.strerror}") from None
        self.port = int(self._server.server_port)
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def describe(self) -> list[Metric]:
        """Collects nothing before the first request."""
        return []

    def collect(self) -> list[Metric]:
        """Collects the metrics for prometheus-client, in its thread."""
        found: list[Metric] = self._ask(self._measured.snapshot())
        return found

    def _ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs in the loop, for a thread. Raises TimeoutError when the loop does not answer; nothing goes on then."""
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return asked.result(self._answer_s)
        except TimeoutError:
            asked.cancel()
            raise

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        host = str(environ.get("HTTP_HOST") or "")
        if self._is_local and host and not _is_own(host):
            text = f"The metrics port of this machine does not know the host name {host[:80]!r}; use an address."
            status = "403 Forbidden"
        elif path == "/metrics":
            try:
                found: Iterable[bytes] = self._metrics(environ, start_response)
                return found
            except TimeoutError:
                status, text = "503 Service Unavailable", self._no_answer
            except (TypeError, ValueError):  # prometheus-client raises these for an Accept whose version is no number
                return self._metrics({**environ, "HTTP_ACCEPT": ""}, start_response)  # type: ignore[no-any-return]
        elif path in ("/healthz", "/readyz"):
            fault = self._fault(is_ready=path == "/readyz")
            status, text = ("503 Service Unavailable", fault) if fault else ("200 OK", "ok")
        else:
            status, text = "404 Not Found", "There are /metrics, /healthz and /readyz."
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    def _fault(self, *, is_ready: bool) -> str | None:
        """Why the process is not alive or, with `is_ready`, not ready for clients; None if it is."""
        try:
            return self._ask(self._measured.readiness() if is_ready else asyncio.sleep(0))  # type: ignore[no-any-return] # a text, or None
        except TimeoutError:
            return self._no_answer

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
