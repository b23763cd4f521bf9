"""A client says that it cannot do something that it was asked for."""

from __future__ import annotations

import asyncio
import io
import logging
import subprocess
import sys
from typing import Any

import orjson
import pytest
from rocketlet.client import (
    BrokerRefused,
    ConfigError,
    Consumer,
    Message,
    MessageIllegal,
    Outgoing,
    Producer,
    PullLimits,
    Reject,
    RequestFailed,
    RetryLater,
)
from rocketlet.client.config import EARLIEST_MS, MAX_BATCH_SIZE
from rocketlet.client.errors import get_logger
from rocketlet.protocol import names
from rocketlet.protocol.codes import RequestCode
from rocketlet.protocol.names import Queue
from rocketlet.testing import Broker, Fault

from ..conftest import PATIENCE_S, Connect, Node, Nodes, create_topic, eventually
from .conftest import Requests


def consumer(**arguments: Any) -> Consumer:
    return Consumer(**{"name_server": "h:1", "group": "g", "subscriptions": "t", **arguments})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"orderly": True, "broadcasting": True}, "orderly: not supported with broadcasting"),
        ({"offsets_file": "offsets.json"}, "offsets_file: needs broadcasting=True"),
        ({"start": 1_732_345_678}, "start: 1732345678 ms since 1970 is before 1973; give ms, such as 1732345678_000"),
        ({"batch_size": MAX_BATCH_SIZE + 1}, "batch_size: 1025 is not a whole number from 1 to 1024"),
        ({"batch_size": 300, "pull": PullLimits()}, r"batch_size: 300 .* give pull=PullLimits\(batch_size=300\)"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        consumer(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"start": 0},
        {"start": EARLIEST_MS},
        {"broadcasting": True, "offsets_file": "offsets.json"},
        {"batch_size": MAX_BATCH_SIZE},
        {"batch_size": 300, "pull": PullLimits(batch_size=300)},
    ],
)
def test_those_at_the_edge_are_taken(arguments: dict[str, Any]) -> None:
    assert consumer(**arguments).group == "g"


async def test_a_batch_is_as_large_as_was_asked_for(node: Node, one_queue: None) -> None:
    async with Producer(node.address) as producer:
        await producer.send_batch("t", [b"%d" % number for number in range(1000)])
    async with Consumer(node.address, "g", "t", start="first", batch_size=1000) as member:
        assert len(await anext(member.batches())) == 1000


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"keys": "order 17"},
            r"the key 'order 17' contains blanks, at which brokers split it; give \['order', '17'\]",
        ),
        ({"keys": ["a", "order 17"]}, "the key 'order 17' contains blanks"),
        ({"tag": "a || b"}, r"the tag 'a \|\| b' contains '\|\|'"),
    ],
)
async def test_keys_and_tags_that_nobody_would_find_are_refused(
    node: Node, options: dict[str, Any], reason: str
) -> None:
    async with Producer(node.address) as producer:
        with pytest.raises(MessageIllegal, match=reason):
            await producer.send("t", b"x", **options)
        with pytest.raises(MessageIllegal, match=reason):
            await producer.send_batch("t", [Outgoing(b"x", **options)])
        await producer.send("t", b"x", keys=["order", "17"], tag="a")


async def test_a_message_of_others_with_such_a_tag_can_be_sent_again(node: Node) -> None:
    async with Producer(node.address) as producer:
        sent = await producer.send("t", b"x", tag="a || b", message_id="another's")
        assert sent.status == "ok"


async def test_the_lag_of_queues_that_a_consumer_has_not_got_yet_is_not_reported(node: Node, one_queue: None) -> None:
    member = Consumer(node.address, "g", "t", lambda message: None)
    with pytest.raises(ConfigError, match="has not been started"):
        await member.lag()
    async with member:
        with pytest.raises(ConfigError, match="the group g has assigned no queues to this consumer yet"):
            await member.lag()
        await member.assigned()
        assert await member.lag() == 0
    with pytest.raises(ConfigError, match="has been stopped"):
        await member.positions()


async def test_a_member_for_whom_no_queue_is_left_has_no_lag(node: Node, one_queue: None) -> None:
    async with (
        Consumer(node.address, "g", "t", lambda message: None) as one,
        Consumer(node.address, "g", "t", lambda message: None) as two,
    ):
        await one.assigned()
        await two.assigned()
        assert [await one.lag(), await two.lag()] == [0, 0]


async def test_receive_says_how_long_it_waited(node: Node) -> None:
    async with Consumer(node.address, "g", "t") as member:
        with pytest.raises(TimeoutError, match=r"receive: no message arrived within 0.01 s"):
            await member.receive(timeout_s=0.01)


