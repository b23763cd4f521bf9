"""Accounts and permissions: Apache's plain ACL (plain_acl.yml), and the authorization of requests."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from functools import lru_cache
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import structlog

from ..host.files import read_file
from ..protocol import names
from ..protocol.bodies import DataVersion
from ..protocol.headers import Signer
from .config import MAX_ACL_FILE_BYTES
from .machine import BeingWritten, Watched, is_readable_by_all, replace_file
from .runtime.generation import Generation
from .sessions.reports import Recent, Reports
from .sessions.session import Session

log = structlog.get_logger("rocketlet.acl")


# ------------------------------------------------------------------------------
# Apache's `plain_acl.yml`: accounts, their permissions, and the addresses that need no account.
#
#     globalWhiteRemoteAddresses:
#     - 10.10.103.*
#     accounts:
#     - accessKey: orders-service       # at least 7 characters, like the secret
#       secretKey: a-long-secret
#       formerSecretKey:                # Rocketlet's own: a previous secret that is still accepted
#       whiteRemoteAddress:             # requests from this address need no signature
#       admin: false
#       defaultTopicPerm: DENY          # DENY, PUB, SUB or PUB|SUB; DENY if missing
#       defaultGroupPerm: SUB
#       topicPerms:
#       - orders=PUB|SUB
#       groupPerms:
#       - shipping=SUB
#
# Apart from the previous secret, meaning and defaults are those of Apache's PlainPermissionManager. Where Apache interprets a
# mistake such as `PUB,SUB` as DENY, this broker rejects the file with a reason.


GLOBAL_WHITE: Final = "globalWhiteRemoteAddresses"
ACCOUNTS: Final = "accounts"
FORMER: Final = "formerSecretKey"
MIN_KEY_CHARS: Final = 7  # as in Apache, whose condition is "more than 6"


class Permission(IntEnum):
    """An account's permission for a topic or group; 0 is DENY. An IntEnum of bits, because IntFlag's & takes twelve
    times as long."""

    DENY = 0
    PUB = 4
    SUB = 8
    ANY = PUB | SUB  # as a requirement: one of both is sufficient


_PERMISSIONS: Final = {
    "DENY": Permission.DENY,
    "PUB": Permission.PUB,
    "SUB": Permission.SUB,
    "PUB|SUB": Permission.ANY,
    "SUB|PUB": Permission.ANY,
}


class AclError(ValueError):
    """The accounts are invalid, or cannot be read or written. The text must not contain a secret."""


@dataclass(frozen=True, slots=True)
class Account:
    """An account.

    An administrator without any permission for a single topic or group may do everything.

    Attributes:
        signer: verifies signatures of the secret
        former: verifies signatures of the previous secret, which stays valid while clients are reconfigured
        white: addresses whose requests need no signature
        resources: permissions for single topics, and for groups by the names of their retry topics, as in Apache's file
    """

    access_key: str
    signer: Signer = field(repr=False)
    former: Signer | None = field(repr=False)
    white: AddressPattern
    is_admin: bool
    default_topic: Permission
    default_group: Permission
    resources: Mapping[str, Permission]

    def proven_by(self, has_signed: Callable[[Signer], bool]) -> Signer | None:
        """Return the signer of the secret that was used, the present or the previous one; None if it was neither."""
        if has_signed(self.signer):
            return self.signer
        return self.former if self.former is not None and has_signed(self.former) else None

    def may(self, resource: str, needed: Permission) -> bool:
        """Return True if the account has a permission.

        A permission for the single name has precedence. Otherwise an administrator without such permissions may do
        everything. For other accounts the default permission applies, except that an account that may use a group may also
        use its dead letters, and that only administrators may use inner topics and send to the topic with marks of dead
        letters.

        Args:
            resource: a topic, or the retry topic of a group
            needed: the permission, or `ANY` for one of both
        """
        owned = self.resources.get(resource)
        if owned is None:
            if self.is_admin and not self.resources:
                return True
            kind = _kind_of(resource)
            if kind is _Kind.DEAD_LETTERS:
                return self.may(names.retry_topic(resource.removeprefix(names.DLQ_PREFIX)), Permission.SUB)
            if kind is _Kind.INNER:
                return self.is_admin
            if kind is _Kind.MARKS:
                return self.is_admin or bool(self.default_topic & needed & Permission.SUB)
            owned = self.default_group if kind is _Kind.GROUP else self.default_topic
        return bool(owned & needed)


class _Kind(Enum):
    """The type of resource, which decides which default permission applies."""

    TOPIC = auto()
    GROUP = auto()
    DEAD_LETTERS = auto()
    INNER = auto()
    MARKS = auto()


@lru_cache(4096)
def _kind_of(resource: str) -> _Kind:
    if resource.startswith(names.RETRY_PREFIX):
        return _Kind.GROUP
    if resource.startswith(names.DLQ_PREFIX):
        return _Kind.DEAD_LETTERS
    if resource == names.MARKS_TOPIC:
        return _Kind.MARKS
    return _Kind.INNER if names.is_inner_topic(resource) else _Kind.TOPIC


@dataclass(frozen=True, slots=True)
class Policy:
    """The contents of one version of the file."""

    accounts: Mapping[str, Account]
    white: tuple[AddressPattern, ...]

    def is_white(self, host: str) -> bool:
        return any(pattern.matches(host) for pattern in self.white)


def read_policy(document: object) -> Policy:
    """Return the policy of a decoded YAML document. Raises AclError."""
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise AclError(f"the ACL file is not a mapping; it needs {ACCOUNTS!r} and may have {GLOBAL_WHITE!r}")
    accounts: dict[str, Account] = {}
    for entry in _list(document, ACCOUNTS, "the ACL file"):
        account = read_account(entry)
        if account.access_key in accounts:
            raise AclError(f"the account {account.access_key} is repeated")
        accounts[account.access_key] = account
    white = [_pattern(text, GLOBAL_WHITE) for text in _list(document, GLOBAL_WHITE, "the ACL file")]
    return Policy(accounts, tuple(white))


def read_account(entry: object) -> Account:
    """Return an account of the file. Raises AclError."""
    if not isinstance(entry, dict):
        raise AclError(f"an account is a mapping with accessKey and secretKey, not {type(entry).__name__}")
    key = _key(entry, "accessKey", "an account")
    where = f"the account {key}"
    admin = entry.get("admin")
    if admin not in (None, True, False):
        raise AclError(f"{where} has admin: {str(admin)[:40]}; write true or false")
    resources = {
        **_resources(entry, "topicPerms", where, prefix=""),
        **_resources(entry, "groupPerms", where, prefix=names.RETRY_PREFIX),
    }
    return Account(
        key,
        Signer(_key(entry, "secretKey", where)),
        None if entry.get(FORMER) is None else Signer(_key(entry, FORMER, where)),
        _pattern(entry.get("whiteRemoteAddress"), where),
        bool(admin),
        _permission(entry.get("defaultTopicPerm"), where),
        _permission(entry.get("defaultGroupPerm"), where),
        resources,
    )


def _key(entry: Mapping[object, object], name: str, where: str) -> str:
    value = entry.get(name)
    # an unquoted number such as 12345678, which Apache reads as a text
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or len(value) < MIN_KEY_CHARS:
        raise AclError(
            f"{where} needs {name}, of at least {MIN_KEY_CHARS} characters, in quotes if it is not a plain word"
        )
    return value


def _list(entry: Mapping[object, object], name: str, where: str) -> list[object]:
    found = entry.get(name)
    if found is None:
        return []
    if not isinstance(found, list):
        raise AclError(f"{name} of {where} is not a list; write one item a line, each after a dash")
    return found


def _pattern(text: object, where: str) -> AddressPattern:
    if text is None:
        return AddressPattern(())
    try:
        return parse_pattern(str(text))
    except PatternError as error:
        raise AclError(f"{where}: {error}") from None


def _permission(text: object, where: str) -> Permission:
    found = _PERMISSIONS.get(str(text or "DENY").strip())
    if found is None:
        raise AclError(f"{where} has the permission {str(text)[:40]!r}; allowed: {', '.join(_PERMISSIONS)}")
    return found


def _resources(entry: Mapping[object, object], name: str, where: str, prefix: str) -> dict[str, Permission]:
    found: dict[str, Permission] = {}
    for line in _list(entry, name, where):
        resource, equals, permission = str(line).partition("=")
        if not equals or not resource.strip():
            raise AclError(f"{where} has {str(line)[:80]!r} in {name}; write name=PUB, SUB, PUB|SUB or DENY")
        found[prefix + resource.strip()] = _permission(permission, where)
    return found


# ------------------------------------------------------------------------------
# The permissions that a request requires.


class Need(NamedTuple):
    """A required permission. `resource` is a topic, or the retry topic of a group, as in the accounts."""

    resource: str
    permission: Permission


def topic(name: str, permission: Permission) -> Need:
    """Return the requirement for a topic. For a retry topic, reading and writing require SUB for the group, as in
    Apache's brokers."""
    return Need(name, Permission.SUB if name.startswith(names.RETRY_PREFIX) else permission)


