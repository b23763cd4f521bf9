"""Message records: encoding and decoding, batches, popped messages, compression, recall handles."""

from __future__ import annotations

import binascii
import io
import math
import zlib
from base64 import b64decode, urlsafe_b64encode
from binascii import hexlify
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from ipaddress import IPv6Address, ip_address
from itertools import accumulate, count, repeat
from struct import Struct
from struct import error as StructError
from typing import Final, Literal, NamedTuple

from . import fast
from . import properties as props
from .bodies import Work
from .checksum import crc32
from .codes import (
    SYS_BORNHOST_V6,
    SYS_COMPRESSED,
    SYS_COMPRESSION_LZ4,
    SYS_COMPRESSION_MASK,
    SYS_COMPRESSION_ZLIB,
    SYS_COMPRESSION_ZSTD,
    SYS_STOREHOST_V6,
)
from .config import (
    GZIP_MEMBER_BYTES,
    INFLATED_PIECE_BYTES,
    MAX_BATCH_ENTRIES,
    MAX_BODY_BYTES,
    MAX_DECOMPRESSED_BYTES,
    MAX_ID_CHARS,
    MAX_PROPERTY_BYTES,
    SENT_PROPERTY_BYTES,
)
from .names import retry_topic, tag_code

# ------------------------------------------------------------------------------
# The message record: the same bytes in the commit log, in a pull's answer, and in a consumer's hands.
#
#     0 total  4 magic  8 body crc  12 queue id  16 flag  20 queue offset  28 physical offset  36 sys flag
#     40 born time  48 born host  store time  store host  reconsume times  prepared transaction offset
#     int32 body size, body | int8 topic size, topic | int16 properties size, properties
#
# All integers are big-endian; times are in ms. A host is 4 or 16 address bytes and an int32 port; the sys flag says
# which. Offsets below hold for two IPv4 hosts; each IPv6 host adds 12 bytes.


MAGIC: Final = 0xDAA320A7
CHECKSUM_MARK: Final = b"\x02\x03"  # behind the properties; what has no name is no property to any client
CHECKSUM_BYTES: Final = 10  # the mark and a CRC-32 in hex
BEGIN_MARK: Final = (
    b"\x02\x04"  # before the checksum of some records: where the record begins, as only its broker can say it
)
BEGIN_BYTES: Final = 14  # the mark and 12 characters of base64
MAX_HEAD_BYTES: Final = 112  # before a body, with both hosts IPv6
FIXED_BYTES: Final = 91  # a record without body, topic and properties, both hosts IPv4
MAX_RECORD_BYTES: Final = FIXED_BYTES + 24 + MAX_BODY_BYTES + 127 + MAX_PROPERTY_BYTES

MAX_RECONSUME_TIMES: Final = 0x7FFF_FFFF  # a signed integer of 32 bits

_HEADS: Final = {(born, store): Struct(f">iIIiiqqiq{born}sq{store}siqi") for born in (8, 20) for store in (8, 20)}
_HEAD_V4: Final = _HEADS[8, 8]
_pack_v4: Final = _HEAD_V4.pack
_HEX: Final = frozenset(b"0123456789abcdef")
_CHECKSUM_TEXT: Final = CHECKSUM_MARK.decode()
_BEGIN_TEXT: Final = BEGIN_MARK.decode()
_SHORT: Final = Struct(">h")
_pack_short: Final = _SHORT.pack
_START: Final = Struct(">iI")
_size_and_offset: Final = Struct(">i24xq").unpack_from
_PLACE: Final = Struct(">iIIiiqqi")  # a record's head up to its sys flag


class MessageError(ValueError):
    """The bytes are not a message record, or the values cannot become one."""


def encode_host(address: str, port: int) -> bytes:
    """8 bytes for an IPv4 address, 20 for an IPv6 one. Raises MessageError for anything else."""
    try:
        return ip_address(address).packed + port.to_bytes(4, "big")
    except ValueError:
        raise MessageError(f"{address!r} is not an IP address") from None


def decode_host(data: bytes) -> tuple[str, int]:
    """The address and the port of 8 or 20 bytes. Raises ValueError for another number of them."""
    port = int.from_bytes(data[-4:], "big")
    if len(data) == 8:
        return ".".join(map(str, data[:4])), port
    address = IPv6Address(bytes(data[:-4]))
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address), port


def tried(reconsume_times: int) -> int:
    """Return a number of earlier attempts that every client and every protocol takes. Any client may store any number."""
    return min(max(reconsume_times, 0), MAX_RECONSUME_TIMES)


