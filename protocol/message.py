"""Message records: encoding and decoding, batches, popped messages, compression, recall handles."""

from __future__ import annotations

import binascii
import math
import sys
import zlib
from base64 import b64decode, urlsafe_b64encode
from binascii import hexlify
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from ipaddress import IPv6Address, ip_address
from itertools import accumulate, count, repeat
from struct import Struct
from struct import error as StructError
from typing import Final, Literal, NamedTuple, Protocol

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
# The message record. The bytes of a record are equal in the commit log, in a pull response, and in a consumer's memory.
# In the response to a pop, the broker adds a receipt handle and changes the number of attempts (`with_attempts`).
#
#     0 total  4 magic  8 body crc  12 queue id  16 flag  20 queue offset  28 physical offset  36 sys flag
#     40 born time  48 born host  store time  store host  reconsume times  prepared transaction offset
#     int32 body size, body | int8 topic size, topic | int16 properties size, properties
#
# All integers are big-endian, and times are in ms. A host consists of 4 or 16 address bytes and an int32 port,
# depending on the sys flag. Offsets in this file are for two IPv4 hosts; each IPv6 host adds 12 bytes.


MAGIC: Final = 0xDAA320A7
CHECKSUM_MARK: Final = b"\x02\x03"  # after the properties; without a name, clients ignore it
CHECKSUM_BYTES: Final = 10  # the mark and a CRC-32 in hex
BEGIN_MARK: Final = (
    # before the checksum of some records: a proof that a record starts here, which only its broker can create
    b"\x02\x04"
)
BEGIN_BYTES: Final = 14  # BEGIN_MARK (2 bytes) and 12 characters of base64
MAX_HEAD_BYTES: Final = 112  # size of the part before the body, with two IPv6 hosts
FIXED_BYTES: Final = 91  # size of a record without body, topic and properties, with two IPv4 hosts
MAX_RECORD_BYTES: Final = FIXED_BYTES + 24 + MAX_BODY_BYTES + 127 + MAX_PROPERTY_BYTES

MAX_RECONSUME_TIMES: Final = 0x7FFF_FFFF  # a signed integer of 32 bits

_HEADS: Final = {(born, store): Struct(f">iIIiiqqiq{born}sq{store}siqi") for born in (8, 20) for store in (8, 20)}
_HEAD_V4: Final = _HEADS[8, 8]
_pack_v4: Final = _HEAD_V4.pack
_CHECKSUM_TEXT: Final = CHECKSUM_MARK.decode()
_BEGIN_TEXT: Final = BEGIN_MARK.decode()
_SHORT: Final = Struct(">h")
_pack_short: Final = _SHORT.pack
_START: Final = Struct(">iI")
_size_and_offset: Final = Struct(">i24xq").unpack_from
_PLACE: Final = Struct(">iIIiiqqi")  # the head of a record up to its sys flag


class MessageError(ValueError):
    """The error for bytes that are not a message record, and for values that cannot be encoded as one."""


def encode_host(address: str, port: int) -> bytes:
    """Encode an address and a port: 8 bytes for IPv4, 20 for IPv6. Raises MessageError for an invalid address."""
    try:
        return ip_address(address).packed + port.to_bytes(4, "big")
    except ValueError:
        raise MessageError(f"{address!r} is not an IP address") from None


def decode_host(data: bytes) -> tuple[str, int]:
    """Decode an address and a port of 8 or 20 bytes. Raises ValueError for another size."""
    port = int.from_bytes(data[-4:], "big")
    if len(data) == 8:
        return ".".join(map(str, data[:4])), port
    address = IPv6Address(bytes(data[:-4]))
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address), port