def group(name: str) -> Need:
    return Need(names.retry_topic(name), Permission.SUB)


# ------------------------------------------------------------------------------
# If the broker or name server has accounts, requests are authorized here before they are staged or handled.
#
# The order is Apache's (PlainPermissionManager.validate): a request from a global white address is accepted; the
# account must exist; a request from the account's white address is accepted; the signature must be valid; then the
# account needs the permissions for the request. The protocol server determines the account, the signature and the
# required permissions of a request.
#
# The address of a session cannot change, so it is checked once for each version of the accounts. The signature is verified
# for every request, because it also protects the request's content, and because without TLS a frame on a connection may
# come from a man in the middle. A session that has authenticated by IDENTIFY needs no signatures (`identified`).


_TRACE: Final = Need(names.TRACE_TOPIC, Permission.PUB)  # every account may send traces, as with Apache
_REMARK_CHARS: Final = 100


class Unauthorized(Exception):
    """A request is refused.

    Args:
        reason: the label by which refusals are counted.
        access_key: the key of the account; empty without a known account.
    """

    def __init__(self, reason: str, text: str, access_key: str = "") -> None:
        super().__init__(text)
        self.reason = reason
        self.access_key = access_key


class Authentication:
    """Results for a session under one version of the policy.

    Attributes:
        identified: the account that the session has authenticated as; None otherwise
        proof: signer of the secret that it authenticated with
        access_key: access key of the last request
        asked: access keys of all requests, some of which may still wait
        signing: the account of the last request, if its requests need signatures here
        is_white: True if the address is a global white address
        trusted: by access key, True if the session's address is the account's white address
    """

    __slots__ = ("access_key", "asked", "host", "identified", "is_white", "policy", "proof", "signing", "trusted")

    def __init__(self, policy: Policy, peer: str) -> None:
        self.identified: Account | None = None
        self.proof: Signer | None = None
        self.access_key = ""
        self.asked: set[str] = set()
        self.signing: Account | None = None
        self.policy = policy
        self.host = peer.rpartition(":")[0]
        self.is_white = policy.is_white(self.host)
        self.trusted: dict[str, bool] = {}

    def trusts(self, account: Account) -> bool:
        """Return True if the session's address is the account's white address."""
        found = self.trusted.get(account.access_key)
        if found is None:
            found = self.trusted[account.access_key] = account.white.matches(self.host)
        return found

    def renewed(self, policy: Policy) -> Authentication:
        """Return the record for another version of the policy. The session stays authenticated only if the account still has
        the secret with which it has authenticated, as the present or the previous one."""
        authentication = Authentication(policy, f"{self.host}:0")
        authentication.access_key, authentication.asked = self.access_key, self.asked
        account = policy.accounts.get(self.identified.access_key) if self.identified else None
        if account is not None and self.proof in (account.signer, account.former):
            authentication.identified, authentication.proof = account, self.proof
        return authentication


