"""REGISTER_BROKER's body: a broker's topics, as JSON or compressed."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Final

import msgspec
import orjson

from .bodies import (
    DataVersion,
    TopicConfig,
    TopicShape,
    VersionShape,
    read_topic,
    topic_json,
    topic_of,
    version_json,
    version_of,
)
from .config import MAX_DIALECT_BYTES, MAX_REGISTRATION_BYTES
from .schema import BodyError, Shape, reads
from .work import SLICE, Work

_WHOLE_BYTES: Final = MAX_DIALECT_BYTES  # a registration up to this is read at once, and in fastjson's dialect, too
_PIECE_BYTES: Final = 16_384
_TRIES: Final = 16  # to find where a topic ends that has objects inside
_INFLATED_BYTES: Final = 262_144  # in one piece of work
_BETWEEN: Final = re.compile(rb'\}\s*,\s*("[^"\\]*"\s*:\s*\{)')  # where one topic may end and the next begin


def encode_registration(version: DataVersion, topics: Iterable[TopicConfig]) -> bytes:
    """REGISTER_BROKER's body, uncompressed."""
    return orjson.dumps(
        {
            "filterServerList": [],
            "topicConfigSerializeWrapper": {
                "dataVersion": version_json(version),
                "topicConfigTable": {topic.name: topic_json(topic) for topic in topics},
            },
        }
    )


class TopicTableShape(Shape):
    data_version: VersionShape | None = None
    topic_config_table: dict[str, TopicShape] | None = None


class RegistrationShape(Shape):
    topic_config_serialize_wrapper: TopicTableShape


@reads("broker registration's version", VersionShape, max_bytes=MAX_REGISTRATION_BYTES)
def _decode_version(data: VersionShape) -> DataVersion:
    return version_of(data)


@reads("broker registration", RegistrationShape, max_bytes=MAX_REGISTRATION_BYTES)
def _decode_whole(data: RegistrationShape) -> tuple[DataVersion, list[TopicConfig]]:
    wrapper = data.topic_config_serialize_wrapper
    return version_of(wrapper.data_version), list(map(topic_of, (wrapper.topic_config_table or {}).values()))


class _RawTableShape(Shape):
    data_version: VersionShape | None = None
    topic_config_table: msgspec.Raw = msgspec.Raw(b"{}")


class _RawShape(Shape):
    topic_config_serialize_wrapper: _RawTableShape


_raw = msgspec.json.Decoder(_RawShape, strict=False)


@reads("broker registration's topics", dict[str, TopicShape])
def _decode_topics(data: dict[str, TopicShape]) -> list[TopicConfig]:
    return list(map(topic_of, data.values()))


def decode_registration(body: bytes) -> Work[tuple[DataVersion, list[TopicConfig]]]:
    """Raises BodyError."""
    if len(body) <= _WHOLE_BYTES:
        return _decode_whole(body)
    if len(body) > MAX_REGISTRATION_BYTES:
        raise BodyError(f"the broker registration has {len(body)} bytes; {MAX_REGISTRATION_BYTES} are allowed")
    try:
        wrapper = _raw.decode(body).topic_config_serialize_wrapper
    except (msgspec.DecodeError, RecursionError) as error:
        raise BodyError(f"the broker registration body cannot be read: {error}") from None
    yield
    table = bytes(wrapper.topic_config_table).strip()
    topics = (yield from _topics_in(table)) if table != b"null" else []
    return version_of(wrapper.data_version), topics


def _topics_in(table: bytes) -> Work[list[TopicConfig]]:
    """The topics of a JSON object, a few KB at a time. Where one topic ends is guessed, and tried: what can be read from one
    place to another, as the whole of an object, begins and ends between two entries."""
    topics: list[TopicConfig] = []
    at = table.find(b"{") + 1
    end = table.rfind(b"}")
    while at < end:
        stop = at + _PIECE_BYTES
        for tried in range(_TRIES + 1):
            between = _BETWEEN.search(table, min(stop, end), end)
            stop, following = (between.start() + 1, between.start(1)) if between else (end, end)
            try:
                topics += _decode_topics(b"{%b}" % table[at:stop])
                break
            except BodyError:
                if between is None or tried == _TRIES:
                    raise
        at = following
        yield
    return topics


def decode_compressed_registration(body: bytes) -> Work[tuple[DataVersion, list[TopicConfig]]]:
    """A zlib stream: the version's JSON, then each topic as a line `name read write perm filterType`, lengths in front."""
    plain = yield from _inflated(body)
    parts = _Parts(plain)
    topics: list[TopicConfig] = []
    try:
        version = _decode_version(parts.part())
        for number in range(parts.count()):
            topics.append(_topic_of_line(parts.part().decode().split(" ")))
            if number % SLICE == 0:
                yield
    except ValueError as error:
        raise BodyError(f"the compressed broker registration cannot be read: {error}") from None
    return version, topics


def _topic_of_line(line: list[str]) -> TopicConfig:
    name, read, write, perm, *_ = line
    return read_topic({"topicName": name, "readQueueNums": read, "writeQueueNums": write, "perm": perm})


def _inflated(body: bytes) -> Work[bytes]:
    stream = zlib.decompressobj()
    found: list[bytes] = []
    size = 0
    try:
        while not stream.eof and size <= MAX_REGISTRATION_BYTES:
            piece = stream.decompress(stream.unconsumed_tail or (body if not found else b""), _INFLATED_BYTES)
            if not piece and not stream.unconsumed_tail:
                break
            found.append(piece)
            size += len(piece)
            yield
    except zlib.error as error:
        raise BodyError(f"the compressed broker registration cannot be read: {error}") from None
    if not stream.eof or size > MAX_REGISTRATION_BYTES:
        raise BodyError(f"the broker registration is cut off, or inflates to more than {MAX_REGISTRATION_BYTES} bytes")
    return b"".join(found)


class _Parts:
    """Numbers and byte strings with their length in front. Raises ValueError for a length that the rest cannot hold."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def count(self) -> int:
        """How many parts follow: each has its length in front."""
        number = int.from_bytes(self._take(4), "big")
        if number > (len(self._data) - self._at) // 4:
            raise ValueError(f"{number} parts in {len(self._data) - self._at} bytes")
        return number

    def part(self) -> bytes:
        return self._take(int.from_bytes(self._take(4), "big"))

    def _take(self, size: int) -> bytes:
        begin, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(f"{size} bytes at byte {begin} of {len(self._data)}")
        return self._data[begin : self._at]
