"""Remoting requests about accounts: mqadmin's ACL commands of 4.9, and the users and ACLs of 5.x mapped to plain_acl.yml."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

import orjson
import structlog

from ...protocol import admin_bodies, names
from ...protocol.admin_bodies import AclEntry, UserAccount
from ...protocol.bodies import encode_json
from ...protocol.codes import ResponseCode
from ...protocol.frame import Frame
from ...protocol.headers import (
    AccountName,
    AclFilter,
    AclSubject,
    AclVersion,
    DeleteAcl,
    PutAccount,
    UserFilter,
    UserName,
    WhiteAddresses,
    read,
    write,
)
from ..access import AclError, AclFile, Document, Permission, lines_of
from ..broker import BrokerController
from .connection import RemotingConnection
from .permissions import identify as prove
from .responses import Buffers, ResponseError, answer

log = structlog.get_logger("rocketlet.acl")


# ------------------------------------------------------------------------------
# mqadmin's ACL commands of 4.9. Apache's broker changes any file that the request names; this broker changes only its
# own ACL file.
#
# The file is changed in a thread, because with 1,000 accounts that takes 0.4 s, in which no client would be served.


_SHOWN: Final = (
    "accessKey",
    "whiteRemoteAddress",
    "admin",
    "defaultTopicPerm",
    "defaultGroupPerm",
    "topicPerms",
    "groupPerms",
)


async def put_account(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """UPDATE_AND_CREATE_ACL_CONFIG: create or change an account. Fields that are not given stay unchanged, except
    `admin`, which becomes false, as with Apache's broker, and the previous secret, which ends with a new one."""
    header = read(PutAccount, frame.ext)
    given: Document = {
        "whiteRemoteAddress": header.white_remote_address,
        "defaultTopicPerm": header.default_topic_perm or None,
        "defaultGroupPerm": header.default_group_perm or None,
        "topicPerms": _parts(header.topic_perms),
        "groupPerms": _parts(header.group_perms),
    }
    entry: Document = {"accessKey": header.access_key, "admin": header.admin}
    # without one, the secret stays, as with Apache's broker (PlainPermissionManager.updateAccessConfig)
    if header.secret_key:
        entry["secretKey"] = header.secret_key
    entry |= {name: value for name, value in given.items() if value is not None}
    code = ResponseCode.UPDATE_AND_CREATE_ACL_CONFIG_FAILED
    file = _file(broker, code)

    def change() -> None:
        file.put_account(entry)
        log.info("account_put", account=header.access_key, peer=connection.peer)

    return await _changed(frame, code, change)


