"""The head of an answer with messages. Each pull has one, so its bytes are spelled out, as those of `sent` are."""

from __future__ import annotations

from struct import Struct
from typing import Final

from .codes import RESPONSE_FLAG, VERSION, Language
from .frame import JSON, ROCKETMQ, Frame, encode_head
from .headers import PullMessageResult, write

_JAVA: Final = int(Language.JAVA)
_PREFIX: Final = Struct(">II")
_BINARY_HEAD: Final = Struct(">IIhBhiii5si")  # the last two: the remark, and the length of the fields
_FIELDS: Final = b"\0\x14suggestWhichBrokerId\0\0\0\x010\0\x0fnextBeginOffset%b%b\0\tminOffset%b%b\0\tmaxOffset%b%b"
_pack_int: Final = Struct(">i").pack


def encode_found_head(serialize_type: int, opaque: int, offsets: tuple[int, int, int], body_bytes: int) -> bytes:
    """The frame without its body, as `encode_head` makes it. `offsets`: of the next pull, and the queue's begin and end."""
    if serialize_type == JSON:
        header = (
            b'{"code":0,"extFields":{"suggestWhichBrokerId":"0","nextBeginOffset":"%d","minOffset":"%d","maxOffset":"%d"},'
            b'"flag":%d,"language":"JAVA","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":%d,"remark":"FOUND"}'
            % (*offsets, RESPONSE_FLAG, opaque, VERSION)
        )
        return _PREFIX.pack(4 + len(header) + body_bytes, len(header)) + header
    if serialize_type == ROCKETMQ:
        after, begin, end = (b"%d" % offset for offset in offsets)
        fields = _FIELDS % (_pack_int(len(after)), after, _pack_int(len(begin)), begin, _pack_int(len(end)), end)
        size = 26 + len(fields)  # the header has its remark, too
        prefix = 4 + size + body_bytes, ROCKETMQ << 24 | size
        return _BINARY_HEAD.pack(*prefix, 0, _JAVA, VERSION, opaque, RESPONSE_FLAG, 5, b"FOUND", len(fields)) + fields
    ext = write(PullMessageResult(0, *offsets))
    return encode_head(Frame(0, opaque, ext, b"", RESPONSE_FLAG, "FOUND", _JAVA, VERSION, serialize_type), body_bytes)
