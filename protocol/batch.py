"""The body of SEND_BATCH_MESSAGE: made by a producer, turned into records by a broker without an object per message.

    int32 size, magic, crc, flag | int32 body size, body | int16 properties size, properties

As on Apache's broker, `magic` and `crc` are 0 and not looked at, and the header's properties count for each message.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Callable, Iterable, Sequence
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
_SIZE: Final = Struct(">h")
ENTRY_BYTES: Final = _ENTRY.size + _SIZE.size  # a message without body and properties
_SHARED: Final = {(born, store): Struct(f">iq{born}sq{store}siq") for born in (8, 20) for store in (8, 20)}
_TAGS_MARK: Final = (props.TAGS + props.NAME_END).encode()
_PAIR_END: Final = props.PAIR_END.encode()
_PIECE: Final = 512  # messages whose records are made at once
_APART: Final = b"\n"  # ASCII, so that no character can begin before it and end behind it


def _unmarked(position: int) -> bytes:
    return b""


class BatchEntry(NamedTuple):
    flag: int
    body: bytes
    properties: str


class Shared(NamedTuple):
    """The fields that all records of a batch share. `topic` carries its length byte in front, `properties` are appended to
    each message's own, and `sys_flag` must say the kinds of the hosts."""

    topic: bytes
    queue_id: int
    properties: bytes
    sys_flag: int
    born_ms: int
    born_host: bytes
    store_ms: int
    store_host: bytes
    reconsume_times: int


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
    flags, bodies, texts, _ = _split(data)
    _checked(texts)
    return [BatchEntry(flag, body, text.decode()) for flag, body, text in zip(flags, bodies, texts, strict=True)]


def piece_of(data: bytes, at: int, most: int, most_bytes: int) -> tuple[int, int]:
    """The next piece of a batch body, from `at` on: how many messages it has, and where they end. It keeps to both limits,
    but has at least one message. Garbled bytes belong to the piece; whoever decodes it reports them."""
    end = len(data)
    last = min(end, at + most_bytes)
    messages, behind = 0, at
    while messages < most and behind < end:
        next_at = behind + int.from_bytes(data[behind : behind + 4], "big")
        if next_at < behind + ENTRY_BYTES or next_at > end:
            return messages + 1, end
        if next_at > last and messages:
            break
        messages, behind = messages + 1, next_at
    return messages, behind


def check_piece(data: bytes, at: int, before: int, messages: int, shared: bytes) -> None:
    """Raises MessageError where `encode_records` does, for so many messages from `at` on, with `before` in front of them."""
    _, _, texts, _ = _split(data, at, before, messages)
    _checked(texts)
    _completed(texts, shared)


def _split(
    data: bytes, at: int = 0, before: int = 0, most: int = MAX_BATCH_ENTRIES
) -> tuple[list[int], list[bytes], list[bytes], int]:
    """Flags, bodies and properties of a batch's messages, and where the next one begins. `at`: where the first of them is;
    `before`: how many there are before it; `most`: how many to take. Raises MessageError."""
    flags: list[int] = []
    bodies: list[bytes] = []
    texts: list[bytes] = []
    head_at, end = _ENTRY.unpack_from, len(data)
    try:
        for _ in range(min(most, MAX_BATCH_ENTRIES - before)):
            if at == end:
                break
            size, _, _, flag, body_size = head_at(data, at)
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
    return flags, bodies, texts, at


def _checked(texts: list[bytes]) -> bytes:
    """The properties of all messages together. Raises MessageError if one's are not UTF-8."""
    joined = _APART.join(texts)
    if not joined.isascii():
        try:
            joined.decode()
        except UnicodeDecodeError:
            raise MessageError("the batch has properties that are not UTF-8") from None
    return joined


