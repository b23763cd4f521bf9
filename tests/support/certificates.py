"""Certificates for the tests, made by trustme: an authority, the server's, a client's."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme
from rocketlet.broker.tls import TlsFiles


@dataclass
class Certificates:
    folder: Path
    authority: trustme.CA

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        made = cls(folder, trustme.CA())
        made.authority.cert_pem.write_to_path(folder / "ca.pem")
        made.write_server()
        client = made.authority.issue_cert("client.example")
        client.private_key_and_cert_chain_pem.write_to_path(folder / "client.pem")
        return made

    def write_server(self, host: str = "127.0.0.1") -> int:
        """A fresh certificate in the same files; its serial number."""
        issued = self.authority.issue_cert(host)
        issued.private_key_pem.write_to_path(self.folder / "server.key")
        issued.cert_chain_pems[0].write_to_path(self.folder / "server.pem")
        return serial(issued.cert_chain_pems[0].bytes())

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(self.folder / "server.pem", self.folder / "server.key")

    @property
    def mutual(self) -> TlsFiles:
        return TlsFiles(self.folder / "server.pem", self.folder / "server.key", self.folder / "ca.pem")

    def client_context(self, *, shows: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.folder / "ca.pem")
        if shows:
            context.load_cert_chain(self.folder / "client.pem")
        return context


def serial(pem: bytes) -> int:
    from cryptography import x509

    return x509.load_pem_x509_certificate(pem).serial_number
