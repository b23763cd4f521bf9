from __future__ import annotations

import base64
import hmac
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rocketlet.protocol import admin_bodies, bodies, config, group_bodies, headers, names
from rocketlet.protocol.admin_bodies import decode_trace
from rocketlet.protocol.allocation import (
    AVG,
    AveragelyByCircle,
    Configured,
    ConsistentHash,
    MachineRoomNearby,
    Strategy,
)
from rocketlet.protocol.bodies import BodyError, finish
from rocketlet.protocol.config import MAX_DEPTH, MAX_GROUP_CHARS, MAX_SHARED_QUEUES, MAX_TOPIC_CHARS, MAX_TOPICS_ASKED
from rocketlet.protocol.frame import JSON, MSGPACK, ROCKETMQ, ExtValue, Frame, FrameReader, encode
from rocketlet.protocol.group_bodies import TopicExtent, decode_extents, decode_topics, encode_extents, encode_topics
from rocketlet.protocol.headers import ACCESS_KEY, SIGNATURE, UNIQUE_KEY_QUERY, Signer
from rocketlet.protocol.names import Queue, counted, parse_subscription, sorted_ids
from rocketlet.protocol.settings import (
    GROUP_OPTIONS,
    GROUP_SETTINGS,
    GroupSettings,
    changed_group,
    encode_group_change,
)

from ..support.examples import examples

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


def test_attributes_of_a_new_group_are_named_as_additions() -> None:
    group = bodies.GroupConfig("g", attributes={"lite.bind.topic": "t"})
    found = orjson.loads(bodies.encode_new_group(group, {"groupName": "g", "onlyAtApache": 7}))
    assert found["attributes"] == {"+lite.bind.topic": "t"}
    assert (found["groupName"], found["onlyAtApache"]) == ("g", 7)


def test_table_of_group_settings_describes_every_field_and_attribute() -> None:
    """Only the group's name and settings that no client of Rocketlet uses have no row."""
    fields = {field.name for field in msgspec.structs.fields(bodies.GroupConfig)}
    unused = {"name", "attributes", "consume_from_min_enable", "consume_broadcast_enable", "notify_enable"}
    assert {row.field for row in GROUP_SETTINGS if row.field and not row.is_attribute} == fields - unused
    assert set(GroupSettings.__annotations__) == {row.field for row in GROUP_OPTIONS.values()}
    with pytest.raises(BodyError, match="unknown"):
        changed_group({"groupName": "g", "attributes": {"+no": "1"}}, lambda _: None)


def test_texts_and_numbers_of_subclasses_are_written_as_what_they_are() -> None:
    subscription = parse_subscription(Name("t"), names.Sql("a > 1"), kind=names.SQL92)
    heartbeat = bodies.Heartbeat(
        Name("c"), (bodies.ConsumerData(Name("g"), subscriptions=(subscription,)),), (Name("p"),)
    )
    assert bodies.decode_heartbeat(bodies.encode_heartbeat(heartbeat)) == heartbeat
    group = bodies.GroupConfig(Name("g"), retry_max_times=Number(3))
    assert bodies.decode_group(bodies.encode_group(group)) == bodies.GroupConfig("g", retry_max_times=3)
    altered = encode_group_change({"groupName": "g"}, {"retry_max_times": Number(3)})
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


# Bodies are checked where they come in: whatever a decoder returns has the types that it says, whatever it was
# given.


def _decode_registration(body: bytes) -> tuple[bodies.DataVersion, list[bodies.TopicConfig]]:
    return finish(bodies.decode_registration(body))


