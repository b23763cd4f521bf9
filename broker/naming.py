"""The name server's requests."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from ..protocol import bodies
from ..protocol.codes import ResponseCode
from ..protocol.frame import Frame
from ..protocol.headers import BrokerName, HeaderError, RegisterBroker, TopicName, read
from .answers import Buffers, answer

if TYPE_CHECKING:
    from .connection import Connection
    from .routes import Routes


def register_broker(routes: Routes, connection: Connection, frame: Frame) -> Buffers:
    header = read(RegisterBroker, frame.ext)
    if header.body_crc32 and header.body_crc32 != zlib.crc32(frame.body) & 0x7FFFFFFF:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark="crc32 not match")
    if header.compressed:
        raise HeaderError("compressed registrations are not taken; set compressedRegister=false")
    version, topics = bodies.decode_registration(frame.body)
    master = routes.register(
        header.cluster_name,
        header.broker_name,
        header.broker_id,
        header.broker_addr,
        version,
        topics,
        connection,
        header.external_addr,
    )
    connection.on_lost(routes.drop)
    ext = {"masterAddr": master} if header.broker_id and master else {}
    return answer(frame, ext=ext)


def unregister_broker(routes: Routes, connection: Connection, frame: Frame) -> Buffers:
    header = read(BrokerName, frame.ext)
    routes.unregister(header.broker_name, header.broker_addr)
    return answer(frame)


def route(routes: Routes, connection: Connection, frame: Frame) -> Buffers:
    topic = read(TopicName, frame.ext).topic
    found = routes.route(topic, external=connection.is_external)
    if found is None:
        remark = f"No topic route info in name server for the topic: {topic}"
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=remark)
    return answer(frame, body=bodies.encode_route(found))


def cluster(routes: Routes, connection: Connection, frame: Frame) -> Buffers:
    return answer(frame, body=bodies.encode_cluster(routes.brokers(external=connection.is_external)))


def topics(routes: Routes, connection: Connection, frame: Frame) -> Buffers:
    return answer(frame, body=bodies.encode_topic_list(routes.topics()))


def delete_topic(routes: Routes, connection: Connection, frame: Frame) -> Buffers:
    routes.delete_topic(read(TopicName, frame.ext).topic)
    return answer(frame)


def data_version(routes: Routes, connection: Connection, frame: Frame) -> Buffers:
    """QUERY_DATA_VERSION: whether a broker has to send its topics again."""
    header = read(BrokerName, frame.ext)
    known = routes.version(header.broker_addr)
    changed = known is None or known != bodies.decode_data_version(frame.body)
    if not changed:
        routes.refresh(header.broker_addr)
    body = bodies.encode_data_version(known) if known else b""
    return answer(frame, ext={"changed": changed}, body=body)