def tried(reconsume_times: int) -> int:
    """Clamp a number of earlier attempts to the range that every client and protocol accepts, because clients may store
    any number."""
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
    """Encode a record. `topic` must start with its length byte, and `sys_flag` must match the address families of the
    hosts.

    The last ten bytes are a checksum over everything but the body, which has its own checksum in the head. If the
    properties leave no space for it, the record has no such checksum.
    """
    born_size, store_size, body_size = len(born_host), len(store_host), len(body)
    size = len(properties) + CHECKSUM_BYTES
    if size > MAX_PROPERTY_BYTES:
        size -= CHECKSUM_BYTES
    tail = topic + _pack_short(size) + properties
    whole = 74 + born_size + store_size + body_size + len(topic) + size
    pack = _pack_v4 if born_size == store_size == 8 else _HEADS[born_size, store_size].pack
    # UtilAll.crc32 clears the sign bit.
    head = pack(
        whole, MAGIC, crc32(body) & 0x7FFFFFFF, queue_id, flag, queue_offset, physical_offset, sys_flag, born_ms, born_host,
        store_ms, store_host, reconsume_times, prepared_offset, body_size,
    )  # fmt: skip
    if size == len(properties):
        return head + body + tail
    return b"".join((head, body, tail, CHECKSUM_MARK, b"%08x" % crc32(tail, crc32(head))))


class Record(NamedTuple):
    """A decoded record. `size` is its length in bytes, `properties` are encoded, and `body` is as stored."""

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
        """Return True if a message id of a client may mean this record.

        After a power failure, another message may be at the position of a lost one. Clients know a message by its
        unique key or by its offset id.
        """
        key = props.find(self.properties, props.UNIQUE_KEY)
        return not message_id or key is None or message_id in (key, self.offset_id)


def decode_record(data: bytes, position: int = 0, errors: Literal["strict", "replace"] = "strict") -> Record:
    """Decode the record at a position. Raises MessageError if there is none, or if it is incomplete.

    Args:
        data: bytes that contain the record
        position: position of the record in `data`
        errors: "replace" replaces bytes of topic and properties that are not UTF-8 by U+FFFD, as Java does; Apache's
            brokers store such bytes
    """
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
    """Return the size of the record at a position by its first 8 bytes; 0 if no record of up to `most` bytes can start
    there."""
    if len(data) - position < 8:
        return 0
    size, magic = _START.unpack_from(data, position)
    return size if magic == MAGIC and FIXED_BYTES <= size <= most else 0


def places_in(data: bytes | memoryview, positions: Iterable[int]) -> list[tuple[int, int]]:
    """Return the size and the log position that the heads of records state. Raises MessageError if the data is too
    short for a head."""
    try:
        return [_size_and_offset(data, position) for position in positions]
    except StructError:
        raise MessageError("there is no room for a message record's head") from None


def decode_records(data: bytes) -> Iterator[Record]:
    """Decode the records of a pull response, in order, with U+FFFD for bytes that are not UTF-8. Raises MessageError at
    the first invalid record."""
    position, end = 0, len(data)
    while position < end:
        record = decode_record(data, position, "replace")
        position += record.size
        yield record


def split_records(data: bytes) -> list[bytes]:
    """Split the body of a pull response into the bytes of its records, in order. Raises MessageError if the sizes do
    not lead from record to record."""
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
    """Return the position of the body in a record's bytes."""
    flags = data[39] if len(data) > 39 else 0
    return 88 + (12 if flags & SYS_BORNHOST_V6 else 0) + (12 if flags & SYS_STOREHOST_V6 else 0)


def offset_in(data: bytes) -> int:
    """Return the queue offset in a record's bytes."""
    return int.from_bytes(data[20:28], "big")


def physical_offset_in(data: bytes) -> int:
    """Return the commit log position in a record's bytes."""
    return int.from_bytes(data[28:36], "big")


def store_ms_in(data: bytes) -> int:
    """Return the store time in a record's bytes, in ms since the epoch."""
    at = store_time_at(data)
    return int.from_bytes(data[at : at + 8], "big")


def born_host_in(data: bytes) -> bytes:
    """Return the sender's address and port in a record's bytes."""
    return data[48 : store_time_at(data)]


def offset_id_in(data: bytes) -> str:
    """Return the offset id of a record's bytes."""
    host_at = store_time_at(data) + 8
    size = 20 if data[39] & SYS_STOREHOST_V6 else 8
    return offset_id(data[host_at : host_at + size], physical_offset_in(data))


