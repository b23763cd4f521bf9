"""The errors that the client raises, and its loggers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
#   ConfigError         an argument or setting is invalid; the text names it
#   MessageIllegal      a message is invalid, so the client does not send it
#   TopicNotFound       no name server has a usable route for the topic
#   ConnectionFailed    a name server or broker cannot be reached, or closed the connection
#   RequestTimeout      no response arrived in time; the request may have been carried out
#   BrokerRefused       a server responded with an error code
#   ChangeIncomplete    a change was made at some brokers only; the text names them
#   AnswerUnreadable    a server's response cannot be decoded
#   RequestFailed       the consumer of a request failed to handle it; the text has the reason
#   TransactionContradicted  the broker ended a transaction otherwise than its block


class RocketletError(Exception):
    """The base class of the client's own exceptions."""


class ConfigError(RocketletError, ValueError):
    """An argument or setting is invalid, or a method was called in the wrong state."""


class MessageIllegal(RocketletError, ValueError):
    """The message is invalid and cannot be sent."""


class TopicNotFound(RocketletError):
    """The topic has no route: it does not exist, or its brokers are down."""


class ConnectionFailed(RocketletError, ConnectionError):
    """A server cannot be reached, the connection broke, or too many requests are in flight on the connection."""


class RequestTimeout(RocketletError, TimeoutError):
    """No response arrived in time. The server may have carried out the request."""


class BrokerRefused(RocketletError):
    """A server responded with an error code.

    Attributes:
        code: the response code.
        remark: the server's text; None if it sent none.
        address: the server's address.
    """

    def __init__(self, request_code: int, code: int, remark: str | None, address: str) -> None:
        hint = _HINTS.get(code)
        text = f"{request_name(request_code)} was refused by {address} with {code_name(code)}: {remark or 'no remark'}"
        super().__init__(f"{text}. {hint}" if hint else text)
        self._request_code = request_code
        self.code = code
        self.remark = remark
        self.address = address

    def __reduce__(self) -> tuple[type[BrokerRefused], tuple[int, int, str | None, str]]:
        """Support pickling, because an exception that cannot be pickled breaks a process pool in which it is raised."""
        return BrokerRefused, (self._request_code, self.code, self.remark, self.address)


class RequestFailed(RocketletError):
    """The consumer's handler raised or rejected the request; the text has the reason. The request may be redelivered."""


class TransactionContradicted(RocketletError):
    """A transaction's block ended, but the broker had ended the transaction otherwise before, because of what `check`
    returned, because nothing returned its outcome in time, or because the topic was deleted.

    Attributes:
        message_id: the id of the message.
        commits: True if the block ended without an exception.
        outcome: the broker's outcome: "committed", "rolled back", or "set aside", with which consumers do not get the
            message either.
    """

    def __init__(self, message_id: str, topic: str, commits: bool, outcome: str) -> None:
        ended, remedy = ("committed", "resend the message") if commits else ("rolled back", "undo its effects")
        super().__init__(
            f"transaction: the block was {ended}, but the message {message_id} of the topic {topic} was {outcome} before; "
            f"{remedy} if it must be {ended}, and let `check` return None while the outcome is not known"
        )
        self.message_id = message_id
        self.topic = topic
        self.commits = commits
        self.outcome = outcome

    def __reduce__(self) -> tuple[type[TransactionContradicted], tuple[str, str, bool, str]]:
        return TransactionContradicted, (self.message_id, self.topic, self.commits, self.outcome)


class ChangeIncomplete(RocketletError):
    """An administrative change was made at some brokers and failed at others. Repeat the change when the others can be
    reached.

    Attributes:
        done: names of the brokers that have made the change.
        failed: the error of each other broker, by its name.
    """

    def __init__(self, done: Sequence[str], failed: Mapping[str, RocketletError]) -> None:
        reasons = "; ".join(f"{broker}: {error}" for broker, error in failed.items())
        super().__init__(
            f"the change was made at {', '.join(done)}, but not at all brokers: {reasons}; repeat it for these"
        )
        self.done = done
        self.failed = failed

    def __reduce__(self) -> tuple[type[ChangeIncomplete], tuple[Sequence[str], Mapping[str, RocketletError]]]:
        return ChangeIncomplete, (self.done, self.failed)


class AnswerUnreadable(RocketletError):
    """A server's response cannot be decoded, for example because it is not a RocketMQ server."""


def unencodable(error: UnicodeEncodeError) -> str:
    """Return the words for a text that cannot be sent, to follow its name."""
    half = error.object[error.start]
    return f"contains {half!r}, half a surrogate pair, which UTF-8 cannot encode"


_HINTS: Final[dict[int, str]] = {
    ResponseCode.SYSTEM_BUSY: "The broker is overloaded: send more slowly, or retry",
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: "This broker does not have the feature; `rocketlet version` shows its version",
    ResponseCode.MESSAGE_ILLEGAL: "Correct the message as the remark says",
    ResponseCode.SERVICE_NOT_AVAILABLE: "The broker cannot store messages now: free disk space (`rocketlet doctor` "
    "reports how much is used), or send to another broker",
    ResponseCode.TOPIC_NOT_EXIST: "Create the topic with `rocketlet topics create TOPIC`, or let the broker create topics",
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: "Create the group with `rocketlet groups create GROUP`",
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: "Correct the filter of the subscription",
}


# ------------------------------------------------------------------------------
# The client's loggers. The client calls structlog, which passes all entries to the standard `logging`, so that an
# application can configure them like its own. A record's message contains the fields as text. For structured formatters,
# `record.event` is the event's name and `record.fields` are the values of the fields.
#
# structlog is imported when the first entry is logged. If rich is installed, structlog imports it, too, which takes 0.1
# s of CPU time, and short commands and Spark's processes mostly log nothing.


_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
_CALLER: int = 4  # the number of stack frames between the calling code and logging.Logger


def _for_logging(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """Return the arguments for a method of logging.Logger. All fields are in one attribute, because a record cannot have
    attributes of its own called `message` or `name`."""
    options = {"exc_info": event.pop("exc_info", None), "stacklevel": _CALLER}
    text = str(event.pop("event"))
    fields = dict(event)
    message = " ".join((text, *(f"{name}={value!r}" for name, value in fields.items())))
    return (message,), {**options, "extra": {"event": text, "fields": fields}}


class _Late:
    """A logger that creates its structlog BoundLogger when it is first needed."""

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