def shown_to(session: Session) -> Callable[[str], bool]:
    """Return a function that returns True if the account of the last request may see the name of a topic, because it
    may send to it or read it. Without accounts, and from a white address, all names may be seen."""
    authentication = session.authentication
    if not isinstance(authentication, Authentication) or authentication.is_white:
        return lambda topic: True
    account = authentication.identified or authentication.policy.accounts.get(authentication.access_key)
    if account is None:
        return lambda topic: False
    if authentication.trusts(account):
        return lambda topic: True
    return lambda topic: account.may(topic, Permission.ANY)


class Acl:
    """Authorization of requests.

    Attributes:
        refused: number of refused requests by reason
        former: number of uses of an account's previous secret, by account
        recent: returns the texts of recent refusals
    """

    def __init__(self, file: AclFile) -> None:
        self.file = file
        self.refused: Counter[str] = Counter()
        self.former: Counter[str] = Counter()
        self._reports = Reports()
        self._recent = Recent()
        self.recent = self._recent.texts

    def poll(self) -> bool:
        """Return True if the file has changed and must be loaded (`AclFile.poll`)."""
        return self.file.poll()

    def load(self) -> None:
        self.file.load()

    def authentication_of(self, session: Session) -> Authentication:
        """Return the session's record under the policy in force. Close a session whose authentication has ended with an
        earlier policy."""
        policy, authentication = self.file.policy, session.authentication
        if not isinstance(authentication, Authentication):
            authentication = session.authentication = Authentication(policy, session.peer)
        elif authentication.policy is not policy:
            was_identified = authentication.identified is not None
            authentication = session.authentication = authentication.renewed(policy)
            if was_identified and authentication.identified is None:
                session.close()  # its requests have no signatures; a client signs them until it authenticates again
        return authentication

    def account_of(self, session: Session, access_key: object, has_signed: Callable[[Signer], bool]) -> Account | None:
        """Authenticate a request, and return its account, or None if the request may do everything.

        Args:
            session: the session
            access_key: access key of the request; None if it has none
            has_signed: returns True if a secret has signed the request
        Raises:
            Unauthorized: the account does not exist, or the signature is invalid
        """
        authentication = self.authentication_of(session)
        # PlainPermissionManager.validate: requests from a global white address need neither key nor signature.
        if authentication.is_white:
            return None
        if access_key is None:
            if authentication.identified is None:
                raise Unauthorized("no_key", "No accessKey is configured; sign with an account's keys")
            return authentication.identified
        account = self.file.policy.accounts.get(str(access_key))
        if account is None:
            raise Unauthorized("unknown_key", f"No acl config for {str(access_key)[:_REMARK_CHARS]}")
        if authentication.signing is not account and authentication.trusts(account):
            authentication.access_key, authentication.signing = account.access_key, None
            authentication.asked.add(account.access_key)
            return None
        proof = account.proven_by(has_signed)
        if proof is None:
            key = account.access_key
            raise Unauthorized("signature", f"Check signature failed for accessKey={key}", key)
        if proof is account.former:
            self._record_former_secret(session, account)
        authentication.access_key, authentication.signing = account.access_key, account
        authentication.asked.add(account.access_key)
        return account

    def identify(self, session: Session, account: Account, has_signed: Callable[[Signer], bool]) -> bool:
        """Authenticate a session as an account, if the account has signed. Return False otherwise."""
        authentication = self.authentication_of(session)
        proof = account.proven_by(has_signed)  # required even from a white address
        if proof is None:
            return False
        if proof is account.former:
            self._record_former_secret(session, account)
        authentication.identified, authentication.proof = account, proof
        authentication.asked.add(account.access_key)
        self.file.generation.increment()
        return True

    def _record_former_secret(self, session: Session, account: Account) -> None:
        self.former[account.access_key] += 1
        if self._reports.is_due(session.peer, "former"):
            log.info("former_secret_used", peer=session.peer, account=account.access_key)

    def check(self, account: Account, request: object, needs: Iterable[Need] | None, *, is_admin: bool = False) -> None:
        """Check that the account has the permissions that a request requires. Raises Unauthorized.

        Args:
            account: the account
            request: code or name of the request
            needs: the required permissions
            is_admin: True if the request requires an administrator
        """
        if is_admin and not account.is_admin:
            key = account.access_key
            text = f"Need admin permission for request code={request}, but accessKey={key} is not"
            raise Unauthorized("admin", text, key)
        for need in needs or ():
            if not account.may(*need) and need != _TRACE:
                text = f"No default permission for {_words(need)}, accessKey={account.access_key}"
                raise Unauthorized("permission", text, account.access_key)

    def has_changed(self, session: Session, before: Policy) -> bool:
        """Return True if the policy has changed for a session: an account of its requests was changed, added or deleted, or
        its address is a global white address now or no longer. False for a session without requests."""
        authentication, now = session.authentication, self.file.policy
        if not isinstance(authentication, Authentication):
            return False
        if before.is_white(authentication.host) is not now.is_white(authentication.host):
            return True
        return any(before.accounts.get(key) != now.accounts.get(key) for key in authentication.asked)

    def account_name(self, session: Session) -> str:
        """Return the access key of the account that a session is authenticated as, or else has used last; empty without."""
        authentication = session.authentication
        if not isinstance(authentication, Authentication):
            return ""
        return (
            authentication.identified.access_key if authentication.identified is not None else authentication.access_key
        )

    def may_publish(self, session: Session, topic: str) -> bool:
        """Return True if the account of the session's last request, or its white address, may send to a topic."""
        return self._may(session, topic, Permission.PUB)

    def may_subscribe(self, session: Session, topic: str) -> bool:
        """Return True if the account of the session's last request, or its white address, may read a topic."""
        return self._may(session, topic, Permission.SUB)

    def _may(self, session: Session, topic: str, permission: Permission) -> bool:
        authentication = session.authentication
        if not isinstance(authentication, Authentication):
            return False
        account = self.file.policy.accounts.get(authentication.access_key)
        return authentication.is_white or (
            account is not None and (authentication.trusts(account) or account.may(topic, permission))
        )

    def note_refusal(self, session: Session, request: str, fault: Unauthorized) -> None:
        """Count a refused request, and log it unless the same refusal was logged recently."""
        self.refused[fault.reason] += 1
        host = session.peer.rpartition(":")[0]
        self._recent.record(
            (host, fault.reason, fault.access_key), f"{fault.reason}: {host} requested {request}: {fault}"
        )
        if self._reports.is_due(session.peer, fault.reason):
            log.warning("request_refused", peer=session.peer, reason=fault.reason, request=request, remark=str(fault))


