"""Filter pushdown of batch reads: queues, offsets and tags that cannot pass the filters are not read, as far as a
filter can be pushed down.

Spark filters every row itself, so pushdown need not be exact. PySpark supports pushdown only for batch reads, and only
with `spark.sql.python.filterPushdown.enabled`. Without this setting, it rejects a reader with `pushFilters`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

from ..protocol import names
from ..protocol.config import MAX_EXPRESSION_TAGS
from ..protocol.names import Queue
from .batch import RocketletReader
from .checkpoint import Range, Ranges
from .options import BatchOptions, canonical
from .worker import plainly

_QUEUE: Final = {"topic": "topic", "brokerName": "broker_name", "queueId": "queue_id", "partition": "queue_id"}
_OFFSETS: Final = ("queueOffset", "offset")


class NarrowedReader(RocketletReader):
    """Reader of a batch with Spark's filters."""

    def __init__(self, options: BatchOptions, columns: tuple[str, ...]) -> None:
        super().__init__(options, columns)
        self._filters: list[Filter] = []

    @plainly()
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 (Spark's name)
        self._filters = filters
        tags = _tags(filters)
        read = self._options.read
        if tags is not None and read.filter == "*":
            self._options = replace(self._options, read=replace(read, filter=" || ".join(sorted(tags))))
        return filters

    def _narrowed(self, ranges: Ranges) -> Ranges:
        return {
            queue: _clipped(span, self._filters) for queue, span in ranges.items() if _may_have(queue, self._filters)
        }


def _may_have(queue: Queue, filters: Sequence[Filter]) -> bool:
    """Return True if rows of the queue may pass. Rows of a retry topic have the topic that they were first sent to."""
    for item in filters:
        wanted = _values(item)
        name = _QUEUE.get(_column(item))
        if wanted is None or name is None or (name == "topic" and queue.topic.startswith(names.RETRY_PREFIX)):
            continue
        if getattr(queue, name) not in wanted:
            return False
    return True


def _clipped(span: Range, filters: Sequence[Filter]) -> Range:
    begin, end = span
    for item in filters:
        value = getattr(item, "value", None)
        if _column(item) not in _OFFSETS or type(value) is not int:
            continue
        if isinstance(item, EqualTo | GreaterThan | GreaterThanOrEqual):
            begin = max(begin, value + isinstance(item, GreaterThan))
        if isinstance(item, EqualTo | LessThan | LessThanOrEqual):
            end = min(end, value + (not isinstance(item, LessThan)))
    return begin, max(begin, end)


def _tags(filters: Sequence[Filter]) -> set[str] | None:
    """Return the tags that rows may have; None if a tag expression cannot express them, or if no filter limits them."""
    found = [set(wanted) for item in filters if _column(item) == "tags" and (wanted := _values(item)) is not None]
    if not found:
        return None
    tags = set.intersection(*found)
    can_be_named = all(
        type(tag) is str and tag and tag == tag.strip() and "||" not in tag and tag != "*" for tag in tags
    )
    return tags if can_be_named and 0 < len(tags) <= MAX_EXPRESSION_TAGS else None


def _column(item: Filter) -> str:
    attribute: tuple[str, ...] = getattr(item, "attribute", ())
    return canonical(attribute[0]) if len(attribute) == 1 else ""


def _values(item: Filter) -> tuple[Any, ...] | None:
    """Return the values that the filter permits for its column; None for another type of filter."""
    if isinstance(item, EqualTo):
        return (item.value,)
    return tuple(item.value) if isinstance(item, In) else None
