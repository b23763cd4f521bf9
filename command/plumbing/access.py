"""The options for TLS and accounts, and the `Access` that they describe."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ...client.errors import ConfigError
from ...client.wire.connection import Access

_NAMES = ("tls", "tls_ca", "tls_cert", "tls_key", "access_key", "secret_key_file")


def add_client_options(parser: argparse.ArgumentParser, side: str = "") -> None:
    """Add the options for TLS and accounts. `side` is a prefix of their names for commands with two clusters, such as
    `from-`."""
    group = parser.add_argument_group(f"how to connect {side.rstrip('-')}".strip())
    group.add_argument(f"--{side}tls", action="store_true", help="connect with TLS")
    group.add_argument(
        f"--{side}tls-ca",
        metavar="FILE",
        help="certificates of the authorities that sign the servers' certificates; default: the system's",
    )
    group.add_argument(
        f"--{side}tls-cert", metavar="FILE", help="the client's certificate, for servers that require one"
    )
    group.add_argument(f"--{side}tls-key", metavar="FILE", help="its key; default: in the same file")
    group.add_argument(
        f"--{side}access-key",
        default=os.environ.get(_variable(side, "ACCESS_KEY"), ""),
        help=f"sign as this account; default: ${_variable(side, 'ACCESS_KEY')}; "
        f"the secret is ${_variable(side, 'SECRET_KEY')}",
    )
    group.add_argument(
        f"--{side}secret-key-file",
        type=Path,
        metavar="FILE",
        help=f"the secret, instead of ${_variable(side, 'SECRET_KEY')}",
    )


def access_of(options: argparse.Namespace, side: str = "") -> Access:
    """Return the `Access` that options and environment describe. Raises ConfigError."""
    given = {name: getattr(options, f"{side}{name}".replace("-", "_")) for name in _NAMES}
    secret = os.environ.get(_variable(side, "SECRET_KEY"), "")
    if given["secret_key_file"]:
        try:
            secret = given["secret_key_file"].read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            text = f"--{side}secret-key-file: {given['secret_key_file']} cannot be read: {reason}"
            raise ConfigError(text) from None
    if given["access_key"] and not secret:
        where = f"${_variable(side, 'SECRET_KEY')} or --{side}secret-key-file"
        raise ConfigError(f"--{side}access-key is given, its secret is not: use {where}")
    if not given["tls"] and (given["tls_ca"] or given["tls_cert"] or given["tls_key"]):
        raise ConfigError(f"certificates are given, but no --{side}tls; add it")
    return Access(
        access_key=given["access_key"],
        secret_key=secret if given["access_key"] else "",
        tls=given["tls"],
        ca_file=given["tls_ca"],
        cert_file=given["tls_cert"],
        key_file=given["tls_key"],
    )


def _variable(side: str, name: str) -> str:
    return f"ROCKETLET_{side.replace('-', '_').upper()}{name}"
