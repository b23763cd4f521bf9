"""Header blocks, against the `hpack` library."""

from __future__ import annotations

import hpack
import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol.config import HPACK_TABLE_BYTES, MAX_HEADER_LIST_BYTES
from rocketlet.protocol.hpack import ENTRY_BYTES, Decoder, HeadersTooLarge, HpackError, encode, huffman_decoded

NAMES = st.sampled_from([b":path", b":method", b":authority", b"te", b"x-mq-client-id", b"x-mq-request-id", b"cookie"])
VALUES = st.binary(max_size=200) | st.sampled_from([b"", b"POST", b"/", b"trailers", b"x" * 3000])
FIELDS = st.lists(st.tuples(NAMES | st.binary(min_size=1, max_size=20), VALUES), max_size=12)
MALFORMED = (HpackError, HeadersTooLarge)


def _blocks(encoder: hpack.Encoder, lists: list[list[tuple[bytes, bytes]]], huffman: bool) -> list[bytes]:
    return [encoder.encode(fields, huffman=huffman) for fields in lists]


@given(st.lists(FIELDS, max_size=6), st.booleans())
def test_blocks_of_the_library_are_decoded(lists: list[list[tuple[bytes, bytes]]], huffman: bool) -> None:
    lists = [fields for fields in lists if sum(len(n) + len(v) + 32 for n, v in fields) <= MAX_HEADER_LIST_BYTES]
    decoder = Decoder()
    for fields, block in zip(lists, _blocks(hpack.Encoder(), lists, huffman), strict=True):
        assert decoder.decode(block) == fields


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
def test_no_block_does_anything_but_what_the_library_makes_of_it(blocks: list[bytes]) -> None:
    """The library's integers have no limit, and so a number that it takes may be too large for us; it then names an entry
    that is not there, or a length beyond the block."""
    ours, theirs = Decoder(), hpack.Decoder()
    theirs.max_header_list_size = MAX_HEADER_LIST_BYTES
    theirs.max_allowed_table_size = HPACK_TABLE_BYTES
    for block in blocks:
        try:
            expected = [(bytes(name), bytes(value)) for name, value in theirs.decode(block, raw=True)]
        except hpack.HPACKError:
            with pytest.raises(MALFORMED):
                ours.decode(block)
            return
        assert ours.decode(block) == expected


@given(st.binary(max_size=300))
def test_huffman_codes_of_the_library_are_decoded(text: bytes) -> None:
    encoder = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)
    assert huffman_decoded(encoder.encode(text)) == text


@given(FIELDS)
def test_the_library_decodes_what_is_encoded(fields: list[tuple[bytes, bytes]]) -> None:
    found = [(bytes(name), bytes(value)) for name, value in hpack.Decoder(2**20).decode(encode(*fields), raw=True)]
    assert found == fields


@pytest.mark.parametrize("size", [MAX_HEADER_LIST_BYTES - ENTRY_BYTES - 1, MAX_HEADER_LIST_BYTES - ENTRY_BYTES])
def test_a_list_of_the_largest_size_is_decoded(size: int) -> None:
    block = encode((b"a", b"x" * (size - 1)))
    assert Decoder().decode(block) == [(b"a", b"x" * (size - 1))]


def test_a_longer_list_is_refused_though_its_block_is_short() -> None:
    """An entry of 4 KB that is named again and again: a block of few bytes with very many fields."""
    decoder = Decoder()
    encoder = hpack.Encoder()
    large = (b"x", b"y" * (HPACK_TABLE_BYTES - ENTRY_BYTES - 1))
    decoder.decode(encoder.encode([large]))
    assert decoder.decode(b"\xbe" * 4) == [large] * 4
    with pytest.raises(HeadersTooLarge, match="longer than 16384 bytes"):
        decoder.decode(b"\xbe" * 5)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (b"\x80", "entry 0"),
        (b"\xbe", "entry 62"),
        (b"\x7f\x00", "entry 63"),
        (b"\x00\x01a", "cut off"),
        (b"\x00\x05ab", "cut off"),
        (b"\xff\xff\xff\xff\xff\x0f", "too large"),
        (b"\x82\x20", "within a header block"),
        (b"\x3f\xe2\x1f", "maximum 4096"),
        (b"\x00\x01a\x84\xff\xff\xff\xff", "end symbol"),
        (b"\x00\x01a\x81\xfe", "cut off"),
        (b"\x00\x01a\x82\x1f\xff", "cut off"),
    ],
)
def test_a_malformed_block_is_refused_with_a_reason(block: bytes, reason: str) -> None:
    with pytest.raises(HpackError, match=reason):
        Decoder().decode(block)


def test_a_table_of_the_largest_size_may_be_asked_for_again() -> None:
    assert Decoder().decode(b"\x20\x3f\xe1\x1f\x82") == [(b":method", b"GET")]
