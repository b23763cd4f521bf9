"""Who asks: `authorization: MQv2-HMAC-SHA1 Credential=<key>[/...], SignedHeaders=x-mq-date-time, Signature=<hex>`.

The accounts and their permissions are those of the other door. Clients sign the time that they state, which is their own, in
their own zone: nobody can tell whether it is old. Only TLS protects against somebody on the way.
"""

from __future__ import annotations

import hmac
from typing import Any

import structlog

from ...protocol import names
from ..access.accounts import Account, Permission
from ..access.acl import Acl, Known
from ..access.needs import Need
from ..remoting.connection import Connection
from .calls import Call
from .codes import Code, Fault

log = structlog.get_logger("rocketlet.acl")

_SHOWN_CHARS = 100


def authorize(acl: Acl, call: Call, request: Any) -> None:
    """Raises Fault."""
    connection = call.session
    known = _known(acl, connection)
    if known.is_white:
        return
    account = _account(acl, call, known)
    if known.trusts(account):
        return
    for need in call.method.needs(request):
        if not account.may(*need):
            words = _words(need)
            raise _refusal(acl, call, "permission", f"no permission for {words}, the account is {account.access_key}")


def _known(acl: Acl, connection: Connection) -> Known:
    policy = acl.file.policy
    known = connection.known
    if not isinstance(known, Known):
        known = connection.known = Known(policy, connection.peer)
    elif known.policy is not policy:
        known = connection.known = known.renewed(policy)
    return known


def _account(acl: Acl, call: Call, known: Known) -> Account:
    fields = _credentials(call.text(b"authorization"))
    key = fields.get("Credential", "").partition("/")[0]
    if not key:
        raise _refusal(acl, call, "no_key", "no credentials; give the client an account's access key and secret key")
    account = acl.file.policy.accounts.get(key)
    if account is None:
        raise _refusal(acl, call, "unknown_key", f"there is no account {key[:_SHOWN_CHARS]}")
    known.access_key = key
    shown = fields.get("Signature", "").lower()
    if not known.trusts(account) and not hmac.compare_digest(
        account.signer.signature_of(call.fields.get(b"x-mq-date-time", b"")).encode(), shown.encode()
    ):
        raise _refusal(acl, call, "signature", f"the signature is not of the account {key[:_SHOWN_CHARS]}")
    return account


def _credentials(text: str) -> dict[str, str]:
    """The pairs behind the name of the algorithm."""
    _, _, pairs = text.partition(" ")
    return dict(pair.strip().partition("=")[::2] for pair in pairs.split(","))


def _refusal(acl: Acl, call: Call, reason: str, text: str) -> Fault:
    acl.refused[reason] += 1
    if call.session.is_news(f"request_refused {reason}"):
        log.warning("request_refused", peer=call.session.peer, reason=reason, request=call.method.name, remark=text)
    return Fault(Code.UNAUTHORIZED, text)


def _words(need: Need) -> str:
    is_group = need.resource.startswith(names.RETRY_PREFIX)
    permission = "PUB or SUB" if need.permission is Permission.ANY else need.permission.name
    return f"the {'group' if is_group else 'topic'} {need.resource.removeprefix(names.RETRY_PREFIX)} ({permission})"
