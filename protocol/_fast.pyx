# cython: language_level=3, wraparound=False, cdivision=True, emit_code_comments=False
"""The compiled module: bytes in, bytes out. No socket, disk, clock or policy, and no state between calls.

`protocol/fast.py` decides whether this module is used. A function may decline any arguments: it returns None, and the caller
does the work in Python. What a function does not decline, it does exactly as Python does; tests/protocol/test_fast.py
compares both.

Bytes of a peer are read by `byte` and `part` alone, which check bounds. `Output` alone writes, and checks its bounds, too.
"""

cimport cython
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memmove, memset

INTERFACE = 9

# ------------------------------------------------------------------------------
# The checked accessors, and numbers in network byte order.


cdef struct Span:
    const uint8_t *start
    Py_ssize_t size


ctypedef const Span *View  # Cython passes a memoryview by value, and it has 208 bytes


cdef int out_of_bounds() except -1:
    raise IndexError("a read or write out of bounds")


cdef inline int byte(View data, Py_ssize_t at) except -1:
    """Return one byte."""
    if at < 0 or at >= data.size:
        return out_of_bounds()
    return data.start[at]


cdef inline const uint8_t *part(View data, Py_ssize_t at, Py_ssize_t size) except NULL:
    """Return the address of `size` bytes, which are then copied or compared."""
    if at < 0 or size < 0 or at > data.size or size > data.size - at:
        out_of_bounds()
    return data.start + at


cdef inline void put_uint32(uint8_t *to, uint32_t value) noexcept nogil:
    to[0], to[1], to[2], to[3] = value >> 24, value >> 16 & 255, value >> 8 & 255, value & 255


cdef inline void put_uint16(uint8_t *to, uint32_t value) noexcept nogil:
    to[0], to[1] = value >> 8 & 255, value & 255


cdef extern from "Python.h":
    object PyUnicode_DecodeUTF8(const char *start, Py_ssize_t size, const char *errors)


cdef inline uint32_t get_uint32(View data, Py_ssize_t at) except? 0xFFFFFFFF:
    cdef const uint8_t *start = part(data, at, 4)
    return <uint32_t>start[0] << 24 | <uint32_t>start[1] << 16 | <uint32_t>start[2] << 8 | start[3]


cdef inline int64_t get_int64(View data, Py_ssize_t at) except? -1:
    return <int64_t>(<uint64_t>get_uint32(data, at) << 32 | get_uint32(data, at + 4))


cdef inline Py_ssize_t find(View data, Py_ssize_t at, Py_ssize_t end, int wanted) except -1:
    """Return the position of the first byte of this value from `at` on, or `end`."""
    cdef const uint8_t *start = part(data, at, end - at)
    cdef const void *found = memchr(start, wanted, end - at)
    return end if found is NULL else at + (<const uint8_t *>found - start)


cdef inline bint equal(View data, Py_ssize_t at, Py_ssize_t size, View text) except -1:
    return size == text.size and memcmp(part(data, at, size), part(text, 0, size), size) == 0


cdef bint is_utf8(View data, Py_ssize_t at, Py_ssize_t size) except -1:
    cdef const uint8_t *start = part(data, at, size)
    cdef uint8_t seen = 0
    cdef Py_ssize_t i
    for i in range(size):
        seen |= start[i]
    if seen < 0x80:
        return True
    try:
        PyUnicode_DecodeUTF8(<const char *>start, size, NULL)
    except UnicodeDecodeError:
        return False
    return True


# ------------------------------------------------------------------------------
# Bytes that a function makes.


@cython.final
cdef class Output:
    """Bytes that are written one after the other into a bytes object, which grows when it is full."""

    cdef bytes data
    cdef uint8_t *start
    cdef Py_ssize_t size, capacity

    def __cinit__(self, Py_ssize_t capacity):
        self.size = 0
        self.reserve(capacity)

    cdef int reserve(self, Py_ssize_t capacity) except -1:
        """Allocate this many bytes, and keep what was written."""
        cdef bytes data = PyBytes_FromStringAndSize(NULL, capacity)
        cdef uint8_t *start = <uint8_t *>PyBytes_AsString(data)
        if self.size:
            memcpy(start, self.start, self.size)
        self.data, self.start, self.capacity = data, start, capacity
        return 0

    cdef inline uint8_t *room(self, Py_ssize_t count) except NULL:
        """Return the address of the next `count` bytes."""
        cdef uint8_t *to
        if count < 0:
            out_of_bounds()
        if count > self.capacity - self.size:
            self.reserve(2 * self.capacity + count)
        to = self.start + self.size
        self.size += count
        return to

    cdef inline int put(self, const void *source, Py_ssize_t count) except -1:
        memcpy(self.room(count), source, count)
        return 0

    cdef object written(self):
        """Return the bytes, without a copy."""
        return self.data if self.size == self.capacity else memoryview(self.data)[: self.size]


# ------------------------------------------------------------------------------
# The writing side: the body of SEND_BATCH_MESSAGE.


cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL


cdef enum:
    ENTRY_HEAD_BYTES = 20
    MAX_TEXT_BYTES = 32767
    CHECKSUM_BYTES = 10  # the mark 2, 3 and a CRC-32 in hex
    MAGIC = 0xDAA320A7
    MAX_ENTRIES_BYTES = 1 << 30  # more than any request; sizes of 32 bits hold far more


def entries(list flags, list bodies, list texts):
    """Return the body of SEND_BATCH_MESSAGE as `protocol.message.encode_columns` makes it."""
    cdef Py_ssize_t count = len(texts), i, total = 0, body_size, text_size
    cdef int64_t flag
    cdef const char *text
    cdef uint8_t *to
    cdef Output out
    if len(flags) != count or len(bodies) != count:
        return None
    for i in range(count):
        if type(bodies[i]) is not bytes or type(texts[i]) is not str or type(flags[i]) is not int:
            return None
        text_size = len(<str>texts[i])  # characters: the output grows for a text that is not ASCII
        total += ENTRY_HEAD_BYTES + 2 + len(<bytes>bodies[i]) + text_size
    if total > MAX_ENTRIES_BYTES:
        return None
    out = Output(total)
    try:
        for i in range(count):
            flag = flags[i]
            text = PyUnicode_AsUTF8AndSize(texts[i], &text_size)
            body_size = len(<bytes>bodies[i])
            if text_size > MAX_TEXT_BYTES or not -0x80000000 <= flag <= 0x7FFFFFFF:
                return None
            to = out.room(ENTRY_HEAD_BYTES)
            put_uint32(to, <uint32_t>(ENTRY_HEAD_BYTES + 2 + body_size + text_size))
            put_uint32(to + 4, 0)
            put_uint32(to + 8, 0)
            put_uint32(to + 12, <uint32_t>flag)
            put_uint32(to + 16, <uint32_t>body_size)
            out.put(PyBytes_AsString(bodies[i]), body_size)
            put_uint16(out.room(2), <uint32_t>text_size)
            out.put(text, text_size)
    except (OverflowError, UnicodeEncodeError):
        return None  # Python raises its own error
    return bytes(out.written())


# ------------------------------------------------------------------------------
# The records of a batch's messages. protocol/message.py describes a record.


cdef extern from "crc32.h":
    void crc_init() nogil
    uint32_t crc32_of(uint32_t before, const uint8_t *start, size_t size) nogil


crc_init()

cdef int64_t MAX_OFFSET = <int64_t>1 << 62  # so that no sum overflows
cdef const char *HEX = b"0123456789abcdef"


cdef inline void put_uint64(uint8_t *to, uint64_t value) noexcept nogil:
    put_uint32(to, value >> 32)
    put_uint32(to + 4, value & 0xFFFFFFFFU)


def records(
    list flags, list bodies, list texts, list crcs, bytes topic, object queue_id, bytes middle, object queue_offset,
    object position,
):
    """Return the records that `protocol.message.encode_records` makes of a piece, their positions and their sizes."""
    try:
        return _records(flags, bodies, texts, crcs, topic, queue_id, middle, queue_offset, position)
    except OverflowError:
        return None  # Python raises its own error


cdef object _records(
    list flags, list bodies, list texts, list crcs, bytes topic, int32_t queue_id, bytes middle, int64_t queue_offset,
    int64_t position,
):
    cdef Py_ssize_t count = len(texts), i, total = 0, body_size, text_size, fixed, head_at, tail_at
    cdef Py_ssize_t middle_size = len(middle), topic_size = len(topic)
    cdef int64_t flag
    cdef int j
    cdef uint32_t checksum
    cdef uint8_t *to
    cdef list positions = [], sizes = []
    cdef Output out
    fixed = 40 + middle_size + topic_size + 2 + CHECKSUM_BYTES
    if len(flags) != count or len(bodies) != count or len(crcs) != count:
        return None
    if not (0 <= queue_offset < MAX_OFFSET and 0 <= position < MAX_OFFSET):
        return None
    for i in range(count):
        if type(bodies[i]) is not bytes or type(texts[i]) is not bytes:
            return None
        text_size = len(<bytes>texts[i]) + CHECKSUM_BYTES
        flag = flags[i]
        if text_size > MAX_TEXT_BYTES or not -0x80000000 <= flag <= 0x7FFFFFFF:
            return None
        total += fixed + len(<bytes>bodies[i]) + len(<bytes>texts[i])
    if total > MAX_ENTRIES_BYTES:
        return None
    out = Output(total)
    for i in range(count):
        head_at, body_size, text_size = out.size, len(<bytes>bodies[i]), len(<bytes>texts[i])
        positions.append(position + head_at)
        sizes.append(fixed + body_size + text_size)
        flag, checksum = flags[i], crcs[i]
        to = out.room(36)
        put_uint32(to, <uint32_t>(fixed + body_size + text_size))
        put_uint32(to + 4, <uint32_t>MAGIC)
        put_uint32(to + 8, checksum & 0x7FFFFFFF)
        put_uint32(to + 12, <uint32_t>queue_id)
        put_uint32(to + 16, <uint32_t>flag)
        put_uint64(to + 20, <uint64_t>(queue_offset + i))
        put_uint64(to + 28, <uint64_t>(position + head_at))
        out.put(PyBytes_AsString(middle), middle_size)
        put_uint32(out.room(4), <uint32_t>body_size)
        checksum = crc32_of(0, out.start + head_at, out.size - head_at)
        out.put(PyBytes_AsString(bodies[i]), body_size)
        tail_at = out.size
        out.put(PyBytes_AsString(topic), topic_size)
        put_uint16(out.room(2), <uint32_t>(text_size + CHECKSUM_BYTES))
        out.put(PyBytes_AsString(texts[i]), text_size)
        checksum = crc32_of(checksum, out.start + tail_at, out.size - tail_at)
        to = out.room(CHECKSUM_BYTES)
        to[0], to[1] = 2, 3
        for j in range(8):
            to[2 + j] = HEX[checksum >> (28 - 4 * j) & 15]
    return bytes(out.written()), positions, sizes


