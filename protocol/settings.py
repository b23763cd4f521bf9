"""The settings of groups and topics at a broker, in one table each.

The broker's checks, the checks of `AdminClient`, the options and reports of `rocketlet groups` and `rocketlet topics`, the
console's form of a group and docs/reference/administration.md come from `GROUP_SETTINGS` and `TOPIC_SETTINGS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypedDict

import msgspec

from .bodies import (
    DEDUP,
    DEDUP_FLAG,
    EXCLUSIVE,
    LITE_BIND,
    LITE_EVENTS,
    LITE_EXPIRATION,
    LITE_MODEL,
    LITE_QUOTA,
    LITE_RESET_EXCLUSIVE,
    LITE_RESET_UNSUBSCRIBED,
    LITE_WILDCARD,
    MESSAGE_TYPE,
    MESSAGE_TYPES,
    PRIORITY_FACTOR,
    RETRIED_FIRST,
    SHARED,
    BodyError,
    GroupConfig,
    Shape,
    TopicConfig,
    dedup_fault,
    encode_group_in,
    expiration_fault,
    rate_fault,
    read_group,
    reads,
)
from .codes import MAX_PERM
from .config import MAX_RETRY_QUEUES, MAX_RETRY_TIMES, MAX_TOPIC_QUEUES
from .names import topic_fault

MAX_LONG: Final = 2**63 - 1
MAX_INT: Final = 2**31 - 1
ON_OFF: Final = ("on", "off")
_BOOLEANS: Final = {"true": True, "false": False}
Value = bool | int | str
Report = Mapping[str, str | int]
"""Settings by the names of their options with underscores, and attributes without an option by their own names."""


@dataclass(frozen=True, slots=True)
class ResourceSetting:
    """A setting of a group or a topic.

    Attributes:
        name: its name on the wire: of a JSON field or an attribute
        field: its name in GroupConfig or TopicConfig; empty for an attribute that only Apache's tools set
        default: the value without this setting, if it has a field
        help: what it sets, as a noun phrase or an imperative
        option: its option on the command line, without dashes; empty if it has none
        least, most: the bounds of a number
        choices: its valid values; empty if `least` and `most` or `check` decide
        check: returns why a text is invalid
        is_attribute: True for an attribute: a request without it keeps its value
        is_own: True if only Rocketlet has it. Apache's tools do not send it, so that a request without it keeps its value
        alias: its argument of `AdminClient`, if it is not `field`
    """

    name: str
    field: str = ""
    default: Value = ""
    help: str = ""
    option: str = ""
    least: int = 0
    most: int = MAX_LONG
    choices: tuple[Value, ...] = ()
    check: Callable[[str], str | None] | None = None
    is_attribute: bool = False
    is_own: bool = False
    alias: str = ""

    @property
    def argument(self) -> str:
        return self.alias or self.field

    def value(self, config: GroupConfig | TopicConfig) -> Value:
        found: Value = getattr(config, self.field)
        return found

    def shown(self, value: Value) -> str | int:
        """Return a value as reports show it."""
        return ON_OFF[not value] if isinstance(value, bool) else value

    def fault(self, value: Value, argument: str = "") -> str | None:
        """Return why a value, or the text of an attribute, is invalid; None if it is valid.

        Args:
            argument: the name of the value in the error, if it is not the name on the wire
        """
        text = str(value)
        if isinstance(value, bool):
            return None
        if isinstance(self.default, bool):
            fault = None if text in _BOOLEANS else f"got {text[:40]!r}; expected true or false"
        elif self.choices:
            expected = ", ".join(map(str, self.choices))
            fault = None if text in map(str, self.choices) else f"got {text[:40]!r}; expected one of {expected}"
        elif self.check is not None:
            fault = self.check(text)
        else:
            digits = text.removeprefix("-")
            is_valid = digits.isascii() and digits.isdecimal() and self.least <= int(text[:20]) <= self.most
            fault = None if is_valid else f"got {text[:40]!r}; expected {self.least} to {self.most}"
        return f"{argument or self.name}: {fault}" if fault else None


def _report(config: GroupConfig | TopicConfig, options: Mapping[str, ResourceSetting]) -> dict[str, str | int]:
    return {option.replace("-", "_"): item.shown(item.value(config)) for option, item in options.items()}


def listed_settings(report: Report) -> str:
    """Return a report of settings as text, such as `retries 16, consume on`."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report.items())


