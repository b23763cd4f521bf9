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

INTERFACE = 1

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