def _words(need: Need) -> str:
    is_group = need.resource.startswith(names.RETRY_PREFIX)
    name = need.resource.removeprefix(names.RETRY_PREFIX)[:_REMARK_CHARS]
    permission = "PUB or SUB" if need.permission is Permission.ANY else need.permission.name
    return f"{'group' if is_group else 'topic'}:{name} ({permission})"


# ------------------------------------------------------------------------------
# Patterns of `whiteRemoteAddress` and `globalWhiteRemoteAddresses`, in Apache's grammar (RemoteAddressStrategyFactory).
#
#     10.0.0.1                one address             2001:db8::1
#     10.0.0.1,10.0.0.2       several                 10.0.0.{1,2,7}       2001:db8::{1,2}
#     10.0.*.*                any number there        2001:db8:0:0:0:0:0:*
#     10.0.0.20-60            a range                 2001:db8::1-ff
#     *                       every address; also *.*.*.* and *:*:*:*:*:*:*:*
#     (empty)                 no address
#
# Apache ignores everything after the first range, so that some patterns match more than they should (`10.0.1-5.7`
# matches 10.0.3.9). This parser evaluates every part.


Span = tuple[int, int]

_ANY: Final = frozenset(("*", "*.*.*.*", "*:*:*:*:*:*:*:*"))
_MAX_ALTERNATIVES: Final = 1000


