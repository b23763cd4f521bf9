"""Options as given: found by their names, read as numbers, words, times and positions. The error for a wrong one names the
allowed values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from ..client.config import At, Start
from ..client.errors import ConfigError
from ..protocol import names
from ..protocol.queue import Queue
from .config import MAX_NUMBER, MAX_TIMEOUT_MS, SHOWN_CHARS

SPARKS_OWN: Final = ("path", "checkpointlocation", "queryname", "outputmode")
KAFKAS: Final = {
    "kafka.bootstrap.servers": "nameServer",
    "kafka.group.id": "group",
    "subscribe": "topic",
    "subscribepattern": "topicPattern",
    "maxoffsetspertrigger": "maxRowsPerTrigger",
    "includeheaders": "includeProperties",
}
"""Options of Spark's Kafka connector that have another name here."""
EARLIEST, LATEST = -2, -1
StartPlace = Start | Literal["committed"]
_PLACES: Final[Mapping[str, StartPlace]] = {"earliest": "first", "latest": "last", "committed": "committed"}


@dataclass(frozen=True, slots=True)
class Position:
    """A place in every queue. `default`: first, last, committed, or a store time in ms; `queues`: exact, where given by
    `option`."""

    default: StartPlace
    queues: Mapping[Queue, Start | At] = field(default_factory=dict)
    option: str = field(default="", compare=False)

    def of(self, queue: Queue) -> StartPlace | At:
        return self.queues.get(queue, self.default)


def check(option: str, fault: str | None) -> None:
    if fault:
        raise ConfigError(f"the option {option}: {fault}")


def _meant(name: str, spelled: Mapping[str, str]) -> str | None:
    """The option that somebody meant who mistyped it, or knows the one of Spark's Kafka connector."""
    known = KAFKAS.get(name)
    if known is not None and known in spelled.values():
        return known
    near = difflib.get_close_matches(name, spelled, 1)
    return spelled[near[0]] if near else None


class Given:
    """The options as given, by their proper names."""

    def __init__(
        self, options: Mapping[str, str], allowed: Mapping[str, str], kinds: Mapping[str, Mapping[str, str]]
    ) -> None:
        """allowed: the options and their values; kinds: all options by their purpose."""
        self._allowed = allowed
        spelled = {name.lower(): name for name in allowed}
        self._values = {spelled.get(name.lower(), name): value for name, value in options.items()}
        unknown = [name for name in self._values if name not in allowed and name.lower() not in SPARKS_OWN]
        if not self._values.keys() & allowed.keys():
            raise ConfigError(
                "no option reaches the source; nameServer and topic are needed. Spark keeps none of a table that "
                "CREATE TABLE ... USING rocketlet made: use CREATE TEMPORARY VIEW v USING rocketlet "
                "OPTIONS (nameServer '...', topic '...')"
            )
        if unknown:
            meant = _meant(unknown[0].lower(), spelled)
            hint = f"; did you mean {meant}?" if meant else "."
            other = [kind for kind, known in kinds.items() if unknown[0].lower() in map(str.lower, known)]
            if other:
                hint = f" here; it is one for {' and '.join(other)}."
            raise ConfigError(f"the option {unknown[0]} is unknown{hint} Options: {', '.join(allowed)}")

    def has(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: str = "") -> str:
        return self._values.get(name, default).strip()

    def required(self, name: str) -> str:
        value = self.get(name)
        if not value:
            raise ConfigError(f"the option {name} is missing: {self._allowed[name]}")
        return value

    def _wrong(self, name: str) -> ConfigError:
        value = self.get(name)
        shown = f"{value[:SHOWN_CHARS]}..." if len(value) > SHOWN_CHARS else value
        return ConfigError(f"the option {name} is {shown!r}; allowed: {self._allowed[name]}")

    def number(self, name: str, default: int = 0, least: int = 1, most: int = MAX_NUMBER) -> int:
        value = self.get(name, str(default))
        number = int(value) if re.fullmatch("[0-9]{1,19}", value) else -1
        if not least <= number <= most:
            raise self._wrong(name)
        return number

    def optional(self, name: str) -> int | None:
        """A positive number; None where it is not given."""
        return self.number(name) if self.has(name) else None

    def choice(self, name: str, *words: str) -> str:
        """The chosen one of the words, the first by default."""
        value = self.get(name, words[0])
        if value not in words:
            raise self._wrong(name)
        return value

    def seconds(self, name: str, default_ms: int) -> float:
        """The seconds of an option in ms."""
        return self.number(name, default_ms, most=MAX_TIMEOUT_MS) / 1000

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, str(default)).lower()
        if value not in ("true", "false"):
            raise self._wrong(name)
        return value == "true"

    def position(self, side: str, default: str, words: tuple[str, ...]) -> Position:
        """`side`Offsets or `side`Timestamp."""
        by_timestamp = f"{side}OffsetsByTimestamp"
        for name in (f"{side}Timestamp", by_timestamp):
            if self.has(name) and self.has(f"{side}Offsets"):
                raise ConfigError(f"the options {side}Offsets and {name} are both given; choose one")
        if self.has(f"{side}Timestamp") or self.has(by_timestamp):
            fallback: StartPlace = "first" if side == "starting" else "last"
            rest = self.number(f"{side}Timestamp") if self.has(f"{side}Timestamp") else fallback
            per_queue = self._per_queue(by_timestamp, _time) if self.has(by_timestamp) else {}
            return Position(rest, per_queue, by_timestamp)
        value = self.get(f"{side}Offsets", default)
        if value in words:
            return Position(_PLACES[value])
        name = f"{side}Offsets"
        if not value.startswith("{"):
            raise self._wrong(name)
        return Position("first" if side == "starting" else "last", self._per_queue(name, _place), name)

    def duration_s(self, name: str, default: str) -> float:
        found = re.fullmatch("([0-9]{1,19})(ms|s|m|min|h|d)", self.get(name, default))
        if found is None or not 0 < int(found[1]) <= MAX_NUMBER:
            raise self._wrong(name)
        return int(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}[found[2]]

    def queues(self, name: str) -> frozenset[Queue]:
        """The queues of an option that is a JSON list of queue ids per topic and broker."""
        try:
            queues = frozenset(
                Queue(topic, broker_name, _queue_id(queue_id))
                for topic, brokers in orjson.loads(self.get(name)).items()
                for broker_name, numbers in brokers.items()
                for queue_id in numbers
            )
            if not queues:
                raise ValueError
        except (ValueError, AttributeError, TypeError):
            raise self._wrong(name) from None
        for queue in queues:
            check(name, names.topic_fault(queue.topic))
        return queues

    def _per_queue(self, name: str, place: Callable[[Any], Start | At]) -> dict[Queue, Start | At]:
        try:
            return {
                Queue(topic, broker_name, _queue_id(int(queue_id))): place(value)
                for topic, brokers in orjson.loads(self.get(name)).items()
                for broker_name, queues in brokers.items()
                for queue_id, value in queues.items()
            }
        except (ValueError, AttributeError, TypeError):
            raise self._wrong(name) from None


def _place(offset: Any) -> Start | At:
    if type(offset) is not int or not EARLIEST <= offset <= MAX_NUMBER:
        raise ValueError(offset)
    words: dict[int, Start] = {EARLIEST: "first", LATEST: "last"}
    return words.get(offset, At(offset))


def _time(milliseconds: Any) -> Start:
    if type(milliseconds) is not int or not 0 <= milliseconds <= MAX_NUMBER:
        raise ValueError(milliseconds)
    return milliseconds


def _queue_id(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(number)
    return number