# ------------------------------------------------------------------------------
# Settings of groups. A new one needs a field of GroupConfig, a row here, and its type in GroupSettings.


_WIRE_NAMES: Final = {field.name: field.encode_name for field in msgspec.structs.fields(GroupConfig)}


def _field(
    field: str, text: str = "", option: str = "", *, least: int = 0, most: int = MAX_LONG, is_own: bool = False
) -> ResourceSetting:
    """Return the row of a field of GroupConfig; `text` is its help."""
    default = getattr(GroupConfig(""), field)
    return ResourceSetting(_WIRE_NAMES[field], field, default, text, option, least, most, is_own=is_own)


def _any_text(text: str) -> None:
    return None


GROUP_SETTINGS: Final = (
    _field("retry_max_times", "retries before a message is dead-lettered", "retries", least=-1, most=MAX_RETRY_TIMES),
    _field("retry_queues", "queues of its retry topic", "retry-queues", most=MAX_RETRY_QUEUES),
    _field("consume_enable", "return messages to its members", "consume"),
    _field("consume_orderly", "deliver shared messages in order by message group", "orderly"),
    _field("strict", "refuse members whose subscriptions differ from those of other members", "strict", is_own=True),
    ResourceSetting(
        PRIORITY_FACTOR,
        "priority_factor",
        GroupConfig("").priority_factor,
        "percentage of receives that begin with the most urgent messages, in topics of the type PRIORITY",
        "priority-factor",
        most=100,
        is_attribute=True,
    ),
    ResourceSetting(
        "rate",
        "rate",
        GroupConfig("").rate,
        "messages of each topic that its brokers together hand out to the group, such as 100/s or 30/m, or off",
        "rate",
        check=rate_fault,
        is_own=True,
    ),
    _field("broker_id", least=-1),
    _field("slow_broker_id", least=-1),
    ResourceSetting(LITE_BIND, check=topic_fault, is_attribute=True),
    ResourceSetting(LITE_MODEL, choices=(SHARED, EXCLUSIVE), is_attribute=True),
    ResourceSetting(LITE_QUOTA, least=-1, most=MAX_INT, is_attribute=True),
    ResourceSetting(LITE_EVENTS, least=10, most=MAX_INT, is_attribute=True),
    ResourceSetting(LITE_RESET_EXCLUSIVE, choices=("true", "false"), is_attribute=True),
    ResourceSetting(LITE_RESET_UNSUBSCRIBED, choices=("true", "false"), is_attribute=True),
    ResourceSetting(LITE_WILDCARD, check=_any_text, is_attribute=True),
)
GROUP_OPTIONS: Final = {setting.option: setting for setting in GROUP_SETTINGS if setting.option}
_GROUP_ATTRIBUTES: Final = {setting.name: setting for setting in GROUP_SETTINGS if setting.is_attribute}


class GroupSettings(TypedDict, total=False):
    """New values of a group's settings: the settings of `GROUP_OPTIONS`, by their fields."""

    retry_max_times: int
    retry_queues: int
    consume_enable: bool
    consume_orderly: bool
    strict: bool
    priority_factor: int
    rate: str


def new_group(name: str, settings: GroupSettings) -> GroupConfig:
    """Return the settings of a new group: the given ones, and the defaults of the others."""
    fields, attributes = _parts_of(settings)
    return GroupConfig(name, attributes=attributes, **fields)


