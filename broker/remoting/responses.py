"""Responses: they have the request's number, and its encoding or MessagePack (`reply_type`). `ResponseError` is a response
that is raised."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping

from ...protocol.bodies import Work
from ...protocol.codes import EXT_ACCEPT_ENCODING, RESPONSE_FLAG, VERSION, Language, ResponseCode
from ...protocol.config import MAX_TABLE_BYTES
from ...protocol.frame import MSGPACK, Ext, Frame, encode, encode_head, encode_msgpack
from ..sessions.refusal import Reason, Refusal

Buffer = bytes | memoryview
Buffers = list[Buffer]
Reply = Buffers | Work[Buffers] | Coroutine[object, None, Buffers] | None
"""A handler's result: the bytes to write; or work or a coroutine that makes them and has not started; or None if
another event brings the response, such as the end of a held pull, or if there is no response."""

JAVA = int(Language.JAVA)  # the language in responses of Java brokers; Go clients do not know every other one
_NONE: Ext = {}
_new_tuple = tuple.__new__


class ResponseError(Exception):
    """The refusal of a request, with the response's code and remark. `Dispatch` catches it from handlers."""

    def __init__(self, code: int, remark: str, ext: Ext = _NONE) -> None:
        super().__init__(remark)
        self.code = code
        self.ext = ext

    def answer(self, request: Frame) -> Buffers:
        return answer(request, self.code, self.ext, remark=str(self))


_CODES: Mapping[Reason, int] = {
    Reason.NOT_PERMITTED: ResponseCode.NO_PERMISSION,
    Reason.NO_TOPIC: ResponseCode.TOPIC_NOT_EXIST,
    Reason.NO_QUEUE: ResponseCode.INVALID_PARAMETER,
    Reason.NO_GROUP: ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    Reason.ILLEGAL_MESSAGE: ResponseCode.MESSAGE_ILLEGAL,
    Reason.ILLEGAL: ResponseCode.SYSTEM_ERROR,
    Reason.BAD_EXPRESSION: ResponseCode.SUBSCRIPTION_PARSE_FAILED,
    Reason.NOT_SUBSCRIBED: ResponseCode.SUBSCRIPTION_NOT_EXIST,
    Reason.UNKNOWN_MEMBER: ResponseCode.SUBSCRIPTION_NOT_EXIST,
    Reason.SUBSCRIPTION_NOT_LATEST: ResponseCode.SUBSCRIPTION_NOT_LATEST,
    Reason.TOO_MANY_LITE_TOPICS: ResponseCode.LMQ_QUOTA_EXCEEDED,
    Reason.LITE_GROUP: ResponseCode.NO_PERMISSION,
    Reason.NOT_LITE: ResponseCode.INVALID_PARAMETER,
    Reason.ILLEGAL_LITE_TOPIC: ResponseCode.INVALID_PARAMETER,
    Reason.ILLEGAL_OFFSET: ResponseCode.INVALID_PARAMETER,
    Reason.TOO_MANY_LITE_SUBSCRIPTIONS: ResponseCode.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
    Reason.BUSY: ResponseCode.SYSTEM_BUSY,
}


def response_error(refusal: Refusal, ext: Ext = _NONE) -> ResponseError:
    """Return the remoting error for a refusal by the state."""
    return ResponseError(_CODES[refusal.reason], str(refusal), ext)


def answer(request: Frame, code: int = 0, ext: Ext = _NONE, body: bytes = b"", remark: str | None = None) -> Buffers:
    """Return the response to a request. Raises ResponseError for a body of more than `MAX_TABLE_BYTES`."""
    if len(body) > MAX_TABLE_BYTES:
        raise ResponseError(ResponseCode.SYSTEM_ERROR, f"the response has {len(body)} bytes; maximum {MAX_TABLE_BYTES}")
    if remark is None and request.serialize_type == MSGPACK:  # the most frequent case with Rocketlet clients
        return [encode_msgpack(code, RESPONSE_FLAG, request.opaque, JAVA, ext, body)]
    return [encode(_frame(request, code, ext, body, remark))]


def answer_pieces(request: Frame, ext: Ext, pieces: list[Buffer], remark: str) -> Buffers:
    """Return a successful response whose body consists of these pieces, which are not joined."""
    frame = _frame(request, 0, ext, b"", remark)
    return [encode_head(frame, sum(map(len, pieces))), *pieces]


def _frame(request: Frame, code: int, ext: Ext, body: bytes, remark: str | None) -> Frame:
    # called very often, and a Frame's own constructor takes twice as long
    fields = code, request.opaque, ext, body, RESPONSE_FLAG, remark, JAVA, VERSION, reply_type(request)
    return _new_tuple(Frame, fields)


def small(request: Frame) -> Frame:
    """Return a copy of a request without its header fields and body, with all that its response needs, so that a request
    that waits takes little memory."""
    code, opaque, _, _, flag, remark, language, version, _ = request
    # called for each held pull, and `_replace` takes three times as long
    return _new_tuple(Frame, (code, opaque, _NONE, b"", flag, remark, language, version, reply_type(request)))


def reply_type(request: Frame) -> int:
    """Return the encoding of the response: that of the request, or MessagePack for a Rocketlet client that offers
    it."""
    if request.serialize_type != MSGPACK and request.ext.get(EXT_ACCEPT_ENCODING) == "MSGPACK":
        return MSGPACK
    return request.serialize_type