# ------------------------------------------------------------------------------
# Headers of requests, in three encodings. protocol/frame.py describes a frame.
#
# A header that is written in another way than usual is declined: with spaces, with numbers as `+1`, with very many fields.
# Python then decides whether the header is valid.


cdef enum:
    JSON = 0
    ROCKETMQ = 1
    MSGPACK = 77
    PULL_MESSAGE = 11
    ONEWAY_FLAG = 2
    MAX_FRAME_BYTES = 16777216
    BINARY_HEAD_BYTES = 21  # of a header without remark, before its fields
    MAX_FIELDS = 32
    # What a field's value is
    ABSENT = 0
    TEXT = 1
    NUMBER = 2
    TRUE = 3
    FALSE = 4


cdef struct Field:
    int kind
    bint is_escaped
    Py_ssize_t key_at, key_size
    Py_ssize_t at, size  # of the value
    int64_t number


cdef struct Header:
    int kind, code, count
    int64_t opaque, flag
    Py_ssize_t at, opaque_at, opaque_end, body_at, after
    Field fields[MAX_FIELDS]


cdef inline bint is_text(View data, Py_ssize_t at, Py_ssize_t size, const char *text, Py_ssize_t text_size) except -1:
    return size == text_size and memcmp(part(data, at, size), text, size) == 0


cdef Py_ssize_t read_number(View data, Py_ssize_t at, Py_ssize_t end, int64_t *value) except -2:
    """Read a decimal number of up to 18 digits. Return where it ends; -1 if there is none."""
    cdef Py_ssize_t first
    cdef int64_t found = 0
    cdef bint is_negative = False
    if at < end and byte(data, at) == c"-":
        is_negative = True
        at += 1
    first = at
    while at < end and c"0" <= byte(data, at) <= c"9":
        if at - first == 18:
            return -1
        found = 10 * found + (byte(data, at) - c"0")
        at += 1
    if at == first or (byte(data, first) == c"0" and (at - first > 1 or is_negative)):
        return -1
    value[0] = -found if is_negative else found
    return at


cdef inline bint is_int32(int64_t value) noexcept:
    return -0x80000000 <= value <= 0x7FFFFFFF


cdef inline int hex_digit(int found) noexcept:
    """Return the value of a digit, or -1."""
    if c"0" <= found <= c"9":
        return found - c"0"
    found |= 32
    return found - c"a" + 10 if c"a" <= found <= c"f" else -1


cdef int unescaped(View data, Py_ssize_t at, Py_ssize_t end) except -2:
    """Return the ASCII character of the escape that has a backslash in front of `at`; -1 if it has none."""
    cdef int found = byte(data, at), high, low
    if found == c'"' or found == c"\\" or found == c"/":
        return found
    if found == c"n":
        return 10
    if found == c"t":
        return 9
    if found == c"r":
        return 13
    if found == c"b":
        return 8
    if found == c"f":
        return 12
    if found != c"u" or end - at < 5 or byte(data, at + 1) != c"0" or byte(data, at + 2) != c"0":
        return -1
    high, low = hex_digit(byte(data, at + 3)), hex_digit(byte(data, at + 4))
    return high << 4 | low if 0 <= high < 8 and low >= 0 else -1


cdef Py_ssize_t find_quote(View data, Py_ssize_t at, Py_ssize_t end, bint *is_escaped) except -2:
    """Return where the JSON text that begins at `at` ends; -1 if it does not, has control characters, or other escapes than
    those that `unescape` reads."""
    cdef int found
    is_escaped[0] = False
    while at < end:
        found = byte(data, at)
        if found == c'"':
            return at
        if found == c"\\":
            is_escaped[0] = True
            at += 1
            if at >= end or unescaped(data, at, end) < 0:
                return -1
        elif found < 0x20:
            return -1
        at += 1
    return -1


cdef inline Field *add_field(Header *header, int kind, Py_ssize_t key_at, Py_ssize_t key_size) noexcept:
    """Return the next field; NULL if there are too many."""
    cdef Field *field
    if header.count == MAX_FIELDS:
        return NULL
    field = &header.fields[header.count]
    header.count += 1
    field.kind, field.key_at, field.key_size, field.is_escaped = kind, key_at, key_size, False
    return field


cdef int read_json(View data, Py_ssize_t at, Py_ssize_t end, Header *header) except -1:
    """Read a header as Apache's clients write it. Return 0 if it is to be declined."""
    cdef Py_ssize_t key_at, key_size, value_at, close
    cdef bint is_escaped = False, is_inside = False, was_inside = False
    cdef int64_t value = 0
    cdef int seen = 0, bit
    cdef Field *field
    if not is_utf8(data, at, end - at) or at >= end or byte(data, at) != c"{":
        return 0
    at += 1
    while True:
        if at >= end or byte(data, at) != c'"':
            return 0
        key_at = at + 1
        close = find_quote(data, key_at, end, &is_escaped)
        if close < 0 or is_escaped or close + 2 >= end or byte(data, close + 1) != c":":
            return 0
        key_size = close - key_at
        value_at = at = close + 2
        if byte(data, at) == c'"':
            close = find_quote(data, at + 1, end, &is_escaped)
            if close < 0:
                return 0
            if is_inside:
                field = add_field(header, TEXT, key_at, key_size)
                if field is NULL:
                    return 0
                field.is_escaped, field.at, field.size = is_escaped, at + 1, close - at - 1
            elif is_escaped or not (
                is_text(data, key_at, key_size, b"language", 8) or is_text(data, key_at, key_size, b"remark", 6)
                or is_text(data, key_at, key_size, b"serializeTypeCurrentRPC", 23)
            ):
                return 0
            at = close + 1
        elif byte(data, at) == c"{":
            if is_inside or was_inside or not is_text(data, key_at, key_size, b"extFields", 9):
                return 0
            is_inside = was_inside = True
            at += 1
            continue
        else:
            if is_inside:
                return 0
            at = read_number(data, at, end, &value)
            if at < 0 or not is_int32(value):
                return 0
            if is_text(data, key_at, key_size, b"code", 4):
                bit = 1
                header.code = <int>value
            elif is_text(data, key_at, key_size, b"flag", 4):
                bit = 2
                header.flag = value
            elif is_text(data, key_at, key_size, b"opaque", 6):
                bit = 4
                header.opaque, header.opaque_at, header.opaque_end = value, value_at, at
            elif is_text(data, key_at, key_size, b"version", 7):
                bit = 8
            else:
                return 0
            if seen & bit:
                return 0
            seen |= bit
        if is_inside and at < end and byte(data, at) == c"}":
            is_inside = False
            at += 1
        if at >= end:
            return 0
        if byte(data, at) == c",":
            at += 1
        else:
            return not is_inside and byte(data, at) == c"}" and at + 1 == end


cdef int read_binary(View data, Py_ssize_t at, Py_ssize_t end, Header *header) except -1:
    """Read a header in ROCKETMQ's encoding. Return 0 if it is to be declined."""
    cdef Py_ssize_t key_at, key_size, value_size
    cdef Field *field
    if end - at < BINARY_HEAD_BYTES or get_uint32(data, at + 13) or get_uint32(data, at + 17) != <uint32_t>(end - at - 21):
        return 0
    header.code = byte(data, at) << 8 | byte(data, at + 1)
    header.opaque, header.flag = <int32_t>get_uint32(data, at + 5), <int32_t>get_uint32(data, at + 9)
    header.opaque_at, header.opaque_end = at + 5, at + 9
    at += BINARY_HEAD_BYTES
    while at < end:
        if end - at < 6:
            return 0
        key_size = byte(data, at) << 8 | byte(data, at + 1)
        key_at = at + 2
        if key_size >= 0x8000 or key_size > end - key_at - 4:
            return 0
        value_size = <int32_t>get_uint32(data, key_at + key_size)
        at = key_at + key_size + 4
        if value_size < 0 or value_size > end - at:
            return 0
        if key_size and value_size:
            field = add_field(header, TEXT, key_at, key_size)
            if field is NULL or not is_utf8(data, key_at, key_size) or not is_utf8(data, at, value_size):
                return 0
            field.at, field.size = at, value_size
        at += value_size
    return 1


cdef Py_ssize_t unpack_number(View data, Py_ssize_t at, Py_ssize_t end, int64_t *value) except -2:
    """Read a number in MessagePack. Return where it ends; -1 if there is none."""
    cdef int mark, size, i
    cdef uint64_t found = 0
    if at >= end:
        return -1
    mark = byte(data, at)
    at += 1
    if mark < 0x80:
        value[0] = mark
        return at
    if mark >= 0xE0:
        value[0] = mark - 256
        return at
    if not 0xCC <= mark <= 0xD3:
        return -1
    size = 1 << (mark - 0xCC & 3)
    if size > end - at:
        return -1
    for i in range(size):
        found = found << 8 | <uint64_t>byte(data, at + i)
    if mark >= 0xD0:
        value[0] = <int64_t>(found << (64 - 8 * size)) >> (64 - 8 * size)
    elif found >> 63:
        return -1
    else:
        value[0] = <int64_t>found
    return at + size


