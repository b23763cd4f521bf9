"""The source's options. A wrong one names itself and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..client.config import Start
from ..client.errors import ConfigError
from ..protocol import names
from ..protocol.subscription import Subscription, SubscriptionError, parse_subscription

ALLOWED = {
    "nameServer": "host:port, several separated by ;",
    "topic": "one topic, or several separated by commas",
    "group": "the consumer group that the query is a member of",
    "tags": "a tag expression such as `TagA || TagB`; default: *",
    "startingOffsets": "earliest, latest, or a store time in ms; where a new group begins; default: earliest",
    "maxRowsPerTrigger": "a positive number; default: no limit",
    "releaseTimeoutMs": "how long a queue that another member wants waits for its batch; default: 60000",
    "failOnDataLoss": "true or false; default: true",
    "arrowBatchSize": "rows of an Arrow batch, at most; default: 10000",
}


@dataclass(frozen=True, slots=True)
class SourceOptions:
    name_server: str
    group: str
    subscriptions: tuple[Subscription, ...]
    start: Start = "first"
    max_rows: int | None = None
    release_timeout_s: float = 60.0
    fail_on_data_loss: bool = True
    arrow_batch_size: int = 10_000


def parse(options: Mapping[str, str]) -> SourceOptions:
    """Reads the options, whose names Spark compares without regard to case. Raises ConfigError."""
    spelled = {name.lower(): name for name in ALLOWED}
    given = {spelled.get(name.lower(), name): value for name, value in options.items()}
    unknown = [name for name in given if name not in ALLOWED and name != "path"]
    if unknown:
        known = "; ".join(f"{name} ({meaning})" for name, meaning in ALLOWED.items())
        raise ConfigError(f"the option {unknown[0]} is unknown. Options: {known}")
    fault = names.group_fault(_required(given, "group"))
    if fault:
        raise ConfigError(f"the option group: {fault}")
    return SourceOptions(
        name_server=_required(given, "nameServer"),
        group=given["group"],
        subscriptions=_subscriptions(_required(given, "topic"), given.get("tags", "*")),
        start=_start(given.get("startingOffsets", "earliest")),
        max_rows=_number(given, "maxRowsPerTrigger") if "maxRowsPerTrigger" in given else None,
        release_timeout_s=_number(given, "releaseTimeoutMs", 60_000) / 1000,
        fail_on_data_loss=_boolean(given, "failOnDataLoss", True),
        arrow_batch_size=_number(given, "arrowBatchSize", 10_000),
    )


def _required(given: Mapping[str, str], name: str) -> str:
    value = given.get(name, "").strip()
    if not value:
        raise ConfigError(f"the option {name} is missing: {ALLOWED[name]}")
    return value


def _subscriptions(topics: str, tags: str) -> tuple[Subscription, ...]:
    parsed: list[Subscription] = []
    for topic in (part.strip() for part in topics.split(",")):
        fault = names.topic_fault(topic)
        if fault:
            raise ConfigError(f"the option topic: {fault}")
        try:
            parsed.append(parse_subscription(topic, tags, version=1))
        except SubscriptionError as error:
            raise ConfigError(f"the option tags: {error}") from None
    return tuple(parsed)


def _start(value: str) -> Start:
    if value.isdigit():
        return int(value)
    if value not in ("earliest", "latest"):
        raise ConfigError(f"the option startingOffsets is {value!r}; allowed: {ALLOWED['startingOffsets']}")
    return "first" if value == "earliest" else "last"


def _number(given: Mapping[str, str], name: str, default: int = 0) -> int:
    value = given.get(name, str(default)).strip()
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"the option {name} is {value!r}; allowed: {ALLOWED[name]}")
    return int(value)


def _boolean(given: Mapping[str, str], name: str, default: bool) -> bool:
    value = given.get(name, str(default)).lower()
    if value not in ("true", "false"):
        raise ConfigError(f"the option {name} is {value!r}; allowed: true, false")
    return value == "true"