async def test_a_consumer_that_could_not_be_started_hands_nothing_out() -> None:
    """Neither to who waits already nor to who comes."""
    async with Broker() as broker:
        broker.create_topic("t", 1)
        broker.faults.add(Fault.answer("HEART_BEAT", response=16, remark="not you"))
        member = Consumer(broker.address, "g", "t")
        starting = asyncio.create_task(member.start())
        await eventually(lambda: member._deliveries is not None or starting.done())
        waiting = asyncio.create_task(member.receive())
        with pytest.raises(BrokerRefused):
            await starting
        for call in (waiting, member.receive(), member.start(), member.assigned()):
            with pytest.raises(ConfigError, match=r"could not be started \(HEART_BEAT .*not you.*\); create a new one"):
                await asyncio.wait_for(call, PATIENCE_S)
        await member.stop()


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("fails_by", ["raises", "rejects"])
async def test_who_waits_for_a_reply_gets_an_error_when_the_handler_failed(
    node: Node, fails_by: str, *, orderly: bool
) -> None:
    async def fail(message: Message) -> Reject:
        if fails_by == "raises":
            raise LookupError("no such meal\x01\x02")
        return Reject()

    reason = "LookupError.*no such meal" if fails_by == "raises" else "the handler rejected the message"
    options: dict[str, Any] = {"start": "first", "orderly": orderly}
    if orderly:
        options["suspend_queue_s"] = 300
    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", fail, **options):
        with pytest.raises(RequestFailed, match=reason):
            await producer.request("t", b"soup", timeout_s=PATIENCE_S)


async def test_a_handler_that_asks_for_another_try_has_not_failed(node: Node) -> None:
    asked = asyncio.Event()

    async def later(message: Message) -> RetryLater:
        asked.set()
        return RetryLater()

    async with Producer(node.address) as producer, Consumer(node.address, "g", "t", later, start="first"):
        request = asyncio.create_task(producer.request("t", b"soup", timeout_s=PATIENCE_S))
        await asked.wait()
        await eventually(lambda: names.retry_topic("g") in {topic for topic, _ in node.broker.store.queues})
        assert not request.done()
        request.cancel()


async def test_a_message_that_goes_alone_leaves_those_of_a_broker_that_reads_nothing_where_they_are(
    nodes: Nodes, connect: Connect, requests: Requests
) -> None:
    home = await nodes.start()
    guest = await nodes.start(name="broker-b", name_servers=(home.address,))
    async with Producer(home.address, compress_over_bytes=1000) as producer:
        for address in (home.address, guest.address):
            await create_topic(await connect(address), "t", 1)
        fast, slow_queue = Queue("t", "broker-a", 0), Queue("t", "broker-b", 0)
        for queue in (fast, slow_queue):
            await producer.send("t", b"first", queue=queue)
        slow = producer._cluster.connected("broker-b")
        assert slow is not None
        slow.pause_writing()
        waits = asyncio.create_task(producer.send("t", b"small", queue=slow_queue))
        await asyncio.sleep(0)
        requests.taken()
        await producer.send("t", b"x" * 2000, queue=fast)
        assert requests.taken() == [RequestCode.SEND_MESSAGE_V2], "what the slow broker does not read is not written"
        assert not waits.done()
        slow.resume_writing()
        assert (await waits).status == "ok"


# The library logs by the standard `logging`; the broker's process writes JSON lines.


log = get_logger("rocketlet.some")


def test_a_record_has_the_fields_as_text_and_as_values(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("100% lost", message="4711", name="n", count=3)
    (record,) = caplog.records
    assert record.getMessage() == "100% lost message='4711' name='n' count=3"
    assert (record.event, record.fields) == ("100% lost", {"message": "4711", "name": "n", "count": 3})  # type: ignore[attr-defined]
    assert (record.name, record.levelname, record.funcName) == (
        "rocketlet.some", "WARNING", "test_a_record_has_the_fields_as_text_and_as_values",
    )  # fmt: skip


def test_an_application_sets_level_and_format() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
    logger = logging.getLogger("rocketlet")
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    try:
        log.info("not this")
        log.error("this", queue="q")
        try:
            raise RuntimeError("why")
        except RuntimeError:
            log.exception("failed")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    first, second, *traceback = out.getvalue().splitlines()
    assert (first, second) == ("ERROR:rocketlet.some:this queue='q'", "ERROR:rocketlet.some:failed")
    assert traceback[0].startswith("Traceback")
    assert traceback[-1] == "RuntimeError: why"


def test_structlog_is_loaded_when_something_is_logged() -> None:
    program = """
import sys
import rocketlet.client.consumer
from rocketlet.client.errors import get_logger
get_logger("rocketlet.some").info("not this")
print("structlog" in sys.modules)
get_logger("rocketlet.some").warning("this")
print("structlog" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    assert done.stderr == "this\n"


def test_the_brokers_process_writes_what_libraries_log_as_its_own_lines() -> None:
    program = """
import logging
from rocketlet.command.plumbing import logs
from rocketlet.client.errors import get_logger
logs.configure("info")
get_logger("rocketlet.some").warning("lost", message="4711")
logging.getLogger("asyncio").error("slow %s", "callback")
logging.getLogger("asyncio").debug("not this")
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    ours, theirs = (orjson.loads(line) for line in found.stderr.splitlines())
    assert (ours["event"], ours["message"], ours["level"], ours["logger"]) == (
        "lost",
        "4711",
        "warning",
        "rocketlet.some",
    )
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("slow callback", "error", "asyncio")
