"""A certificate of the broker's own, where none is given: official clients of 5.x in Java, Go, C# and C++ begin with TLS, and
check no certificate. It is made when the first of them comes, in memory, and nobody can know the broker by it.
"""

from __future__ import annotations

import datetime
import importlib.util
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..config import SELF_SIGNED_DAYS

T = TypeVar("T")


def can_sign() -> bool:
    """Whether the extra is there that makes certificates."""
    return importlib.util.find_spec("cryptography") is not None


def with_certificate(use: Callable[[Path], T]) -> T:
    """Calls `use` with a PEM file that has a fresh key and its certificate. OpenSSL reads files only; this one is deleted
    afterwards. Takes some 50 ms, most of them for imports."""
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        file.write(_pem())
        file.flush()
        return use(Path(file.name))


def _pem() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    addresses = [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=SELF_SIGNED_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), *addresses]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + certificate.public_bytes(pem)