def properties_in(data: bytes) -> str:
    """Return the properties in a record's bytes, with U+FFFD for bytes that are not UTF-8. Raises MessageError for
    invalid sizes."""
    try:
        body_at = body_begin(data)
        topic_at = body_at + int.from_bytes(data[body_at - 4 : body_at], "big")
        text_at = topic_at + data[topic_at] + 3
        if text_at + (data[text_at - 2] << 8 | data[text_at - 1]) != len(data):
            raise MessageError("a message record has properties of another size than it says")
        return data[text_at:].decode("utf-8", "replace")
    except IndexError:
        raise MessageError("a message record is truncated or malformed") from None


def is_intact(data: bytes, position: int, record: Record) -> bool:
    """Return True if a decoded record is intact, by its checksums. A record whose properties leave no room for a checksum
    over the whole record has one only over its body.

    Args:
        data: bytes that contain the record
        position: position of the record in `data`
        record: the decoded record
    """
    if crc32(record.body) & 0x7FFFFFFF != record.crc:
        return False
    return has_checksum(data, position, record) or (
        len(record.properties.encode()) + CHECKSUM_BYTES > MAX_PROPERTY_BYTES
    )


def has_checksum(data: bytes, position: int, record: Record) -> bool:
    """Return True if the record has a valid checksum over everything but its body. The record's size is then correct,
    even if its body is damaged."""
    end = position + record.size - CHECKSUM_BYTES
    body_at = position + 72 + len(record.born_host) + len(record.store_host)
    head, tail = data[position:body_at], data[body_at + len(record.body) : end]
    return data[end : end + CHECKSUM_BYTES] == CHECKSUM_MARK + b"%08x" % crc32(tail, crc32(head))


def is_certainly(data: bytes, topic: bytes, queue_id: int, queue_offset: int, physical_offset: int) -> bool:
    """Return True if the bytes are the intact record of this queue, offset and position, by its checksums and without
    decoding it.

    False also for records without a checksum, which must be decoded. `topic` must start with its length byte.
    """
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
    """Return the store time of a record from its bytes before and after the body; None if these do not match the
    record's checksum, or if it has none."""
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
    """Return the position of the store time in a record's bytes."""
    return 68 if data[39] & SYS_BORNHOST_V6 else 56


def without_checksum(record: Record) -> Record:
    """Return the record with the properties of its producer, without mark and checksum, to be stored again."""
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
    """Return the id by which a broker finds a message: its address and the commit log position, in hex."""
    return f"{store_host.hex().upper()}{physical_offset:016X}"


# ------------------------------------------------------------------------------
# The body of SEND_BATCH_MESSAGE: encoded by a producer, and converted to records by a broker without an object per
# message.
#
#     int32 size, magic, crc, flag | int32 body size, body | int16 properties size, properties
#
# As on Apache's broker, `magic` and `crc` are 0 and not checked, and the properties of the request's header apply to
# every message.


_ENTRY: Final = Struct(">iIIii")
_READ_ENTRY: Final = Struct(">i8xii")  # without unused fields
_SIZE: Final = Struct(">h")
ENTRY_BYTES: Final = _ENTRY.size + _SIZE.size  # size of an entry without body and properties
_SHARED: Final = {(born, store): Struct(f">iq{born}sq{store}siq") for born in (8, 20) for store in (8, 20)}
_TAGS_MARK: Final = (props.TAGS + props.NAME_END).encode()
_PAIR_END: Final = props.PAIR_END.encode()
PIECE_MESSAGES: Final = 512  # messages that are encoded together, so that their columns fit into the processor's cache
PIECE_BYTES: Final = 512 * 1024  # maximum bytes before the start of the last message that is encoded together
_APART: Final = b"\n"  # an ASCII character, so that no UTF-8 sequence can span it


def _unmarked(position: int) -> bytes:
    return b""


class BatchEntry(NamedTuple):
    """One message of a SEND_BATCH_MESSAGE body."""

    flag: int
    body: bytes
    properties: str


