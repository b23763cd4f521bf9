"""Finds the account of a frame, which names it and is signed with its secret.

With TLS a Rocketlet client proves its account once (IDENTIFY): it signs what only the two ends of this connection know, so
that nobody can use the proof elsewhere. Its other requests need no signature then.
"""

from __future__ import annotations

import hmac
from functools import partial

from ...protocol.codes import EXT_CHANNEL, ResponseCode, request_name
from ...protocol.frame import Frame
from ...protocol.signature import ACCESS_KEY, Signer
from ..access.acl import Acl, Unauthorized
from .answers import Refused
from .connection import Connection
from .rules import Rule, StoredRecords


def authorize(acl: Acl, connection: Connection, frame: Frame, rule: Rule, records: StoredRecords | None) -> None:
    """Raises Refused, and a handler's errors for a request that it cannot read. `records`: the broker's, if there is
    one."""
    try:
        account = acl.account_of(connection, frame.ext.get(ACCESS_KEY), partial(_has_signed, frame))
        if account is not None:
            needs = rule.needs(frame, records) if rule.needs is not None else None
            acl.check(account, frame.code, needs, is_admin=rule.is_admin)
    except Unauthorized as fault:
        acl.note_refusal(connection, request_name(frame.code), fault)
        # as Apache's brokers: SYSTEM_ERROR with the text of their AclException
        raise Refused(ResponseCode.SYSTEM_ERROR, f"AclException: {fault}") from None


def _has_signed(frame: Frame, signer: Signer) -> bool:
    try:
        return signer.has_signed(frame.ext, frame.body)
    except (TypeError, ValueError):  # fields of kinds that cannot be put in an order
        return False


def identify(acl: Acl, connection: Connection, frame: Frame) -> None:
    """IDENTIFY: the connection is an account's from now on. Raises Refused; the client then goes on signing."""
    channel = connection.channel
    account = acl.file.policy.accounts.get(str(frame.ext.get(ACCESS_KEY)))
    is_proven = (
        account is not None
        and channel != ""
        and hmac.compare_digest(str(frame.ext.get(EXT_CHANNEL)).encode(), channel.encode())
        and acl.identify(connection, account, partial(_has_signed, frame))
    )
    if not is_proven:
        raise Refused(
            ResponseCode.NO_PERMISSION, "an account identifies itself by TLS, and signs the connection's channel"
        )