cdef Py_ssize_t unpack_text(View data, Py_ssize_t at, Py_ssize_t end, Py_ssize_t *size) except -2:
    """Read the head of a text in MessagePack. Return where the text begins; -1 if there is none in UTF-8."""
    cdef int mark
    if at >= end:
        return -1
    mark = byte(data, at)
    at += 1
    if 0xA0 <= mark < 0xC0:
        size[0] = mark & 31
    elif mark == 0xD9 and end - at >= 1:
        size[0] = byte(data, at)
        at += 1
    elif mark == 0xDA and end - at >= 2:
        size[0] = byte(data, at) << 8 | byte(data, at + 1)
        at += 2
    else:
        return -1
    return at if size[0] <= end - at and is_utf8(data, at, size[0]) else -1


cdef int read_msgpack(View data, Py_ssize_t at, Py_ssize_t end, Header *header) except -1:
    """Read a header as Rocketlet's clients write it. Return 0 if it is to be declined."""
    cdef int64_t value = 0
    cdef Py_ssize_t size = 0, key_at, key_size, value_at
    cdef int i, mark, count
    cdef Field *field
    if at >= end or byte(data, at) != 0x97:
        return 0
    at += 1
    for i in range(5):  # code, flag, opaque, language, version
        value_at = at
        at = unpack_number(data, at, end, &value)
        if at < 0 or not is_int32(value) or (i == 3 and not 0 <= value < 256):
            return 0
        if i == 0:
            header.code = <int>value
        elif i == 1:
            header.flag = value
        elif i == 2:
            header.opaque, header.opaque_at, header.opaque_end = value, value_at, at
    if end - at < 2 or byte(data, at) != 0xC0 or not 0x80 <= byte(data, at + 1) < 0x90:  # no remark, a map
        return 0
    count = byte(data, at + 1) & 15
    at += 2
    for i in range(count):
        key_at = unpack_text(data, at, end, &key_size)
        if key_at < 0 or key_at + key_size >= end:
            return 0
        at = key_at + key_size
        mark = byte(data, at)
        if mark == 0xC2 or mark == 0xC3:
            field = add_field(header, TRUE if mark == 0xC3 else FALSE, key_at, key_size)
            field.at, field.size = at, 1
        elif 0xA0 <= mark < 0xC0 or 0xD9 <= mark <= 0xDA:
            field = add_field(header, TEXT, key_at, key_size)
            field.at = unpack_text(data, at, end, &field.size)
            if field.at < 0:
                return 0
        else:
            field = add_field(header, NUMBER, key_at, key_size)
            field.at, field.size = at, unpack_number(data, at, end, &field.number) - at
            if field.size < 0:
                return 0
        at = field.at + field.size
    return at == end


cdef Py_ssize_t read_header(View data, Py_ssize_t at, Py_ssize_t max_header_bytes, Header *header) except -1:
    """Read the header of the whole frame that begins at `at`. Return where the frame ends; 0 if the header is to be
    declined."""
    cdef uint32_t total, mark
    cdef Py_ssize_t end
    cdef int is_read
    if not 0 <= at <= data.size - 8:
        return 0
    total, mark = get_uint32(data, at), get_uint32(data, at + 4)
    if total < 4 or total > MAX_FRAME_BYTES - 4 or <Py_ssize_t>total > data.size - at - 4:
        return 0
    header.kind, header.code, header.count, header.opaque, header.flag, header.opaque_end = mark >> 24, 0, 0, 0, 0, 0
    header.at = at + 8
    header.body_at, header.after = at + 8 + <Py_ssize_t>(mark & 0xFFFFFF), at + 4 + <Py_ssize_t>total
    if header.body_at > header.after or header.body_at - header.at > max_header_bytes:
        return 0
    if header.kind == JSON:
        is_read = read_json(data, header.at, header.body_at, header)
    elif header.kind == ROCKETMQ:
        is_read = read_binary(data, header.at, header.body_at, header)
    elif header.kind == MSGPACK:
        is_read = read_msgpack(data, header.at, header.body_at, header)
    else:
        return 0
    return header.after if is_read else 0


def code_at(bytes data, Py_ssize_t at):
    """Return the request code of the frame that begins at `at`, if it comes first in the header; otherwise -1."""
    cdef Span span
    cdef View view = &span
    cdef int64_t code = -1
    cdef uint32_t kind
    span.start, span.size = <const uint8_t *>PyBytes_AsString(data), len(data)
    if not 0 <= at <= span.size - 8:
        return -1
    kind = get_uint32(view, at + 4) >> 24
    if kind == JSON:
        if span.size - at < 16 or not is_text(view, at + 8, 8, b'{"code":', 8) or read_number(view, at + 16, span.size, &code) < 0:
            return -1
    elif kind == ROCKETMQ:
        if span.size - at >= 10:
            code = byte(view, at + 8) << 8 | byte(view, at + 9)
    elif kind == MSGPACK:
        if span.size - at < 9 or byte(view, at + 8) != 0x97 or unpack_number(view, at + 9, span.size, &code) < 0:
            return -1
    return code


# ------------------------------------------------------------------------------
# The headers of SEND_MESSAGE, SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE. A header with a field twice is declined.


cdef enum:
    SEND_MESSAGE = 10
    SEND_MESSAGE_V2 = 310
    SEND_BATCH_MESSAGE = 320
    # A send's fields, by their letters in SEND_MESSAGE_V2
    TOPIC = 1
    QUEUE_ID = 4
    SYS_FLAG = 5
    BORN_MS = 6
    FLAG = 7
    PROPERTIES = 8
    RECONSUME_TIMES = 9
    UNIT_MODE = 10
    BATCH = 12
    FIELDS = 13
    # The other keys
    UNKNOWN = 13
    FIRST_ID = 14
    DECLINED = 15


cdef struct Send:
    int kind, code
    int64_t opaque, frame_flag
    Field fields[FIELDS]
    bint has_first_id
    int64_t queue_id, sys_flag, born_ms, flag, reconsume_times
    bint is_batch
    Py_ssize_t body_at, after


cdef inline bint is_send(int code) noexcept:
    return code == SEND_MESSAGE_V2 or code == SEND_BATCH_MESSAGE or code == SEND_MESSAGE


cdef int field_of(View data, int code, Py_ssize_t at, Py_ssize_t size) except -1:
    """Return which field a key names, by its letter in SEND_MESSAGE_V2."""
    cdef int first
    if size == 0:
        return UNKNOWN
    first = byte(data, at)
    if size == 1:
        return first - c"a" if code != SEND_MESSAGE and c"a" <= first <= c"m" else UNKNOWN
    if is_text(data, at, size, b"firstId", 7):
        return FIRST_ID
    # The response has another encoding than the request, or the request is signed
    if is_text(data, at, size, b"acceptEncoding", 14) or is_text(data, at, size, b"AccessKey", 9):
        return DECLINED
    if code != SEND_MESSAGE:
        return UNKNOWN
    if is_text(data, at, size, b"producerGroup", 13):
        return 0
    if is_text(data, at, size, b"topic", 5):
        return TOPIC
    if is_text(data, at, size, b"defaultTopic", 12):
        return 2
    if is_text(data, at, size, b"defaultTopicQueueNums", 21):
        return 3
    if is_text(data, at, size, b"queueId", 7):
        return QUEUE_ID
    if is_text(data, at, size, b"sysFlag", 7):
        return SYS_FLAG
    if is_text(data, at, size, b"bornTimestamp", 13):
        return BORN_MS
    if is_text(data, at, size, b"flag", 4):
        return FLAG
    if is_text(data, at, size, b"properties", 10):
        return PROPERTIES
    if is_text(data, at, size, b"reconsumeTimes", 14):
        return RECONSUME_TIMES
    if is_text(data, at, size, b"unitMode", 8):
        return UNIT_MODE
    if is_text(data, at, size, b"maxReconsumeTimes", 17):
        return 11
    return BATCH if is_text(data, at, size, b"batch", 5) else UNKNOWN


cdef int read_field_number(View data, Field *field, int64_t *value) except -1:
    """Return 0 if a field that is there is not a plain number."""
    if field.kind == NUMBER:
        value[0] = field.number
        return 1
    if field.kind == TEXT:
        return read_number(data, field.at, field.at + field.size, value) == field.at + field.size
    return 0


cdef int read_fields(View data, Send *send) except -1:
    """Read the fields as `protocol.headers` does. Return 0 if they are to be declined."""
    cdef Field *fields = send.fields
    cdef int i
    cdef int64_t ignored = 0
    for i in range(3):
        if fields[i].kind != TEXT:
            return 0
    if not (
        read_field_number(data, &fields[3], &ignored)
        and read_field_number(data, &fields[QUEUE_ID], &send.queue_id)
        and read_field_number(data, &fields[SYS_FLAG], &send.sys_flag)
        and read_field_number(data, &fields[BORN_MS], &send.born_ms)
        and read_field_number(data, &fields[FLAG], &send.flag)
    ):
        return 0
    if fields[PROPERTIES].kind != ABSENT and fields[PROPERTIES].kind != TEXT:
        return 0
    if fields[RECONSUME_TIMES].kind != ABSENT and not read_field_number(data, &fields[RECONSUME_TIMES], &send.reconsume_times):
        return 0
    if fields[11].kind != ABSENT and not read_field_number(data, &fields[11], &ignored):
        return 0
    if fields[UNIT_MODE].kind == NUMBER or fields[BATCH].kind == NUMBER:
        return 0
    if fields[BATCH].kind == TEXT:
        if is_text(data, fields[BATCH].at, fields[BATCH].size, b"true", 4):
            send.is_batch = True
        elif not is_text(data, fields[BATCH].at, fields[BATCH].size, b"false", 5):
            return 0
    else:
        send.is_batch = fields[BATCH].kind == TRUE
    if not 1 <= fields[TOPIC].size <= 127:
        return 0
    # A negative queue id leaves the choice to the broker
    return (
        0 <= send.queue_id <= 0x7FFFFFFF and 0 <= send.sys_flag <= 0x7FFFFFFF and is_int32(send.flag)
        and is_int32(send.reconsume_times)
    )