class Shared(NamedTuple):
    """The fields that all records of a batch share. `topic` must start with its length byte, and `sys_flag` must match
    the address families of the hosts."""

    topic: bytes
    queue_id: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    store_ms: int
    store_host: bytes
    reconsume_times: int


class Piece(NamedTuple):
    """One or more messages of a batch: their flags, bodies and encoded properties. `is_tagged` is True if a message may
    have a tag."""

    flags: list[int]
    bodies: list[bytes]
    texts: list[bytes]
    is_tagged: bool


class Records(NamedTuple):
    """The concatenated records of a batch, and the position, size and tag code of each."""

    data: bytes
    positions: list[int]
    sizes: list[int]
    tag_codes: list[int]


def encode_batch(entries: Sequence[tuple[int, bytes, str]]) -> bytes:
    """Encode the body of SEND_BATCH_MESSAGE from entries of flag, body and encoded properties."""
    if not entries:
        return b""
    flags, bodies, texts = zip(*entries, strict=True)
    return encode_columns(list(flags), list(bodies), list(texts))


def encode_columns(flags: list[int], bodies: list[bytes], texts: list[str]) -> bytes:
    """Encode the body of SEND_BATCH_MESSAGE from columns: flags, bodies and encoded properties."""
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
    """Decode the body of SEND_BATCH_MESSAGE. Raises MessageError if it is malformed or contains more than 65,536
    messages."""
    return [
        BatchEntry(flag, body, text.decode())
        for piece in split(data)
        for flag, body, text in zip(*piece[:3], strict=True)
    ]


def split(data: bytes, shared: bytes = b"") -> Iterator[Piece]:
    """Split the body of a batch into pieces, and append `shared` to the properties of each message.

    Raises MessageError if the body is malformed, contains more than 65,536 messages, or has properties that are too
    long.
    """
    before = at = 0
    while at < len(data):
        piece, at = _cut(data, at, before, shared)
        before += len(piece.flags)
        yield piece


def _cut(data: bytes, at: int, before: int, shared: bytes) -> tuple[Piece, int]:
    """Return the piece at a position, and the position after it. `before` is the number of messages before it."""
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
        raise MessageError(f"a batch has more than {MAX_BATCH_ENTRIES} messages, which is the maximum")
    is_tagged = _TAGS_MARK in _checked(texts) or _TAGS_MARK in shared
    return Piece(flags, bodies, _completed(texts, shared) if shared else texts, is_tagged), at


def _checked(texts: list[bytes]) -> bytes:
    """Return the joined properties of all messages. Raises MessageError if they are not UTF-8."""
    joined = _APART.join(texts)
    if not joined.isascii():
        try:
            joined.decode()
        except UnicodeDecodeError:
            raise MessageError("the batch has properties that are not UTF-8") from None
    return joined


def _completed(texts: list[bytes], shared: bytes) -> list[bytes]:
    """Return the properties of each message, followed by the shared ones. Raises MessageError if they are too long."""
    joined = _PAIR_END + shared
    whole = [text + (shared if text[-1] == _PAIR_END[0] else joined) if text else shared for text in texts]
    longest = max(map(len, whole))
    if longest > SENT_PROPERTY_BYTES:
        raise MessageError(
            f"the properties have {longest} bytes including the broker's own; maximum {SENT_PROPERTY_BYTES}"
        )
    return whole