def host_flags(born_host: bytes, store_host: bytes) -> int:
    return (SYS_BORNHOST_V6 if len(born_host) == 20 else 0) | (SYS_STOREHOST_V6 if len(store_host) == 20 else 0)


def encode_record(
    queue_id: int,
    flag: int,
    queue_offset: int,
    physical_offset: int,
    sys_flag: int,
    born_ms: int,
    born_host: bytes,
    store_ms: int,
    store_host: bytes,
    reconsume_times: int,
    prepared_offset: int,
    body: bytes,
    topic: bytes,
    properties: bytes,
) -> bytes:
    """One record. `topic` carries its length byte in front; `sys_flag` must say the kinds of the hosts.

    Its last ten bytes are a checksum over all but the body, which has one of its own in the head. Properties that leave
    no room for it go without.
    """
    born_size, store_size, body_size = len(born_host), len(store_host), len(body)
    size = len(properties) + CHECKSUM_BYTES
    if size > MAX_PROPERTY_BYTES:
        size -= CHECKSUM_BYTES
    tail = topic + _pack_short(size) + properties
    whole = 74 + born_size + store_size + body_size + len(topic) + size
    pack = _pack_v4 if born_size == store_size == 8 else _HEADS[born_size, store_size].pack
    # UtilAll.crc32 has no sign bit.
    head = pack(
        whole, MAGIC, crc32(body) & 0x7FFFFFFF, queue_id, flag, queue_offset, physical_offset, sys_flag, born_ms, born_host,
        store_ms, store_host, reconsume_times, prepared_offset, body_size,
    )  # fmt: skip
    if size == len(properties):
        return head + body + tail
    return b"".join((head, body, tail, CHECKSUM_MARK, b"%08x" % crc32(tail, crc32(head))))


class Record(NamedTuple):
    """A decoded record; `size` is its length in bytes, `properties` its text, `body` as stored."""

    size: int
    crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    store_ms: int
    store_host: bytes
    reconsume_times: int
    prepared_offset: int
    body: bytes
    topic: str
    properties: str

    @property
    def offset_id(self) -> str:
        return offset_id(self.store_host, self.physical_offset)

    def may_be(self, message_id: str | None) -> bool:
        """Whether a client that names a message and its place in the log can mean this record. A message that was lost with
        the end of the log is another than the one in its place. Clients know a message by its unique key, or by its place."""
        key = props.find(self.properties, props.UNIQUE_KEY)
        return not message_id or key is None or message_id in (key, self.offset_id)


def decode_record(data: bytes, position: int = 0, errors: Literal["strict", "replace"] = "strict") -> Record:
    """The record at `position`. Raises MessageError if it is not there or cut off. `errors`: "replace" puts U+FFFD for bytes
    of the topic and the properties that are not UTF-8, as Java does; Apache's brokers store such bytes."""
    try:
        head = _HEAD_V4
        if data[position + 39] & 0x30:
            head = _head_of(data, position)
        fields = head.unpack_from(data, position)
        size, magic, body_size = fields[0], fields[1], fields[14]
        body_at = position + head.size
        topic_at = body_at + body_size + 1
        properties_at = topic_at + data[topic_at - 1] + 2
        end = properties_at + (data[properties_at - 2] << 8 | data[properties_at - 1])
        if magic != MAGIC or end - position != size or end > len(data) or body_size < 0:
            raise MessageError(f"there is no message record at byte {position}")
        topic = data[topic_at : properties_at - 2].decode("utf-8", errors)
        properties = data[properties_at:end].decode("utf-8", errors)
        return Record._make((size, *fields[2:14], data[body_at : topic_at - 1], topic, properties))
    except (StructError, IndexError, UnicodeDecodeError):
        raise MessageError(f"the message record at byte {position} is truncated or malformed") from None


def _head_of(data: bytes, position: int) -> Struct:
    flags = data[position + 39]
    return _HEADS[20 if flags & SYS_BORNHOST_V6 else 8, 20 if flags & SYS_STOREHOST_V6 else 8]


def record_size(data: bytes, position: int, most: int = MAX_RECORD_BYTES) -> int:
    """The size of the record at `position` by its first 8 bytes; 0 if none of `most` bytes can begin there."""
    if len(data) - position < 8:
        return 0
    size, magic = _START.unpack_from(data, position)
    return size if magic == MAGIC and FIXED_BYTES <= size <= most else 0


