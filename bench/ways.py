"""Counts the functions and files of the product that each path enters, and with `--shape` how state is spread in the broker.

Broker and clients run in one process on the simulation's event loop, as in `bench.cpu`, with a new broker for each path. A
function is a distinct (file, qualified name, first line) that the interpreter enters between the beginning and the end of the
path: in `broker/`, and for `own_joins_client` in `client/`. A comprehension that has a frame of its own, a lambda and a
generator count as functions. A switch is a call in another file than the call before it, in `protocol/`, too.

- send: the second SEND of a producer of ours
- pull: a PULL of a Java member that gets a message and commits an offset
- pop_ack: a SEND, the POP that it answers, and the acknowledgement, with our shared consumer
- grpc_receive_ack: ReceiveMessage and AckMessage of one message
- java_joins: a second Java member joins and both are notified, while the first one pulls; its last pull is held for 15 s, so
  the broker's periodic work is part of it
- own_joins_broker, own_joins_client: a second of our consumers joins, and queues are handed over to it

`--shape` reads the source (ast). Its rules:

- maps: attributes that an `__init__` in `broker/groups`, `broker/consuming` or `broker/pops` annotates as dict, set, Counter,
  defaultdict or OrderedDict, whose first type argument is str, Queue, a tuple, or a name that ends in `Key`
- map_fields: fields of dataclasses there that are annotated so
- forget_or_drop: functions and methods there whose name begins with forget or drop, whatever underscores come before
- callbacks: parameters of constructors in `broker/`, including fields of NamedTuples and dataclasses, whose annotation is a
  Callable or an alias of one, or a union with it; not a container of Callables
- bags: NamedTuples and dataclasses in `broker/` without methods whose fields, two or more, are all callbacks or objects of
  the broker's own classes that are no NamedTuple, dataclass, Enum or exception, or bags, too, and that are a parameter of
  a constructor. `Runtime` is none."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from rocketlet.broker.grpc import schema
from rocketlet.client import Consumer, Message, Producer, SharedConsumer
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.frame import JSON, Frame, FrameReader

from simulation.loop import SimLoop, fix_hashes

from . import runner
from .cpu_paths import ADDRESS, PORT, on_virtual_time, request, started
from .steps import ROOT

SIDES = ("broker", "client", "protocol")
QUIET_S = 0.5  # after this, of the virtual clock, a step of the preparation has no more effect

COMMITTED_S = 10.0  # after this a consumer has committed what it handled


class EvenLoop(SimLoop):
    """All bytes take equally long, so that a path does not change because another one writes more often."""

    def delay_s(self) -> float:
        return 0.001


class Counted(NamedTuple):
    functions: int
    files: int
    switches: int


class Recorder:
    """The functions of the product that are entered in a `recording` block, in order."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, str, int]] = []
        self._names: dict[CodeType, tuple[str, str, int] | None] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        before = sys.getprofile()  # such as coverage's
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._names:
            path = Path(code.co_filename)
            file = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
            is_ours = file.startswith(tuple(f"{side}/" for side in SIDES))
            self._names[code] = (file, code.co_qualname, code.co_firstlineno) if is_ours else None
        if (name := self._names[code]) is not None:
            self.entered.append(name)

    def counted(self, side: str) -> Counted:
        functions = {name for name in self.entered if name[0].startswith(f"{side}/")}
        files = [name[0] for name in self.entered if name[0].startswith((f"{side}/", "protocol/"))]
        switches = sum(one != other for one, other in itertools.pairwise(files))
        return Counted(len(functions), len({name[0] for name in functions}), switches)

    def listed(self, side: str) -> list[str]:
        """Each function once, in the order of their first calls."""
        return [
            f"{file}:{line} {name}" for file, name, line in dict.fromkeys(self.entered) if file.startswith(f"{side}/")
        ]