def encode_records(
    pieces: Iterable[Piece],
    shared: Shared,
    queue_offset: int,
    position: int,
    mark: Callable[[int], bytes] = _unmarked,
) -> Records:
    """Encode the records of a batch, equal to those of `encode_record` with a checksum. Errors of `pieces` are raised.

    The records are encoded column by column, because one operation on all messages is much cheaper than one operation
    per message.

    Args:
        pieces: the messages
        shared: the fields that all records share
        queue_offset: queue offset of the first message
        position: commit log position of the first message
        mark: returns the mark of a record at a position, for the first record of each piece
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
    """Return the checksum text of each record. Sent messages have space for it."""
    found = map(crc32, tails, map(crc32, heads))
    return hexlify(Struct(f">{len(heads)}I").pack(*found), b" ", 4).split()


def _tag_codes(texts: list[bytes]) -> list[int]:
    """Return the tag codes by which a broker filters; 0 without a tag."""
    return [tag_code(text.decode()) if _TAGS_MARK in text else 0 for text in texts]


# ------------------------------------------------------------------------------
# Records of pop responses, and the texts in their headers (Apache's ExtraInfoUtil).


POP_CK: Final = "POP_CK"

_LONGER: Final = 12  # additional bytes of an IPv6 host


def with_attempts(record: bytes, reconsume_times: int, handle: str) -> bytes:
    """Return a record with a number of earlier attempts and a receipt handle.

    The checksum over the properties is removed. If the properties leave no space for the handle, the record has none,
    and the client constructs it. Raises MessageError for an invalid record.
    """
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
    """Return the number of attempts before a record was stored. Raises MessageError if the record has fewer than 100 bytes,
    the size up to this field with two IPv6 hosts."""
    if len(record) < 76 + 2 * _LONGER:
        raise MessageError("a message record is cut off")
    flags = record[39]
    at = 72 + (_LONGER if flags & SYS_BORNHOST_V6 else 0) + (_LONGER if flags & SYS_STOREHOST_V6 else 0)
    return tried(int.from_bytes(record[at : at + 4], "big", signed=True))


class Receipt(NamedTuple):
    """The receipt of a popped message, by which a client acknowledges the message. The text of a receipt consists of
    these fields, joined by spaces (ExtraInfoUtil).

    `mark` is 0 for the topic itself, and other values for the retry topics of Apache's brokers.
    """

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
        """Return the topic in which the message is stored (ExtraInfoUtil.getRealTopic)."""
        if self.mark == "1":
            return f"{retry_topic(group)}_{topic}"
        return f"{retry_topic(group)}+{topic}" if self.mark == "2" else topic


def receipt_of(text: str) -> Receipt:
    """Decode the text of a receipt. Raises MessageError."""
    fields = text.split(" ")
    try:
        start, pop_ms, invisible_ms, revive_qid, mark, broker_name, queue_id, offset = fields[:8]
        times = int(pop_ms), int(invisible_ms)
        return Receipt(int(start), *times, int(revive_qid), mark, broker_name, int(queue_id), int(offset))
    except ValueError:
        raise MessageError(f"{text[:80]!r} is not a receipt handle") from None


def starts_of(text: str) -> dict[int, int]:
    """Decode startOffsetInfo: the start offsets of the topic itself, by queue id. Raises MessageError."""
    try:
        entries = [entry.split(" ") for entry in text.split(";") if entry]
        return {int(queue_id): int(offset) for mark, queue_id, offset in entries if mark == "0"}
    except ValueError:
        raise MessageError(f"{text[:80]!r} is not a list of start offsets") from None


def tried_in(text: str) -> dict[str, int]:
    """Decode orderCountInfo: the numbers of earlier attempts of messages that Apache's brokers return in order, by
    `queue id`, or by `qo<queue id>%<offset>`, which has precedence. Raises MessageError."""
    try:
        entries = [entry.split(" ") for entry in text.split(";") if entry]
        return {of: int(count) for _, of, count in entries}
    except ValueError:
        raise MessageError(f"{text[:80]!r} is not a list of attempts") from None


def offset_texts(places: Iterable[tuple[int, int, int]]) -> tuple[str, str]:
    """Return startOffsetInfo and msgOffsetInfo of messages, given by mark, queue id and offset: an entry for each mark
    and queue, with offsets in the order of the response's body."""
    offsets: dict[tuple[int, int], list[int]] = {}
    for mark, queue_id, offset in places:
        offsets.setdefault((mark, queue_id), []).append(offset)
    starts = [f"{mark} {queue_id} {min(found)}" for (mark, queue_id), found in offsets.items()]
    lists = [f"{mark} {queue_id} {','.join(map(str, found))}" for (mark, queue_id), found in offsets.items()]
    return ";".join(starts), ";".join(lists)