DECODERS: dict[str, tuple[Callable[[bytes], Any], type[msgspec.Struct]]] = {
    "heartbeat": (bodies.decode_heartbeat, bodies.HeartbeatShape),
    "group": (bodies.decode_group, bodies.GroupConfig),
    "version": (bodies.decode_data_version, bodies.DataVersion),
    "route": (bodies.decode_route, bodies.RouteShape),
    "cluster": (bodies.decode_cluster, bodies.ClusterShape),
    "topic list": (bodies.decode_topic_list, bodies.TopicListShape),
    "client check": (group_bodies.decode_client_check, group_bodies.ClientCheck),
    "lock": (group_bodies.decode_lock_request, group_bodies.LockShape),
    "locked": (group_bodies.decode_locked, group_bodies.LockAnswerShape),
    "members": (group_bodies.decode_members, group_bodies.MemberListShape),
    "assignment": (group_bodies.decode_assignment_request, group_bodies.AssignmentRequest),
    "registration": (_decode_registration, bodies.RegistrationShape),
    "offsets": (admin_bodies.decode_offsets, admin_bodies.OffsetTableShape),
    "status": (admin_bodies.decode_client_status, admin_bodies.ClientStatusShape),
    "progress": (admin_bodies.decode_consume_stats, admin_bodies.ConsumeStatsShape),
}

ODD: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, 0, -1, 5, 2**31, 2**63, 2**64 - 1, 1e300, "", "1", "x", "9" * 5000, "\0", "1e400"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "1", "broker-a", ""]), inner),
    max_leaves=6,
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """JSON values of a type, with something odd here and there."""
    good = _good_values(msgspec.inspect.type_info(kind))
    return good | good | good | ODD


def _good_values(info: Any) -> st.SearchStrategy[Any]:
    if isinstance(info, msgspec.inspect.StructType):
        return st.fixed_dictionaries(
            {}, optional={field.encode_name: _good_values(field.type) | ODD for field in info.fields}
        )
    if isinstance(info, msgspec.inspect.UnionType):
        return st.one_of(*map(_good_values, info.types))
    if isinstance(info, msgspec.inspect.ListType):
        return st.lists(_good_values(info.item_type) | ODD, max_size=3)
    if isinstance(info, msgspec.inspect.TupleType):
        return st.tuples(*map(_good_values, info.item_types)).map(list)
    if isinstance(info, msgspec.inspect.DictType):
        return st.dictionaries(
            st.sampled_from(["broker-a", "t", "0", "9", "{}"]), _good_values(info.value_type), max_size=3
        )
    if isinstance(info, msgspec.inspect.IntType):
        return st.integers(-5, 10)
    if isinstance(info, msgspec.inspect.BoolType):
        return st.booleans()
    return st.none() if isinstance(info, msgspec.inspect.NoneType) else st.sampled_from(["t", "g", "*", "A || B", ""])


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
@settings(max_examples=examples(30))
def test_a_decoder_returns_what_it_says_or_refuses(name: str, data: st.DataObject) -> None:
    decode, shape = DECODERS[name]
    body = orjson.dumps(data.draw(values_of(shape)))
    try:
        value = decode(body)
    except BodyError:
        return
    _check(value, typing.get_type_hints(decode)["return"])


@pytest.mark.parametrize("name", DECODERS)
@given(body=st.binary(max_size=60) | st.sampled_from([b"[" * 100_000, b'{"clientID":' * 50_000, b'"\\ud800"', b"\xff"]))
@settings(max_examples=examples(30))
def test_no_bytes_break_a_decoder(name: str, body: bytes) -> None:
    try:
        DECODERS[name][0](body)
    except BodyError:
        pass


