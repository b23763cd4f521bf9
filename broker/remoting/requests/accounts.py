"""mqadmin's ACL commands. Apache writes to any file that the request names; here it can only be the broker's own.

A thread changes the file: 1,000 accounts take 0.4 s, in which nobody else would be served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import orjson
import structlog

from ....protocol import bodies
from ....protocol.codes import ResponseCode
from ....protocol.frame import Frame
from ....protocol.headers import AccountName, AclVersion, PutAccount, WhiteAddresses, read, write
from ...access.accounts import AclError
from ...access.file import AclFile
from ...broker import Broker
from ..answers import Buffers, Refused, answer
from ..connection import Connection
from ..identification import identify as prove

log = structlog.get_logger("rocketlet.acl")

_SHOWN: Final = (
    "accessKey",
    "whiteRemoteAddress",
    "admin",
    "defaultTopicPerm",
    "defaultGroupPerm",
    "topicPerms",
    "groupPerms",
)


async def put_account(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """UPDATE_AND_CREATE_ACL_CONFIG: fields that are not given stay as they are, but for `admin`, as Apache's."""
    header = read(PutAccount, frame.ext)
    given: dict[str, Any] = {
        "whiteRemoteAddress": header.white_remote_address,
        "defaultTopicPerm": header.default_topic_perm or None,
        "defaultGroupPerm": header.default_group_perm or None,
        "topicPerms": _parts(header.topic_perms),
        "groupPerms": _parts(header.group_perms),
    }
    entry: dict[str, Any] = {"accessKey": header.access_key, "admin": header.admin}
    if header.secret_key:  # Apache's keeps the secret when none is sent (PlainPermissionManager.updateAccessConfig)
        entry["secretKey"] = header.secret_key
    entry |= {name: value for name, value in given.items() if value is not None}
    code = ResponseCode.UPDATE_AND_CREATE_ACL_CONFIG_FAILED
    file = _file(broker, code)

    def change() -> None:
        file.put_account(entry)
        log.info("account_put", account=header.access_key, peer=connection.peer)

    return await _changed(frame, code, change)


async def delete_account(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    name = read(AccountName, frame.ext).access_key
    file = _file(broker, ResponseCode.DELETE_ACL_CONFIG_FAILED)

    def change() -> None:
        file.delete_account(name)
        log.info("account_deleted", account=name, peer=connection.peer)

    return await _changed(frame, ResponseCode.DELETE_ACL_CONFIG_FAILED, change)


async def put_white_addresses(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    header = read(WhiteAddresses, frame.ext)
    code = ResponseCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED
    file = _file(broker, code)
    if header.acl_file_full_path and header.acl_file_full_path != str(file.path):
        raise Refused(code, f"this broker has one ACL file, {file.path}; leave the file's name out")
    addresses = _parts(header.global_white_addrs) or []

    def change() -> None:
        file.put_white_addresses(addresses)
        log.info("white_addresses_put", peer=connection.peer)

    return await _changed(frame, code, change)


def acl_version(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    file = _file(broker, ResponseCode.SYSTEM_ERROR)
    version = bodies.version_json(file.version)
    config = broker.config
    header = AclVersion(
        orjson.dumps(version).decode(),
        orjson.dumps({str(file.path): version}).decode(),
        config.name,
        config.address,
        config.cluster,
    )
    return answer(frame, ext=write(header))


def acl_config(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """GET_BROKER_CLUSTER_ACL_CONFIG. Apache's answer holds the secrets, for which 4.9.8 gave the request up; this one
    does not."""
    file = _file(broker, ResponseCode.SYSTEM_ERROR)
    accounts = [{name: entry[name] for name in _SHOWN if entry.get(name) is not None} for entry in file.entries]
    return answer(frame, body=orjson.dumps({"globalWhiteAddrs": file.white_addresses, "plainAccessConfigs": accounts}))


def identify(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    if broker.acl is None:
        raise Refused(ResponseCode.NO_PERMISSION, "this broker has no accounts; nobody needs to identify itself")
    prove(broker.acl, connection, frame)
    return answer(frame)


def _file(broker: Broker, code: int) -> AclFile:
    if broker.acl is None:
        raise Refused(code, "this broker has no accounts; start it with --acl FILE")
    return broker.acl.file


async def _changed(frame: Frame, code: int, change: Callable[[], None]) -> Buffers:
    try:
        await asyncio.to_thread(change)
    except AclError as error:
        return answer(frame, code, remark=str(error))
    return answer(frame)


def _parts(text: str | None) -> list[str] | None:
    """The pieces between commas; braces keep theirs, as in 10.0.0.{1,2}."""
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
