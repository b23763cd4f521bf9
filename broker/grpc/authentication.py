"""Finds out who asks: `authorization: MQv2-HMAC-SHA1 Credential=<key>[/...], SignedHeaders=x-mq-date-time,
Signature=<hex>`.

The accounts and their permissions are those of the other door. Clients sign the time that they state, which is their own, in
their own zone: nobody can tell whether it is old. Only TLS protects against somebody on the way.
"""

from __future__ import annotations

import hmac
from functools import partial
from typing import Any

from ...protocol.signature import Signer
from ..access.acl import Acl, Unauthorized
from .calls import Call
from .codes import Code, Fault


def authorize(acl: Acl, call: Call, request: Any) -> None:
    """Raises Fault."""
    fields = _credentials(call.text(b"authorization"))
    access_key = fields.get("Credential", "").partition("/")[0]
    try:
        has_signed = partial(_has_signed, call, fields.get("Signature", "").lower())
        account = acl.account_of(call.session, access_key or None, has_signed)
        if account is not None:
            call.account = account.access_key
            acl.check(account, call.method.name, call.method.needs(request))
    except Unauthorized as fault:
        acl.note_refusal(call.session, call.method.name, fault)
        raise Fault(Code.UNAUTHORIZED, str(fault)) from None


def _has_signed(call: Call, shown: str, signer: Signer) -> bool:
    signature = signer.signature_of(call.fields.get(b"x-mq-date-time", b""))
    return hmac.compare_digest(signature.encode(), shown.encode())


def _credentials(text: str) -> dict[str, str]:
    """The pairs behind the name of the algorithm."""
    _, _, pairs = text.partition(" ")
    return dict(pair.strip().partition("=")[::2] for pair in pairs.split(","))