async def delete_account(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    name = read(AccountName, frame.ext).access_key
    file = _file(broker, ResponseCode.DELETE_ACL_CONFIG_FAILED)

    def change() -> None:
        file.delete_account(name)
        log.info("account_deleted", account=name, peer=connection.peer)

    return await _changed(frame, ResponseCode.DELETE_ACL_CONFIG_FAILED, change)


async def put_white_addresses(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(WhiteAddresses, frame.ext)
    code = ResponseCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED
    file = _file(broker, code)
    if header.acl_file_full_path and header.acl_file_full_path != str(file.path):
        raise ResponseError(code, f"this broker has one ACL file, {file.path}; leave the file's name out")
    addresses = _parts(header.global_white_addrs) or []

    def change() -> None:
        file.put_white_addresses(addresses)
        log.info("white_addresses_put", peer=connection.peer)

    return await _changed(frame, code, change)


def acl_version(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    file = _file(broker, ResponseCode.SYSTEM_ERROR)
    config = broker.config
    header = AclVersion(
        encode_json(file.version).decode(),
        encode_json({str(file.path): file.version}).decode(),
        config.name,
        config.address,
        config.cluster,
    )
    return answer(frame, ext=write(header))


def acl_config(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """GET_BROKER_CLUSTER_ACL_CONFIG. The response has no secrets. The response of Apache's broker had them, so Apache's
    4.9.8 removed the request."""
    file = _file(broker, ResponseCode.SYSTEM_ERROR)
    accounts = [{name: entry[name] for name in _SHOWN if entry.get(name) is not None} for entry in file.entries]
    return answer(frame, body=orjson.dumps({"globalWhiteAddrs": file.white_addresses, "plainAccessConfigs": accounts}))


def identify(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    if broker.acl is None:
        raise ResponseError(
            ResponseCode.NO_PERMISSION, "this broker has no accounts, so no client needs to authenticate"
        )
    prove(broker.acl, connection, frame)
    return answer(frame)


def _file(broker: BrokerController, code: int) -> AclFile:
    if broker.acl is None:
        raise ResponseError(code, "this broker has no accounts; start it with --acl FILE")
    return broker.acl.file


async def _changed(frame: Frame, code: int, change: Callable[[], None]) -> Buffers:
    try:
        await asyncio.to_thread(change)
    except AclError as error:
        return answer(frame, code, remark=str(error))
    return answer(frame)


def _parts(text: str | None) -> list[str] | None:
    """Return the pieces between commas; None for None. Commas within braces do not separate, as in 10.0.0.{1,2}."""
    if text is None:
        return None
    pieces, depth = [""], 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if character == "," and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces if piece.strip()]


# ------------------------------------------------------------------------------
# Users and ACLs of 5.x (AUTH_CREATE_USER to AUTH_LIST_ACL), as far as plain_acl.yml can express them.
#
#     user                                      accessKey; the password is its secretKey
#     userType Super, Normal                    admin: true, false
#     Topic:orders, Allow, Pub and/or Sub       topicPerms: orders=PUB, SUB or PUB|SUB
#     Topic:orders, Deny, Pub and Sub           topicPerms: orders=DENY
#     Group:shipping, Allow or Deny, Sub        groupPerms: shipping=SUB or DENY
#     Topic:*, Group:*                          defaultTopicPerm, defaultGroupPerm
#
# Everything else is refused with a reason: other actions and resources (userType Super has them), prefixes such as
# `Topic:orders-*`, source addresses, and users that are disabled. Only Pub for a group is ignored if Sub is given, too.
# Responses contain no passwords.


_SUPER, _NORMAL = "super", "normal"
_SUBJECT: Final = "User:"
_ACTIONS: Final = {"pub": Permission.PUB, "sub": Permission.SUB, "all": Permission.ANY, "any": Permission.ANY}
_FIELDS: Final = {"topic": ("topicPerms", "defaultTopicPerm"), "group": ("groupPerms", "defaultGroupPerm")}
_TEXTS: Final = {
    Permission.DENY: "DENY",
    Permission.PUB: "PUB",
    Permission.SUB: "SUB",
    Permission.ANY: "PUB|SUB",
}
_EVERY: Final = "*"


async def create_user(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    name, user = read(UserName, frame.ext).username, admin_bodies.decode_user(frame.body)
    file = _file(broker, ResponseCode.SYSTEM_ERROR)
    entry: Document = {"accessKey": name, "secretKey": user.password, "admin": _is_super(user)}

    def change() -> None:
        if name in file.policy.accounts:
            raise AclError(f"the user {name[:100]} exists already; change it with updateUser")
        file.put_account(entry)
        log.info("account_put", account=name, peer=connection.peer)

    return await _changed(frame, ResponseCode.SYSTEM_ERROR, change)


async def update_user(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """AUTH_UPDATE_USER: change a user. Fields that are not given stay unchanged."""
    name, user = read(UserName, frame.ext).username, admin_bodies.decode_user(frame.body)
    file = _file_with(broker, name)
    entry: Document = {"accessKey": name}
    if user.user_type:
        entry["admin"] = _is_super(user)
    else:
        _is_super(user)  # refuse an unsupported status, even if the type is not given
    if user.password:
        entry["secretKey"] = user.password

    def change() -> None:
        file.put_account(entry)
        log.info("account_put", account=name, peer=connection.peer)

    return await _changed(frame, ResponseCode.SYSTEM_ERROR, change)


async def delete_user(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """AUTH_DELETE_USER: delete a user with its permissions. Deleting a user that does not exist succeeds, as with
    Apache's broker."""
    name = read(UserName, frame.ext).username
    file = _file(broker, ResponseCode.SYSTEM_ERROR)
    if name not in file.policy.accounts:
        return answer(frame)

    def change() -> None:
        file.delete_account(name)
        log.info("account_deleted", account=name, peer=connection.peer)

    return await _changed(frame, ResponseCode.SYSTEM_ERROR, change)


def get_user(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    name = read(UserName, frame.ext).username
    return answer(frame, body=encode_json(_user_of(_entry(_file_with(broker, name), name))))


def list_users(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    part = read(UserFilter, frame.ext).filter_ or ""
    file = _file(broker, ResponseCode.SYSTEM_ERROR)
    return answer(
        frame, body=encode_json([_user_of(entry) for entry in file.entries if part in str(entry["accessKey"])])
    )


def _is_super(user: UserAccount) -> bool:
    """Return True for the user type Super. Raises ResponseError for an unknown type, and for a disabled user."""
    if (user.user_status or "enable").lower() != "enable":
        raise ResponseError(
            ResponseCode.INVALID_PARAMETER, "userStatus: accounts cannot be disabled; delete the user instead"
        )
    kind = (user.user_type or _NORMAL).lower()
    if kind not in (_SUPER, _NORMAL):
        raise ResponseError(
            ResponseCode.INVALID_PARAMETER, f"userType: got {user.user_type!r}; expected Super or Normal"
        )
    return kind == _SUPER


def _user_of(entry: Document) -> dict[str, object]:
    kind = "Super" if entry.get("admin") else "Normal"
    return {"username": str(entry["accessKey"]), "userType": kind, "userStatus": "enable"}


def _entry(file: AclFile, name: str) -> Document:
    return next(entry for entry in file.entries if str(entry["accessKey"]) == name)


def _file_with(broker: BrokerController, name: str) -> AclFile:
    """Return the ACL file. Raises ResponseError if the broker has no ACL file, or the file does not have this user."""
    file = _file(broker, ResponseCode.SYSTEM_ERROR)
    if name not in file.policy.accounts:
        raise ResponseError(ResponseCode.USER_NOT_EXIST, f"there is no user {name[:100]}; create it with createUser")
    return file


# Permissions


async def put_acl(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """AUTH_CREATE_ACL and AUTH_UPDATE_ACL: set a user's permissions for the given resources. Permissions for other
    resources stay unchanged."""
    name = _user_name(read(AclSubject, frame.ext).subject)
    wanted = [_permission(item) for item in admin_bodies.decode_acl(frame.body)]
    return await _change_permissions(broker, connection, frame, name, wanted)


async def delete_acl(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    """AUTH_DELETE_ACL: delete a user's permission for one resource, or all permissions of the user if no resource is
    given."""
    header = read(DeleteAcl, frame.ext)
    name = _user_name(header.subject)
    entry = _entry(_file_with(broker, name), name)
    if not header.resource:
        removed = [(kind, resource, None) for kind, resource, _ in _permissions(entry)]
        return await _change_permissions(broker, connection, frame, name, removed)
    kind, resource = _resource(header.resource)
    if (kind, resource) not in {item[:2] for item in _permissions(entry)}:
        raise ResponseError(
            ResponseCode.POLICY_NOT_EXIST, f"the user {name} has no permission for {header.resource[:100]}"
        )
    return await _change_permissions(broker, connection, frame, name, [(kind, resource, None)])


def get_acl(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    name = _user_name(read(AclSubject, frame.ext).subject)
    return answer(frame, body=encode_json(_acl_of(_entry(_file_with(broker, name), name))))


def list_acls(broker: BrokerController, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(AclFilter, frame.ext)
    found = [_acl_of(entry, header.resource_filter or "") for entry in _file(broker, ResponseCode.SYSTEM_ERROR).entries]
    wanted = header.subject_filter or ""
    return answer(frame, body=encode_json([acl for acl in found if acl["policies"] and wanted in str(acl["subject"])]))


_Change = tuple[str, str, Permission | None]
"""`topic` or `group`, the name or `*`, and the permission; None deletes it."""


async def _change_permissions(
    broker: BrokerController, connection: RemotingConnection, frame: Frame, name: str, changes: Iterable[_Change]
) -> Buffers:
    file = _file_with(broker, name)

    def change() -> None:
        file.change_account(name, lambda entry: _apply(entry, changes))
        log.info("account_put", account=name, peer=connection.peer)

    return await _changed(frame, ResponseCode.SYSTEM_ERROR, change)


def _apply(entry: Document, changes: Iterable[_Change]) -> None:
    for kind, resource, permission in changes:
        single, default = _FIELDS[kind]
        if resource == _EVERY:
            entry.pop(default, None)
            if permission is not None:
                entry[default] = _TEXTS[permission]
            continue
        lines = [line for line in lines_of(entry, single) if str(line).partition("=")[0].strip() != resource]
        entry[single] = lines if permission is None else [*lines, f"{resource}={_TEXTS[permission]}"]


def _permissions(entry: Document) -> list[tuple[str, str, str]]:
    """Return the permissions of an account: for each, `topic` or `group`, the name or `*`, and the permission as
    text."""
    found: list[tuple[str, str, str]] = []
    for kind, (single, default) in _FIELDS.items():
        if entry.get(default):
            found.append((kind, _EVERY, str(entry[default])))
        for line in lines_of(entry, single):
            resource, _, text = str(line).partition("=")
            found.append((kind, resource.strip(), text.strip()))
    return found


def _acl_of(entry: Document, part: str = "") -> dict[str, object]:
    """Return an account's permissions in the form of 5.x, for resources whose text contains `part`."""
    entries = []
    for kind, resource, text in _permissions(entry):
        denied = text == "DENY"
        actions = [action for action in ("Pub", "Sub") if denied or action.upper() in text]
        shown = f"{kind.capitalize()}:{resource}"
        if part in shown:
            decision = "Deny" if denied else "Allow"
            entries.append({"resource": shown, "actions": actions, "sourceIps": [], "decision": decision})
    policies = [{"policyType": "Custom", "entries": entries}] if entries else []
    return {"subject": f"{_SUBJECT}{entry['accessKey']}", "policies": policies}


def _user_name(subject: str) -> str:
    """Return the name in `User:NAME`. Raises ResponseError for other text."""
    kind, colon, name = subject.partition(":")
    if not colon or kind.lower() != "user" or not name:
        raise ResponseError(ResponseCode.INVALID_PARAMETER, f"subject: got {subject[:100]!r}; expected User:NAME")
    return name


def _resource(text: str) -> tuple[str, str]:
    """Return `topic` or `group`, and the name or `*`. Raises ResponseError for another resource or an invalid name."""
    kind, _, name = text.partition(":")
    if kind.lower() not in _FIELDS or not name or (_EVERY in name and name != _EVERY):
        reason = f"resource: got {text[:100]!r}; expected Topic:NAME, Group:NAME, Topic:* or Group:*"
        raise ResponseError(ResponseCode.INVALID_PARAMETER, f"{reason}; users of the type Super may do everything")
    fault = None if name == _EVERY else (names.topic_fault if kind.lower() == "topic" else names.group_fault)(name)
    if fault:
        raise ResponseError(ResponseCode.INVALID_PARAMETER, f"resource: {fault}")
    return kind.lower(), name


def _permission(item: AclEntry) -> _Change:
    """Return the permission that an entry of an ACL sets. Raises ResponseError for an entry that plain_acl.yml cannot
    express."""
    kind, name = _resource(item.resource)
    if item.source_ips:
        reason = f"sourceIps of {item.resource}: permissions hold for every address; leave the addresses out"
        raise ResponseError(ResponseCode.INVALID_PARAMETER, reason)
    permission = Permission.DENY
    for action in item.actions or ():
        if action.lower() not in _ACTIONS:
            reason = f"actions of {item.resource}: got {action[:40]!r}; expected Pub, Sub or All, or a user of the type Super"
            raise ResponseError(ResponseCode.INVALID_PARAMETER, reason)
        permission = Permission(permission | _ACTIONS[action.lower()])
    if kind == "group" and permission:
        permission = Permission.SUB if permission & Permission.SUB else Permission.DENY
    if not permission:
        raise ResponseError(
            ResponseCode.INVALID_PARAMETER, f"actions of {item.resource}: expected Sub, or Pub for a topic"
        )
    if item.decision.lower() == "deny":
        if kind == "topic" and permission is not Permission.ANY:
            reason = f"decision of {item.resource}: Deny needs Pub and Sub; to deny one of them, allow the other"
            raise ResponseError(ResponseCode.INVALID_PARAMETER, reason)
        return kind, name, Permission.DENY
    if item.decision.lower() != "allow":
        reason = f"decision of {item.resource}: got {item.decision[:40]!r}; expected Allow or Deny"
        raise ResponseError(ResponseCode.INVALID_PARAMETER, reason)
    return kind, name, permission
