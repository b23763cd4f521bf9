"""Every limit of the console."""

from __future__ import annotations

from typing import Final

DEFAULT_PORT: Final = 9890  # the port, unless another one is given
LIVE_INTERVAL_S: Final = 1.0  # between two looks of an open page
MAX_STREAMS: Final = 64  # pages that are open and live at once
STOP_S: Final = 3.0  # how long open requests may take when the console stops

PAGE_ROWS: Final = 50  # rows of a list on one page
NAMES_INTERVAL_S: Final = 5.0  # between two lists of all groups and topics
SHOWN_INTERVAL_S: Final = 2.0  # between two samples of the groups and topics on a page
SAMPLE_INTERVAL_S: Final = 10.0  # for groups that no page shows
ASKING_SHARE: Final = (
    0.1  # the part of the time in which samples are asked for; with many groups each is asked less often
)
FIRST_SAMPLE_S: Final = 0.5  # how long a page that is loaded waits for samples; the others come live
RATE_S: Final = 30.0  # so far back offsets say how fast a group reads; commits may be seconds apart
LAG_POINTS: Final = 360  # samples of a group; an hour at one in 10 s

MAX_OLDEST: Final = 10_000  # queues whose first message is known
MAX_WATCHES: Final = 32  # groups that are looked at closely
WATCH_INTERVAL_S: Final = 0.9  # between two looks at a group that a page shows
FINDINGS_INTERVAL_S: Final = 5.0  # between two judgements of a group that a page shows
QUEUE_POINTS: Final = 300  # lag of one queue; five minutes while somebody looks
MAX_EVENTS: Final = 10_000  # events kept for a group that a page shows
TIMELINE_S: Final = (60, 300, 900)
TIMELINE_LEAST_MS: Final = 10_000  # for a group that has just begun
SHOWN_EVENTS: Final = 100  # events that a page shows
SHOWN_HAND_OVERS: Final = 50  # hand-overs that a page shows

MAX_RETRIES: Final = 1000  # retries that a group's form takes
MAX_RETRY_QUEUES: Final = 64  # retry queues that a group's form takes
MAX_FORM_BYTES: Final = 256 * 1024  # a form, as browsers encode it
TYPED_BODY_BYTES: Final = (
    32 * 1024
)  # a body that a form shows when its message is copied; larger ones are copied unseen
PRODUCER_GROUP: Final = "console"  # as which messages are sent
MAX_NOTICES: Final = 100  # notices of changes that are kept for the next page
MAX_FOUND: Final = 200  # messages of one search
LISTED_TOPICS: Final = 500  # topics that a field suggests
TAIL_MESSAGES: Final = 100  # messages that a tail keeps on the page
TAIL_BATCH: Final = 200  # newest messages of a queue that a tail takes in one look; it names what it skips
SHOWN_BODY_BYTES: Final = 64 * 1024  # how much of a body a page shows
SHOWN_HEX_BYTES: Final = 4096  # the same in hex
PREVIEW_CHARS: Final = 160  # how much of a body a list shows
MAX_REPLAY: Final = 10_000  # dead letters that are sent again at once

OVERVIEW_ROWS: Final = 50  # groups on the first page
CATCH_UP_S: Final = 120.0  # so far back lags say when a group will have caught up