class PatternError(ValueError):
    """The text is not a valid pattern. The error has the reason."""


class AddressPattern(NamedTuple):
    """A pattern of addresses: alternatives of spans, four spans for IPv4 and eight for IPv6. `matches_all` is True for
    `*`."""

    alternatives: tuple[tuple[Span, ...], ...]
    matches_all: bool = False

    def matches(self, host: str) -> bool:
        """Return True if an address without port matches."""
        if self.matches_all or not self.alternatives:
            return self.matches_all
        numbers = _numbers(host)
        return any(
            len(spans) == len(numbers)
            and all(low <= number <= high for number, (low, high) in zip(numbers, spans, strict=True))
            for spans in self.alternatives
        )


def parse_pattern(text: str) -> AddressPattern:
    """Parse a pattern. Raises PatternError."""
    text = text.strip()
    if text in _ANY:
        return AddressPattern((), matches_all=True)
    pieces = _expanded(text) if text.endswith("}") else text.split(",")
    if len(pieces) > _MAX_ALTERNATIVES:
        raise PatternError(f"the address pattern has {len(pieces)} alternatives; maximum {_MAX_ALTERNATIVES}")
    return AddressPattern(tuple(_spans(piece.strip()) for piece in pieces if piece.strip()))


def _expanded(text: str) -> list[str]:
    """Return the alternatives of a pattern such as `10.0.0.{1,2}`. As in Apache, braces are allowed only in the last
    part."""
    found = re.fullmatch(r"([^{}]*[.:])\{([^{}]*)\}", text)
    if found is None:
        raise PatternError(f"the address pattern {text!r} has braces elsewhere than around its last part")
    return [found[1] + part.strip() for part in found[2].split(",")]