def places_in(data: bytes | memoryview, positions: Iterable[int]) -> list[tuple[int, int]]:
    """The size and the place in the log that each record claims, for the records at some positions. Raises MessageError
    where there is no room for a record's head."""
    try:
        return [_size_and_offset(data, position) for position in positions]
    except StructError:
        raise MessageError("there is no room for a message record's head") from None


def decode_records(data: bytes) -> Iterator[Record]:
    """The records of a pull's body, in order, with U+FFFD for bytes that are not UTF-8. Raises MessageError for the first
    that cannot be read."""
    position, end = 0, len(data)
    while position < end:
        record = decode_record(data, position, "replace")
        position += record.size
        yield record


def split_records(data: bytes) -> list[bytes]:
    """The bytes of each record of a pull's body, in order and not decoded. Raises MessageError where none can begin."""
    records: list[bytes] = []
    position, end, head_at = 0, len(data), _START.unpack_from
    try:
        while position < end:
            size, magic = head_at(data, position)
            if magic != MAGIC or size < FIXED_BYTES or size > end - position:
                raise MessageError(f"there is no message record at byte {position}")
            records.append(data[position : position + size])
            position += size
    except StructError:
        raise MessageError(f"the message record at byte {position} is truncated or malformed") from None
    return records


def body_begin(data: bytes) -> int:
    """Where the body begins in a record's bytes."""
    flags = data[39] if len(data) > 39 else 0
    return 88 + (12 if flags & SYS_BORNHOST_V6 else 0) + (12 if flags & SYS_STOREHOST_V6 else 0)


def offset_in(data: bytes) -> int:
    """The queue offset in a record's bytes."""
    return int.from_bytes(data[20:28], "big")


def physical_offset_in(data: bytes) -> int:
    """The place in the commit log that a record's bytes name."""
    return int.from_bytes(data[28:36], "big")


def offset_id_in(data: bytes) -> str:
    """The broker's id in a record's bytes."""
    host_at = store_time_at(data) + 8
    size = 20 if data[39] & SYS_STOREHOST_V6 else 8
    return offset_id(data[host_at : host_at + size], physical_offset_in(data))


def properties_in(data: bytes) -> str:
    """The properties in a record's bytes, with U+FFFD for bytes that are not UTF-8. Raises MessageError if they are not
    there."""
    try:
        body_at = body_begin(data)
        topic_at = body_at + int.from_bytes(data[body_at - 4 : body_at], "big")
        text_at = topic_at + data[topic_at] + 3
        if text_at + (data[text_at - 2] << 8 | data[text_at - 1]) != len(data):
            raise MessageError("a message record has properties of another size than it says")
        return data[text_at:].decode("utf-8", "replace")
    except IndexError:
        raise MessageError("a message record is truncated or malformed") from None


def is_intact(data: bytes, position: int, record: Record, *, is_summed: bool = False) -> bool:
    """Whether the record decoded from `data` at `position` is intact. Records of earlier releases, and of other brokers,
    have a checksum over the body only; `is_summed`: this one has one over all of it."""
    if crc32(record.body) & 0x7FFFFFFF != record.crc:
        return False
    if has_checksum(data, position, record):
        return True
    end = position + record.size
    mark, checksum = data[end - CHECKSUM_BYTES : end - 8], data[end - 8 : end]
    if mark == CHECKSUM_MARK:
        return False
    if is_summed:
        return len(record.properties.encode()) + CHECKSUM_BYTES > MAX_PROPERTY_BYTES
    # No checksum, unless the mark itself is damaged: no property looks so.
    return not (_HEX.issuperset(checksum) and (mark[:1] == CHECKSUM_MARK[:1] or mark[1:] == CHECKSUM_MARK[1:]))


def has_checksum(data: bytes, position: int, record: Record) -> bool:
    """Whether the record has a checksum over all but its body, and is as that says: its size is right then, whatever
    its body is."""
    end = position + record.size - CHECKSUM_BYTES
    body_at = position + 72 + len(record.born_host) + len(record.store_host)
    head, tail = data[position:body_at], data[body_at + len(record.body) : end]
    return data[end : end + CHECKSUM_BYTES] == CHECKSUM_MARK + b"%08x" % crc32(tail, crc32(head))


