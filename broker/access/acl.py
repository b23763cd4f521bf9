"""If the broker or name server has accounts, every request is judged here before it is staged or handled.

In Apache's order (PlainPermissionManager.validate): a global white address passes; the account must be known; from the
account's white address it passes; the signature must be its own; then the rule that stands beside the handler.

The address of a connection cannot change, so it is checked once. The signature is computed for every request, because
it also protects the request's content, and because a frame may come from anybody on a connection without TLS. With TLS a
Rocketlet client proves once who it is (IDENTIFY): it signs what only the two ends of this connection know, so that nobody
can use the proof elsewhere. Its other requests need no signature then.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable
from typing import Final

import structlog

from ...protocol import names
from ...protocol.codes import EXT_CHANNEL, ResponseCode, request_name
from ...protocol.frame import Frame
from ...protocol.signature import ACCESS_KEY, SIGNATURE
from ..remoting.answers import Refused
from ..remoting.connection import Connection
from ..sessions.reports import Reports
from .accounts import Account, AclError, Permission, Policy
from .file import AclFile
from .rules import Need, Records, Rule

log = structlog.get_logger("rocketlet.acl")

_TRACE: Final = Need(names.TRACE_TOPIC, Permission.PUB)  # everybody may trace, as with Apache
_REMARK_CHARS: Final = 100


class Known:
    """What is known of a connection under one version of the policy."""

    __slots__ = ("access_key", "host", "identified", "is_white", "policy", "signing", "trusted")

    def __init__(self, policy: Policy, peer: str) -> None:
        self.identified: Account | None = None
        self.access_key = ""  # of the account that asked last
        self.signing: Account | None = None  # it, if it has to sign here
        self.policy = policy
        self.host = peer.rpartition(":")[0]
        self.is_white = policy.is_white(self.host)
        self.trusted: dict[str, bool] = {}  # per access key, whether the account's white address is this one

    def trusts(self, account: Account) -> bool:
        found = self.trusted.get(account.access_key)
        if found is None:
            found = self.trusted[account.access_key] = account.white.matches(self.host)
        return found

    def renewed(self, policy: Policy) -> Known:
        """Under another version; an account that has another secret must prove itself again."""
        known = Known(policy, f"{self.host}:0")
        known.access_key = self.access_key
        account = policy.accounts.get(self.identified.access_key) if self.identified else None
        if account is not None and self.identified is not None and account.signer == self.identified.signer:
            known.identified = account
        return known


class Acl:
    """`refused`: how many requests, by reason."""

    def __init__(self, file: AclFile) -> None:
        self.file = file
        self.refused: Counter[str] = Counter()
        self._reports = Reports()

    def look(self) -> bool:
        """Whether the file is to be loaded."""
        return self.file.look()

    def load(self) -> None:
        """Reads the file again if it has changed."""
        self.file.load()

    def signing(self, access_key: str) -> Callable[[Frame], Frame]:
        """Signs frames as one of the accounts, whose secret may change. Raises AclError."""
        if access_key not in self.file.policy.accounts:
            raise AclError(f"there is no account {access_key} in {self.file.path}")

        def signed(frame: Frame) -> Frame:
            account = self.file.policy.accounts.get(access_key)
            if account is None:  # it is gone from the file since: the name server refuses, with a reason
                return frame
            ext = {**frame.ext, ACCESS_KEY: access_key}
            return frame._replace(ext={**ext, SIGNATURE: account.signer.signature(ext, frame.body)})

        return signed

    def authorize(self, connection: Connection, frame: Frame, rule: Rule, records: Records | None) -> None:
        """Raises Refused, and what a handler raises for a request that it cannot read. `records`: the broker's, if there
        is one."""
        policy = self.file.policy
        known = connection.known
        if not isinstance(known, Known):
            known = connection.known = Known(policy, connection.peer)
        elif known.policy is not policy:
            was_identified = known.identified is not None
            known = connection.known = known.renewed(policy)
            if was_identified and known.identified is None:
                connection.close()  # its requests bear no signature; on another connection they do
        # PlainPermissionManager.validate: a global white address needs neither key nor signature.
        if known.is_white:
            return
        if known.identified is not None and ACCESS_KEY not in frame.ext:
            self._check_rule(connection, frame, rule, known.identified, records)
            return
        account = policy.accounts.get(str(frame.ext.get(ACCESS_KEY)))
        if account is None:
            raise self._stranger(connection, frame)
        if known.signing is not account and known.trusts(account):
            known.access_key, known.signing = account.access_key, None
            return
        try:
            has_signed = account.signer.has_signed(frame.ext, frame.body)
        except (TypeError, ValueError):  # fields of kinds that cannot be put in an order
            has_signed = False
        if not has_signed:
            raise self._refusal(
                connection, frame, "signature", f"Check signature failed for accessKey={account.access_key}"
            )
        known.access_key, known.signing = account.access_key, account
        self._check_rule(connection, frame, rule, account, records)

    def may_publish(self, connection: Connection, topic: str) -> bool:
        """Whether the account that a connection asked as last may send to a topic."""
        known = connection.known
        if not isinstance(known, Known):
            return False
        account = self.file.policy.accounts.get(known.access_key)
        return known.is_white or (account is not None and (known.trusts(account) or account.may(topic, Permission.PUB)))

    def identify(self, connection: Connection, frame: Frame) -> None:
        """IDENTIFY: the connection is an account's from now on. Raises Refused; the client then goes on signing."""
        known, channel = connection.known, connection.channel
        account = self.file.policy.accounts.get(str(frame.ext.get(ACCESS_KEY)))
        is_proven = (
            isinstance(known, Known)
            and account is not None
            and channel != ""
            and hmac.compare_digest(str(frame.ext.get(EXT_CHANNEL)).encode(), channel.encode())
            and account.signer.has_signed(frame.ext, frame.body)  # a white address passes without
        )
        if not is_proven or not isinstance(known, Known):
            raise Refused(
                ResponseCode.NO_PERMISSION, "an account identifies itself by TLS, and signs the connection's channel"
            )
        known.identified = account

    def _check_rule(
        self, connection: Connection, frame: Frame, rule: Rule, account: Account, records: Records | None
    ) -> None:
        is_admin, needs = rule
        if is_admin and not account.is_admin:
            key = account.access_key
            remark = f"Need admin permission for request code={frame.code}, but accessKey={key} is not"
            raise self._refusal(connection, frame, "admin", remark)
        for need in needs(frame, records) if needs is not None else ():
            if not account.may(*need) and need != _TRACE:
                remark = f"No default permission for {_words(need)}, accessKey={account.access_key}"
                raise self._refusal(connection, frame, "permission", remark)

    def _stranger(self, connection: Connection, frame: Frame) -> Refused:
        shown = frame.ext.get(ACCESS_KEY)
        if shown is None:
            return self._refusal(connection, frame, "no_key", "No accessKey is configured; sign with an account's keys")
        return self._refusal(connection, frame, "unknown_key", f"No acl config for {str(shown)[:_REMARK_CHARS]}")

    def _refusal(self, connection: Connection, frame: Frame, reason: str, remark: str) -> Refused:
        """As Apache's brokers: SYSTEM_ERROR with the text of their AclException."""
        self.refused[reason] += 1
        if self._reports.is_due(connection.peer, reason):
            log.warning(
                "request_refused", peer=connection.peer, reason=reason, request=request_name(frame.code), remark=remark
            )
        return Refused(ResponseCode.SYSTEM_ERROR, f"AclException: {remark}")


def _words(need: Need) -> str:
    is_group = need.resource.startswith(names.RETRY_PREFIX)
    name = need.resource.removeprefix(names.RETRY_PREFIX)[:_REMARK_CHARS]
    permission = "PUB or SUB" if need.permission is Permission.ANY else need.permission.name
    return f"{'group' if is_group else 'topic'}:{name} ({permission})"