def _spans(text: str) -> tuple[Span, ...]:
    numbers = _numbers(text)
    if numbers:
        return tuple((number, number) for number in numbers)
    is_ipv6 = ":" in text
    parts = _ipv6_parts(text) if is_ipv6 else text.split(".")
    if len(parts) != (8 if is_ipv6 else 4):
        raise PatternError(f"the address pattern {text!r} is neither IPv4 nor IPv6")
    return tuple(_span(part.strip(), text, is_ipv6=is_ipv6) for part in parts)


def _ipv6_parts(text: str) -> list[str]:
    """Return the eight parts of an IPv6 pattern; `::` stands for the missing zeros."""
    head, double, tail = text.partition("::")
    left, right = (side.split(":") if side else [] for side in (head, tail))
    missing = 8 - len(left) - len(right)
    return [*left, *["0"] * missing, *right] if double and missing > 0 else text.split(":")


def _span(part: str, text: str, *, is_ipv6: bool) -> Span:
    highest = 0xFFFF if is_ipv6 else 255
    if part == "*":
        return 0, highest
    found = re.fullmatch(r"([0-9a-fA-F]{1,4})(?:-([0-9a-fA-F]{1,4}))?", part)
    try:
        if found is None:
            raise ValueError(part)
        low, high = (int(number, 16 if is_ipv6 else 10) for number in (found[1], found[2] or found[1]))
    except ValueError:
        raise PatternError(f"the address pattern {text!r} has the part {part!r}; write a number, a-b or *") from None
    if not low <= high <= highest:
        allowed = "0 to ffff" if is_ipv6 else "0 to 255"
        raise PatternError(f"the address pattern {text!r} has the part {part!r}; expected {allowed}")
    return low, high


