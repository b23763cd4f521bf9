"""Records of Apache's message trace: who sent a message and who handled it, when, for how long, and with what outcome.

A message of the trace topic has many records in its body, and in its keys the ids and keys of all messages that they are
about: by them readers find it. Fields are separated by \\x01, records by \\x02 (TraceDataEncoder.encoderFromContextBean).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
REGION: Final = "DefaultRegion"
_FIELD, _RECORD = "\x01", "\x02"


class Kind(IntEnum):
    """The kind of a message: org.apache.rocketmq.common.message.MessageType."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAYED = 3


class Outcome(IntEnum):
    """How a handler ended: org.apache.rocketmq.client.consumer.listener.ConsumeReturnType."""

    SUCCESS = 0
    EXCEPTION = 2
    FAILED = 4


class About(NamedTuple):
    """The message that a record is about; `keys` separated by spaces."""

    message_id: str
    keys: str = ""


def sent(
    about: About, *, time_ms: int, group: str, topic: str, tag: str, store_host: str, size: int, took_ms: int,
    kind: Kind, offset_id: str,
) -> str:  # fmt: skip
    """A message that a broker has acknowledged. `time_ms`: when its send began; `store_host`: the broker's `host:port`."""
    return _record(
        "Pub", time_ms, REGION, group, topic, about.message_id, tag, about.keys, store_host, size, took_ms, int(kind),
        offset_id, "true",
    )  # fmt: skip


def transaction_ended(
    about: About,
    *,
    time_ms: int,
    group: str,
    topic: str,
    tag: str,
    store_host: str,
    commits: bool | None,
    is_check: bool,
) -> str:
    """An outcome was told to the broker at `store_host`, which had asked for it if `is_check`."""
    state = {True: "COMMIT_MESSAGE", False: "ROLLBACK_MESSAGE", None: "UNKNOW"}[commits]  # LocalTransactionState
    return _record(
        "EndTransaction", time_ms, REGION, group, topic, about.message_id, tag, about.keys, store_host, int(Kind.COMMIT),
        about.message_id, state, "true" if is_check else "false",
    )  # fmt: skip


def before_handling(about: About, *, time_ms: int, group: str, handling_id: str, retries: int) -> str:
    """A handler is called. `handling_id` pairs this with what comes after it; messages of a batch share it."""
    keys = about.keys or " "  # Java's split() drops an empty last field, and the decoder asks for eight
    return _record("SubBefore", time_ms, REGION, group, handling_id, about.message_id, retries, keys)


def after_handling(about: About, *, time_ms: int, group: str, handling_id: str, took_ms: int, outcome: Outcome) -> str:
    is_success = "true" if outcome is Outcome.SUCCESS else "false"
    return _record(
        "SubAfter", handling_id, about.message_id, took_ms, is_success, about.keys, int(outcome), time_ms, group
    )


def _record(*fields: str | int) -> str:
    """A separator inside of a field would make two of it."""
    return _FIELD.join(str(field).translate(_NO_SEPARATORS) for field in fields) + _RECORD


_NO_SEPARATORS: Final = str.maketrans({_FIELD: " ", _RECORD: " "})
