"""Takes other brokers' words on groups with foreign members, and checks that they come from those brokers.

Without accounts anybody who reaches the port can speak in a broker's name. So a broker asks the one of that name, at the
address that the name server has for it, whether the word is its own, once for each connection. A token is for one listener,
which cannot use it with another broker. With accounts only an administrator may speak, and nobody is asked.
"""

from __future__ import annotations

from hmac import compare_digest

import structlog

from ....protocol import names
from ....protocol.agreement import Members, decode_members
from ....protocol.codes import RequestCode, ResponseCode
from ....protocol.config import MAX_ID_CHARS
from ....protocol.frame import Frame
from ....protocol.headers import AgreeOnMembers, ConfirmWord, read, write
from ...broker import Broker
from ..answers import Buffers, answer
from ..connection import Connection

log = structlog.get_logger("rocketlet.groups")


async def agree_on_members(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """Our own: another broker says how far it is with a group that has foreign members on both."""
    header = read(AgreeOnMembers, frame.ext)
    fault = names.group_fault(header.consumer_group)
    if fault:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark=fault)
    for text in (header.broker_name, header.digest, header.token):
        if len(text) > MAX_ID_CHARS:
            remark = f"a name, digest or token has {len(text)} characters; {MAX_ID_CHARS} are allowed"
            return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    members = decode_members(frame.body)
    address = broker.draining.agreement.address(header.consumer_group, header.broker_name)
    if address is None or broker.acl is not None or connection.broker_name == header.broker_name:
        broker.draining.heard(header, members)  # without an address it is no peer, and changes nothing
        return answer(frame)
    if connection.is_proving or not broker.peers.may_ask:
        return answer(frame, ResponseCode.SYSTEM_BUSY, remark="other brokers are being asked whether they said so")
    connection.is_proving = True
    return await _hear_if_confirmed(broker, connection, frame, address, header, members)


async def _hear_if_confirmed(
    broker: Broker, connection: Connection, frame: Frame, address: str, header: AgreeOnMembers, members: Members
) -> Buffers:
    question = Frame(RequestCode.CONFIRM_WORD, ext=write(ConfirmWord(broker.config.name, header.token)))
    try:
        is_confirmed = await broker.peers.confirms(address, question)
    finally:
        connection.is_proving = False
    if is_confirmed:
        connection.broker_name = header.broker_name
        broker.draining.heard(header, members)
        return answer(frame)
    if connection.is_news("peer_not_believed"):
        log.warning("peer_not_believed", peer=connection.peer, broker=header.broker_name, address=address)
    remark = f"{header.broker_name}, asked at {address}, does not say that this word is its own"
    return answer(frame, ResponseCode.NO_PERMISSION, remark=remark)


def confirm_word(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """Our own: another broker asks whether this one has said something to it."""
    header = read(ConfirmWord, frame.ext)
    if compare_digest(header.token.encode(), broker.draining.agreement.token(header.broker_name).encode()):
        return answer(frame)
    return answer(frame, ResponseCode.NO_PERMISSION, remark=f"{broker.config.name} did not say so")
