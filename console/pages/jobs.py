"""Jobs: a list with their progress, a page for each, and the requests of the command line."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...client.errors import ConfigError, get_logger
from ..change import Change
from ..config import MAX_FORM_BYTES
from ..form import Form
from ..jobs import ReplayJob, ReplayOrder, words_of
from ..page import Page, console_of

log = get_logger("rocketlet.console")


async def listed(request: Request) -> Page:
    return Page("jobs.html", {"jobs": console_of(request).jobs.all()})


async def shown(request: Request) -> Page:
    return Page("job.html", {"job": _job(request)})


def _job(request: Request) -> ReplayJob:
    return console_of(request).jobs.find(request.path_params["job"])


async def stop(request: Request, form: Form) -> Change:
    """Return the change that stops a job. What it has sent stays sent and marked."""
    console, job = console_of(request), _job(request)

    async def act() -> str:
        stopped = await console.jobs.stop(job.id)
        return f"The replay is stopped. It has sent {stopped.sent:,} of {stopped.total:,} messages."

    effects = [f"{job.sent:,} of {job.total:,} messages have been sent. The others stay dead letters."]
    return Change(f"Stop the replay of {words_of(job)}?", act, f"/jobs/{job.id}", "Stop it", effects)


# Requests of `rocketlet messages replay --detach` and `rocketlet jobs`


async def listed_for_programs(request: Request) -> Response:
    return _json([_record(job) for job in console_of(request).jobs.all()])


async def add(request: Request) -> Response:
    """Add the job that the body describes. Return it."""
    jobs = console_of(request).jobs
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise ConfigError(f"the request has more than {MAX_FORM_BYTES} bytes; name fewer messages")
    try:
        order = msgspec.json.decode(body, type=ReplayOrder)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the request is not a replay: {error}") from None
    job = await jobs.plan(order, by=request.state.user)
    await jobs.add(job)
    return _json(_record(job))


async def stop_for_programs(request: Request) -> Response:
    stopped = await console_of(request).jobs.stop(request.path_params["job"])
    peer = request.client.host if request.client else ""
    log.info("console_changed", path=request.url.path, user=request.state.user, peer=peer, done="the replay is stopped")
    return _json(_record(stopped))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _record(job: ReplayJob) -> dict[str, Any]:
    """Return a job without its places, which may be thousands."""
    order = job.order
    return {
        "id": job.id,
        "group": order.group,
        "to": order.to,
        "clusters": job.clusters,
        "is_elsewhere": job.is_elsewhere,
        "state": job.state,
        "at_ms": order.at_ms,
        "rate_per_s": order.rate_per_s,
        "stop_after": order.stop_after,
        "total": job.total,
        "sent": job.sent,
        "failed": job.failed,
        "reason": job.reason,
        "created_ms": job.created_ms,
        "created_by": job.created_by,
        "ended_ms": job.ended_ms,
    }
