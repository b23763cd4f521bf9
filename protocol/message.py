"""The message record: the same bytes in the commit log, in a pull's answer, and in a consumer's hands.

    0 total  4 magic  8 body crc  12 queue id  16 flag  20 queue offset  28 physical offset  36 sys flag
    40 born time  48 born host  store time  store host  reconsume times  prepared transaction offset
    int32 body size, body | int8 topic size, topic | int16 properties size, properties

All integers are big-endian; times are in ms. A host is 4 or 16 address bytes and an int32 port; the sys flag says
which. Offsets below hold for two IPv4 hosts; each IPv6 host adds 12 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv6Address, ip_address
from struct import Struct
from struct import error as StructError
from typing import Final, Literal, NamedTuple

from . import properties as props
from .checksum import crc32
from .codes import (
    SYS_BORNHOST_V6,
    SYS_STOREHOST_V6,
)
from .config import MAX_BODY_BYTES, MAX_PROPERTY_BYTES

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
        raise MessageError(f"the message record at byte {position} is cut off or garbled") from None


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
        raise MessageError(f"the message record at byte {position} is cut off or garbled") from None
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
        raise MessageError("a message record is cut off or garbled") from None


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
    """The record with the properties as they were given, to be stored once more."""
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
