"""Messages of queues from the newest back, in pages.

The position of a page is a store time and a number of messages of that time that earlier pages have shown, so that the
next page continues after them, whichever queues they are in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

from ...client.message import Message
from ...protocol.admin_bodies import Range
from ...protocol.names import Queue
from ..config import MAX_SEARCHED
from ..console import Console
from ..form import FieldFault, Form

_NONE_MS: Final = -1


class PagePosition(NamedTuple):
    """The place where a page starts: `skip` messages that were stored at `until_ms` are on earlier pages."""

    until_ms: int
    skip: int = 0

    def __str__(self) -> str:
        return f"{self.until_ms}-{self.skip}"


NEWEST: Final = PagePosition(2**63 - 1)


class MessagePage(NamedTuple):
    """One page: `messages`, newest first, and the position of the next page; None if there are no older messages."""

    messages: list[Message]
    older: PagePosition | None


class _Part(NamedTuple):
    """What was read of a queue. Messages that were stored until `floor_ms` may be missing."""

    messages: Collection[Message]
    floor_ms: int


def position_of(form: Form, newest: PagePosition = NEWEST) -> PagePosition:
    """Return the position in the field `before` of a form. Raises FieldFault."""
    given = form.text("before")
    if not given:
        return newest
    until, _, skip = given.partition("-")
    if not (len(given) < 40 and until.isdecimal() and skip.isdecimal() and int(skip) <= MAX_SEARCHED):
        raise FieldFault("before", f"{given[:40]!r} is not the position of a page")
    return PagePosition(int(until), int(skip))


async def page_back(
    console: Console,
    ranges: Mapping[Queue, Range],
    position: PagePosition,
    limit: int,
    *,
    begin_ms: int = 0,
    tags: str = "*",
    is_wanted: Callable[[Message], bool] | None = None,
    searched: int = MAX_SEARCHED,
) -> MessagePage:
    """Return up to `limit` messages that were stored since `begin_ms`, have the tags and are wanted.

    A page of a search reads up to `searched` messages. It may have fewer messages than `limit`, or none, and an older
    page that continues the search.
    """
    spans = {queue: span for queue, span in ranges.items() if span.begin < span.end}
    searches = tags != "*" or is_wanted is not None
    window = limit + position.skip
    if searches:
        window = max(window, searched // max(len(spans), 1))
    while True:
        parts = await asyncio.gather(
            *(_read(console, *item, position, window, limit, tags, is_wanted) for item in spans.items())
        )
        floor_ms = max((part.floor_ms for part in parts), default=_NONE_MS)
        found = [
            message
            for part in parts
            for message in part.messages
            if begin_ms <= message.store_ms <= position.until_ms and (not searches or message.store_ms > floor_ms)
        ]
        found.sort(key=lambda message: (message.store_ms, message.queue, message.queue_offset), reverse=True)
        found = found[position.skip :]
        if found or floor_ms < max(position.until_ms, begin_ms):
            break
        window *= 2  # all that was read of a queue has one store time
    shown = found[:limit]
    if len(found) > limit or (shown and not searches and floor_ms >= begin_ms):
        last_ms = shown[-1].store_ms
        skip = sum(message.store_ms == last_ms for message in shown)
        return MessagePage(shown, PagePosition(last_ms, skip + (position.skip if last_ms == position.until_ms else 0)))
    return MessagePage(shown, PagePosition(floor_ms) if floor_ms >= begin_ms else None)


async def _read(
    console: Console,
    queue: Queue,
    span: Range,
    position: PagePosition,
    window: int,
    limit: int,
    tags: str,
    is_wanted: Callable[[Message], bool] | None,
) -> _Part:
    """Read the `window` messages of a queue before a position. Keep one more than a page can have, so that the caller
    detects that there are more."""
    end = span.end
    if position != NEWEST:
        end = min(await console.admin.offset_at(queue, position.until_ms + 1), end)
    begin = max(span.begin, end - window)
    messages: deque[Message] = deque(maxlen=limit + position.skip + 1)
    async for some in console.admin.read(queue, begin, end, expression=tags):
        # a thread checks them, because bodies may be compressed and a broker may use the event loop
        messages += some if is_wanted is None else await asyncio.to_thread(list, filter(is_wanted, some))
    if begin == span.begin:
        return _Part(messages, _NONE_MS)
    first_ms = await console.oldest.of(queue, begin)
    return _Part(messages, _NONE_MS if first_ms is None else first_ms)
