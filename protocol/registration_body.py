"""REGISTER_BROKER's body: a broker's topics, as JSON or compressed."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

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
from .limits import MAX_REGISTRATION_BYTES
from .schema import BodyError, Shape, reads


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
def decode_registration(data: RegistrationShape) -> tuple[DataVersion, list[TopicConfig]]:
    wrapper = data.topic_config_serialize_wrapper
    return version_of(wrapper.data_version), list(map(topic_of, (wrapper.topic_config_table or {}).values()))


def decode_compressed_registration(body: bytes) -> tuple[DataVersion, list[TopicConfig]]:
    """A zlib stream: the version's JSON, then each topic as a line `name read write perm filterType`, lengths in front."""
    parts = _Parts(_inflated(body))
    try:
        version = _decode_version(parts.part())
        lines = [parts.part().decode().split(" ") for _ in range(parts.count())]
        return version, [_topic_of_line(line) for line in lines]
    except ValueError as error:
        raise BodyError(f"the compressed broker registration cannot be read: {error}") from None


def _topic_of_line(line: list[str]) -> TopicConfig:
    name, read, write, perm, *_ = line
    return read_topic({"topicName": name, "readQueueNums": read, "writeQueueNums": write, "perm": perm})


def _inflated(body: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(body, MAX_REGISTRATION_BYTES)
    except zlib.error as error:
        raise BodyError(f"the compressed broker registration cannot be read: {error}") from None
    if not stream.eof:
        raise BodyError(f"the broker registration is cut off, or inflates to more than {MAX_REGISTRATION_BYTES} bytes")
    return plain


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
