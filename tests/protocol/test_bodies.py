from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rocketlet.protocol import bodies, group_bodies, headers, names
from rocketlet.protocol.bodies import BodyError
from rocketlet.protocol.config import MAX_DEPTH, MAX_GROUP_CHARS, MAX_TOPIC_CHARS
from rocketlet.protocol.names import Queue, parse_subscription

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_valid_json_is_read_as_it_is(value: Any) -> None:
    assert bodies.loads(orjson.dumps(value)) == value


@given(JSON_VALUES)
def test_the_lenient_reader_agrees_with_the_strict_one(value: Any) -> None:
    text = orjson.dumps({"0": value}).decode()
    assert bodies.loads(text.replace('"0"', "0", 1).encode()) == {"0": value}


def test_fastjsons_unquoted_keys_are_read() -> None:
    text = b'{"offsetTable":{{"brokerName":"b-a","queueId":0,"topic":"T"}:5},"addrs":{0:"h:1",1:"h:2"}}'
    value = bodies.loads(text)
    assert value["addrs"] == {"0": "h:1", "1": "h:2"}
    ((key, offset),) = value["offsetTable"].items()
    assert (orjson.loads(key), offset) == ({"brokerName": "b-a", "queueId": 0, "topic": "T"}, 5)


KEYS = st.dictionaries(
    st.text(st.sampled_from('ab{}[]":, \\'), max_size=4),
    st.integers(-20, 20) | st.text(st.sampled_from('ab{}[]":, \\'), max_size=6),
    max_size=3,
)


@given(st.lists(st.tuples(KEYS, JSON_VALUES | KEYS), max_size=4))
def test_objects_as_keys_are_read_as_token_by_token(pairs: list[tuple[dict[str, Any], Any]]) -> None:
    text = b'{"table":%b}' % bodies.object_keys(pairs)
    wanted = {orjson.dumps(key).decode(): value for key, value in pairs}
    assert bodies.loads(text) == {"table": wanted}


@pytest.mark.parametrize("text", [b"", b"{", b"{1}", b"[1", b'{"a":}', b"nope", b"{1:2}}", b"\xff", b"[" * 100])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(bodies.JsonError):
        bodies.loads(text)


@given(st.binary(max_size=80))
def test_no_body_breaks_a_decoder(body: bytes) -> None:
    for decode in (
        bodies.decode_heartbeat,
        group_bodies.decode_lock_request,
        bodies.decode_route,
        bodies.decode_group,
    ):
        try:
            decode(body)
        except BodyError:
            pass


def test_a_heartbeat_comes_back_as_it_was() -> None:
    heartbeat = bodies.Heartbeat(
        "10.0.0.1@1#2",
        (bodies.ConsumerData("g", subscriptions=(parse_subscription("t", "A || B", version=7),), strategy="AVG"),),
        ("p",),
    )
    assert bodies.decode_heartbeat(bodies.encode_heartbeat(heartbeat)) == heartbeat


class Name(str):
    """A text as users may give it, such as NumPy's."""

    __slots__ = ()


class Number(int):
    pass


def test_texts_and_numbers_of_subclasses_are_written_as_what_they_are() -> None:
    subscription = parse_subscription(Name("t"), names.Sql("a > 1"), kind=names.SQL92)
    heartbeat = bodies.Heartbeat(
        Name("c"), (bodies.ConsumerData(Name("g"), subscriptions=(subscription,)),), (Name("p"),)
    )
    assert bodies.decode_heartbeat(bodies.encode_heartbeat(heartbeat)) == heartbeat
    group = bodies.GroupConfig(Name("g"), retry_max_times=Number(3))
    assert bodies.decode_group(bodies.encode_group(group)) == bodies.GroupConfig("g", retry_max_times=3)
    altered = bodies.encode_altered({"groupName": "g"}, {"retry_max_times": Number(3)})
    assert bodies.decode_group(altered).retry_max_times == 3
    request = group_bodies.LockRequest(Name("c"), Name("g"), (Queue(Name("t"), Name("b"), Number(1)),))
    assert group_bodies.decode_lock_request(group_bodies.encode_lock_request(request)) == request
    with pytest.raises(TypeError, match="object"):
        bodies.encode_json(object())


def test_a_go_clients_heartbeat_is_read() -> None:
    body = (
        b'{"clientID":"c","producerDataSet":[],"consumerDataSet":[{"groupName":"g","consumeType":"CONSUME_PASSIVELY",'
        b'"messageModel":1,"consumeFromWhere":0,"subscriptionDataSet":[{"topic":"t","subString":"TagA",'
        b'"tagsSet":["TagA"],"codeSet":["2598919"],"subVersion":1700000000000000000,"expressionType":""}]}]}'
    )
    (consumer,) = bodies.decode_heartbeat(body).consumers
    (subscription,) = consumer.subscriptions
    assert (consumer.message_model, consumer.consume_from) == ("CLUSTERING", "CONSUME_FROM_LAST_OFFSET")
    assert (subscription.kind, subscription.version) == ("TAG", 1_700_000_000_000_000_000)
    assert subscription.codes == {2598919}


