"""The name server's requests."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import orjson
import structlog

from ...protocol import admin_bodies, bodies
from ...protocol.bodies import LOOKS, Work
from ...protocol.codes import ResponseCode
from ...protocol.config import MAX_ID_CHARS
from ...protocol.frame import Frame
from ...protocol.headers import (
    BrokerName,
    BrokerNameOnly,
    ClusterName,
    DepartedCount,
    KvKey,
    KvNamespace,
    KvValue,
    RegisterBroker,
    TopicName,
    read,
    write,
)
from ..access import shown_to
from ..nameserver import Routes
from .connection import RemotingConnection
from .responses import Buffers, ResponseError, answer

log = structlog.get_logger("rocketlet.nameserver")

ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"


def register_broker(routes: Routes, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    header = read(RegisterBroker, frame.ext)
    for text in (header.cluster_name, header.broker_name, header.broker_addr, header.external_addr or ""):
        if len(text) > MAX_ID_CHARS:
            remark = f"a name or address has {len(text)} characters; maximum {MAX_ID_CHARS}"
            return answer(frame, ResponseCode.SYSTEM_ERROR, remark=remark)
    if header.body_crc32 and header.body_crc32 != zlib.crc32(frame.body) & 0x7FFFFFFF:
        return answer(frame, ResponseCode.SYSTEM_ERROR, remark="crc32 not match")
    yield
    _refuse_if_ours(routes, connection, header.broker_name, header.broker_addr)
    decode = bodies.decode_compressed_registration if header.compressed else bodies.decode_registration
    version, topics = yield from decode(frame.body)
    _refuse_if_ours(routes, connection, header.broker_name, header.broker_addr)
    master = yield from routes.registering(
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
    order = routes.kv.get(ORDER_NAMESPACE)
    return answer(frame, ext=ext, body=admin_bodies.encode_table(order) if order else b"")


def unregister_broker(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(BrokerName, frame.ext)
    _refuse_if_ours(routes, connection, header.broker_name, header.broker_addr)
    routes.unregister(header.broker_name, header.broker_addr)
    return answer(frame)


def _refuse_if_ours(routes: Routes, connection: RemotingConnection, name: str, address: str) -> None:
    """Raises ResponseError for a client that registers or unregisters the name or address of the broker in this process,
    because one such request would direct all clients elsewhere."""
    fault = routes.ownership_fault(name, address)
    if fault:
        if connection.is_news("registration_refused"):
            log.warning("registration_refused", peer=connection.peer, broker=name, address=address, reason=fault)
        raise ResponseError(ResponseCode.NO_PERMISSION, fault)


def route(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    topic = read(TopicName, frame.ext).topic
    found = routes.route(topic, connection)
    if found is None:
        remark = f"No topic route info in name server for the topic: {topic}"
        return answer(frame, ResponseCode.TOPIC_NOT_EXIST, remark=remark)
    return answer(frame, body=bodies.encode_route(found))


def cluster(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    departed = len(routes.departed())
    ext = write(DepartedCount(departed)) if departed else {}
    return answer(frame, ext=ext, body=bodies.encode_cluster(routes.brokers(connection)))


def departed(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    """GET_DEPARTED_BROKERS, Rocketlet's own request (see `Routes.departed`)."""
    return answer(frame, body=admin_bodies.encode_departed(routes.departed()))


def forget_broker(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    """FORGET_BROKER, Rocketlet's own request: remove a broker from the list of departed brokers."""
    name = read(BrokerNameOnly, frame.ext).broker_name
    if not routes.forget_departed(name):
        remembered = ", ".join(broker.name for broker in routes.departed()) or "none"
        raise ResponseError(
            ResponseCode.SYSTEM_ERROR, f"no broker {name} is remembered as gone; remembered: {remembered}"
        )
    return answer(frame)


def topics(routes: Routes, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    return _topic_list(routes, frame, None, shown_to(connection))


def _topic_list(routes: Routes, frame: Frame, cluster: str | None, is_shown: Callable[[str], bool]) -> Work[Buffers]:
    """Return the response with the names of topics. `is_shown` checks the permissions of the request's account, because
    the connection may use another account by the time the names are collected."""
    found: list[str] = []
    for number, name in enumerate((yield from routes.topics(cluster)), 1):
        if is_shown(name):
            found.append(name)
        if number % LOOKS == 0:
            yield
    body = yield from bodies.encode_topic_list(found)
    return answer(frame, body=body)


def delete_topic(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    routes.delete_topic(read(TopicName, frame.ext).topic)
    return answer(frame)


def data_version(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    """QUERY_DATA_VERSION: return `changed` as true if the broker is not registered with this version of its topics, so that
    it must register again. Otherwise the request counts as a registration."""
    header = read(BrokerName, frame.ext)
    known = routes.version(header.broker_addr)
    changed = known is None or known != bodies.decode_data_version(frame.body)
    if not changed:
        routes.refresh(header.broker_addr)
    body = bodies.encode_data_version(known) if known else b""
    return answer(frame, ext={"changed": changed}, body=body)


# Key-value settings, kept in memory. For example, mqadmin stores in them which topics are ordered.


def put_kv(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(KvValue, frame.ext)
    routes.put_kv(header.namespace, header.key, header.value)
    return answer(frame)


def get_kv(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(KvKey, frame.ext)
    value = routes.kv.get(header.namespace, {}).get(header.key)
    if value is None:
        remark = f"No config item, Namespace: {header.namespace} Key: {header.key}"
        return answer(frame, ResponseCode.QUERY_NOT_FOUND, ext={}, remark=remark)
    return answer(frame, ext={"value": value})


def delete_kv(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    header = read(KvKey, frame.ext)
    routes.delete_kv(header.namespace, header.key)
    return answer(frame)


def kv_list(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    namespace = read(KvNamespace, frame.ext).namespace
    if namespace not in routes.kv:
        remark = f"No config item, Namespace: {namespace}"
        return answer(frame, ResponseCode.QUERY_NOT_FOUND, remark=remark)
    return answer(frame, body=admin_bodies.encode_table(routes.kv[namespace]))


# Administration


def wipe_write(routes: Routes, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    """WIPE_WRITE_PERM_OF_BROKER: remove the write permission from the routes of a broker's topics. A topic gets its own
    permission back when the broker registers it with another data version."""
    name = read(BrokerNameOnly, frame.ext).broker_name
    count = yield from routes.set_write(name, allowed=False)
    return answer(frame, ext={"wipeTopicCount": count})


def add_write(routes: Routes, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    name = read(BrokerNameOnly, frame.ext).broker_name
    count = yield from routes.set_write(name, allowed=True)
    return answer(frame, ext={"addTopicCount": count})


def topics_of_cluster(routes: Routes, connection: RemotingConnection, frame: Frame) -> Work[Buffers]:
    return _topic_list(routes, frame, read(ClusterName, frame.ext).cluster, shown_to(connection))


def system_topics(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    """GET_SYSTEM_TOPIC_LIST_FROM_NS: return the names of clusters and brokers, which are also names of topics, and the
    address of one broker."""
    brokers = routes.brokers()
    names = dict.fromkeys(name for broker in brokers for name in (broker.cluster, broker.name))
    address = next((address for broker in brokers for address in broker.addresses.values()), "")
    return answer(frame, body=orjson.dumps({"brokerAddr": address, "topicList": list(names)}))


def config(routes: Routes, connection: RemotingConnection, frame: Frame) -> Buffers:
    """GET_NAMESRV_CONFIG: return the only setting, which is constant."""
    return answer(frame, body=admin_bodies.encode_properties({"orderMessageEnable": "false"}))