def is_certainly(data: bytes, topic: bytes, queue_id: int, queue_offset: int, physical_offset: int) -> bool:
    """Whether the bytes are the record of that place, by its checksums and without decoding it. `topic` carries its length
    byte. False also for records without a checksum, which have to be decoded."""
    size = len(data)
    if size < FIXED_BYTES:
        return False
    total, magic, crc, found_id, _, found_offset, position, flags = _PLACE.unpack_from(data)
    if total != size or magic != MAGIC or found_id != queue_id:
        return False
    if found_offset != queue_offset or position != physical_offset:
        return False
    body_at = 88 + (12 if flags & SYS_BORNHOST_V6 else 0) + (12 if flags & SYS_STOREHOST_V6 else 0)
    topic_at = body_at + int.from_bytes(data[body_at - 4 : body_at], "big")
    end = size - CHECKSUM_BYTES
    if not data.startswith(topic, topic_at) or not data.startswith(CHECKSUM_MARK, end):
        return False
    checksum = b"%08x" % crc32(data[topic_at:end], crc32(data[:body_at]))
    return data.endswith(checksum) and crc32(data[body_at:topic_at]) & 0x7FFFFFFF == crc


def stored_ms(
    parts: bytes, size: int, topic: bytes, queue_id: int, queue_offset: int, physical_offset: int
) -> int | None:
    """When the record of that place and size was stored, by its bytes before and behind the body. None if its checksum does
    not say so, and for records without one."""
    if len(parts) < FIXED_BYTES:
        return None
    total, magic, _, found_id, _, found_offset, position, _ = _PLACE.unpack_from(parts)
    if (total, magic, found_id, found_offset, position) != (size, MAGIC, queue_id, queue_offset, physical_offset):
        return None
    body_at, end = body_begin(parts), len(parts) - CHECKSUM_BYTES
    checksum = CHECKSUM_MARK + b"%08x" % crc32(parts[:end])
    if not parts.endswith(checksum) or not parts.startswith(topic, body_at):
        return None
    at = store_time_at(parts)
    return int.from_bytes(parts[at : at + 8], "big")


def store_time_at(data: bytes | memoryview) -> int:
    """Where a record's store time is: behind the born host."""
    return 68 if data[39] & SYS_BORNHOST_V6 else 56


def without_checksum(record: Record) -> Record:
    """The record with the properties as they were given, to be stored again."""
    text = record.properties
    end = _without(text, _CHECKSUM_TEXT, CHECKSUM_BYTES, len(text))
    return (
        record
        if end == len(text)
        else record._replace(properties=text[: _without(text, _BEGIN_TEXT, BEGIN_BYTES, end)])
    )


def _without(text: str, mark: str, size: int, end: int) -> int:
    at = end - size
    return at if at >= 0 and text.startswith(mark, at, end) else end


def offset_id(store_host: bytes, physical_offset: int) -> str:
    """The id by which a broker finds a message: its address and the commit log offset, in hex."""
    return f"{store_host.hex().upper()}{physical_offset:016X}"


# ------------------------------------------------------------------------------
# The body of SEND_BATCH_MESSAGE: made by a producer, turned into records by a broker without an object per message.
#
#     int32 size, magic, crc, flag | int32 body size, body | int16 properties size, properties
#
# As on Apache's broker, `magic` and `crc` are 0 and not checked, and the header's properties count for each
# message.


_ENTRY: Final = Struct(">iIIii")
_READ_ENTRY: Final = Struct(">i8xii")  # without the fields that are not used
_SIZE: Final = Struct(">h")
ENTRY_BYTES: Final = _ENTRY.size + _SIZE.size  # a message without body and properties
_SHARED: Final = {(born, store): Struct(f">iq{born}sq{store}siq") for born in (8, 20) for store in (8, 20)}
_TAGS_MARK: Final = (props.TAGS + props.NAME_END).encode()
_PAIR_END: Final = props.PAIR_END.encode()
PIECE_MESSAGES: Final = 512  # messages whose records are made together: their columns stay in the processor's cache
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
    return encode_columns(list(flags), list(bodies), list(texts))


def encode_columns(flags: list[int], bodies: list[bytes], texts: list[str]) -> bytes:
    """Like `encode_batch`, from columns: the messages' flags, bodies and properties."""
    made = fast.entries(flags, bodies, texts)
    return _encode_columns(flags, bodies, [text.encode() for text in texts]) if made is None else made


