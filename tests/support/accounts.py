"""Accounts for the tests: their file, and a wire that signs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml
from rocketlet.broker.access import Acl, AclFile
from rocketlet.broker.tls import Tls
from rocketlet.client import Access
from rocketlet.protocol.codes import Language, RequestCode
from rocketlet.protocol.frame import JSON, MSGPACK
from rocketlet.protocol.headers import Signer

from ..conftest import Node, Wire
from .certificates import Certificates

Wired = Callable[[str], Awaitable["SignedWire"]]
SEND: dict[str, Any] = {
    "a": "p", "b": "orders", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "i": "", "j": 0, "k": "false",
    "m": "false",
}  # fmt: skip
ADMIN = "admin-key"
KEYS = (ADMIN, "orders-key", "readers-key", "nobody-key", "trusted-key")
SECRETS = {name: f"secret-of-{name}" for name in (*KEYS, "curious-key")}


def account(access_key: str, **fields: Any) -> dict[str, Any]:
    return {"accessKey": access_key, "secretKey": SECRETS[access_key], **fields}


ACCOUNTS = [
    account(ADMIN, admin=True),
    account("orders-key", topicPerms=["orders=PUB"], defaultGroupPerm="DENY"),
    account("readers-key", topicPerms=["orders=SUB", "secret=DENY"], groupPerms=["shipping=SUB"]),
    account("nobody-key"),
    account("trusted-key", whiteRemoteAddress="127.0.0.*"),
]


def access(access_key: str, **settings: Any) -> Access:
    return Access(access_key=access_key, secret_key=SECRETS[access_key], **settings)


def reload(settings: Acl | AclFile | Tls) -> None:
    """Two looks, as the server's, by which a file that nobody writes any more is taken."""
    settings.poll()
    if settings.poll():
        settings.load()


class AccountsFile:
    """plain_acl.yml, whose every write is seen immediately."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(ACCOUNTS)
        self.acl = Acl(AclFile(path))

    def write(self, accounts: list[dict[str, Any]], white: tuple[str, ...] = ()) -> None:
        self.path.write_text(yaml.safe_dump({"accounts": accounts, "globalWhiteRemoteAddresses": list(white)}))
        self.path.chmod(0o600)

    def rewrite(self, accounts: list[dict[str, Any]], white: tuple[str, ...] = ()) -> None:
        self.write(accounts, white)
        reload(self.acl)


class SignedWire(Wire):
    """Signs each request as an account; without one it is a Wire."""

    access_key = ""
    secret = ""

    def send(
        self,
        code: int,
        ext: dict[str, Any] | None = None,
        body: bytes = b"",
        *,
        flag: int = 0,
        serialize_type: int = JSON,
        language: int = Language.JAVA,
    ) -> int:
        fields = dict(ext or {})
        if self.access_key:
            fields["AccessKey"] = self.access_key
            fields.setdefault("Signature", Signer(self.secret).signature(fields, body))
        return super().send(code, fields, body, flag=flag, serialize_type=serialize_type, language=language)


async def signed_wire(address: str, access_key: str) -> SignedWire:
    host, _, port = address.rpartition(":")
    wire = SignedWire(*await asyncio.open_connection(host, int(port)))
    if access_key:
        keys = access(access_key)
        wire.access_key, wire.secret = keys.access_key, keys.secret_key
    return wire


async def tls_wire(node: Node, certificates: Certificates, access_key: str, **versions: Any) -> SignedWire:
    context = certificates.client_context()
    for name, version in versions.items():
        setattr(context, name, version)
    host, _, port = node.address.rpartition(":")
    wire = SignedWire(*await asyncio.open_connection(host, int(port), ssl=context))
    wire.access_key, wire.secret = access_key, SECRETS[access_key]
    return wire


def channel_of(wire: SignedWire) -> str:
    binding = wire._writer.get_extra_info("ssl_object").get_channel_binding("tls-unique")
    return str(binding.hex())


async def identified(wire: SignedWire) -> int:
    return (await wire.call(RequestCode.IDENTIFY, {"channel": channel_of(wire)}, serialize_type=MSGPACK)).code
