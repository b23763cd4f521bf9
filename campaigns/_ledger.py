"""The common part of campaigns against the store: a broker without sockets, its acknowledgements, and the messages that are
left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocketlet.broker.broker import Broker
from rocketlet.broker.config import LIMITS, BrokerConfig, Limits
from rocketlet.broker.runtime import MACHINE, Clock
from rocketlet.broker.store.index import ConsumeQueue
from rocketlet.protocol.message import decode_records, encode_host

Place = tuple[str, int, int]  # topic, queue, offset

HOST = encode_host("127.0.0.1", 1)
ADDRESS = "127.0.0.1:1"
LATE = b"REAL_TOPIC\x01t\x02REAL_QID\x013"  # the properties of a delayed message for t:3


def open_broker(folder: Path, limits: Limits = LIMITS, clock: Clock = MACHINE, **settings: Any) -> Broker:
    """A broker over the folder that neither listens nor has timers. Raises StoreError."""
    settings = {"segment_bytes": 20_000, "metrics_port": None} | settings
    return Broker(BrokerConfig(data_dir=folder, address=ADDRESS, **settings), clock=clock, limits=limits)


def put(broker: Broker, queue: ConsumeQueue, body: bytes, properties: bytes = b"", code: int = 0) -> Place:
    """Stores a message; returns when the operating system has it. Raises StoreFull."""
    with broker.appender.batch() as now_ms:
        _, offset = broker.appender.stage(queue, body, properties, code, 0, 0, now_ms, HOST)
    return queue.topic, queue.queue_id, offset


def read_all(broker: Broker, *, whole: bool = False) -> dict[Place, bytes]:
    """The body of every message that a consumer of each queue would get, or the whole record. Raises what the broker
    raises."""
    found: dict[Place, bytes] = {}
    for queue in list(broker.store.queues.values()):
        offset = queue.begin
        while offset < queue.next:
            fetched = broker.store.fetch(queue, offset, 32)
            for piece in fetched.pieces:
                at = 0
                for record in decode_records(bytes(piece)):
                    content = bytes(piece[at : at + record.size]) if whole else record.body
                    found[record.topic, record.queue_id, record.queue_offset] = content
                    at += record.size
            if fetched.next_offset <= offset:
                raise RuntimeError("a fetch does not go on")
            offset = fetched.next_offset
    return found


def is_said(broker: Broker, place: Place, position: int, size: int) -> bool:
    """Whether the loss of a message was named: as lost, as damaged, or by a part of the log that is damaged or torn."""
    topic, queue, offset = place
    found = broker.recovered
    if any((lost.topic, lost.queue_id) == (topic, queue) and lost.begin <= offset < lost.end for lost in found.lost):
        return True
    torn_at = broker.store.end
    areas = [*found.damage, (torn_at, found.torn_bytes)]
    if any(at < position + size and position < at + length for at, length in areas):
        return True
    return place in broker.store.damaged


def differences(expected: Mapping[Place, bytes], found: Mapping[Place, bytes]) -> tuple[list[Place], list[Place]]:
    """The messages that are missing, and those that nobody sent or that have another body."""
    missing = [place for place in expected if place not in found]
    wrong = [place for place, body in found.items() if expected.get(place) != body]
    return missing, wrong