# ------------------------------------------------------------------------------
# Compression of bodies. The sender chooses the method, which the sys flag contains. Brokers store bodies as they were
# sent. Rocketlet's gRPC server decompresses bodies for 5.x clients when it receives or returns them.
#
# Rocketlet's clients send zlib, like Apache's 4.9. LZ4 and Zstandard come from other senders; their libraries are
# optional, and imported when they are needed.


ZLIB_LEVEL: Final = 5
ZSTD_WINDOW_LOG: Final = (
    23  # the window of 8 MiB that all decoders support, as the format recommends (RFC 8878, 3.1.1.1.2)
)
MAX_ZSTD_WINDOW_LOG: Final = 27  # the largest window that the tool `zstd` accepts without an option


def compressed(body: bytes) -> tuple[bytes, int]:
    """Compress a body like Apache's producers (zlib), and return it with the flags for the sys flag."""
    return zlib.compress(body, ZLIB_LEVEL), SYS_COMPRESSED | SYS_COMPRESSION_ZLIB


def decompressed(body: bytes, sys_flag: int, most: int = MAX_DECOMPRESSED_BYTES) -> bytes:
    """Return the original body. Raises MessageError if it is compressed, and cannot be decompressed or has more than `most`
    bytes."""
    if not sys_flag & SYS_COMPRESSED:
        return body
    plain, ended = _inflated(body, sys_flag, most + 1, is_whole=True)
    if not ended or len(plain) > most:
        raise MessageError(f"the compressed body is cut off, or has more than {most} bytes")
    return plain


def begin_of(body: bytes, sys_flag: int, size: int) -> tuple[bytes, bool]:
    """Return the first `size` bytes of the original body, and True if they are the whole body. Raises MessageError.

    Little more is decompressed, because a body of 64 KB may have 64 MiB after decompression.
    """
    if not sys_flag & SYS_COMPRESSED:
        return body[:size], len(body) <= size
    plain, _ = _inflated(body, sys_flag, size + 1, is_whole=False)
    return plain[:size], len(plain) <= size


def _inflated(body: bytes, sys_flag: int, size: int, *, is_whole: bool) -> tuple[bytes, bool]:
    """Return up to this many decompressed bytes, and True if the stream ends with them."""
    try:
        return _inflate(body, sys_flag & SYS_COMPRESSION_MASK, size, is_whole=is_whole)
    except ModuleNotFoundError as missing:
        raise _lacking(missing) from None
    except (zlib.error, RuntimeError, ValueError) as error:
        raise MessageError(f"the compressed body cannot be read: {error}") from None


def _lacking(missing: ModuleNotFoundError) -> MessageError:
    return MessageError(f"the body is compressed, and {missing.name} is missing: pip install '.[compression]'")


def _inflate(body: bytes, kind: int, size: int, *, is_whole: bool) -> tuple[bytes, bool]:
    stream: _Stream
    if kind == SYS_COMPRESSION_LZ4:
        stream = _lz4_stream()
    elif kind == SYS_COMPRESSION_ZSTD:
        stream = _ZstdStream(MAX_ZSTD_WINDOW_LOG if is_whole else ZSTD_WINDOW_LOG)
    else:
        stream = zlib.decompressobj()
    return stream.decompress(body, size), stream.eof


class _Stream(Protocol):
    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _FrameStream(_Stream, Protocol):
    """A decompressor of one frame of LZ4 or Zstandard."""

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes | None: ...


def _lz4_stream() -> _FrameStream:
    import lz4.frame

    found: _FrameStream = lz4.frame.LZ4FrameDecompressor()
    return found


class _ZstdStream:
    """A decompressor of one frame of Zstandard, whose errors are ValueErrors.

    Args:
        window_log: the binary logarithm of the largest window.
    """

    def __init__(self, window_log: int) -> None:
        if sys.version_info >= (3, 14):
            import compression.zstd as zstd
        else:
            import backports.zstd as zstd

        self._stream = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window_log})
        self._error = zstd.ZstdError

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def needs_input(self) -> bool:
        return self._stream.needs_input

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        try:
            return self._stream.decompress(data, max_length)
        except self._error as error:
            raise ValueError(str(error)) from None


