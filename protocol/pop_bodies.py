"""The JSON bodies of messages that are shared (POP), 5.x's."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import orjson
from msgspec import field as wire

from .config import MAX_ID_CHARS
from .popped import Receipt
from .schema import BodyError, Int, Long, Shape, Text, answers, reads

PULL: Final = "PULL"
POP: Final = "POP"
SHARED_OWNER: Final = "(shared)"
"""In GET_GROUP_HISTORY, our own: the owner of queues whose messages all clients of the group share."""
MAX_BITS: Final = 4096  # in one entry, as in one request


class BatchAck(NamedTuple):
    """Messages of one pop. offsets: in the queue."""

    group: str
    topic: str
    mark: str
    queue_id: int
    pop_ms: int
    invisible_ms: int
    offsets: tuple[int, ...]


class BatchAckShape(Shape):
    group: Text = wire(name="c")
    topic: Text = wire(name="t")
    queue_id: Int = wire(name="q")
    start_offset: Long = wire(name="so")
    pop_ms: Long = wire(name="pt")
    invisible_ms: Long = wire(name="it", default=0)
    mark: Text = wire(name="r", default="0")
    bits: str | list[int] = wire(name="b", default="")


class BatchAcksShape(Shape):
    acks: list[BatchAckShape] | None = None
    broker_name: Text = ""


@reads("batch acknowledgement", BatchAcksShape)
def decode_batch_acks(data: BatchAcksShape) -> list[BatchAck]:
    """BATCH_ACK_MESSAGE. Raises BodyError, also for more than 4096 messages."""
    found: list[BatchAck] = []
    count = 0
    for item in data.acks or ():
        offsets = tuple(item.start_offset + number for number in _bits(item.bits))
        count += len(offsets)
        if count > MAX_BITS:
            raise BodyError(f"more than {MAX_BITS} messages are acknowledged")
        found.append(
            BatchAck(item.group, item.topic, item.mark, item.queue_id, item.pop_ms, item.invisible_ms, offsets)
        )
    return found


def encode_batch_acks(broker_name: str, group: str, acks: Iterable[tuple[str, Receipt, Sequence[int]]]) -> bytes:
    """The body of acknowledgements: topics, each with a receipt of a pop and the offsets that are acknowledged, none below
    its start offset."""
    entries = [
        {
            "c": group,
            "t": topic,
            "r": of.mark,
            "so": of.start_offset,
            "q": of.queue_id,
            "rq": of.revive_qid,
            "pt": of.pop_ms,
            "it": of.invisible_ms,
            "b": base64.b64encode(_bit_set(offset - of.start_offset for offset in offsets)).decode(),
        }
        for topic, of, offsets in acks
    ]
    return orjson.dumps({"brokerName": broker_name, "acks": entries})


def _bit_set(numbers: Iterable[int]) -> bytes:
    """The bytes of java.util.BitSet.toByteArray."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _bits(bits: str | list[int]) -> list[int]:
    """The numbers of the bits that are set; the lowest of the first byte is 0. fastjson writes bytes as base64."""
    if isinstance(bits, str):
        if len(bits) > MAX_BITS:
            raise BodyError("a bit set is too long")
        try:
            data = base64.b64decode(bits, validate=True)
        except binascii.Error as error:
            raise BodyError(f"a bit set is no base64: {error}") from None
    else:
        data = bytes(value & 0xFF for value in bits[:MAX_BITS])  # Java's bytes have signs
    return [8 * at + bit for at, value in enumerate(data) if value for bit in range(8) if value >> bit & 1]


class RequestMode(NamedTuple):
    """How the members of a group get a topic's messages: `PULL` or `POP`. share_queues: that several members may pop from;
    below 1: all from all."""

    topic: str
    group: str
    mode: str = PULL
    share_queues: int = 0


class RequestModeShape(Shape):
    topic: Text
    consumer_group: Text
    mode: str | int | None = None
    pop_share_queue_num: Int = 0


@reads("request mode", RequestModeShape)
def decode_request_mode(data: RequestModeShape) -> RequestMode:
    """SET_MESSAGE_REQUEST_MODE."""
    return _mode(data.topic, data.consumer_group, data.mode, data.pop_share_queue_num)


def _mode(topic: str, group: str, mode: str | int | None, share_queues: int) -> RequestMode:
    named = {PULL: PULL, POP: POP, 0: PULL, 1: POP, None: PULL}.get(mode)
    if named is None:
        raise BodyError(f"the mode {str(mode)[:MAX_ID_CHARS]!r} is neither PULL nor POP")
    return RequestMode(topic, group, named, share_queues)


def request_mode_json(mode: RequestMode) -> dict[str, str | int]:
    return {
        "consumerGroup": mode.group,
        "mode": mode.mode,
        "popShareQueueNum": mode.share_queues,
        "topic": mode.topic,
    }


def encode_request_modes(modes: Iterable[RequestMode]) -> bytes:
    """The answer of GET_ALL_MESSAGE_REQUEST_MODE."""
    found: dict[str, dict[str, Mapping[str, str | int]]] = {}
    for mode in modes:
        found.setdefault(mode.topic, {})[mode.group] = request_mode_json(mode)
    return orjson.dumps({"messageRequestModeMap": found})


@answers("request modes")
def decode_request_modes(data: dict[str, dict[str, dict[str, dict[str, str | int]]]]) -> list[RequestMode]:
    return [
        _mode(topic, group, item.get("mode"), int(item.get("popShareQueueNum", 0)))
        for topic, groups in data["messageRequestModeMap"].items()
        for group, item in groups.items()
    ]


def encode_pop_assignment(topic: str, broker_names: Iterable[str]) -> bytes:
    """The answer of QUERY_ASSIGNMENT where members pop: any queue of each broker."""
    return orjson.dumps(
        {
            "messageQueueAssignments": [
                {
                    "attachments": {},
                    "messageQueue": {"brokerName": name, "queueId": -1, "topic": topic},
                    "mode": POP,
                }
                for name in broker_names
            ]
        }
    )
