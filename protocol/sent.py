"""The answer to a send, the most frequent of all: its bytes are spelled out instead of encoded field by field."""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Final

from .codes import RESPONSE_FLAG, VERSION, Language
from .frame import JSON, MSGPACK, ROCKETMQ, ExtValue, encode_msgpack

_JAVA: Final = int(Language.JAVA)
_PREFIX: Final = Struct(">II")
_JSON_HEADER: Final = (
    b'{"code":0,"extFields":{"msgId":"%%b","queueId":"%%d","queueOffset":"%%d","MSG_REGION":"%%b","TRACE_ON":"true"},'
    b'"flag":%d,"language":"JAVA","opaque":%%d,"serializeTypeCurrentRPC":"JSON","version":%d}'
    % (RESPONSE_FLAG, VERSION)
)
_BINARY_FRAME: Final = Struct(">IIhBhiiii")  # prefix, header, the length of no remark and that of the fields
_BINARY_FIELDS: Final = b"\0\5msgId%b%b\0\7queueId%b%b\0\x0bqueueOffset%b%b%b"
_pack_int: Final = Struct(">i").pack


def encode_sent(
    serialize_type: int, opaque: int, message_ids: str, queue_id: int, queue_offset: int, region: str
) -> bytes:
    """The frame that tells a sender where its messages are, as `encode` makes it. `message_ids` and `region` are plain ASCII.
    A Rocketlet client, which speaks MessagePack, needs neither the region nor the switch for traces."""
    if serialize_type == MSGPACK:
        ext: dict[str, ExtValue] = {"msgId": message_ids, "queueId": queue_id, "queueOffset": queue_offset}
        return encode_msgpack(0, RESPONSE_FLAG, opaque, _JAVA, ext)
    if serialize_type == ROCKETMQ:
        return _binary(opaque, message_ids, queue_id, queue_offset, region)
    header = _JSON_HEADER % (message_ids.encode(), queue_id, queue_offset, region.encode(), opaque)
    size = len(header)
    return _PREFIX.pack(4 + size, JSON << 24 | size) + header


def _binary(opaque: int, message_ids: str, queue_id: int, queue_offset: int, region: str) -> bytes:
    ids, queue, offset = message_ids.encode(), b"%d" % queue_id, b"%d" % queue_offset
    fields = _BINARY_FIELDS % (
        _pack_int(len(ids)), ids, _pack_int(len(queue)), queue, _pack_int(len(offset)), offset, _end(region)
    )  # fmt: skip
    size = len(fields)
    mark = ROCKETMQ << 24 | 21 + size  # the header's length
    return _BINARY_FRAME.pack(25 + size, mark, 0, _JAVA, VERSION, opaque, RESPONSE_FLAG, 0, size) + fields


@lru_cache(1)
def _end(region: str) -> bytes:
    """The fields that are the same in all answers of a broker."""
    return b"\0\nMSG_REGION%b%b\0\x08TRACE_ON\0\0\0\4true" % (_pack_int(len(region)), region.encode())
