"""The status codes of answers. The numbers are RocketMQ's; clients decide by them whether to try again."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from ..sessions.refusal import Reason, Refusal


class Code(IntEnum):
    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_ACCESS_POINT = 40001
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    ILLEGAL_POLLING_TIME = 40018
    UNAUTHORIZED = 40100
    FORBIDDEN = 40300
    NOT_FOUND = 40400
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    TOO_MANY_REQUESTS = 42900
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_SERVER_ERROR = 50001
    NOT_IMPLEMENTED = 50100
    MASTER_PERSISTENCE_TIMEOUT = 50401


class Fault(Exception):
    """A call that is answered with this code and text."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code


_REASONS: Final[Mapping[Reason, Code]] = {
    Reason.NOT_PERMITTED: Code.FORBIDDEN,
    Reason.NO_TOPIC: Code.TOPIC_NOT_FOUND,
    Reason.NO_GROUP: Code.CONSUMER_GROUP_NOT_FOUND,
    Reason.ILLEGAL_MESSAGE: Code.MESSAGE_CORRUPTED,
    Reason.ILLEGAL: Code.BAD_REQUEST,
    Reason.BAD_EXPRESSION: Code.ILLEGAL_FILTER_EXPRESSION,
    Reason.NOT_SUBSCRIBED: Code.FORBIDDEN,
    Reason.UNKNOWN_MEMBER: Code.FORBIDDEN,
    Reason.SUBSCRIPTION_NOT_LATEST: Code.TOO_MANY_REQUESTS,
    Reason.BUSY: Code.TOO_MANY_REQUESTS,
}


def refused(refusal: Refusal) -> Fault:
    """A refusal of the state, in this door's terms."""
    return Fault(_REASONS[refusal.reason], str(refusal))


OK_TEXT: Final = "OK"