class JavaClient:
    """A connection with JSON headers that answers nothing of itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._opaque = 0
        self.is_notified = asyncio.Event()
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def connect(cls, stack: AsyncExitStack) -> JavaClient:
        made = cls(*await asyncio.open_connection("127.0.0.1", PORT))
        stack.callback(made._reading.cancel)
        stack.callback(made._writer.close)
        return made

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader()
        while data := await reader.read(1 << 16):
            for frame in frames.feed(data):
                if frame.is_response:
                    self._answers.pop(frame.opaque).set_result(frame)
                elif frame.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
                    self.is_notified.set()

    async def ask(self, code: RequestCode, ext: Mapping[str, Any], body: object = None) -> Frame:
        self._opaque += 1
        data = b"" if body is None else json.dumps(body).encode()
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._answers[self._opaque] = answer
        self._writer.write(request(code, {name: str(value) for name, value in ext.items()}, data, JSON, self._opaque))
        return await answer

    async def create_topic(self, topic: str, queues: int) -> None:
        ext = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": queues, "writeQueueNums": queues, "perm": 6}
        await self.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, {**ext, "topicFilterType": "SINGLE_TAG", "order": False})

    async def send(self, queue: int) -> None:
        ext = {
            "a": "p", "b": "t", "c": "TBW102", "d": 4, "e": queue, "f": 0, "g": 1, "h": 0, "i": "", "j": 0, "k": False,
        }  # fmt: skip
        await self.ask(RequestCode.SEND_MESSAGE_V2, ext)

    async def pull(self, queue: int, offset: int) -> None:
        """As a member that commits what it has handled, and waits up to 15 s for a message."""
        ext = {
            "consumerGroup": "g", "topic": "t", "queueId": queue, "queueOffset": offset, "maxMsgNums": 32,
            "sysFlag": 7 if offset else 6, "commitOffset": offset, "suspendTimeoutMillis": 15_000, "subscription": "*",
            "subVersion": 0, "expressionType": "TAG",
        }  # fmt: skip
        await self.ask(RequestCode.PULL_MESSAGE, ext)

    async def beat(self, client_id: str) -> None:
        subscription = {"topic": "t", "subString": "*", "tagsSet": [], "codeSet": [], "subVersion": 1}
        consumer = {
            "groupName": "g", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "subscriptionDataSet": [subscription], "unitMode": False,
        }  # fmt: skip
        body = {"clientID": client_id, "consumerDataSet": [consumer], "producerDataSet": []}
        await self.ask(RequestCode.HEART_BEAT, {}, body)

    async def members(self) -> None:
        await self.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})


class GrpcClient:
    """A connection of HTTP/2 with one call at a time, whose requests are smaller than all windows."""

    HEAD_BYTES = 9
    DATA, HEADERS, SETTINGS, END_STREAM, END_HEADERS = 0, 1, 4, 1, 4

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._stream_id = -1
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self._frame(self.SETTINGS, 0, 0, b""))

    @staticmethod
    def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload

    async def call(self, method: str, message: Any) -> bytes:
        """The messages of the response, each with its length before it."""
        self._stream_id += 2
        fields = {
            ":method": "POST", ":scheme": "http", ":path": f"/{schema.SERVICE}/{method}", ":authority": ADDRESS,
            "te": "trailers", "content-type": "application/grpc", "x-mq-client-id": "client", "x-mq-language": "PYTHON",
            "x-mq-client-version": "5.1.2", "x-mq-protocol": "v2", "x-mq-request-id": "1",
            "x-mq-date-time": "20260101T000000Z",
        }  # fmt: skip
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())  # HPACK, never indexed
        data = message.SerializeToString()
        self._writer.write(
            self._frame(self.HEADERS, self.END_HEADERS, self._stream_id, block)
            + self._frame(self.DATA, self.END_STREAM, self._stream_id, b"\0" + len(data).to_bytes(4, "big") + data)
        )
        found = b""
        while True:
            head = await self._reader.readexactly(self.HEAD_BYTES)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if int.from_bytes(head[5:], "big") != self._stream_id:
                continue
            if head[3] == self.DATA:
                found += payload
            if head[4] & self.END_STREAM:
                return found

    async def receive(self) -> list[str]:
        """The receipt handles of up to one message."""
        wanted = schema.ReceiveMessageRequest(batch_size=1)
        wanted.group.name, wanted.message_queue.topic.name, wanted.message_queue.id = "g", "t", -1
        wanted.long_polling_timeout.FromMilliseconds(0)
        wanted.invisible_duration.FromMilliseconds(30_000)
        data, handles = await self.call("ReceiveMessage", wanted), []
        while data:
            size = 5 + int.from_bytes(data[1:5], "big")
            answer, data = schema.ReceiveMessageResponse.FromString(data[5:size]), data[size:]
            if answer.WhichOneof("content") == "message":
                handles.append(answer.message.system_properties.receipt_handle)
        return handles

    async def ack(self, handle: str) -> None:
        asked = schema.AckMessageRequest(group=schema.Resource(name="g"), topic=schema.Resource(name="t"))
        asked.entries.add(message_id="id", receipt_handle=handle)
        await self.call("AckMessage", asked)


def _text(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


async def send(recorder: Recorder, stack: AsyncExitStack) -> None:
    producer = await stack.enter_async_context(Producer(ADDRESS))
    await producer.send("t", b"x")
    await asyncio.sleep(QUIET_S)
    with recorder.recording():
        await producer.send("t", b"x")


async def pull(recorder: Recorder, stack: AsyncExitStack) -> None:
    client = await _java_member(stack)
    await client.send(0)
    with recorder.recording():
        await client.pull(0, 1)


async def pop_ack(recorder: Recorder, stack: AsyncExitStack) -> None:
    handled = asyncio.Event()

    async def handle(message: Message) -> None:
        handled.set()

    async def sent_and_settled() -> None:
        handled.clear()
        await producer.send("t", b"x")
        await handled.wait()
        await asyncio.sleep(0.1)

    producer = await stack.enter_async_context(Producer(ADDRESS))
    await stack.enter_async_context(SharedConsumer(ADDRESS, "g", "t", handle, start="first"))
    for _ in range(5):
        await sent_and_settled()
    await asyncio.sleep(QUIET_S)
    with recorder.recording():
        await sent_and_settled()


async def grpc_receive_ack(recorder: Recorder, stack: AsyncExitStack) -> None:
    java = await JavaClient.connect(stack)
    await java.create_topic("t", 2)
    client = GrpcClient(*await asyncio.open_connection("127.0.0.1", PORT))
    assert await client.receive() == []
    for _ in range(3):
        await java.send(0)
        for handle in await client.receive():
            await client.ack(handle)
    await java.send(0)
    await asyncio.sleep(QUIET_S)
    with recorder.recording():
        (handle,) = await client.receive()
        await client.ack(handle)


async def java_joins(recorder: Recorder, stack: AsyncExitStack) -> None:
    first = await _java_member(stack)
    await first.send(0)
    await first.pull(0, 1)
    await first.send(0)
    await first.pull(0, 2)
    second = await JavaClient.connect(stack)
    await asyncio.sleep(QUIET_S)
    first.is_notified.clear()
    with recorder.recording():
        await second.beat("c2")
        pulls = [asyncio.create_task(first.pull(1, 0))]
        await asyncio.sleep(0.05)
        pulls += [asyncio.create_task(first.pull(*place)) for place in ((1, 1), (0, 3))]
        for client in (first, second):
            await client.is_notified.wait()
            await client.members()
        await asyncio.gather(*pulls)


async def own_joins(recorder: Recorder, stack: AsyncExitStack) -> None:
    handled = 0

    async def handle(message: Message) -> None:
        nonlocal handled
        handled += 1

    producer = await stack.enter_async_context(Producer(ADDRESS))
    await producer.send("t", b"x")
    first = await stack.enter_async_context(Consumer(ADDRESS, "g", "t", handle, start="first"))
    await first.assigned()
    for _ in range(8):
        await producer.send("t", b"x")
    while handled < 9:
        await asyncio.sleep(QUIET_S)
    await asyncio.sleep(COMMITTED_S)
    with recorder.recording():
        second = await stack.enter_async_context(Consumer(ADDRESS, "g", "t", handle, start="first"))
        await second.assigned()
        await first.assigned()
        await asyncio.sleep(0.1)


async def _java_member(stack: AsyncExitStack) -> JavaClient:
    """The only member, which has read its two queues."""
    client = await JavaClient.connect(stack)
    await client.create_topic("t", 2)
    await client.beat("c1")
    await asyncio.sleep(QUIET_S)
    for queue in range(2):
        await client.send(queue)
        await client.pull(queue, 0)
    await asyncio.sleep(QUIET_S)
    return client


Way = Callable[[Recorder, AsyncExitStack], Awaitable[None]]
WAYS: Mapping[str, Way] = {
    "send": send,
    "pull": pull,
    "pop_ack": pop_ack,
    "grpc_receive_ack": grpc_receive_ack,
    "java_joins": java_joins,
    "own_joins": own_joins,
}
SIDES_OF = {"own_joins": {"own_joins_broker": "broker", "own_joins_client": "client"}}


async def measure(path: Way) -> Recorder:
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="rocketlet-bench-") as folder:
        async with AsyncExitStack() as stack:
            await started(Path(folder), stack)
            await path(recorder, stack)
    return recorder


def recorded() -> dict[str, Recorder]:
    found = {}
    for name, way in WAYS.items():
        found[name] = on_virtual_time(EvenLoop(1), measure(way))
    return found


# The shape


MAPS = ("dict", "set", "Counter", "defaultdict", "OrderedDict")
STATE = ("groups", "consuming", "pops")
RECORDS = ("NamedTuple", "dataclass", "Enum", "Flag", "Exception", "Error", "TypedDict")


class Source:
    """The modules of `broker/`, parsed."""

    def __init__(self, folder: Path) -> None:
        self.trees = {path.relative_to(folder): ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}
        self.aliases = {
            target.id
            for tree in self.trees.values()
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Callable[")
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.classes = [
            (path, node)
            for path, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        ]
        self.services = {node.name for _, node in self.classes if not _is_record(node)}

    def shape(self) -> dict[str, list[str]]:
        """The findings of each rule, by its name."""
        state = [(path, node) for path, node in self.classes if path.parts[0].removesuffix(".py") in STATE]
        return {
            "maps": [f"{path} {node.name}.{name}" for path, node in state for name in _maps(_attributes(node))],
            "map_fields": [f"{path} {node.name}.{name}" for path, node in state for name in _maps(_fields(node))],
            "forget_or_drop": [
                f"{path} {node.name}"
                for path, tree in self.trees.items()
                if path.parts[0].removesuffix(".py") in STATE
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name.lstrip("_").startswith(("forget", "drop"))
            ],
            "callbacks": [
                f"{path} {node.name}({name})"
                for path, node in self.classes
                for name, annotation in _parameters(node).items()
                if self._is_callback(annotation)
            ],
            "bags": self._bags(),
        }

    def _is_callback(self, annotation: ast.expr) -> bool:
        return any(text in self.aliases or text.startswith("Callable[") for text in _alternatives(annotation))

    def _bags(self) -> list[str]:
        collaborators, found = set(self.services), dict[str, None]()
        for _ in range(2):  # the second time bags of bags, too
            found = {f"{path} {node.name}": None for path, node in self.classes if self._is_bag(node, collaborators)}
            collaborators |= {name.rpartition(" ")[2] for name in found}
        return list(found)

    def _is_bag(self, node: ast.ClassDef, collaborators: set[str]) -> bool:
        fields = _fields(node).values()
        return (
            node.name != "Runtime"
            and _is_record(node)
            and not any(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
            and len(fields) >= 2
            and all(self._is_callback(item) or set(_alternatives(item)) & collaborators for item in fields)
            and any(
                node.name in _alternatives(annotation)
                for _, other in self.classes
                for annotation in _parameters(other).values()
            )
        )


def _is_record(node: ast.ClassDef) -> bool:
    marks = [ast.unparse(item) for item in (*node.bases, *node.decorator_list)]
    return any(mark.partition("(")[0].endswith(RECORDS) for mark in marks)


def _alternatives(annotation: ast.expr) -> list[str]:
    """The types of a union."""
    if isinstance(annotation, ast.BinOp):
        return _alternatives(annotation.left) + _alternatives(annotation.right)
    return [ast.unparse(annotation)]


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)


def _attributes(node: ast.ClassDef) -> dict[str, ast.expr]:
    """The annotated attributes of the constructor."""
    made = _constructor(node)
    return {
        item.target.attr: item.annotation
        for item in (ast.walk(made) if made is not None else ())
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Attribute)
    }


def _fields(node: ast.ClassDef) -> dict[str, ast.expr]:
    return {
        item.target.id: item.annotation
        for item in node.body
        if _is_record(node) and isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def _parameters(node: ast.ClassDef) -> dict[str, ast.expr]:
    """The parameters of the constructor, also if fields make it."""
    made = _constructor(node)
    written = (*made.args.args, *made.args.kwonlyargs) if made is not None else ()
    return _fields(node) | {item.arg: item.annotation for item in written if item.annotation is not None}


def _maps(annotations: Mapping[str, ast.expr]) -> list[str]:
    return [name for name, annotation in annotations.items() if _is_map(annotation)]


def _is_map(annotation: ast.expr) -> bool:
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) not in MAPS:
        return False
    arguments = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    key = ast.unparse(arguments[0])
    return key in ("str", "Queue") or key.startswith("tuple[") or key.endswith("Key")


def main() -> int:
    parser = runner.parser(__doc__, rounds=0)
    parser.add_argument("--shape", action="store_true", help="count how state is spread instead, by reading the source")
    parser.add_argument("--list", action="store_true", help="print what was counted, too")
    options = parser.parse_args()
    if options.shape:
        shape = Source(ROOT / "broker").shape()
        for line in (line for name, found in shape.items() if options.list for line in (f"{name}:", *found)):
            print(line)
        runner.show("The broker's source", ("", "count"), [[name, str(len(found))] for name, found in shape.items()])
        runner.finish(options, "ways", {name: len(found) for name, found in shape.items()})
        return 0
    rows: list[list[object]] = []
    result: dict[str, Counted] = {}
    for name, recorder in recorded().items():
        for key, side in SIDES_OF.get(name, {name: "broker"}).items():
            for line in recorder.listed(side) if options.list else ():
                print(key, line)
            counts = result[key] = recorder.counted(side)
            rows.append([key, *map(str, (counts.functions, counts.files, counts.switches))])
    runner.show("By path", ("", "functions", "files", "switches"), rows)
    runner.finish(
        options, "ways", {key: {"functions": item.functions, "files": item.files} for key, item in result.items()}
    )
    return 0


if __name__ == "__main__":
    fix_hashes("bench.ways")
    sys.exit(main())