class SpentTooMuch(Exception):
    """The error for a request whose bodies require more work than a request may cause."""


class Inflater:
    """Decompresses the bodies of one request in pieces.

    `spent_bytes` counts decompressed bytes, even if the body then turns out to be damaged or too large, plus
    `GZIP_MEMBER_BYTES` for each gzip member, and for each frame of LZ4 and Zstandard after the first. A body
    therefore costs its request the same, whether it is valid or not.
    """

    def __init__(self, most_spent: float = math.inf) -> None:
        self._most_spent = most_spent
        self.spent_bytes = 0

    def inflating(self, body: bytes, sys_flag: int, most: int) -> Work[bytes]:
        """Return the original body.

        Raises:
            MessageError: the body cannot be decompressed, or has more than `most` bytes
            SpentTooMuch: the work for all bodies exceeds `most_spent`
        """
        kind = sys_flag & SYS_COMPRESSION_MASK
        if kind == SYS_COMPRESSION_LZ4:
            pieces = self._frames(body, _lz4_stream)
        elif kind == SYS_COMPRESSION_ZSTD:
            pieces = self._frames(body, partial(_ZstdStream, ZSTD_WINDOW_LOG))
        else:
            pieces = _stream(body, 0, zlib.MAX_WBITS)
        return self._all(pieces, most)

    def inflating_gzip(self, body: bytes, most: int) -> Work[bytes]:
        """Return the original body of a gzip stream, which may consist of several members. Raises what `inflating`
        raises."""
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
            self._spend(INFLATED_PIECE_BYTES)  # the work for the failed piece is unknown
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
                return  # zero padding, which RFC 1952 does not mention, but all tools accept
            self._spend(GZIP_MEMBER_BYTES)
            position = yield from _stream(body, position, zlib.MAX_WBITS + 16)

    def _frames(self, body: bytes, new_stream: Callable[[], _FrameStream]) -> Iterator[bytes]:
        position = 0
        while position < len(body) or not position:
            if position:
                self._spend(GZIP_MEMBER_BYTES)
            stream = new_stream()
            while not stream.eof:
                data = b""
                if stream.needs_input:
                    data = body[position : position + INFLATED_PIECE_BYTES]
                    position += len(data)
                    if not data:
                        raise EOFError("it is cut off")
                yield stream.decompress(data, INFLATED_PIECE_BYTES)
            position -= len(stream.unused_data or b"")


def _stream(body: bytes, position: int, wbits: int) -> Generator[bytes, None, int]:
    """Yield the pieces of a zlib or gzip stream from a position on, and return its end. Both the input and the output
    of a piece are limited, so that the work for a piece is bounded."""
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
# Recall handles, by which a producer recalls a message before its delivery time: Apache's `RecallMessageHandle`,
# version 1.
#
# A recall handle is URL-safe base64, with padding, of `v1 topic broker time key`: the delivery time in ms, and the message's
# unique key.


_VERSION = "v1"


class HandleError(ValueError):
    """The error for a text that is not a recall handle."""


class RecallHandle(NamedTuple):
    """A recall handle. `due_ms` is the delivery time, which Apache's brokers truncate to seconds."""

    topic: str
    broker_name: str
    due_ms: int
    unique_key: str

    def encoded(self) -> str:
        text = f"{_VERSION} {self.topic} {self.broker_name} {self.due_ms} {self.unique_key}"
        return urlsafe_b64encode(text.encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """Decode a recall handle. Raises HandleError."""
    try:
        if len(text) > 8 * MAX_ID_CHARS:
            raise ValueError(text)
        version, topic, broker_name, due_ms, unique_key = (
            b64decode(text.encode("ascii"), altchars=b"-_", validate=True).decode().split(" ")
        )
        if version != _VERSION or not (due_ms.isascii() and due_ms.isdecimal() and len(due_ms) <= 18):
            raise ValueError(text)
    except (ValueError, binascii.Error):
        raise HandleError("recall handle is invalid; expected the one in the response to the send") from None
    return RecallHandle(topic, broker_name, int(due_ms), unique_key)