def test_bodies_have_no_blanks_because_go_reads_them_as_text() -> None:
    route = bodies.Route((bodies.QueueData("b", 8, 8, 6),), (bodies.BrokerData("b", {0: "h:1"}, "c"),))
    assert b" " not in bodies.encode_route(route)
    assert bodies.decode_route(bodies.encode_route(route)) == route


def test_locks_carry_epochs() -> None:
    queue = Queue("t", "b", 1)
    assert group_bodies.decode_locked(group_bodies.encode_locked({queue: 9})) == {queue: 9}
    assert group_bodies.decode_locked(b'{"lockOKMQSet":[{"brokerName":"b","queueId":1,"topic":"t"}]}') == {queue: 0}
    assert group_bodies.decode_committed(group_bodies.encode_locked({queue: 9}, {queue: 4})) == {queue: 4}
    assert group_bodies.decode_committed(group_bodies.encode_locked({queue: 9})) == {}
    request = group_bodies.LockRequest("c", "g", (queue,), True, {queue: 3}, {queue: 7})
    assert group_bodies.decode_lock_request(group_bodies.encode_lock_request(request)) == request


def test_header_errors_name_the_field() -> None:
    with pytest.raises(headers.HeaderError, match="queueId is missing"):
        headers.read(headers.TopicQueue, {"topic": "t"})
    with pytest.raises(headers.HeaderError, match="queueId is 'x'"):
        headers.read(headers.TopicQueue, {"topic": "t", "queueId": "x"})
    with pytest.raises(headers.HeaderError, match="'b'"):
        headers.read_send_v2({"a": "g"})


def _number(value: Any) -> int | None:
    """The number that Python's int() makes of a header field, if it has at most 64 bits."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if -(2**63) <= number < 2**63 else None


@example("+5")
@example(" 5")
@example("1_0")
@example("05")
@example("5.0")
@example("1e3")
@example("null")
@example("True")
@example("9223372036854775808")
@example(True)
@example(5.0)
@example("\u0665")
@given(st.text("+-_ 05.e", max_size=5) | st.integers() | st.booleans())
def test_a_number_in_a_header_is_read_as_by_int(value: Any) -> None:
    ext = {"topic": "t", "queueId": value}
    send = {"a": "g", "b": "t", "c": "d", "d": value, "e": 1, "f": 0, "g": 0, "h": 0}
    number = _number(value)
    if number is None:
        with pytest.raises(headers.HeaderError, match="queueId is"):
            headers.read(headers.TopicQueue, ext)
    else:
        assert headers.read(headers.TopicQueue, ext).queue_id == number
        assert headers.read_send_v2(send).default_topic_queue_nums == number


@pytest.mark.parametrize(
    ("value", "flag"),
    [
        ("true", True),
        ("True", True),
        (True, True),
        ("1", False),
        (1, False),
        ("yes", False),
        (" true", False),
        ("", False),
    ],
)
def test_a_boolean_in_a_header_is_true_only_if_it_says_so(value: Any, flag: bool) -> None:
    assert headers.read(headers.IsOrder, {"isOrder": value}).is_order is flag


@given(
    st.builds(
        headers.PullMessage,
        *[st.text(max_size=5)] * 2,
        *[st.integers(0, 2**40)] * 7,
        max_msg_bytes=st.none() | st.integers(0, 2**63 - 1),  # builds() would take any integer for an optional one
    )
)
def test_headers_come_back_as_they_were(header: headers.PullMessage) -> None:
    assert headers.read(headers.PullMessage, headers.write(header)) == header
    texts = {key: str(value) for key, value in headers.write(header).items()}
    assert headers.read(headers.PullMessage, texts) == header


@pytest.mark.parametrize("topic", ["", " ", "a b", "a.b", "x" * 128, "tröte", "a\n"])
def test_illegal_topics_are_named(topic: str) -> None:
    assert names.topic_fault(topic)


def test_names_are_legal_up_to_their_longest() -> None:
    assert names.topic_fault("x" * MAX_TOPIC_CHARS) is None
    assert names.topic_fault("x" * (MAX_TOPIC_CHARS + 1))
    assert names.group_fault("x" * MAX_GROUP_CHARS) is None
    assert names.group_fault("x" * (MAX_GROUP_CHARS + 1))
    assert names.topic_fault(names.retry_topic("x" * MAX_GROUP_CHARS)) is None


def test_json_in_fastjsons_dialect_is_nested_up_to_the_limit() -> None:
    def nested(levels: int) -> bytes:
        return b"{1:" + b"[" * levels + b"]" * levels + b"}"

    deepest = MAX_DEPTH
    assert bodies.loads(nested(deepest))
    with pytest.raises(bodies.JsonError, match=f"deeper than {MAX_DEPTH}"):
        bodies.loads(nested(deepest + 1))


@pytest.mark.parametrize("topic", ["a", "%RETRY%g", "a|b_c-1", "x" * 127])
def test_legal_topics_pass(topic: str) -> None:
    assert names.topic_fault(topic) is None