def _encode_columns(flags: list[int], bodies: list[bytes], texts: list[bytes]) -> bytes:
    body_sizes, text_sizes = list(map(len, bodies)), list(map(len, texts))
    sizes = [ENTRY_BYTES + body_size + text_size for body_size, text_size in zip(body_sizes, text_sizes, strict=True)]
    parts = [b""] * (4 * len(texts))
    parts[0::4] = map(_ENTRY.pack, sizes, repeat(0), repeat(0), flags, body_sizes)
    parts[1::4], parts[2::4], parts[3::4] = bodies, map(_SIZE.pack, text_sizes), texts
    return b"".join(parts)


def decode_batch(data: bytes) -> list[BatchEntry]:
    """The messages of a batch body. Raises MessageError if it is malformed or holds more than 65,536."""
    return [
        BatchEntry(flag, body, text.decode())
        for piece in split(data)
        for flag, body, text in zip(*piece[:3], strict=True)
    ]


def split(data: bytes, shared: bytes = b"") -> Iterator[Piece]:
    """A batch body's messages, cut out; their properties end with the shared ones. Raises MessageError if it is malformed, if
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
                raise MessageError(f"batch entry {before + len(flags)} is malformed")
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
    tag_codes = _tag_codes(texts) if is_tagged else [0] * len(texts)
    middle = _SHARED[len(shared.born_host), len(shared.store_host)].pack(*shared[2:], 0)
    crcs = [crc & 0x7FFFFFFF for crc in map(crc32, bodies)]
    made = fast.records(flags, bodies, texts, crcs, shared.topic, shared.queue_id, middle, queue_offset, position)
    if made is not None:
        return Records(*made, tag_codes)
    text_sizes = [len(text) + CHECKSUM_BYTES for text in texts]
    body_sizes = list(map(len, bodies))
    head = Struct(f">iIIiiqq{len(middle)}si")
    fixed = head.size + len(shared.topic) + 2
    sizes = [fixed + body_size + text_size for body_size, text_size in zip(body_sizes, text_sizes, strict=True)]
    positions = list(accumulate(sizes[:-1], initial=position))
    places = (repeat(shared.queue_id), flags, count(queue_offset), positions)
    heads = list(map(head.pack, sizes, repeat(MAGIC), crcs, *places, repeat(middle), body_sizes))
    before = {size: shared.topic + _SIZE.pack(size) for size in set(text_sizes)}
    tails = [before[size] + text for size, text in zip(text_sizes, texts, strict=True)]
    parts = [CHECKSUM_MARK] * (5 * len(bodies))
    parts[0::5], parts[1::5], parts[2::5] = heads, bodies, tails
    parts[4::5] = _checksums(heads, tails)
    return Records(b"".join(parts), positions, sizes, tag_codes)


def _checksums(heads: list[bytes], tails: list[bytes]) -> list[bytes]:
    """The checksum at the end of each record, as text. Messages that are sent leave room for the property."""
    found = map(crc32, tails, map(crc32, heads))
    return hexlify(Struct(f">{len(heads)}I").pack(*found), b" ", 4).split()


def _tag_codes(texts: list[bytes]) -> list[int]:
    """The hashes that a broker filters by. Most batches have no tag at all."""
    return [tag_code(text.decode()) if _TAGS_MARK in text else 0 for text in texts]


# ------------------------------------------------------------------------------
# Records as a client that pops gets them, and the texts beside them (Apache's ExtraInfoUtil).


POP_CK: Final = "POP_CK"

_LONGER: Final = 12  # by which an IPv6 host is longer


def with_attempts(record: bytes, reconsume_times: int, handle: str) -> bytes:
    """A record that says how often it was tried before, and what to acknowledge it with. It has no checksum of its
    properties any more. A record whose properties leave no room for the handle goes without; the client makes it then.

    Raises MessageError if it is no record."""
    try:
        flags = record[39]
        times_at = 72 + (_LONGER if flags & SYS_BORNHOST_V6 else 0) + (_LONGER if flags & SYS_STOREHOST_V6 else 0)
        body_at = times_at + 16
        topic_at = body_at + int.from_bytes(record[body_at - 4 : body_at], "big")
        size_at = topic_at + record[topic_at] + 1
        text = record[size_at + 2 :]
        if size_at + 2 > len(record) or len(text) != int.from_bytes(record[size_at : size_at + 2], "big"):
            raise MessageError("a message record has properties of another size than it says")
    except IndexError:
        raise MessageError("a message record is cut off") from None
    if text[-CHECKSUM_BYTES:].startswith(CHECKSUM_MARK):
        text = text[:-CHECKSUM_BYTES]
    mark = f"{POP_CK}\x01{handle}".encode()
    longer = b"%b\x02%b" % (text.removesuffix(b"\x02"), mark) if text else mark
    if len(longer) <= MAX_PROPERTY_BYTES:
        text = longer
    size = size_at + 2 + len(text)
    return b"".join(
        (
            size.to_bytes(4, "big"),
            record[4:times_at],
            tried(reconsume_times).to_bytes(4, "big"),
            record[times_at + 4 : size_at],
            len(text).to_bytes(2, "big"),
            text,
        )
    )


def reconsume_times_in(record: bytes) -> int:
    """How often a record had been tried before it was stored. Raises MessageError if it is cut off."""
    if len(record) < 76 + 2 * _LONGER:
        raise MessageError("a message record is cut off")
    flags = record[39]
    at = 72 + (_LONGER if flags & SYS_BORNHOST_V6 else 0) + (_LONGER if flags & SYS_STOREHOST_V6 else 0)
    return tried(int.from_bytes(record[at : at + 4], "big", signed=True))


class Receipt(NamedTuple):
    """A client acknowledges a message by its receipt. Its text is these fields, joined by blanks (ExtraInfoUtil). `mark`: 0
    for the topic itself, others for the retry topics of Apache's brokers."""

    start_offset: int
    pop_ms: int
    invisible_ms: int
    revive_qid: int
    mark: str
    broker_name: str
    queue_id: int
    offset: int

    @property
    def text(self) -> str:
        return " ".join(map(str, self))

    def topic(self, group: str, topic: str) -> str:
        """Where the message lies (ExtraInfoUtil.getRealTopic)."""
        if self.mark == "1":
            return f"{retry_topic(group)}_{topic}"
        return f"{retry_topic(group)}+{topic}" if self.mark == "2" else topic


