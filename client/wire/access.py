"""Opens a client's sockets and proves its account: TLS, Apache's ACL, the encoding of headers."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

from ...host.files import check_file
from ...protocol.frame import JSON, ROCKETMQ, Ext
from ...protocol.signature import ACCESS_KEY, SECURITY_TOKEN, SIGNATURE, Signer
from ..config import MAX_TLS_FILE_BYTES
from ..errors import ConfigError

Encoding = Literal["auto", "json", "rocketmq"]
ENCODINGS: Final[Mapping[str, int]] = {"auto": JSON, "json": JSON, "rocketmq": ROCKETMQ}


@dataclass(frozen=True)
class Access:
    """A client's account, and its settings of TLS. The same value serves Producer, Consumer and AdminClient.

    - `access_key`, `secret_key`, `security_token`: sign every request with them (as AclClientRPCHook of Apache's client).
    - `tls`: encrypt connections.
    - `ca_file`: the certificate authorities to trust, a PEM file. Default: the system's.
    - `verify_tls`: False accepts any certificate.
    - `cert_file`, `key_file`: this client's own certificate, for servers that ask for one.
    - `encoding`: of headers. `auto` is JSON, and MessagePack with Rocketlet's brokers.

    Raises ConfigError for values that contradict each other, and for files that cannot be read.
    """

    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    security_token: str = field(default="", repr=False)
    tls: bool = False
    ca_file: str | None = None
    verify_tls: bool = True
    cert_file: str | None = None
    key_file: str | None = None
    encoding: Encoding = "auto"

    def __post_init__(self) -> None:
        if bool(self.access_key) != bool(self.secret_key):
            raise ConfigError("access_key and secret_key are given together, or neither is: one of them is missing")
        if self.encoding not in ENCODINGS:
            raise ConfigError(f"encoding is {self.encoding!r}; allowed: {', '.join(ENCODINGS)}")
        if not self.tls and (self.ca_file or self.cert_file or self.key_file):
            raise ConfigError("certificates are given, but tls is off; set tls as well")
        if self.key_file and not self.cert_file:
            raise ConfigError("key_file is given, cert_file is not")

    def __getstate__(self) -> dict[str, object]:
        """Leaves out the parts that belong to this process."""
        return {name: value for name, value in self.__dict__.items() if name not in ("ssl_context", "_signer")}

    @property
    def signs(self) -> bool:
        return bool(self.access_key)

    @cached_property
    def ssl_context(self) -> ssl.SSLContext | None:
        """The settings of TLS; None without TLS. Raises ConfigError."""
        if not self.tls:
            return None
        for name in ("ca_file", "cert_file", "key_file"):
            path = getattr(self, name)
            if path and not os.access(path, os.R_OK):
                raise ConfigError(f"the TLS files cannot be used: {name} {path} is not there, or may not be read")
        try:
            for path in filter(None, (self.ca_file, self.cert_file, self.key_file)):
                check_file(path, MAX_TLS_FILE_BYTES)
            context = ssl.create_default_context(cafile=self.ca_file)
            if not self.verify_tls:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file, _refuse_password)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the TLS files cannot be used: {error}") from None
        return context

    @cached_property
    def _signer(self) -> Signer:
        return Signer(self.secret_key)

    def signed(self, ext: Ext, body: bytes) -> Ext:
        """The header fields with the access key and the signature over them and the body."""
        fields = {**ext, ACCESS_KEY: self.access_key}
        if self.security_token:
            fields[SECURITY_TOKEN] = self.security_token
        fields[SIGNATURE] = self._signer.signature(fields, body)
        return fields


def _refuse_password() -> str:
    """OpenSSL would ask for it on the terminal, and the program would stand."""
    raise ConfigError("the TLS key is encrypted; decrypt it with `openssl pkey -in KEY -out PLAIN_KEY`")