cdef int put_field(Send *send, int name, Field *field) noexcept:
    """Keep a field of a send. Return 0 if the header is to be declined."""
    if name == DECLINED:
        return 0
    if name == FIRST_ID:
        send.has_first_id = True
        if send.kind == MSGPACK:
            return field.kind == TRUE or field.kind == FALSE
    if name >= FIELDS:
        return field.kind == TEXT and not field.is_escaped
    if send.fields[name].kind != ABSENT or (field.is_escaped and name != PROPERTIES):
        return 0
    if (field.kind == TRUE or field.kind == FALSE) and name != UNIT_MODE and name != BATCH:
        return 0
    send.fields[name] = field[0]
    return 1


cdef int read_send(View data, Py_ssize_t at, Py_ssize_t max_header_bytes, Send *send) except -1:
    """Read the whole frame that begins at `at`. Return 0 if there is none that is a plain send."""
    cdef Header header
    cdef Field *field
    cdef int i
    if not read_header(data, at, max_header_bytes, &header) or not is_send(header.code):
        return 0
    memset(send, 0, sizeof(Send))
    send.kind, send.code, send.opaque, send.frame_flag = header.kind, header.code, header.opaque, header.flag
    send.body_at, send.after = header.body_at, header.after
    for i in range(header.count):
        field = &header.fields[i]
        if not put_field(send, field_of(data, send.code, field.key_at, field.key_size), field):
            return 0
    if (send.frame_flag and send.frame_flag != ONEWAY_FLAG) or send.opaque < 0:
        return 0
    return read_fields(data, send)


# ------------------------------------------------------------------------------
# Pulls. A client repeats a pull with other offsets: the rest of its header stays, and is a key of what was checked.


cdef enum:
    OPAQUE = 0
    QUEUE_OFFSET = 1
    COMMIT_OFFSET = 2
    FIELDS_SIZE = 3  # in ROCKETMQ's encoding
    MAX_HOLES = 4
    INDEX_ENTRY_BYTES = 20


cdef struct Pull:
    int kind, seen
    Py_ssize_t at, after
    Py_ssize_t first[MAX_HOLES]
    Py_ssize_t end[MAX_HOLES]  # of the parts of the header that differ
    int64_t value[MAX_HOLES]


cdef int put_hole(Pull *pull, int hole, Py_ssize_t first, Py_ssize_t end, int64_t value) noexcept:
    """Keep a part of the header that differs. Return 0 if there is another one of its kind."""
    if pull.seen & 1 << hole:
        return 0
    pull.seen |= 1 << hole
    pull.first[hole], pull.end[hole], pull.value[hole] = first, end, value
    return 1


cdef int hole_of(View data, Py_ssize_t at, Py_ssize_t size) except -2:
    """Return which hole a field's value is; MAX_HOLES for none, -1 for a field that keeps the header from being a key."""
    if is_text(data, at, size, b"queueOffset", 11):
        return QUEUE_OFFSET
    if is_text(data, at, size, b"commitOffset", 12):
        return COMMIT_OFFSET
    if is_text(data, at, size, b"Signature", 9) or is_text(data, at, size, b"AccessKey", 9):
        return -1
    return MAX_HOLES


cdef int put_key(View data, Pull *pull, Output out) except -1:
    """Write the parts of a header that stay, with the places of those that differ."""
    cdef Py_ssize_t before = pull.at
    cdef int order[MAX_HOLES]
    cdef int i, hole, count = 0
    cdef uint32_t place
    out.room(1)[0] = <uint8_t>pull.kind
    for hole in range(MAX_HOLES):
        if pull.seen & 1 << hole:
            i = count
            while i and pull.first[order[i - 1]] > pull.first[hole]:
                order[i] = order[i - 1]
                i -= 1
            order[i] = hole
            count += 1
    for i in range(count):
        hole = order[i]
        out.put(part(data, before, pull.first[hole] - before), pull.first[hole] - before)
        place = <uint32_t>out.size
        out.put(&place, 4)
        before = pull.end[hole]
    out.put(part(data, before, pull.after - before), pull.after - before)
    return 0


cdef Py_ssize_t read_pull(View data, Py_ssize_t at, Py_ssize_t max_header_bytes, Pull *pull) except -1:
    """Read the pull that begins at `at`. Return where it ends; 0 if no whole plain pull is there."""
    cdef Header header
    cdef Field *field
    cdef int i, hole
    cdef int64_t value
    if not read_header(data, at, max_header_bytes, &header) or header.code != PULL_MESSAGE or header.flag:
        return 0
    if header.body_at != header.after or not header.opaque_end:
        return 0
    pull.kind, pull.at, pull.after, pull.seen = header.kind, header.at, header.after, 0
    put_hole(pull, OPAQUE, header.opaque_at, header.opaque_end, header.opaque)
    if header.kind == ROCKETMQ:
        put_hole(pull, FIELDS_SIZE, header.at + BINARY_HEAD_BYTES - 4, header.at + BINARY_HEAD_BYTES, 0)
    for i in range(header.count):
        field = &header.fields[i]
        hole = hole_of(data, field.key_at, field.key_size)
        if hole < 0:
            return 0
        if hole == MAX_HOLES:
            continue
        if (field.kind == NUMBER) != (header.kind == MSGPACK) or not read_field_number(data, field, &value):
            return 0
        # in ROCKETMQ's encoding with the size in front of it
        if not put_hole(pull, hole, field.at - (4 if header.kind == ROCKETMQ else 0), field.at + field.size, value):
            return 0
    return header.after if pull.seen & 7 == 7 else 0


def pull_key(bytes data, Py_ssize_t at, Py_ssize_t max_header_bytes):
    """Return the bytes of a pull's header that stay when a client repeats it; None if no whole plain pull is at `at`."""
    cdef Span span
    cdef Pull pull
    cdef Output key = Output(256)
    span.start, span.size = <const uint8_t *>PyBytes_AsString(data), len(data)
    if not read_pull(&span, at, max_header_bytes, &pull):
        return None
    put_key(&span, &pull, key)
    return bytes(key.written())


# ------------------------------------------------------------------------------
# A message's properties. protocol/properties.py describes them.


cdef Py_ssize_t find_text(const uint8_t *start, Py_ssize_t size, const char *text, Py_ssize_t text_size) noexcept nogil:
    """Return where a text first occurs; -1 if it does not."""
    cdef const uint8_t *at = start
    cdef const uint8_t *last = start + size - text_size
    cdef uint8_t begin = <uint8_t>text[0], end = <uint8_t>text[text_size - 1]
    while at <= last:
        at = <const uint8_t *>memchr(at, begin, last - at + 1)
        if at is NULL:
            return -1
        while at <= last and at[0] == begin:  # calls for each of a million such bytes would take 10 ms
            if at[text_size - 1] == end and memcmp(at, text, text_size) == 0:
                return at - start
            at += 1
    return -1


cdef int unescape(View data, Field *field, Output out) except -1:
    """Write a JSON text without its escapes."""
    cdef Py_ssize_t at = field.at, end = field.at + field.size, before
    while at < end:
        before = at
        at = find(data, at, end, c"\\")
        out.put(part(data, before, at - before), at - before)
        if at < end:
            out.room(1)[0] = <uint8_t>unescaped(data, at + 1, end)
            at += 6 if byte(data, at + 1) == c"u" else 2
    return 0


cdef void remove_wait(Output text) noexcept:
    """Take WAIT out, as `protocol.properties.without` does."""
    cdef uint8_t *start = text.start
    cdef Py_ssize_t size = text.size, at, end, to = 0
    cdef bint is_first = True
    at = find_text(start, size, b"\2WAIT\1", 6)
    if at >= 0 and memcmp(start, b"WAIT\1", 5) and find_text(start + at + 6, size - at - 6, b"WAIT\1", 5) < 0:
        end = at + 6 + find_text(start + at + 6, size - at - 6, b"\2", 1)
        if end < at + 6:
            end = size
        memmove(start + at, start + end, size - end)
        text.size = size - (end - at)
        return
    at = 0
    while at < size:  # the items that are neither empty nor WAIT, joined
        end = at + find_text(start + at, size - at, b"\2", 1)
        if end < at:
            end = size
        if end > at and not (end - at >= 5 and memcmp(start + at, b"WAIT\1", 5) == 0):
            if not is_first:
                start[to] = 2
                to += 1
            memmove(start + to, start + at, end - at)
            to += end - at
            is_first = False
        at = end + 1
    text.size = to


cdef int read_properties(View data, Send *send, Output text) except -1:
    """Write the properties of a message that is delivered at once. Return 0 for those of others, or of half messages."""
    cdef Field *field = &send.fields[PROPERTIES]
    text.size = 0
    if field.kind == ABSENT:
        return 1
    if field.is_escaped:
        unescape(data, field, text)
    else:
        text.put(part(data, field.at, field.size), field.size)
    if find_text(text.start, text.size, b"DEL", 3) >= 0 or find_text(text.start, text.size, b"TRAN_MSG\1", 9) >= 0 or find_text(text.start, text.size, b"_SYS_MSG_PRIORITY_\1", 19) >= 0 or find_text(text.start, text.size, b"__LITE_TOPIC\1", 13) >= 0:
        return 0
    if send.is_batch:
        return find_text(text.start, text.size, b"TIMER_D", 7) < 0
    if find_text(text.start, text.size, b"WAIT\1", 5) >= 0:
        remove_wait(text)
    return 1