def receipt_of(text: str) -> Receipt:
    """Raises MessageError."""
    fields = text.split(" ")
    try:
        start, pop_ms, invisible_ms, revive_qid, mark, broker_name, queue_id, offset = fields[:8]
        times = int(pop_ms), int(invisible_ms)
        return Receipt(int(start), *times, int(revive_qid), mark, broker_name, int(queue_id), int(offset))
    except ValueError:
        raise MessageError(f"{text[:80]!r} is no receipt handle") from None


def starts_of(text: str) -> dict[int, int]:
    """The start offsets in startOffsetInfo by queue id, for the topic itself. Raises MessageError."""
    try:
        entries = [entry.split(" ") for entry in text.split(";") if entry]
        return {int(queue_id): int(offset) for mark, queue_id, offset in entries if mark == "0"}
    except ValueError:
        raise MessageError(f"{text[:80]!r} is no list of start offsets") from None


def tried_in(text: str) -> dict[str, int]:
    """How often messages were tried that Apache's brokers give out in order: by `queue id`, or by `qo<queue id>%<offset>`,
    which counts for more. Raises MessageError."""
    try:
        entries = [entry.split(" ") for entry in text.split(";") if entry]
        return {of: int(count) for _, of, count in entries}
    except ValueError:
        raise MessageError(f"{text[:80]!r} is no list of tries") from None


def offset_texts(places: Iterable[tuple[int, int, int]]) -> tuple[str, str]:
    """startOffsetInfo and msgOffsetInfo of messages by mark, queue id and offset: an entry for each mark and queue, its
    offsets in the order of the answer's body."""
    offsets: dict[tuple[int, int], list[int]] = {}
    for mark, queue_id, offset in places:
        offsets.setdefault((mark, queue_id), []).append(offset)
    starts = [f"{mark} {queue_id} {min(found)}" for (mark, queue_id), found in offsets.items()]
    lists = [f"{mark} {queue_id} {','.join(map(str, found))}" for (mark, queue_id), found in offsets.items()]
    return ";".join(starts), ";".join(lists)


# ------------------------------------------------------------------------------
# How bodies are compressed. The sender chooses, and the sys flag says how; brokers never touch it.
#
# Ours send zlib, as Apache's 4.9. LZ4 and Zstandard come from other senders; their libraries are an extra, loaded
# when needed.


ZLIB_LEVEL: Final = 5
ZSTD_WINDOW_BYTES: Final = 8 * 1024 * 1024  # which all decoders take, by the format's own advice (RFC 8878, 3.1.1.1.2)


