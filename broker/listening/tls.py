"""How TLS is set up: its mode, certificates and keys, read again when they change."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import structlog

from ...host.files import check_file
from ..config import CERTIFICATE_WARNING_S, MAX_NAMED_CHARS, MAX_TLS_FILE_BYTES
from ..running.settings_files import Unsettled, Watched
from ..sessions.recent import Recent
from ..sessions.reports import Reports
from .expiry import expires_s
from .self_signed import with_certificate

log = structlog.get_logger("rocketlet.tls")

_DAY_S: Final = 86_400.0

TlsMode = Literal["permissive", "enforcing", "disabled"]
TLS_MODES: Final[tuple[TlsMode, ...]] = ("permissive", "enforcing", "disabled")


class TlsError(ValueError):
    """The files or the mode cannot be used. The text says what to do."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """`certificate`: PEM, the server's first, then those that lead to the authority; `key`: PEM, may stand in the same
    file; `client_authority`: PEM, with it every client must show a certificate that one of these signed."""

    certificate: Path
    key: Path | None = None
    client_authority: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.certificate, self.key, self.client_authority) if path)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Raises TlsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # each costs this side a private-key operation
    context.set_alpn_protocols(["h2"])  # for gRPC; a client that offers nothing speaks as it likes
    try:
        for path in files.paths:
            check_file(path, MAX_TLS_FILE_BYTES)
        context.load_cert_chain(files.certificate, files.key, _refuse_password)
        if files.client_authority:
            context.load_verify_locations(files.client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:  # SSLError has no text for a key that does not fit
        names = ", ".join(map(str, files.paths))
        raise TlsError(f"the TLS files {names} cannot be used: {error}") from None
    return context


def _context_of(pem: Path) -> ssl.SSLContext:
    return server_context(TlsFiles(pem))


def client_context(authority: Path, own: TlsFiles | None) -> ssl.SSLContext:
    """For a broker that registers: checks the name server's certificate, and shows the broker's own if asked for. Raises
    TlsError."""
    try:
        check_file(authority, MAX_TLS_FILE_BYTES)
        context = ssl.create_default_context(cafile=authority)
        if own:
            context.load_cert_chain(own.certificate, own.key, _refuse_password)
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"the TLS file {authority} cannot be used for name servers: {error}") from None
    return context


def _refuse_password() -> str:
    """OpenSSL would ask for it on the terminal, and the broker would stand."""
    raise TlsError("the TLS key is encrypted; decrypt it with `openssl pkey -in KEY -out PLAIN_KEY`")


def _expiries(paths: Iterable[Path]) -> dict[Path, float]:
    """When the files' certificates expire, in seconds since the epoch."""
    found: dict[Path, float] = {}
    for path in paths:
        with contextlib.suppress(OSError):  # its user says why it cannot be read
            if (at_s := expires_s(path)) is not None:
                found[path] = at_s
    return found


def _date(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))


class Tls:
    """The TLS settings that all connections of a server share: mode, certificate, and the faults already reported.

    Without files the mode must not be `enforcing`, and TLS is offered only if `signs_itself`: with a certificate that nobody
    can check. name_server_authority: PEM; with it the
    broker speaks TLS to its name servers, whose certificates one of these signed. Raises TlsError.
    """

    def __init__(
        self,
        mode: TlsMode = "permissive",
        files: TlsFiles | None = None,
        name_server_authority: Path | None = None,
        *,
        signs_itself: bool = False,
    ) -> None:
        if mode == "enforcing" and files is None:
            raise TlsError("TLS is enforced, but there is no certificate; give --tls-cert and --tls-key")
        if mode == "disabled" and files is not None:
            raise TlsError("a certificate is given, but TLS is disabled; leave out one of them")
        self.takes_plain = mode != "enforcing"
        self._signs_itself = signs_itself and mode != "disabled"
        self.handshakes = self.failed_handshakes = self.refused = 0
        self._files = files
        self._authority = name_server_authority
        paths = files.paths if files else ()
        self._watched = Watched((*paths, name_server_authority) if name_server_authority else paths)
        self.expires_s: dict[Path, float] = {}
        self._warned_s = -math.inf
        try:
            self.context, self.name_server_context = self._watched.take(self._contexts)
        except Unsettled:
            raise TlsError(f"{', '.join(map(str, paths))}: these TLS files are being written; start again") from None
        self.reports = Reports()
        self._turned_away = Recent(time.monotonic)
        self.turned_away = self._turned_away.texts

    @property
    def is_offered(self) -> bool:
        return self.context is not None or self._signs_itself

    async def ready(self) -> ssl.SSLContext:
        """The certificate's, which is made now if there is none yet."""
        if self.context is None:
            made = await asyncio.to_thread(with_certificate, _context_of)
            if self.context is None:
                self.context = made
                log.info("certificate_self_signed", hint="clients that check certificates need --tls-cert")
        return self.context

    def look(self) -> bool:
        """Whether the files are to be loaded: they have changed, and nobody writes them any more."""
        return self._watched.look()

    def load(self) -> None:
        """Takes the files anew if they have changed; connections that are open keep what they have. Files that do not
        fit together, such as a certificate whose key is not written yet, are reported, and the former stay."""
        if not self._watched.has_changed:
            return
        try:
            self.context, self.name_server_context = self._watched.take(self._contexts)
        except Unsettled:  # a later look finds them settled
            pass
        except TlsError as error:
            log.error("certificate_not_reloaded", reason=str(error))
        else:
            log.info("certificate_reloaded")

    def _contexts(self) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
        files, authority = self._files, self._authority
        self.expires_s = _expiries([*(files.paths if files else ()), *([authority] if authority else ())])
        self._warned_s = -math.inf
        return server_context(files) if files else None, client_context(authority, files) if authority else None

    def warn_of_expiry(self, now_s: float) -> None:
        """Each day of the last 14 of a certificate, and each day after. `now_s`: since the epoch."""
        if now_s - self._warned_s < _DAY_S:
            return
        self._warned_s = now_s
        for path, until_s in self.expires_s.items():
            if until_s <= now_s:
                log.error("certificate_expired", file=str(path), expired=_date(until_s), hint="clients refuse it")
            elif until_s - now_s < CERTIFICATE_WARNING_S:
                hint = "put a new one in its place; the broker reads it by itself"
                log.warning("certificate_expires", file=str(path), expires=_date(until_s), hint=hint)

    def note_turned_away(self, peer: str, reason: str) -> None:
        address = peer.rpartition(":")[0]
        self._turned_away.note((address, reason), f"{address}: {reason[:MAX_NAMED_CHARS]}")

    def failed(self, peer: str, reason: str) -> None:
        """A client's TLS did not come about, or was ended."""
        self.failed_handshakes += 1
        expired = [f"{path} expired on {_date(at_s)}" for path, at_s in self.expires_s.items() if at_s <= time.time()]
        reason = "; ".join([reason, *expired])
        self.note_turned_away(peer, reason)
        if self.reports.is_due(peer, reason):
            log.warning("tls_handshake_failed", peer=peer, reason=reason)
