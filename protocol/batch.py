"""The body of SEND_BATCH_MESSAGE: made by a producer, turned into records by a broker without an object per message.

    int32 size, magic, crc, flag | int32 body size, body | int16 properties size, properties

As on Apache's broker, `magic` and `crc` are 0 and not looked at, and the header's properties count for each message.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, count, repeat
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from . import properties as props
from .checksum import crc32
from .config import MAX_BATCH_ENTRIES, SENT_PROPERTY_BYTES
from .message import CHECKSUM_BYTES, CHECKSUM_MARK, MAGIC, MessageError
from .subscription import tag_code

_ENTRY: Final = Struct(">iIIii")
_READ_ENTRY: Final = Struct(">i8xii")  # without what is not looked at
_SIZE: Final = Struct(">h")
ENTRY_BYTES: Final = _ENTRY.size + _SIZE.size  # a message without body and properties
_SHARED: Final = {(born, store): Struct(f">iq{born}sq{store}siq") for born in (8, 20) for store in (8, 20)}
_TAGS_MARK: Final = (props.TAGS + props.NAME_END).encode()
_PAIR_END: Final = props.PAIR_END.encode()
PIECE_MESSAGES: Final = 512  # whose records are made at once: their columns stay in the processor's cache
PIECE_BYTES: Final = 512 * 1024  # in which they begin
_APART: Final = b"\n"  # ASCII, so that no character can begin before it and end behind it


def _unmarked(position: int) -> bytes:
    return b""


class BatchEntry(NamedTuple):
    flag: int
    body: bytes
    properties: str


class Shared(NamedTuple):
    """The fields that all records of a batch share. `topic` carries its length byte in front, and `sys_flag` must say the
    kinds of the hosts."""

    topic: bytes
    queue_id: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    store_ms: int
    store_host: bytes
    reconsume_times: int


class Piece(NamedTuple):
    """Some of a batch's messages, at least one: their flags, bodies and properties. `is_tagged`: whether one may have a
    tag."""

    flags: list[int]
    bodies: list[bytes]
    texts: list[bytes]
    is_tagged: bool


class Records(NamedTuple):
    """The records of a batch, one behind the other: their bytes, and of each its position, size and tag code."""

    data: bytes
    positions: list[int]
    sizes: list[int]
    tag_codes: list[int]


def encode_batch(entries: Sequence[tuple[int, bytes, str]]) -> bytes:
    """The body of SEND_BATCH_MESSAGE, of BatchEntry values or the like."""
    if not entries:
        return b""
    flags, bodies, texts = zip(*entries, strict=True)
    return encode_columns(flags, bodies, [text.encode() for text in texts])


def encode_columns(flags: Iterable[int], bodies: Sequence[bytes], texts: Sequence[bytes]) -> bytes:
    """Like `encode_batch`, from columns: the messages' flags, bodies and properties."""
    body_sizes, text_sizes = list(map(len, bodies)), list(map(len, texts))
    sizes = [ENTRY_BYTES + body_size + text_size for body_size, text_size in zip(body_sizes, text_sizes, strict=True)]
    parts = [b""] * (4 * len(texts))
    parts[0::4] = map(_ENTRY.pack, sizes, repeat(0), repeat(0), flags, body_sizes)
    parts[1::4], parts[2::4], parts[3::4] = bodies, map(_SIZE.pack, text_sizes), texts
    return b"".join(parts)


def decode_batch(data: bytes) -> list[BatchEntry]:
    """The messages of a batch body. Raises MessageError if it is garbled or holds more than 65,536."""
    return [
        BatchEntry(flag, body, text.decode())
        for piece in split(data)
        for flag, body, text in zip(*piece[:3], strict=True)
    ]


def split(data: bytes, shared: bytes = b"") -> Iterator[Piece]:
    """A batch body's messages, cut out; their properties end with the shared ones. Raises MessageError if it is garbled, if
    it holds more than 65,536, and for properties that are too long."""
    before = at = 0
    while at < len(data):
        piece, at = _cut(data, at, before, shared)
        before += len(piece.flags)
        yield piece