def compressed(body: bytes) -> tuple[bytes, int]:
    """The body as Apache's producers compress it (zlib), and the sys flag that says so."""
    return zlib.compress(body, ZLIB_LEVEL), SYS_COMPRESSED | SYS_COMPRESSION_ZLIB


def decompressed(body: bytes, sys_flag: int, most: int = MAX_DECOMPRESSED_BYTES) -> bytes:
    """The body as the producer had it. Raises MessageError if it cannot be read or has more bytes than `most`."""
    if not sys_flag & SYS_COMPRESSED:
        return body
    plain, ended = _inflated(body, sys_flag, most + 1, is_whole=True)
    if not ended or len(plain) > most:
        raise MessageError(f"the compressed body is cut off, or has more than {most} bytes")
    return plain


def begin_of(body: bytes, sys_flag: int, size: int) -> tuple[bytes, bool]:
    """The first `size` bytes of the body as the producer had it, and whether they are all of it. For those who only show a
    body: a message of 64 KB may inflate to 64 MiB, and no more is inflated than was asked for. Raises MessageError."""
    if not sys_flag & SYS_COMPRESSED:
        return body[:size], len(body) <= size
    plain, _ = _inflated(body, sys_flag, size + 1, is_whole=False)
    return plain[:size], len(plain) <= size


def _inflated(body: bytes, sys_flag: int, size: int, *, is_whole: bool) -> tuple[bytes, bool]:
    """Return up to this many bytes, and whether the stream ends with them."""
    try:
        return _inflate(body, sys_flag & SYS_COMPRESSION_MASK, size, is_whole=is_whole)
    except ModuleNotFoundError as missing:
        raise _lacking(missing) from None
    except (zlib.error, RuntimeError, ValueError) as error:
        raise MessageError(f"the compressed body cannot be read: {error}") from None


def _lacking(missing: ModuleNotFoundError) -> MessageError:
    return MessageError(f"the body is compressed, and {missing.name} is missing: pip install '.[compression]'")


def _inflate(body: bytes, kind: int, size: int, *, is_whole: bool) -> tuple[bytes, bool]:
    if kind == SYS_COMPRESSION_LZ4:
        import lz4.frame

        lz4_frame = lz4.frame.LZ4FrameDecompressor()
        return lz4_frame.decompress(body, size), lz4_frame.eof
    if kind == SYS_COMPRESSION_ZSTD:
        return _from_zstd(body, size) if is_whole else _begin_of_zstd(body, size)
    stream = zlib.decompressobj()
    return stream.decompress(body, size), stream.eof


def _from_zstd(body: bytes, size: int) -> tuple[bytes, bool]:
    import zstandard

    try:
        if zstandard.frame_content_size(body) >= size:
            return b"", False
        return zstandard.ZstdDecompressor().decompress(body, size), True
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def _begin_of_zstd(body: bytes, size: int) -> tuple[bytes, bool]:
    import zstandard

    try:
        stream = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).stream_reader(body)
        plain = stream.read(size)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    return plain, len(plain) < size


class SpentTooMuch(Exception):
    """The bodies of one request need more work than it may cause."""


class Inflater:
    """Decompresses the bodies of one request, a piece at a time.

    `spent_bytes` counts the bytes that came out, even if their body then turns out to be damaged or too large, and
    `GZIP_MEMBER_BYTES` for each gzip member. So a body costs its request the same whether it can be read or not.
    """

    def __init__(self, most_spent: float = math.inf) -> None:
        self._most_spent = most_spent
        self.spent_bytes = 0

    def inflating(self, body: bytes, sys_flag: int, most: int) -> Work[bytes]:
        """Return the body as the producer had it.

        Raises:
            MessageError: The body cannot be read, or has more than `most` bytes.
            SpentTooMuch: The work for all bodies is more than `most_spent`.
        """
        kind = sys_flag & SYS_COMPRESSION_MASK
        pieces = {SYS_COMPRESSION_LZ4: _lz4_pieces, SYS_COMPRESSION_ZSTD: _zstd_pieces}.get(kind, _zlib_pieces)
        return self._all(pieces(body), most)

    def inflating_gzip(self, body: bytes, most: int) -> Work[bytes]:
        """Like `inflating`, for gzip, which may consist of several members."""
        return self._all(self._members(body), most)

    def _all(self, pieces: Iterator[bytes], most: int) -> Work[bytes]:
        found: list[bytes] = []
        size = 0
        try:
            for piece in pieces:
                found.append(piece)
                size += len(piece)
                self._spend(len(piece))
                if size > most:
                    raise MessageError(f"the compressed body has more than {most} bytes")
                yield
        except MessageError:
            raise
        except ModuleNotFoundError as missing:
            raise _lacking(missing) from None
        except (zlib.error, EOFError, RuntimeError, ValueError) as error:
            self._spend(INFLATED_PIECE_BYTES)  # nobody knows how much of the last piece was done
            raise MessageError(f"the compressed body cannot be read: {error}") from None
        return b"".join(found)

    def _spend(self, size: int) -> None:
        self.spent_bytes += size
        if self.spent_bytes > self._most_spent:
            raise SpentTooMuch

    def _members(self, body: bytes) -> Iterator[bytes]:
        position = 0
        while position < len(body) or not position:
            if position and not body[position] and not body[position:].strip(b"\0"):
                return  # padding, which RFC 1952 does not mention and all tools take
            self._spend(GZIP_MEMBER_BYTES)
            position = yield from _stream(body, position, zlib.MAX_WBITS + 16)


