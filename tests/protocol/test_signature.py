"""Signatures as Apache's clients make them."""

from __future__ import annotations

import base64
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, ExtValue, Frame, FrameReader, encode
from rocketlet.protocol.headers import ACCESS_KEY, SIGNATURE, UNIQUE_KEY_QUERY, Signer

names = st.text("abcXYZ_", min_size=1, max_size=5)
values = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers(-(2**63), 2**63 - 1), st.booleans())
fields = st.dictionaries(names, values, max_size=8)


def test_the_signature_is_apaches() -> None:
    """Values in the order of their names, then the body; HMAC-SHA1; Base64."""
    ext: dict[str, ExtValue] = {"topic": "t", "AccessKey": "service-1", "queueId": 3, "batch": False, "größe": "ß"}
    content = "service-1" + "false" + "ß" + "3" + "t"
    expected = base64.b64encode(hmac.digest(b"a-long-secret", content.encode() + b"body", "sha1")).decode()
    assert Signer("a-long-secret").signature({**ext, SIGNATURE: "former"}, b"body") == expected


@given(fields, st.binary(), st.sampled_from([JSON, ROCKETMQ, MSGPACK]))
def test_a_signed_frame_is_recognized_in_every_encoding(
    ext: dict[str, ExtValue], body: bytes, serialize_type: int
) -> None:
    signer = Signer("a-long-secret")
    ext = {**ext, ACCESS_KEY: "service-1"}
    sent = Frame(10, 1, {**ext, SIGNATURE: signer.signature(ext, body)}, body, serialize_type=serialize_type)
    (read,) = FrameReader().feed(encode(sent))
    assert signer.has_signed(read.ext, read.body)
    assert not Signer("another-secret").has_signed(read.ext, read.body)
    assert not signer.has_signed(read.ext, read.body + b"x")
    assert not signer.has_signed({**read.ext, "zzz": "x"}, read.body)


def test_the_field_that_only_apaches_client_signs_may_count_or_not() -> None:
    signer = Signer("a-long-secret")
    ext: dict[str, ExtValue] = {"topic": "t", ACCESS_KEY: "service-1", UNIQUE_KEY_QUERY: "true"}
    for without in ("", UNIQUE_KEY_QUERY):
        assert signer.has_signed({**ext, SIGNATURE: signer.signature(ext, b"", without)}, b"")


@pytest.mark.parametrize("shown", [None, 5, True, "", "größe", "x" * 28, "x" * 100_000, b"bytes", ["list"]])
def test_what_is_no_signature_is_none(shown: object) -> None:
    ext: dict[str, object] = {"topic": "t", SIGNATURE: shown}
    assert not Signer("a-long-secret").has_signed(ext, b"")  # type: ignore[arg-type]
