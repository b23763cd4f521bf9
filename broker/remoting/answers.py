"""Answers: in the request's encoding, with the request's number. `Refused` is an answer that is raised."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from ...protocol.codes import EXT_ACCEPT_ENCODING, RESPONSE_FLAG, VERSION, Language, ResponseCode
from ...protocol.config import MAX_TABLE_BYTES
from ...protocol.frame import MSGPACK, Ext, Frame, encode, encode_head, encode_msgpack
from ...protocol.work import Work
from ..sessions.refusal import Reason, Refusal

Buffer = bytes | memoryview
Buffers = list[Buffer]
Reply = Buffers | Work[Buffers] | Coroutine[Any, Any, Buffers] | None
"""A handler's result: the bytes to write; or work or a coroutine that makes them and has not begun; or None if a held pull
or another client's answer brings them, or nobody waits for any."""

JAVA = int(Language.JAVA)  # as Java brokers say; Go reads other names as unknown
_NONE: Ext = {}
_new_tuple = tuple.__new__


class Refused(Exception):
    """A request that is answered with this code and remark. `Dispatch` catches it, whichever handler raises it."""

    def __init__(self, code: int, remark: str, ext: Ext = _NONE) -> None:
        super().__init__(remark)
        self.code = code
        self.ext = ext

    def answer(self, request: Frame) -> Buffers:
        return answer(request, self.code, self.ext, remark=str(self))


_CODES: Mapping[Reason, int] = {
    Reason.NOT_PERMITTED: ResponseCode.NO_PERMISSION,
    Reason.NO_TOPIC: ResponseCode.TOPIC_NOT_EXIST,
    Reason.NO_GROUP: ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    Reason.ILLEGAL_MESSAGE: ResponseCode.MESSAGE_ILLEGAL,
    Reason.ILLEGAL: ResponseCode.SYSTEM_ERROR,
    Reason.BAD_EXPRESSION: ResponseCode.SUBSCRIPTION_PARSE_FAILED,
    Reason.NOT_SUBSCRIBED: ResponseCode.SUBSCRIPTION_NOT_EXIST,
    Reason.UNKNOWN_MEMBER: ResponseCode.SUBSCRIPTION_NOT_EXIST,
    Reason.SUBSCRIPTION_NOT_LATEST: ResponseCode.SUBSCRIPTION_NOT_LATEST,
    Reason.BUSY: ResponseCode.SYSTEM_BUSY,
}


def refused(refusal: Refusal, ext: Ext = _NONE) -> Refused:
    """A refusal of the state, in this door's terms."""
    return Refused(_CODES[refusal.reason], str(refusal), ext)


def answer(request: Frame, code: int = 0, ext: Ext = _NONE, body: bytes = b"", remark: str | None = None) -> Buffers:
    """Raises Refused for a body that does not fit into a frame."""
    if len(body) > MAX_TABLE_BYTES:
        raise Refused(ResponseCode.SYSTEM_ERROR, f"the answer has {len(body)} bytes, more than a frame takes")
    if remark is None and request.serialize_type == MSGPACK:  # as most of what our clients get
        return [encode_msgpack(code, RESPONSE_FLAG, request.opaque, JAVA, ext, body)]
    return [encode(_frame(request, code, ext, body, remark))]


def answer_pieces(request: Frame, ext: Ext, pieces: list[Buffer], remark: str) -> Buffers:
    """A success whose body is written from the pieces that it lies in."""
    frame = _frame(request, 0, ext, b"", remark)
    return [encode_head(frame, sum(map(len, pieces))), *pieces]


def _frame(request: Frame, code: int, ext: Ext, body: bytes, remark: str | None) -> Frame:
    # each answer has one: a Frame's own constructor costs twice as much
    fields = code, request.opaque, ext, body, RESPONSE_FLAG, remark, JAVA, VERSION, reply_type(request)
    return _new_tuple(Frame, fields)


def small(request: Frame) -> Frame:
    """The parts of a request that its answer needs, without a client's additions: for requests that wait."""
    code, opaque, _, _, flag, remark, language, version, _ = request
    # each pull has one: `_replace` takes three times as long
    return _new_tuple(Frame, (code, opaque, _NONE, b"", flag, remark, language, version, reply_type(request)))


def reply_type(request: Frame) -> int:
    """The encoding of the request, or MessagePack for a Rocketlet client that asks for it."""
    if request.serialize_type != MSGPACK and request.ext.get(EXT_ACCEPT_ENCODING) == "MSGPACK":
        return MSGPACK
    return request.serialize_type