def _zlib_pieces(body: bytes) -> Iterator[bytes]:
    yield from _stream(body, 0, zlib.MAX_WBITS)


def _lz4_pieces(body: bytes) -> Iterator[bytes]:
    import lz4.frame

    stream, position = lz4.frame.LZ4FrameDecompressor(), 0
    while not stream.eof:
        data = b""
        if stream.needs_input:
            data = body[position : position + INFLATED_PIECE_BYTES]
            position += len(data)
            if not data:
                raise EOFError("it is cut off")
        yield stream.decompress(data, INFLATED_PIECE_BYTES)


_END: Final = b"end of the body " * 16  # compressed, it does not contain itself


def _zstd_pieces(body: bytes) -> Iterator[bytes]:
    """The library does not report that a stream is cut off. So another frame follows the body, which must come out last."""
    import zstandard

    source = io.BytesIO(body + zstandard.compress(_END))
    stream = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).stream_reader(
        source, read_size=INFLATED_PIECE_BYTES, read_across_frames=True
    )
    last = b""
    try:
        while piece := stream.read1(INFLATED_PIECE_BYTES):
            yield last[: -len(_END)]
            last = last[-len(_END) :] + piece
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if not last.endswith(_END):
        raise EOFError("it is cut off")
    yield last[: -len(_END)]


def _stream(body: bytes, position: int, wbits: int) -> Generator[bytes, None, int]:
    """The pieces of a stream of zlib or gzip, which begins at `position`; returns its end. Neither much data that becomes
    little nor little that becomes much takes long in one piece."""
    stream = zlib.decompressobj(wbits)
    data = piece = b""
    while not stream.eof:
        if not data and len(piece) < INFLATED_PIECE_BYTES:
            data = body[position : position + INFLATED_PIECE_BYTES]
            position += len(data)
            if not data:
                raise EOFError("it is cut off")
        piece = stream.decompress(data, INFLATED_PIECE_BYTES)
        data = stream.unconsumed_tail
        yield piece
    return position - len(stream.unused_data)


# ------------------------------------------------------------------------------
# The handle by which a producer takes back a message that waits for its time: Apache's `RecallMessageHandle`, version
# 1.
#
# URL-safe base64, with padding, of `v1 topic broker time key`: the time in ms, the key that the producer gave the
# message.


_VERSION = "v1"


class HandleError(ValueError):
    """The text is no handle."""


class RecallHandle(NamedTuple):
    """`due_ms`: when the message is delivered. Apache's brokers, which cut times to seconds, give another one."""

    topic: str
    broker_name: str
    due_ms: int
    unique_key: str

    def encoded(self) -> str:
        text = f"{_VERSION} {self.topic} {self.broker_name} {self.due_ms} {self.unique_key}"
        return urlsafe_b64encode(text.encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """Raises HandleError."""
    try:
        if len(text) > 8 * MAX_ID_CHARS:
            raise ValueError(text)
        version, topic, broker_name, due_ms, unique_key = (
            b64decode(text.encode("ascii"), altchars=b"-_", validate=True).decode().split(" ")
        )
        if version != _VERSION or not (due_ms.isascii() and due_ms.isdecimal() and len(due_ms) <= 18):
            raise ValueError(text)
    except (ValueError, binascii.Error):
        raise HandleError("recall handle is invalid; give the one that the answer to the send had") from None
    return RecallHandle(topic, broker_name, int(due_ms), unique_key)