def encode_records(
    batch: bytes, shared: Shared, queue_offset: int, position: int, mark: Callable[[int], bytes] = _unmarked
) -> Records:
    """The records of a batch body's messages, from a queue offset and a commit log position on: the bytes that
    `encode_record` makes of each. Raises MessageError for a body that is garbled, and for properties that are too long.
    `mark` gives what the first record of each piece has behind its properties.

    Column by column, because a step for all messages costs a fraction of a step for each; and some hundred messages at a
    time, because their columns stay in the processor's cache.
    """
    flags, bodies, own, at = _split(batch, most=_PIECE)
    made = _records(flags, bodies, own, shared, queue_offset, position, mark)
    if at == len(batch):
        return made
    data = [made.data]
    while at < len(batch):
        done = len(made.sizes)
        flags, bodies, own, at = _split(batch, at, done, _PIECE)
        next_at = made.positions[-1] + made.sizes[-1]
        piece = _records(flags, bodies, own, shared, queue_offset + done, next_at, mark)
        data.append(piece.data)
        made.positions.extend(piece.positions)
        made.sizes.extend(piece.sizes)
        made.tag_codes.extend(piece.tag_codes)
    return made._replace(data=b"".join(data))


def _records(
    flags: list[int],
    bodies: list[bytes],
    own: list[bytes],
    shared: Shared,
    queue_offset: int,
    position: int,
    mark: Callable[[int], bytes],
) -> Records:
    is_tagged = _TAGS_MARK in _checked(own) or _TAGS_MARK in shared.properties
    texts = _completed(own, shared.properties)
    if texts:
        texts[0] += mark(position)
    text_sizes = [len(text) + CHECKSUM_BYTES for text in texts]
    body_sizes = list(map(len, bodies))
    middle = _SHARED[len(shared.born_host), len(shared.store_host)].pack(*shared[3:], 0)
    head = Struct(f">iIIiiqq{len(middle)}si")
    fixed = head.size + len(shared.topic) + 2
    sizes = [fixed + body_size + text_size for body_size, text_size in zip(body_sizes, text_sizes, strict=True)]
    positions = list(accumulate(sizes[:-1], initial=position)) if sizes else []
    crcs = [crc & 0x7FFFFFFF for crc in map(crc32, bodies)]
    places = (repeat(shared.queue_id), flags, count(queue_offset), positions)
    heads = list(map(head.pack, sizes, repeat(MAGIC), crcs, *places, repeat(middle), body_sizes))
    before = {size: shared.topic + _SIZE.pack(size) for size in set(text_sizes)}
    tails = [before[size] + text for size, text in zip(text_sizes, texts, strict=True)]
    parts = [b""] * (4 * len(bodies))
    parts[0::4], parts[1::4], parts[2::4] = heads, bodies, tails
    parts[3::4] = _checksums(heads, tails)
    return Records(b"".join(parts), positions, sizes, _tag_codes(texts) if is_tagged else [0] * len(texts))


def _checksums(heads: list[bytes], tails: list[bytes]) -> list[bytes]:
    """The checksum property at the end of each record. Messages that are sent leave room for it."""
    found = map(crc32, tails, map(crc32, heads))
    digits = hexlify(Struct(f">{len(heads)}I").pack(*found))
    return [CHECKSUM_MARK + digits[at : at + 8] for at in range(0, len(digits), 8)]


def _completed(texts: list[bytes], shared: bytes) -> list[bytes]:
    """Each message's own properties and those of all. Raises MessageError if they are too long together."""
    joined = _PAIR_END + shared
    whole = [text + (shared if text[-1] == _PAIR_END[0] else joined) if text else shared for text in texts]
    longest = max(map(len, whole), default=0)
    if longest > SENT_PROPERTY_BYTES:
        raise MessageError(
            f"the properties have {longest} bytes with the broker's own; {SENT_PROPERTY_BYTES} are allowed"
        )
    return whole


def _tag_codes(texts: list[bytes]) -> list[int]:
    """The hashes that a broker filters by. Most batches have no tag at all."""
    return [tag_code(text.decode()) if _TAGS_MARK in text else 0 for text in texts]