def _numbers(host: str) -> tuple[int, ...]:
    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return ()
    if not isinstance(address, IPv4Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    packed = address.packed
    if len(packed) == 4:
        return tuple(packed)
    return tuple(int.from_bytes(packed[at : at + 2], "big") for at in range(0, 16, 2))


# ------------------------------------------------------------------------------
# The file of accounts: it is read at the start and when it changes, and rewritten by mqadmin's ACL commands.
#
# Needs PyYAML, which only servers with accounts need: `pip install '.[acl]'`.


_VERSION: Final = "dataVersion"

Document = dict[str, object]
"""A mapping in the file: of the file itself, and of each account. `read_policy` has checked its values."""


class _BeingWritten(AclError):
    """The file is still being written."""


class AclFile:
    """The file of accounts. Raises AclError if it is invalid at the start. A later invalid version is logged, and the
    previous policy stays in force.

    Attributes:
        policy: the accounts in force
        generation: the broker's generation, which each new policy increments
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._watched = Watched((self.path,))
        self._reading = Lock()  # held while a thread reads the file
        self._document: Document
        self.policy: Policy
        self.generation = Generation()
        self._load()
        if is_readable_by_all(self.path):
            log.warning("acl_file_readable_by_all", file=str(self.path), hint="it contains secrets; run chmod o-r")

    def poll(self) -> bool:
        """Return True if the file has changed and must be loaded, once it is no longer being written."""
        return self._watched.poll()

    def load(self) -> None:
        """Load the file if it has changed; log an invalid one. The broker runs this in a thread, because 1,000 accounts take
        0.4 s."""
        with self._reading, suppress(AclError):
            if self._watched.has_changed:
                self._load_changed()

    def _load_changed(self) -> None:
        """Load a changed file. Raises AclError; the previous accounts then stay in force."""
        try:
            self._load()
        except _BeingWritten:  # a later check finds it complete
            raise
        except AclError as error:
            log.error("acl_file_not_reloaded", file=str(self.path), reason=str(error))
            raise
        log.info("acl_file_reloaded", file=str(self.path), accounts=len(self.policy.accounts))

    def _load(self) -> None:
        """Read the file, and put its policy in force. Raises AclError."""
        try:
            document = self._watched.read_unchanged(self._read)
        except BeingWritten:
            raise _BeingWritten(f"{self.path} is being written; retry in a few seconds") from None
        self._put(read_policy(document), document)

    def _put(self, policy: Policy, document: Document) -> None:
        self.policy, self._document = policy, document
        self.generation.increment()

    def _read(self) -> Document:
        import yaml

        try:
            data = read_file(self.path, MAX_ACL_FILE_BYTES)
        except OSError as error:
            raise AclError(f"cannot read {self.path}: {error.strerror}") from None
        # an editor that rewrites the file may leave it empty for a moment; this must not remove all accounts
        if not data:
            raise AclError(f"{self.path} is empty")
        try:
            found = yaml.safe_load(data)
        except Exception as error:  # not only YAMLError: `!!int ""` raises IndexError, `!!bool x` KeyError
            raise AclError(f"{self.path} is not YAML{_line_text(error)}") from None
        if found is not None and not isinstance(found, dict):
            raise AclError(f"{self.path} is not a mapping; it needs {ACCOUNTS!r} and may have {GLOBAL_WHITE!r}")
        return found or {}

    # Changes by mqadmin

    @property
    def entries(self) -> list[Document]:
        """The accounts as they were in the file when it was last read or written, including secrets."""
        return _accounts(self._document)

    @property
    def white_addresses(self) -> list[str]:
        return [str(text) for text in lines_of(self._document, GLOBAL_WHITE)]

    @property
    def version(self) -> DataVersion:
        found = self._document.get(_VERSION)
        first = found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}
        timestamp, counter = first.get("timestamp"), first.get("counter")
        return DataVersion(timestamp if isinstance(timestamp, int) else 0, counter if isinstance(counter, int) else 0)

    def put_account(self, entry: Mapping[str, object]) -> None:
        """Add an account, or change the fields of an existing one. Fields that are missing in `entry` are not changed, but a
        new secret removes the previous one. Raises AclError."""

        def change(document: Document) -> None:
            document[ACCOUNTS] = accounts = _accounts(document)
            known = next((account for account in accounts if str(account["accessKey"]) == entry["accessKey"]), None)
            if known is None:
                accounts.append(dict(entry))
            else:
                if "secretKey" in entry:  # the previous secret may be compromised
                    known.pop(FORMER, None)
                known.update(entry)
            read_account(known or accounts[-1])

        self._change(change)

    def change_account(self, access_key: str, change_entry: Callable[[Document], None]) -> None:
        """Change an account's entry in the file. Raises AclError, including for an account that does not exist."""

        def change(document: Document) -> None:
            entry = next((item for item in _accounts(document) if str(item["accessKey"]) == access_key), None)
            if entry is None:
                raise AclError(f"there is no account {access_key[:100]}")
            change_entry(entry)

        self._change(change)

    def delete_account(self, access_key: str) -> None:
        """Delete an account. Raises AclError."""

        def change(document: Document) -> None:
            if access_key not in self.policy.accounts:
                raise AclError(f"there is no account {access_key[:100]}")
            document[ACCOUNTS] = [entry for entry in _accounts(document) if str(entry["accessKey"]) != access_key]

        self._change(change)

    def put_white_addresses(self, addresses: Sequence[str]) -> None:
        """Replace the global white addresses. Raises AclError."""

        def change(document: Document) -> None:
            document[GLOBAL_WHITE] = list(addresses)

        self._change(change)

    def _change(self, change: Callable[[Document], None]) -> None:
        """Change the present content of the file, which may be newer than the policy in force. The file is written
        first, so that a change that cannot be stored does not take effect. Raises AclError."""
        with self._reading:
            self._change_file(change)

    def _change_file(self, change: Callable[[Document], None]) -> None:
        import yaml

        if self._watched.has_changed:
            self._load_changed()
        else:
            self._load()
        document = deepcopy(self._document)
        change(document)
        policy = read_policy(document)
        version = {"counter": self.version.counter + 1, "timestamp": int(time.time() * 1000)}
        document[_VERSION] = [version]
        text = yaml.safe_dump(document, allow_unicode=True, sort_keys=False)
        try:
            replace_file(self.path, text.encode())
        except OSError as error:
            raise AclError(f"cannot write {self.path}: {error.strerror}") from None
        self._put(policy, document)
        self._watched.written()


def lines_of(entry: Mapping[str, object], name: str) -> list[object]:
    """Return the lines of a checked mapping's list; an empty list if it has none."""
    found = entry.get(name)
    return found if isinstance(found, list) else []


def _accounts(document: Document) -> list[Document]:
    """Return the accounts of a document, which can be changed."""
    return [entry for entry in lines_of(document, ACCOUNTS) if isinstance(entry, dict)]


def _line_text(error: Exception) -> str:
    """Return the line of the error, but not its text, which may contain a secret."""
    mark = getattr(error, "problem_mark", None)
    return f": see line {mark.line + 1}" if mark is not None else ""
