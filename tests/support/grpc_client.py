"""A plain gRPC client on the h2 library: one connection, calls with any header fields."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
from typing import Any

import h2.config
import h2.connection
import h2.events
from rocketlet.broker.grpc import schema
from rocketlet.protocol.grpc import MessageReader, encode_message

from ..conftest import PATIENCE_S

CLIENT = "host@1@0@test"
KINDS = {
    "QueryRoute": schema.QueryRouteResponse,
    "QueryAssignment": schema.QueryAssignmentResponse,
    "Telemetry": schema.TelemetryCommand,
    "Heartbeat": schema.HeartbeatResponse,
    "SyncLiteSubscription": schema.SyncLiteSubscriptionResponse,
    "NotifyClientTermination": schema.NotifyClientTerminationResponse,
    "SendMessage": schema.SendMessageResponse,
    "EndTransaction": schema.EndTransactionResponse,
    "RecallMessage": schema.RecallMessageResponse,
    "ReceiveMessage": schema.ReceiveMessageResponse,
    "AckMessage": schema.AckMessageResponse,
    "ChangeInvisibleDuration": schema.ChangeInvisibleDurationResponse,
    "ForwardMessageToDeadLetterQueue": schema.ForwardMessageToDeadLetterQueueResponse,
}


class OpenCall:
    """A streaming call: `await next()` is its next message, None behind the last; `status` is there then."""

    def __init__(self, client: GrpcClient, stream_id: int, kind: Any) -> None:
        self._client = client
        self.stream_id = stream_id
        self.kind = kind
        self.reader = MessageReader()
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.http_status = ""
        self.status: int | None = None
        self.reason = ""
        self.body = b""
        self.unsent = b""
        self.ends = False

    async def next(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await self.messages.get()

    async def all(self) -> list[Any]:
        found = []
        while (message := await self.next()) is not None:
            found.append(message)
        return found

    def send(self, message: Any, *, end: bool = False) -> None:
        """As fast as the windows allow."""
        self.unsent += encode_message(message.SerializeToString())
        self.ends = end
        self.pump()

    def pump(self) -> None:
        h2 = self._client.h2
        while self.unsent:
            size = min(h2.local_flow_control_window(self.stream_id), h2.max_outbound_frame_size, len(self.unsent))
            if not size:
                break
            h2.send_data(self.stream_id, self.unsent[:size], end_stream=self.ends and size == len(self.unsent))
            self.unsent = self.unsent[size:]
        self._client.flush()

    def cancel(self) -> None:
        self._client.h2.reset_stream(self.stream_id, 8)
        self._client.flush()


class GrpcClient(asyncio.Protocol):
    def __init__(self, metadata: dict[str, str]) -> None:
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.metadata = metadata
        self.calls: dict[int, OpenCall] = {}
        self.is_lost = asyncio.Event()
        self.goaway: int | None = None
        self.is_reading = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.transport.write(self.h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.ConnectionTerminated):
                self.goaway = int(event.error_code or 0)
                continue
            call = self.calls.get(getattr(event, "stream_id", None) or 0)
            if call is not None:
                self._hear(call, event)
        for call in self.calls.values():
            if call.unsent:
                call.pump()
        self.flush()

    def _hear(self, call: OpenCall, event: Any) -> None:
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            fields: dict[str, str] = {str(name): str(value) for name, value in event.headers}
            call.http_status = fields.get(":status", call.http_status)
            if "grpc-status" in fields:
                call.status, call.reason = int(fields["grpc-status"]), fields.get("grpc-message", "")
        elif isinstance(event, h2.events.DataReceived):
            call.body += event.data
            if self.is_reading:
                self.h2.acknowledge_received_data(event.flow_controlled_length, call.stream_id)
            if call.http_status == "200":
                for message in call.reader.feed(event.data):
                    call.messages.put_nowait(call.kind.FromString(message))
        elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
            call.messages.put_nowait(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost.set()
        for call in self.calls.values():
            call.messages.put_nowait(None)

    def begin(self, method: str, *, end: bool = False, path: str = "", **metadata: str) -> OpenCall:
        """Opens a call; underscores in names of fields become hyphens."""
        fields = self.metadata | {name.replace("_", "-"): value for name, value in metadata.items()}
        stream_id = self.h2.get_next_available_stream_id()
        head = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path or f"/{schema.SERVICE}/{method}"),
            (":authority", "127.0.0.1:1"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
        self.h2.send_headers(stream_id, [*head, *((n, v) for n, v in fields.items() if v)], end_stream=end)
        self.flush()
        call = self.calls[stream_id] = OpenCall(self, stream_id, KINDS.get(method))
        return call

    async def call(self, method: str, request: Any, **metadata: str) -> Any:
        """The answer of a unary call that succeeds."""
        call = self.begin(method, end=False, path="", **metadata)
        call.send(request, end=True)
        messages = await call.all()
        assert (call.status, len(messages)) == (0, 1), (call.status, call.reason, messages)
        return messages[0]

    async def close(self) -> None:
        self.transport.close()
        async with asyncio.timeout(PATIENCE_S):
            await self.is_lost.wait()


async def grpc_client(
    address: str, *, tls: ssl.SSLContext | None = None, client_id: str = CLIENT, **metadata: str
) -> GrpcClient:
    host, _, port = address.rpartition(":")
    fields = {
        "x-mq-client-id": client_id,
        "x-mq-language": "PYTHON",
        "x-mq-client-version": "5.1.2",
        "x-mq-protocol": "v2",
        "x-mq-request-id": "0f7e0c9e-1",
        "x-mq-date-time": "20260101T000000Z",
    } | {name.replace("_", "-"): value for name, value in metadata.items()}
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: GrpcClient(fields), host, int(port), ssl=tls)
    return client


def signed(access_key: str, secret: str, date_time: str = "20260101T000000Z") -> str:
    """The field `authorization`."""
    signature = hmac.new(secret.encode(), date_time.encode(), hashlib.sha1).hexdigest().upper()
    return f"MQv2-HMAC-SHA1 Credential={access_key}, SignedHeaders=x-mq-date-time, Signature={signature}"


# Requests


def resource(name: str) -> Any:
    return schema.Resource(name=name)


def message(topic: str, body: bytes = b"body", *, message_id: str = "01ID", **system: Any) -> Any:
    found = schema.Message(topic=resource(topic), body=body)
    found.system_properties.message_id = message_id
    for name, value in system.items():
        if isinstance(value, list):
            getattr(found.system_properties, name).extend(value)
        elif hasattr(value, "DESCRIPTOR"):
            getattr(found.system_properties, name).MergeFromString(value.SerializeToString())
        else:
            setattr(found.system_properties, name, value)
    return found


def sending(*messages: Any) -> Any:
    return schema.SendMessageRequest(messages=messages)


def route(topic: str, host: str = "", port: int = 0) -> Any:
    request = schema.QueryRouteRequest(topic=resource(topic))
    if host:
        request.endpoints.scheme = 3
        request.endpoints.addresses.add(host=host, port=port)
    return request


async def apply_settings(client: GrpcClient, settings: Any) -> tuple[Any, Any]:
    call = client.begin("Telemetry")
    call.send(schema.TelemetryCommand(settings=settings))
    return call, await call.next()
