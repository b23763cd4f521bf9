"""The errors that the client raises, and its loggers."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast

from ..protocol.codes import ResponseCode, code_name, request_name

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger
    from structlog.typing import EventDict, WrappedLogger


# ------------------------------------------------------------------------------
# The client's errors, as a tree:
#
# RocketletError
#   ConfigError         a wrong argument or setting; the text names it
#   MessageIllegal      a message that no broker would accept
#   TopicNotFound       no name server knows a route for the topic
#   ConnectionFailed    a name server or broker cannot be reached, or hung up
#   RequestTimeout      no answer in time; the request may still have been carried out
#   BrokerRefused       the broker answered with an error code
#   AnswerUnreadable    a server answered with something that is not RocketMQ's
#   RequestFailed       the consumer of a request failed with it, and says why


class RocketletError(Exception):
    """The base of all errors of the client."""


class ConfigError(RocketletError, ValueError):
    """An argument or setting is wrong."""


class MessageIllegal(RocketletError, ValueError):
    """The message cannot be sent as it is."""


class TopicNotFound(RocketletError):
    """The topic has no route: it does not exist, or its brokers are down."""


class ConnectionFailed(RocketletError, ConnectionError):
    """A server cannot be reached, or the connection broke while requests were in flight."""


class RequestTimeout(RocketletError, TimeoutError):
    """A server did not answer in time. The request may still have been carried out."""


class BrokerRefused(RocketletError):
    """A server refused a request. `code` is its response code, `remark` its own words, `address` where it is."""

    def __init__(self, request_code: int, code: int, remark: str | None, address: str) -> None:
        hint = _HINTS.get(code)
        text = f"{request_name(request_code)} was refused by {address} with {code_name(code)}: {remark or 'no remark'}"
        super().__init__(f"{text}. {hint}" if hint else text)
        self._request_code = request_code
        self.code = code
        self.remark = remark
        self.address = address

    def __reduce__(self) -> tuple[type[BrokerRefused], tuple[int, int, str | None, str]]:
        """An error that cannot be copied breaks the pool of processes in which it is raised."""
        return BrokerRefused, (self._request_code, self.code, self.remark, self.address)


class RequestFailed(RocketletError):
    """The consumer of the request raised or gave it up; the text says which. The request may be delivered again."""


class AnswerUnreadable(RocketletError):
    """A server's answer cannot be read: the server is not RocketMQ, or a newer version."""


_HINTS: Final[dict[int, str]] = {
    ResponseCode.SYSTEM_BUSY: "The broker is overloaded: send more slowly, or retry",
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: "This broker does not have the feature",
    ResponseCode.MESSAGE_ILLEGAL: "Change what the remark names",
    ResponseCode.SERVICE_NOT_AVAILABLE: "The broker cannot store now: free disk space, or send to another broker",
    ResponseCode.TOPIC_NOT_EXIST: "Create the topic, or let the broker create topics",
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: "Create the consumer group on the broker",
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: "Correct the filter of the subscription",
}


# ------------------------------------------------------------------------------
# The client's loggers: structlog in front, the standard `logging` behind, so that an application sees and filters
# them as its own. A record's message has the fields as text; `record.event` is the text without them, `record.fields`
# has their values, for formatters that keep structure.
#
# structlog is loaded with the first line that is logged. That takes 0.1 s of processor time where rich is installed,
# which structlog then loads, too; short commands and Spark's processes mostly log nothing.


_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
_CALLER: int = 4  # the frames between who logs and logging.Logger


def _for_logging(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """The arguments of a method of logging.Logger. The fields go into one attribute: a record allows none that is called
    `message` or `name`."""
    options = {"exc_info": event.pop("exc_info", None), "stacklevel": _CALLER}
    text = str(event.pop("event"))
    fields = dict(event)
    message = " ".join((text, *(f"{name}={value!r}" for name, value in fields.items())))
    return (message,), {**options, "extra": {"event": text, "fields": fields}}


class _Late:
    """A BoundLogger that is made when it is needed."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def __getattr__(self, name: str) -> Any:
        is_enabled = self._logger.isEnabledFor(_LEVELS.get(name, logging.ERROR))
        return getattr(self._bound, name) if is_enabled else _ignore

    @cached_property
    def _bound(self) -> BoundLogger:
        from structlog.stdlib import BoundLogger

        return BoundLogger(self._logger, [_for_logging], {})


def _ignore(event: str, **fields: Any) -> None: ...


def get_logger(name: str) -> BoundLogger:
    return cast("BoundLogger", _Late(name))
