"""The request of a Celery task, which passes the reason of a failure to the dead letter."""

from __future__ import annotations

from typing import Any

from rocketlet.sync.tasks import reason_of

from celery.exceptions import Reject
from celery.worker.request import Request


class TaskRequest(Request):
    """A request whose message, if it becomes a dead letter, has the exception and its traceback in one line."""

    def on_failure(self, exc_info: Any, *arguments: Any, **options: Any) -> Any:
        error = getattr(exc_info.exception, "exc", exc_info.exception)  # processes of the pool wrap it
        text = error.reason if isinstance(error, Reject) else error
        reason = reason_of(error, str(text or ""), str(exc_info.traceback))
        self._message.channel.set_reason(self._message.delivery_tag, reason)
        return super().on_failure(exc_info, *arguments, **options)


__all__ = ["TaskRequest"]
