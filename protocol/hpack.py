"""Header compression of HTTP/2 (HPACK, RFC 7541). Numbers such as (4.1) are sections of the RFC.

Official clients of 5.x acknowledge each message with its own call, with about twenty header fields, most of which are in
the table. Decoding them is a large part of the cost of a call. The `hpack` library takes 34 to 57 us for such a block,
this module 5 to 10 us. Tests compare the results of both.

Blocks are encoded without Huffman codes and without a dynamic table, because responses have few fields, most of which
are constant.
"""

from __future__ import annotations

from typing import Final

from .config import HPACK_TABLE_BYTES, MAX_HEADER_LIST_BYTES

Field = tuple[bytes, bytes]

ENTRY_BYTES: Final = 32  # added to the size of each entry's name and value (4.1)
_STATIC_LAST: Final = 61
_MAX_INT_BYTES: Final = 4  # after the prefix; they hold up to 268,435,455, which is more than any valid number here

# Appendix A
_STATIC_TEXT: Final = """\
:authority
:method GET
:method POST
:path /
:path /index.html
:scheme http
:scheme https
:status 200
:status 204
:status 206
:status 304
:status 400
:status 404
:status 500
accept-charset
accept-encoding gzip, deflate
accept-language
accept-ranges
accept
access-control-allow-origin
age
allow
authorization
cache-control
content-disposition
content-encoding
content-language
content-length
content-location
content-range
content-type
cookie
date
etag
expect
expires
from
host
if-match
if-modified-since
if-none-match
if-range
if-unmodified-since
last-modified
link
location
max-forwards
proxy-authenticate
proxy-authorization
range
referer
refresh
retry-after
server
set-cookie
strict-transport-security
transfer-encoding
user-agent
vary
via
www-authenticate"""


def _field(line: str) -> Field:
    name, _, value = line.partition(" ")
    return name.encode(), value.encode()


_STATIC: Final[tuple[Field, ...]] = ((b"", b""), *map(_field, _STATIC_TEXT.splitlines()))

# Appendix B. The Huffman code is canonical, so the length of each symbol's code defines it: the letters A to Z stand
# for 5 to 30 bits, for the symbols 0 to 256 (256 is the end symbol).
_LENGTHS: Final = (
    "ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHF"
    "IBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJBKABABABBBACCBBBABCBAABCCCCCKGJIX"
    "PRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRS"
    "VVPORSRUVVVWWVTUOQVWWVWTQQVVXWWWPTPQRQQSRRUUTTVSVWVVWWWWWXWWWWWV"
    "Z"
)
_END: Final = 256


class HpackError(ValueError):
    """The error for a block that cannot be decoded. Later blocks of the connection cannot be decoded either, because
    the table is unknown."""


class HeadersTooLarge(ValueError):
    """The error for a block whose header fields exceed the limit for requests."""


# Huffman codes

_Step = tuple[int, bytes]  # the state after a byte, and the symbols that the byte completes


def _codes() -> dict[tuple[int, int], int]:
    """Return a dictionary from the length (in bits) and the value of a code to its symbol."""
    lengths = [ord(letter) - ord("A") + 5 for letter in _LENGTHS]
    found: dict[tuple[int, int], int] = {}
    code, before = 0, 5
    for symbol in sorted(range(257), key=lambda symbol: (lengths[symbol], symbol)):
        code <<= lengths[symbol] - before
        before = lengths[symbol]
        found[before, code] = symbol
        code += 1
    return found