def _check(value: Any, hint: Any) -> None:
    """Raises AssertionError where a value is not of the type that is written there."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return
    if origin in (typing.Union, type(int | str)):
        assert any(_is(value, kind) for kind in inner), (value, hint)
    elif origin in (tuple, list, frozenset):
        assert isinstance(value, origin)
        kinds = [inner[0]] * len(value) if origin is not tuple or inner[-1] is Ellipsis else inner
        for item, kind in zip(value, kinds, strict=True):
            _check(item, kind)
    elif origin in (dict, Mapping, typing.get_origin(Mapping[str, int])):
        for key, item in value.items():
            _check(key, inner[0])
            _check(item, inner[1])
    else:
        assert type(value) is hint, (value, hint)
        names = [item.name for item in fields(value)] if is_dataclass(value) else getattr(value, "_fields", ())
        if isinstance(value, msgspec.Struct):
            names = value.__struct_fields__
        for field, kind in typing.get_type_hints(hint).items() if names else ():
            if field in names:
                _check(getattr(value, field), kind)


def _is(value: Any, kind: Any) -> bool:
    try:
        _check(value, kind)
    except AssertionError:
        return False
    return True


GROUP = {"groupName": "g"}


@pytest.mark.parametrize(
    ("decode", "body", "limit"),
    [
        (bodies.decode_heartbeat, lambda n: {"clientID": "c", "consumerDataSet": [GROUP] * n}, config.MAX_GROUPS),
        (bodies.decode_heartbeat, lambda n: {"clientID": "c", "producerDataSet": [GROUP] * n}, config.MAX_GROUPS),
        (
            bodies.decode_heartbeat,
            lambda n: {"clientID": "c", "consumerDataSet": [GROUP | {"subscriptionDataSet": [{"topic": "t"}] * n}]},
            config.MAX_SUBSCRIPTIONS,
        ),
        (
            bodies.decode_heartbeat,
            lambda n: {"clientID": "c", "consumerDataSet": [GROUP | {"assigned": [["t", "b", 1]] * n}]},
            config.MAX_REQUEST_QUEUES,
        ),
        (
            bodies.decode_heartbeat,
            lambda n: {"clientID": "c", "consumerDataSet": [GROUP | {"queueCounts": {"b": {str(i): 1 for i in range(n)}}}]},
            config.MAX_SUBSCRIPTIONS,
        ),
        (bodies.decode_heartbeat, lambda n: {"clientID": "c" * n}, config.MAX_ID_CHARS),
        (
            group_bodies.decode_lock_request,
            lambda n: {
                "clientId": "c", "consumerGroup": "g", "mqSet": [{"topic": "t", "brokerName": "b", "queueId": 1}] * n,
            },
            config.MAX_REQUEST_QUEUES,
        ),
        (
            group_bodies.decode_client_check,
            lambda n: {"clientId": "c", "group": "g", "subscriptionData": {"subString": "x" * n}},
            config.MAX_EXPRESSION_CHARS,
        ),
        (
            bodies.decode_group,
            lambda n: GROUP | {"x": "x" * (n - len('{"groupName":"g","x":""}'))},
            config.MAX_JSON_BYTES,
        ),
    ],
)  # fmt: skip
def test_what_a_body_may_hold_is_limited_at_its_edge(
    decode: Callable[[bytes], Any], body: Callable[[int], Any], limit: int
) -> None:
    decode(orjson.dumps(body(limit)))
    with pytest.raises(BodyError, match=rf"{limit}"):
        decode(orjson.dumps(body(limit + 1)))


def test_fastjsons_dialect_is_read_up_to_its_limit() -> None:
    text = b'{0:0,"groupName":"g","x":"%b"}'
    pad = config.MAX_DIALECT_BYTES - len(text % b"")
    assert bodies.decode_group(text % (b"x" * pad)).name == "g"
    with pytest.raises(BodyError):
        bodies.decode_group(text % (b"x" * (pad + 1)))


def test_numbers_and_booleans_may_stand_there_as_text() -> None:
    group = bodies.decode_group(b'{"groupName":"g","retryQueueNums":"3","consumeEnable":"false"}')
    assert (group.retry_queues, group.consume_enable) == (3, False)


def _is_number(text: str) -> bool:
    """True if a reader takes the text for a 64-bit number: JSON's own spelling, without blanks, underscores or a plus."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return text == text.strip() and type(value) in (int, float) and value == int(value) and abs(value) <= 2**53


@example(text="+5")
@example(text=" 5")
@example(text="1_0")
@example(text="05")
@example(text="5.0")
@example(text="null")
@example(text="True")
@given(text=st.text("+-_ 05.e", max_size=5))
def test_a_number_in_a_text_is_read_when_it_is_spelled_as_in_json(text: str) -> None:
    body = orjson.dumps({"groupName": "g", "retryQueueNums": text, "retryMaxTimes": 7})
    if _is_number(text):
        assert bodies.decode_group(body).retry_queues == json.loads(text)
    else:
        with pytest.raises(BodyError, match=r"Expected `int`, got `str` - at `\$.retryQueueNums`"):
            bodies.decode_group(body)


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("True", True), ("TRUE", True), ("1", True), ("false", False), ("False", False), ("0", False)],
)
def test_a_boolean_in_a_text_is_read_in_any_case_of_letters(text: str, value: bool) -> None:
    assert bodies.decode_group(orjson.dumps({"groupName": "g", "consumeEnable": text})).consume_enable is value


