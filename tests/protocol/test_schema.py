"""Bodies are checked where they come in: whatever a decoder returns has the types that it says, whatever it was given."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rocketlet.protocol import admin_bodies, bodies, config, group_bodies
from rocketlet.protocol.bodies import BodyError, finish


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
