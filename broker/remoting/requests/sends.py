"""SEND_MESSAGE, its V2, SEND_BATCH_MESSAGE and CONSUMER_SEND_MSG_BACK."""

from __future__ import annotations

from typing import Final

import structlog

from ....protocol.codes import ONEWAY_FLAG, RequestCode, ResponseCode
from ....protocol.frame import Ext, Frame
from ....protocol.headers import FIRST_ID, SendBack, SendMessage, read, read_send_v2
from ....protocol.sent import encode_sent
from ....protocol.work import Work
from ...broker import Broker
from ...config import REGION
from ...store.store import StoreFull
from ..answers import Buffers, answer, reply_type
from ..connection import Connection

log = structlog.get_logger("rocketlet.sending")

REGION_EXT: Final[Ext] = {"MSG_REGION": REGION, "TRACE_ON": "true"}

_SEND_MESSAGE: Final = int(RequestCode.SEND_MESSAGE)  # Python 3.11 takes 0.2 us to find a member of an enum
FULL_REMARK: Final = "service not available now, the broker's disk may be full; free space or send to another broker: "


class Sends:
    """The sends of one socket read: staged one by one, settled together."""

    def __init__(self, broker: Broker) -> None:
        self._sending = broker.sending
        self._host_hex = broker.store.store_host.hex().upper()
        self.staged: list[Frame] = []

    def stage(self, connection: Connection, frame: Frame) -> None:
        """Gives the message its place. Whatever this raises, such as Refusal or LongBatch, nothing of it is staged."""
        header = read(SendMessage, frame.ext) if frame.code == _SEND_MESSAGE else read_send_v2(frame.ext)
        self._sending.stage(header, frame.body, connection.born_host)
        self.staged.append(frame)

    def settle(self) -> Buffers:
        """Commits everything staged; the answers, in order."""
        staged, self.staged = self.staged, []
        try:
            placed = self._sending.commit()
        except Exception as error:
            if not isinstance(error, StoreFull):
                log.exception("sends_refused_store_failed")
            remark = FULL_REMARK + (str(error) or type(error).__name__)
            return [
                part
                for frame in staged
                if not frame.flag & ONEWAY_FLAG
                for part in answer(frame, ResponseCode.SERVICE_NOT_AVAILABLE, REGION_EXT, remark=remark)
            ]
        out: Buffers = []
        host_hex = self._host_hex
        for frame, (position, queue_id, queue_offset, positions, _, _, handle) in zip(staged, placed, strict=True):
            if handle and not frame.flag & ONEWAY_FLAG:
                out += answer(frame, 0, _sent_ext(f"{host_hex}{position:016X}", queue_id, queue_offset, handle))
            elif not frame.flag & ONEWAY_FLAG:
                ids = _ids(frame, host_hex, positions) if positions else f"{host_hex}{position:016X}"
                out.append(encode_sent(reply_type(frame), frame.opaque, ids, queue_id, queue_offset, REGION))
        return out


def store_batch(broker: Broker, connection: Connection, frame: Frame) -> Work[Buffers]:
    """A batch of very many messages: half of it may be stored when others have their turn."""
    header = read(SendMessage, frame.ext) if frame.code == _SEND_MESSAGE else read_send_v2(frame.ext)
    pieces = yield from broker.sending.storing_batch(header, frame.body, connection.born_host)
    host_hex = broker.store.store_host.hex().upper()
    ids: list[str] = []
    for placed in pieces[:1] if FIRST_ID in frame.ext else pieces:
        ids.append(_ids(frame, host_hex, placed.positions or []))
        yield
    first = pieces[0]
    sent = encode_sent(reply_type(frame), frame.opaque, ",".join(ids), first.queue_id, first.queue_offset, REGION)
    return [sent]


def _ids(frame: Frame, host_hex: str, positions: list[int]) -> str:
    """The ids of a batch's messages; of the first one alone where the sender looks at none, as Rocketlet's for Spark."""
    if FIRST_ID in frame.ext:
        positions = positions[:1]
    return ",".join([f"{host_hex}%016X"] * len(positions)) % tuple(positions)


def _sent_ext(ids: str, queue_id: int, queue_offset: int, recall_handle: str) -> Ext:
    return {**REGION_EXT, "msgId": ids, "queueId": queue_id, "queueOffset": queue_offset, "recallHandle": recall_handle}


def send_back(broker: Broker, connection: Connection, frame: Frame) -> Buffers:
    """CONSUMER_SEND_MSG_BACK: a message that a consumer could not handle, to be tried again later or given up."""
    broker.retries.send_back(read(SendBack, frame.ext))
    return answer(frame)