@pytest.mark.parametrize("value", [None, "null", "+1", " true", "yes", "", 2, 1.0])
def test_what_is_not_a_boolean_is_refused(value: object) -> None:
    with pytest.raises(BodyError, match=r"Expected `bool`.* at `\$.consumeEnable`"):
        bodies.decode_group(orjson.dumps({"groupName": "g", "consumeEnable": value}))


@pytest.mark.parametrize("value", [None, True, 5.5, [5], {}])
def test_what_is_not_a_number_is_refused(value: object) -> None:
    with pytest.raises(BodyError, match=r"Expected `int`.* at `\$.retryQueueNums`"):
        bodies.decode_group(orjson.dumps({"groupName": "g", "retryQueueNums": value}))


TOPICS = [bodies.TopicConfig(f"topic-{number}", number % 9, 4) for number in range(2000)]


@pytest.mark.parametrize("spaces", [b"", b" ", b"\n\t"])
@pytest.mark.parametrize("extra", [{}, {"attributes": {"+a": '},"x":{'}, "b": None}, {"a": {}, "b": {"c": {}}}])
def test_a_large_registration_is_read_in_pieces_and_as_a_whole_alike(spaces: bytes, extra: dict[str, Any]) -> None:
    table = {topic.name: bodies.topic_json(topic) | extra for topic in TOPICS}
    version = {"timestamp": 7, "counter": 3}
    value = {"topicConfigSerializeWrapper": {"dataVersion": version, "topicConfigTable": table}}
    body = orjson.dumps(value).replace(b'},"topic-', b"}" + spaces + b"," + spaces + b'"topic-')
    work = bodies.decode_registration(body)
    assert sum(1 for _ in work) > len(body) // 65_536
    assert _decode_registration(body) == (bodies.DataVersion(7, 3), TOPICS)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"topic-1000":{', b'"topic-1000":['), (b"}}}}", b"}}}"), (b'"perm":6', b'"perm":"x"'), (b'"topic-9":{', b"5:{")],
)
def test_a_large_registration_that_is_damaged_is_refused(old: bytes, new: bytes) -> None:
    body = bodies.encode_registration(bodies.DataVersion(1), TOPICS)
    assert old in body
    with pytest.raises(BodyError):
        _decode_registration(body.replace(old, new, 1))


EIGHT = [Queue("T", "b-a", number) for number in range(8)]
THREE = ["10.0.0.1@1", "10.0.0.1@2", "10.0.0.1@3"]
SHARING: list[Strategy] = [
    AVG,
    AveragelyByCircle(),
    ConsistentHash(),
    MachineRoomNearby(AVG, lambda queue: queue.broker_name[0], lambda client_id: client_id[-1]),
]


@pytest.mark.parametrize(
    ("strategy", "shares"),
    [
        (AVG, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (AveragelyByCircle(), [[0, 3, 6], [1, 4, 7], [2, 5]]),
        (ConsistentHash(), [[0, 1, 2, 7], [4, 5, 6], [3]]),
    ],
)
def test_shares_are_those_of_apaches_strategies(strategy: Strategy, shares: list[list[int]]) -> None:
    found = [[queue.queue_id for queue in strategy.allocate(client, EIGHT, THREE)] for client in THREE]
    assert found == shares


@given(st.sampled_from(SHARING), st.integers(0, 40), st.integers(1, 12))
def test_every_queue_has_exactly_one_owner(strategy: Strategy, queues: int, members: int) -> None:
    every = sorted(Queue("T", f"b{n % 3}", n) for n in range(queues))
    ids = sorted_ids([f"c{number:02d}" for number in range(members)])
    given_out = [queue for client in ids for queue in strategy.allocate(client, every, ids)]
    assert sorted(given_out) == every


@given(st.integers(0, 100), st.integers(1, 30))
def test_averages_differ_by_one_at_most(queues: int, members: int) -> None:
    every = [Queue("T", "b", number) for number in range(queues)]
    ids = sorted_ids([f"c{number}" for number in range(members)])
    for strategy in (AVG, AveragelyByCircle()):
        sizes = [len(strategy.allocate(client, every, ids)) for client in ids]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("strategy", SHARING)
def test_a_stranger_gets_nothing(strategy: Strategy) -> None:
    assert strategy.allocate("stranger", EIGHT, THREE) == []


def test_configured_queues_are_taken_if_they_exist() -> None:
    other = Queue("T", "b-z", 0)
    assert Configured((EIGHT[2], other)).allocate("c", EIGHT, THREE) == [EIGHT[2]]


def test_a_room_without_members_is_shared_by_all() -> None:
    queues = [Queue("T", "a", 0), Queue("T", "a", 1), Queue("T", "z", 0), Queue("T", "z", 1)]
    near = MachineRoomNearby(AVG, lambda queue: queue.broker_name, lambda client: client[0])
    assert near.allocate("a1", queues, ["a1", "a2"]) == [queues[0], queues[2]]
    with pytest.raises(ValueError, match="has no machine room"):
        MachineRoomNearby(AVG, lambda queue: "", lambda client: "r").allocate("a1", queues, ["a1"])


def test_members_are_sorted_as_java_sorts() -> None:
    assert sorted_ids(["b", "a", "\U0001f600", "\uffff"]) == ["a", "b", "\U0001f600", "\uffff"]


SPANS = st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)), max_size=20)
EXTENTS = st.builds(
    lambda identity, rewinds, spans: TopicExtent(
        identity, rewinds, tuple(begin for begin, _ in spans), tuple(end for _, end in spans)
    ),
    st.text("0123456789abcdef", max_size=16),
    st.integers(0, 2**31),
    SPANS,
)