cdef int64_t tag_code(const uint8_t *start, Py_ssize_t size) noexcept nogil:
    """Return Java's hash of the tag, which is a text in UTF-8; 0 without one. The last tag that is not empty counts."""
    cdef Py_ssize_t at = 0, end, tag_at = 0, tag_end = 0
    cdef uint32_t code = 0, found
    if find_text(start, size, b"TAGS\1", 5) < 0:
        return 0
    while at < size:
        end = at + find_text(start + at, size - at, b"\2", 1)
        if end < at:
            end = size
        if end - at > 5 and memcmp(start + at, b"TAGS\1", 5) == 0:
            tag_at, tag_end = at + 5, end
        at = end + 1
    while tag_at < tag_end:
        found = start[tag_at]
        if found < 0x80:
            tag_at += 1
        elif found < 0xE0 and tag_end - tag_at >= 2:
            found = (found & 0x1F) << 6 | (start[tag_at + 1] & 0x3F)
            tag_at += 2
        elif found < 0xF0 and tag_end - tag_at >= 3:
            found = (found & 0x0F) << 12 | (start[tag_at + 1] & 0x3F) << 6 | (start[tag_at + 2] & 0x3F)
            tag_at += 3
        elif tag_end - tag_at >= 4:
            found = (
                (found & 0x07) << 18 | (start[tag_at + 1] & 0x3F) << 12 | (start[tag_at + 2] & 0x3F) << 6
                | (start[tag_at + 3] & 0x3F)
            ) - 0x10000
            code = 31 * code + (0xD800 | found >> 10)  # Java's characters have 16 bits
            found = 0xDC00 | (found & 0x3FF)
            tag_at += 4
        else:
            break
        code = 31 * code + found
    return <int32_t>code


# ------------------------------------------------------------------------------
# Sends: from the bytes of a socket read to log records, index entries and responses.


cdef enum:
    BEGIN_MARK_BYTES = 14
    MARKED_TEXT_BYTES = MAX_TEXT_BYTES - CHECKSUM_BYTES - BEGIN_MARK_BYTES  # a message with more goes without a mark
    ENTRY_BYTES = 22  # of a batch's message without body and properties
    HOST_FLAGS = 0x30
    TRANSACTION_FLAGS = 0xC

cdef const char *UPPER_HEX = b"0123456789ABCDEF"


@cython.final
cdef class Touched:
    """A queue that got messages: their entries of its index, and the bytes of their records."""

    cdef object queue
    cdef bytes topic
    cdef Output entries
    cdef int64_t next, count, put_bytes

    cdef inline int put(self, int64_t position, int64_t size, int64_t code) except -1:
        cdef uint8_t *to = self.entries.room(INDEX_ENTRY_BYTES)
        put_uint64(to, <uint64_t>position)
        put_uint32(to + 8, <uint32_t>size)
        put_uint64(to + 12, <uint64_t>code)
        self.next += 1
        self.count += 1
        self.put_bytes += size
        return 0


@cython.final
cdef class Broker:
    """What all records and responses of a call share."""

    cdef bytes born_host, store_host, host_hex, cluster, region
    cdef uint32_t host_flags
    cdef int64_t now_ms


cdef Py_ssize_t put_record(
    Output out, Broker broker, Send *send, Touched queue, int64_t flag, int64_t position, const uint8_t *body, Py_ssize_t body_size,
    const uint8_t *text, Py_ssize_t text_size, const uint8_t *shared, Py_ssize_t shared_size, bytes mark,
) except -1:
    """Write a record as `protocol.message.encode_record` makes it, and its entry. Return the record's size."""
    cdef Py_ssize_t born_size = len(broker.born_host), store_size = len(broker.store_host), mark_size = len(mark)
    cdef Py_ssize_t topic_size = len(queue.topic), head_size = 72 + born_size + store_size
    cdef Py_ssize_t own_size = text_size + shared_size + mark_size
    cdef Py_ssize_t tail_size = topic_size + 2 + own_size
    cdef Py_ssize_t size = head_size + body_size + tail_size + CHECKSUM_BYTES
    cdef uint8_t *head = out.room(size)
    cdef uint8_t *to = head
    cdef uint8_t *tail
    cdef uint32_t checksum
    cdef int i
    put_uint32(to, <uint32_t>size)
    put_uint32(to + 4, <uint32_t>MAGIC)
    put_uint32(to + 8, crc32_of(0, body, body_size) & 0x7FFFFFFF)
    put_uint32(to + 12, <uint32_t>send.queue_id)
    put_uint32(to + 16, <uint32_t>flag)
    put_uint64(to + 20, <uint64_t>queue.next)
    put_uint64(to + 28, <uint64_t>position)
    put_uint32(to + 36, (<uint32_t>send.sys_flag & ~<uint32_t>(HOST_FLAGS | TRANSACTION_FLAGS)) | broker.host_flags)
    put_uint64(to + 40, <uint64_t>send.born_ms)
    memcpy(to + 48, PyBytes_AsString(broker.born_host), born_size)
    to += 48 + born_size
    put_uint64(to, <uint64_t>broker.now_ms)
    memcpy(to + 8, PyBytes_AsString(broker.store_host), store_size)
    to += 8 + store_size
    put_uint32(to, <uint32_t>send.reconsume_times)
    put_uint64(to + 4, 0)
    put_uint32(to + 12, <uint32_t>body_size)
    memcpy(to + 16, body, body_size)
    to += 16 + body_size
    tail = to
    memcpy(to, PyBytes_AsString(queue.topic), topic_size)
    put_uint16(to + topic_size, <uint32_t>(own_size + CHECKSUM_BYTES))
    to += topic_size + 2
    memcpy(to, text, text_size)
    memcpy(to + text_size, shared, shared_size)
    memcpy(to + text_size + shared_size, PyBytes_AsString(mark), mark_size)
    queue.put(position, size, tag_code(to, own_size))
    to += own_size
    checksum = crc32_of(crc32_of(0, head, head_size), tail, tail_size)
    to[0], to[1] = 2, 3
    for i in range(8):
        to[2 + i] = HEX[checksum >> (28 - 4 * i) & 15]
    return size


cdef inline int put_decimal(Output out, int64_t value) except -1:
    """Write a number that is not negative. Return how many digits it has."""
    cdef uint8_t digits[20]
    cdef int count = 0
    while True:
        count += 1
        digits[20 - count] = <uint8_t>(c"0" + value % 10)
        value = value // 10
        if not value:
            break
    out.put(digits + 20 - count, count)
    return count


cdef int pack_number(Output out, uint64_t value) except -1:
    """Write a number as msgpack packs it."""
    cdef uint8_t *to
    if value < 0x80:
        out.room(1)[0] = <uint8_t>value
    elif value <= 0xFF:
        to = out.room(2)
        to[0], to[1] = 0xCC, <uint8_t>value
    elif value <= 0xFFFF:
        to = out.room(3)
        to[0] = 0xCD
        put_uint16(to + 1, <uint32_t>value)
    elif value <= 0xFFFFFFFFU:
        to = out.room(5)
        to[0] = 0xCE
        put_uint32(to + 1, <uint32_t>value)
    else:
        to = out.room(9)
        to[0] = 0xCF
        put_uint64(to + 1, value)
    return 0


cdef int pack_text_head(Output out, Py_ssize_t size) except -1:
    cdef uint8_t *to
    if size < 32:
        out.room(1)[0] = <uint8_t>(0xA0 | size)
    elif size <= 0xFF:
        to = out.room(2)
        to[0], to[1] = 0xD9, <uint8_t>size
    elif size <= 0xFFFF:
        to = out.room(3)
        to[0] = 0xDA
        put_uint16(to + 1, <uint32_t>size)
    else:
        to = out.room(5)
        to[0] = 0xDB
        put_uint32(to + 1, <uint32_t>size)
    return 0


cdef int put_ids(Output out, bytes host, const int64_t *positions, Py_ssize_t count) except -1:
    """Write the ids of messages: the broker's host and a position in the log, in hex."""
    cdef Py_ssize_t i, host_size = len(host)
    cdef int digit
    cdef uint8_t *to
    for i in range(count):
        if i:
            out.room(1)[0] = c","
        to = out.room(host_size + 16)
        memcpy(to, PyBytes_AsString(host), host_size)
        for digit in range(16):
            to[host_size + digit] = UPPER_HEX[<uint64_t>positions[i] >> (60 - 4 * digit) & 15]
    return 0


cdef int put_binary_number(Output out, int64_t value) except -1:
    cdef Py_ssize_t at = out.size
    cdef int size
    out.room(4)
    size = put_decimal(out, value)
    put_uint32(out.start + at, size)
    return 0


cdef int put_response(
    Output out, Broker broker, Send *send, const int64_t *positions, Py_ssize_t count, int64_t queue_offset
) except -1:
    """Write the response to a send as `protocol.headers.encode_sent` makes it."""
    cdef Py_ssize_t at = out.size, fields_at, size, ids_size = count * (len(broker.host_hex) + 17) - 1
    out.room(8)
    if send.kind == JSON:
        out.put(b'{"code":0,"extFields":{"msgId":"', 32)
        put_ids(out, broker.host_hex, positions, count)
        out.put(b'","queueId":"', 13)
        put_decimal(out, send.queue_id)
        out.put(b'","queueOffset":"', 17)
        put_decimal(out, queue_offset)
        out.put(b'","MSG_REGION":"', 16)
        out.put(PyBytes_AsString(broker.region), len(broker.region))
        out.put(b'","TRACE_ON":"true"},"flag":1,"language":"JAVA","opaque":', 57)
        put_decimal(out, send.opaque)
        out.put(b',"serializeTypeCurrentRPC":"JSON","version":409}', 48)
    elif send.kind == ROCKETMQ:
        out.put(b"\0\0\0\x01\x99", 5)
        put_uint32(out.room(4), <uint32_t>send.opaque)
        out.put(b"\0\0\0\x01\0\0\0\0\0\0\0\0", 12)
        fields_at = out.size
        out.put(b"\0\5msgId", 7)
        put_uint32(out.room(4), <uint32_t>ids_size)
        put_ids(out, broker.host_hex, positions, count)
        out.put(b"\0\7queueId", 9)
        put_binary_number(out, send.queue_id)
        out.put(b"\0\x0bqueueOffset", 13)
        put_binary_number(out, queue_offset)
        out.put(b"\0\nMSG_REGION", 12)
        put_uint32(out.room(4), <uint32_t>len(broker.region))
        out.put(PyBytes_AsString(broker.region), len(broker.region))
        out.put(b"\0\x08TRACE_ON\0\0\0\4true", 18)
        put_uint32(out.start + fields_at - 4, <uint32_t>(out.size - fields_at))
    else:
        out.put(b"\x97\0\1", 3)
        pack_number(out, <uint64_t>send.opaque)
        out.put(b"\0\xcd\x01\x99\xc0\x83\xa5msgId", 12)
        pack_text_head(out, ids_size)
        put_ids(out, broker.host_hex, positions, count)
        out.put(b"\xa7queueId", 8)
        pack_number(out, <uint64_t>send.queue_id)
        out.put(b"\xabqueueOffset", 12)
        pack_number(out, <uint64_t>queue_offset)
    size = out.size - at - 8
    put_uint32(out.start + at, <uint32_t>(4 + size))
    put_uint32(out.start + at + 4, <uint32_t>(send.kind << 24 | size))
    return 0


