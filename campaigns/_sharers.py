"""Clients that share messages, by either door. They say what the broker answers, and know nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from typing import Any, ClassVar, Final, NamedTuple, Self

from rocketlet.broker.grpc import schema
from rocketlet.broker.grpc.schema import Code
from rocketlet.protocol.codes import RequestCode, ResponseCode
from rocketlet.protocol.headers import AckMessage, ChangeInvisibleTime, PopMessage, write
from rocketlet.protocol.message import POP_CK, decode_records
from rocketlet.protocol.properties import find

from tests.conftest import Wire
from tests.support.grpc_client import GrpcClient, grpc_client, resource

GROUP, TOPIC = "g", "t"
INVISIBLE_S: Final = 10.0  # the least that gRPC allows
NO_TOPIC_S: Final = 0.01


class Refused(Exception):
    """The broker has answered with this code."""


class Held(NamedTuple):
    """A message in a client's hands. Both doors give and take the same handle."""

    body: bytes
    queue_id: int
    offset: int
    handle: str


class Sharer:
    """A client of one door. `async with`: connected. Its calls raise Refused, and OSError or EOFError once the broker is
    gone."""

    figure: ClassVar[str]

    def __init__(self, address: str, client_id: str) -> None:
        self._address = address
        self._client_id = client_id

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *exception: object) -> None: ...

    @abstractmethod
    async def pop(self, count: int, wait_ms: int) -> list[Held]: ...

    @abstractmethod
    async def ack(self, held: Held) -> None: ...

    @abstractmethod
    async def nack(self, held: Held, invisible_ms: int) -> None: ...


class Remoting(Sharer):
    figure = "by_remoting"

    async def __aenter__(self) -> Self:
        host, _, port = self._address.rpartition(":")
        self._wire = Wire(*await asyncio.open_connection(host, int(port)))
        return self

    async def __aexit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            await self._wire.close()

    async def pop(self, count: int, wait_ms: int) -> list[Held]:
        header = PopMessage(GROUP, TOPIC, -1, count, int(INVISIBLE_S * 1000), wait_ms, init_mode=0)
        answer = await self._wire.call(RequestCode.POP_MESSAGE, write(header))
        if answer.code == ResponseCode.SUCCESS:
            return [
                Held(record.body, record.queue_id, record.queue_offset, str(find(record.properties, POP_CK)))
                for record in decode_records(answer.body)
            ]
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            await asyncio.sleep(NO_TOPIC_S)
        elif answer.code != ResponseCode.POLLING_TIMEOUT:
            raise Refused(answer.code)
        return []

    async def ack(self, held: Held) -> None:
        await self._settle(RequestCode.ACK_MESSAGE, AckMessage(*_place(held)))

    async def nack(self, held: Held, invisible_ms: int) -> None:
        header = ChangeInvisibleTime(*_place(held), invisible_ms)
        await self._settle(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)

    async def _settle(self, code: RequestCode, header: Any) -> None:
        answer = await self._wire.call(code, write(header))
        if answer.code != ResponseCode.SUCCESS:
            raise Refused(answer.code)


def _place(held: Held) -> tuple[str, str, int, str, int]:
    return GROUP, TOPIC, held.queue_id, held.handle, held.offset


class Grpc(Sharer):
    figure = "by_grpc"

    async def __aenter__(self) -> Self:
        self._client: GrpcClient = await grpc_client(self._address, client_id=self._client_id)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._client.transport.abort()

    async def pop(self, count: int, wait_ms: int) -> list[Held]:
        request = schema.ReceiveMessageRequest(
            group=resource(GROUP), message_queue={"topic": {"name": TOPIC}, "id": -1}, batch_size=count
        )
        request.invisible_duration.FromSeconds(int(INVISIBLE_S))
        request.long_polling_timeout.FromMilliseconds(wait_ms)
        code, *answers = await self._call("ReceiveMessage", request)
        if code == Code.TOPIC_NOT_FOUND:
            await asyncio.sleep(NO_TOPIC_S)
        elif code not in (Code.OK, Code.MESSAGE_NOT_FOUND):
            raise Refused(code)
        return [_held(answer.message) for answer in answers if answer.HasField("message")]

    async def ack(self, held: Held) -> None:
        request = schema.AckMessageRequest(group=resource(GROUP), topic=resource(TOPIC))
        request.entries.add(receipt_handle=held.handle)
        await self._settle("AckMessage", request)

    async def nack(self, held: Held, invisible_ms: int) -> None:
        request = schema.ChangeInvisibleDurationRequest(
            group=resource(GROUP), topic=resource(TOPIC), receipt_handle=held.handle
        )
        request.invisible_duration.FromMilliseconds(invisible_ms)
        await self._settle("ChangeInvisibleDuration", request)

    async def _settle(self, method: str, request: Any) -> None:
        code, *_ = await self._call(method, request)
        if code != Code.OK:
            raise Refused(code)

    async def _call(self, method: str, request: Any) -> list[Any]:
        """The code of the answer, and its messages."""
        if self._client.is_lost.is_set():
            raise EOFError
        call = self._client.begin(method)
        call.send(request, end=True)
        answers = await call.all()
        if call.status is None:
            raise EOFError
        if call.status:
            raise Refused(f"gRPC {call.status}: {call.reason}")
        return [answers[0].status.code, *answers]


def _held(message: Any) -> Held:
    system = message.system_properties
    return Held(message.body, system.queue_id, system.queue_offset, system.receipt_handle)


SHARERS: Final = (Remoting, Grpc)