def _parts_of(changes: GroupSettings) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of GroupConfig, and the attributes, that some settings are stored in."""
    given: Mapping[str, object] = changes
    settings = [setting for setting in GROUP_OPTIONS.values() if setting.field in given]
    fields = {setting.field: given[setting.field] for setting in settings if not setting.is_attribute}
    return fields, {setting.name: str(given[setting.field]) for setting in settings if setting.is_attribute}


def group_report(group: GroupConfig) -> dict[str, str | int]:
    """Return the settings of a group, and its attributes that have no option."""
    others = {name: value for name, value in group.attributes.items() if name != PRIORITY_FACTOR}
    return _report(group, GROUP_OPTIONS) | others


def group_settings_fault(group: GroupConfig) -> str | None:
    """Return why the settings of a group are invalid; None if they are valid."""
    fields = [setting for setting in GROUP_SETTINGS if not setting.is_attribute]
    faults = [setting.fault(setting.value(group)) for setting in fields]
    return next(filter(None, [*faults, *(_attribute_fault(*item) for item in group.attributes.items())]), None)


def _attribute_fault(name: str, value: str) -> str | None:
    if name not in _GROUP_ATTRIBUTES:
        return f"the group attribute {name[:100]!r} is unknown; use {', '.join(sorted(_GROUP_ATTRIBUTES))}"
    return _GROUP_ATTRIBUTES[name].fault(value)


class GroupListShape(Shape):
    group_config_list: list[dict[str, Any]] | None = None


@reads("subscription group", dict[str, Any])
def decode_group_change(data: dict[str, Any]) -> dict[str, Any]:
    """Decode UPDATE_AND_CREATE_SUBSCRIPTIONGROUP for `changed_group`."""
    return data


@reads("list of subscription groups", GroupListShape)
def decode_group_changes(data: GroupListShape) -> list[dict[str, Any]]:
    """Decode UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST for `changed_group`."""
    return data.group_config_list or []


def changed_group(change: Mapping[str, Any], get: Callable[[str], GroupConfig | None]) -> GroupConfig:
    """Return the settings of a group after a request.

    The request has all fields of Apache's brokers. Rocketlet's own fields that it lacks, and attributes that it does not
    name, keep their values. In it, `+name` or `name` sets an attribute, and `-name` removes the attribute.

    Args:
        change: the JSON object of the request
        get: returns the present settings of a group
    Raises:
        BodyError: the request or an attribute is invalid.
    """
    group = read_group(change)
    former = get(group.name)
    kept: dict[str, Any] = {}
    attributes: dict[str, str] = {}
    if former is not None:
        own = [setting for setting in GROUP_SETTINGS if setting.is_own and setting.name not in change]
        kept = {setting.field: setting.value(former) for setting in own}
        attributes = dict(former.attributes)
    for key, value in group.attributes.items():
        name = key.lstrip("+-")
        if key.startswith("-"):
            attributes.pop(name, None)
            continue
        fault = _attribute_fault(name, value)
        if fault:
            raise BodyError(fault)
        attributes[name] = value
    return msgspec.structs.replace(group, attributes=attributes, **kept)


def encode_group_change(table: Mapping[str, Any], changes: GroupSettings, removed: tuple[str, ...] = ()) -> bytes:
    """Encode the request that changes a group. Fields that only other brokers have are kept. Raises BodyError.

    Args:
        table: the group's JSON object at the broker
        changes: new values
        removed: names of attributes to remove
    """
    fields, attributes = _parts_of(changes)
    # brokers change the attributes that a request names, and keep the others
    named = {f"+{name}": value for name, value in attributes.items()} | {f"-{name}": "" for name in removed}
    return encode_group_in(table, msgspec.structs.replace(read_group(table), attributes=named, **fields))


# ------------------------------------------------------------------------------
# Settings of topics.


_PERM_HELP: Final = (
    "6 to write and read, 4 to read only, 2 to write only; 1 more for a template of topics that sends create"
)
_EXPIRATION_HELP: Final = "minutes without a message after which a lite topic is deleted, or -1 for never"
_DEDUP_HELP: Final = "time, such as 10m, for which a send with the message id of an earlier one gets its result, or off"
_NEW: Final = TopicConfig("")

TOPIC_SETTINGS: Final = (
    ResourceSetting(
        "writeQueueNums", "write_queues", "", "queues on each broker", "queues", 1, MAX_TOPIC_QUEUES, alias="queues"
    ),
    ResourceSetting(
        "readQueueNums", "read_queues", "", "queues that consumers read", "read-queues", 1, MAX_TOPIC_QUEUES
    ),
    ResourceSetting("perm", "perm", _NEW.perm, _PERM_HELP, "perm", least=0, most=MAX_PERM),
    ResourceSetting(
        MESSAGE_TYPE,
        "message_type",
        _NEW.message_type,
        "the only type of messages that it accepts",
        "type",
        choices=tuple(sorted(MESSAGE_TYPES)),
        is_attribute=True,
    ),
    ResourceSetting(
        LITE_EXPIRATION,
        "lite_expiration_min",
        _NEW.lite_expiration_min,
        _EXPIRATION_HELP,
        "lite-expiration",
        check=expiration_fault,
        is_attribute=True,
    ),
    ResourceSetting(
        RETRIED_FIRST,
        "retried_first",
        _NEW.retried_first,
        "keep the level of redelivered messages of a topic of the type PRIORITY, which otherwise come last",
        "retried-first",
        is_attribute=True,
    ),
    ResourceSetting(DEDUP, "dedup", _NEW.dedup, _DEDUP_HELP, "dedup", check=dedup_fault, is_attribute=True),
)
TOPIC_OPTIONS: Final = {setting.option: setting for setting in TOPIC_SETTINGS}
_TOPIC_ATTRIBUTES: Final = {setting.name: setting for setting in TOPIC_SETTINGS if setting.is_attribute}


class NewTopicSettings(TypedDict, total=False):
    """Settings of a new topic, by the arguments of `AdminClient.create_topic`."""

    queues: int
    perm: int
    message_type: str
    lite_expiration_min: int | None
    retried_first: bool
    dedup: str


class TopicSettings(NewTopicSettings, total=False):
    """New values of a topic's settings, by the arguments of `AdminClient.change_topic`."""

    read_queues: int


