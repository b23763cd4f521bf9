"""If the broker or name server has accounts, every request is judged here before it is staged or handled.

In Apache's order (PlainPermissionManager.validate): a global white address passes; the account must be known; from the
account's white address it passes; the signature must be its own; then the permissions that the request needs. A door says
which account a request names, how it is signed, and what it needs.

The address of a session cannot change, so it is checked once. The signature is computed for every request, because it also
protects the request's content, and because a frame may come from anybody on a connection without TLS. A session that has
proven by other means whose it is needs no signatures (`identified`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from ...protocol import names
from ...protocol.signature import Signer
from ..sessions.recent import Recent
from ..sessions.reports import Reports
from ..sessions.session import Session
from .accounts import Account, Permission, Policy
from .file import AclFile
from .needs import Need

log = structlog.get_logger("rocketlet.acl")

_TRACE: Final = Need(names.TRACE_TOPIC, Permission.PUB)  # everybody may trace, as with Apache
_REMARK_CHARS: Final = 100


class Unauthorized(Exception):
    """`reason` is the word by which refusals are counted."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Known:
    """Remembers about a session what one version of the policy decided."""

    __slots__ = ("access_key", "host", "identified", "is_white", "policy", "proof", "signing", "trusted")

    def __init__(self, policy: Policy, peer: str) -> None:
        self.identified: Account | None = None
        self.proof: Signer | None = None  # the secret that has identified it
        self.access_key = ""  # the account that asked last
        self.signing: Account | None = None  # the same account, if it has to sign here
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
        if account is not None and self.proof in (account.signer, account.former):
            known.identified, known.proof = account, self.proof
        return known


def shown_to(session: Session) -> Callable[[str], bool]:
    """Whether the account whose request this is may know a topic by its name: it may send to it or read it."""
    known = session.known
    if not isinstance(known, Known) or known.is_white:
        return lambda topic: True
    account = known.identified or known.policy.accounts.get(known.access_key)
    if account is None:
        return lambda topic: False
    if known.trusts(account):
        return lambda topic: True
    return lambda topic: account.may(topic, Permission.ANY)


def account_name(session: Session) -> str:
    """The access key of the account that a session is of, or asked as last; empty without one."""
    known = session.known
    if not isinstance(known, Known):
        return ""
    return known.identified.access_key if known.identified is not None else known.access_key


class Acl:
    """`refused`: how many requests, by reason. `former`: how many proofs by an account's former secret, by account."""

    def __init__(self, file: AclFile) -> None:
        self.file = file
        self.refused: Counter[str] = Counter()
        self.former: Counter[str] = Counter()
        self._reports = Reports()
        self._recent = Recent(time.monotonic)
        self.recent = self._recent.texts

    def look(self) -> bool:
        """Whether the file is to be loaded."""
        return self.file.look()

    def load(self) -> None:
        """Reads the file again if it has changed."""
        self.file.load()

    def known(self, session: Session) -> Known:
        """The session's record under the policy in force."""
        policy, known = self.file.policy, session.known
        if not isinstance(known, Known):
            known = session.known = Known(policy, session.peer)
        elif known.policy is not policy:
            was_identified = known.identified is not None
            known = session.known = known.renewed(policy)
            if was_identified and known.identified is None:
                session.close()  # its requests bear no signature; in another session they do
        return known

    def account_of(self, session: Session, access_key: object, has_signed: Callable[[Signer], bool]) -> Account | None:
        """The account whose request this is, None if it may do everything. access_key: as the request names it, None if it
        does not; `has_signed` says whether the request is signed with a secret. Raises Unauthorized."""
        known = self.known(session)
        # PlainPermissionManager.validate: a global white address needs neither key nor signature.
        if known.is_white:
            return None
        if access_key is None:
            if known.identified is None:
                raise Unauthorized("no_key", "No accessKey is configured; sign with an account's keys")
            return known.identified
        account = self.file.policy.accounts.get(str(access_key))
        if account is None:
            raise Unauthorized("unknown_key", f"No acl config for {str(access_key)[:_REMARK_CHARS]}")
        if known.signing is not account and known.trusts(account):
            known.access_key, known.signing = account.access_key, None
            return None
        proof = account.proven_by(has_signed)
        if proof is None:
            raise Unauthorized("signature", f"Check signature failed for accessKey={account.access_key}")
        if proof is account.former:
            self._note_former(session, account)
        known.access_key, known.signing = account.access_key, account
        return account

    def identify(self, session: Session, account: Account, has_signed: Callable[[Signer], bool]) -> bool:
        """The session is the account's from now on, if that has signed."""
        known = self.known(session)
        proof = account.proven_by(has_signed)  # a white address passes without
        if proof is None:
            return False
        if proof is account.former:
            self._note_former(session, account)
        known.identified, known.proof = account, proof
        self.file.generation.rise()
        return True

    def _note_former(self, session: Session, account: Account) -> None:
        self.former[account.access_key] += 1
        if self._reports.is_due(session.peer, "former"):
            log.info("former_secret_used", peer=session.peer, account=account.access_key)

    def check(self, account: Account, request: object, needs: Iterable[Need] | None, *, is_admin: bool = False) -> None:
        """Whether the account has the permissions that a request needs. request: its code or name. Raises Unauthorized."""
        if is_admin and not account.is_admin:
            key = account.access_key
            raise Unauthorized("admin", f"Need admin permission for request code={request}, but accessKey={key} is not")
        for need in needs or ():
            if not account.may(*need) and need != _TRACE:
                text = f"No default permission for {_words(need)}, accessKey={account.access_key}"
                raise Unauthorized("permission", text)

    def has_changed(self, session: Session, before: Policy) -> bool:
        """Whether the account that a session asked as last is another one than under a former policy, or gone."""
        if not isinstance(session.known, Known):
            return False
        key = account_name(session)
        return before.accounts.get(key) != self.file.policy.accounts.get(key)

    def may_publish(self, session: Session, topic: str) -> bool:
        """Whether the account that a session asked as last may send to a topic."""
        return self._may(session, topic, Permission.PUB)

    def may_subscribe(self, session: Session, topic: str) -> bool:
        """Whether it may read the topic."""
        return self._may(session, topic, Permission.SUB)

    def _may(self, session: Session, topic: str, permission: Permission) -> bool:
        known = session.known
        if not isinstance(known, Known):
            return False
        account = self.file.policy.accounts.get(known.access_key)
        return known.is_white or (account is not None and (known.trusts(account) or account.may(topic, permission)))

    def note_refusal(self, session: Session, request: str, fault: Unauthorized) -> None:
        """Counts a refused request, and logs it if it is news."""
        self.refused[fault.reason] += 1
        host = session.peer.rpartition(":")[0]
        self._recent.note((host, fault.reason), f"{fault.reason}: {host} asked for {request}: {fault}")
        if self._reports.is_due(session.peer, fault.reason):
            log.warning("request_refused", peer=session.peer, reason=fault.reason, request=request, remark=str(fault))


def _words(need: Need) -> str:
    is_group = need.resource.startswith(names.RETRY_PREFIX)
    name = need.resource.removeprefix(names.RETRY_PREFIX)[:_REMARK_CHARS]
    permission = "PUB or SUB" if need.permission is Permission.ANY else need.permission.name
    return f"{'group' if is_group else 'topic'}:{name} ({permission})"