@given(st.dictionaries(st.text("abc%-", min_size=1), EXTENTS))
def test_what_a_broker_sends_is_read_back(extents: dict[str, TopicExtent]) -> None:
    assert decode_extents(encode_extents(extents)) == extents


def test_as_many_topics_as_are_allowed_may_be_asked_for() -> None:
    topics = [f"t{number}" for number in range(MAX_TOPICS_ASKED)]
    assert decode_topics(encode_topics(topics)) == topics
    with pytest.raises(BodyError, match=f"length <= {MAX_TOPICS_ASKED}"):
        decode_topics(encode_topics([*topics, "one more"]))


@given(st.binary(max_size=60))
def test_no_body_breaks_a_decoder_of_extents(body: bytes) -> None:
    for decode in (decode_extents, decode_topics):
        try:
            decode(body)
        except BodyError:
            pass


@pytest.mark.parametrize("body", [b'{"t": ["a", 0, [1], []]}', b'{"t": ["a", 0, [1]]}', b'{"t": 5}', b"[]"])
def test_what_says_no_extents_is_refused(body: bytes) -> None:
    with pytest.raises(BodyError):
        decode_extents(body)


# Numbers are said with their nouns.


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 messages"), (1, "1 message"), (2, "2 messages"), (12_345, "12,345 messages")]
)
def test_one_is_singular_and_all_others_plural(count: int, text: str) -> None:
    assert counted(count, "message") == text


def test_a_verb_goes_with_its_number() -> None:
    assert [counted(count, "queue is", "queues are") for count in (1, 2)] == ["1 queue is", "2 queues are"]


# Signatures as Apache's clients make them.


FIELD_NAMES = st.text("abcXYZ_", min_size=1, max_size=5)
FIELD_VALUES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])), st.integers(-(2**63), 2**63 - 1), st.booleans()
)
SIGNED_FIELDS = st.dictionaries(FIELD_NAMES, FIELD_VALUES, max_size=8)


