"""Reads until when certificates are valid, which Python's `ssl` does not tell. It steps over the few fields of X.509's DER
before the validity (RFC 5280, 4.1)."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

from ...host.files import read_file
from ..config import MAX_TLS_FILE_BYTES

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17


def expires_s(path: Path) -> float | None:
    """When the first of a file's certificates to expire does, in seconds since the epoch; None if it has none that can be
    read. Raises OSError."""
    found: list[float] = []
    for pem in _PEM.findall(read_file(path, MAX_TLS_FILE_BYTES)):
        try:
            found.append(_not_after_s(ssl.PEM_cert_to_DER_cert(pem.decode())))
        except (ValueError, IndexError):  # OpenSSL says what it thinks of it where it is used
            continue
    return min(found, default=None)


def _not_after_s(der: bytes) -> float:
    """Raises ValueError or IndexError for bytes that are no certificate."""
    _, fields, _ = _element(der, 0)  # the certificate
    _, fields, _ = _element(fields, 0)  # the signed part
    at = 0
    if fields[0] == _VERSION:
        _, _, at = _element(fields, at)
    for _ in ("serial number", "algorithm", "issuer"):
        _, _, at = _element(fields, at)
    _, validity, _ = _element(fields, at)
    _, _, at = _element(validity, 0)
    kind, text, _ = _element(validity, at)
    form = "%y%m%d%H%M%SZ" if kind == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), form).replace(tzinfo=UTC).timestamp()


def _element(data: bytes, at: int) -> tuple[int, bytes, int]:
    """The tag and content at a place, and where the next element begins."""
    size, begin = data[at + 1], at + 2
    if size >= 0x80:
        octets = size & 0x7F
        size, begin = int.from_bytes(data[begin : begin + octets], "big"), begin + octets
    return data[at], data[begin : begin + size], begin + size