def topic_report(topic: TopicConfig) -> dict[str, str | int]:
    """Return the settings of a topic that differ from their defaults, and its queues and permission."""
    shown = {option: item for option, item in TOPIC_OPTIONS.items() if item.value(topic) != item.default}
    return _report(topic, shown | {"perm": TOPIC_OPTIONS["perm"]})


def changed_topic(topic: TopicConfig, former: TopicConfig | None, changes: str) -> TopicConfig:
    """Return the settings of a topic after a request: attributes that the request does not name keep their values.

    Args:
        topic: the fields of the request
        former: the present settings; None for a new topic
        changes: changes of attributes as in UPDATE_AND_CREATE_TOPIC: `+name=value` and `-name`, separated by commas
    Raises:
        BodyError: a change is invalid, or is for an unsupported attribute.
    """
    rows = _TOPIC_ATTRIBUTES.values()
    values: dict[str, Any] = {} if former is None else {row.field: row.value(former) for row in rows}
    for change in filter(None, changes.split(",")):
        name, _, text = change[1:].partition("=")
        row = _TOPIC_ATTRIBUTES.get(name)
        if row is None or change[0] not in "+-":
            raise BodyError(
                f"the topic attribute {change[:100]!r} is not supported; use +{MESSAGE_TYPE}=NORMAL, "
                f"+{LITE_EXPIRATION}=60, +{RETRIED_FIRST}=true or +{DEDUP}=10m"
            )
        fault = row.fault(text) if change[0] == "+" else None
        if fault:
            raise BodyError(fault)
        values[row.field] = _parsed(row, text) if change[0] == "+" else row.default
    found = replace(topic, sys_flag=topic.sys_flag & ~DEDUP_FLAG, **values)
    if found.is_lite and found.has_dedup:
        raise BodyError(f"{DEDUP}: not supported for a topic of the type LITE; use another topic")
    return found


def _parsed(row: ResourceSetting, text: str) -> Value:
    return _BOOLEANS[text] if isinstance(row.default, bool) else type(row.default)(text)


def topic_attributes(values: Mapping[str, Value]) -> str:
    """Return the changes of attributes for `changed_topic` that set some settings, by their fields."""
    given = [(row, values.get(row.field)) for row in _TOPIC_ATTRIBUTES.values()]
    texts = [(row, str(value).lower() if isinstance(value, bool) else value) for row, value in given]
    return ",".join(f"+{row.name}={text}" for row, text in texts if text is not None)
