"""Apache's `plain_acl.yml`: accounts, their permissions, and the addresses that need no account.

    globalWhiteRemoteAddresses:
    - 10.10.103.*
    accounts:
    - accessKey: orders-service       # more than 6 characters, as its secret
      secretKey: a-long-secret
      formerSecretKey:                # ours: clients that still sign with it are believed, too
      whiteRemoteAddress:             # from there no signature is asked for
      admin: false
      defaultTopicPerm: DENY          # DENY, PUB, SUB or PUB|SUB; DENY if it is missing
      defaultGroupPerm: SUB
      topicPerms:
      - orders=PUB|SUB
      groupPerms:
      - shipping=SUB

Meaning and defaults are those of Apache's PlainPermissionManager. Where Apache reads a mistake as DENY, such as
`PUB,SUB`, this file is refused with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from functools import lru_cache
from typing import Any, Final

from ...protocol import names
from ...protocol.signature import Signer
from .addresses import AddressPattern, PatternError, parse_pattern

GLOBAL_WHITE: Final = "globalWhiteRemoteAddresses"
ACCOUNTS: Final = "accounts"
FORMER: Final = "formerSecretKey"
MIN_KEY_CHARS: Final = 7  # Apache: more than 6


class Permission(IntEnum):
    """An account's permission for a topic or group; 0 is DENY. Bits, but no IntFlag, whose & takes twelve times as long."""

    DENY = 0
    PUB = 4
    SUB = 8
    ANY = PUB | SUB  # as a need: either will do


_PERMISSIONS: Final = {
    "DENY": Permission.DENY,
    "PUB": Permission.PUB,
    "SUB": Permission.SUB,
    "PUB|SUB": Permission.ANY,
    "SUB|PUB": Permission.ANY,
}


class AclError(ValueError):
    """The accounts cannot be used as they are. The text says what to change, and holds no secret."""


@dataclass(frozen=True, slots=True)
class Account:
    """`resources`: the permissions for single topics, and for groups under the names of their retry topics, as Apache's.
    An administrator without any single permission may do everything. `former`: of the secret that clients are just changing,
    which proves as much."""

    access_key: str
    signer: Signer = field(repr=False)
    former: Signer | None = field(repr=False)
    white: AddressPattern
    is_admin: bool
    default_topic: Permission
    default_group: Permission
    resources: Mapping[str, Permission]

    def proven_by(self, has_signed: Callable[[Signer], bool]) -> Signer | None:
        """The secret that something is signed with; None if it is neither."""
        if has_signed(self.signer):
            return self.signer
        return self.former if self.former is not None and has_signed(self.former) else None

    def may(self, resource: str, needed: Permission) -> bool:
        """`resource`: a topic, or the retry topic of a group. A permission for a single name comes first. Without one, an
        account that may use a group may use its dead letters, and inner topics are for administrators."""
        owned = self.resources.get(resource)
        if owned is None:
            if self.is_admin and not self.resources:
                return True
            kind = _kind_of(resource)
            if kind is _Kind.DEAD_LETTERS:
                return self.may(names.retry_topic(resource.removeprefix(names.DLQ_PREFIX)), Permission.SUB)
            if kind is _Kind.INNER:
                return self.is_admin
            owned = self.default_group if kind is _Kind.GROUP else self.default_topic
        return bool(owned & needed)


class _Kind(Enum):
    """Whose permission a name needs."""

    TOPIC = auto()
    GROUP = auto()
    DEAD_LETTERS = auto()
    INNER = auto()


@lru_cache(4096)
def _kind_of(resource: str) -> _Kind:
    if resource.startswith(names.RETRY_PREFIX):
        return _Kind.GROUP
    if resource.startswith(names.DLQ_PREFIX):
        return _Kind.DEAD_LETTERS
    return _Kind.INNER if names.is_inner_topic(resource) else _Kind.TOPIC


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that one version of the file says."""

    accounts: Mapping[str, Account]
    white: tuple[AddressPattern, ...]

    def is_white(self, host: str) -> bool:
        return any(pattern.matches(host) for pattern in self.white)


def read_policy(document: Any) -> Policy:
    """The policy of a YAML document. Raises AclError."""
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise AclError(f"the ACL file is not a mapping; it needs {ACCOUNTS!r} and may have {GLOBAL_WHITE!r}")
    accounts: dict[str, Account] = {}
    for entry in _list(document, ACCOUNTS, "the ACL file"):
        account = read_account(entry)
        if account.access_key in accounts:
            raise AclError(f"the account {account.access_key} is there twice")
        accounts[account.access_key] = account
    white = [_pattern(text, GLOBAL_WHITE) for text in _list(document, GLOBAL_WHITE, "the ACL file")]
    return Policy(accounts, tuple(white))


def read_account(entry: Any) -> Account:
    """Raises AclError."""
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


def _key(entry: Mapping[Any, Any], name: str, where: str) -> str:
    value = entry.get(name)
    if isinstance(value, int) and not isinstance(value, bool):  # 12345678 without quotes, which Apache reads as a text
        value = str(value)
    if not isinstance(value, str) or len(value) < MIN_KEY_CHARS:
        raise AclError(
            f"{where} needs {name}, of at least {MIN_KEY_CHARS} characters, in quotes if it is not a plain word"
        )
    return value


def _list(entry: Mapping[Any, Any], name: str, where: str) -> list[Any]:
    found = entry.get(name)
    if found is None:
        return []
    if not isinstance(found, list):
        raise AclError(f"{name} of {where} is not a list; write one item a line, each after a dash")
    return found


def _pattern(text: Any, where: str) -> AddressPattern:
    if text is None:
        return AddressPattern(())
    try:
        return parse_pattern(str(text))
    except PatternError as error:
        raise AclError(f"{where}: {error}") from None


def _permission(text: Any, where: str) -> Permission:
    found = _PERMISSIONS.get(text.strip() if isinstance(text, str) else text or "DENY")
    if found is None:
        raise AclError(f"{where} has the permission {str(text)[:40]!r}; allowed: {', '.join(_PERMISSIONS)}")
    return found


def _resources(entry: Mapping[Any, Any], name: str, where: str, prefix: str) -> dict[str, Permission]:
    found: dict[str, Permission] = {}
    for line in _list(entry, name, where):
        resource, equals, permission = str(line).partition("=")
        if not equals or not resource.strip():
            raise AclError(f"{where} has {str(line)[:80]!r} in {name}; write name=PUB, SUB, PUB|SUB or DENY")
        found[prefix + resource.strip()] = _permission(permission, where)
    return found
