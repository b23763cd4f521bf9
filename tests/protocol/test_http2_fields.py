"""Which header fields a request may have. Fields are checked once only, so everything is tried twice."""

from __future__ import annotations

import pytest
from rocketlet.protocol.hpack import Field
from rocketlet.protocol.http2 import MalformedRequest, check_trailers, content_length, request_fields

PSEUDO: list[Field] = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/")]


def test_fields_are_found_by_name_and_repeated_ones_are_joined() -> None:
    for _ in range(2):
        found = request_fields([*PSEUDO, (b":authority", b"a"), (b"te", b"trailers"), (b"a", b"1"), (b"a", b"2")])
        assert found[b"a"] == b"1, 2"
        assert request_fields([*PSEUDO, (b"a", b"1")])[b"a"] == b"1"


@pytest.mark.parametrize(
    "fields",
    [
        PSEUDO[1:],
        [*PSEUDO, (b":path", b"/")],
        [(b"a", b"1"), *PSEUDO],
        [*PSEUDO, (b":status", b"200")],
        [*PSEUDO, (b":other", b"1")],
        [*PSEUDO, (b"A", b"1")],
        [*PSEUDO, (b"", b"1")],
        [*PSEUDO, (b"connection", b"close")],
        [*PSEUDO, (b"transfer-encoding", b"chunked")],
        [*PSEUDO, (b"te", b"gzip")],
        [*PSEUDO, (b"x-mq-client-id", b"a"), (b"x-mq-client-id", b"b")],
        [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"")],
    ],
)
def test_malformed_requests(fields: list[Field]) -> None:
    request_fields([*PSEUDO, (b"te", b"trailers")])  # the same names, all well
    for _ in range(2):
        with pytest.raises(MalformedRequest):
            request_fields(fields)


@pytest.mark.parametrize("field", [(b":path", b"/"), (b"A", b"1"), (b"te", b"gzip")])
def test_malformed_trailers(field: Field) -> None:
    check_trailers([(b"grpc-status", b"0")])
    with pytest.raises(MalformedRequest):
        check_trailers([field])


def test_a_length_is_a_number() -> None:
    assert content_length({}) == -1
    assert content_length({b"content-length": b"12"}) == 12
    for text in (b"", b"-1", b"1.5", b"9" * 16):
        with pytest.raises(MalformedRequest):
            content_length({b"content-length": text})