class _Huffman:
    """Decoder of Huffman codes, a state machine that processes one byte per step.

    A state consists of the bits since the last symbol, which are an inner node of the tree of codes. Each step is
    computed when it is first needed, because computing all 65,536 takes 0.1 s.
    """

    def __init__(self) -> None:
        self._codes = _codes()
        self._numbers: dict[tuple[int, int], int] = {(0, 0): 0}
        self._nodes: list[tuple[int, int]] = [(0, 0)]
        self._steps: list[list[_Step | None]] = [[None] * 256]
        self._is_padding: list[bool] = [True]

    def decode(self, data: bytes) -> bytes:
        """Decode Huffman codes. Raises HpackError."""
        steps = self._steps
        state = 0
        parts: list[bytes] = []
        for byte in data:
            step = steps[state][byte]
            if step is None:
                step = steps[state][byte] = self._step(state, byte)
            state, symbols = step
            if symbols:
                parts.append(symbols)
        if not self._is_padding[state]:  # the padding must be fewer than 8 bits, all ones (5.2)
            raise HpackError("a Huffman code is cut off")
        return b"".join(parts)

    def _step(self, state: int, byte: int) -> _Step:
        length, code = self._nodes[state]
        symbols = bytearray()
        for shift in range(7, -1, -1):
            length, code = length + 1, code << 1 | (byte >> shift & 1)
            symbol = self._codes.get((length, code))
            if symbol == _END:
                raise HpackError("a Huffman code contains the end symbol")
            if symbol is not None:
                symbols.append(symbol)
                length = code = 0
        return self._number(length, code), bytes(symbols)

    def _number(self, length: int, code: int) -> int:
        number = self._numbers.setdefault((length, code), len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append((length, code))
            self._steps.append([None] * 256)
            self._is_padding.append(length < 8 and code == (1 << length) - 1)
        return number


_huffman: Final = _Huffman()


# Blocks


class Decoder:
    """Decoder of the header blocks of one connection.

    The dynamic table contains fields of earlier blocks. `list_bytes` is the size of the last block's fields, as RFC
    9113 counts.
    """

    __slots__ = ("_limit_bytes", "_table", "_table_bytes", "list_bytes")

    def __init__(self) -> None:
        self._table: list[Field] = []  # oldest first
        self._table_bytes = 0
        self._limit_bytes = HPACK_TABLE_BYTES
        self.list_bytes = 0

    def decode(self, block: bytes) -> list[Field]:
        """Return the fields in order. Raises HpackError and HeadersTooLarge; the connection must then be closed."""
        try:
            return self._decode(block)
        except IndexError:
            raise HpackError("a header block is cut off") from None

    def _decode(self, block: bytes) -> list[Field]:
        table = self._table
        fields: list[Field] = []
        position, end = 0, len(block)
        left_bytes = MAX_HEADER_LIST_BYTES
        while position < end:
            byte = block[position]
            position += 1
            if byte & 0x80:  # an indexed field (6.1)
                index = byte & 0x7F
                if index == 0x7F:
                    index, position = _integer(block, position, 0x7F)
                if 0 < index <= _STATIC_LAST:
                    field = _STATIC[index]
                elif 0 < index <= _STATIC_LAST + len(table):
                    field = table[_STATIC_LAST - index]
                else:
                    raise HpackError(f"a header block names the entry {index} of its table, which is not there")
            elif byte & 0xE0 == 0x20:  # an update of the table's size (6.3)
                if fields:
                    raise HpackError("the size of the table changes within a header block")
                position = self._resize(block, position, byte)
                continue
            else:
                mask = 0x3F if byte & 0x40 else 0x0F
                field, position = self._literal(block, position, byte & mask, mask)
                if byte & 0x40:
                    self._add(field)
            left_bytes -= len(field[0]) + len(field[1]) + ENTRY_BYTES
            if left_bytes < 0:
                raise HeadersTooLarge(f"the header fields are longer than {MAX_HEADER_LIST_BYTES} bytes")
            fields.append(field)
        self.list_bytes = MAX_HEADER_LIST_BYTES - left_bytes
        return fields

    def _literal(self, block: bytes, position: int, index: int, mask: int) -> tuple[Field, int]:
        """Decode a literal field (6.2)."""
        if index == mask:
            index, position = _integer(block, position, mask)
        if not index:
            name, position = _string(block, position)
        elif index <= _STATIC_LAST:
            name = _STATIC[index][0]
        elif index <= _STATIC_LAST + len(self._table):
            name = self._table[_STATIC_LAST - index][0]
        else:
            raise HpackError(f"a header block names the entry {index} of its table, which is not there")
        value, position = _string(block, position)
        return (name, value), position

    def _resize(self, block: bytes, position: int, byte: int) -> int:
        size = byte & 0x1F
        if size == 0x1F:
            size, position = _integer(block, position, 0x1F)
        if size > HPACK_TABLE_BYTES:
            raise HpackError(f"the table size is {size} bytes; maximum {HPACK_TABLE_BYTES}")
        self._limit_bytes = size
        self._evict()
        return position

    def _add(self, field: Field) -> None:
        self._table.append(field)
        self._table_bytes += len(field[0]) + len(field[1]) + ENTRY_BYTES
        if self._table_bytes > self._limit_bytes:
            self._evict()

    def _evict(self) -> None:
        """Remove the oldest entries until the table fits its limit. An entry larger than the limit empties the table
        (4.4)."""
        table, gone = self._table, 0
        while self._table_bytes > self._limit_bytes:
            name, value = table[gone]
            self._table_bytes -= len(name) + len(value) + ENTRY_BYTES
            gone += 1
        del table[:gone]


def _integer(block: bytes, position: int, value: int) -> tuple[int, int]:
    """Decode the rest of an integer that exceeds its prefix (5.1)."""
    for shift in range(0, 7 * _MAX_INT_BYTES, 7):
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, position
    raise HpackError("a number in a header block is too large")


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    """Decode a string (5.2)."""
    first = block[position]
    length, position = first & 0x7F, position + 1
    if length == 0x7F:
        length, position = _integer(block, position, 0x7F)
    end = position + length
    if end > len(block):
        raise HpackError("a header block is cut off")
    data = block[position:end]
    return (_huffman.decode(data) if first & 0x80 else data), end


def encode(*fields: Field) -> bytes:
    """Return a block of literal fields that are not added to the table."""
    parts: list[bytes] = []
    for name, value in fields:
        if name == b":status" and value == b"200":
            parts.append(b"\x88")
        else:
            parts += (b"\x00", _length(name), name, _length(value), value)
    return b"".join(parts)


def _length(text: bytes) -> bytes:
    size = len(text)
    if size < 0x7F:
        return bytes((size,))
    size -= 0x7F
    data = bytearray((0x7F,))
    while size >= 0x80:
        data.append(size & 0x7F | 0x80)
        size >>= 7
    data.append(size)
    return bytes(data)
