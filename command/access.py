"""The options of TLS and accounts, and what is made of them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..broker.access.accounts import AclError
from ..broker.access.acl import Acl
from ..broker.access.file import AclFile
from ..broker.net.tls import TLS_MODES, Tls, TlsError, TlsFiles
from ..client.access import Access


def add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who may connect and do what")
    group.add_argument(
        "--tls",
        choices=TLS_MODES,
        default="permissive",
        help="permissive: TLS and plain text on the same port, TLS only if there is a certificate (default); "
        "enforcing: TLS only; disabled: plain text only",
    )
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="the certificate, PEM; reloaded when it changes")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM; default: in the same file")
    group.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="TLS clients must show a certificate that one of these signed"
    )

    group.add_argument(
        "--acl", type=Path, metavar="FILE", help="accounts, as Apache's plain_acl.yml; reloaded when it changes"
    )


def add_registration_options(parser: argparse.ArgumentParser) -> None:
    """Of a broker with name servers in other processes."""
    parser.add_argument(
        "--nameserver-tls",
        type=Path,
        metavar="CA_FILE",
        help="register over TLS; who signed the name servers' certificates",
    )
    parser.add_argument(
        "--nameserver-account", metavar="ACCESS_KEY", help="sign the registration as this account of the --acl file"
    )


def tls_of(options: argparse.Namespace) -> Tls:
    """Raises TlsError."""
    if options.tls_cert is None and (options.tls_key or options.tls_ca):
        raise TlsError("--tls-key or --tls-ca is given, --tls-cert is not")
    files = TlsFiles(options.tls_cert, options.tls_key, options.tls_ca) if options.tls_cert else None
    return Tls(options.tls, files, getattr(options, "nameserver_tls", None))


def acl_of(options: argparse.Namespace) -> Acl | None:
    """Raises AclError."""
    account = getattr(options, "nameserver_account", None)
    if account and not options.acl:
        raise AclError("--nameserver-account is given, --acl is not, whose accounts it is of")
    try:
        return Acl(AclFile(options.acl)) if options.acl else None
    except ImportError:
        raise AclError("--acl needs PyYAML; install it with: pip install 'rocketlet[acl]'") from None


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
