"""How a command connects: options of TLS and accounts, and what is made of them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..client.access import Access


def add_client_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how to connect")
    group.add_argument("--tls", action="store_true", help="connect by TLS")
    group.add_argument(
        "--tls-ca", metavar="FILE", help="who signed the servers' certificates; default: the system's list"
    )
    group.add_argument("--tls-cert", metavar="FILE", help="the client's own certificate, if servers ask for one")
    group.add_argument("--tls-key", metavar="FILE", help="its key; default: in the same file")
    group.add_argument(
        "--access-key",
        default=os.environ.get("ROCKETLET_ACCESS_KEY", ""),
        help="sign as this account; default: $ROCKETLET_ACCESS_KEY; the secret is $ROCKETLET_SECRET_KEY",
    )
    group.add_argument(
        "--secret-key-file", type=Path, metavar="FILE", help="the secret, instead of $ROCKETLET_SECRET_KEY"
    )


def access_of(options: argparse.Namespace) -> Access:
    """Raises ConfigError, OSError."""
    secret = os.environ.get("ROCKETLET_SECRET_KEY", "")
    if options.secret_key_file:
        secret = options.secret_key_file.read_text().strip()
    return Access(
        access_key=options.access_key,
        secret_key=secret if options.access_key else "",
        tls=options.tls,
        ca_file=options.tls_ca,
        cert_file=options.tls_cert,
        key_file=options.tls_key,
    )