cdef int put_binary_text(Output out, const char *name, Py_ssize_t size, int64_t value) except -1:
    put_uint16(out.room(2), <uint32_t>size)
    out.put(name, size)
    return put_binary_number(out, value)


cdef int put_found_head(
    Output out, int kind, int64_t opaque, int64_t next_offset, int64_t first, int64_t end, int64_t body_size
) except -1:
    """Write the frame of a pull's response without its body, as `protocol.headers.encode_found_head` makes it. Return 0 for
    numbers that are declined."""
    cdef Py_ssize_t at = out.size, fields_at, size
    if not 0 <= opaque <= 0x7FFFFFFF or min(next_offset, first, end) < 0 or not 0 <= body_size < MAX_FRAME_BYTES:
        return 0
    out.room(8)
    if kind == JSON:
        out.put(b'{"code":0,"extFields":{"suggestWhichBrokerId":"0","nextBeginOffset":"', 69)
        put_decimal(out, next_offset)
        out.put(b'","minOffset":"', 15)
        put_decimal(out, first)
        out.put(b'","maxOffset":"', 15)
        put_decimal(out, end)
        out.put(b'"},"flag":1,"language":"JAVA","opaque":', 39)
        put_decimal(out, opaque)
        out.put(b',"serializeTypeCurrentRPC":"JSON","version":409,"remark":"FOUND"}', 65)
    elif kind == ROCKETMQ:
        out.put(b"\0\0\0\x01\x99", 5)
        put_uint32(out.room(4), <uint32_t>opaque)
        out.put(b"\0\0\0\x01\0\0\0\5FOUND\0\0\0\0", 17)
        fields_at = out.size
        put_binary_text(out, b"suggestWhichBrokerId", 20, 0)
        put_binary_text(out, b"nextBeginOffset", 15, next_offset)
        put_binary_text(out, b"minOffset", 9, first)
        put_binary_text(out, b"maxOffset", 9, end)
        put_uint32(out.start + fields_at - 4, <uint32_t>(out.size - fields_at))
    elif kind == MSGPACK:
        out.put(b"\x97\0\1", 3)
        pack_number(out, <uint64_t>opaque)
        out.put(b"\0\xcd\x01\x99\xa5FOUND\x84\xb4suggestWhichBrokerId\0\xafnextBeginOffset", 49)
        pack_number(out, <uint64_t>next_offset)
        out.put(b"\xa9minOffset", 10)
        pack_number(out, <uint64_t>first)
        out.put(b"\xa9maxOffset", 10)
        pack_number(out, <uint64_t>end)
    else:
        return 0
    size = out.size - at - 8
    put_uint32(out.start + at, <uint32_t>(4 + size + body_size))
    put_uint32(out.start + at + 4, <uint32_t>(kind << 24 | size))
    return 1


cdef Py_ssize_t put_batch(
    View data, Broker broker, Send *send, Touched queue, Output out, Output text, Output positions, int64_t log_end,
    object mark_at, tuple limits,
) except -1:
    """Write the records of a batch's messages. Return their number; 0 for a batch that is declined, of which the caller takes
    back what was written."""
    cdef Py_ssize_t max_properties = limits[1], max_bytes = limits[2], max_messages = limits[3]
    cdef Py_ssize_t piece_bytes = limits[4], piece_messages = limits[5]
    cdef Py_ssize_t at = send.body_at, end = send.after, count = 0, body_at, text_at, text_size, without_mark
    cdef Py_ssize_t piece_at = at, in_piece = 0
    cdef int64_t size, flag, body_size, position
    cdef Output shared = Output(text.size + len(broker.cluster) + 2)
    cdef bytes mark
    if at == end or end - at > max_bytes or send.sys_flag & TRANSACTION_FLAGS:
        return 0
    shared.put(b"\2", 1)  # the properties of all messages, after a separator
    shared.put(text.start, text.size)
    if text.size and text.start[text.size - 1] != 2:
        shared.put(b"\2", 1)
    shared.put(PyBytes_AsString(broker.cluster), len(broker.cluster))
    while at < end:
        if end - at < ENTRY_BYTES or count == max_messages:
            return 0
        size, flag = <int32_t>get_uint32(data, at), <int32_t>get_uint32(data, at + 12)
        body_size = <int32_t>get_uint32(data, at + 16)
        if body_size < 0 or size < ENTRY_BYTES + body_size or size > end - at:
            return 0
        body_at = at + 20
        text_at = body_at + body_size + 2
        text_size = byte(data, text_at - 2) << 8 | byte(data, text_at - 1)
        if text_at + text_size != at + size or not is_utf8(data, text_at, text_size):
            return 0
        if find_text(part(data, text_at, text_size), text_size, b"__LITE_TOPIC\1", 13) >= 0:
            return 0  # the caller checks whose property it is
        without_mark = 1 if not text_size or byte(data, text_at + text_size - 1) == 2 else 0
        if text_size + shared.size - without_mark > max_properties:
            return 0
        position = log_end + out.size
        if in_piece == piece_messages or at - piece_at >= piece_bytes:
            piece_at, in_piece = at, 0
        mark = <bytes>mark_at(position) if in_piece == 0 else b""
        put_record(
            out, broker, send, queue, flag, position, part(data, body_at, body_size), body_size,
            part(data, text_at, text_size), text_size, shared.start + without_mark, shared.size - without_mark, mark,
        )
        positions.put(&position, 8)
        at += size
        count += 1
        in_piece += 1
    return count


@cython.final
cdef class Queues:
    """The queues that passed every check, and those of them that got messages in this call."""

    cdef dict passed, touched
    cdef bytes account, last_key
    cdef Touched last
    cdef Output key

    cdef Touched find(self, View data, Send *send):
        """Return the queue of a send; None if it is not among those that passed every check."""
        cdef Output key = self.key
        key.size = 0
        key.put(PyBytes_AsString(self.account), len(self.account))
        key.put(b"\0", 1)
        key.put(part(data, send.fields[TOPIC].at, send.fields[TOPIC].size), send.fields[TOPIC].size)
        key.put(b"\0", 1)
        put_decimal(key, send.queue_id)
        if self.last_key is None or len(self.last_key) != key.size or memcmp(PyBytes_AsString(self.last_key), key.start, key.size):
            self.last_key = PyBytes_FromStringAndSize(<const char *>key.start, key.size)
            self.last = self.named(self.last_key)
        return self.last

    cdef Touched named(self, bytes key):
        cdef Touched queue = self.touched.get(key)
        if queue is None:
            found = self.passed.get(key)
            if found is None:
                return None
            queue = Touched()
            queue.queue, queue.topic = found
            queue.entries, queue.next = Output(16 * INDEX_ENTRY_BYTES), queue.queue.next
            self.touched[key] = queue
        return queue


def take_sends(
    bytes data, Py_ssize_t at, bytes account, dict queues, int64_t log_end, int64_t now_ms, bytes first_mark, object mark_at, bytes born_host,
    tuple broker_texts, tuple limits,
):
    """Make the log records, index entries and responses of the plain sends that lie from `at` on, one after the other.

    `queues` has, by account, topic and number, the queues that passed every check, each with its topic as records have it.
    `mark_at` returns the mark of a record at a position of the log, and `first_mark` is that of the first record, if it is
    one. Returns where it stopped, the code of the first send, the number of sends, the records, of each queue its entries,
    their number and the bytes of their records, and the responses."""
    cdef Span span
    cdef Send send
    cdef View view = &span
    cdef Py_ssize_t max_body = limits[0], max_properties = limits[1], max_header = limits[6]
    cdef Py_ssize_t body_size, shared_size, messages, sends = 0
    cdef Py_ssize_t before, entries_before
    cdef int64_t next_before, count_before, bytes_before, position
    cdef int first_code = 0
    cdef const uint8_t *shared
    cdef Output out, responses = Output(512), text = Output(512), positions = Output(64)
    cdef Queues found = Queues()
    cdef Touched queue
    cdef Broker broker = Broker()
    cdef bytes with_separator, mark
    span.start, span.size = <const uint8_t *>PyBytes_AsString(data), len(data)
    if not 0 <= at <= span.size:
        return None
    broker.store_host, broker.host_hex, broker.cluster, broker.region = broker_texts
    broker.born_host, broker.now_ms = born_host, now_ms
    found.passed, found.touched, found.account, found.key = queues, {}, account, Output(128)
    if not (len(born_host) in (8, 20) and len(broker.store_host) in (8, 20)):
        return None
    broker.host_flags = (0x10 if len(born_host) == 20 else 0) | (0x20 if len(broker.store_host) == 20 else 0)
    with_separator = b"\2" + broker.cluster
    out = Output(span.size - at + 256)
    while read_send(view, at, max_header, &send):
        body_size = send.after - send.body_at
        if body_size > max_body or not read_properties(view, &send, text):
            break
        queue = found.find(view, &send)
        if queue is None:
            break
        position = log_end + out.size
        positions.size = 0
        next_before = queue.next
        if send.is_batch:
            before, entries_before = out.size, queue.entries.size
            count_before, bytes_before = queue.count, queue.put_bytes
            messages = put_batch(view, broker, &send, queue, out, text, positions, log_end, mark_at, limits)
            if not messages:
                out.size, queue.entries.size = before, entries_before
                queue.next, queue.count, queue.put_bytes = next_before, count_before, bytes_before
                break
            if send.has_first_id:
                messages = 1
        else:
            shared, shared_size = <const uint8_t *>PyBytes_AsString(with_separator), len(with_separator)
            if not text.size or text.start[text.size - 1] == 2:
                shared += 1
                shared_size -= 1
            if text.size + shared_size > max_properties:
                break
            mark = first_mark if not sends and text.size + shared_size <= MARKED_TEXT_BYTES else b""
            put_record(
                out, broker, &send, queue, send.flag, position, part(view, send.body_at, body_size), body_size,
                text.start, text.size, shared, shared_size, mark,
            )
            positions.put(&position, 8)
            messages = 1
        if not send.frame_flag & ONEWAY_FLAG:
            put_response(responses, broker, &send, <const int64_t *>positions.start, messages, next_before)
        if not sends:
            first_code = send.code
        sends += 1
        at = send.after
    if not sends:
        return None
    return (
        at, first_code, sends, bytes(out.written()),
        [
            (queue.queue, bytes(queue.entries.written()), queue.count, queue.put_bytes)
            for queue in found.touched.values() if queue.count
        ],
        bytes(responses.written()),
    )