def _cut(data: bytes, at: int, before: int, shared: bytes) -> tuple[Piece, int]:
    """The piece that begins at `at`, with `before` messages in front of it; and where it ends."""
    flags: list[int] = []
    bodies: list[bytes] = []
    texts: list[bytes] = []
    head_at, end, last = _READ_ENTRY.unpack_from, len(data), at + PIECE_BYTES
    try:
        for _ in range(min(PIECE_MESSAGES, MAX_BATCH_ENTRIES - before)):
            if at >= last or at == end:
                break
            size, flag, body_size = head_at(data, at)
            begin = at + 20
            at += size
            size_at = begin + body_size
            text_at = size_at + 2
            if body_size < 0 or at > end or text_at + (data[size_at] << 8 | data[size_at + 1]) != at:
                raise MessageError(f"batch entry {before + len(flags)} is garbled")
            flags.append(flag)
            bodies.append(data[begin:size_at])
            texts.append(data[text_at:at])
    except (StructError, IndexError):
        raise MessageError(f"batch entry {before + len(flags)} is cut off") from None
    if at < end and before + len(flags) == MAX_BATCH_ENTRIES:
        raise MessageError(f"a batch holds at most {MAX_BATCH_ENTRIES} messages")
    is_tagged = _TAGS_MARK in _checked(texts) or _TAGS_MARK in shared
    return Piece(flags, bodies, _completed(texts, shared) if shared else texts, is_tagged), at


def _checked(texts: list[bytes]) -> bytes:
    """The properties of all messages together. Raises MessageError if one's are not UTF-8."""
    joined = _APART.join(texts)
    if not joined.isascii():
        try:
            joined.decode()
        except UnicodeDecodeError:
            raise MessageError("the batch has properties that are not UTF-8") from None
    return joined


def _completed(texts: list[bytes], shared: bytes) -> list[bytes]:
    """Each message's own properties and those of all. Raises MessageError if they are too long together."""
    joined = _PAIR_END + shared
    whole = [text + (shared if text[-1] == _PAIR_END[0] else joined) if text else shared for text in texts]
    longest = max(map(len, whole))
    if longest > SENT_PROPERTY_BYTES:
        raise MessageError(
            f"the properties have {longest} bytes with the broker's own; {SENT_PROPERTY_BYTES} are allowed"
        )
    return whole


def encode_records(
    pieces: Iterable[Piece],
    shared: Shared,
    queue_offset: int,
    position: int,
    mark: Callable[[int], bytes] = _unmarked,
) -> Records:
    """The records of a batch's messages, from a queue offset and a commit log position on: the bytes that `encode_record`
    makes of each. Raises MessageError for properties that are too long. `mark` gives the mark behind the properties of each
    piece's first record.

    Column by column, because a step for all messages costs a fraction of a step for each.
    """
    made = Records(b"", [], [], [])
    data: list[bytes] = []
    for piece in pieces:
        found = _records(piece, shared, queue_offset + len(made.sizes), position, mark)
        data.append(found.data)
        position += len(found.data)
        made.positions.extend(found.positions)
        made.sizes.extend(found.sizes)
        made.tag_codes.extend(found.tag_codes)
    return made._replace(data=data[0] if len(data) == 1 else b"".join(data))


def _records(piece: Piece, shared: Shared, queue_offset: int, position: int, mark: Callable[[int], bytes]) -> Records:
    flags, bodies, texts, is_tagged = piece
    texts = [texts[0] + mark(position), *texts[1:]]
    text_sizes = [len(text) + CHECKSUM_BYTES for text in texts]
    body_sizes = list(map(len, bodies))
    middle = _SHARED[len(shared.born_host), len(shared.store_host)].pack(*shared[2:], 0)
    head = Struct(f">iIIiiqq{len(middle)}si")
    fixed = head.size + len(shared.topic) + 2
    sizes = [fixed + body_size + text_size for body_size, text_size in zip(body_sizes, text_sizes, strict=True)]
    positions = list(accumulate(sizes[:-1], initial=position))
    crcs = [crc & 0x7FFFFFFF for crc in map(crc32, bodies)]
    places = (repeat(shared.queue_id), flags, count(queue_offset), positions)
    heads = list(map(head.pack, sizes, repeat(MAGIC), crcs, *places, repeat(middle), body_sizes))
    before = {size: shared.topic + _SIZE.pack(size) for size in set(text_sizes)}
    tails = [before[size] + text for size, text in zip(text_sizes, texts, strict=True)]
    parts = [CHECKSUM_MARK] * (5 * len(bodies))
    parts[0::5], parts[1::5], parts[2::5] = heads, bodies, tails
    parts[4::5] = _checksums(heads, tails)
    return Records(b"".join(parts), positions, sizes, _tag_codes(texts) if is_tagged else [0] * len(texts))


def _checksums(heads: list[bytes], tails: list[bytes]) -> list[bytes]:
    """The checksum at the end of each record, as text. Messages that are sent leave room for the property."""
    found = map(crc32, tails, map(crc32, heads))
    return hexlify(Struct(f">{len(heads)}I").pack(*found), b" ", 4).split()


def _tag_codes(texts: list[bytes]) -> list[int]:
    """The hashes that a broker filters by. Most batches have no tag at all."""
    return [tag_code(text.decode()) if _TAGS_MARK in text else 0 for text in texts]
