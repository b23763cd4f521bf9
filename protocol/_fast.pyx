# cython: language_level=3, wraparound=False, cdivision=True
"""The compiled module: bytes in, bytes out. No socket, disk, clock or policy, and no state between calls.

`protocol/fast.py` decides whether this module is used. A function may decline any arguments: it returns None, and the caller
does the work in Python. What a function does not decline, it does exactly as Python does; tests/protocol/test_fast.py
compares both.

Bytes of a peer are read by `byte` and `part` alone, which check bounds. `Output` alone writes, and checks its bounds, too.
"""

cimport cython
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy

INTERFACE = 2

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


cdef uint32_t crc_tables[8][256]  # zlib's CRC-32, eight bytes at a time


cdef void fill_crc_tables() noexcept:
    cdef uint32_t value
    cdef int i, j
    for i in range(256):
        value = i
        for j in range(8):
            value = 0xEDB88320U ^ value >> 1 if value & 1 else value >> 1
        crc_tables[0][i] = value
    for j in range(1, 8):
        for i in range(256):
            crc_tables[j][i] = crc_tables[j - 1][i] >> 8 ^ crc_tables[0][crc_tables[j - 1][i] & 255]


fill_crc_tables()


cdef uint32_t crc32(const uint8_t *start, Py_ssize_t size, uint32_t before) noexcept nogil:
    """Return the CRC-32 of bytes that follow others, as zlib does. The bytes are ours: they lie in an `Output`."""
    cdef uint32_t value = ~before
    while size >= 8:
        value ^= start[0] | <uint32_t>start[1] << 8 | <uint32_t>start[2] << 16 | <uint32_t>start[3] << 24
        value = (
            crc_tables[7][value & 255] ^ crc_tables[6][value >> 8 & 255] ^ crc_tables[5][value >> 16 & 255]
            ^ crc_tables[4][value >> 24] ^ crc_tables[3][start[4]] ^ crc_tables[2][start[5]]
            ^ crc_tables[1][start[6]] ^ crc_tables[0][start[7]]
        )
        start += 8
        size -= 8
    while size:
        value = value >> 8 ^ crc_tables[0][(value ^ start[0]) & 255]
        start += 1
        size -= 1
    return ~value


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
        checksum = crc32(out.start + head_at, out.size - head_at, 0)
        out.put(PyBytes_AsString(bodies[i]), body_size)
        tail_at = out.size
        out.put(PyBytes_AsString(topic), topic_size)
        put_uint16(out.room(2), <uint32_t>(text_size + CHECKSUM_BYTES))
        out.put(PyBytes_AsString(texts[i]), text_size)
        checksum = crc32(out.start + tail_at, out.size - tail_at, checksum)
        to = out.room(CHECKSUM_BYTES)
        to[0], to[1] = 2, 3
        for j in range(8):
            to[2 + j] = HEX[checksum >> (28 - 4 * j) & 15]
    return bytes(out.written()), positions, sizes


# ------------------------------------------------------------------------------
# Spark's reading: message records as buffers of Arrow's columns. protocol/message.py describes a record.


cdef extern from "Python.h":
    object PyUnicode_DecodeUTF8(const char *start, Py_ssize_t size, const char *errors)


cdef enum:
    FIXED_BYTES = 91
    BODY_AT = 88  # in a record whose hosts are IPv4
    LONGER_BYTES = 12  # by which an IPv6 host is longer
    COMPRESSED = 0x1
    BORN_HOST_V6 = 0x10
    STORE_HOST_V6 = 0x20
    NAME_END = 1
    PAIR_END = 2
    MAX_NAMES = 64
    MAX_PAIRS = 64
    MAX_SLICE_BYTES = 1 << 30  # offsets in Arrow's buffers have 32 bits


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
    Declined: bytes that are not records, compressed bodies, properties that are not UTF-8 or have a name twice or are very
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
    cdef Output offsets = Output(8192), born = Output(8192), stored = Output(8192), tried = Output(4096)
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
        if flags & COMPRESSED or body_at > at + size:
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
        rows, offsets.written(), born.written(), stored.written(), tried.written(),
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