# ------------------------------------------------------------------------------
# Pulls that repeat checked ones: from the bytes of a socket read to responses, with the records as they are in the log.


cdef extern from "Python.h":
    ctypedef struct Py_buffer:
        void *buf
        Py_ssize_t len
    int PyObject_GetBuffer(object exporter, Py_buffer *view, int flags) except -1
    void PyBuffer_Release(Py_buffer *view)
    int PyBUF_SIMPLE


cdef enum:
    RECORD_HEAD_BYTES = 36  # up to the position in the log
    MAX_ENTRIES_READ = 2048
    MAX_PULLS = 64  # that one call serves, so that its caller can check the time between calls


cdef struct Part:
    int64_t begin, end
    uint32_t before, after  # sums of everything that was written before it, and with it


cdef int find_part(tuple sums, int64_t position, int64_t end, Part *found) except -1:
    """Find the smallest part between two known sums that contains the log from a position up to `end`, as `Written.part`
    does. Return 0 if this process has not written it."""
    cdef Py_buffer places_buffer, sums_buffer
    cdef const uint64_t *places
    cdef const uint32_t *values
    cdef Py_ssize_t count, low = 0, high, middle
    cdef int is_found = 0
    found.end, found.after = sums[2], sums[3]
    PyObject_GetBuffer(sums[0], &places_buffer, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(sums[1], &sums_buffer, PyBUF_SIMPLE)
        places, values = <const uint64_t *>places_buffer.buf, <const uint32_t *>sums_buffer.buf
        count = min(places_buffer.len // 8, sums_buffer.len // 4)
        if count and position >= <int64_t>places[0] and end <= found.end:
            high = count
            while low < high:  # the first place after the position
                middle = (low + high) >> 1
                if position < <int64_t>places[middle]:
                    high = middle
                else:
                    low = middle + 1
            found.begin, found.before = <int64_t>places[low - 1], values[low - 1]
            high = count
            while low < high:  # the first place that is not before the end
                middle = (low + high) >> 1
                if <int64_t>places[middle] < end:
                    low = middle + 1
                else:
                    high = middle
            if low < count:
                found.end, found.after = <int64_t>places[low], values[low]
            is_found = 1
        PyBuffer_Release(&sums_buffer)
    finally:
        PyBuffer_Release(&places_buffer)
    return is_found


@cython.final
cdef class Queue:
    """The queue of an admitted pull, with the packed entries that were read from its index."""

    cdef object read_entries, answer, pull
    cdef int64_t begin, next, first, room, entries_at, messages, put_bytes, next_offset
    cdef Py_ssize_t limit, last_count
    cdef bint is_admitted
    cdef bytes entries

    cdef int read(self, int64_t offset, Py_ssize_t more) except -1:
        """Have the entries of a pull. Return 0 if they cannot be read. `more` is the number of pulls that may follow."""
        cdef Py_ssize_t count = self.limit if self.next - offset > self.limit else <Py_ssize_t>(self.next - offset)
        cdef int64_t end = self.entries_at + (len(self.entries) // INDEX_ENTRY_BYTES if self.entries is not None else 0)
        if self.entries is None or not self.entries_at <= offset or offset + count > end:
            # a client that reads a queue goes on where it was
            wanted = min(count * (more + 1), MAX_ENTRIES_READ) if self.entries is not None and offset == end else count
            self.entries, self.entries_at = self.read_entries(offset, max(wanted, count)), offset
            if len(self.entries) < count * INDEX_ENTRY_BYTES:
                return 0
        self.last_count = count
        return 1


@cython.final
cdef class Log:
    """The log that the records are read from."""

    cdef object segment_at, read_at, crc32
    cdef tuple sums
    cdef int64_t begin, max_read, shared
    cdef int64_t start, end, shared_at, shared_size
    cdef object descriptor, shared_data

    cdef object read(self, int64_t position, int64_t size, int64_t last_size):
        """Return records that lie side by side; None if they have to be read one by one."""
        cdef Part found
        cdef Span span
        cdef Py_ssize_t at
        cdef bytes data
        cdef uint32_t after
        memset(&found, 0, sizeof(Part))
        if position < self.begin or size > self.max_read or size < RECORD_HEAD_BYTES or last_size < RECORD_HEAD_BYTES:
            return None
        if position == self.shared_at and size == self.shared_size:
            return self.shared_data
        if not find_part(self.sums, position, position + size, &found):
            return None
        if self.descriptor is None or not self.start <= found.begin < self.end:
            self.start, self.end, self.descriptor = self.segment_at(found.begin)
        if found.end > self.end:
            return None
        data = self.read_at(self.descriptor, found.end - found.begin, found.begin - self.start)
        if len(data) != found.end - found.begin:
            return None
        after = self.crc32(data, found.before)
        if after != found.after:
            return None
        span.start, span.size = <const uint8_t *>PyBytes_AsString(data), len(data)
        at = <Py_ssize_t>(position - found.begin)
        if get_int64(&span, at + 28) != position or get_uint32(&span, at + size - last_size) != <uint32_t>last_size:
            return None
        piece = data if len(data) == size else memoryview(data)[at : at + size]
        if size <= self.shared:
            self.shared_at, self.shared_size, self.shared_data = position, size, piece
        return piece


cdef int read_run(View entries, Py_ssize_t at, Py_ssize_t count, int64_t room, int64_t *run) except -1:
    """Find the records of the first entries, as many as the room takes, but at least one: their position, their size, that of
    the last one, and their number. Return 0 for records apart, and for lost ones."""
    cdef int64_t position = get_int64(entries, at), total = 0, size = 0, last = 0
    cdef Py_ssize_t taken = 0
    if not 0 <= position < MAX_OFFSET:
        return 0
    while taken < count:
        size = get_uint32(entries, at + 8)
        if taken and total + size > room:
            break
        if not size or get_int64(entries, at) != position + total:
            return 0
        total += size
        last = size
        taken += 1
        at += INDEX_ENTRY_BYTES
    run[0], run[1], run[2], run[3] = position, total, last, taken
    return 1


def take_pulls(
    bytes data, Py_ssize_t at, Py_ssize_t max_header_bytes, dict checked, object admit, object segment_at, object read_at,
    object crc32, tuple sums, tuple shared, tuple limits,
):
    """Make the responses to up to `MAX_PULLS` pulls that lie from `at` on, one after the other, and repeat checked ones.

    `admit` returns what a checked pull may read now; None if it has to be checked. A pull with a filter is answered by Python,
    and is the last one, because it may take long. Returns where it stopped, the number of
    pulls, the responses in pieces and their size, and for each checked pull its messages, their bytes and the next offset; and
    the last records that were read, for the next call. Whatever a callback raises, Python meets again when it makes the pull."""
    cdef Span span, entries
    cdef Pull pull
    cdef Log log = Log()
    cdef Output key = Output(256), head = Output(320)
    cdef Queue queue = None, last
    cdef dict queues = {}
    cdef list responses = []
    cdef int64_t run[4]
    cdef int64_t offset, total = 0, max_bytes
    cdef Py_ssize_t end, count = 0
    cdef bytes last_key = None, found
    span.start, span.size = <const uint8_t *>PyBytes_AsString(data), len(data)
    log.segment_at, log.read_at, log.crc32, log.sums = segment_at, read_at, crc32, sums
    log.shared_at, log.shared_size, log.shared_data = shared
    log.begin, log.max_read, max_bytes, log.shared = limits
    while count < MAX_PULLS and total <= max_bytes:
        end = read_pull(&span, at, max_header_bytes, &pull)
        if not end or not 0 <= pull.value[OPAQUE] or pull.value[QUEUE_OFFSET] < 0:
            break
        offset = pull.value[QUEUE_OFFSET]
        key.size = 0
        put_key(&span, &pull, key)
        if last_key is None or len(last_key) != key.size or memcmp(PyBytes_AsString(last_key), key.start, key.size):
            last_key = PyBytes_FromStringAndSize(<const char *>key.start, key.size)
            queue = queues.get(last_key)
        try:
            if queue is None or not queue.is_admitted or offset < queue.first:
                if last_key not in checked:
                    break
                admitted = admit(checked[last_key], offset, pull.value[COMMIT_OFFSET])
                log.descriptor = None  # callbacks may close it
                if admitted is None:
                    break
                if queue is None:
                    queue = queues[last_key] = Queue()
                    queue.pull = checked[last_key]
                queue.read_entries, queue.answer, queue.begin, queue.next, queue.first, queue.room, queue.limit, queue.is_admitted = admitted
                if not queue.is_admitted:  # it committed an offset, on which others may depend
                    for last in queues.values():
                        last.is_admitted = False
            if not queue.begin <= offset < queue.next:
                break
            if queue.answer is not None:
                parts, run[0], run[3], run[1], run[2] = queue.answer(pull.kind, pull.value[OPAQUE], offset)
                responses += parts
                total += run[0]
                if run[3]:
                    queue.messages += run[3]
                    queue.put_bytes += run[1]
                    queue.next_offset = run[2]
                count += 1
                at = end
                break
            found = queue.entries
            if not queue.read(offset, min((span.size - end) // (end - at), <Py_ssize_t>(MAX_PULLS - 1 - count))):
                break
            if queue.entries is not found:
                log.descriptor = None
            entries.start, entries.size = <const uint8_t *>PyBytes_AsString(queue.entries), len(queue.entries)
            if not read_run(&entries, <Py_ssize_t>(offset - queue.entries_at) * INDEX_ENTRY_BYTES, queue.last_count, queue.room, run):
                break
            piece = log.read(run[0], run[1], run[2])
            if piece is None:
                break
        except Exception:
            break
        head.size = 0
        if not put_found_head(head, pull.kind, pull.value[OPAQUE], offset + run[3], queue.begin, queue.next, run[1]):
            break
        responses.append(PyBytes_FromStringAndSize(<const char *>head.start, head.size))
        responses.append(piece)
        total += head.size + run[1]
        queue.messages += run[3]
        queue.put_bytes += run[1]
        queue.next_offset = offset + run[3]
        count += 1
        at = end
    if not count:
        return None
    return (
        at, count, responses, total,
        [(last.pull, last.messages, last.put_bytes, last.next_offset) for last in queues.values() if last.messages],
        (log.shared_at, log.shared_size, log.shared_data),
    )


# ------------------------------------------------------------------------------
# Spark's reading: message records as buffers of Arrow's columns. protocol/message.py describes a record.


cdef enum:
    FIXED_BYTES = 91
    BODY_AT = 88  # in a record whose hosts are IPv4
    LONGER_BYTES = 12  # by which an IPv6 host is longer
    BORN_HOST_V6 = 0x10
    STORE_HOST_V6 = 0x20
    NAME_END = 1
    PAIR_END = 2
    MAX_NAMES = 64
    MAX_PAIRS = 64
    MAX_SLICE_BYTES = 1 << 30  # offsets in Arrow's buffers have 32 bits


cdef inline int put_offset(Output out, Py_ssize_t value) except -1:
    cdef int32_t number = <int32_t>value
    return out.put(&number, 4)


cdef inline int put_int64(Output out, int64_t value) except -1:
    return out.put(&value, 8)


cdef inline int put_bit(Output out, Py_ssize_t row, bint value) except -1:
    """Append the bit of a row to a validity bitmap."""
    if row & 7 == 0:
        out.room(1)[0] = 0
    if value:
        out.start[row >> 3] |= 1 << (row & 7)
    return 0


@cython.final
cdef class Texts:
    """The buffers of a column of texts; `at` holds the offset where each text ends."""

    cdef Output at, data

    def __cinit__(self):
        self.at, self.data = Output(4096), Output(4096)
        put_offset(self.at, 0)

    cdef inline int put(self, const void *text, Py_ssize_t size) except -1:
        self.data.put(text, size)
        return put_offset(self.at, self.data.size)


@cython.final
cdef class Column:
    """A property that is a column: its value in each record, which most records may lack."""

    cdef Span name
    cdef Texts texts
    cdef Output valid
    cdef Py_ssize_t count
    cdef bint is_set  # in the current record

    def __cinit__(self):
        self.texts, self.valid = Texts(), Output(512)


cdef int read_names(tuple names, Span *spans) except -1:
    """Point each span at a name; the tuple must outlive the spans."""
    cdef Py_ssize_t i
    for i in range(len(names)):
        spans[i].start = <const uint8_t *>PyBytes_AsString(names[i])
        spans[i].size = len(<bytes>names[i])
    return 0


def decode_slice(bytes data, object begin, object end, tuple names, tuple skipped):
    """Return the columns of the records whose queue offsets are from `begin` up to `end`, as buffers of Arrow.

    `names` are the properties that become columns. `skipped` are the properties left out of the pairs; None for no pairs.
    Declined: bytes that are not records, properties that are not UTF-8 or have a name twice or are very
    many."""
    try:
        return _decode_slice(data, begin, end, names, skipped)
    except OverflowError:
        return None


cdef object _decode_slice(bytes data, int64_t begin, int64_t end, tuple names, tuple skipped):
    cdef Span data_span, text_span
    cdef Span skipped_spans[MAX_NAMES]
    cdef Span name_spans[MAX_NAMES]
    cdef View view = &data_span
    cdef View text = &text_span
    cdef Py_ssize_t at = 0, size, limit, body_at, topic_at, text_at, hosts, body_size
    cdef Py_ssize_t rows = 0, pairs = 0, pairs_before, item_at, item_end, name_end, i, before
    cdef Py_ssize_t name_count = len(names), skipped_count = 0 if skipped is None else len(skipped)
    cdef bint with_pairs = skipped is not None, is_parsed = name_count > 0 or with_pairs, is_skipped
    cdef uint32_t flags
    cdef int64_t offset
    cdef int32_t attempts
    cdef Column column
    cdef list columns = []
    cdef const int32_t *ends
    if name_count > MAX_NAMES or skipped_count > MAX_NAMES or len(data) > MAX_SLICE_BYTES:
        return None
    data_span.start, data_span.size = <const uint8_t *>PyBytes_AsString(data), len(data)
    limit = data_span.size
    read_names(names, name_spans)
    if with_pairs:
        read_names(skipped, skipped_spans)
    for i in range(name_count):
        column = Column()
        column.name = name_spans[i]
        columns.append(column)
    cdef Output offsets = Output(8192), born = Output(8192), stored = Output(8192), tried = Output(4096), system = Output(4096)
    cdef Output body_ends = Output(4096), bodies = Output(limit)
    cdef Output pairs_valid = Output(512), pairs_at = Output(4096)
    cdef Texts keys = Texts(), values = Texts()
    put_offset(body_ends, 0)
    put_offset(pairs_at, 0)
    while at < limit:
        if limit - at < FIXED_BYTES:
            return None
        size = <int32_t>get_uint32(view, at)
        if get_uint32(view, at + 4) != <uint32_t>MAGIC or size < FIXED_BYTES or size > limit - at:
            return None
        flags = get_uint32(view, at + 36)
        hosts = (LONGER_BYTES if flags & BORN_HOST_V6 else 0) + (LONGER_BYTES if flags & STORE_HOST_V6 else 0)
        body_at = at + BODY_AT + hosts
        if body_at > at + size:
            return None
        body_size = <int32_t>get_uint32(view, body_at - 4)
        if body_size < 0 or body_size > at + size - body_at - 3:
            return None
        topic_at = body_at + body_size
        text_at = topic_at + byte(view, topic_at) + 3
        if text_at > at + size or text_at + (byte(view, text_at - 2) << 8 | byte(view, text_at - 1)) != at + size:
            return None
        offset = get_int64(view, at + 20)
        if not begin <= offset < end:
            at += size
            continue
        put_int64(offsets, offset)
        put_int64(born, get_int64(view, at + 40))
        put_int64(stored, get_int64(view, at + (68 if flags & BORN_HOST_V6 else 56)))
        attempts = <int32_t>get_uint32(view, at + 72 + hosts)
        tried.put(&attempts, 4)
        system.put(&flags, 4)
        bodies.put(part(view, body_at, body_size), body_size)
        put_offset(body_ends, bodies.size)
        at += size
        if not is_parsed:
            rows += 1
            continue
        text_span.start, text_span.size = part(view, text_at, at - text_at), at - text_at
        if not is_utf8(text, 0, text.size):
            return None
        for i in range(name_count):
            (<Column>columns[i]).is_set = False
        pairs_before = pairs
        item_at = 0
        while item_at < text.size:
            item_end = find(text, item_at, text.size, PAIR_END)
            name_end = find(text, item_at, item_end, NAME_END)
            if name_end > item_at and item_end > name_end + 1:
                for i in range(name_count):
                    column = <Column>columns[i]
                    if equal(text, item_at, name_end - item_at, &column.name):
                        if column.is_set:
                            return None
                        column.is_set = True
                        column.texts.data.put(part(text, name_end + 1, item_end - name_end - 1), item_end - name_end - 1)
                is_skipped = not with_pairs
                for i in range(skipped_count):
                    if equal(text, item_at, name_end - item_at, &skipped_spans[i]):
                        is_skipped = True
                        break
                if not is_skipped:
                    if pairs - pairs_before == MAX_PAIRS:
                        return None
                    ends = <const int32_t *>keys.at.start
                    for i in range(pairs_before, pairs):
                        before = ends[i]
                        if (
                            ends[i + 1] - before == name_end - item_at
                            and memcmp(keys.data.start + before, part(text, item_at, name_end - item_at), name_end - item_at) == 0
                        ):
                            return None
                    keys.put(part(text, item_at, name_end - item_at), name_end - item_at)
                    values.put(part(text, name_end + 1, item_end - name_end - 1), item_end - name_end - 1)
                    pairs += 1
            item_at = item_end + 1
        for i in range(name_count):
            column = <Column>columns[i]
            put_offset(column.texts.at, column.texts.data.size)
            put_bit(column.valid, rows, column.is_set)
            column.count += column.is_set
        put_offset(pairs_at, pairs)
        put_bit(pairs_valid, rows, pairs > pairs_before)
        rows += 1
    return (
        rows, offsets.written(), born.written(), stored.written(), tried.written(), system.written(),
        (body_ends.written(), bodies.written()),
        [
            (column.count, column.valid.written(), column.texts.at.written(), column.texts.data.written())
            for column in columns
        ],
        (
            pairs, pairs_valid.written(), pairs_at.written(), keys.at.written(), keys.data.written(), values.at.written(),
            values.data.written(),
        ),
    )