def test_the_signature_is_apaches() -> None:
    """Values in the order of their names, then the body; HMAC-SHA1; Base64."""
    ext: dict[str, ExtValue] = {"topic": "t", "AccessKey": "service-1", "queueId": 3, "batch": False, "größe": "ß"}
    content = "service-1" + "false" + "ß" + "3" + "t"
    expected = base64.b64encode(hmac.digest(b"a-long-secret", content.encode() + b"body", "sha1")).decode()
    assert Signer("a-long-secret").signature({**ext, SIGNATURE: "former"}, b"body") == expected


@given(SIGNED_FIELDS, st.binary(), st.sampled_from([JSON, ROCKETMQ, MSGPACK]))
def test_a_signed_frame_is_recognized_in_every_encoding(
    ext: dict[str, ExtValue], body: bytes, serialize_type: int
) -> None:
    signer = Signer("a-long-secret")
    ext = {**ext, ACCESS_KEY: "service-1"}
    sent = Frame(10, 1, {**ext, SIGNATURE: signer.signature(ext, body)}, body, serialize_type=serialize_type)
    (read,) = FrameReader().feed(encode(sent))
    assert signer.has_signed(read.ext, read.body)
    assert not Signer("another-secret").has_signed(read.ext, read.body)
    assert not signer.has_signed(read.ext, read.body + b"x")
    assert not signer.has_signed({**read.ext, "zzz": "x"}, read.body)


def test_the_field_that_only_apaches_client_signs_may_count_or_not() -> None:
    signer = Signer("a-long-secret")
    ext: dict[str, ExtValue] = {"topic": "t", ACCESS_KEY: "service-1", UNIQUE_KEY_QUERY: "true"}
    for without in ("", UNIQUE_KEY_QUERY):
        assert signer.has_signed({**ext, SIGNATURE: signer.signature(ext, b"", without)}, b"")


@pytest.mark.parametrize("shown", [None, 5, True, "", "größe", "x" * 28, "x" * 100_000, b"bytes", ["list"]])
def test_what_is_no_signature_is_none(shown: object) -> None:
    ext: dict[str, object] = {"topic": "t", SIGNATURE: shown}
    assert not Signer("a-long-secret").has_signed(ext, b"")  # type: ignore[arg-type]


def test_names_of_queues_are_shared_between_responses_up_to_a_limit() -> None:
    for count, are_shared in ((MAX_SHARED_QUEUES, True), (MAX_SHARED_QUEUES + 1, False)):
        zeros = ",".join("0" * count)
        body = f'{{"columns":[["t","b",[{zeros}],[{zeros}],[]]]}}'.encode()
        first, second = (list(admin_bodies.decode_consume_stats(body)) for _ in range(2))
        assert first == second
        assert len(first) == count
        assert (first[0] is second[0]) is are_shared


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (("Pub", 5, "r", "g", "t", "id", "tag", "k", "h:1", 9, 3, 0, "true"), ("g", 5, 3, True)),
        (("Pub", 5, "r", "g", "t", "id", "tag", "k", "h:1", 9, 3, 0, "offset", "false"), ("g", 5, 3, False)),
        (("Pub", 5, "r", "g", "t", "id", "tag", "k", "h:1", 9, 3, 0, "offset", "true", "c:2"), ("g", 5, 3, True)),
        (("SubBefore", 5, "r", "g", "call", "id", 2, "k"), ("g", 5, 0, True)),
        (("SubAfter", "call", "id", 7, "false", "k", 4), ("", 0, 7, False)),
        (("SubAfter", "call", "id", 7, "true", "k", 0, 5, "g"), ("g", 5, 7, True)),
        (
            ("EndTransaction", 5, "r", "g", "t", "id", "tag", "k", "h:1", 2, "tx", "COMMIT_MESSAGE", "false"),
            ("g", 5, 0, True),
        ),
    ],
)
def test_trace_records_of_each_release_are_decoded(fields: tuple[object, ...], wanted: tuple[object, ...]) -> None:
    text = "\x01".join(map(str, fields)) + "\x02"
    broken = "\x01".join(map(str, fields[:4])) + "\x02"
    (found,) = decode_trace(f"{broken}{text}unknown\x02".encode())
    assert (found.kind, found.message_id) == (fields[0], "id")
    assert (found.group, found.time_ms, found.took_ms, found.is_success) == wanted
