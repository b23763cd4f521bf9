"""Events of CloudEvents 1.0 as messages, in binary and in structured mode.

The binary mode is that of CloudEvents' Java SDK: each attribute is a property with the prefix `CE_`, and the body is the
data. The structured mode has the event as JSON in the body. Java's SDK writes extensions without the prefix, and does not
read these itself; here they have the prefix, with which both read them.
"""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypedDict

import orjson

from ..protocol.message import MessageError
from .errors import MessageIllegal
from .message import Message

PREFIX: Final = "CE_"
CONTENT_TYPE: Final = "CE_contenttype"
STRUCTURED: Final = "application/cloudevents+json"
SPEC_VERSION: Final = "1.0"
NO_DATA: Final = b"\0"  # the body of an event without data, because a body may not be empty
_NAME: Final = re.compile(r"[a-z0-9]+").fullmatch
_JSON: Final = re.compile(r"[^/]+/([^;]+\+)?json\s*(;.*)?", re.IGNORECASE).fullmatch
_TEXTS: Final = ("id", "source", "type", "subject", "datacontenttype", "dataschema")
_REQUIRED: Final = ("id", "source", "type")
_OWN: Final = frozenset((*_TEXTS, "specversion", "time", "data", "data_base64"))


class EventMessage(TypedDict):
    """The arguments of `Producer.send` for an event."""

    body: bytes
    properties: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CloudEvent:
    """An event of CloudEvents 1.0.

        await producer.send("orders", **CloudEvent("order.paid", "/shop", b'{"order": 7}').binary())
        event = CloudEvent.of(message)

    Attributes:
        type, source, id: what happened, where, and an id that is unique for the source. Default of `id`: a new UUID.
        data: the data; None for an event without data.
        datacontenttype: the media type of the data. Default: JSON.
        dataschema, subject: the URI of the data's schema, and what the event is about.
        time: when it happened, as a datetime with a time zone. Default: now; None for an event without a time.
        extensions: further attributes, whose names have lower-case letters and digits only. In binary mode consumers get
            their values as str.

    Raises MessageIllegal for an invalid attribute.
    """

    type: str
    source: str
    data: bytes | None = None
    datacontenttype: str | None = "application/json"
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    dataschema: str | None = None
    subject: str | None = None
    time: datetime | None = field(default_factory=lambda: datetime.now(UTC))
    extensions: Mapping[str, str | int | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if (value is not None or name in _REQUIRED) and not (isinstance(value, str) and value.strip()):
                raise MessageIllegal(f"{name}: {value!r} is not a text that is not blank; give one")
        if self.data is not None and not isinstance(self.data, bytes):
            raise MessageIllegal(f"data: expected bytes, got {type(self.data).__name__}; encode it")
        if self.time is not None and (not isinstance(self.time, datetime) or self.time.tzinfo is None):
            raise MessageIllegal(f"time: {self.time!r} is not a datetime with a time zone; give one")
        for name, item in self.extensions.items():
            if not _NAME(name) or name in _OWN:
                raise MessageIllegal(
                    f"extensions: {name!r} is not a name of lower-case letters and digits that is free"
                )
            if not isinstance(item, str | int):
                raise MessageIllegal(f"extensions: {name}: expected str, int or bool, got {type(item).__name__}")

    def binary(self) -> EventMessage:
        """Return the message of the event in binary mode: the data as the body, and the attributes as properties."""
        attributes: dict[str, str | int | bool] = {"specversion": SPEC_VERSION, **self._attributes(), **self.extensions}
        content_type = None if self.data is None else attributes.pop("datacontenttype", None)
        found = {PREFIX + name: _text(value) for name, value in attributes.items() if name != "datacontenttype"}
        if content_type is not None:
            found[CONTENT_TYPE] = str(content_type)
        return {"body": self.data or NO_DATA, "properties": found}

    def structured(self) -> EventMessage:
        """Return the message of the event in structured mode: the whole event as JSON in the body.

        Raises MessageIllegal if the data is not JSON although `datacontenttype` says so.
        """
        found: dict[str, Any] = {"specversion": SPEC_VERSION, **self._attributes(), **self.extensions}
        if self.data is None:
            found.pop("datacontenttype", None)
        elif self.datacontenttype is None or _JSON(self.datacontenttype):
            try:
                found["data"] = orjson.Fragment(orjson.dumps(orjson.loads(self.data)))
            except orjson.JSONDecodeError as error:
                raise MessageIllegal(f"data: not JSON as datacontenttype says: {error}; correct one of them") from None
        else:
            found["data_base64"] = base64.b64encode(self.data).decode()
        return {"body": orjson.dumps(found), "properties": {CONTENT_TYPE: STRUCTURED}}

    def _attributes(self) -> dict[str, str]:
        found = {name: value for name in _TEXTS if (value := getattr(self, name)) is not None}
        return found if self.time is None else {**found, "time": self.time.isoformat()}

    @classmethod
    def of(cls, message: Message) -> CloudEvent:
        """Return the event of a message in either mode. Raises MessageError if the message is not an event."""
        content_type = message.properties.get(CONTENT_TYPE)
        if content_type is not None and content_type.lower().startswith("application/cloudevents"):
            return cls.from_json(message.body)
        found: dict[str, Any] = {
            name.removeprefix(PREFIX): value
            for name, value in message.properties.items()
            if name.startswith(PREFIX) and name != CONTENT_TYPE
        }
        is_empty = content_type is None and message.body == NO_DATA
        return _event({**found, "datacontenttype": content_type}, None if is_empty else message.body)

    @classmethod
    def from_json(cls, body: bytes) -> CloudEvent:
        """Return the event of a body in structured mode: `Consumer(decode=CloudEvent.from_json)`.

        Raises MessageError if the body is not an event.
        """
        try:
            found = orjson.loads(body)
            data: bytes | None = None
            if not isinstance(found, dict):
                raise MessageError(f"the event is {type(found).__name__}, and not a JSON object")
            if "data_base64" in found:
                data = base64.b64decode(found.pop("data_base64"), validate=True)
            elif (value := found.pop("data", None)) is not None:
                content_type = found.get("datacontenttype")
                is_json = not isinstance(value, str) or content_type is None or _JSON(str(content_type))
                data = orjson.dumps(value) if is_json else value.encode()
        except (ValueError, TypeError, binascii.Error) as error:
            raise MessageError(f"the event cannot be decoded: {error}") from None
        return _event(found, data)


def _event(attributes: dict[str, Any], data: bytes | None) -> CloudEvent:
    """Return an event from its attributes, of which `time` is a text. Raises MessageError."""
    version = attributes.pop("specversion", None)
    if version != SPEC_VERSION:
        raise MessageError(f"specversion: expected {SPEC_VERSION}, got {version!r}; the message is not such an event")
    time, texts = attributes.pop("time", None), {name: attributes.pop(name, None) for name in _TEXTS}
    try:
        when = None if time is None else datetime.fromisoformat(time)
        return CloudEvent(data=data, time=when, extensions=attributes, **texts)
    except (ValueError, TypeError) as error:
        raise MessageError(f"the event is invalid: {error}") from None


def _text(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


__all__ = ["CloudEvent", "EventMessage"]
